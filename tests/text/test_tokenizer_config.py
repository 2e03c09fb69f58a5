"""Exports whose AutoTokenizer makes the ids of the training, for every architecture."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers

from llmq.base.dtypes import F32
from llmq.checkpoint.hf import export_model
from llmq.data.tokens import TokenWriter
from llmq.options.presets import PRESETS
from llmq.run.model_of_run import exported_otherwise
from llmq.text.tokenizer import END_OF_TEXT, QWEN2_WORDS, ByteTokenizer, HfTokenizer
from llmq.text.tokenizer_files import AS_IT_IS, EXACT_MODULE, difference, take_as_it_is
from tests.text_data import mixed_text, write_bpe

pytestmark = pytest.mark.tried

transformers = pytest.importorskip("transformers")

TEXT = mixed_text(3000) + " don't 12345 67.89\n\n  e\u0301  we'LL"
TINY = [name for name in PRESETS if name.startswith("tiny")]
# The files of copied tokenizers say these.
COPIED = {
    "own": None,
    "fast": {"tokenizer_class": AS_IT_IS, "eos_token": END_OF_TEXT},
    "qwen2": {"tokenizer_class": "Qwen2Tokenizer", "chat_template": "{{ messages }}", "x": [1]},
    "gpt2": {"tokenizer_class": "GPT2TokenizerFast", "model_max_length": 1024},
    "gemma": {"tokenizer_class": "GemmaTokenizerFast", "eos_token": END_OF_TEXT},
    "llama": {"tokenizer_class": "LlamaTokenizer", "eos_token": END_OF_TEXT, "legacy": False},
}


# A transformers that says what it finds of PyTorch.
WITHOUT_TORCH = """
import sys

class AutoTokenizer:
    def from_pretrained(*args, **kwargs):
        raise ValueError(f"torch is {sys.modules.get('torch', 'there')}")
"""


def make_tokenizer(folder, config):
    """A byte-level BPE with a pre-tokenizer and a normalizer that are no class's own."""
    folder.mkdir()
    path = write_bpe(folder) / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save(str(path))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def export(out, preset, tokenizer, vocab_size=512):
    eos = {512: 0, 257: 256}[vocab_size]
    model = PRESETS[preset].with_layers([0])
    model = dataclasses.replace(model, vocab_size=vocab_size, eos_token_id=eos)
    export_model(out, model, lambda param: np.zeros(param.shape, np.float32), F32, tokenizer)
    return out


@pytest.mark.parametrize("preset", TINY)
@pytest.mark.parametrize("config", COPIED)
def test_copied_tokenizers_make_the_same_ids(tmp_path, preset, config):
    source = make_tokenizer(tmp_path / "t", COPIED[config])
    out = export(tmp_path / "out", preset, source)
    ours, theirs = HfTokenizer(source), transformers.AutoTokenizer.from_pretrained(out)
    assert theirs(TEXT)["input_ids"] == ours.encode(TEXT)
    assert theirs.eos_token_id == ours.eos_id == 0
    assert HfTokenizer(out).fingerprint == ours.fingerprint
    if preset == TINY[0] and config in ("own", "gemma"):  # another process for each
        assert difference(out, ours, TEXT) is None
    written = json.loads((out / "tokenizer_config.json").read_text())
    kept = {k: v for k, v in (COPIED[config] or {}).items() if k != "tokenizer_class"}
    assert written.items() >= kept.items() or written | kept == written
    if config == "fast":
        written.pop("auto_map", None)
        assert written == COPIED["fast"]


