"""Which callbacks go together, and what they buy: `python -m benchmarks run matrix`."""
