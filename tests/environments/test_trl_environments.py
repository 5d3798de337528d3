"""Environment classes of TRL scripts, unchanged, in TRL's trainer and here."""

import json
from copy import deepcopy

import pytest
import torch
from golden_trl import Dataset, GRPOConfig, GRPOTrainer
from tool_families import of_family, small_model, tokenizer_of
from trl_worlds import Echo, Words, reward_of

from lit_rlsched.data.messages import strftime_now
from lit_rlsched.data.prompts import make_prompts
from lit_rlsched.data.rows import load_rows
from lit_rlsched.environments.chat import ToolChat
from lit_rlsched.environments.protocol import Environments, ToolSettings
from lit_rlsched.environments.scheduler import EnvironmentScheduler
from lit_rlsched.rewards.scheduler import RewardScheduler
from lit_rlsched.rollout.scoring import Scorer
from lit_rlsched.rollout.turns import Turns
from lit_rlsched.training.advantages import group_relative
from lit_rlsched.training.logprobs import completion_logprobs
from lit_rlsched.training.losses import policy_loss
from lit_rlsched.types import Completion, Event, Group, Sample, Sampling

CALL = {
    "qwen": lambda name, key, value: (
        f"<tool_call>\n{json.dumps({'name': name, 'arguments': {key: value}})}\n</tool_call>"
    ),
    "llama": lambda name, key, value: json.dumps({"name": name, "parameters": {key: value}}),
    "gemma4": lambda name, key, value: (
        f'<|tool_call>call:{name}{{{key}:<|"|>{value}<|"|>}}<tool_call|>'
    ),
}
SCRIPTS = {
    "echo": [
        [("echo", "message", "hi"), "0"],
        [("echo", "message", "longer"), ("echo", "message", "x"), "1"],
        ["2"],
        [("sing", "message", "la"), "3"],
    ],
    "words": [
        [("guess", "guess", "crane"), ("guess", "guess", "stone"), "0"],
        [("guess", "guess", "stone"), ("guess", "guess", "again"), "over"],
        [("guess", "word", "stone"), "wrong argument"],
        ["no guess"],
    ],
}
"""Turns of four completions of a prompt, by environment."""
LIMIT = 900
ROWS = {
    name: {
        "prompt": [{"role": "user", "content": f"Play {name}."}],
        "secret": "stone",
        "environment": name,
    }
    for name in SCRIPTS
}
GIVEN = {
    "echo": (Echo, ["echo", "echo"], [reward_of]),
    "words": (Words, ["words"], []),
    "both": ({"echo": Echo, "words": Words}, ["echo", "words"], [reward_of]),
    "no prompt": ({"echo": Echo, "words": Words}, ["echo", "words"], [reward_of]),
}


def turns_of(name, kinds, tokenizer):
    """Token ids of the turns of each completion."""
    call = of_family(name, CALL)
    return [
        [
            tokenizer((turn if isinstance(turn, str) else call(*turn)) + tokenizer.eos_token)[
                "input_ids"
            ]
            for turn in script
        ]
        for kind in kinds
        for script in SCRIPTS[kind]
    ]


def rows_of(given, kinds):
    left_out = set() if len({*kinds}) > 1 else {"environment"}
    if given == "no prompt":
        left_out.add("prompt")
    return [
        {k: v for k, v in ROWS[kind].items() if k not in left_out} | {"uid": f"{i}"}
        for i, kind in enumerate(kinds)
    ]


def of_trl(policy, tokenizer, factory, rewards, rows, turns, folder):
    """What TRL's trainer makes of the turns, its loss, and what its reward functions see."""
    config = GRPOConfig(
        output_dir=str(folder),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        num_generations=4,
        per_device_train_batch_size=len(turns),
        max_completion_length=LIMIT,
        beta=0.0,
        loss_type="dapo",
        disable_dropout=True,
        chat_template_kwargs={"strftime_now": strftime_now},  # as here, the same after midnight
    )
    seen = []

    def see(prompts, completions, completion_ids, **columns):
        seen.extend(zip(*map(deepcopy, (prompts, completions, completion_ids)), strict=True))
        return [None] * len(prompts)

    trainer = GRPOTrainer(
        model=policy,
        reward_funcs=[*rewards, see],
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        environment_factory=factory,
    )
    begun: list[list[int]] = []
    number = [0] * len(turns)

    def generate(prompt_ids, *_, **__):
        if not begun:
            begun.extend([*ids] for ids in prompt_ids)
            chosen = range(len(turns))
        else:  # those that go on, in their order
            starts = [ids + turn[0] for ids, turn in zip(begun, turns, strict=True)]
            chosen, at = [], 0
            for ids in prompt_ids:
                while [*ids][: len(starts[at])] != starts[at]:
                    at += 1
                chosen.append(at)
                at += 1
        drawn = []
        for i in chosen:
            drawn.append([*turns[i][number[i]]])
            number[i] += 1
        return drawn, None

    trainer.current_gradient_accumulation_steps = 1
    trainer._generate_single_turn = generate
    inputs = [row for row in rows for _ in range(4)]
    trainer.model.train()
    batch = trainer._generate_and_score_completions(inputs)
    loss = trainer._compute_loss(trainer.model, batch)
    return begun, batch, loss.detach(), seen


