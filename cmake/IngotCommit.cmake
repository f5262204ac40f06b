# core/version.cpp gets the version (stated only in CMakeLists.txt) and the commit of the tree.
execute_process(COMMAND git rev-parse --short=12 HEAD WORKING_DIRECTORY ${CMAKE_CURRENT_SOURCE_DIR}
  OUTPUT_VARIABLE ingot_commit OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
if(NOT ingot_commit)
  set(ingot_commit unknown)
endif()
set_source_files_properties(src/ingot/core/version.cpp PROPERTIES COMPILE_DEFINITIONS INGOT_COMMIT="${ingot_commit}")
# A commit or a checkout writes to these files; the next build then determines the commit again.
execute_process(COMMAND git rev-parse --path-format=absolute --git-path logs/HEAD WORKING_DIRECTORY ${CMAKE_CURRENT_SOURCE_DIR}
  OUTPUT_VARIABLE ingot_head_log OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
if(ingot_head_log AND EXISTS ${ingot_head_log})
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${ingot_head_log})
endif()
