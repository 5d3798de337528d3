"""Connects a run to the Trainer and to the disk: start, loaders, checkpoints, configuration."""
