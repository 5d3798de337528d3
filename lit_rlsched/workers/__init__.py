"""Guarded processes in which code of users runs: it may crash, hang or take too much memory.

Imports `settings`, `text`, `processes`.
"""
