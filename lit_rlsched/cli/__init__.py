"""The command line `lit-rlsched`.

Imports `types`, `settings`, `text`, `processes`, `engines`, `data`, `training`, `run`, `export`,
`callbacks`, `datamodule`, `module`.
"""
