ingot_room(TURING ".")
ingot_ptx_test(FILTER "AdamWCuda.*" TURING "AdamWCuda.*")
