"""Check that draft tokens change the number of decode steps and nothing else."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from benchmarks.gpu_check.decoding import (
    GONE_ON,
    MEAN_GAP,
    PROMPTS,
    TOKENS,
    described,
    judge_runner,
)
from benchmarks.gpu_check.drawing import (
    Drawn,
    common_prefix,
    draw,
    gap,
    policy_on,
    prompts,
    requests,
    spec_of,
    sync,
    tokens_of,
)
from benchmarks.gpu_check.findings import Findings
from benchmarks.gpu_check.setting import QUICK_TASK, Setting
from lit_rlsched.engines import VLLMEngine
from lit_rlsched.engines.base import RolloutEngine
from lit_rlsched.engines.spec import EngineStats
from lit_rlsched.scheduling.speculation import Drafting

RIGHT = 0.7
"""Least share of draft tokens that are drawn where a completion is drawn again. With other noise,
or with wrong rows of logits, nearly none would be."""
REPORT = "Train without `Speculation`, and report this page."


def draft_tokens(setting: Setting, found: Findings) -> None:
    """Draw the same completions without draft tokens and with them, with one engine after another.

    Two engines that can sleep do not fit into one process.
    """
    policy, asked = policy_on(setting, QUICK_TASK), prompts(QUICK_TASK, PROMPTS)
    spec = spec_of(QUICK_TASK, setting.device, torch.float32, PROMPTS, 256)
    engine = VLLMEngine(kv_cache_gib=setting.pick(1.0, None))
    plain: list[Drawn] = []
    for settings in (None, Drafting(4, PROMPTS)):
        engine.start(replace(spec, drafting=settings))
        engine.wake()
        sync(engine, policy, 1)
        if settings is None:
            plain, _ = draw_twice(engine, asked)
            found.record("decode steps without draft tokens", engine.stats().decode_steps)
        else:
            judge_runner(found, described(engine), setting.device, "fp32", setting.on_gpu)
            drafted = judge_drafts(found, engine, plain, asked, GONE_ON["fp32"])
            found.record("decode steps with them", engine.stats().decode_steps)
        engine.close()
    found.at_most(
        "mean log-prob gap with draft tokens",
        float(gap(policy, asked, drafted[1]).mean()),
        MEAN_GAP[setting.device, "fp32"],
        "nats",
        f"Log-probs of other positions are recorded. {REPORT}",
    )


def draw_twice(
    engine: RolloutEngine, asked: Sequence[Sequence[int]]
) -> tuple[list[Drawn], list[EngineStats]]:
    """Draw completions of the prompts and the same ones again, and count before, between and after.

    The second time each has a sibling with the same tokens, so most draft tokens are right.
    """
    drawn, counts = [], [engine.stats()]
    for turn in ("first", "again"):
        batch = [replace(r, id=f"{r.id}/{turn}") for r in requests(asked, TOKENS)]
        drawn.append(draw(engine, batch))
        counts.append(engine.stats())
    return drawn, counts


def judge_drafts(
    found: Findings,
    engine: RolloutEngine,
    plain: Sequence[Drawn],
    asked: Sequence[Sequence[int]],
    same: float,
) -> list[Drawn]:
    """Draw with draft tokens and compare with what was drawn without.

    Args:
        found: Findings of the check.
        engine: Engine with draft tokens.
        plain: What `draw_twice` drew without.
        asked: Prompts.
        same: Least share of tokens before the first that differs.
    """
    drafted, (_, before, after) = draw_twice(engine, asked)
    pairs = [
        pair
        for one, other in zip(plain, drafted, strict=True)
        for pair in zip(tokens_of(one), tokens_of(other), strict=True)
    ]
    found.at_least(
        "tokens with draft tokens as without",
        sum(common_prefix(*pair) for pair in pairs) / sum(len(one) for one, _ in pairs),
        same,
        "of all",
        f"Draft tokens change what is drawn. {REPORT}",
    )
    found.at_least(
        "draft tokens that are right where a completion is drawn again",
        (after.accepted - before.accepted) / max(1, after.proposed - before.proposed),
        RIGHT,
        "of all",
        f"They are verified against other draws. {REPORT}",
    )
    return drafted
