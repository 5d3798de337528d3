"""What tests of rows and their token ids share."""

from typing import Any

import pytest
from transformers import AutoTokenizer


@pytest.fixture
def tokenizer(tiny_model: str) -> Any:
    """The tokenizer of the tiny model."""
    return AutoTokenizer.from_pretrained(tiny_model)
