"""Attention backends behind one function, `dispatch.attend`. Each honours every setting it accepts, or is refused by name."""
