"""Makes `harness` importable, and `reward_cases` also by the workers."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "rewards"))
