# Whole-system tests.
add_test(NAME install COMMAND ${CMAKE_CURRENT_SOURCE_DIR}/tests/install_test.sh
  ${CMAKE_CURRENT_SOURCE_DIR} ${CMAKE_BINARY_DIR} ${CMAKE_CXX_COMPILER})
if(INGOT_SANITIZE) # a user of a sanitized library must link the same run-time library
  set_tests_properties(install PROPERTIES ENVIRONMENT "INGOT_EXAMPLE_FLAGS=-fsanitize=${INGOT_SANITIZE}")
endif()
if(TARGET ingot_simd_avx512 AND TARGET ingot_simd_amx)
  add_test(NAME simd_objects COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/tools/check_simd_objects.py
    $<TARGET_OBJECTS:ingot_simd_avx512> $<TARGET_OBJECTS:ingot_simd_amx> COMMAND_EXPAND_LISTS)
endif()
# Python tools do not depend on the build, and are not tested under sanitizers.
if(NOT INGOT_SANITIZE)
  add_test(NAME checks COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/tests/checks_test.py)
  add_test(NAME run COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/tests/run_test.py)
  add_test(NAME gather_text COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/tests/gather_text_test.py)
endif()
if(TARGET ingot_cli)
  add_test(NAME cli COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/tests/cli_test.py $<TARGET_FILE:ingot_cli>)
  add_test(NAME cli_runs COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/tests/cli_runs_test.py $<TARGET_FILE:ingot_cli>)
  add_test(NAME cli_gpt_oss COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/tests/cli_gpt_oss_test.py $<TARGET_FILE:ingot_cli>)
  add_test(NAME smollm2 COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/tests/smollm2_test.py $<TARGET_FILE:ingot_cli>)
  set_tests_properties(smollm2 PROPERTIES SKIP_RETURN_CODE 77)
  set_tests_properties(cli cli_runs cli_gpt_oss smollm2 PROPERTIES COST 60)
  add_test(NAME schema COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/tests/schema_test.py $<TARGET_FILE:test_text_grammar>)
  add_test(NAME serve COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/tests/serve_test.py $<TARGET_FILE:ingot_cli>)
  add_test(NAME serve_process COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/tests/serve_process_test.py $<TARGET_FILE:ingot_cli>)
  add_test(NAME serve_messages COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/tests/serve_messages_test.py $<TARGET_FILE:ingot_cli>)
  add_test(NAME serve_hostile COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/tests/serve_hostile_test.py $<TARGET_FILE:ingot_cli>)
  add_test(NAME bench_serve COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/tests/bench_serve_test.py $<TARGET_FILE:ingot_cli>)
  # A few seconds; ten minutes by hand. Under sanitizers, which keep freed memory, the limit of growth is higher.
  set(growth 16)
  if(INGOT_SANITIZE)
    set(growth 1000)
  endif()
  add_test(NAME serve_load COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/tests/serve_load.py $<TARGET_FILE:ingot_cli>
    --seconds 4 --health-ms 1000 --growth-mb ${growth})
  add_test(NAME serve_load_synthetic COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/tests/serve_load.py $<TARGET_FILE:ingot_cli>
    --synthetic small --serve "--device cpu" --seconds 4 --idle 16 --busy 12 --slots 12 --health-ms 1000 --growth-mb ${growth})
  set_tests_properties(serve_load serve_load_synthetic PROPERTIES SKIP_RETURN_CODE 77)
  add_test(NAME serve_proxy COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/tests/proxy_test.py $<TARGET_FILE:ingot_cli>)
  set_tests_properties(serve_proxy PROPERTIES SKIP_RETURN_CODE 77)
  add_test(NAME serve_page COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/tests/page_test.py $<TARGET_FILE:ingot_cli>)
  add_test(NAME train_ranks COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/tests/ranks_test.py $<TARGET_FILE:ingot_cli>)
  add_test(NAME adaptation COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/tests/adaptation_test.py $<TARGET_FILE:ingot_cli>)
  add_test(NAME export COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/tests/export_test.py $<TARGET_FILE:ingot_cli>)
  # TensorBoard reads training's event files; skipped where TensorBoard is not installed.
  add_test(NAME tensorboard COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/tests/tensorboard_test.py $<TARGET_FILE:ingot_cli>)
  set_tests_properties(tensorboard PROPERTIES SKIP_RETURN_CODE 77)
  set_tests_properties(serve serve_hostile train_ranks adaptation export PROPERTIES COST 60)
  set_tests_properties(serve_page PROPERTIES COST 60 SKIP_RETURN_CODE 77)
endif()

if(Python3_FOUND AND NOT INGOT_SANITIZE)
  add_test(NAME rooms COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/tests/rooms_test.py ${CMAKE_CURRENT_SOURCE_DIR}
    $<$<TARGET_EXISTS:ingot_python>:--python>)
  set_tests_properties(rooms PROPERTIES COST 100)
