"""Recipes: typed sections, strict loader, provenance, command line."""
