ingot_room(TURING ".")
ingot_ptx_test(FILTER "SamplingCuda.*" TURING "SamplingCuda.*Small:SamplingCuda.Calls*:SamplingCuda.Cuts*:SamplingCuda.TokensOfTwo*-SamplingCuda.Some*")
