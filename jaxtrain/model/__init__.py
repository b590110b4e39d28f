"""The decoder: layers, attention, blocks, loss."""
