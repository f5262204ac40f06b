ingot_ptx_test(FILTER "RopeCuda.*")
