ingot_room(TURING ".")
ingot_ptx_test(FILTER "RopeCuda.*" TURING "RopeCuda.*")
