"""Benchmarks behind the figures of the README and the docs: `python -m benchmarks list`."""
