"""Whether verified completions are draws of the newest policy, end to end on real vLLM.

    python -m benchmarks run draft_law

A policy with eight tokens and at most five per completion, so the probability of every completion
is known. A run draws two rounds of 256 times the same prompt, 16 completions each (4,096), with an
update between them. Completions of the second round that were begun before the update are drafts,
which are verified. The statistic is Pearson's chi-square of the second round's completions by
length, end (EOS or cut at the limit) and first three tokens, against the newest policy, which is
the trainer's. Cells with less than 0.5 % of the expected completions count as one.

`right` runs have `RolloutWindow`, with as many slots as a round or with fewer, so that drafts
begin early enough to reach the limit. They must have p-values that are uniform: ten seeds are
combined by Fisher's method. Each other case makes one mistake that the package does not make, and
must be found in every seed, with p < 1e-6:

- `stale`: drafts are trained on as they are;
- `ended drafts are not verified`, but cut ones are;
- `cut drafts are drawn again` instead of being verified;
- `low rewards are drawn again`: ended drafts without a reward are not verified but replaced;
- `another version's weights`: what follows a cut is drawn as if the newest policy had drawn the
  draft;
- `noise comes again`: a completion goes on with the noise that its draft was drawn with. This
  changes little, so a run has four times the completions.

There are two learning rates. With the large one the two policies differ much, and a fifth of the
drafts' tokens is kept. Drafts that are drawn again do not show there, because hardly anything
depends on a draft of which nothing is kept; they show with the small one, with which nearly all is
kept. `right` runs are made with both.
"""

import copy
import math
import sys
import tempfile
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch

from benchmarks import results
from benchmarks.models import make_model
from lit_rlsched.rollout.result import DraftAudit
from lit_rlsched.training.draft_verifier import Drafts
from lit_rlsched.types import Draft, Group

EOS, VOCAB, LIMIT = 1, 8, 5
TOKENS = ["<pad>", "<eos>", "<bos>", *"01234"]
PROMPTS, GENERATIONS = 256, 16
MORE = 4
"""Times as many completions per prompt where noise comes again."""
SMALLEST = 0.005
"""Share of the completions below which cells are taken together."""
SMALL, LARGE = 2e-5, 3e-3
"""Learning rates."""
Fate = Literal["verified", "kept", "drawn again"]
T = TypeVar("T", bound=Hashable)


def _fates() -> dict[str, Callable[[Draft, bool], Fate]]:
    """What becomes of a draft, which has ended or not, by mistake."""
    liked = TOKENS.index("1")
    return {
        "stale": lambda draft, ended: "kept",
        "ended drafts are not verified": lambda draft, ended: "kept" if ended else "verified",
        "cut drafts are drawn again": lambda draft, ended: "verified" if ended else "drawn again",
        "low rewards are drawn again": lambda draft, ended: (
            "drawn again" if ended and liked not in draft.token_ids else "verified"
        ),
    }


FATES = _fates()
WEIGHTS, NOISE = "another version's weights", "noise comes again"
RIGHT = ("right", "right, fewer slots")
CASES = (*RIGHT, *FATES, WEIGHTS, NOISE)
RATES = {
    **dict.fromkeys(CASES, (LARGE,)),
    **dict.fromkeys(RIGHT, (SMALL, LARGE)),
    **dict.fromkeys((name for name in FATES if name.endswith("drawn again")), (SMALL,)),
}
"""Learning rates that a case is run with."""


class Mistaken(Drafts):
    """Does something else with some drafts, or verifies with other weights."""

    def __init__(self, case: str) -> None:
        super().__init__()
        self._fate: Callable[[Draft, bool], Fate] = FATES.get(case, lambda *draft: "verified")
        self._newest = case == WEIGHTS

    def verify(
        self, groups: Sequence[Group], policy: torch.nn.Module, version: int, *how: Any
    ) -> DraftAudit:
        """Verify those drafts that the mistake leaves."""
        if self._newest:
            for drew in self.weights:
                self.keep_version(policy, drew)
        for completion in (c for group in groups for c in group.completions):
            if (draft := completion.draft) is None:
                continue
            ended = draft.token_ids[-1] == EOS or len(draft.token_ids) == LIMIT
            if (fate := self._fate(draft, ended)) == "verified":
                continue
            completion.draft = None
            if fate == "kept":
                completion.token_ids = array("i", draft.token_ids)
                completion.logprobs = array("d", draft.logprobs)
                completion.segments = [(version, len(draft.token_ids))]
                if ended:
                    completion.finish_reason = "stop" if draft.token_ids[-1] == EOS else "length"
        return super().verify(groups, policy, version, *how)


