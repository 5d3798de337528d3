"""What the README's figures come from: `python -m benchmarks list`."""
