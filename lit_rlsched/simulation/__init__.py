"""Simulates rounds and schedules on a virtual clock, and fits what their steps cost.

Imports `types`, `settings`, `scheduling`, `engines`, `rollout`, `training`.
"""
