"""Checks of the package on an NVIDIA GPU: `make gpu-check`, half an hour.

`checks.CHECKS` lists the checks. Each runs in its own process. `docs/howto/gpu.md` says how to
run them and what to do with the report.
"""
