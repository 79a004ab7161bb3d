"""Draft models with their losses, the target wrapper, vocabulary maps, the propose recursion, export."""
