"""Fixtures for every test: a tiny random Qwen3 with a character tokenizer, made on the spot."""

import atexit
import os
import shutil
import tempfile

os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
if "LIT_RLSCHED_TEST_CACHE" not in os.environ:  # workers and child processes share it
    cache = tempfile.mkdtemp(prefix="lit_rlsched-test-cache-")
    os.environ.update(LIT_RLSCHED_TEST_CACHE=cache, HF_DATASETS_CACHE=cache)
    atexit.register(shutil.rmtree, cache, ignore_errors=True)

import gc
import signal
import sys
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import cloudpickle
import forked
import hypothesis
import pytest
import torch
from character_tokenizer import CHARACTERS, SPECIAL, make_tokenizer
from placements import PLACEMENTS
from transformers import (
    AutoModelForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from lit_rlsched.engines import ProcessEngine, RayEngine, child
from lit_rlsched.engines._vllm_guest import import_vllm
from lit_rlsched.processes import ChildProcess

pytest_plugins = ["vllm_build", "logged_metrics", "pytester"]
torch.set_num_threads(1)
hypothesis.settings.register_profile("quick", deadline=None, max_examples=20)
hypothesis.settings.register_profile("thorough", deadline=None, max_examples=40)
hypothesis.settings.register_profile(  # few examples, always the same ones, none made smaller
    "mutants",
    deadline=None,
    max_examples=20,
    derandomize=True,
    database=None,
    phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
)
hypothesis.settings.load_profile("quick")  # `make test-slow` takes the other

forked.collect_less()
# Each start and end of vLLM collects garbage seven times and unfreezes what was frozen. With all
# imported modules frozen, a collection takes 10 ms instead of 500.
freeze, unfreeze = gc.freeze, gc.unfreeze
gc.freeze = gc.unfreeze = lambda: None
frozen_modules = 0


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Fork engines' processes, freeze the imported modules, let vLLM wrap kernels once."""
    global frozen_modules
    spawns = item.get_closest_marker("spawned") is not None
    child.ChildProcess = ChildProcess if spawns else forked.EngineProcess  # type: ignore[misc]
    forked.wrap_kernels_once()
    if len(sys.modules) > frozen_modules + 200:
        gc.collect()
        freeze()
        frozen_modules = len(sys.modules)


def pytest_unconfigure() -> None:
    """Let Python end as it would: triton reports what is still frozen as leaked."""
    unfreeze()


LONGEST = (
    "test_real_model",
    "test_vllm_parallel",
    "test_resume",
    "test_same_run",
    "test_pool_processes",
    "test_stopped",
    "test_chaos",
    "test_parallelism_planner",
    "test_examples",
    "test_metrics",
    "test_docs",
    "test_wandb_runs",
)
"""They begin first, so that none is left for a single worker at the end."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the parameters that `mostly_slow` does not list as slow; put the longest tests first.

    Reward workers get functions of tests by value: else they import the test and so torch.
    """
    for module in {item.getparent(pytest.Module) for item in items}:
        if module is not None:
            cloudpickle.register_pickle_by_value(module.obj)

    items.sort(key=lambda item: [*LONGEST, item.path.stem].index(item.path.stem))
    listed, found = set(), set()
    for item in items:
        if mark := item.get_closest_marker("mostly_slow"):
            name, _, parameters = item.nodeid.removesuffix("]").partition("[")
            listed |= {(name, kept) for kept in mark.args}
            found.add((name, parameters))
            if parameters not in mark.args:
                item.add_marker("slow")
    if len(items) > 1000 and not listed <= found:  # a whole run
        raise pytest.UsageError(
            f"`mostly_slow` lists parameters that are not there: {listed - found}"
        )


def make_model(folder: Path, tied: bool) -> str:
    """A model whose draws are neither uniform nor certain; EOS comes up about once in 60 tokens."""
    config = Qwen3Config(
        vocab_size=len(SPECIAL) + len(CHARACTERS),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=512,
        initializer_range=0.3,
        tie_word_embeddings=tied,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=2,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        Qwen3ForCausalLM(config).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return str(folder)


def load_policy(folder: str) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture
def forked_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the processes of a split model; each imports torch and vLLM else."""
    if find_spec("vllm") is not None:
        import_vllm()
        executor = import_module("vllm.v1.executor.multiproc_executor")
        monkeypatch.setattr(executor, "get_mp_context", forked.VLLMWorkers)


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """A Ray cluster on this node, in which nothing is left at the end."""
    ray = pytest.importorskip("ray")
    handler = signal.getsignal(signal.SIGTERM)
    with TemporaryDirectory(prefix="ray-", dir="/tmp") as folder:  # sockets need a short path
        ray.init("local", num_cpus=4, include_dashboard=False, _temp_dir=folder)
        signal.signal(signal.SIGTERM, handler)
        yield
        left, end = [{"state": "unknown"}], time.monotonic() + 60
        while left and time.monotonic() < end:  # an actor gives its group back later
            time.sleep(0.1)
            groups = ray.util.placement_group_table().values()
            left = [group for group in groups if group["state"] != "REMOVED"]
        ray.shutdown()
    assert not left


@pytest.fixture(scope="module", params=PLACEMENTS)
def placement(request: pytest.FixtureRequest) -> type[ProcessEngine]:
    """Class that runs an engine outside of this process."""
    if request.param is RayEngine:
        request.getfixturevalue("ray_cluster")
    cls: type[ProcessEngine] = request.param
    return cls


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a checkpoint with tied embeddings, and its tokenizer."""
    return make_model(tmp_path_factory.mktemp("tiny_model"), tied=True)


@pytest.fixture(scope="session")
def tiny_model_untied(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_model(tmp_path_factory.mktemp("tiny_model_untied"), tied=False)


@pytest.fixture
def tiny_policy(tiny_model: str) -> PreTrainedModel:
    """The model of `tiny_model` in fp32, fresh for every test."""
    return load_policy(tiny_model)


@pytest.fixture(scope="session")
def make_policy() -> Callable[[str], PreTrainedModel]:
    """Load a fresh policy from a folder, for fixtures that outlive one test."""
    return load_policy


@pytest.fixture(scope="session")
def digits() -> Callable:
    """A reward function: the share of digits, 1.0 where the answer stands at the front."""

    def digits(prompts, completions, completion_ids, answer, **kwargs):
        texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
        return [
            1.0 if text.startswith(a) else sum(c.isdigit() for c in text) / max(1, len(text))
            for text, a in zip(texts, answer, strict=True)
        ]

    return digits


@pytest.fixture(scope="session")
def exact_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Every layer of it computes in float64 where it is asked to; Qwen3's norms do not."""
    folder, tokenizer = tmp_path_factory.mktemp("neox"), make_tokenizer()
    sizes = {"hidden_size": 32, "intermediate_size": 128, "max_position_embeddings": 256}
    layers = {"num_hidden_layers": 2, "num_attention_heads": 2, "attention_dropout": 0.1}
    config = GPTNeoXConfig(
        vocab_size=len(tokenizer), **sizes, **layers, initializer_range=0.3, eos_token_id=1
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = GPTNeoXForCausalLM(config)
    model.generation_config.eos_token_id = [1, *range(10, 20)]  # one token in six
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def sums() -> list[dict[str, str]]:
    """A hundred prompts."""
    return [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(10) for b in range(10)]


@pytest.fixture
def fit(tmp_path: Path, tiny_model: str, digits: Callable, sums: list) -> Callable:
    """Train the tiny model for a moment; returns trainer, module and data module."""
    from lightning import Trainer

    from lit_rlsched import GRPOModule, RolloutDataModule
    from lit_rlsched.engines import TransformersEngine

    def fit(module=None, callbacks=(), trainer=None, ckpt_path=None, **data):
        module = module or GRPOModule(tiny_model, learning_rate=1e-3)
        settings = {
            "train_data": sums[:80],
            "reward_funcs": [digits],
            "engine": TransformersEngine(),
            "prompts_per_round": 4,
            "num_generations": 4,
            "max_completion_length": 24,
            "micro_batch_tokens": 256,
            "seed": 3,
        }
        datamodule = RolloutDataModule(**{**settings, **data})
        defaults = {
            "accelerator": "cpu",
            "max_epochs": 2,
            "num_sanity_val_steps": 0,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "default_root_dir": tmp_path,
        }
        trainer = Trainer(callbacks=list(callbacks), **{**defaults, **(trainer or {})})
        trainer.fit(module, datamodule=datamodule, ckpt_path=ckpt_path)
        return trainer, module, datamodule

    return fit


@pytest.fixture
def saved(tmp_path: Path) -> Callable[..., str]:
    """Save a checkpoint of a module whose trained weights were changed, as a run would."""
    from lightning import Trainer

    def saved(module, precision="32-true"):
        trainer = Trainer(accelerator="cpu", precision=precision, logger=False)
        module.trainer = trainer
        module.configure_model()
        trainer.precision_plugin.convert_module(module)
        noise = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in module.parameters():
                if parameter.requires_grad:
                    parameter += 0.02 * torch.randn(parameter.shape, generator=noise)
        trainer.strategy.connect(module)
        trainer.save_checkpoint(tmp_path / "some.ckpt")
        return str(tmp_path / "some.ckpt")

    return saved
