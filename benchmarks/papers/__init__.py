"""Claims of the papers, measured on a real chat model: `python -m benchmarks run papers`."""
