"""Rollouts whose tools take time: `python -m benchmarks run environments`."""
