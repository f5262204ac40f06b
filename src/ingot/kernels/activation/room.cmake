ingot_ptx_test(FILTER "ActivationCuda.*")
