ingot_room(TURING ".")
ingot_ptx_test(FILTER "ActivationCuda.*" TURING "ActivationCuda.*")
