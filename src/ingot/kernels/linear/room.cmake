ingot_room(HOPPER "^cuda/")
foreach(type bf16 f16)
  ingot_instances(portable_products_${type} FROM ingot/gpu/gemm/portable/core.cuh cuda/core_product.cuh TEMPLATES
    "void launch_core_product<gemm::PortableCore, ${type}>(const PlainProduct&, int, Stream)")
  ingot_instances(portable_activated_${type} FROM ingot/gpu/gemm/portable/core.cuh cuda/activated.cuh TEMPLATES
    "void launch_activated<gemm::PortableCore, ${type}>(const Linear&, Stream)"
    "void launch_sloped<gemm::PortableCore, ${type}>(const LinearBackward&, Stream)")
endforeach()
