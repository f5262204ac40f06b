ingot_room(TURING ".")
ingot_ptx_test(FILTER "ResidualNormCuda.*" TURING "ResidualNormCuda.*")
