"""Seconds and memory until the first prompts are drawn, and of a round of 4 million tokens.

    python -m benchmarks run startup

Prompts are strings of about 180 tokens in a JSONL file: words of an invented vocabulary, the
frequent ones more often. The tokenizer is a byte-level BPE that is trained on some of them; the
quick task's tokenizer of characters is `--tokenizer examples/countdown/model`. A start
reads and checks the rows, tokenises them and draws 32 prompts. Each start is a process of its own;
the second one finds the files that the first one has cached. `anonymous` is the largest memory that
a process had for itself, beyond its libraries; `mapped` is the part of the cached files that it has
read, which all ranks of a machine share.

For comparison, in the same run: `tokenizer` is the tokenizer alone (`encode_batch_fast` with its
own threads, batches of 1,000, nothing is done with the result). `datasets.map` is what a user would
write instead, from the file to 32 rows drawn: in one process with the tokenizer's threads, and in
as many processes as there are cores (memory is then the parent's alone).

A round is filled in steps of ten tokens.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import numpy as np

from benchmarks import results

PROMPTS, COMPLETIONS, LENGTH = 512, 8, 1000
"""Of the round."""
WORDS, TOKENS = 30_000, 180


def make_words(seed: int = 0) -> list[str]:
    """Return a vocabulary of words of two to nine letters."""
    rng = np.random.default_rng(seed)
    letters = rng.integers(97, 123, (WORDS, 9)).astype(np.uint8)
    sizes = rng.integers(2, 10, WORDS)
    return [bytes(row[:n]).decode() for row, n in zip(letters, sizes, strict=True)]


def texts(number: int, words: int, seed: int = 1) -> Iterator[str]:
    """Yield prompts of so many words."""
    vocabulary = np.array(make_words(), dtype=object)
    share = 1 / np.arange(10, WORDS + 10)
    cumulative, rng = np.cumsum(share / share.sum()), np.random.default_rng(seed)
    for _ in range(number):
        chosen = np.searchsorted(cumulative, rng.random(words)).clip(max=WORDS - 1)
        yield " ".join(vocabulary[chosen])


def make_tokenizer(folder: Path, given: str | None) -> int:
    """Save a given or a trained tokenizer; return the number of words that give 180 tokens."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    sample = list(texts(2000, TOKENS))
    if given is not None:
        tokenizer = AutoTokenizer.from_pretrained(given)
    else:
        bpe = ByteLevelBPETokenizer()
        bpe.train_from_iterator(sample, vocab_size=16_000, show_progress=False)
        bpe.save(str(folder / "bpe.json"))
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "bpe.json"))
    tokenizer.save_pretrained(folder)
    tokens = sum(map(len, tokenizer(text=sample[:200])["input_ids"])) / 200
    return round(TOKENS * TOKENS / tokens)


def make_rows(folder: Path, sizes: Sequence[int], words: int) -> None:
    """Write a file of rows for each size; a smaller one is the beginning of a larger one."""
    with (folder / f"{max(sizes)}.jsonl").open("w") as file:
        for number, text in enumerate(texts(max(sizes), words)):
            file.write(json.dumps({"prompt": text, "answer": str(number)}) + "\n")
    for size in sizes:
        if size < max(sizes):
            with (folder / f"{max(sizes)}.jsonl").open() as whole:
                lines = (next(whole) for _ in range(size))
                (folder / f"{size}.jsonl").write_text("".join(lines))


