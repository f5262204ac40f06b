ingot_room(HOPPER "^gated_" TURING "^swiglu\\.cu$")
ingot_ptx_test(FILTER "SwigluGateCuda.*" TURING "SwigluGateCuda.*")
foreach(type bf16 f16)
  ingot_instances(portable_gated_${type} FROM ingot/gpu/gemm/portable/core.cuh gated.cuh TEMPLATES
    "void launch_gated<gemm::PortableCore, ${type}>(const GatedLinear&, Stream)"
    "void launch_gated_dx<gemm::PortableCore, ${type}>(const GatedGradients&, Stream)"
    "void launch_gated_dw<gemm::PortableCore, ${type}>(const GatedGradients&, Stream)")
endforeach()
