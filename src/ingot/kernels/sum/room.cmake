ingot_ptx_test(FILTER "SumCuda.*")
