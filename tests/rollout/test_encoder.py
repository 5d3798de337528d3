import numpy as np
import pytest
import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertModel, BloomConfig, BloomModel, PreTrainedTokenizerFast

from lit_rlsched.scheduling.token_conditioned import SCALE, SampleEncoder, TokenConditioned
from lit_rlsched.settings import UsageError
from lit_rlsched.types import Completion, Group, Prompt, Sample, Sampling

CHARACTERS = "abcdefghijklmnopqrstuvwxyz "


@pytest.fixture(scope="module")
def encoder_path(tmp_path_factory):
    """A tiny random BERT over characters."""
    folder = tmp_path_factory.mktemp("bert")
    vocab = {token: i for i, token in enumerate(["[PAD]", "[UNK]", *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]"
    ).save_pretrained(folder)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(vocab),
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=24,
    )
    BertModel(config).save_pretrained(folder)
    return str(folder)


def decode(ids):
    return "".join(CHARACTERS[i] for i in ids)


def sample(prompt, completion, number=0, finish_reason=None):
    prompt_ids, ids = (tuple(CHARACTERS.index(c) for c in text) for text in (prompt, completion))
    c = Completion(0, list(ids), [-0.1] * len(ids), finish_reason=finish_reason)
    return Sample(Group(f"g{number}", Prompt("p", prompt, prompt_ids), Sampling(100), [c]), c)


def test_features_are_the_mean_of_the_hidden_states_whatever_the_padding(encoder_path):
    encoder = SampleEncoder(encoder_path)
    encoder.bind(decode)
    texts = [("ab", "c"), ("hello ", "world"), ("q", "")]
    together = encoder([sample(*t) for t in texts])
    assert together.shape == (3, encoder.size) == (3, 32)
    bert = BertModel.from_pretrained(encoder_path).eval()
    for text, features in zip(texts, together, strict=True):
        ids = torch.tensor([[2 + CHARACTERS.index(c) for c in "".join(text)]])
        with torch.no_grad():
            mean = bert(input_ids=ids).last_hidden_state[0].mean(0).numpy()
        np.testing.assert_allclose(features, SCALE * mean / np.linalg.norm(mean), atol=1e-4)


def saved(folder, model, encoder_path, **special):
    """The model, with the tokenizer of the tiny BERT and other special tokens."""
    model.save_pretrained(folder)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(encoder_path).backend_tokenizer
    special = {"unk_token": "[UNK]", **(special or {"pad_token": "[PAD]"})}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    return SampleEncoder(str(folder))


def test_an_encoder_saved_in_half_precision_computes_in_single(encoder_path, tmp_path):
    half = BertModel.from_pretrained(encoder_path).to(torch.bfloat16)
    assert saved(tmp_path, half, encoder_path)._model.dtype == torch.float32


def test_an_encoder_without_a_padding_token_pads_with_the_end_token(encoder_path, tmp_path):
    encoder = saved(tmp_path, BertModel.from_pretrained(encoder_path), encoder_path, eos_token="z")
    encoder.bind(decode)
    short, _ = encoder([sample("ab", "c"), sample("hello ", "world")])
    np.testing.assert_allclose(short, encoder([sample("ab", "c")])[0], atol=1e-5)


def test_an_encoder_without_a_limit_reads_512_tokens(encoder_path, tmp_path):
    config = BloomConfig(vocab_size=40, hidden_size=16, n_layer=1, n_head=2)
    assert saved(tmp_path, BloomModel(config), encoder_path)._max_length == 512


def test_an_encoder_reads_what_it_and_its_tokenizer_allow_and_512_tokens_at_most(
    encoder_path, tmp_path
):
    bert = BertModel.from_pretrained(encoder_path)
    limits = {"pad_token": "[PAD]", "model_max_length": 10}
    assert saved(tmp_path / "short", bert, encoder_path, **limits)._max_length == 10
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    bert = BertModel(
        BertConfig(vocab_size=40, intermediate_size=16, max_position_embeddings=600, **small)
    )
    assert saved(tmp_path / "long", bert, encoder_path)._max_length == 512


def test_a_long_text_loses_its_beginning(encoder_path):
    encoder = SampleEncoder(encoder_path)
    encoder.bind(decode)
    end = "abcdefghijklmnopqrstuvwx"  # 24 characters: all that fit
    long, same, other = encoder([sample("z" * 50, end), sample("y" * 9, end), sample(end, "zz")])
    np.testing.assert_allclose(long, same, atol=1e-5)
    assert np.abs(long - other).max() > 1e-3


def test_lengths_are_learned_from_the_text(encoder_path):
    predictor = TokenConditioned(encoder=encoder_path)
    predictor.bind(decode)
    for number in range(40):
        asked = [sample("solve ", "easy", 2 * number), sample("solve ", "hard", 2 * number + 1)]
        short, long = predictor.predict(asked)
        predictor.observe(
            [
                sample("solve ", "easy" + "a" * 8, 2 * number, "stop"),
                sample("solve ", "hard" + "a" * 56, 2 * number + 1, "stop"),
            ]
        )
    assert short < 14 and long > 42  # 8 and 56; without the text both get 32


def test_without_decode_it_says_what_to_call(encoder_path):
    with pytest.raises(RuntimeError, match=r"bind\(decode\)"):
        TokenConditioned(encoder=encoder_path).predict([sample("a", "b")])


def test_a_state_saved_without_the_encoder_is_refused(encoder_path):
    with pytest.raises(UsageError, match="has 39 features, the saved one 519"):
        TokenConditioned(encoder=encoder_path).load_state_dict(TokenConditioned().state_dict())