def of_ours(policy, tokenizer, factory, rewards, rows, turns):
    """The same turns here, with real workers."""
    environments = Environments(None, factory)
    scheduler = RewardScheduler([*rewards, *environments.rewards], workers=1, environments=True)
    workers = EnvironmentScheduler(environments, scheduler)
    chat = ToolChat(tokenizer, None, [tokenizer.eos_token_id])
    table = load_rows(rows, has_objects=True)
    prompts = make_prompts(table, tokenizer, max_prompt_length=999, environments=environments)
    row = Scorer(scheduler, tokenizer.decode).arguments
    controlled = Turns(ToolSettings(environments), chat, workers, 0, row)
    groups, left = [], {}
    for prompt in prompts:
        completions = [Completion(i) for i in range(4)]
        groups.append(Group(f"{prompt.uid}@0", prompt, Sampling(LIMIT), completions))
        for completion in completions:
            sample = Sample(groups[-1], completion)
            left[sample.id] = [*turns[len(left)]]
            controlled.begin(sample)
    while controlled.pending:
        controlled.wait(10.0)
        for sample, becomes in controlled.poll():
            if becomes == "decodes":
                ids = left[sample.id].pop(0)
                event = Event(sample.id, ids, [-1.0] * len(ids), "stop")
                sample.completion.take(event, version=0)
                controlled.ended(sample, 0)
    controlled.close()
    scheduler.close()
    seen = [row(group, completion) for group in groups for completion in group.completions]
    names = ("prompt", "completion", "completion_ids")
    return groups, [tuple(each[name] for name in names) for each in seen]


def without_ids(completion):
    """Messages without the ids of calls, which TRL leaves out."""
    messages = [{k: v for k, v in m.items() if k != "tool_call_id"} for m in completion]
    for message in messages:
        if calls := message.get("tool_calls"):
            message["tool_calls"] = [{k: v for k, v in c.items() if k != "id"} for c in calls]
    return messages


@pytest.mark.mostly_slow("qwen3-both", "llama3_2-echo", "qwen2_5-no prompt", "gemma4-words")
@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "llama3_2", "gemma4"])
def test_classes_of_trl_scripts_give_the_same_to_policy_and_rewards(name, given, tmp_path):
    factory, kinds, rewards = GIVEN[given]
    # TRL replaces this one by its own, which appends
    theirs, tokenizer = (tokenizer_of(n) for n in (name, name.replace("qwen3", "qwen3_training")))
    theirs.pad_token, tokenizer.pad_token = theirs.eos_token, tokenizer.eos_token
    torch.manual_seed(0)
    policy = small_model(tokenizer).double()
    rows, turns = rows_of(given, kinds), turns_of(name, kinds, tokenizer)
    prompt_ids, batch, loss, seen = of_trl(policy, theirs, factory, rewards, rows, turns, tmp_path)
    groups, also = of_ours(policy, tokenizer, factory, rewards, rows, turns)
    assert [(prompt, without_ids(answer), [*ids]) for prompt, answer, ids in also] == seen
    ours = [(g, c) for g in groups for c in g.completions]
    lengths = batch["completion_mask"].sum(1).tolist()
    whole, masks = [], []
    for i, (group, completion) in enumerate(ours):
        drawn = batch["completion_ids"][i, : lengths[i]].tolist()
        whole.append([*group.prompt.token_ids, *completion.token_ids])
        assert whole[-1] == prompt_ids[i] + drawn
        masks.append([0] * len(group.prompt.token_ids) + [int(on) for on in completion.mask()])
        mask = batch["tool_mask"][i, : lengths[i]].tolist()
        assert masks[-1] == [0] * len(prompt_ids[i]) + mask
    given_rewards = torch.tensor(
        [sum(x.score or 0.0 for x in completion.given.values()) for _, completion in ours],
        dtype=torch.float64,
    )
    advantages = group_relative(given_rewards.view(-1, 4), "group").flatten()
    torch.testing.assert_close(advantages, batch["advantages"].double(), atol=1e-6, rtol=1e-5)
    assert advantages.abs().max() > 0.1

    width = max(map(len, whole))
    ids = torch.tensor([row + [tokenizer.pad_token_id] * (width - len(row)) for row in whole])
    mask = torch.tensor([row + [0] * (width - len(row)) for row in masks])[:, 1:]
    begin = torch.ones(len(whole), dtype=torch.long)
    length = torch.tensor([len(row) - 1 for row in whole])
    logp, _ = completion_logprobs(policy, ids, begin, length)
    out = policy_loss(
        logp, batch["advantages"].double(), mask.bool(), old_logp=logp.detach(), loss_type="dapo"
    )
    # TRL rounds advantages and loss to float32
    assert float(out.loss) == pytest.approx(float(loss), abs=4e-8, rel=2e-7)
