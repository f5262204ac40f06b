ingot_room(PTX 75) # the PTX for compute_80 would be the same
ingot_ptx_test(FILTER "SumCuda.*" TURING "SumCuda.*")
