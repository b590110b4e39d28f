"""Predicting memory, traffic and time: by formula, and along the schedule that XLA made."""
