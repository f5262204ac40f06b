ingot_room(HOPPER "^newton_schulz_")
ingot_ptx_test(FILTER "MuonCuda.*:-MuonCuda.UpdatesAgreeWithFp64")
ingot_instances(portable_newton_schulz FROM ingot/gpu/gemm/portable/core.cuh newton_schulz.cuh TEMPLATES
  "Tensor launch_iteration<gemm::PortableCore>(const IterationBank&, const Coefficients&, Stream)")
