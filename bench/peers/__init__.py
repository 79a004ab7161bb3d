"""Training cores that `train_step` and `time_to_quality` step side by side, each in a process of its own."""
