"""How well counts fit probabilities."""

from collections.abc import Hashable, Mapping

import torch


def p_value(counts: Mapping[Hashable, int], probabilities: Mapping[Hashable, float]) -> float:
    """How likely counts as far from the probabilities as these are, or farther."""
    assert counts.keys() <= probabilities.keys()
    total = sum(counts.values())
    cells, rest = [], [0.0, 0.0]
    for cell, probability in probabilities.items():
        count, mean = counts.get(cell, 0), total * probability
        if mean >= 5:
            cells.append((count, mean))
        else:  # too few for the approximation: together
            rest = [rest[0] + count, rest[1] + mean]
    cells += [tuple(rest)] if rest[1] > 0 else []
    statistic = sum((n - mean) ** 2 / mean for n, mean in cells)
    halves = torch.tensor([(len(cells) - 1) / 2, statistic / 2]).double()
    return float(torch.special.gammaincc(*halves))