@contextmanager
def same_noise() -> Iterator[None]:
    """Give a completion the same seed whatever has been drawn of it, and by which policy.

    `VLLMEngine` takes other noise for a request that has tokens; this is left out, too.
    """
    from lit_rlsched.engines import _vllm_worker as _vllm_noise
    from lit_rlsched.rollout import requests
    from lit_rlsched.types import Completion, stable_hash

    def seed(
        run: int, group: Group, completion: Completion, version: int, seed_domain: str = ""
    ) -> int:
        return stable_hash(run, group.prompt.uid, completion.index)

    noise: Any = _vllm_noise.Noise
    module: Any = requests
    before = requests.completion_seed, noise.seed
    module.completion_seed, noise.seed = seed, lambda self, request: request.seed
    try:
        yield
    finally:
        module.completion_seed, noise.seed = before


def make_reward() -> Callable[..., list[float]]:
    """Return a reward function: the share of the token `1`.

    It is sent to its worker whole, where one of this module would make the worker import torch,
    which takes longer than all that a run draws.
    """

    def reward(completions: Sequence[str], **columns: Any) -> list[float]:
        return [text.count("1") / LIMIT for text in completions]

    return reward


def write_model(folder: Path) -> None:
    """Write a random model of eight tokens and its tokenizer."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    make_model(
        folder,
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=64,
        initializer_range=0.2,
        tie_word_embeddings=False,
        pad_token_id=0,
        eos_token_id=EOS,
        bos_token_id=2,
    )
    words = models.WordLevel({token: i for i, token in enumerate(TOKENS)}, unk_token="<pad>")
    tokenizer = Tokenizer(words)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>"
    ).save_pretrained(folder)


def second_round(case: str, model: str, seed: int, rate: float) -> tuple[Any, Any]:
    """Train on one round and draw another; return it and the policy that it was drawn by."""
    from lightning import Trainer, seed_everything

    from lit_rlsched import GRPOModule, RolloutDataModule
    from lit_rlsched.callbacks import MicroGroupSampling, RolloutCallback, RolloutWindow
    from lit_rlsched.engines import VLLMEngine

    class Second(RolloutCallback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            if case not in RIGHT:
                trainer.datamodule.run.drafts = Mistaken(case)

        def on_round_end(self, trainer: Any, pl_module: Any, round: Any) -> None:
            self.round, self.policy = round, copy.deepcopy(pl_module.model).eval()

    seed_everything(seed, verbose=False)
    generations = GENERATIONS * (MORE if case == NOISE else 1)
    # the last eighth of a round waits, so that most slots begin drafts when it gets the first ones
    fewer = [MicroGroupSampling(slots=PROMPTS * generations * 7 // 8)] * (case != RIGHT[0])
    data = RolloutDataModule(
        [{"prompt": "0123", "uid": str(i)} for i in range(2 * PROMPTS)],
        [make_reward()],
        engine=VLLMEngine(),
        prompts_per_round=PROMPTS,
        num_generations=generations,
        max_completion_length=LIMIT,
        micro_batch_tokens=16384,
        verify_sync=case in RIGHT,
        seed=seed,
    )
    second = Second()
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        callbacks=[second, RolloutWindow(), *fewer],
    )
    trainer.fit(GRPOModule(model, learning_rate=rate), datamodule=data)
    return second.round, second.policy


Cell = tuple[int, bool, tuple[int, ...]]


def cell(tokens: Sequence[int]) -> Cell:
    """Length, whether it ends with EOS, and first three tokens."""
    return len(tokens), tokens[-1] == EOS, (*tokens[:3],)


def law(policy: Any, prompt: Sequence[int]) -> dict[Cell, float]:
    """Sum the probabilities of all completions of a prompt by cell."""
    begun: dict[tuple[int, ...], float] = {(): 1.0}
    found: defaultdict[Cell, float] = defaultdict(float)
    for _ in range(LIMIT):
        ids = torch.tensor([[*prompt, *tokens] for tokens in begun])
        with torch.no_grad():
            rows = policy(ids).logits[:, -1].double().softmax(-1).tolist()
        longer: dict[tuple[int, ...], float] = {}
        for (tokens, chance), row in zip(begun.items(), rows, strict=True):
            for token, share in enumerate(row):
                longer[*tokens, token] = chance * share
        over = {x for x in longer if x[-1] == EOS or len(x) == LIMIT}
        for tokens in over:
            found[cell(tokens)] += longer[tokens]
        begun = {x: chance for x, chance in longer.items() if x not in over}
    return dict(found)


def p_value(counts: Mapping[T, int], probabilities: Mapping[T, float]) -> float:
    """Return how likely counts as far from the probabilities as these are, or farther.

    By Pearson's chi-square. Cells with less than `SMALLEST` of the expected counts are taken
    together.
    """
    assert counts.keys() <= probabilities.keys()
    total = sum(counts.values())
    cells, rest = [], (0.0, 0.0)
    for name, probability in probabilities.items():
        count, mean = counts.get(name, 0), total * probability
        if mean >= SMALLEST * total:
            cells.append((float(count), mean))
        else:
            rest = rest[0] + count, rest[1] + mean
    cells += [rest] if rest[1] > 0 else []
    return _tail(sum((n - mean) ** 2 / mean for n, mean in cells), len(cells) - 1)


def fisher(p_values: Sequence[float]) -> float:
    """Combine independent p-values (Fisher's method)."""
    logs = [math.log(max(p, sys.float_info.min)) for p in p_values]  # 0: too small for a float
    return _tail(-2 * sum(logs), 2 * len(logs))


def _tail(statistic: float, degrees: int) -> float:
    """Return the probability of a chi-square variable above `statistic`."""
    halves = torch.tensor([degrees / 2, statistic / 2]).double()
    return float(torch.special.gammaincc(*halves))


def measure(case: str, model: str, seed: int, rate: float) -> dict[str, float]:
    """Return the p-value of a run, and how much it verified."""
    if case == NOISE:
        with same_noise():
            round, policy = second_round(case, model, seed, rate)
    else:
        round, policy = second_round(case, model, seed, rate)
    expected = law(policy, round.groups[0].prompt.token_ids)
    counts = Counter(cell(completion.token_ids) for completion in round.completions)
    drafts = {n: round.metrics.get(f"drafts/{n}", 0.0) for n in ("tokens", "accepted_share")}
    return {"p": p_value(counts, expected), "completions": counts.total(), **drafts}


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a row for each case."""
    parser = results.parser("draft_law", __doc__)
    seeds = list(range(200, 210))
    parser.add_argument("--seeds", type=int, nargs="+", default=seeds, help="of the runs")
    results.add_cases(parser, CASES)
    options = results.parse(parser, arguments)
    print(
        "| | learning rate | p, by seed | in all | drafts' tokens | kept |\n"
        "|---|---|---|---|---|---|"
    )
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder))
        runs = [(case, rate) for case in options.cases for rate in RATES[case]]
        for case, rate in runs:
            rows = []
            for seed in options.seeds:
                rows.append(measure(case, folder, seed, rate))
                results.add(f"{case}, learning rate {rate:g}, seed {seed}", rows[-1])
            values = [row["p"] for row in rows]
            kept = sum(row["accepted_share"] for row in rows) / len(rows)
            tokens = sum(row["tokens"] for row in rows) / len(rows)
            shown = ", ".join(f"{p:.2g}" for p in values)
            together = f"{fisher(values):.2g}" if case in RIGHT else f"at most {max(values):.1g}"
            cells = f"{rate:g} | {shown} | {together} | {tokens:,.0f} | {kept:.1%}"
            print(f"| {case} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
