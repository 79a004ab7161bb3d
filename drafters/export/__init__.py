"""Checkpoint layouts that serving engines load: pure key and config mappings."""
