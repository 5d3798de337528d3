"""Rounds that are drawn while the round before them is trained on."""

from typing import Literal

Correction = Literal["verify", "importance"]
"""How tokens are used that an earlier policy drew: as drafts, or with importance sampling."""
