"""Speculative decoding loop, lossless checks, metrics, timing, report."""
