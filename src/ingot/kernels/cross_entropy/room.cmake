ingot_room(HOPPER "^(capped|exponentials)_" TURING "^cross_entropy\\.cu$")
ingot_ptx_test(FILTER "CrossEntropyCuda.*:-CrossEntropyCuda.OfALinearLayerAgreesWithTheCpuInFp64" TURING "CrossEntropyCuda.Agrees*")
set(call "(const Tensor&, const Tensor&, const Tensor&, double, const")
ingot_instances(portable_capped FROM ingot/gpu/gemm/portable/core.cuh capped.cuh TEMPLATES
  "void launch_capped<gemm::PortableCore>${call} Capped&, Stream)")
foreach(type bf16 f16)
  ingot_instances(portable_exponentials_${type} FROM ingot/gpu/gemm/portable/core.cuh exponentials.cuh TEMPLATES
    "void launch_exponentials<gemm::PortableCore, ${type}>${call} Exponentials&, Stream)")
endforeach()
