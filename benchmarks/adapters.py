"""Weight syncs and steps of vLLM with merged LoRA weights and with the adapters alone.

    python -m benchmarks run adapters --shapes 10M 60M

Models are random, with adapters on all linear layers. A sync is counted from the trainer's weights
to those of an engine in this process; its bytes are those handed to an engine in another process.
A step prefills 32 prompts of 64 tokens, or decodes a token of each of 32 completions.
"""

from collections.abc import Sequence
from statistics import median
from tempfile import TemporaryDirectory
from time import process_time

import torch
from torch import nn

from benchmarks import results
from benchmarks.ledger import SHAPES, make_model
from lit_rlsched.engines.spec import EngineSpec
from lit_rlsched.engines.vllm import VLLMEngine
from lit_rlsched.engines.weights import WeightsFile
from lit_rlsched.training.lora import add_lora
from lit_rlsched.training.policy import adapter_spec, load_policy
from lit_rlsched.training.weight_sync import PolicyReader
from lit_rlsched.types import Request, Sampling

SLOTS, PROMPT, STEPS, SYNCS = 32, 64, 30, 5
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def measure(folder: str, policy: nn.Module, alone: bool, dtype: torch.dtype) -> dict[str, float]:
    """Return bytes and CPU seconds of an engine that gets adapters alone, or merged weights."""
    engine, reader = VLLMEngine(enable_lora=alone), PolicyReader(policy, enable_lora=alone)
    adapters = adapter_spec(policy) if alone else None
    engine.start(EngineSpec(folder, SLOTS, 512, (), dtype, adapters=adapters))
    file = WeightsFile()
    figures = {"bytes": float(file.write(reader.weights(), dtype).size)}
    file.close()
    seconds: dict[str, list[float]] = {"sync": [], "prefill": [], "decode": []}
    for version in range(SYNCS):
        began = process_time()
        engine.sync_weights(reader.weights(), version)
        seconds["sync"].append(process_time() - began)
        prompts = [[(7 * i + 3 * j + version) % 500 for j in range(PROMPT)] for i in range(SLOTS)]
        engine.submit([Request(f"r{i}", p, i, Sampling(STEPS)) for i, p in enumerate(prompts)])
        for step in range(STEPS):
            began = process_time()
            engine.step()
            seconds["decode" if step else "prefill"].append(process_time() - began)
    engine.close()
    return figures | {name: median(values[1:]) for name, values in seconds.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = results.parser("adapters", __doc__)
    parser.add_argument("--shapes", nargs="+", default=["10M", "60M"], choices=SHAPES)
    parser.add_argument("--rank", type=int, default=16, help="rank of the adapters")
    parser.add_argument("--dtype", default="float32", choices=DTYPES, help="of base and engine")
    options = results.parse(parser, arguments)
    print(
        "| model | engine gets | MB per sync | CPU s per sync | CPU ms per prefill | per decode |"
    )
    print("|---|---|---|---|---|---|")
    dtype = DTYPES[options.dtype]
    for shape in options.shapes:
        with TemporaryDirectory() as folder:
            make_model(folder, shape)
            torch.manual_seed(0)
            policy = add_lora(
                load_policy(folder, dtype), options.rank, 2 * options.rank, "all-linear"
            )
            for name, alone in {"merged weights": False, "adapters": True}.items():
                figures = measure(folder, policy, alone, dtype)
                results.add(f"{shape}, {name}", figures)
                print(
                    f"| {shape} | {name} | {figures['bytes'] / 1e6:.1f} | {figures['sync']:.3f} | "
                    f"{1000 * figures['prefill']:.0f} | {1000 * figures['decode']:.1f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
