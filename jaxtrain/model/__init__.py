"""The decoder: layers, attention, blocks, loss. Shape letters: docs/architecture.md, Shapes."""
