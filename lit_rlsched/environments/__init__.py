"""Tools and environments: what completions call, in processes that may crash.

Imports `settings`, `text`, `processes`, `workers`, `rewards`, `data`.
"""
