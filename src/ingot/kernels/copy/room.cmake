ingot_ptx_test(FILTER "CopyCuda.*")
