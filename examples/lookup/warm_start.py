"""Make the model of the tools tutorial: a tokenizer, a chat template with tools and a warm start.

    python -m examples.lookup.warm_start --out examples/lookup/model

The model imitates a teacher that knows how calls are written, but not what they are for: it asks
for the first key again and again, for any key, and now and then for the one that it was told. The
most likely turn is wrong, so that greedy decoding gets nowhere. This takes two minutes on one CPU
thread.
"""

import argparse
import random
from collections.abc import Iterator
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from examples.countdown.warm_start import make_model, train
from examples.lookup.lookup import LETTERS, Registry, row_of
from lit_rlsched.processes import keep_heap

PAD, END, USER, ASSISTANT, TOOL = "<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<|tool|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% for call in message.get('tool_calls') or [] %}"
    "{{ call['function']['name'] }}("
    "{% for key, value in call['function']['arguments'].items() %}"
    "{{ ',' if not loop.first }}{{ key }}={{ value }}{% endfor %})"
    "{% endfor %}{{ '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": ASSISTANT,
    "fields": {
        "tool_calls": {
            "open_pattern": r"(?P<name>[a-z_]+)\(",
            "close_pattern": r"\)",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {
                "tag_pattern": r"(?P<key>[a-z_]+)=(?P<value>[^,)]*)",
                "value_parser": {"name": "text"},
            },
            "transform": {
                "type": "function",
                "function": {"name": "{name}", "arguments": "{content}"},
            },
        },
        "content": {"close_pattern": r"<\|end\|>", "content": "text"},
    },
}
"""How calls are read from a turn: `get(key=c)`. See Transformers' page on response parsing."""
CONTEXT = 256
MOST_TURNS = 12
RIGHT, FIRST, GUESS = 0.25, 0.3, 0.1
"""Probabilities that the teacher does what leads on, asks for the first key, guesses the answer."""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of bytes and of the words `get(key=` and `none`."""
    special = [PAD, END, USER, ASSISTANT, TOOL]
    words = [*special, "get(key=", "none", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in ("get(key=", "none")])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=special[2:],
        chat_template=CHAT_TEMPLATE,
        response_template=RESPONSE_TEMPLATE,
        model_max_length=CONTEXT,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def demonstration(rng: random.Random) -> list[dict[str, Any]]:
    """Return the chat of one chain."""
    row = row_of(rng.randrange(5000))
    registry, told = Registry(), row["chain"][0]
    registry.reset(**row)
    chat = [*row["prompt"]]
    while len(chat) < 2 * MOST_TURNS:
        chance = rng.random()
        if told.isdigit() and chance < RIGHT + GUESS:
            answer = told if chance < RIGHT else str(rng.randint(10, 99))
            return [*chat, {"role": "assistant", "content": answer}]
        first = row["chain"][0] if chance < RIGHT + FIRST else rng.choice(LETTERS)
        key = told if chance < RIGHT else first
        function = {"name": "get", "arguments": {"key": key}}
        call = {"type": "function", "function": function}
        chat.append({"role": "assistant", "content": "", "tool_calls": [call]})
        reply = registry.get(key)
        told = told if reply == "none" else reply
        chat.append({"role": "tool", "name": "get", "content": reply})
    return chat[:-1]


class Demonstrations:
    """Endless batches of tokenized demonstrations.

    Args:
        tokenizer: Tokenizer with the chat template.
        seed: Seed of the chains and of the teacher.
        batch: Chats of a batch.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, seed: int, batch: int = 64) -> None:
        self.tokenizer = tokenizer
        self.rng = random.Random(seed)
        self.batch = batch
        self.begin = tokenizer.convert_tokens_to_ids(ASSISTANT)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield token ids `[B, T]` and labels `[B, T]`, -100 on all but the assistant's turns."""
        while True:
            chats = [demonstration(self.rng) for _ in range(self.batch)]
            rows = self.tokenizer.apply_chat_template(chats, return_dict=False)
            length = max(map(len, rows))
            tokens = torch.full((len(rows), length), self.tokenizer.pad_token_id)
            labels = torch.full((len(rows), length), -100)
            for i, ids in enumerate(rows):
                tokens[i, : len(ids)] = torch.tensor(ids)
                labels[i, : len(ids)] = torch.tensor(self._labels(ids))
            yield tokens, labels

    def _labels(self, ids: list[int]) -> list[int]:
        drawn, labels = False, []
        for token in ids:
            labels.append(token if drawn else -100)
            drawn = token == self.begin or (drawn and token != self.tokenizer.eos_token_id)
        return labels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True, help="Folder for the model and its tokenizer.")
    parser.add_argument("--seed", type=int, default=0, help="Seed (default: 0).")
    parser.add_argument("--steps", type=int, default=400, help="Training steps (default: 400).")
    args = parser.parse_args()

    keep_heap()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, heads=2, context=CONTEXT)
    print(f"{len(tokenizer)} tokens, {model.num_parameters():,} parameters", flush=True)
    train(model, Demonstrations(tokenizer, args.seed), args.steps)
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)


if __name__ == "__main__":
    main()
