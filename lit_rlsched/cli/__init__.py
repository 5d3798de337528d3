"""The command line `lit-rlsched`.

Imports `types`, `settings`, `text`, `processes`, `scheduling`, `engines`, `training`,
`simulation`, `run`, `callbacks`, `datamodule`, `module`.
"""
