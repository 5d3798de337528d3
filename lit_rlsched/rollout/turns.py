"""Turns of completions that call tools: they leave their slot, and come back with a reply."""

import math
import time
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from itertools import count
from typing import Any, Literal

from lit_rlsched.data.messages import NO_PROMPT, RESET, ControlTokens
from lit_rlsched.environments.chat import Call, ToolChat
from lit_rlsched.environments.protocol import COLUMN, Environment, ToolSettings
from lit_rlsched.environments.scheduler import Answer, EnvironmentScheduler
from lit_rlsched.types import ENVIRONMENT, Completion, FinishReason, Group, Sample, stable_hash

Next = Literal["decodes", "over", "lost", "diverged"]
"""What becomes of a completion: it goes on, it is finished, its session has to be opened again, or
it has to begin anew."""


class State(Enum):
    """Where a completion is that has a session."""

    WAITS = auto()
    """For its environment."""
    ANSWERED = auto()
    """`poll` has not told yet what becomes of it."""
    DECODES = auto()


@dataclass(slots=True, eq=False)
class _Turn:
    """A completion from where its session is opened to where it is over."""

    sample: Sample
    environment: Environment
    state: State = State.WAITS
    becomes: Next | None = None
    """What becomes of it, if its environment has answered."""
    lost: bool = False
    """Whether its session has to be opened again, after the turn that it decodes."""
    reason: FinishReason | None = None
    """Why it has ended: it counts as unfinished until it is handed over to be scored."""
    again: list[tuple[int, int]] | None = None
    """Turns whose calls are made again; None if all are made."""
    at: int = 0
    """Tokens before the reply that comes next, while calls are made again."""
    restored: bool = False
    """Whether its environment has got its state back, so that no call has to be made."""
    due: tuple[int, int] | None = None
    """Decode step in which it goes on, and its place among all calls."""
    called: int | None = None
    """Decode step in which it has called its tools."""
    kept: Sequence[int] | None = None
    """Its tokens, while its round is over and the next one has not begun it."""
    left: float | None = None
    """When it has left its slot to call them."""


