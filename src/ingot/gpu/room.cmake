# Every GPU supported by some operation needs these kernels.
ingot_room(PTX 75)
