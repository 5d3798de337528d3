"""Makes `reward_cases` importable by name: here, and by its name in the reward workers."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
