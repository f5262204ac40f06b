# Every GPU for which some operation has kernels needs these.
ingot_room(PTX 75)
