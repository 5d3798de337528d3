"""The command line `lit-rlsched`.

Imports `types`, `settings`, `text`, `processes`, `engines`, `data`, `training`, `run`, `callbacks`,
`datamodule`, `module`.
"""
