"""The command line `lit-rlsched`.

Imports `types`, `settings`, `text`, `processes`, `engines`, `training`, `run`,
`callbacks`, `datamodule`, `module`.
"""
