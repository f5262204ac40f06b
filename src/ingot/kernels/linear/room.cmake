ingot_room(HOPPER "^cuda/")