class Turns:
    """Opens the sessions of completions, calls their tools and appends the replies.

    A completion that outlives its round keeps its session for the next one, with the call that is
    running. All that is seen of it is as if the session had been opened again and its calls made
    again, as after a resume.
    """

    def __init__(
        self,
        tools: ToolSettings,
        chat: ToolChat,
        scheduler: EnvironmentScheduler,
        seed: int,
        row: Callable[[Group, Completion], dict[str, Any]],
        timeout: Callable[[Group], float | None] = lambda group: None,
        control_tokens: ControlTokens | None = None,
    ) -> None:
        self.tools = tools
        self._chat = chat
        self._scheduler = scheduler
        self._seed = seed
        self._row = row
        self._timeout = timeout
        self._control_tokens = control_tokens
        self._turns: dict[str, _Turn] = {}
        """Completions with a session, by id; `max_sessions` at most."""
        self._queue: dict[str, Sample] = {}
        """Completions that wait for the session of another to end."""
        self.counts: Counter[str] = Counter()
        """Completions begun, turns, tools called, failed calls and control tokens of the round."""
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
        waiting = [turn for turn in self._turns.values() if turn.state is not State.DECODES]
        return len(waiting) + len(self._queue)

    @property
    def _now(self) -> int:
        return self._step + self._skipped

    def begin(self, sample: Sample) -> None:
        """Let a completion begin, or go on, once there is a session for it."""
        turn, most = self._turns.get(sample.id), self.tools.max_sessions
        if turn is not None and turn.kept is not None:
            turn.sample, turn.kept = sample, None
            if turn.state is State.DECODES:
                turn.state, turn.becomes = State.ANSWERED, "decodes"
            self._set_due(turn)
        elif turn is None and len(self._turns) >= (most or math.inf):
            self._queue[sample.id] = sample
        else:
            self._open(sample)

    def _open(self, sample: Sample) -> None:
        """Open a session for a completion.

        The tokens of one that goes on tell what its environment was called with: it is called again
        and must answer the same. If it does not, the completion begins anew. An environment that
        has given its state gets it back instead.
        """
        completion = sample.completion
        completion.finish_reason = completion.dropped = completion.failure = None
        completion.given = {}
        prompt = sample.group.prompt
        environment = self.tools.environments.of(prompt.columns)
        goes_on = environment.has_state and bool(completion.token_ids)
        state = completion.environment_state if goes_on else ""
        if state:
            replies = [i for i, m in enumerate(completion.messages, 1) if m["role"] == "tool"]
            completion.messages = completion.messages[: max(replies, default=0)]
        else:
            completion.messages = []
        before = self._turns.get(sample.id)  # whose session was lost
        turn = _Turn(sample, environment, restored=bool(state), due=before.due if before else None)
        if completion.token_ids:
            turn.again = [] if state else turns_of(completion)
        asked = environment.takes_prompt or prompt.text != NO_PROMPT
        columns: dict[str, Any] = {**({"prompt": prompt.text} if asked else {}), **prompt.columns}
        if self.tools.environments.several:
            del columns[COLUMN]
        if environment.seeded:
            # the same for all completions of a group, which are compared with each other
            seed = stable_hash("environment", self._seed, sample.group.id) % 2**31
            columns = {"seed": seed, **columns}
        self.counts["begun"] += turn.again is None
        self._turns[sample.id] = turn
        self._wait_for(turn)
        self._scheduler.open(sample.id, environment.name, columns, state)

    def _wait_for(self, turn: _Turn) -> None:
        """Note that a completion waits for an answer."""
        turn.state = State.WAITS
        self._set_due(turn)

    def _set_due(self, turn: _Turn) -> None:
        if self.tools.tool_steps is not None and turn.due is None:
            turn.due = self._now + self.tools.tool_steps, next(self._places)

    def begin_round(self, samples: Collection[Sample]) -> None:
        """Count anew, and end the sessions of completions that do not go on as they were."""
        self.counts.clear()
        self._scheduler.cache.clear()
        self._step = self._skipped = 0
        tokens = {sample.id: sample.completion.token_ids for sample in samples}
        for turn in [*self._turns.values()]:
            if tokens.get(turn.sample.id) != turn.kept:
                self._forget(turn)
        self._waited, self._noted = 0.0, time.perf_counter()

    def ended(self, sample: Sample, step: int) -> Next | None:
        """Ask the environment of a completion whose turn has ended, if there is something to ask.

        It calls tools, or it is over and reward functions are called with its environment.
        """
        self._step = step
        turn = self._turns[sample.id]
        becomes: Next | None = "lost" if turn.lost else self._ask(turn)
        if becomes == "over":
            self._forget(turn)
        return becomes

    def _ask(self, turn: _Turn) -> Next | None:
        """Call the tools that a whole turn names; if it names none, the completion is over."""
        sample, completion = turn.sample, turn.sample.completion
        calls = self._calls(turn, start_of_turn(completion), len(completion.token_ids))
        turns = sum(message["role"] == "assistant" for message in completion.messages)
        most = self.tools.max_tool_calling_iterations
        if not calls or completion.finish_reason != "stop" or turns > (most or turns):
            return self._end(turn)
        self.counts["calls"] += len(calls)
        completion.finish_reason = None
        self._wait_for(turn)
        turn.called, turn.left = self._now, time.perf_counter()
        self._scheduler.call(sample.id, calls)
        return None

    def _calls(self, turn: _Turn, start: int, end: int) -> list[Call]:
        """Append the message of a turn, given by its first token and its end; return its calls."""
        completion = turn.sample.completion
        before = [*turn.sample.group.prompt.token_ids, *completion.token_ids[:start]]
        drawn = completion.token_ids[start:end]
        message, calls = self._chat.calls(before, drawn, turn.environment.schemas)
        self.counts["turns"] += 1
        self.counts["unparsed"] += calls is None
        completion.messages.append(message)
        return calls or []

    def _repeat(self, turn: _Turn) -> Next | None:
        """Make the next calls of a completion again; once all are made, let it go on."""
        sample, completion = turn.sample, turn.sample.completion
        whole = len(completion.token_ids)
        if turn.again:
            start, turn.at = turn.again.pop(0)
            if turn.at < whole:
                self._scheduler.call(sample.id, self._calls(turn, start, turn.at))
                return None
        turn.again = None
        replied = start_of_turn(completion) == whole
        ended = not replied and self._chat.ends(completion.token_ids[-1])
        if not ended and whole < sample.group.sampling.max_completion_length:
            return "decodes"
        completion.finish_reason = "stop" if ended else "length"
        return self._end(turn) if replied else self._ask(turn)

    def _same(self, turn: _Turn, ids: Sequence[int]) -> Next | None:
        """Go on with a repeat if an environment has answered what it had answered before."""
        sample, completion = turn.sample, turn.sample.completion
        end = turn.again[0][0] if turn.again else len(completion.token_ids)
        if [*completion.token_ids[turn.at : end]] == [*ids]:
            return self._repeat(turn)
        self._close(turn)
        if not self._warned:
            self._warned = True
            warnings.warn(
                "An environment was opened again and its calls were made again, and it has "
                f"answered otherwise (`{sample.group.prompt.uid}`): its completion begins anew. "
                "Completions that outlive a round or a worker, and classes with `cacheable`, need "
                "answers that depend on `reset`'s arguments and the calls alone.",
                stacklevel=2,
            )
        return "diverged"

    def _end(self, turn: _Turn) -> Next | None:
        """Ask for the rewards of a completion that is over, or end its session."""
        sample, completion = turn.sample, turn.sample.completion
        if not self._scheduler.scores or turn.environment.factory is None:
            self._close(turn)
            return "over"
        self._wait_for(turn)
        row = self._row(sample.group, completion)
        self._scheduler.reward(sample.id, row, self._timeout(sample.group))
        turn.reason, completion.finish_reason = completion.finish_reason, None
        return None

    def must_wait(self, step: int, idle: bool) -> bool:
        """Return whether nothing can go on before another answer is there."""
        self._collect()
        self._step = step
        turns = self._turns.values()
        waits = any(turn.state is State.WAITS for turn in turns)
        if self.tools.tool_steps is None:
            return idle and waits and not any(turn.state is State.ANSWERED for turn in turns)
        blocked = self._scheduler.needs_another_to_end
        due = [(t.due[0], t.state) for t in turns if t.due and not blocked(t.sample.id)]
        if idle and due:
            self._skipped += max(0, min(at for at, _ in due) - self._now)
        late = any(at <= self._now and state is State.WAITS for at, state in due)
        return late or (idle and not due and waits)

    def poll(self) -> Iterator[tuple[Sample, Next]]:
        """Yield completions that go on, and what becomes of them."""
        self._collect()
        now = self._now
        answered = [turn for turn in self._turns.values() if turn.state is State.ANSWERED]
        for turn in sorted(answered, key=lambda turn: turn.due or (now, 0)):
            becomes = turn.becomes
            assert becomes is not None
            if becomes != "lost":  # which waits on
                if turn.due is not None and turn.due[0] > now:
                    continue
                turn.due = None
                self._count_wait(turn)
                if turn.left is not None:
                    turn.sample.completion.tool_seconds += time.perf_counter() - turn.left
                    turn.left = None
            if becomes == "over":
                turn.sample.completion.finish_reason = turn.reason
            if becomes in ("over", "diverged"):
                self._forget(turn)
            turn.state, turn.becomes = State.DECODES, None
            yield turn.sample, becomes

    def _collect(self) -> None:
        """Use the answers that have come."""
        for answer in self._scheduler.poll():
            turn = self._turns[str(answer.key)]
            completion = turn.sample.completion
            if turn.state is not State.WAITS:
                turn.lost = True  # the engine may still report tokens
                continue
            completion.finish_reason, turn.reason = turn.reason, None
            turn.becomes = self._take(turn, answer)
            if turn.becomes is not None:
                turn.state = State.ANSWERED
            if turn.becomes == "over":
                turn.reason, completion.finish_reason = completion.finish_reason, None

    def _take(self, turn: _Turn, answer: Answer) -> Next | None:
        """Use an answer; None if there is another one to wait for."""
        if answer.what == "lost":
            self._close(turn)
            return "lost"
        if answer.failure is not None and answer.what == "open" and turn.restored:
            self._close(turn)
            return "diverged"  # its class has changed
        if answer.failure is not None:
            return self._drop(turn, *answer.failure.split(":", 1))
        if answer.what == "open":
            return self._begun(turn, answer.result, answer.state)
        if answer.what == "call":
            return self._replied(turn, answer.result, answer.state)
        turn.sample.completion.given = answer.result
        self._close(turn)
        return "over"

    def _begun(self, turn: _Turn, observation: str | None, state: str) -> Next | None:
        """Append the end of the prompt, with what `reset` has returned."""
        sample, environment = turn.sample, turn.environment
        completion, prompt = sample.completion, sample.group.prompt
        repeats = turn.again is not None
        if environment.factory is None or turn.restored:  # the prompt is whole
            return self._repeat(turn) if repeats else "decodes"
        before, completion.observation = completion.observation, observation or ""
        messages = sample.prompt
        assert not isinstance(messages, str), "checked at the start"
        ids = self._chat.opening(messages, environment.schemas, prompt.columns)
        begun, more = tuple(ids[: len(prompt.token_ids)]), ids[len(prompt.token_ids) :]
        fits = len(more) < sample.group.sampling.max_completion_length
        if begun != prompt.token_ids or not fits:
            completion.observation = before  # the model does not see the new one
            return self._drop(turn, "observation", "it is too long, or changes the prompt")
        if repeats:
            return self._same(turn, more)
        self._count_control_tokens(observation or "", RESET)
        completion.take_reply(more)
        completion.environment_state = state
        return "decodes"

    def _replied(
        self, turn: _Turn, replies: Sequence[tuple[str, Any, bool]], state: str
    ) -> Next | None:
        """Append the replies of tools. If they do not fit, the completion ends, as in TRL."""
        sample, completion = turn.sample, turn.sample.completion
        repeats = turn.again is not None
        messages = self._chat.replies(completion.messages[-1], replies)
        as_read = [{**m, "content": self._chat.text_of(m["content"])} for m in messages]
        have = turn.at if repeats else len(completion.token_ids)
        room = sample.group.sampling.max_completion_length - have
        try:
            ids = self._chat.reply(messages, room, sample.group.prompt.columns)
        except Exception as error:  # what a template raises has many types
            return self._drop(turn, "reply", f"{type(error).__name__}: {error}")
        if repeats:
            completion.messages += as_read
            return self._same(turn, ids or ())
        self._count_wait(turn)  # not what rewards take
        known = {tool["function"]["name"] for tool in turn.environment.schemas}
        self.counts["failures"] += sum(failed for _, _, failed in replies)
        for message in as_read:
            name, text = message["name"], message["content"]
            # a model writes any name
            source = f"The tool `{name}`" if name in known else "The reply to an unknown tool"
            self._count_control_tokens(text, source)
        if ids is None:
            completion.finish_reason = "stop"
            return self._end(turn)
        completion.messages += as_read
        completion.take_reply(ids)
        completion.environment_state = state
        if len(ids) < room:
            return "decodes"
        completion.finish_reason = "length"
        return self._end(turn)

    def _count_control_tokens(self, text: str, source: str) -> None:
        """Count the control tokens of a text, and tell of its source."""
        if self._control_tokens is not None:
            self.counts["control_tokens"] += self._control_tokens.of_reply(text, source)

    def _drop(self, turn: _Turn, kind: str, why: str = "") -> Next:
        """End a completion that its environment has failed."""
        completion = turn.sample.completion
        completion.dropped, completion.failure = f"environment_{kind}", why
        completion.finish_reason = completion.finish_reason or "stop"
        self._close(turn)
        return "over"

    def _count_wait(self, turn: _Turn) -> None:
        """Count the decode steps since a call; with `tool_steps` each reply has taken as many."""
        completion, called = turn.sample.completion, turn.called
        turn.called = None
        if self.tools.tool_steps is None:
            completion.waited += 0 if called is None else self._now - called
        else:
            replies = sum(author == ENVIRONMENT for author, _ in completion.segments[1:])
            completion.waited = self.tools.tool_steps * replies

    def _close(self, turn: _Turn) -> None:
        """End the session of a completion, whatever it waits for."""
        self._count_wait(turn)
        self._scheduler.close(turn.sample.id)

    def _forget(self, turn: _Turn) -> None:
        """End the session of a completion, and open one for the next that waits for its place."""
        self._count_wait(turn)
        self._scheduler.forget(turn.sample.id)
        del self._turns[turn.sample.id]
        if self._queue:
            self._open(self._queue.pop(next(iter(self._queue))))

    def leave(self, sample: Sample) -> None:
        """Forget a completion and end its session."""
        self._queue.pop(sample.id, None)
        if turn := self._turns.get(sample.id):
            self._forget(turn)

    def end_round(self, keep: bool = False) -> None:
        """End all sessions, or keep those of completions that have tokens.

        The others are opened anew in any case, so that a resumed run opens sessions in this order.
        """
        self._queue.clear()
        for turn in [*self._turns.values()]:
            if keep and (tokens := turn.sample.completion.token_ids):
                called = None if turn.called is None else 0
                self._count_wait(turn)
                turn.kept, turn.called, turn.due = tokens[:], called, None
            else:
                self._forget(turn)

    def note_free(self, slots: int) -> None:
        """Note that so many slots have been free since the last call."""
        now = time.perf_counter()
        self._waited += (now - self._noted) * max(0, min(slots, self.pending))
        self._noted = now

    def metrics(self, slot_seconds: float) -> dict[str, float]:
        """Return TRL's `tools/*` of the round, and waits."""
        calls, failed, begun = (self.counts[name] for name in ("calls", "failures", "begun"))
        cache = self._scheduler.cache
        return {
            "tools/call_frequency": calls / max(1, begun),
            "tools/failure_frequency": failed / max(1, calls),
            "tools/unparsed_frequency": self.counts["unparsed"] / max(1, self.counts["turns"]),
            "tools/cache_hit_rate": cache["hits"] / max(1, cache["lookups"]),
            "tools/control_tokens": float(self.counts["control_tokens"]),
            "tools/wait_ratio": min(1.0, self._waited / slot_seconds) if slot_seconds else 0.0,
        }

    def close(self) -> None:
        """Kill the workers."""
        self._scheduler.shut_down()

    def wait(self, seconds: float) -> None:
        """Wait until an environment has answered, for this time at most."""
        self._scheduler.wait(seconds)


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
