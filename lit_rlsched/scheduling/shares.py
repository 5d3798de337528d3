"""Divide the micro-batches of an optimizer step among the ranks that train on it."""

from collections.abc import Sequence


def share(costs: Sequence[float], ranks: int) -> list[list[tuple[int, bool]]]:
    """Assign items to ranks, in turns in which each rank has one item of about equal cost.

    Ranks that exchange weights or gradients in every pass wait for the slowest of a turn, so a turn
    takes items that are neighbours in cost. Within it, the rank that has the least so far gets the
    most expensive item. With one rank the order is that of `costs`.
    """
    if ranks == 1:
        return [[(item, True)] for item in range(len(costs))]
    order = sorted(range(len(costs)), key=lambda item: (-costs[item], item))
    totals = [0.0] * ranks
    turns = []
    for begin in range(0, len(order), ranks):
        items = order[begin : begin + ranks]
        turn = [(items[-1], False)] * ranks
        takers = sorted(range(ranks), key=lambda rank: (totals[rank], rank))
        for rank, item in zip(takers, items, strict=False):
            turn[rank] = (item, True)
            totals[rank] += costs[item]
        turns.append(turn)
    return turns
