"""One training loop for every registered drafter."""
