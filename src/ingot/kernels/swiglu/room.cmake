ingot_room(HOPPER "^gated_")
