ingot_room(HOPPER "^newton_schulz_")
