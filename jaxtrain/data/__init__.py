"""From text files to batches: sources, tokenizers, packing, loader. Numpy only: nothing here imports jax or takes a device."""
