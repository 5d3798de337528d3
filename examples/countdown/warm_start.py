"""Make the model of the quick task: a tokenizer and a 0.45 M-parameter Qwen3 with a warm start.

    python examples/countdown/warm_start.py --out examples/countdown/model

The model imitates a teacher that searches at random: each line is a try with another order and
other signs of the numbers, until one hits the target or the teacher gives up with a wrong answer.
So the model is imperfect on purpose, and the length of a completion depends on the prompt and on
chance. This takes about two minutes on one CPU thread.
"""

import argparse
import math
import random
import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from lit_rlsched.data.prompts import make_prompts
from lit_rlsched.data.tasks import COUNTDOWN_MIX, Countdown
from lit_rlsched.processes import keep_heap
from lit_rlsched.rewards import countdown_reward

PAD, BOS, EOS = "<|pad|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{{ message['content'] + eos_token }}"
    "{% else %}{{ bos_token + message['content'] + '\\n' }}{% endif %}"
    "{% endfor %}"
)
CONTEXT = 1024
BATCH_TOKENS = 2048
MAX_COMPLETION_LENGTH = 512
GIVE_UP = 0.4
"""Probability that the teacher gives up after a wrong try."""

Row = dict[str, Any]


def make_tokenizer(questions: list[str]) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer in which digits, operators and newlines stay single."""
    tokenizer = Tokenizer(models.BPE())
    wording_or_character = Regex(r"[A-Za-z][A-Za-z .,:'()]*|[^A-Za-z]")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(wording_or_character, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        min_frequency=20,
        special_tokens=[PAD, BOS, EOS],
        initial_alphabet=[*"0123456789+-*/=()<>xyn?,.\u010a\u0120"],  # the last two: newline, space
        show_progress=False,
    )
    tokenizer.train_from_iterator(questions, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        chat_template=CHAT_TEMPLATE,
        model_max_length=CONTEXT,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    fast.add_tokens([AddedToken(tag, normalized=False) for tag in ("<answer>", "</answer>")])
    return fast


def make_model(
    tokenizer: PreTrainedTokenizerFast, heads: int = 3, context: int = CONTEXT
) -> Qwen3ForCausalLM:
    special = {
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    config = Qwen3Config(
        vocab_size=math.ceil(len(tokenizer) / 32) * 32,
        hidden_size=32 * heads,
        num_hidden_layers=4,
        num_attention_heads=heads,
        num_key_value_heads=1,
        head_dim=32,  # vLLM's CPU attention takes 32 or more
        intermediate_size=96 * heads,
        max_position_embeddings=context,
        tie_word_embeddings=True,
        initializer_range=0.06,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        **special,
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(do_sample=True, **special)
    return model


def search(row: Row, rng: random.Random) -> str:
    """Return a demonstration: lines such as `5+3=8-2=6 12 n`, then the last try as the answer."""
    numbers, target = list(row["metadata"]["numbers"]), row["metadata"]["target"]
    lines = []
    while True:
        rng.shuffle(numbers)
        total = numbers[0]
        line = expression = str(total)
        for number in numbers[1:]:
            sign = rng.choice("+-")
            total += number if sign == "+" else -number
            line += f"{sign}{number}={total}"
            expression += f"{sign}{number}"
        hit = total == target
        lines.append(f"{line} {target} {'y' if hit else 'n'}")
        if hit or rng.random() < GIVE_UP:
            return "\n".join(lines) + f"\n<answer>{expression}</answer>"


class Demonstrations:
    """Endless batches of tokenized demonstrations, with problem sizes mixed as in the task."""

    def __init__(self, rows: list[Row], tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
        self.tokenizer = tokenizer
        self.rng = random.Random(seed)
        prompts = make_prompts(rows, tokenizer, max_prompt_length=CONTEXT)
        self.by_size: dict[int, list[tuple[Row, list[int]]]] = {n: [] for n in COUNTDOWN_MIX}
        for row, prompt in zip(rows, prompts, strict=True):
            self.by_size[row["size"]].append((row, list(prompt.token_ids)))

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield token ids `[B, T]` and labels `[B, T]`, -100 on the prompt and the padding."""
        while True:
            batches = self._bucket(1024)
            self.rng.shuffle(batches)
            yield from map(self._collate, batches)

    def _bucket(self, count: int) -> list[list[tuple[list[int], int]]]:
        """Draw demonstrations and batch similar lengths, up to `BATCH_TOKENS` with padding."""
        sizes = self.rng.choices(list(COUNTDOWN_MIX), list(COUNTDOWN_MIX.values()), k=count)
        drawn = [self.rng.choice(self.by_size[size]) for size in sizes]
        texts = [search(row, self.rng) + EOS for row, _ in drawn]
        answers = self.tokenizer(texts, add_special_tokens=False)["input_ids"]
        pairs = zip(drawn, answers, strict=True)
        sequences = [(prompt + answer, len(prompt)) for (_, prompt), answer in pairs]
        batches: list[list[tuple[list[int], int]]] = [[]]
        for sequence in sorted(sequences, key=lambda s: len(s[0])):
            if batches[-1] and len(sequence[0]) * (len(batches[-1]) + 1) > BATCH_TOKENS:
                batches.append([])
            batches[-1].append(sequence)
        return batches

    def _collate(self, batch: list[tuple[list[int], int]]) -> tuple[torch.Tensor, torch.Tensor]:
        length = max(len(ids) for ids, _ in batch)
        tokens = torch.full((len(batch), length), self.tokenizer.pad_token_id)
        labels = torch.full((len(batch), length), -100)
        for row, (ids, prompt_length) in enumerate(batch):
            tokens[row, : len(ids)] = torch.tensor(ids)
            labels[row, prompt_length : len(ids)] = torch.tensor(ids[prompt_length:])
        return tokens, labels


