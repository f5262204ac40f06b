# residual.emulated.test.cpp runs the kernels of these operations, all of which use columns.cuh.
foreach(room axpby lane_write mix scaled_add skip_merge)
  set_property(GLOBAL APPEND PROPERTY INGOT_EMULATED_kernels_residual ${CMAKE_CURRENT_SOURCE_DIR}/src/ingot/kernels/${room}/${room}.cu)
endforeach()
ingot_ptx_test(FILTER "ResidualCuda.*" TURING "ResidualCuda.*")
