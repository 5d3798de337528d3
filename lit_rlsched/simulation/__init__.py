"""Simulates rounds and schedules on a virtual clock, and fits what their steps cost.

Imports `types`, `settings`, `text`, `scheduling`, `engines`, `data`, `rollout`, `training`.
"""
