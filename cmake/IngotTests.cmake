# test_<folder>: all *.test.cpp of one folder. `ctest -R kernels_rmsnorm` runs one room; GPU cases skip without a GPU.
find_package(GTest REQUIRED)
file(GLOB_RECURSE testing_sources CONFIGURE_DEPENDS src/ingot/testing/*.cpp src/ingot/gpu/emulation/*.cpp)
list(FILTER testing_sources EXCLUDE REGEX "\\.test\\.cpp$")
add_library(ingot_testing STATIC ${testing_sources})
target_include_directories(ingot_testing PUBLIC src)
target_link_libraries(ingot_testing PUBLIC ingot ingot_flags GTest::gtest nlohmann_json::nlohmann_json)
# EXPECT_EQ holds an if of its own; what g++ 12 wrongly says of std::string is no longer hidden in a precompiled header.
set(ingot_test_options "$<$<COMPILE_LANGUAGE:CXX>:${ingot_driver_options};-Wno-dangling-else;-Wno-array-bounds;-Wno-stringop-overflow>")

# What nearly every test includes, read once: it takes two thirds of the time in which a small test compiles.
file(CONFIGURE OUTPUT ${CMAKE_CURRENT_BINARY_DIR}/generated/test_headers.cpp CONTENT "")
add_library(ingot_test_headers OBJECT ${CMAKE_CURRENT_BINARY_DIR}/generated/test_headers.cpp)
target_link_libraries(ingot_test_headers PRIVATE ingot_testing)
set_target_properties(ingot_test_headers PROPERTIES POSITION_INDEPENDENT_CODE OFF) # -fPIC would not fit executables
target_compile_options(ingot_test_headers PRIVATE ${ingot_test_options} $<$<BOOL:${CMAKE_POSITION_INDEPENDENT_CODE}>:-fPIE>)
target_precompile_headers(ingot_test_headers PRIVATE <gtest/gtest.h> <cmath> <ingot/testing/testing.h>)

file(GLOB_RECURSE test_sources CONFIGURE_DEPENDS src/ingot/*.test.cpp tests/*.test.cpp)
if(INGOT_WITH_CUDA) # tests that hold kernels of their own
  file(GLOB_RECURSE cuda_test_sources CONFIGURE_DEPENDS src/ingot/*.test.cu)
  list(APPEND test_sources ${cuda_test_sources})
endif()
# <name>.emulated.test.cpp runs the kernels and launchers of <name>.cu and <name>_*.cu on the CPU (docs/gpu-layer.md). A build
# with CUDA has the real ones, and the GPU to run them.
file(GLOB_RECURSE emulated_sources CONFIGURE_DEPENDS src/ingot/*.emulated.test.cpp)
if(INGOT_WITH_CUDA)
  list(REMOVE_ITEM test_sources ${emulated_sources})
else()
  foreach(test ${emulated_sources})
    set_source_files_properties(${test} PROPERTIES SKIP_PRECOMPILE_HEADERS ON COMPILE_DEFINITIONS INGOT_EMULATE COMPILE_OPTIONS -Wno-unknown-pragmas)
    string(REPLACE ".emulated.test.cpp" "" name ${test})
    file(GLOB kernels CONFIGURE_DEPENDS ${name}.cu ${name}_*.cu)
    if(kernels)
      # Loops hardly optimised are fast enough for small tests, and a room's many instances compile in a third of the time.
      set_source_files_properties(${kernels} PROPERTIES LANGUAGE CXX SKIP_PRECOMPILE_HEADERS ON COMPILE_DEFINITIONS INGOT_EMULATE
        COMPILE_OPTIONS "-xc++;${ingot_driver_options};-Wno-unknown-pragmas")
      list(APPEND test_sources ${kernels})
    endif()
  endforeach()
endif()
# With CUDA the MLP's loops in fp64 take minutes of one core: its cases are dealt out to tests that can run side by side. Not those that
# want tens of gigabytes each: they are one test, one after the other.
if(INGOT_WITH_CUDA)
  set(shards_of_kernels_mlp 24)
endif()
# Sets tests_of_<folder>: one test, or several which share the cases.
function(ingot_add_gtest folder)
  if(NOT shards_of_${folder})
    add_test(NAME ${folder} COMMAND test_${folder})
    set(tests_of_${folder} ${folder} PARENT_SCOPE)
    return()
  endif()
  set(huge "*MoreThanTwoToThe31*")
  add_test(NAME ${folder}_huge COMMAND test_${folder} --gtest_filter=${huge})
  set(tests ${folder}_huge)
  math(EXPR last "${shards_of_${folder}} - 1")
  foreach(shard RANGE ${last})
    add_test(NAME ${folder}_${shard} COMMAND test_${folder} --gtest_filter=-${huge})
    set_tests_properties(${folder}_${shard} PROPERTIES COST 100
      ENVIRONMENT "GTEST_TOTAL_SHARDS=${shards_of_${folder}};GTEST_SHARD_INDEX=${shard}")
    list(APPEND tests ${folder}_${shard})
  endforeach()
  set(tests_of_${folder} ${tests} PARENT_SCOPE)
endfunction()

set(test_folders "")
foreach(source ${test_sources})
  get_filename_component(folder ${source} DIRECTORY)
  file(RELATIVE_PATH folder ${CMAKE_CURRENT_SOURCE_DIR} ${folder})
  string(REGEX REPLACE "^src/ingot/" "" folder ${folder})
  string(REPLACE "/" "_" folder ${folder})
  list(APPEND test_folders ${folder})
  list(APPEND sources_of_${folder} ${source})
endforeach()
list(REMOVE_DUPLICATES test_folders)
foreach(folder ${test_folders})
  add_executable(test_${folder} ${sources_of_${folder}})
  target_link_libraries(test_${folder} PRIVATE ingot_testing GTest::gtest_main)
  target_compile_definitions(test_${folder} PRIVATE INGOT_SOURCE_DIR="${CMAKE_CURRENT_SOURCE_DIR}")
  target_compile_options(test_${folder} PRIVATE ${ingot_test_options})
  target_precompile_headers(test_${folder} REUSE_FROM ingot_test_headers)
  ingot_add_gtest(${folder})
  if(sources_of_${folder} MATCHES "\\.test\\.cu(;|$)")
    set_target_properties(test_${folder} PROPERTIES CUDA_ARCHITECTURES OFF CUDA_STANDARD 20)
    target_compile_options(test_${folder} PRIVATE ${ingot_cuda_options})
  endif()
  if(sources_of_${folder} MATCHES "\\.cuda\\.test\\.cpp|\\.test\\.cu(;|$)")
    set_tests_properties(${tests_of_${folder}} PROPERTIES LABELS gpu) # holds cases that skip without a GPU: `ctest -L gpu` where there is one
  endif()
endforeach()

# Kernels for GPUs other than Hopper: the same tests over their PTX, which this makes the driver compile. Without those that leave the form
# to dispatch, which on Hopper asks for kernels that have no PTX.
if(INGOT_WITH_CUDA)
  add_test(NAME kernels_rmsnorm_portable COMMAND test_kernels_rmsnorm --gtest_filter=RmsNorm*Cuda.*)
  set_tests_properties(kernels_rmsnorm_portable PROPERTIES LABELS gpu COST 200 ENVIRONMENT CUDA_FORCE_PTX_JIT=1)
  foreach(shard RANGE 6) # a prime, so that the types of a long case do not share one with those of the other
    add_test(NAME kernels_mlp_portable_${shard}
      COMMAND test_kernels_mlp "--gtest_filter=*portable*-*TheEntryPoints*:*TakesLeading*:*MoreThanTwoToThe31*")
    set_tests_properties(kernels_mlp_portable_${shard} PROPERTIES LABELS gpu COST 200
      ENVIRONMENT "CUDA_FORCE_PTX_JIT=1;GTEST_TOTAL_SHARDS=7;GTEST_SHARD_INDEX=${shard}")
  endforeach()
endif()

find_package(Python3 COMPONENTS Interpreter)
if(Python3_FOUND)
  add_test(NAME layers COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/tools/check_layers.py ${CMAKE_CURRENT_SOURCE_DIR}/src/ingot)
endif()
include(${CMAKE_CURRENT_SOURCE_DIR}/tests/tests.cmake OPTIONAL) # whole-system tests: scripts, the installed package
