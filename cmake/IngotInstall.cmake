# cmake --install puts the library, its headers and a package file where find_package(ingot) finds them.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

install(TARGETS ingot EXPORT ingotTargets ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
set(left_out_patterns "")
foreach(room ${rooms_left_out})
  list(APPEND left_out_patterns PATTERN "kernels/${room}" EXCLUDE)
endforeach()
# Headers keep their folders, so an include is the same in the tree and in an installation. simd.h only serves the library's own files.
install(DIRECTORY ${CMAKE_CURRENT_SOURCE_DIR}/src/ingot DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}
  FILES_MATCHING PATTERN "*.h" PATTERN "simd.h" EXCLUDE PATTERN "testing" EXCLUDE PATTERN "apps" EXCLUDE
  ${left_out_patterns})

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/ingot)
install(EXPORT ingotTargets NAMESPACE ingot:: DESTINATION ${package_dir})
configure_package_config_file(${CMAKE_CURRENT_LIST_DIR}/ingotConfig.cmake.in ${CMAKE_CURRENT_BINARY_DIR}/ingotConfig.cmake
  INSTALL_DESTINATION ${package_dir})
# The interface may change between minor versions before 1.0.
write_basic_package_version_file(${CMAKE_CURRENT_BINARY_DIR}/ingotConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/ingotConfig.cmake ${CMAKE_CURRENT_BINARY_DIR}/ingotConfigVersion.cmake
  DESTINATION ${package_dir})
