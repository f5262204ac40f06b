ingot_room(TURING ".")
ingot_ptx_test(FILTER "CopyCuda.*" TURING "CopyCuda.*:-*BeyondTheDeviceMemory*")
