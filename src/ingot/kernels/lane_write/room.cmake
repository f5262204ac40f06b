ingot_room(TURING ".")
