"""What vLLM makes of an exported model: the log-probs of the checkpoint."""

import json
import re
import shlex
from urllib.request import Request as HTTPRequest
from urllib.request import urlopen

import pytest
import torch
from vllm_server import served

from lit_rlsched import GRPOModule
from lit_rlsched.engines import VLLMEngine
from lit_rlsched.engines.spec import EngineSpec
from lit_rlsched.run.saving.export import export
from lit_rlsched.types import Request, Sampling

pytest.importorskip("vllm")
pytestmark = pytest.mark.slow

PROMPTS = [[4 + i] for i in range(8)]
TOKENS = 32


def largest_difference(module, drawn, name):
    """Between these log-probs and those of the module, for `(token ids, log-probs)` per prompt."""
    ids = torch.tensor([[*p, *tokens] for p, (tokens, _) in zip(PROMPTS, drawn, strict=True)])
    with torch.no_grad():
        logits = module.model.eval()(input_ids=ids, use_cache=False).logits
    ours = logits.float().log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None]).squeeze(-1)
    difference = (ours - torch.tensor([logprobs for _, logprobs in drawn])).abs()
    assert difference.shape == (8, TOKENS)
    print(f"{name}: {difference.mean():.2g} on average, {difference.max():.2g} at most")
    return difference.max()


@pytest.mark.parametrize(
    ("rank", "dtype", "bound"),
    [(4, "float32", 2e-5), (0, "bfloat16", 0.3)],
    ids=["merged adapters", "bfloat16"],
)
def test_the_engine_loads_it(rank, dtype, bound, tiny_model, saved, tmp_path):
    module = GRPOModule(tiny_model, lora_rank=rank)
    out = export(saved(module), str(tmp_path / "out"), dtype=dtype)
    engine = VLLMEngine()
    engine.start(EngineSpec(str(out), 8, 128, (), dtype=getattr(torch, dtype)))
    try:
        engine.submit([Request(f"r{i}", p, i, Sampling(TOKENS)) for i, p in enumerate(PROMPTS)])
        drawn = {f"r{i}": ([], []) for i in range(8)}
        while engine.stats().running + engine.stats().waiting:
            for event in engine.step():
                drawn[event.request_id][0].extend(event.token_ids)
                drawn[event.request_id][1].extend(event.logprobs)
    finally:
        engine.close()
    assert largest_difference(module, drawn.values(), f"rank {rank}, {dtype}") < bound


@pytest.mark.parametrize("rank", [0, 4], ids=["whole model", "adapters"])
def test_the_command_of_the_model_card_serves_it(rank, tiny_model, saved, tmp_path):
    module = GRPOModule(tiny_model, lora_rank=rank)
    out = export(saved(module), str(tmp_path / "out"), adapter=rank > 0)
    (command,) = re.findall(r"^vllm serve (.*)$", (out / "README.md").read_text(), re.MULTILINE)
    assert "--dtype float32" in command
    asked = {
        "prompt": PROMPTS,
        "max_tokens": TOKENS,
        "temperature": 1.0,
        "seed": 0,
        "logprobs": 0,
        "return_token_ids": True,
        "ignore_eos": True,
    }
    args = ["--model", *shlex.split(command)]
    drawn = {}
    with served(*args, log=tmp_path / "log", cwd=tmp_path) as address:
        for model in ("trained", tiny_model) if rank else ("out",):
            request = HTTPRequest(
                f"{address}/completions",
                json.dumps({"model": model, **asked}).encode(),
                {"Content-Type": "application/json"},
            )
            choices = json.load(urlopen(request, timeout=60))["choices"]
            drawn[model] = [(c["token_ids"], c["logprobs"]["token_logprobs"]) for c in choices]
    trained = drawn.pop("trained" if rank else "out")
    assert largest_difference(module, trained, f"served, rank {rank}") < 2e-5
    for base in drawn.values():  # the base beside its adapters
        assert largest_difference(module, base, "base") > 1e-2
