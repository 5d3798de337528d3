"""Dividing work: groups among engines, and micro-batches among the ranks that train on them."""

from collections.abc import Mapping, Sequence

from lit_rlsched.types import Request


def promised_tokens(request: Request) -> float:
    """Tokens that a request may still draw: the prediction, or all that its limit allows."""
    if request.expected is not None:
        return request.expected
    return request.sampling.max_completion_length - len(request.prefix_ids)


def route(groups: Mapping[str, float], loads: Sequence[float]) -> dict[str, int]:
    """Send each group to the engine with the fewest promised tokens, the first of them in a tie.

    A group stays together, so that its prompt is prefilled once.
    """
    loads, homes = [*loads], {}
    for group, tokens in groups.items():
        homes[group] = min(range(len(loads)), key=loads.__getitem__)
        loads[homes[group]] += tokens
    return homes


def moves(waiting: Sequence[Sequence[Request]], free: Sequence[int]) -> dict[str, int]:
    """Choose waiting requests that move to engines with free slots.

    A request moves if it would wait where it is and start at once elsewhere. The engine with the
    most requests too many gives its newest first, those of one group together.
    """
    left, free, moved = [list(requests) for requests in waiting], [*free], dict[str, int]()
    while True:
        to = max(range(len(free)), key=free.__getitem__)
        givers = [i for i, requests in enumerate(left) if requests and free[i] < 0]
        if free[to] <= 0 or not givers:
            return moved
        giver = min(givers, key=free.__getitem__)
        group = left[giver][-1].group
        while left[giver] and left[giver][-1].group == group and free[to] > 0 > free[giver]:
            moved[left[giver].pop().id] = to
            free[to] -= 1
            free[giver] += 1


def share(costs: Sequence[float], ranks: int) -> list[list[tuple[int, bool]]]:
    """Assign items to ranks, in passes in which each rank has one item of about equal cost.

    Ranks that exchange weights or gradients in every pass wait for the slowest one, so a pass
    takes items that are neighbours in cost. Within it, the rank that has the least so far gets the
    most expensive item. With one rank the order is that of `costs`.
    """
    if ranks == 1:
        return [[(item, True)] for item in range(len(costs))]
    order = sorted(range(len(costs)), key=lambda item: (-costs[item], item))
    totals = [0.0] * ranks
    passes = []
    for begin in range(0, len(order), ranks):
        items = order[begin : begin + ranks]
        of_pass = [(items[-1], False)] * ranks
        takers = sorted(range(ranks), key=lambda rank: (totals[rank], rank))
        for rank, item in zip(takers, items, strict=False):
            of_pass[rank] = (item, True)
            totals[rank] += costs[item]
        passes.append(of_pass)
    return passes
