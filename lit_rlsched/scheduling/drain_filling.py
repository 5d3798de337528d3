"""Slots that a round leaves free begin drafts of later rounds.

Which prompts these are is `RoundRule.draws_following` and `plan_following`.
"""

from typing import Literal

AfterRound = Literal["go_on", "cut"]
"""What becomes of these drafts when the round is over: they go on beside the update
(`AheadRollout`), or end where they are (`DrainFilling`)."""
