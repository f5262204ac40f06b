# These kernels measure a grid barrier and an exchange as the token kernel makes them.
ingot_room(HOPPER ".")
