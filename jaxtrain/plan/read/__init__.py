"""Reading what XLA made: the compiled module, its collectives, its buffers, and what each byte of memory is for."""
