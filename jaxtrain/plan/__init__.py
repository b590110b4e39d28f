"""What a training step will cost on GPUs that are not here: the real program, compiled for them and read."""
