# Whole-system tests: what no single folder can check.
add_test(NAME install COMMAND ${CMAKE_CURRENT_SOURCE_DIR}/tests/install_test.sh
  ${CMAKE_CURRENT_SOURCE_DIR} ${CMAKE_BINARY_DIR} ${CMAKE_CXX_COMPILER})
if(INGOT_SANITIZE) # a user of a sanitized library must link the same run-time library
  set_tests_properties(install PROPERTIES ENVIRONMENT "INGOT_EXAMPLE_FLAGS=-fsanitize=${INGOT_SANITIZE}")
endif()
if(TARGET ingot_simd_avx512)
  add_test(NAME simd_objects COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/tools/check_simd_objects.py
    $<TARGET_OBJECTS:ingot_simd_avx512> COMMAND_EXPAND_LISTS)
endif()
if(TARGET ingot_cli)
  add_test(NAME cli COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/tests/cli_test.py $<TARGET_FILE:ingot_cli>)
endif()
