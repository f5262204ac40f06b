ingot_room(HOPPER "^grouped_")
ingot_ptx_test(FILTER "GroupedCuda.*")
foreach(format bf16 fp8 mxfp4)
  ingot_instances(portable_${format} EMULATED IN grouped_portable FROM portable/portable.cuh TEMPLATES
    "Kernel kernel_of<WeightFormat::${format}>(int, bool)")
endforeach()
