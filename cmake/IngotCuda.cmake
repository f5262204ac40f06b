# INGOT_CUDA=AUTO|ON|OFF|EMULATED. With CUDA, every src/ingot/**/*.cu and every instance (IngotRooms.cmake) joins the library,
# INGOT_CUDA_BUILD is defined, and each room with a <room>.cu gets INGOT_HAS_CUDA_<ROOM>. EMULATED compiles the same sources with the C++
# compiler, and the emulator is the only GPU (docs/gpu-layer.md): tests of GPU code, and programs with small models, then run on machines
# without a GPU.
set(INGOT_WITH_CUDA OFF)
if(NOT INGOT_CUDA MATCHES "^(OFF|EMULATED)$")
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    set(INGOT_WITH_CUDA ON)
  elseif(INGOT_CUDA STREQUAL "ON")
    message(FATAL_ERROR "INGOT_CUDA=ON, but no nvcc was found: put it on PATH or set CUDACXX")
  endif()
endif()

# All .cu of the library, and the instances.
macro(ingot_cuda_sources sources)
  file(GLOB_RECURSE ${sources} CONFIGURE_DEPENDS src/ingot/*.cu)
  list(FILTER ${sources} EXCLUDE REGEX "\\.test\\.cu$")
  if(layers)
    list(FILTER ${sources} INCLUDE REGEX "/src/ingot/(${layers})/")
  endif()
  ingot_filter_rooms(${sources})
  get_property(instances GLOBAL PROPERTY INGOT_INSTANCES)
  list(APPEND ${sources} ${instances})
endmacro()
# INGOT_HAS_CUDA_<ROOM> where the room's own .cu is among `sources`, and INGOT_HAS_CUDA_DECODE for the decoder, whose .cu lies in a folder inside.
function(ingot_cuda_rooms sources)
  foreach(source ${sources})
    get_filename_component(room ${source} NAME_WE)
    get_filename_component(folder ${source} DIRECTORY)
    get_filename_component(folder ${folder} NAME)
    if(room STREQUAL folder OR source MATCHES "/models/decode/phased/decode\\.cu$")
      string(TOUPPER ${room} room)
      target_compile_definitions(ingot PUBLIC INGOT_HAS_CUDA_${room})
    endif()
  endforeach()
endfunction()

if(INGOT_WITH_CUDA)
  # CMake before 3.25.2 does not know nvcc's C++20 flag, so the flag is given here.
  if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
    set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
    set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
  endif()
  set(CMAKE_CUDA_ARCHITECTURES OFF)
  enable_language(CUDA)
  set(CMAKE_CUDA_STANDARD 20)
  set(CMAKE_CUDA_EXTENSIONS OFF)
  find_package(CUDAToolkit REQUIRED)
  ingot_cuda_sources(cuda_sources)
  target_sources(ingot PRIVATE ${cuda_sources})
  # The target is older than the language; the architecture is in the options below, as 90a needs both halves of -gencode.
  set_target_properties(ingot PROPERTIES CUDA_ARCHITECTURES OFF CUDA_STANDARD 20)
  target_link_libraries(ingot PUBLIC CUDA::cudart_static)
  target_compile_definitions(ingot PUBLIC INGOT_CUDA_BUILD)
  set(ingot_cuda_options $<$<COMPILE_LANGUAGE:CUDA>:-std=c++20 --expt-relaxed-constexpr -gencode arch=compute_90a,code=sm_90a
    -Xptxas=-v,-warn-spills,-warn-lmem-usage -lineinfo>)
  # Compressed kernels take a seventh of the size. The driver unpacks a file when its first kernel is used: 2.3 ms in place of 1.6 for 3 MB
  # of kernels.
  if(CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 12.8)
    list(APPEND ingot_cuda_options $<$<COMPILE_LANGUAGE:CUDA>:--compress-mode=size>)
  endif()
  target_compile_options(ingot PRIVATE ${ingot_cuda_options})
  # Kernels also included as PTX, for the driver to compile on GPUs other than Hopper and, with CUDA_FORCE_PTX_JIT=1, on any GPU.
  foreach(source ${cuda_sources})
    ingot_ptx_of(${source} arch)
    if(arch)
      set_source_files_properties(${source} PROPERTIES COMPILE_OPTIONS "-gencode;arch=compute_${arch},code=compute_${arch}")
    endif()
  endforeach()
  ingot_cuda_rooms("${cuda_sources}")
  message(STATUS "Ingot: CUDA kernels ON (${CMAKE_CUDA_COMPILER}, sm_90a)")
elseif(INGOT_CUDA STREQUAL "EMULATED")
  ingot_cuda_sources(cuda_sources)
  # The emulator has neither wgmma nor tensor copies: operations with two forms have their portable form there.
  set(hopper_units "attention/hopper/" "attention/attention_(forward|query_gradient|key_gradient)_" "cross_entropy/(capped|exponentials)_(bf16|f16)"
    "expert_linear/hopper_" "grouped/(grouped_|hopper)" "linear/cuda/" "mlp/" "muon/newton_schulz_" "swiglu/gated_(bf16|f16|few_rows)")
  list(JOIN hopper_units "|" hopper_units)
  list(FILTER cuda_sources EXCLUDE REGEX "/kernels/(${hopper_units})")
  file(GLOB emulation_sources CONFIGURE_DEPENDS src/ingot/gpu/emulation/*.cpp)
  list(FILTER emulation_sources EXCLUDE REGEX "\\.test\\.cpp$")
  target_sources(ingot PRIVATE ${cuda_sources} ${emulation_sources})
  target_compile_definitions(ingot PUBLIC INGOT_EMULATED_DEVICE INGOT_EMULATE)
  set_source_files_properties(${cuda_sources} PROPERTIES LANGUAGE CXX SKIP_PRECOMPILE_HEADERS ON
    COMPILE_OPTIONS "-xc++;${ingot_driver_options};-Wno-unknown-pragmas")
  ingot_cuda_rooms("${cuda_sources}")
  message(STATUS "Ingot: CUDA kernels EMULATED on the CPU")
else()
  message(STATUS "Ingot: CUDA kernels OFF (INGOT_CUDA=${INGOT_CUDA}, no nvcc in use)")
endif()

# The library for Python benchmarks, which time the shipped entry points of the built rooms. The library links its own CUDA runtime, because PyTorch
# has a separate runtime.
if(INGOT_WITH_CUDA)
  set(native_sources ${all_sources})
  list(FILTER native_sources INCLUDE REGEX "\\.native\\.cpp$")
  add_library(ingot_bench SHARED EXCLUDE_FROM_ALL ${native_sources})
  target_link_libraries(ingot_bench PRIVATE ingot ingot_flags)
  target_link_options(ingot_bench PRIVATE -Wl,--exclude-libs,ALL)
endif()
