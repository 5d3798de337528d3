"""Turns of completions that call tools: they leave their slot, and come back with a reply."""

import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Literal

from lit_rlsched.data.messages import NO_PROMPT, RESET, ControlTokens
from lit_rlsched.environments.chat import Call, ToolChat
from lit_rlsched.environments.protocol import COLUMN, Environment, Environments
from lit_rlsched.environments.scheduler import Answer, EnvironmentScheduler
from lit_rlsched.types import ENVIRONMENT, Completion, FinishReason, Group, Sample, stable_hash

Next = Literal["decodes", "over", "lost", "diverged"]
"""What becomes of a completion: it goes on, it is finished, its session has to be opened again, or
it has to begin anew."""


class Turns:
    """Opens the sessions of completions, calls their tools and appends the replies."""

    def __init__(
        self,
        environments: Environments,
        chat: ToolChat,
        scheduler: EnvironmentScheduler,
        seed: int,
        row: Callable[[Group, Completion], dict[str, Any]],
        max_tool_calling_iterations: int | None = None,
        tool_steps: int | None = None,
        timeout: Callable[[Group], float | None] = lambda group: None,
        control_tokens: ControlTokens | None = None,
    ) -> None:
        self.tool_steps = tool_steps
        self._environments = environments
        self._chat = chat
        self._scheduler = scheduler
        self._seed = seed
        self._row = row
        self._timeout = timeout
        self._control_tokens = control_tokens
        self._most = max_tool_calling_iterations
        self._open: dict[str, Sample] = {}
        """Samples whose session is open, or waits to be opened, by id."""
        self._waiting: set[str] = set()
        """Ids of those that wait for their environment."""
        self._reasons: dict[str, FinishReason | None] = {}
        """Why completions have ended that wait for their rewards."""
        self._lost: set[str] = set()
        """Ids of completions that decode, and whose session is opened again after their turn."""
        self._repeats: dict[str, _Repeat] = {}
        """Completions whose calls are made again, by id."""
        self.counts: Counter[str] = Counter()
        """Completions begun, turns, tools called, failed calls and control tokens of the round."""
        self._answered: dict[str, tuple[Sample, Next]] = {}
        """What becomes of completions whose environments have answered, by id."""
        self._due: dict[str, tuple[int, int]] = {}
        """Decode step in which a completion goes on, and its place among all calls, by id."""
        self._called: dict[str, int] = {}
        """Decode step in which a completion has called its tools, by id."""
        self._places = count()
        self._step = self._skipped = 0
        """Decode steps of the round, and steps that nothing had to be decoded in."""
        self._warned = False
        self._waited = 0.0
        """Seconds for which slots were free while as many completions waited, of all slots."""
        self._noted = time.perf_counter()

    @property
    def pending(self) -> int:
        """Number of completions that wait for their environment."""
        return len(self._waiting) + len(self._answered)

    @property
    def _now(self) -> int:
        return self._step + self._skipped

    def _of(self, sample: Sample) -> Environment:
        return self._environments.of(sample.group.prompt.columns)

    def begin(self, sample: Sample) -> None:
        """Open a session for a completion that is to begin, or to go on.

        The tokens of one that goes on tell what its environment was called with: it is called again
        and must answer the same. If it does not, the completion begins anew. An environment that
        has given its state gets it back instead.
        """
        completion = sample.completion
        completion.finish_reason = completion.dropped = completion.failure = None
        completion.given = {}
        environment, prompt = self._of(sample), sample.group.prompt
        goes_on = environment.has_state and bool(completion.token_ids)
        state = completion.environment_state if goes_on else ""
        if state:
            replies = [i for i, m in enumerate(completion.messages, 1) if m["role"] == "tool"]
            completion.messages = completion.messages[: max(replies, default=0)]
        else:
            completion.messages = []
        if completion.token_ids:
            turns = [] if state else turns_of(completion)
            self._repeats[sample.id] = _Repeat(turns, restored=bool(state))
        asked = environment.takes_prompt or prompt.text != NO_PROMPT
        given = {"prompt": prompt.text} if asked else {}
        columns: dict[str, Any] = {**given, **prompt.columns}
        if self._environments.several:
            del columns[COLUMN]
        if environment.seeded:
            # the same for all completions of a group, which are compared with each other
            seed = stable_hash("environment", self._seed, sample.group.id) % 2**31
            columns = {"seed": seed, **columns}
        self.counts["begun"] += sample.id not in self._repeats
        self._open[sample.id] = sample
        self._wait_for(sample)
        self._scheduler.open(sample.id, environment.name, columns, state)

    def _wait_for(self, sample: Sample) -> None:
        self._waiting.add(sample.id)
        if self.tool_steps is not None:
            due = self._now + self.tool_steps
            self._due.setdefault(sample.id, (due, next(self._places)))

    def begin_round(self, step: int) -> None:
        """Count anew, from a decode step on."""
        self.counts.clear()
        self._step, self._skipped = step, 0
        self._waited, self._noted = 0.0, time.perf_counter()

    def ended(self, sample: Sample, step: int | None = None) -> Next | None:
        """Ask the environment of a completion whose turn has ended, if there is something to ask.

        It calls tools, or it is over and reward functions are called with its environment.
        """
        if step is not None:
            self._step = step
        if sample.id in self._lost:
            self._lost.remove(sample.id)
            return "lost"
        completion = sample.completion
        calls = self._calls(sample, start_of_turn(completion), len(completion.token_ids))
        turns = sum(message["role"] == "assistant" for message in completion.messages)
        if calls and completion.finish_reason == "stop" and turns <= (self._most or turns):
            self.counts["calls"] += len(calls)
            completion.finish_reason = None
            self._wait_for(sample)
            self._called[sample.id] = self._now
            self._scheduler.call(sample.id, calls)
            return None
        return self._end(sample)

    def _calls(self, sample: Sample, start: int, end: int) -> list[Call]:
        """Append the message of a turn, given by its first token and its end; return its calls."""
        completion = sample.completion
        before = [*sample.group.prompt.token_ids, *completion.token_ids[:start]]
        turn = completion.token_ids[start:end]
        message, calls = self._chat.calls(before, turn, self._of(sample).schemas)
        self.counts["turns"] += 1
        self.counts["unparsed"] += calls is None
        completion.messages.append(message)
        return calls or []

    def _repeat(self, sample: Sample) -> Next | None:
        """Make the next calls of a completion again; once all are made, let it go on."""
        repeat, completion = self._repeats[sample.id], sample.completion
        whole = len(completion.token_ids)
        if repeat.turns:
            start, repeat.at = repeat.turns.pop(0)
            if repeat.at < whole:
                self._wait_for(sample)
                self._scheduler.call(sample.id, self._calls(sample, start, repeat.at))
                return None
        del self._repeats[sample.id]
        replied = start_of_turn(completion) == whole
        ended = not replied and self._chat.ends(completion.token_ids[-1])
        if not ended and whole < sample.group.sampling.max_completion_length:
            return "decodes"
        completion.finish_reason = "stop" if ended else "length"
        return self._end(sample) if replied else self.ended(sample)

    def _same(self, sample: Sample, ids: Sequence[int]) -> Next | None:
        """Go on with a repeat if an environment has answered what it had answered before."""
        repeat, completion = self._repeats[sample.id], sample.completion
        end = repeat.turns[0][0] if repeat.turns else len(completion.token_ids)
        if [*completion.token_ids[repeat.at : end]] == [*ids]:
            return self._repeat(sample)
        self.leave(sample)
        if not self._warned:
            self._warned = True
            warnings.warn(
                "An environment was opened again and its calls were made again, and it has "
                f"answered otherwise (`{sample.group.prompt.uid}`): its completion begins anew. "
                "Completions that outlive a round or a worker need environments whose answers "
                "depend on `reset`'s arguments and the calls alone.",
                stacklevel=2,
            )
        return "diverged"

    def _end(self, sample: Sample) -> Next | None:
        """Ask for the rewards of a completion that is over, or end its session."""
        if self._scheduler.scores and self._of(sample).factory is not None:
            self._wait_for(sample)
            row = self._row(sample.group, sample.completion)
            self._scheduler.reward(sample.id, row, self._timeout(sample.group))
            # unfinished, as long as it is not handed over to be scored
            self._reasons[sample.id] = sample.completion.finish_reason
            sample.completion.finish_reason = None
            return None
        self.leave(sample)
        return "over"

    def must_wait(self, step: int, idle: bool) -> bool:
        """Return whether nothing can go on before another answer is there."""
        self._collect()
        self._step = step
        if self.tool_steps is None:
            return idle and bool(self._waiting) and not self._answered
        blocked = self._scheduler.needs_another_to_end
        due = {i: at for i, (at, _) in self._due.items() if not blocked(i)}
        if idle and due:
            self._skipped += max(0, min(due.values()) - self._now)
        late = any(at <= self._now for i, at in due.items() if i in self._waiting)
        return late or (idle and not due and bool(self._waiting))

    def poll(self) -> Iterator[tuple[Sample, Next]]:
        """Yield completions that go on, and what becomes of them."""
        self._collect()
        now = self._now
        due = {i: self._due.get(i, (now, 0)) for i in self._answered}
        for i in sorted(due, key=due.__getitem__):
            sample, becomes = self._answered[i]
            if becomes == "lost":  # it waits on
                yield self._answered.pop(i)
            elif due[i][0] <= now:
                self._due.pop(i, None)
                self._count_wait(sample)
                if becomes == "over":
                    sample.completion.finish_reason = self._reasons.pop(i)
                yield self._answered.pop(i)

    def _collect(self) -> None:
        """Use the answers that have come."""
        for answer in self._scheduler.poll():
            sample = self._open[str(answer.key)]
            decodes = sample.id not in self._waiting
            self._waiting.discard(sample.id)
            reason = self._reasons.pop(sample.id, None)
            sample.completion.finish_reason = reason
            if decodes:  # the engine may still report tokens: it begins again after its turn
                del self._open[sample.id]
                self._lost.add(sample.id)
                continue
            due = self._due.get(sample.id)
            becomes = self._take(sample, answer)
            if becomes is not None:
                self._answered[sample.id] = sample, becomes
                if due is not None:  # also if it has left
                    self._due[sample.id] = due
            if becomes == "over":  # unfinished, as long as it is not handed over
                self._reasons[sample.id] = sample.completion.finish_reason
                sample.completion.finish_reason = None

    def _take(self, sample: Sample, answer: Answer) -> Next | None:
        """Use an answer; None if there is another one to wait for."""
        if answer.what == "lost":
            self.leave(sample)
            return "lost"
        repeat = self._repeats.get(sample.id)
        if answer.failure is not None and answer.what == "open" and repeat and repeat.restored:
            self.leave(sample)
            return "diverged"  # its class has changed
        if answer.failure is not None:
            return self._drop(sample, *answer.failure.split(":", 1))
        if answer.what == "open":
            return self._begun(sample, answer.result, answer.state)
        if answer.what == "call":
            return self._replied(sample, answer.result, answer.state)
        sample.completion.given = answer.result
        self.leave(sample)
        return "over"

    def _begun(self, sample: Sample, observation: str | None, state: str) -> Next | None:
        """Append the end of the prompt, with what `reset` has returned."""
        environment, prompt = self._of(sample), sample.group.prompt
        repeats = sample.id in self._repeats
        restored = repeats and self._repeats[sample.id].restored
        if environment.factory is None or restored:  # the prompt is whole
            return self._repeat(sample) if repeats else "decodes"
        before, sample.completion.observation = sample.completion.observation, observation or ""
        messages = sample.prompt
        assert not isinstance(messages, str), "checked at the start"
        ids = self._chat.opening(messages, environment.schemas, prompt.columns)
        begun, more = tuple(ids[: len(prompt.token_ids)]), ids[len(prompt.token_ids) :]
        fits = len(more) < sample.group.sampling.max_completion_length
        if begun != prompt.token_ids or not fits:
            sample.completion.observation = before  # the model does not see the new one
            return self._drop(sample, "observation", "it is too long, or changes the prompt")
        if repeats:
            return self._same(sample, more)
        self._count_control_tokens(observation or "", RESET)
        sample.completion.take_reply(more)
        sample.completion.environment_state = state
        return "decodes"

    def _replied(
        self, sample: Sample, replies: Sequence[tuple[str, Any, bool]], state: str
    ) -> Next | None:
        """Append the replies of tools. If they do not fit, the completion ends, as in TRL."""
        completion, repeats = sample.completion, sample.id in self._repeats
        self.counts["failures"] += 0 if repeats else sum(failed for _, _, failed in replies)
        messages = self._chat.replies(completion.messages[-1], replies)
        as_read = [{**m, "content": self._chat.text_of(m["content"])} for m in messages]
        have = self._repeats[sample.id].at if repeats else len(completion.token_ids)
        room = sample.group.sampling.max_completion_length - have
        try:
            ids = self._chat.reply(messages, room, sample.group.prompt.columns)
        except Exception as error:  # what a template raises has many types
            return self._drop(sample, "reply", f"{type(error).__name__}: {error}")
        if repeats:
            completion.messages += as_read
            return self._same(sample, ids or ())
        self._count_wait(sample)  # not what rewards take
        known = {tool["function"]["name"] for tool in self._of(sample).schemas}
        for message in as_read:
            name, text = message["name"], message["content"]
            # a model writes any name
            source = f"The tool `{name}`" if name in known else "The reply to an unknown tool"
            self._count_control_tokens(text, source)
        if ids is None:
            completion.finish_reason = "stop"
            return self._end(sample)
        completion.messages += as_read
        completion.take_reply(ids)
        completion.environment_state = state
        if len(ids) < room:
            return "decodes"
        completion.finish_reason = "length"
        return self._end(sample)

    def _count_control_tokens(self, text: str, source: str) -> None:
        if self._control_tokens is not None:
            self.counts["control_tokens"] += self._control_tokens.of_reply(text, source)

    def _drop(self, sample: Sample, kind: str, why: str = "") -> Next:
        completion = sample.completion
        completion.dropped, completion.failure = f"environment_{kind}", why
        completion.finish_reason = completion.finish_reason or "stop"
        self.leave(sample)
        return "over"

    def _count_wait(self, sample: Sample) -> None:
        """Count the decode steps since a call; with `tool_steps` each reply has taken as many."""
        called, completion = self._called.pop(sample.id, self._now), sample.completion
        if self.tool_steps is None:
            completion.waited += self._now - called
        else:
            replies = sum(author == ENVIRONMENT for author, _ in completion.segments[1:])
            completion.waited = self.tool_steps * replies

    def leave(self, sample: Sample) -> None:
        """End the session of a completion, whatever it waits for."""
        self._lost.discard(sample.id)
        self._reasons.pop(sample.id, None)
        self._count_wait(sample)
        for by_id in (self._repeats, self._answered, self._due):
            by_id.pop(sample.id, None)
        if self._open.pop(sample.id, None) is not None:
            self._waiting.discard(sample.id)
            self._scheduler.close(sample.id)

    def end_round(self) -> None:
        """End all sessions."""
        for sample in [*self._open.values(), *(s for s, _ in self._answered.values())]:
            self._count_wait(sample)
        for of_ids in (self._open, self._waiting, self._reasons, self._lost, self._repeats):
            of_ids.clear()
        for by_id in (self._answered, self._due, self._called):
            by_id.clear()
        self._scheduler.end_round()

    def note_free(self, slots: int) -> None:
        """Note that so many slots have been free since the last call."""
        now = time.perf_counter()
        self._waited += (now - self._noted) * max(0, min(slots, self.pending))
        self._noted = now

    def metrics(self, slot_seconds: float) -> dict[str, float]:
        """Return TRL's `tools/*` of the round, and waits."""
        calls, failed, begun = (self.counts[name] for name in ("calls", "failures", "begun"))
        unparsed = self.counts["unparsed"] / max(1, self.counts["turns"])
        return {
            "tools/call_frequency": calls / max(1, begun),
            "tools/failure_frequency": failed / max(1, calls),
            "tools/unparsed_frequency": unparsed,
            "tools/control_tokens": float(self.counts["control_tokens"]),
            "tools/wait_ratio": min(1.0, self._waited / slot_seconds) if slot_seconds else 0.0,
        }

    def close(self) -> None:
        """Kill the workers."""
        self._scheduler.shut_down()

    def wait(self, seconds: float) -> None:
        """Wait until an environment has answered, for this time at most."""
        self._scheduler.wait(seconds)


@dataclass(slots=True)
class _Repeat:
    """How far the calls of a completion have been made again."""

    turns: list[tuple[int, int]]
    """Turns to come."""
    at: int = 0
    """Tokens before the reply that comes next."""
    restored: bool = False
    """Whether its environment has got its state back, so that no call has to be made."""


def turns_of(completion: Completion) -> list[tuple[int, int]]:
    """Return the first token and the end of each turn that policies have drawn."""
    turns, start, at = [], 0, 0
    for author, tokens in completion.segments:
        at += tokens
        if author == ENVIRONMENT:
            if at - tokens > start:
                turns.append((start, at - tokens))
            start = at
    return [*turns, (start, at)] if at > start else turns


def start_of_turn(completion: Completion) -> int:
    """Return the number of tokens before the last turn of a completion."""
    start = len(completion.token_ids)
    for author, tokens in reversed(completion.segments):
        if author == ENVIRONMENT:
            break
        start -= tokens
    return start
