# These kernels measure a grid barrier and an exchange in the token kernel's form.
ingot_room(HOPPER ".")
