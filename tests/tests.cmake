# Whole-system tests: what no single folder can check.
if(TARGET ingot_simd_avx512)
  add_test(NAME simd_objects COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/tools/check_simd_objects.py
    $<TARGET_OBJECTS:ingot_simd_avx512> COMMAND_EXPAND_LISTS)
endif()
