ingot_room(HOPPER "^hopper_" TURING "^expert_linear\\.cu$")
ingot_ptx_test(FILTER "ExpertLinearCuda.*" TURING "ExpertLinearCuda.*")
foreach(type bf16 f16)
  ingot_instances(hopper_${type} IN expert_hopper FROM hopper/products.cuh TEMPLATES
    "void forward<${type}>(const ExpertLinear&, Stream)"
    "void backward_dx<${type}>(const ExpertLinearBackward&, Stream)"
    "void backward_dw<${type}>(const ExpertLinearBackward&, Stream)")
endforeach()
