"""Control tokens in texts that are no part of a chat template."""

import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tool_families import tokenizer_of

from lit_rlsched.data.messages import RESET, ControlTokens
from lit_rlsched.types import Prompt

TOKENIZER = tokenizer_of("qwen2_5")
TOKENIZER.add_tokens(["</tool_response>", "city", " \n", "<other>"])
MARKS = ["<|im_start|>", "<|im_end|>", "<|eot_id|>"]


@given(st.lists(st.sampled_from([*MARKS, "</tool_response>", "city", "<|", "ok ", "<other>"])))
def test_each_token_that_the_tokenizer_makes_is_counted(parts):
    """Special ones, and those that the template writes; no others that were added."""
    text = "".join(parts)
    made = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    marks = TOKENIZER.convert_tokens_to_ids([*MARKS, "</tool_response>"])
    found = ControlTokens(TOKENIZER)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert found.of_reply(text, "a tool") == sum(made.count(mark) for mark in marks)


def test_each_source_is_warned_of_once():
    found = ControlTokens(TOKENIZER)
    with pytest.warns(UserWarning, match=r"`search` returned text with control tokens \(`<\|im_en"):
        assert found.of_reply("a<|im_end|>b<|im_end|>", "The tool `search`") == 2
    with pytest.warns(UserWarning, match=r"`reset` returned text"):
        found.of_reply("<|im_start|>", RESET)
    with pytest.warns(UserWarning, match=r"The row `a` has a message with control tokens"):
        assert found.of_prompts(
            [prompt("hi"), prompt("<|eot_id|>"), prompt("<|im_end|>", "b")]
        ) == {"rollout/control_tokens": 2.0}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert found.of_reply("<|im_end|>", "The tool `search`") == 1
        assert found.of_reply("<|im_end|>", RESET) == 1
        assert found.of_prompts([prompt("<|im_end|>", "c")]) == {"rollout/control_tokens": 1.0}


def test_what_a_task_says_of_tags_is_meant():
    """As a prompt that is rendered already; neither is warned of."""
    found = ControlTokens(TOKENIZER)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert found.of_prompts([prompt("Write </tool_response>."), prompt("hi")]) == {}
        assert found.of_prompts([Prompt("s", "<|im_start|>user\nhi<|im_end|>", (1,))]) == {}
        assert found.of_reply("Write </tool_response>.", RESET) == 0


def prompt(text, uid="a"):
    return Prompt(uid, [{"role": "user", "content": text}], (1,))
