"""Text inputs of every kind for the tests of `tokenize`, and the token files it makes of them."""

from __future__ import annotations

import gzip
import itertools
import json
import random
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import llmq.text.tokenize as tokenize_module
from llmq.data.tokens import TokenFile
from llmq.text.tokenize import tokenize
from llmq.text.tokenizer import END_OF_TEXT

EOS = 256


def run(*inputs, out, **kwargs):
    defaults = {"tokenizer": "bytes", "eval_fraction": 0.0, "workers": 1, "progress": False}
    kwargs = defaults | kwargs
    return tokenize([str(name) for name in inputs], out=out, **kwargs)


def interrupt_report(patch, number, error=KeyboardInterrupt):
    """Raise the error in place of the number-th report of progress from now on, once."""
    update, reports = tokenize_module.Progress.update, itertools.count(1)

    def interrupted(report, *args):
        if next(reports) == number:
            raise error
        update(report, *args)

    patch.setattr(tokenize_module.Progress, "update", interrupted)


def ids(out, split="train"):
    """All token ids of a split."""
    files = [TokenFile(path) for path in sorted(Path(out).glob(f"{split}-*.bin"))]
    return np.concatenate([f.read_tokens(0, f.num_tokens) for f in files]).tolist()


def encoded(*documents):
    """The ids of documents, each with its end."""
    return [token for text in documents for token in [*text.encode(), EOS]]


def contents(out):
    """The bytes of every token file, and of the files that say where their documents are."""
    files = [path for path in Path(out).iterdir() if path.suffix in (".bin", ".docs")]
    return {path.name: path.read_bytes() for path in files}


def write_jsonl(path, texts, field="text"):
    lines = [json.dumps({"id": i, field: text}) + "\n" for i, text in enumerate(texts)]
    data = "".join(lines).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def write_array(path, texts, indent=None):
    data = json.dumps([{"id": i, "text": text} for i, text in enumerate(texts)], indent=indent)
    path.write_bytes(gzip.compress(data.encode()) if path.suffix == ".gz" else data.encode())
    return path


def write_parquet(path, texts, field="text", row_group_size=3):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({"id": list(range(len(texts))), field: texts})
    parquet.write_table(table, path, row_group_size=row_group_size)
    return path


def zst(data):
    """Bytes of Zstandard in two frames, as of a file that was written in two goes."""
    zstandard = pytest.importorskip("zstandard")
    half = len(data) // 2
    return b"".join(zstandard.compress(part) for part in (data[:half], data[half:]))


def write_zst(path, texts):
    plain = write_jsonl(path.with_suffix(".plain"), texts)
    path.write_bytes(zst(plain.read_bytes()))
    plain.unlink()
    return path


def documents(count, seed=0):
    rng = random.Random(seed)
    words = ["the", "cat", "sät", "on", "漢字", "mat.\n", "\n\n", "42"]
    return [" ".join(rng.choices(words, k=rng.randrange(1, 30))) for _ in range(count)]


def mixed_text(length, seed=0):
    """Lines, blank lines, long words without blanks, special tokens; any characters."""
    rng = random.Random(seed)
    parts = [" word", "\n", "\n\n", "漢字é", END_OF_TEXT, "x" * 40, "  ", ".\r\n", "👩‍👩‍👧"]
    text = ""
    while len(text) < length:
        text += rng.choice(parts)
    return text


def write_bpe(folder):
    """A folder with the tokenizer.json of a small byte-level BPE; its end of text has id 0."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents(50) * 3, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def write_inputs(folder):
    """One input file of each kind."""
    folder.mkdir()
    (folder / "a.txt").write_text(mixed_text(1500))
    (folder / "b.bin").write_bytes(b"\0\1\2")
    write_jsonl(folder / "c.jsonl", documents(13))
    write_jsonl(folder / "d.jsonl.gz", documents(9, seed=1))
    write_parquet(folder / "e.parquet", documents(10, seed=2))
    write_zst(folder / "f.jsonl.zst", documents(6, seed=3))
    write_array(folder / "g.json", documents(7, seed=4), indent=1)
    write_array(folder / "h.json.gz", documents(5, seed=5))
    (folder / "i.txt.gz").write_bytes(gzip.compress(mixed_text(1500, seed=1).encode()))
    (folder / "j.md.zst").write_bytes(zst(mixed_text(1500, seed=2).encode()))
    return folder
