"""Profiles of a run: recording a few steps, reading what the profiler wrote, adding it up, and the plan's figures beside it."""
