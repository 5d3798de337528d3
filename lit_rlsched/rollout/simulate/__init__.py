"""Simulated rollouts on a virtual clock."""
