"""State, step, program, loop."""
