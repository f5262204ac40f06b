# The flags of every target (ingot_flags), of code that runs once (ingot_driver_options) and of vector code (ingot_simd_options). A file of its own,
# because these flags count for the hash of each report under bench/results (tools/reports.py), unlike the rest of the build description.
add_library(ingot_flags INTERFACE)
target_compile_options(ingot_flags INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wno-unused-parameter -Wno-missing-field-initializers -ffp-contract=fast>)
# A row of a product has the same bits whatever is computed beside it, because every multiplication and its addition are fused into one rounding.
# From 13.3 on g++ splits some of these pairs in loops, because the latency of a chain of fused operations is longer on some CPUs. 0 turns this off.
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  target_compile_options(ingot_flags INTERFACE $<$<COMPILE_LANGUAGE:CXX>:--param=avoid-fma-max-bits=0>)
endif()
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  set(INGOT_X86 ON)
  # CMake puts these flags last on the command line, so a target with its own level (INGOT_LEVEL) must not get this flag.
  target_compile_options(ingot_flags INTERFACE
    $<$<AND:$<COMPILE_LANGUAGE:CXX>,$<NOT:$<BOOL:$<TARGET_PROPERTY:INGOT_LEVEL>>>>:-march=x86-64-v3>)
endif()
# Code that drives the library (tests, option parsing, all files that include io/json.h) runs once: optimising such code adds a third to the
# time of a build.
set(ingot_driver_options $<$<CONFIG:Release>:-O1>)
set(ingot_simd_options -O3)
# Under sanitizers this holds for all code but vector code: -O1 takes two to five times as long to compile, and tests are small. Vector code takes -O3
# five times as long as -O1, and levels beyond this CPU's would never run. AddressSanitizer also finds the faults of object-size.
set(ingot_levels_beyond ON)
if(INGOT_SANITIZE)
  set(CMAKE_POSITION_INDEPENDENT_CODE OFF) # the compiler's own choice, the same for library and programs
  set(ingot_driver_options -O0)
  set(ingot_simd_options -O1)
  if(EXISTS /proc/cpuinfo)
    file(STRINGS /proc/cpuinfo ingot_levels_beyond REGEX "avx512f" LIMIT_COUNT 1)
  endif()
  target_compile_options(ingot_flags INTERFACE
    $<$<COMPILE_LANGUAGE:CXX>:-fsanitize=${INGOT_SANITIZE} -fno-sanitize=object-size,vptr -fno-sanitize-recover=all
    $<$<BOOL:${INGOT_SANITIZE_TRAPS}>:-fsanitize-undefined-trap-on-error> -fno-omit-frame-pointer -g1>)
  target_link_options(ingot_flags INTERFACE -fsanitize=${INGOT_SANITIZE})
endif()
