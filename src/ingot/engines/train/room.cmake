ingot_ptx_test(FILTER "*TrainerOnAmpereCuda*")
