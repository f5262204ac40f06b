ingot_ptx_test(FILTER "TttCuda.*")
