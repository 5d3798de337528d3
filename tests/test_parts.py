from lit_rlsched.training.streaming import Parts
from lit_rlsched.types import Completion, Group, Prompt, Sampling


def group(name, scored=True):
    """Ten tokens: two of the prompt, eight of its completion."""
    scores = [1.0] if scored else None
    completion = Completion(0, [5] * 8, [-1.0] * 8, [(0, 8)], "stop", scores=scores)
    return Group(name, Prompt(name, name, (1, 2)), Sampling(8), [completion])


def names(parts):
    return ["".join(g.id for g in part) for part in parts]


def test_parts_are_as_large_as_a_micro_batch_in_the_order_of_decoding():
    parts = Parts(0.5, update_prompts=6, part_tokens=20)
    a, b, c, d, e, f = map(group, "abcdef")
    assert names(parts.ready([a, b])) == []
    assert names(parts.ready([a, b, c])) == ["abc"]
    assert names(parts.ready([a, b, c, d, e, f])) == ["de"]  # `f` waits for another


def test_an_update_of_one_micro_batch_is_cut_by_the_share():
    parts = Parts(0.5, update_prompts=4, part_tokens=2048)
    assert names(parts.ready([group(name) for name in "abc"])) == ["ab"]


def test_the_tokens_of_each_part_are_counted_from_zero():
    parts = Parts(0.5, update_prompts=6, part_tokens=21)
    assert names(parts.ready([group(name) for name in "abcdef"])) == ["abc", "def"]


def test_nothing_overtakes_a_group_without_scores():
    parts = Parts(0, 6, 10)
    late = group("b", scored=False)
    groups = [group("a"), late, group("c")]
    assert names(parts.ready(groups)) == ["a"]
    ready = parts.ready(groups)
    late.completions[0].scores = [1.0]
    assert names(ready) == ["b", "c"]


def test_scores_that_come_while_gradients_are_computed_count_at_once():
    parts = Parts(0, 6, 10)
    late = group("b", scored=False)
    ready = parts.ready([group("a"), late])
    assert names([next(ready)]) == ["a"]
    late.completions[0].scores = [1.0]
    assert names(ready) == ["b"]


def test_the_first_part_waits_for_a_share_of_the_update():
    parts = Parts(0.5, 6, 10)
    a, b, c, d = map(group, "abcd")
    assert names(parts.ready([a, b])) == []
    assert names(parts.ready([a, b, c, d])) == ["abc", "d"]
