# cmake --install puts the library, its headers and a package file where find_package(ingot) finds them.
