ingot_ptx_test(FILTER "GptCuda.*:DeviceDecoderCuda.*")
