"""States on disk: what is saved when, arrays, files."""
