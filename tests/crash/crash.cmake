# Saves under fire. The test takes a spread of the injections; the whole set runs by hand with --limit 0 --kills 200.
add_executable(save_driver ${CMAKE_CURRENT_LIST_DIR}/save_driver.cpp)
target_link_libraries(save_driver PRIVATE ingot ingot_flags nlohmann_json::nlohmann_json)
target_compile_options(save_driver PRIVATE ${ingot_driver_options})
ingot_precompile_headers(save_driver)
add_test(NAME crash COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_LIST_DIR}/crash_test.py --limit 40 --kills 20
  --command "$<TARGET_FILE:save_driver> train {out} 9 3" --info "$<TARGET_FILE:save_driver> info {out}")
