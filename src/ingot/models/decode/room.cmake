# The emulated tests run the instances too.
foreach(format bf16 fp8 mxfp4)
  set_property(GLOBAL APPEND PROPERTY INGOT_EMULATED_models_decode ${CMAKE_CURRENT_LIST_DIR}/phased/decode_${format}.cu
    ${CMAKE_CURRENT_LIST_DIR}/megakernel/megakernel_${format}.cu)
endforeach()
set_property(GLOBAL APPEND PROPERTY INGOT_EMULATED_models_decode ${CMAKE_CURRENT_LIST_DIR}/megakernel/megakernel_traced.cu ${CMAKE_CURRENT_LIST_DIR}/megakernel/megakernel_screened.cu
  ${CMAKE_CURRENT_LIST_DIR}/megakernel/megakernel_ranks.cu ${CMAKE_CURRENT_LIST_DIR}/megakernel/megakernel_traced_ranks.cu
  ${CMAKE_CURRENT_LIST_DIR}/megakernel/megakernel_screened_ranks.cu ${CMAKE_CURRENT_LIST_DIR}/phased/ranks.cu)
