"""Tags that a tokenizer holds as special tokens, in the text that rewards see."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import reward_cases as cases
from character_tokenizer import CHARACTERS, SPECIAL
from seen_rounds import Rounds
from tokenizers import AddedToken
from transformers import AutoTokenizer

from lit_rlsched.callbacks import RolloutLogger
from lit_rlsched.rewards import RewardScheduler
from lit_rlsched.rewards.functions import countdown_reward
from lit_rlsched.training.policy import special_tokens

TAGS = {"q": "<answer>", "z": "</answer>"}


@pytest.fixture
def tagged(tiny_model: str, tmp_path: Path) -> str:
    """Folder of the tiny model's tokenizer, with tags in place of two letters."""
    file = Path(AutoTokenizer.from_pretrained(tiny_model).save_pretrained(tmp_path / "tagged")[-1])
    folder = file.parent
    stored = json.loads((folder / "tokenizer.json").read_text())
    vocab = stored["model"]["vocab"]
    for letter, tag in TAGS.items():
        vocab[tag] = vocab.pop(letter)
    (folder / "tokenizer.json").write_text(json.dumps(stored))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([AddedToken(tag, special=True) for tag in TAGS.values()])
    assert len(tokenizer) == len(SPECIAL) + len(CHARACTERS)
    tokenizer.save_pretrained(folder)
    return str(folder)


def sees(prompts: list, completions: list, **kwargs: Any) -> list[float]:
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    kwargs["log_extra"]("seen", texts)
    return [float("<answer>" in text) for text in texts]


@pytest.mark.mostly_slow("False")
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("skip", [True, False])
def test_one_text_for_all(
    fit: Callable, sums: list, tagged: str, tmp_path: Path, skip: bool
) -> None:
    rounds = Rounds()
    trainer, _, _ = fit(
        callbacks=[rounds, RolloutLogger()],
        reward_funcs=[sees],
        tokenizer=tagged,
        skip_special_tokens=skip,
        val_data=sums[80:84],
        max_completion_length=48,
    )
    pairs = [(c.text, c.extra.get("seen")) for c in rounds.completions]
    assert pairs
    assert all(ours == theirs for ours, theirs in pairs)
    assert any("<answer>" in text for text, _ in pairs) is not skip
    assert not any("<eos>" in text for text, _ in pairs)
    file = next(Path(trainer.default_root_dir).rglob("completions.jsonl"))
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert {row["completion"] for row in rows} <= {text for text, _ in pairs}
    assert all(row["completion"] == row["seen"] for row in rows)
    assert any(row["sees"] for row in rows) is not skip


def test_it_is_said_at_the_start(fit: Callable, tagged: str) -> None:
    with pytest.warns(UserWarning, match="special tokens '<answer>', '</answer>' .*`skip_special"):
        fit(reward_funcs=[sees], tokenizer=tagged)


@pytest.mark.parametrize(
    ("reward", "settings"), [(sees, {"skip_special_tokens": False}), (sees, {"tokenizer": None})]
)
def test_nothing_is_said_where_nothing_is_missed(
    fit: Callable, tagged: str, recwarn: pytest.WarningsRecorder, reward: Callable, settings: dict
) -> None:
    fit(reward_funcs=[reward], **{"tokenizer": tagged, **settings})
    assert not [w for w in recwarn if "special tokens" in str(w.message)]


def test_tokens_with_a_role_are_not_counted(tagged: str, tiny_model: str) -> None:
    assert not special_tokens(AutoTokenizer.from_pretrained(tiny_model))
    assert {*special_tokens(AutoTokenizer.from_pretrained(tagged)).values()} == {*TAGS.values()}


def mentions(completions: list[str], **kwargs: Any) -> list[float]:
    return [float("<|channel|>" in text) for text in completions]


@pytest.mark.parametrize(
    ("tokens", "functions", "found"),
    [
        # Qwen3, SmolLM2, Mistral and Llama 3: markers of turns, images, code and reserved tokens
        (["<|im_start|>", "<|vision_end|>", "<repo_name>", "[INST]"], [cases.length], []),
        (["[THINK]", "[/THINK]", "<|END_THINKING|>"], [cases.length], ...),
        (["<|channel|>"], [cases.length], []),
        (["<|channel|>"], [cases.length, mentions], ...),
        (["<answer>"], [countdown_reward], ...),
        (["<b>"], [len, cases.Judge()], []),
    ],
)
def test_which_tokens_a_reward_could_look_for(
    tokens: list[str], functions: list[Callable], found: Any
) -> None:
    looked_for = RewardScheduler(functions).tokens_looked_for(tokens)
    assert looked_for == (tokens if found is ... else found)
