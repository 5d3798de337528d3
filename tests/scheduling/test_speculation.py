import pickle
from collections import Counter
from contextlib import nullcontext

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lit_rlsched.scheduling import drafters, speculation
from lit_rlsched.scheduling.drafters import ENDS, MOST_LEAD, GroupIndex
from lit_rlsched.scheduling.speculation import DraftCounts, Drafting, DraftTokens
from lit_rlsched.settings import UsageError
from lit_rlsched.types import Request, Sampling

long_ones = st.lists(st.integers(0, 1), min_size=20, max_size=60)  # their ends occur again
tokens = long_ones | st.lists(st.integers(0, 3), min_size=1, max_size=24)


def begin(drafts, name, text, left):
    drafts.begin(Request(name, text, 0, Sampling(left)))


class Repeat:
    def propose(self, text, siblings, most):
        return text[-1:] * most


class Siblings:
    def propose(self, text, siblings, most):
        return [len(siblings), sum(map(len, siblings)), most][:most]


class Broken:
    """Does in each call what its class attribute says next."""

    answers: list = []

    def propose(self, text, siblings, most):
        answer = self.answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return answer


class FirstRight:
    def propose(self, text, siblings, most):
        return [5, *[6] * (most - 1)]


class NeedsArgument:
    def __init__(self, path):
        self.path = path


HERE = __name__
LOAD = {"no_such_module.Mine": "ModuleNotFoundError", f"{HERE}.Mine": "AttributeError"}
LOAD |= {f"{HERE}.NeedsArgument": "TypeError", "Mine": "ValueError", "": "ValueError"}
LOAD |= {"builtins.dict": "has no method `propose"}


@pytest.mark.parametrize("path", LOAD)
def test_a_drafter_that_cannot_be_made_is_refused(path):
    with pytest.raises(UsageError, match=rf"`Speculation\(drafter='{path}'\)`.*{LOAD[path]}"):
        Drafting(drafter=path)


def followers(texts, prompts, end):
    """What followed the longest known end of `ENDS`, by trying all places.

    Of what a text began with, the start that it shares with the first one counts once.
    """
    for n in (n for n in ENDS if n <= len(end)):
        found: Counter = Counter()
        for number, text in enumerate(texts):
            shared = 0
            if number:
                while text[: shared + 1] == texts[0][: shared + 1] and shared < prompts[number]:
                    shared += 1
            places = range(max(n, shared), len(text))
            found.update(text[at] for at in places if text[at - n : at] == end[-n:])
        if found:
            return found
    return Counter()


@given(st.lists(tokens, min_size=1, max_size=3), st.integers(1, 6), st.data())
def test_drafts_follow_the_longest_known_end(texts, most, data):
    index = GroupIndex()
    prompts = [len(texts[0]), *(data.draw(st.integers(1, len(text))) for text in texts[1:])]
    for i, (text, n) in enumerate(zip(texts, prompts, strict=True)):
        index.learn(str(i), text[:n])
        index.learn(str(i), text)  # it goes on where it stopped
    whole = data.draw(st.sampled_from(texts))
    for text in (whole[:end] for end in range(len(whole), 0, -3)):
        drafted = [guess.token for guess in index.propose(text, most)]
        for i, token in enumerate(drafted):
            known = followers(texts, prompts, text + drafted[:i])
            assert token in known
            leader, times = known.most_common(1)[0]
            if 2 * times > known.total():
                assert token == leader
        assert len(drafted) == most or not followers(texts, prompts, text + drafted)


def vote(text, end):
    """The token that leads after an end by the vote of Boyer and Moore, and its lead."""
    token, lead = None, 0
    for at in (at for at in range(len(end), len(text)) if text[at - len(end) : at] == end):
        if token in (None, text[at]):
            token, lead = text[at], lead + 1
        elif lead:
            lead -= 1
        else:
            token, lead = text[at], 1
    return None if token is None else (token, lead)


