"""Showing runs from what they left in their workdirs: one HTML page of several, or a terminal that follows one. No jax."""
