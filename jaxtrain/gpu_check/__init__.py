"""What is true on this machine's GPUs: numerics, rates, memory and times of steps, measured beside what was planned."""