def test_words_of_qwen2_stay_in_models_that_have_another_class(tmp_path):
    """Marks belong to words in Qwen3_5Tokenizer alone, which transformers takes by the model."""
    source = make_tokenizer(tmp_path / "t", COPIED["qwen2"])
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    tokenizer.normalizer = normalizers.NFC()
    words = pre_tokenizers.Split(Regex(QWEN2_WORDS), "isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, to_bytes])
    tokenizer.save(str(source / "tokenizer.json"))
    ours = HfTokenizer(source)
    assert ours.is_qwen2
    for preset in ("tiny", "tiny-qwen3.5-moe"):
        out = export(tmp_path / preset, preset, source)
        theirs = transformers.AutoTokenizer.from_pretrained(out)
        assert theirs(TEXT)["input_ids"] == ours.encode(TEXT), preset
        assert (out / EXACT_MODULE).is_file() == (preset != "tiny")


def test_the_module_of_an_auto_map_makes_the_same_ids(tmp_path):
    source = make_tokenizer(tmp_path / "t", COPIED["qwen2"])
    out = export(tmp_path / "out", "tiny", source)
    theirs = transformers.AutoTokenizer.from_pretrained(out, trust_remote_code=True)
    assert theirs(TEXT)["input_ids"] == HfTokenizer(source).encode(TEXT)
    assert type(theirs).__name__ == "ExactTokenizer"


@pytest.mark.parametrize("preset", TINY)
def test_bytes_make_the_same_ids(tmp_path, preset):
    out = export(tmp_path / "out", preset, ByteTokenizer(), 257)
    theirs = transformers.AutoTokenizer.from_pretrained(out)
    assert theirs(TEXT)["input_ids"] == ByteTokenizer().encode(TEXT)
    ByteTokenizer().save(tmp_path / "t")
    again = export(tmp_path / "again", preset, tmp_path / "t", 257)
    for name in ("tokenizer_config.json", "tokenizer.json"):
        assert (again / name).read_text() == (out / name).read_text()


def test_own_special_tokens_of_a_class_are_kept(tmp_path):
    source = make_tokenizer(tmp_path / "t", {"tokenizer_class": "Qwen2Tokenizer"})
    take_as_it_is(source)
    theirs = transformers.AutoTokenizer.from_pretrained(source)
    assert theirs.pad_token == theirs.eos_token == theirs.unk_token == END_OF_TEXT
    before = (source / "tokenizer_config.json").read_bytes()
    take_as_it_is(source)
    assert (source / "tokenizer_config.json").read_bytes() == before


@pytest.mark.parametrize("named", [None, "GemmaTokenizer"])
def test_gemmas_tokenizer_makes_the_same_ids(tmp_path, named):
    """A BPE of pieces with spaces in them, and bytes for what it has no piece of."""
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
    pieces = special + [f"<0x{byte:02X}>" for byte in range(256)]
    pieces += [chr(c) for c in range(ord("a"), ord("z") + 1)] + ["\u2581", "\u2581t", "\u2581th"]
    vocab, merges = (
        {piece: i for i, piece in enumerate(pieces)},
        [("\u2581", "t"), ("\u2581t", "h")],
    )
    theirs = transformers.GemmaTokenizer(vocab=vocab, merges=merges)
    theirs.save_pretrained(tmp_path / "t")
    config = {} if named is None else {"tokenizer_class": named, "add_bos_token": True}
    (tmp_path / "t" / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "t" / "special_tokens_map.json").unlink(missing_ok=True)
    text, ours = "the cat\n\nthat \u4e16 caf\u00e9  x", HfTokenizer(tmp_path / "t")
    assert ours.encode(text) == theirs(text, add_special_tokens=False)["input_ids"]
    assert ours.decode(ours.encode(text)) == text
    model = dataclasses.replace(PRESETS["tiny-gemma3"].with_layers([0]), vocab_size=len(vocab))
    model = dataclasses.replace(model, bos_token_id=2, eos_token_id=1, pad_token_id=0)
    out = tmp_path / "out"
    export_model(out, model, lambda param: np.zeros(param.shape, np.float32), F32, tmp_path / "t")
    assert difference(out, ours, text) is None
    loaded = transformers.AutoTokenizer.from_pretrained(out)
    assert loaded(text)["input_ids"] == [*ours.added[0], *ours.encode(text), *ours.added[1]]
    assert (loaded.eos_token_id, loaded.bos_token_id) == (1, 2)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_damaged_files_are_left_as_they_are(tmp_path, name):
    source = make_tokenizer(tmp_path / "t", {"tokenizer_class": "Qwen2Tokenizer"})
    (source / name).write_text("{")
    before = {path.name: path.read_bytes() for path in source.iterdir()}
    take_as_it_is(source)
    assert {path.name: path.read_bytes() for path in source.iterdir()} == before


def test_a_difference_is_said(tmp_path, monkeypatch):
    source = make_tokenizer(tmp_path / "t", {"tokenizer_class": "Qwen2Tokenizer"})
    ours = HfTokenizer(source)
    out = tmp_path / "out"
    out.mkdir()
    (out / "tokenizer.json").write_bytes((source / "tokenizer.json").read_bytes())
    other = {"tokenizer_class": "Qwen2Tokenizer"}
    (out / "tokenizer_config.json").write_text(json.dumps(other))
    with TokenWriter(tmp_path / "a.bin", 512) as writer:
        writer.write(np.array(ours.encode(TEXT.upper() + TEXT), np.int32))
    monkeypatch.setattr(HfTokenizer, "decode", lambda self, ids: TEXT.upper())
    [line] = exported_otherwise(out, source, str(tmp_path / "a.bin"))
    assert line.startswith(f"AutoTokenizer of '{out}' makes ") and "in training" in line
    (out / "tokenizer.json").write_text("{")
    [line] = exported_otherwise(out, source, str(tmp_path / "a.bin"))
    assert "cannot be loaded" in line and "\n" not in line
    assert exported_otherwise(out, source, str(tmp_path / "none.bin")) == []
    theirs = tmp_path / "transformers.py"
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    theirs.write_text(WITHOUT_TORCH)
    [line] = exported_otherwise(out, source, str(tmp_path / "a.bin"))
    assert line.endswith("cannot be loaded (torch is None)")
    theirs.write_text("raise ImportError\n")
    assert exported_otherwise(out, source, str(tmp_path / "a.bin")) == []
