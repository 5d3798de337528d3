"""The command line `lit-rlsched`.

`main.py` reads the arguments; configuration files are merged in their order. A mistake is answered
from the schema, before torch is imported. `fit` trains, `validate`, `test` and `predict` draw
held-out prompts, `estimate` and `simulate` compute without a run, `export` makes a model of a
checkpoint.

Imports `types`, `settings`, `text`, `processes`, `scheduling`, `engines`, `training`,
`simulation`, `run`, `callbacks`, `datamodule`, `module`.
"""
