ingot_room(HOPPER "^grouped_")
