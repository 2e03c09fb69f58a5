"""Text of ids that come one after another is the text of all, and no character comes in halves."""

from __future__ import annotations

import json

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from llmq.text.tokenizer import (
    INCOMPLETE,
    ByteTokenizer,
    HfTokenizer,
    continuation,
    streamed,
)

TEXT = "Die Größe: 12 €, naïve 漢字 und 👩‍🚀🇩🇪!\n\n\tEnde. " * 3


def byte_level() -> Tokenizer:
    """A tokenizer like GPT-2's and Qwen's: most characters of TEXT are of several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=280, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    return tokenizer


def byte_fallback() -> Tokenizer:
    """A tokenizer like Llama 2's: spaces are U+2581, the first one is stripped, and what is unknown
    is bytes."""
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", *"DieGröß:nauvdE!."]
    tokenizer = Tokenizer(
        models.BPE({w: i for i, w in enumerate(words)}, [], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


@pytest.fixture(scope="module", params=["bytes", "byte_level", "byte_fallback"])
def tokenizer(request, tmp_path_factory):
    if request.param == "bytes":
        return ByteTokenizer()
    folder = tmp_path_factory.mktemp(request.param)
    {"byte_level": byte_level, "byte_fallback": byte_fallback}[request.param]().save(
        str(folder / "tokenizer.json")
    )
    return HfTokenizer(folder)


def pieces_of(tokenizer, prompt: list[int], new: list[int]) -> list[str]:
    pieces = list(streamed(tokenizer, prompt, new))
    assert all(pieces)
    assert "".join(pieces) == continuation(tokenizer, prompt, new)
    return pieces


def test_pieces_are_the_text_in_whole_characters(tokenizer):
    ids = tokenizer.encode(TEXT)
    for cut in (0, 1, 7, 20):
        pieces = pieces_of(tokenizer, ids[:cut], ids[cut:])
        assert len(pieces) > len(TEXT) // 4
    # Behind a whole character all of it has been said.
    assert not any(INCOMPLETE in piece for piece in pieces_of(tokenizer, [], ids))


def test_any_ids_give_the_text_of_all_of_them(tokenizer):
    """Bytes that are no characters among them, and texts that end within one."""
    rng = np.random.default_rng(0)
    for length in (1, 2, 3, 40, 300):
        for _ in range(6):
            new = rng.integers(0, tokenizer.vocab_size, length).tolist()
            pieces_of(tokenizer, rng.integers(0, tokenizer.vocab_size, 3).tolist(), new)


def arrivals(tokenizer, ids):
    """The pieces of a text, each with how many ids it has needed."""
    taken = []
    fed = (taken.append(token) or token for token in ids)
    return [(len(taken), piece) for piece in streamed(tokenizer, [], fed)]


def test_a_character_comes_with_its_last_byte():
    tokenizer = ByteTokenizer()
    assert arrivals(tokenizer, "a€b".encode()) == [(1, "a"), (4, "€"), (5, "b")]
    assert arrivals(tokenizer, "a€".encode()[:-1]) == [(1, "a"), (3, INCOMPLETE)]


def test_a_long_text_is_not_decoded_again_with_every_id(tokenizer):
    decoded = []

    class Counting:
        def __getattr__(self, name):
            return getattr(tokenizer, name)

        def decode(self, ids):
            decoded.append(len(ids))
            return tokenizer.decode(ids)

    ids = tokenizer.encode(TEXT * 4)
    assert "".join(streamed(Counting(), [], ids)) == continuation(tokenizer, [], ids)
    *before, end = decoded
    assert end == len(ids) > 400 and max(before) <= 150


def test_which_tokens_are_bytes(tmp_path):
    byte_fallback().save(str(tmp_path / "tokenizer.json"))
    tokenizer = HfTokenizer(tmp_path)
    vocab = json.loads((tmp_path / "tokenizer.json").read_text())["model"]["vocab"]
    assert [i for i in vocab.values() if tokenizer.is_byte(i)] == list(range(1, 257))
    assert not tokenizer.is_byte(10_000) and not ByteTokenizer().is_byte(65)
