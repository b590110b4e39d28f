"""What a run shows and records: metrics files, progress, plots. It is told numbers; it computes no training."""
