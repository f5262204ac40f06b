ingot_ptx_test(FILTER "SoftcapCuda.*")
