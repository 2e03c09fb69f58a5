"""Train a byte-level BPE tokenizer on text files, as a directory for `llmq tokenize --tokenizer`.

python tools/train_tokenizer.py OUT FILE... [--vocab-size 32768] [--max-bytes 100000000]
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import tokenizers
import typer

END_OF_TEXT = "<|endoftext|>"


def texts(files: list[Path], max_bytes: int) -> Iterator[str]:
    """Contents of the files until there are max_bytes; what is not UTF-8 is left out."""
    for path in files:
        if max_bytes <= 0:
            return
        data = path.read_bytes()
        max_bytes -= len(data)
        yield data.decode("utf-8", errors="ignore")


def main(
    out: Path,
    files: list[Path],
    vocab_size: Annotated[int, typer.Option(min=512)] = 32768,
    max_bytes: Annotated[int, typer.Option(min=1)] = 100_000_000,
) -> None:
    """Write OUT/tokenizer.json and OUT/tokenizer_config.json."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts(files, max_bytes), trainer)
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    print(f"{tokenizer.get_vocab_size()} tokens in {out}")


if __name__ == "__main__":
    typer.run(main)
