"""Processes: how one starts, finds the others of its run, agrees with them, and ends; what the machine and its JAX are."""
