"""What has to be seen on a GPU before it can be trusted there: `make gpu-check`, half an hour.

A list of checks (`checks.CHECKS`), each in a process of its own. `docs/gpu.md` says how to run it
and what to do with the report.
"""
