# presets/<name>.json become string literals in one generated source, which models/gpt/presets.cpp includes by name.
file(GLOB preset_files CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/presets/*.json)
set(generated "// Made by cmake/IngotPresets.cmake from presets/*.json.\n")
foreach(file ${preset_files})
  get_filename_component(name ${file} NAME_WE)
  file(READ ${file} text)
  string(APPEND generated "{\"${name}\", R\"json(${text})json\"},\n")
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${file})
endforeach()
file(CONFIGURE OUTPUT ${CMAKE_CURRENT_BINARY_DIR}/generated/ingot_presets.inc CONTENT "${generated}" @ONLY)
set_source_files_properties(src/ingot/models/gpt/presets.cpp PROPERTIES
  INCLUDE_DIRECTORIES ${CMAKE_CURRENT_BINARY_DIR}/generated
  OBJECT_DEPENDS ${CMAKE_CURRENT_BINARY_DIR}/generated/ingot_presets.inc)
