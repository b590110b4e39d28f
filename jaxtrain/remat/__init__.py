"""What is kept for the backward, recomputed, or moved to the host's memory."""