def memory(field: str) -> float:
    """Return a field of this process's memory, in MiB."""
    (kibibytes,) = re.findall(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(kibibytes) / 1024


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and of its children that have ended."""
    return process_time() + sum(os.times()[2:4])


@contextmanager
def watched(figures: dict[str, float]) -> Iterator[None]:
    """Measure seconds, the peak of anonymous memory, and mapped files, of a block."""
    before, over = {name: memory(name) for name in ("RssAnon", "RssFile")}, threading.Event()
    peak = before["RssAnon"]

    def watch() -> None:
        nonlocal peak
        while not over.wait(0.02):
            peak = max(peak, memory("RssAnon"))

    thread = threading.Thread(target=watch)
    thread.start()
    began, used = perf_counter(), cpu_seconds()
    yield
    figures["seconds"] = perf_counter() - began
    figures["CPU seconds"] = cpu_seconds() - used
    over.set()
    thread.join()
    figures["anonymous MiB"] = max(peak, memory("RssAnon")) - before["RssAnon"]
    figures["mapped MiB"] = memory("RssFile") - before["RssFile"]


def start(folder: str, size: int) -> dict[str, float]:
    """Read, tokenise and draw."""
    import torch  # noqa: F401  # as in a run, before the memory is measured
    from transformers import AutoTokenizer

    from lit_rlsched.data.prompts import tokenize
    from lit_rlsched.data.rows import load_rows
    from lit_rlsched.data.source import PromptSource

    tokenizer, figures = AutoTokenizer.from_pretrained(folder), dict[str, float]()
    tokenizer(text=["warm up"])
    with watched(figures):
        rows = {"train": load_rows(f"{folder}/{size}.jsonl")}
        limits: dict[str, Any] = {"context": 4096, "max_completion_length": 2048}
        prompts = tokenize(rows, tokenizer, chat_template_kwargs=None, **limits)
        source = PromptSource(prompts.train, seed=0)
        drawn = source.draw(32)
    figures["tokens a prompt"] = sum(len(d.prompt.token_ids) for d in drawn) / 32
    figures["resident MiB"] = memory("VmHWM")
    return figures


def bare(folder: str, size: int) -> dict[str, float]:
    """Run the tokenizer alone; reading the texts does not count."""
    from transformers import AutoTokenizer

    backend = AutoTokenizer.from_pretrained(folder).backend_tokenizer
    backend.encode_batch_fast(["warm up"])
    seconds = used = 0.0
    with Path(folder, f"{size}.jsonl").open() as lines:
        while batch := [json.loads(line)["prompt"] for line in islice(lines, 1000)]:
            began, before = perf_counter(), cpu_seconds()
            backend.encode_batch_fast(batch)
            seconds += perf_counter() - began
            used += cpu_seconds() - before
    return {"seconds": seconds, "CPU seconds": used}


def with_map(folder: str, size: int, processes: int | None) -> dict[str, float]:
    """Read, tokenise with `datasets.map` and draw."""
    import datasets
    import torch  # noqa: F401  # as in a run, before the memory is measured
    from transformers import AutoTokenizer

    datasets.disable_progress_bars()
    tokenizer, figures = AutoTokenizer.from_pretrained(folder), dict[str, float]()
    with tempfile.TemporaryDirectory() as cache, watched(figures):
        file = f"{folder}/{size}.jsonl"
        rows = datasets.Dataset.from_json(file, cache_dir=cache)
        rows = rows.map(
            lambda batch: {
                "ids": tokenizer(text=batch["prompt"], return_attention_mask=False)["input_ids"]
            },
            batched=True,
            num_proc=processes,
        )
        _ = rows.shuffle(seed=0)[:32]
    figures["resident MiB"] = memory("VmHWM")
    return figures


def map_in_one(folder: str, size: int) -> dict[str, float]:
    """Run `datasets.map` in this process."""
    return with_map(folder, size, None)


def map_in_many(folder: str, size: int) -> dict[str, float]:
    """Run `datasets.map` in as many processes as there are cores."""
    return with_map(folder, size, os.cpu_count())


def round_of_tokens(folder: str, size: int) -> dict[str, float]:
    """Fill, pack and unpack a round."""
    from lit_rlsched.rollout.packing import pack, unpack
    from lit_rlsched.types import Completion, Event, Group, Prompt, Sampling

    rng, before = np.random.default_rng(0), memory("RssAnon")
    prompts = {str(p): Prompt(str(p), "", (1,)) for p in range(PROMPTS)}
    groups = [
        Group(f"{uid}@0", prompt, Sampling(LENGTH), [Completion(c) for c in range(COMPLETIONS)])
        for uid, prompt in prompts.items()
    ]
    for completion in (c for group in groups for c in group.completions):
        for _ in range(0, LENGTH, 10):
            ids, logprobs = rng.integers(0, 150_000, 10), np.log(rng.random(10))
            completion.take(Event("", ids.tolist(), logprobs.tolist()), 0)
    held, began = memory("RssAnon") - before, perf_counter()
    state = pack(groups)
    packed = perf_counter()
    unpack(state, prompts.__getitem__)
    tokens = PROMPTS * COMPLETIONS * LENGTH
    return {
        "tokens": tokens,
        "bytes a token": held * 2**20 / tokens,
        "pack s": packed - began,
        "unpack s": perf_counter() - packed,
        "packed bytes a token": sum(state[n].nbytes for n in ("token_ids", "logprobs")) / tokens,
    }


SIDES: dict[str, Callable[[str, int], dict[str, float]]] = {
    "tokenizer": bare,
    "first time": start,
    "second time": start,
    "datasets.map in 1 process": map_in_one,
    "datasets.map in all cores": map_in_many,
}


def in_process(side: Callable[..., Any], folder: str, size: int) -> dict[str, float]:
    """Run one measurement in a new process."""
    one = json.dumps([side.__name__, folder, size])
    env = {**os.environ, "HF_DATASETS_CACHE": f"{folder}/cache", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "benchmarks.startup", "--one", one]
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a line for each start and for the round."""
    parser = results.parser("startup", __doc__)
    sizes = [2000, 200_000, 1_000_000]
    parser.add_argument("--sizes", type=int, nargs="*", default=sizes, help="numbers of prompts")
    parser.add_argument("--tokenizer", help="folder of a tokenizer; by default one is trained")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = results.parse(parser, arguments)
    if args.one is not None:
        name, folder, size = json.loads(args.one)
        side = next(s for s in (*SIDES.values(), round_of_tokens) if s.__name__ == name)
        print(json.dumps(side(folder, size)))
        return
    with tempfile.TemporaryDirectory() as folder:
        if args.sizes:
            words = make_tokenizer(Path(folder), args.tokenizer)
            make_rows(Path(folder), args.sizes, words)
        cases = [
            (side, size, f"{size} prompts, {name}")
            for size in args.sizes
            for name, side in SIDES.items()
        ]
        for side, size, row in [*cases, (round_of_tokens, 0, "round")]:
            figures = in_process(side, folder, size)
            results.add(row, figures)
            shown = (f"{name} {value:,.2f}" for name, value in figures.items())
            print(row, *shown, sep=", ", flush=True)


if __name__ == "__main__":
    main()
