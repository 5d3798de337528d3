"""Token ids of batches are those of `tokenizer(text)`."""

from typing import Any

import pytest

from lit_rlsched.data import tokenizing
from lit_rlsched.data.prompts import make_prompts
from lit_rlsched.data.tokenizing import PromptTokenizer
from lit_rlsched.settings import UsageError

TEXTS = ["1+1", "", "Is \u00e9 a letter?", "1+1", "<answer>\n4 </answer>", "<|im_end|>x"]
CHATS = [
    [{"role": "user", "content": "2+2"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "\u4e2d\u6587"}],
]
PROMPTS: list[Any] = [*TEXTS, *CHATS, *TEXTS[::-1], CHATS[0], *(f"{i} + {i}" for i in range(40))]


def plain_ids(tokenizer: Any, prompts: list[Any], **settings: Any) -> list[list[int]]:
    """Tokenise one prompt after the other with what everybody calls."""
    return [
        tokenizer(text=prompt)["input_ids"]
        if isinstance(prompt, str)
        else tokenizer.apply_chat_template(
            prompt, add_generation_prompt=True, return_dict=True, **settings
        )["input_ids"]
        for prompt in prompts
    ]


def rows_of(prompts: list[Any]) -> list[dict[str, Any]]:
    return [{"prompt": prompt} for prompt in prompts]


@pytest.mark.parametrize("batch", [4, 1000])
def test_batches_have_the_ids_of_single_calls(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch, batch: int
) -> None:
    monkeypatch.setattr(tokenizing, "_BATCH", batch)
    prompts = [prompt for prompt in PROMPTS if prompt]
    expected = plain_ids(tokenizer, prompts)
    tokenizer(text=["a"], truncation=True, max_length=2, padding="max_length")  # left by the user
    rows = [{"prompt": prompt, "uid": i} for i, prompt in enumerate(prompts)]
    made = make_prompts(rows, tokenizer, max_prompt_length=1000)
    assert [list(prompt.token_ids) for prompt in made] == expected


@pytest.mark.parametrize("split", [True, False])
def test_settings_of_the_tokenizer_hold(tokenizer: Any, split: bool) -> None:
    tokenizer.split_special_tokens = split
    expected = plain_ids(tokenizer, PROMPTS)
    tokenizer(text=["a"], split_special_tokens=not split)
    assert list(map(list, PromptTokenizer(tokenizer, None)(rows_of(PROMPTS)))) == expected


def test_a_class_that_changes_calls_is_called(tokenizer: Any) -> None:
    class Shouting(type(tokenizer)):  # type: ignore[misc]
        def _encode_plus(self, text: list[str], **settings: Any) -> Any:
            return super()._encode_plus(text=[one.upper() for one in text], **settings)

    loud = Shouting.from_pretrained(tokenizer.name_or_path)
    lower, upper = PromptTokenizer(tokenizer, None), PromptTokenizer(loud, None)
    assert upper([{"prompt": "four"}]) == lower([{"prompt": "FOUR"}]) != lower([{"prompt": "four"}])


def test_a_row_in_the_middle_of_a_batch_that_cannot_be_tokenised_is_named(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizing, "_BATCH", 5)
    tokenizer.chat_template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}a"
    )
    rows = [{"prompt": CHATS[i == 8], "uid": i} for i in range(20)]
    with pytest.raises(UsageError, match=r"row 8 cannot be tokenised: no system role.*brief"):
        make_prompts(rows, tokenizer, max_prompt_length=9)
