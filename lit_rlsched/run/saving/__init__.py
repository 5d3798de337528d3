"""Checkpoints, resume, and the folders and models that a run leaves behind."""
