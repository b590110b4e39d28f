"""Facts about GPUs, counts of FLOPs, dtypes. No device is asked."""
