ingot_room(HOPPER "^(capped|exponentials)_")
