# The emulated tests run the instances too.
foreach(format bf16 fp8 mxfp4)
  set_property(GLOBAL APPEND PROPERTY INGOT_EMULATED_models_gpt_oss_decode ${CMAKE_CURRENT_LIST_DIR}/decode_${format}.cu
    ${CMAKE_CURRENT_LIST_DIR}/megakernel_${format}.cu)
endforeach()
set_property(GLOBAL APPEND PROPERTY INGOT_EMULATED_models_gpt_oss_decode ${CMAKE_CURRENT_LIST_DIR}/megakernel_traced.cu ${CMAKE_CURRENT_LIST_DIR}/megakernel_screened.cu
  ${CMAKE_CURRENT_LIST_DIR}/megakernel_ranks.cu ${CMAKE_CURRENT_LIST_DIR}/megakernel_traced_ranks.cu
  ${CMAKE_CURRENT_LIST_DIR}/megakernel_screened_ranks.cu ${CMAKE_CURRENT_LIST_DIR}/ranks.cu)
