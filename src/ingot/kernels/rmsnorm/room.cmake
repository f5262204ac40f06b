ingot_room(TURING ".")
ingot_ptx_test(FILTER "RmsNorm*Cuda.*" TURING "RmsNorm*Cuda.*Small:RmsNormBackwardCuda.SumsIntegers*:RmsNormCuda.KeepsNan*")
foreach(type bf16 f16 float)
  ingot_instances(rmsnorm_${type} EMULATED FROM forward/rmsnorm_large.cuh forward/rmsnorm_rows.cuh TEMPLATES
    "auto pick_rmsnorm<${type}>(DType, const RmsNormConfig&, bool) -> void (*)(RmsNormParams)"
    "auto pick_rmsnorm_large<${type}>(DType, const RmsNormConfig&, bool) -> void (*)(LargeParams)")
endforeach()
