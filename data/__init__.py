"""Prompts, chat rendering, answers, hidden-state capture, the trace store and batching."""