endif()

# The model against its definition in spec/gpt.py; skipped where PyTorch is not installed.
add_executable(parity ${CMAKE_CURRENT_SOURCE_DIR}/tests/parity/parity_main.cpp)
target_link_libraries(parity PRIVATE ingot ingot_flags nlohmann_json::nlohmann_json)
add_executable(parity_gpt_oss ${CMAKE_CURRENT_SOURCE_DIR}/tests/parity/gpt_oss_main.cpp)
target_link_libraries(parity_gpt_oss PRIVATE ingot ingot_flags nlohmann_json::nlohmann_json)
add_executable(parity_tokenizer ${CMAKE_CURRENT_SOURCE_DIR}/tests/parity/tokenizer_main.cpp)
target_link_libraries(parity_tokenizer PRIVATE ingot ingot_flags)
add_executable(parity_draft_head ${CMAKE_CURRENT_SOURCE_DIR}/tests/parity/draft_head_main.cpp)
target_link_libraries(parity_draft_head PRIVATE ingot ingot_flags nlohmann_json::nlohmann_json)
foreach(target parity parity_gpt_oss parity_tokenizer parity_draft_head)
  target_compile_options(${target} PRIVATE ${ingot_driver_options})
endforeach()
ingot_precompile_headers(parity)
ingot_precompile_headers(parity_gpt_oss)
if(Python3_FOUND)
  add_test(NAME parity_tokenizer COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/tests/parity/parity_tokenizer.py
    $<TARGET_FILE:parity_tokenizer> --skip-without-peers)
  set_tests_properties(parity_tokenizer PROPERTIES SKIP_RETURN_CODE 77)
  add_test(NAME parity_mistral COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/tests/parity/parity_mistral.py
    $<TARGET_FILE:parity_tokenizer> --skip-without-peers)
  set_tests_properties(parity_mistral PROPERTIES SKIP_RETURN_CODE 77)
  add_test(NAME parity COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/tests/parity/parity.py $<TARGET_FILE:parity>
    --skip-without-peers)
  add_test(NAME parity_gpt_oss COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/tests/parity/parity_gpt_oss.py
    $<TARGET_FILE:parity_gpt_oss> --skip-without-peers)
  add_test(NAME parity_draft_head COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/tests/parity/parity_draft_head.py
    $<TARGET_FILE:parity_draft_head> --skip-without-peers)
  set_tests_properties(parity_draft_head PROPERTIES SKIP_RETURN_CODE 77 COST 60)
  if(TARGET ingot_cli)
    add_test(NAME parity_families COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/tests/parity/parity_families.py
      $<TARGET_FILE:ingot_cli> --skip-without-peers)
    set_tests_properties(parity_families PROPERTIES SKIP_RETURN_CODE 77 COST 60)
    add_test(NAME parity_decoder COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/tests/parity/parity_decoder.py
      $<TARGET_FILE:ingot_cli> --skip-without-peers)
    set_tests_properties(parity_decoder PROPERTIES SKIP_RETURN_CODE 77 COST 60)
    add_test(NAME parity_gguf COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/tests/parity/parity_gguf.py
      $<TARGET_FILE:parity_gpt_oss> $<TARGET_FILE:parity_tokenizer> $<TARGET_FILE:ingot_cli> --skip-without-peers)
    set_tests_properties(parity_gguf PROPERTIES SKIP_RETURN_CODE 77 COST 60)
  endif()
  # The longest first, beside the many short ones.
  set_tests_properties(parity parity_gpt_oss PROPERTIES SKIP_RETURN_CODE 77 COST 100)
endif()

# The committed GPU measurements: their form, and their tree (a stale report is listed, not refused).
if(Python3_FOUND AND NOT INGOT_SANITIZE)
  add_test(NAME reports COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/tools/check_reports.py)
  add_test(NAME reports_tools COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/tests/reports_test.py)
  add_test(NAME gpu_tools COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/tests/gpu_tools_test.py)
  add_test(NAME report_tables COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/tests/report_tables_test.py)
  add_test(NAME gpu_suites COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/tests/gpu_suites_test.py)
  add_test(NAME suite_reports COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/tests/suite_report_test.py)
endif()
include(${CMAKE_CURRENT_LIST_DIR}/crash/crash.cmake)

# The longest tests begin first, so that all cores are busy until the end. On a loaded machine a sanitized test can take more than the 1,500 s
# after which ctest ends a test.
if(TEST models_decode)
  set_tests_properties(models_decode PROPERTIES COST 300 TIMEOUT 3600)
endif()
foreach(test engines_train kernels_sampling)
  if(TEST ${test})
    set_tests_properties(${test} PROPERTIES COST 60)
  endif()
endforeach()
