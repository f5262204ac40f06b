ingot_room(HOPPER "^(hopper/|attention_(forward|query_gradient|key_gradient)_)")
ingot_ptx_test(FILTER "AttentionCudaNumbers.*:AttentionCuda.MatchesFp64Small:AttentionCuda.AddsTo*:AttentionCuda.RepeatsBitForBit*" SHARDS 4)
foreach(type bf16 f16)
  ingot_instances(attention_forward_${type} IN attention_hopper FROM hopper/forward.cuh TEMPLATES
    "ForwardKernel forward_kernel<${type}>(int, bool)")
  ingot_instances(attention_query_gradient_${type} IN attention_hopper
    FROM hopper/query_gradient.cuh hopper/query_product.cuh TEMPLATES
    "QueryGradientKernel query_gradient_kernel<${type}>(int, bool)"
    "QueryProductKernel query_product_kernel<${type}>()")
  ingot_instances(attention_key_gradient_${type} IN attention_hopper FROM hopper/key_gradient.cuh TEMPLATES
    "KeyGradientKernel key_gradient_kernel<${type}>(int, bool)"
    "KeyGradientKernel joint_gradient_kernel<${type}>(int)"
    "KeyGradientKernel storing_gradient_kernel<${type}>()"
    "void (*query_sums_kernel<${type}>(int))(const QuerySumParams)")
  ingot_instances(attention_portable_${type} EMULATED IN attention_portable
    FROM portable/forward.cuh portable/query_gradient.cuh portable/key_gradient.cuh TEMPLATES
    "ForwardKernel forward_kernel<${type}>(int, const gpu::Limits&)"
    "BackwardKernel query_gradient_kernel<${type}>(int, const gpu::Limits&)"
    "BackwardKernel key_gradient_kernel<${type}>(int, bool, const gpu::Limits&)")
endforeach()
