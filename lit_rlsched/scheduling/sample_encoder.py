"""Features from a Hugging Face encoder, in place of hashed tokens."""

from collections.abc import Callable, Sequence

import numpy as np

from lit_rlsched.types import Sample

BATCH = 32
MAX_TOKENS = 512
"""Maximum number of tokens that are read of a text, even where the encoder could read more."""
SCALE = 8.0
"""Norm of a sample's features: about that of as many hashed tokens as a usual probe has."""


class SampleEncoder:
    """Computes features `[N, size]`: the encoder's last hidden state, averaged over the tokens.

    The encoder runs on the CPU in float32 and is not trained. A text that is too long for it loses
    its beginning, since the drawn tokens at the end say more about the length.

    Args:
        name: Folder or hub name of an encoder such as BERT, with its tokenizer.

    Raises:
        ValueError: The encoder cannot be loaded.
    """

    def __init__(self, name: str) -> None:
        import torch
        from transformers import AutoModel, AutoTokenizer

        try:
            self._tokenizer = AutoTokenizer.from_pretrained(name, truncation_side="left")
            self._model = AutoModel.from_pretrained(name, dtype=torch.float32).eval()
        except (OSError, ValueError) as error:
            raise ValueError(
                f"`encoder={name!r}` cannot be loaded: {error}\nGive the folder or the hub name of "
                "an encoder and its tokenizer, or leave `encoder` out to learn from hashed tokens."
            ) from error
        if self._tokenizer.pad_token is None:
            self._tokenizer.pad_token = self._tokenizer.eos_token
        positions = getattr(self._model.config, "max_position_embeddings", MAX_TOKENS)
        self._max_length = min(self._tokenizer.model_max_length, positions, MAX_TOKENS)
        self.size: int = self._model.config.hidden_size
        self._decode: Callable[[list[int]], str] | None = None

    def bind(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode

    def __call__(self, samples: Sequence[Sample]) -> np.ndarray:
        """Encode prompt and drawn tokens of each sample.

        Raises:
            RuntimeError: `bind` was not called.
        """
        if self._decode is None:
            raise RuntimeError("call `bind(decode)` first: an encoder reads text, not token ids")
        texts = [self._decode(sample.token_ids) for sample in samples]
        return np.concatenate(
            [self._encode(texts[i : i + BATCH]) for i in range(0, len(texts), BATCH)]
        )

    def _encode(self, texts: list[str]) -> np.ndarray:
        import torch

        batch = self._tokenizer(
            texts, padding=True, truncation=True, max_length=self._max_length, return_tensors="pt"
        )
        mask = batch["attention_mask"][..., None]
        with torch.no_grad():
            states = self._model(**batch).last_hidden_state
        hidden = (states * mask).sum(1)  # a sum is enough: it is normalised
        return (SCALE * torch.nn.functional.normalize(hidden)).double().numpy()
