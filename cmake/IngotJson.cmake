# Unoptimised, a file that speaks JSON compiles for half its time what io/json.h includes: read once under sanitizers, by library and
# programs. Other builds share objects through ccache across build directories, which a precompiled header prevents.
if(INGOT_SANITIZE AND NOT layers)
  file(CONFIGURE OUTPUT ${CMAKE_CURRENT_BINARY_DIR}/generated/json_headers.cpp CONTENT "")
  add_library(ingot_json_headers OBJECT ${CMAKE_CURRENT_BINARY_DIR}/generated/json_headers.cpp)
  target_include_directories(ingot_json_headers PRIVATE src)
  target_link_libraries(ingot_json_headers PRIVATE ingot_flags nlohmann_json::nlohmann_json)
  target_compile_options(ingot_json_headers PRIVATE ${ingot_driver_options})
  target_precompile_headers(ingot_json_headers PRIVATE <ingot/io/json.h>)
  # It makes files slower that do not need it.
  set_source_files_properties(${without_json} PROPERTIES SKIP_PRECOMPILE_HEADERS ON)
endif()
function(ingot_precompile_json target)
  if(TARGET ingot_json_headers)
    target_precompile_headers(${target} REUSE_FROM ingot_json_headers)
  endif()
endfunction()
