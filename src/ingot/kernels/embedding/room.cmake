ingot_ptx_test(FILTER "EmbeddingCuda.*")
