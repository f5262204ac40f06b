ingot_room(TURING ".")
ingot_ptx_test(FILTER "SoftcapCuda.*" TURING "SoftcapCuda.*")
