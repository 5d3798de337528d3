"""Your own task: rows, a reward function, and one command that trains on them.

The task is an old game with the digits of a train ticket: make 10 of all of them with + and -.

    lit-rlsched fit -c examples/own_task.yaml
"""

import re
from itertools import combinations_with_replacement, product
from typing import Literal

from lit_rlsched.data.tasks import PromptTask

QUESTION = (  # one of the three wordings that the small model of this repository knows
    "Find a way to make 10 using all of these numbers: {}.\nEach number can only be used once."
)


class MakeTen(PromptTask):
    """All tickets of three or four digits that can make 10.

    Args:
        split: `heldout` for every fifth ticket, `train` for the others.
    """

    def __init__(self, split: Literal["train", "heldout"] = "train"):
        self.split = split

    def rows(self):
        """Return a row per ticket: its `prompt`, and the columns that the reward function takes."""
        sizes = [combinations_with_replacement(range(1, 10), n) for n in (3, 4)]
        tickets = [ticket for size in sizes for ticket in size if can_make_ten(ticket)]
        heldout = tickets[::5]
        if self.split == "heldout":
            chosen = heldout
        else:
            chosen = [ticket for ticket in tickets if ticket not in heldout]
        return [{"prompt": chat(ticket), "digits": list(ticket)} for ticket in chosen]


def can_make_ten(ticket):
    """Return whether some signs of the digits add up to 10."""
    signs = product([1, -1], repeat=len(ticket))
    return any(sum(s * d for s, d in zip(row, ticket, strict=True)) == 10 for row in signs)


def chat(ticket):
    """Return the chat that asks for a solution."""
    return [{"role": "user", "content": QUESTION.format(", ".join(map(str, ticket)))}]


def makes_ten(completions, digits, **columns):
    """Return 1 for an answer that uses each digit once and makes 10, else 0.

    A model wrote the text: it is matched and added up, never passed to `eval`.
    """
    scores = []
    for completion, ticket in zip(completions, digits, strict=True):
        text = completion[0]["content"]  # a chat, as the prompts are
        answer = re.search(r"<answer>([1-9](?:[+-][1-9]){0,9})</answer>", text)
        terms = re.findall(r"[+-]?[1-9]", answer[1]) if answer else []
        used = sorted(int(term[-1]) for term in terms)
        scores.append(float(used == sorted(ticket) and sum(map(int, terms)) == 10))
    return scores
