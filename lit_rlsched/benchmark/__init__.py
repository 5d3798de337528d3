"""A head-to-head with TRL on the quick task: `python -m lit_rlsched.benchmark`."""
