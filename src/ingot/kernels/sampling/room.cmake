ingot_room(TURING ".")
ingot_ptx_test(FILTER "SamplingCuda.*" TURING "SamplingCuda.*Small")
