ingot_ptx_test(FILTER "AdamWCuda.*")
