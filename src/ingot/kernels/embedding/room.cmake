ingot_room(TURING ".")
ingot_ptx_test(FILTER "EmbeddingCuda.*" TURING "EmbeddingCuda.*")
