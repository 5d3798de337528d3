"""Connects a run to the Trainer and to the disk: start, loaders, checkpoints, configuration.

Imports `types`, `settings`, `text`, `processes`, `ranks`, `scheduling`, `engines`,
`data`, `environments`, `rollout`, `training`.
"""
