"""Tokenizers against transformers: same ids, lossless decoding, saved folders that load again."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from llmq.base.errors import DataError
from llmq.text.tokenizer import END_OF_TEXT, ByteTokenizer, HfTokenizer, load_tokenizer

transformers = pytest.importorskip("transformers")

TEXTS = [
    "",
    "Hello, world!\n\n  Two  spaces , and it 's . n't ?  \n",
    "naïve café, 漢字, Ω≈ç√, 👩‍👩‍👧‍👦, \u00a0\u3000\ufeff|\x00\x01\x7f\r\n\t",
    f"one{END_OF_TEXT}two {END_OF_TEXT}\n{END_OF_TEXT}",
    "<|endoftext> <|endoftext|",
    "e\u0301 is not é before NFC",
    "12345 67.89 don't we'LL   ... !!!\n\n\nnext",
]


def random_texts(count=100):
    """Any code points but surrogates, which no UTF-8 text has."""
    rng = random.Random(0)
    ranges = [(0, 0x80), (0x80, 0x800), (0x800, 0xD800), (0xE000, 0x10000), (0x10000, 0x110000)]
    return [
        "".join(chr(rng.randrange(*rng.choice(ranges))) for _ in range(rng.randrange(40)))
        for _ in range(count)
    ]


@pytest.fixture(scope="module")
def bpe_folder(tmp_path_factory):
    """A small byte-level BPE of the GPT-2 kind: tokenizer.json, vocab.json, merges.txt."""
    folder = tmp_path_factory.mktemp("bpe")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS * 3 + ["the cat and the hat don't we'll 123"] * 3, trainer)
    tokenizer.model.save(str(folder))
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def write_json(path, content):
    path.write_text(json.dumps(content))


def test_bytes():
    tokenizer = load_tokenizer("bytes")
    assert tokenizer.encode("hé") == [0x68, 0xC3, 0xA9]
    assert tokenizer.encode(f"a{END_OF_TEXT}b") == [97, 256, 98]
    assert tokenizer.encode("") == []
    assert (tokenizer.vocab_size, tokenizer.eos_id) == (257, 256)
    assert tokenizer.decode([0x68, 0xC3, 256, 0xA9]) == f"h\ufffd{END_OF_TEXT}\ufffd"
    with pytest.raises(ValueError, match="range"):
        tokenizer.decode([257])
    for ids in tokenizer.encode_batch(TEXTS):
        assert ids.dtype == np.int32


def test_bytes_round_trip():
    tokenizer = ByteTokenizer()
    for text in TEXTS + random_texts():
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_saved_bytes_are_the_same_in_transformers(tmp_path):
    ByteTokenizer().save(tmp_path / "t")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "t")
    ours = ByteTokenizer()
    again = load_tokenizer(tmp_path / "t")
    assert len(theirs) == again.vocab_size == 257
    assert theirs.eos_token_id == again.eos_id == 256
    for text in TEXTS + random_texts():
        ids = ours.encode(text)
        assert theirs(text)["input_ids"] == again.encode(text) == ids
        assert theirs.decode(ids) == again.decode(ids) == text


def test_hf_is_the_same_in_transformers(bpe_folder, tmp_path):
    HfTokenizer(bpe_folder).save(tmp_path)
    write_json(
        tmp_path / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": END_OF_TEXT,
            "clean_up_tokenization_spaces": False,
        },
    )
    ours = load_tokenizer(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    texts = TEXTS + random_texts()
    assert ours.vocab_size == len(theirs)
    assert ours.eos_id == theirs.eos_token_id == 0
    for text, batch_ids in zip(texts, ours.encode_batch(texts), strict=True):
        assert ours.encode(text) == batch_ids.tolist() == theirs(text)["input_ids"]
        assert batch_ids.dtype == np.int32
        assert ours.decode(batch_ids) == text


def test_length_limits_in_the_file_are_ignored(bpe_folder, tmp_path):
    limited = Tokenizer.from_file(str(bpe_folder / "tokenizer.json"))
    limited.enable_truncation(3)
    limited.enable_padding(length=5)
    limited.save(str(tmp_path / "tokenizer.json"))
    text = "the cat and the hat " * 10
    assert HfTokenizer(tmp_path).encode(text) == HfTokenizer(bpe_folder).encode(text)


def test_added_tokens_count_in_the_vocabulary(bpe_folder, tmp_path):
    tokenizer = Tokenizer.from_file(str(bpe_folder / "tokenizer.json"))
    size = tokenizer.get_vocab_size()
    tokenizer.add_special_tokens([AddedToken("<|im_end|>", special=True)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    write_json(tmp_path / "tokenizer_config.json", {"eos_token": {"content": "<|im_end|>"}})
    loaded = HfTokenizer(tmp_path)
    assert loaded.vocab_size == size + 1
    assert loaded.eos_id == size
    assert loaded.fingerprint != HfTokenizer(bpe_folder).fingerprint


@pytest.mark.parametrize(
    ("files", "eos", "bos"),
    [
        ({}, 0, 0),  # <|endoftext|>, by custom
        ({"config.json": {"eos_token_id": 7, "bos_token_id": 8}}, 7, 8),
        (
            {"config.json": {"eos_token_id": 7}, "generation_config.json": {"eos_token_id": [9]}},
            9,
            0,
        ),
        ({"tokenizer_config.json": {"eos_token": "!"}, "config.json": {"eos_token_id": 7}}, 1, 0),
        ({"tokenizer_config.json": {"eos_token": None, "bos_token": "!"}}, 0, 1),
        ({"special_tokens_map.json": {"eos_token": {"content": "!"}}}, 1, 0),
        ({"tokenizer_config.json": {"eos_token": "<none>"}, "config.json": {}}, 0, 0),
        ({"config.json": {"eos_token_id": 7, "bos_token_id": 50256}}, 7, 0),  # of no use
    ],
)
def test_where_special_tokens_come_from(bpe_folder, tmp_path, files, eos, bos):
    HfTokenizer(bpe_folder).save(tmp_path)
    for name, content in files.items():
        write_json(tmp_path / name, content)
    tokenizer = HfTokenizer(tmp_path)
    assert tokenizer.encode("!") == [1]
    assert (tokenizer.eos_id, tokenizer.bos_id) == (eos, bos)


@pytest.mark.parametrize("name", ["GPT2Tokenizer", "Qwen2Tokenizer"])
def test_vocab_and_merges(bpe_folder, tmp_path, name):
    for file in ("vocab.json", "merges.txt"):
        (tmp_path / file).write_bytes((bpe_folder / file).read_bytes())
    size = len(json.loads((tmp_path / "vocab.json").read_text()))
    write_json(
        tmp_path / "tokenizer_config.json",
        {
            "tokenizer_class": name,
            "eos_token": "<|im_end|>",
            "added_tokens_decoder": {
                str(size + 1): {"content": "<think>", "special": False, "normalized": False},
                str(size): {"content": "<|im_end|>", "special": True},
            },
        },
    )
    ours = load_tokenizer(tmp_path)
    their_class = getattr(transformers, name)
    theirs = their_class.from_pretrained(tmp_path, eos_token="<|im_end|>")
    assert ours.vocab_size == size + 2
    assert ours.eos_id == theirs.eos_token_id == size
    assert ours.encode("a<|im_end|><think>")[1:] == [size, size + 1]
    for text in TEXTS + random_texts():
        assert ours.encode(text) == theirs(text)["input_ids"]


def test_added_ids_that_cannot_be_kept(bpe_folder, tmp_path):
    for file in ("vocab.json", "merges.txt"):
        (tmp_path / file).write_bytes((bpe_folder / file).read_bytes())
    write_json(tmp_path / "added_tokens.json", {"<x>": 1000})
    with pytest.raises(DataError, match="'<x>' should have id 1000"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *[(f, []) for f in ("tokenizer_config.json", "special_tokens_map.json", "config.json")],
        *[("tokenizer_config.json", {"eos_token": token}) for token in (5, {}, {"content": 5})],
        ("special_tokens_map.json", {"bos_token": []}),
        *[("generation_config.json", {"eos_token_id": t}) for t in ([], "x", True, -1)],
    ],
)
def test_damaged_files_beside_the_tokenizer(bpe_folder, tmp_path, name, content):
    HfTokenizer(bpe_folder).save(tmp_path)
    write_json(tmp_path / name, content)
    with pytest.raises(DataError) as error:
        HfTokenizer(tmp_path)
    assert f"'{tmp_path / name}'" in str(error.value) and "\n" not in str(error.value)


def test_errors(bpe_folder, tmp_path):
    with pytest.raises(DataError, match="no tokenizer folder"):
        load_tokenizer(tmp_path / "none")
    with pytest.raises(DataError, match=r"has neither tokenizer\.json nor vocab\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(DataError, match="cannot read the tokenizer"):
        load_tokenizer(tmp_path)
    HfTokenizer(bpe_folder).save(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["model"]["continuing_subword_prefix"] = "longer than any token of the vocabulary"
    write_json(tmp_path / "tokenizer.json", content)
    with pytest.raises(DataError, match="cannot read the tokenizer"):  # the library panics
        load_tokenizer(tmp_path)
    HfTokenizer(bpe_folder).save(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(DataError, match=r"config\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "config.json").unlink()
    (tmp_path / "tokenizer.json").unlink()
    write_json(tmp_path / "tokenizer_config.json", {"tokenizer_class": "RobertaTokenizer"})
    with pytest.raises(DataError, match="RobertaTokenizer"):
        load_tokenizer(tmp_path)
