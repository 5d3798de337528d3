"""Prompts: where they come from, how they repeat, and how completions become micro-batches."""
