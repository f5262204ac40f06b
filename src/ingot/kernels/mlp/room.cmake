# Loops in fp64 take minutes of a core. Tests of tensors beyond 2^31 elements need tens of gigabytes each.
ingot_room(HOPPER "(to_|few_rows|many_rows)" TEST_SHARDS 24 HUGE_TESTS "*MoreThanTwoToThe31*")
# Without the tests of the dispatch, which chooses kernels without PTX on Hopper. A prime number of shards, so that the long cases of different types
# fall into different shards.
ingot_ptx_test(FILTER "*portable*-*TheEntryPoints*:*TakesLeading*:*MoreThanTwoToThe31*" SHARDS 7)

# Divided so that nvcc needs at most half a minute for each unit.
set(call "(const Mlp&, Stream)")
foreach(type bf16 f16)
  # to 128
  foreach(norms false true)
    ingot_instances(few_rows_forward_${type}_${norms} FROM to_128/few_rows_forward.cuh TEMPLATES
      "void launch_mlp_to_128_few_rows<${type}, ${norms}>${call}")
  endforeach()
  ingot_instances(few_rows_backward_${type} FROM to_128/few_rows_chain.cuh to_128/few_rows_sums.cuh
    IN to_128_few_rows_backward TEMPLATES
    "void launch_chain<${type}>(const MlpChainMaps&, const Chain&, const ChainLaunch&, Stream)"
    "void launch_sums<${type}>(const MlpSumMaps&, const Sums&, const SumLaunch&, Stream)")
  ingot_instances(many_rows_${type} FROM to_128/many_rows.cuh TEMPLATES
    "void launch_mlp_to_128<${type}, 64, false>${call}" "void launch_mlp_to_128<${type}, 128, false>${call}")
  foreach(width 64 128)
    ingot_instances(many_rows_${type}_${width}_saves FROM to_128/many_rows.cuh TEMPLATES
      "void launch_mlp_to_128<${type}, ${width}, true>${call}")
  endforeach()
  foreach(saves false true)
    ingot_instances(many_rows_linear_output_${type}_${saves} FROM to_128/many_rows_linear_output.cuh TEMPLATES
      "void launch_mlp_to_128_linear_output<${type}, ${saves}>${call}")
  endforeach()
  ingot_instances(many_rows_streamed_${type} FROM to_128/many_rows_streamed.cuh TEMPLATES
    "void launch_mlp_to_128_streamed<${type}, false>${call}" "void launch_mlp_to_128_streamed<${type}, true>${call}")

  # to 256
  set(general "void launch_mlp_to_256<${type}, MlpTo256Kernel::general>${call}")
  ingot_instances(to_256_${type}_general FROM to_256/forward.cuh TEMPLATES ${general})
  foreach(kernel inference keeps values)
    ingot_instances(to_256_${type}_${kernel} FROM to_256/forward.cuh ELSEWHERE ${general} TEMPLATES
      "void launch_mlp_to_256<${type}, MlpTo256Kernel::${kernel}>${call}")
  endforeach()
  ingot_instances(to_256_${type}_slopes FROM to_256/forward.cuh TEMPLATES
    "void launch_mlp_to_256_slopes<${type}>(const Mlp&, const Tensor&, Stream)")
  ingot_instances(to_256_backward_${type} FROM to_256/backward.cuh IN to_256_backward TEMPLATES
    "void launch<${type}>(const Maps&, const Arguments&, const LaunchAt&, Stream)")

  # to 512
  foreach(pass 160 192 224 256)
    ingot_instances(to_512_${type}_${pass} FROM to_512/forward.cuh TEMPLATES
      "void launch_mlp_to_512<${type}, ${pass}, false>${call}" "void launch_mlp_to_512<${type}, ${pass}, true>${call}")
  endforeach()
  ingot_instances(to_512_few_rows_${type} FROM to_512/few_rows.cuh TEMPLATES
    "void launch_mlp_to_512_few_rows<${type}>(const Mlp&, int, Stream)")
  ingot_instances(to_512_few_rows_backward_${type} FROM to_512/few_rows_chain.cuh to_512/few_rows_sums.cuh
    IN to_512_few_rows_backward TEMPLATES
    "void launch_chain<${type}>(const MlpChainMaps&, const Chain&, const ChainLaunch&, Stream)"
    "void launch_sums<${type}>(const MlpSumMaps&, const Sums&, int, Stream)")
  set(chains "")
  set(sums "")
  foreach(half 192 224 256)
    list(APPEND chains "void launch_chain<${type}, ${half}>(const MlpChainMaps&, const Chain&, const ChainLaunch&, Stream)")
    list(APPEND sums "void launch_sums<${type}, ${half}>(const MlpSumMaps&, const Sums&, int, Stream)")
  endforeach()
  ingot_instances(to_512_backward_${type} FROM to_512/chain.cuh to_512/sums.cuh IN to_512_backward TEMPLATES ${chains} ${sums})
endforeach()

# Matrices without Hopper's instructions, for sm_80 on.
foreach(type bf16 f16 float)
  set(emulated EMULATED)
  if(type STREQUAL "bf16") # the same lines as f16
    set(emulated "")
  endif()
  ingot_instances(portable_${type} ${emulated} PTX 80 FROM portable/portable.cuh TEMPLATES
    "void launch_portable_forward<${type}>(const PortableRows&, const PortableConfig&, int, Stream)"
    "void launch_portable_chain<${type}>(const PortableRows&, const PortableConfig&, int, Stream)"
    "void launch_portable_grad<${type}>(const PortableGrad&, int, Stream)")
endforeach()
