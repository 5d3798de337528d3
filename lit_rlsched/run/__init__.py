"""Connects a run to the Trainer and to the disk: start, loaders, checkpoints, configuration.

`TrainingRun` joins the Trainer, whose callbacks set the schedule. `Startup` tokenises the data,
checks settings against each other, and starts workers and engine. Each epoch of Lightning is a
round: the loaders (`loaders.py`) give out its optimizer steps, which the module takes
(`policy_module.py`). Checkpoints hold the position of the run (`saving/run_state.py`). At the end
the session is closed and the Trainer gets its settings back.

Imports `types`, `settings`, `text`, `processes`, `ranks`, `scheduling`, `engines`,
`data`, `environments`, `rollout`, `training`.
"""
