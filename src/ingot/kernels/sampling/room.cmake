ingot_ptx_test(FILTER "SamplingCuda.*")