def train(
    model: Qwen3ForCausalLM,
    demonstrations: Iterable[tuple[torch.Tensor, torch.Tensor]],
    steps: int,
) -> None:
    """Train with Muon on hidden matrices, AdamW on the rest, and a cosine schedule to 5 %."""
    hidden = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    rest = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(hidden, lr=0.01, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0),
    ]

    def scale(step: int) -> float:
        cosine = 0.5 * (1 + math.cos(math.pi * step / steps))
        return min(1.0, (step + 1) / 20) * (0.05 + 0.95 * cosine)

    schedulers = [torch.optim.lr_scheduler.LambdaLR(o, scale) for o in optimizers]
    model.train()
    started, cpu = time.time(), time.process_time()
    # Padding is on the right and attention is causal, so no attention mask is needed.
    for step, (tokens, labels) in zip(range(1, steps + 1), demonstrations, strict=False):
        logits = model(input_ids=tokens, use_cache=False).logits[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if step % 100 == 0 or step == steps:
            seconds = f"{time.time() - started:.0f} s, {time.process_time() - cpu:.0f} CPU s"
            print(f"step {step}/{steps}: loss {loss.item():.4f} ({seconds})", flush=True)


@torch.inference_mode()
def evaluate(model: Any, tokenizer: Any, rows: list[Row], greedy: bool) -> str:
    """Return the accuracy on held-out problems with one completion each, as text."""
    model.eval()
    texts, lengths = [], []
    for start in range(0, len(rows), 256):
        chats = [row["prompt"] for row in rows[start : start + 256]]
        inputs = tokenizer.apply_chat_template(
            chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
        )
        sampling = {"do_sample": False} if greedy else {"do_sample": True, "top_k": 0}
        output = model.generate(**inputs, max_new_tokens=MAX_COMPLETION_LENGTH, **sampling)
        for ids in output[:, inputs["input_ids"].shape[1] :].tolist():
            ended = tokenizer.eos_token_id in ids
            ids = ids[: ids.index(tokenizer.eos_token_id)] if ended else ids
            lengths.append(len(ids) + ended)
            texts.append(tokenizer.decode(ids) if ended else "")  # cut at the limit: scores 0
    scores = countdown_reward(texts, metadata=[row["metadata"] for row in rows])
    lengths.sort()
    marks = [lengths[math.ceil(share * len(rows)) - 1] for share in (0.5, 0.9, 0.99, 1.0)]
    by_size: dict[int, list[float]] = {n: [] for n in COUNTDOWN_MIX}
    for row, score in zip(rows, scores, strict=True):
        by_size[row["size"]].append(score)
    sizes = ", ".join(f"{n} numbers {sum(s) / len(s):.2f}" for n, s in by_size.items())
    return f"accuracy {sum(scores) / len(rows):.3f} ({sizes}); length p50/p90/p99/max {marks}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True, help="Folder for the model and its tokenizer.")
    parser.add_argument("--seed", type=int, default=0, help="Seed (default: 0).")
    parser.add_argument("--steps", type=int, default=1200, help="Training steps (default: 1200).")
    args = parser.parse_args()

    keep_heap()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    rows = Countdown("train", size=8000, seed=args.seed).rows()
    tokenizer = make_tokenizer([row["question"] for row in rows[:3000]])
    model = make_model(tokenizer)
    print(f"{len(tokenizer)} tokens, {model.num_parameters():,} parameters", flush=True)
    train(model, Demonstrations(rows, tokenizer, args.seed), args.steps)
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)

    held_out = Countdown("heldout", size=512).rows()
    print("held out, temperature 1:", evaluate(model, tokenizer, held_out, greedy=False))
    print("held out, greedy:       ", evaluate(model, tokenizer, held_out, greedy=True))


if __name__ == "__main__":
    main()
