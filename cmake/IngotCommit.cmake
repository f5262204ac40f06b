# core/version.cpp gets the version (CMakeLists.txt is the only place that states it) and the commit of the tree.
execute_process(COMMAND git rev-parse --short=12 HEAD WORKING_DIRECTORY ${CMAKE_CURRENT_SOURCE_DIR}
  OUTPUT_VARIABLE ingot_commit OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
if(NOT ingot_commit)
  set(ingot_commit unknown)
endif()
set_source_files_properties(src/ingot/core/version.cpp PROPERTIES COMPILE_DEFINITIONS INGOT_COMMIT="${ingot_commit}")
