"""Where answers come from: one contract (base.py), one table (registry.py), one file a backend."""
