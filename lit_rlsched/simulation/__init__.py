"""Simulates rounds and schedules on a virtual clock, and fits what their steps cost.

Lengths and waits for tools (`workload.py`) and costs (`costs.py`: fitted to a run, computed for a
GPU or made up) are given. `Pipeline` draws rounds with the loop of `fit` and an engine that has a
virtual clock, adds the seconds of updates and what overlaps, and returns an `Outcome`. Rules of
other packages are in `peers.py`.

Imports `types`, `settings`, `scheduling`, `engines`, `data`, `rollout`, `training`.
"""
