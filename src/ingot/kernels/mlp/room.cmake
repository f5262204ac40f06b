# Loops in fp64 take minutes of one core. Tests of tensors beyond 2^31 elements want tens of gigabytes each.
ingot_room(TEST_SHARDS 24 HUGE_TESTS "*MoreThanTwoToThe31*")
# Without the tests that leave the form to dispatch, which on Hopper asks for kernels that have no PTX. A prime number of shards, so that the
# types of a long case do not share one with those of the other.
ingot_ptx_test(FILTER "*portable*-*TheEntryPoints*:*TakesLeading*:*MoreThanTwoToThe31*" SHARDS 7)

# Cut so that no unit takes nvcc more than half a minute.
set(call "(const Mlp&, Stream)")
foreach(type bf16 f16)
  ingot_instances(mlp_few_rows_${type} FROM mlp_few_rows.cuh TEMPLATES "void launch_mlp_few_rows<${type}, false>${call}")
  ingot_instances(mlp_few_rows_${type}_norm FROM mlp_few_rows.cuh TEMPLATES "void launch_mlp_few_rows<${type}, true>${call}")
  ingot_instances(mlp_few_rows_backward_${type} FROM mlp_few_rows_backward.cuh IN few_rows_backward TEMPLATES
    "void launch_chain<${type}>(const MlpChainMaps&, const Chain&, const ChainLaunch&, Stream)"
    "void launch_sums<${type}>(const MlpSumMaps&, const Sums&, const SumLaunch&, Stream)")

  ingot_instances(mlp_sm90_${type} FROM mlp_sm90.cuh TEMPLATES
    "void launch_mlp_sm90<${type}, 64, false>${call}" "void launch_mlp_sm90<${type}, 128, false>${call}")
  ingot_instances(mlp_sm90_${type}_training FROM mlp_sm90.cuh TEMPLATES "void launch_mlp_sm90<${type}, 128, true>${call}")
  ingot_instances(mlp_sm90_${type}_training_64 FROM mlp_sm90.cuh TEMPLATES "void launch_mlp_sm90<${type}, 64, true>${call}")
  ingot_instances(mlp_sm90_${type}_plain FROM mlp_sm90_plain.cuh TEMPLATES "void launch_mlp_sm90_plain<${type}, false>${call}")
  ingot_instances(mlp_sm90_${type}_plain_training FROM mlp_sm90_plain.cuh TEMPLATES "void launch_mlp_sm90_plain<${type}, true>${call}")
  ingot_instances(mlp_sm90_deep_${type} FROM mlp_sm90_deep.cuh TEMPLATES
    "void launch_mlp_sm90_deep<${type}, false>${call}" "void launch_mlp_sm90_deep<${type}, true>${call}")

  set(rare "void launch_mlp_wide<${type}, MlpWideKernel::rare>${call}")
  ingot_instances(mlp_wide_${type}_rare FROM mlp_wide.cuh TEMPLATES ${rare})
  foreach(kernel inference keeps values)
    ingot_instances(mlp_wide_${type}_${kernel} FROM mlp_wide.cuh ELSEWHERE ${rare} TEMPLATES
      "void launch_mlp_wide<${type}, MlpWideKernel::${kernel}>${call}")
  endforeach()
  ingot_instances(mlp_wide_${type}_slopes FROM mlp_wide.cuh TEMPLATES
    "void launch_mlp_wide_slopes<${type}>(const Mlp&, const Tensor&, Stream)")
  ingot_instances(mlp_wide_backward_${type} FROM mlp_wide_backward.cuh IN wide_backward TEMPLATES
    "void launch<${type}>(const Maps&, const Arguments&, const LaunchAt&, Stream)")

  foreach(pass 160 192 224 256)
    set(saves "void launch_mlp_broad<${type}, ${pass}, true, false>${call}")
    ingot_instances(mlp_broad_${type}_${pass} FROM mlp_broad.cuh ELSEWHERE ${saves} TEMPLATES
      "void launch_mlp_broad<${type}, ${pass}, false, false>${call}")
    ingot_instances(mlp_broad_${type}_${pass}_training FROM mlp_broad.cuh TEMPLATES ${saves}
      "void launch_mlp_broad<${type}, ${pass}, true, true>${call}")
  endforeach()
  ingot_instances(mlp_broad_few_rows_${type} FROM mlp_broad_few_rows.cuh TEMPLATES
    "void launch_mlp_broad_few_rows<${type}>(const Mlp&, int, Stream)")
  set(chains "")
  set(sums "")
  set(both "")
  foreach(half 192 224 256)
    list(APPEND chains "void launch_chain<${type}, ${half}>(const MlpChainMaps&, const Chain&, const ChainLaunch&, Stream)")
    list(APPEND sums "void launch_sums<${type}, ${half}>(const MlpSumMaps&, const Sums&, int, Stream)")
    list(APPEND both "void launch_both<${type}, ${half}>(const BothMaps&, const Both&, const ChainLaunch&, Stream)")
  endforeach()
  ingot_instances(mlp_broad_backward_${type} FROM mlp_broad_backward_chain.cuh mlp_broad_backward_sums.cuh IN broad_backward
    TEMPLATES ${chains} ${sums})
  ingot_instances(mlp_broad_backward_${type}_both FROM mlp_broad_backward_both.cuh IN broad_backward TEMPLATES ${both})
endforeach()

# Matrices without Hopper's instructions, for sm_80 on.
foreach(type bf16 f16 float)
  set(emulated EMULATED)
  if(type STREQUAL "bf16") # the same lines as f16
    set(emulated "")
  endif()
  ingot_instances(mlp_portable_${type} ${emulated} PTX 80 FROM mlp_portable.cuh TEMPLATES
    "void launch_portable_forward<${type}>(const PortableRows&, const PortableConfig&, int, Stream)"
    "void launch_portable_chain<${type}>(const PortableRows&, const PortableConfig&, int, Stream)"
    "void launch_portable_grad<${type}>(const PortableGrad&, int, Stream)")
endforeach()
