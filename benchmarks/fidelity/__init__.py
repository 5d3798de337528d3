"""How well simulated seconds are those of real runs: `python -m benchmarks run fidelity`."""
