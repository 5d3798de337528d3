"""What tests of rows and their token ids share."""

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer


@pytest.fixture
def tokenizer(tiny_model: str) -> Any:
    """The tokenizer of the tiny model."""
    return AutoTokenizer.from_pretrained(tiny_model)


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of rows for each test."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