@given(tokens)
def test_a_guess_rests_on_an_end_and_on_the_lead_of_its_token(text):
    index = GroupIndex()
    index.learn("0", text)
    for start in (text[:end] for end in range(2, 1 + len(text))):
        for guess in index.propose(start, 1):
            found = ((n, vote(text, start[-n:])) for n in ENDS if n <= len(start))
            n, (token, lead) = next((n, leader) for n, leader in found if leader)
            assert guess == (token, (n // 2, True, min(lead, MOST_LEAD)))


def test_a_prompt_counts_once_for_all_its_texts():
    prompt, index = [1, 2, 3, 4, 5, 6], GroupIndex()
    for number in range(4):
        index.learn(str(number), [*prompt, 7 + number, 1, 2, 9])
    assert [guess.token for guess in index.propose([8, 1, 2], 1)] == [9]


def test_the_longest_end_is_learned_across_the_place_where_learning_stopped():
    index = GroupIndex()
    index.learn("0", [3, 4, 5, 6, 9] * 3)
    for end in range(2, 8):
        index.learn("1", [1, 2, 3, 4, 5, 6, 7][:end])
    assert [guess.token for guess in index.propose([1, 2, 3, 4, 5, 6], 1)] == [7]


def test_a_sibling_s_text_is_proposed_in_full():
    drafts = DraftTokens(Drafting(tokens=3))
    begin(drafts, "g/0", [1, 2, 3, 4, 5, 6], 10)
    begin(drafts, "g/1", [9, 2, 3], 10)
    assert drafts.propose(["g/0", "g/1"]) == {"g/1": [4, 5, 6]}


def test_other_groups_say_what_a_group_does_not_know():
    drafts = DraftTokens(Drafting(tokens=3))
    begin(drafts, "g/0", [1, 2, 3, 4, 5, 6], 10)
    begin(drafts, "h/0", [8, 3, 4, 7, 9, 3, 4], 10)
    assert drafts.propose(["g/0", "h/0"]) == {"h/0": [7, 9, 3]}  # its own text is preferred
    drafts.take("h/0", [1, 2, 3, 4])
    assert drafts.propose(["g/0", "h/0"]) == {"h/0": [5, 6]}  # a longer end is known there
    drafts.leave("h/0")
    drafts.take("g/0", [2, 3])
    assert drafts.propose(["g/0"]) == {"g/0": [4, 5, 6]}


def test_what_groups_have_learned_of_each_other_ends_with_the_rollout():
    """Else a resumed run, which has not seen the last one, would take other steps."""
    drafts = DraftTokens(Drafting(tokens=3))
    begin(drafts, "g/0", [1, 2, 3, 4, 5, 6], 10)
    assert drafts.propose(["g/0"]) == {}
    drafts.leave("g/0")
    begin(drafts, "h/0", [9, 2, 3], 10)
    assert drafts.propose(["h/0"]) == {}


def test_a_group_that_comes_back_goes_on_to_learn_of_the_others():
    drafts = DraftTokens(Drafting(tokens=3))
    begin(drafts, "g/0", [9, 2, 3], 10)
    begin(drafts, "h/0", [1, 2], 10)
    drafts.leave("g/0")
    begin(drafts, "g/0", [9, 2, 3], 10)
    drafts.take("h/0", [3, 4, 5, 6])
    assert drafts.propose(["h/0", "g/0"]) == {"g/0": [4, 5, 6]}


def test_too_many_sequences_are_learned_anew(monkeypatch):
    monkeypatch.setattr(drafters, "MOST_SEQUENCES", 100)
    of_all: dict[int, int] = {}
    for i in range(50):
        index = GroupIndex(of_all)
        index.learn("0", range(20 * i, 20 * i + 20))
        guesses = index.propose([20 * i, 20 * i + 1], 2)
        assert [guess.token for guess in guesses] == [20 * i + 2, 20 * i + 3]
        assert len(of_all) <= 100 + len(ENDS) * 20


def test_what_is_drawn_after_a_proposal_is_learned():
    drafts = DraftTokens(Drafting(tokens=2))
    begin(drafts, "g/0", [1, 2, 3, 1], 99)
    assert drafts.propose(["g/0"]) == {}
    drafts.take("g/0", [2])
    assert drafts.propose(["g/0"]) == {"g/0": [3, 1]}
    drafts.take("g/0", [7, 8, 1, 2])
    assert drafts.propose(["g/0"]) == {"g/0": [3, 1]}  # as often as 7, and first
    drafts.take("g/0", [7, 1, 2])
    assert drafts.propose(["g/0"]) == {"g/0": [7, 8]}


@given(st.integers(1, 4), st.integers(1, 9), st.integers(0, 9))
def test_a_draft_ends_before_the_last_token_that_may_be_drawn(most, left, drawn):
    drafts = DraftTokens(Drafting(tokens=most))
    begin(drafts, "g/0", [5, 5, 5, 5], left + drawn)
    drafts.take("g/0", [5] * drawn)
    room = min(most, left - 1)
    assert drafts.propose(["g/0"]) == ({"g/0": [5] * room} if room else {})
    drafts.leave("g/0")  # it pauses, and goes on with what it has drawn
    drafts.begin(Request("g/0", [5, 5, 5, 5], 0, Sampling(left + drawn), [5] * drawn))
    assert drafts.propose(["g/0"]) == ({"g/0": [5] * room} if room else {})


def test_nothing_is_drafted_while_more_run():
    drafts = DraftTokens(Drafting(tokens=1, while_running=2))
    begin(drafts, "g/0", [5, 5, 5], 9)
    assert drafts.propose(["g/0", "unknown", "unknown too"]) == {}
    assert drafts.counts == DraftCounts()
    assert drafts.propose(["g/0", "unknown"]) == {"g/0": [5]}
    assert drafts.counts == DraftCounts(steps=1, row_steps=2, proposed=1)


def test_counts():
    drafts = DraftTokens(Drafting(tokens=4))
    begin(drafts, "g/0", [5, 5, 5], 7)
    begin(drafts, "g/1", [1], 7)
    drafts.take("unknown", [1, 2])
    assert drafts.propose(["g/0", "g/1"]) == {"g/0": [5, 5, 5]}
    drafts.take("g/0", [5, 5, 6])
    drafts.take("g/1", [1])
    assert drafts.counts == DraftCounts(steps=1, row_steps=2, proposed=3, accepted=2)
    begin(drafts, "h/0", [7, 7, 7], 2)
    assert drafts.propose(["g/1", "h/0", "unknown"]) == {"h/0": [7]}
    assert drafts.counts == DraftCounts(steps=2, row_steps=2 + 3, proposed=3 + 1, accepted=2)


@pytest.mark.parametrize("drafter", [None, f"{HERE}.Repeat"])
@pytest.mark.parametrize(("running", "steps"), [(1, 60), (8, 5)])
def test_guesses_that_are_wrong_are_drafted_no_more(drafter, running, steps):
    """The more requests run, the less a saved row is worth, and the sooner nothing is drafted."""
    drafts = DraftTokens(Drafting(tokens=4, drafter=drafter))
    begin(drafts, "g/0", [5, 6] * 9 + [5], 999)
    names, proposed = ["g/0", *map(str, range(running - 1))], []
    for i in range(100):
        proposed.append(len(drafts.propose(names).get("g/0", ())))
        drafts.take("g/0", [6] if i % 50 == 49 else [100 + i])
        begin(drafts, "g/0", [5, 6] * 9 + [5], 999)
    assert proposed[0] > 0
    assert not any(proposed[steps:])


@pytest.mark.parametrize("drafter", [None, f"{HERE}.Repeat"])
def test_guesses_are_judged_while_they_are_not_drafted(drafter):
    """So text that becomes easy to guess is drafted again."""
    drafts = DraftTokens(Drafting(tokens=4, drafter=drafter))
    names = ["g/0", *map(str, range(7))]
    for tokens in ([9], [5]):
        for _ in range(40):
            begin(drafts, "g/0", [5] * 9, 999)
            last = drafts.propose(names)
            drafts.take("g/0", tokens)
        assert last == ({"g/0": [5]} if tokens == [5] else {})  # half were right


def test_guesses_of_a_user_s_drafter_are_judged_by_their_places():
    drafts = DraftTokens(Drafting(tokens=2, drafter=f"{HERE}.FirstRight"))
    for _ in range(40):
        begin(drafts, "g/0", [5] * 9, 999)
        last = drafts.propose(["g/0", *"123"])
        drafts.take("g/0", [5, 5])
    assert last == {"g/0": [5]}  # the first is always right and the second never


@pytest.mark.parametrize(("device", "drafted"), [("cpu", 0), ("cuda", 2), ("xpu", 0)])
def test_a_position_costs_less_on_a_gpu(device, drafted):
    drafts = DraftTokens(Drafting(tokens=4), device=device)
    begin(drafts, "g/0", [5] * 9, 999)
    assert len(drafts.propose(["g/0", *map(str, range(31))]).get("g/0", ())) == drafted


def test_all_guesses_are_drafted_on_demand():
    drafts = DraftTokens(Drafting(tokens=4, drafter=f"{HERE}.Repeat"))
    drafts.draft_all()
    for _ in range(40):
        begin(drafts, "g/0", [5] * 9, 999)
        assert drafts.propose(["g/0", *map(str, range(31))]) == {"g/0": [5] * 4}
        drafts.take("g/0", [9])


def test_what_is_known_of_guesses_ends_with_the_rollout():
    drafts = DraftTokens(Drafting(tokens=4))
    for _ in range(2):
        begin(drafts, "g/0", [5] * 9, 999)
        assert drafts.propose(["g/0", *"1234567"]) == {"g/0": [5]}
        drafts.take("g/0", [5] * 3)
        drafts.leave("g/0")


def test_texts_of_a_group_stay_while_one_of_its_requests_runs():
    drafts = DraftTokens(Drafting(tokens=2))
    begin(drafts, "g/0", [1, 2, 3, 4], 9)
    begin(drafts, "g/1", [1], 9)
    drafts.leave("g/0")
    drafts.forget()
    drafts.take("g/1", [2])
    assert drafts.propose(["g/1"]) == {"g/1": [3, 4]}
    drafts.leave("g/1")
    begin(drafts, "g/2", [9, 2, 3], 9)  # it had waited for a slot
    assert drafts.propose(["g/2"]) == {"g/2": [4]}
    drafts.leave("g/2")
    drafts.leave("g/2")
    assert len(drafts) == 4 + 2 + 3
    drafts.forget()
    assert len(drafts) == 0


def test_a_resumed_request_goes_on_and_one_drawn_again_begins_anew():
    drafts = DraftTokens(Drafting(tokens=1))
    begin(drafts, "g/9", [0], 9)  # keeps the index
    begin(drafts, "g/0", [1, 2, 3], 2)
    drafts.propose(["g/0"])
    drafts.take("g/0", [4, 1])
    drafts.leave("g/0")
    begin(drafts, "g/0", [1, 2, 3, 4, 1, 2], 9)
    assert drafts.propose(["g/0"]) == {"g/0": [3]}
    drafts.leave("g/0")
    begin(drafts, "g/0", [6, 7, 8, 6, 7], 9)
    assert drafts.propose(["g/0"]) == {"g/0": [8]}
    assert len(drafts) == 1 + 5  # not the text that it had


def test_a_request_may_be_drawn_again_before_anything_is_drafted():
    drafts = DraftTokens(Drafting(tokens=1))
    begin(drafts, "g/0", [1, 2, 3], 9)
    drafts.leave("g/0")
    begin(drafts, "g/0", [6, 7, 8, 6, 7], 9)
    assert drafts.propose(["g/0"]) == {"g/0": [8]}


def test_a_long_run_keeps_a_bounded_number_of_tokens(monkeypatch):
    monkeypatch.setattr(speculation, "IDLE_TOKENS", 100)
    drafts = DraftTokens(Drafting())
    for i in range(50):
        for j in range(2):
            begin(drafts, f"{i}/{j}", [1, 2, 3, 4, 5], 9)
            drafts.propose([f"{i}/{j}"])
            drafts.take(f"{i}/{j}", [6, 7])
        assert len(drafts) <= 100 + 14
        drafts.leave(f"{i}/0")
        drafts.leave(f"{i}/1")
        assert len(drafts) == min(14 * (i + 1), 98)
    begin(drafts, "49/2", [9, 5, 6], 9)  # the last groups are those that are kept
    assert drafts.propose(["49/2"]) == {"49/2": [7]}


@given(st.lists(st.integers(1, 9), min_size=1), st.integers(1, 40))
@example([4, 4, 4], 8)
def test_as_many_of_the_last_groups_are_kept_as_there_is_room_for(sizes, room):
    drafts = DraftTokens(Drafting())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(speculation, "IDLE_TOKENS", room)
        for i, size in enumerate(sizes):
            begin(drafts, f"{i}/0", [1] * size, 9)
            drafts.leave(f"{i}/0")
    while sum(sizes) > room:
        sizes = sizes[1:]
    assert len(drafts) == sum(sizes)


def test_a_user_s_drafter_gets_the_text_and_those_of_its_siblings():
    drafts = DraftTokens(Drafting(tokens=3, drafter=f"{HERE}.Siblings"))
    begin(drafts, "g/0", [1, 2], 9)
    begin(drafts, "g/1", [1, 2, 3], 9)
    begin(drafts, "h/0", [7], 3)
    assert drafts.propose(["g/0", "h/0"]) == {"g/0": [1, 3, 3], "h/0": [0, 0]}
    drafts = DraftTokens(Drafting(drafter=f"{HERE}.Repeat"))
    begin(drafts, "g/0", [1, 2], 9)
    assert drafts.propose(["g/0"]) == {"g/0": [2, 2, 2, 2]}


def test_a_user_s_drafter_is_asked_for_at_least_one_token():
    drafts = DraftTokens(Drafting(drafter=f"{HERE}.Broken"))
    begin(drafts, "g/0", [1, 2], 1)
    Broken.answers = [RuntimeError("it was asked")]
    assert drafts.propose(["g/0"]) == {}
    assert drafts.counts.failures == 0


def endless():
    while True:
        yield 1


RUBBISH = [RuntimeError("no"), None, 3, [1.0], ["1"], [-1], [5], [0] * 9, endless(), [[1]], [2**70]]


def test_rubbish_of_a_user_s_drafter_is_counted():
    drafts = DraftTokens(Drafting(tokens=4, drafter=f"{HERE}.Broken"), vocab_size=5)
    begin(drafts, "g/0", [1, 2], 9)
    Broken.answers = [*RUBBISH, [], [0, 4]]
    for i in range(len(RUBBISH)):
        told = pytest.warns(UserWarning, match=r"`Speculation\(drafter='.*Broken'\)`.*Error: no\)")
        with nullcontext() if i else told:
            assert drafts.propose(["g/0"]) == {}
        assert drafts.counts == DraftCounts(failures=i + 1)
    assert drafts.propose(["g/0"]) == {}
    assert drafts.propose(["g/0"]) == {"g/0": [0, 4]}
    assert drafts.counts.failures == len(RUBBISH)


def test_ctrl_c_in_a_drafter_is_not_its_failure():
    drafts = DraftTokens(Drafting(drafter=f"{HERE}.Broken"))
    begin(drafts, "g/0", [1, 2], 9)
    Broken.answers = [KeyboardInterrupt()]
    with pytest.raises(KeyboardInterrupt):
        drafts.propose(["g/0"])


def test_settings_can_be_sent_to_another_process():
    settings = Drafting(tokens=2, while_running=3, drafter=f"{HERE}.Repeat")
    assert pickle.loads(pickle.dumps(settings)) == settings
