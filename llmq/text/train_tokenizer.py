"""Training of a tokenizer: byte-level BPE that cuts texts into words as Qwen's tokenizers do. Ids
are bytes (0 to 255), then merges, then special tokens. Equal texts make equal files."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from llmq.base.errors import ConfigError, DataError, warn_once
from llmq.base.files import staged_directory
from llmq.base.locks import lock_beside, locked
from llmq.base.records import HALVES, mended, whole_characters
from llmq.base.worker import Bounds, in_worker
from llmq.text.chat_template import load_chat_template
from llmq.text.inputs import (
    EvalSplit,
    HubDataset,
    InputSource,
    Position,
    find_sources,
    read_blocks,
    reading_standard_input,
)
from llmq.text.record_format import DEFAULT_FIELD, RecordText, having_fields
from llmq.text.tokenizer import (
    END_OF_TEXT,
    TEMPLATE_FILE,
    ByteTokenizer,
    HfTokenizer,
    new_byte_level_bpe,
    save_tokenizer,
)

if TYPE_CHECKING:
    import tokenizers

CHATML = "chatml"
"""Value of --chat-template for the template below, the format of Qwen's models."""
_CHATML = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
_CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")
_LEAST_COUNT = 2  # a pair of tokens that occurs once is no pattern
_SAMPLE = 1 << 20  # characters of the text on which bytes per token are measured


@dataclass(frozen=True, slots=True)
class TrainedTokenizer:
    """Result of `train_tokenizer`. bytes_per_token: mean over the first part of the text. warnings:
    one line each."""

    folder: Path
    vocab_size: int
    bytes_per_token: float
    warnings: list[str]

    def describe(self) -> str:
        """Lines for the console."""
        line = (
            f"Tokenizer of {self.vocab_size} tokens written to {self.folder}; a token is "
            f"{self.bytes_per_token:.2f} bytes of its text"
        )
        return "\n".join([line, *(f"warning: {text}" for text in self.warnings)])


@reading_standard_input
def train_tokenizer(
    inputs: Sequence[str],
    *,
    vocab_size: int,
    out: str | Path,
    field: str = DEFAULT_FIELD,
    template: str | None = None,
    dataset: HubDataset | None = None,
    special_tokens: Sequence[str] = (),
    chat_template: str | None = None,
    overwrite: bool = False,
) -> TrainedTokenizer:
    """Train a tokenizer, and write files that AutoTokenizer and `llmq tokenize` load to `out`.

    inputs, field, template, dataset: as in `tokenize`. vocab_size: number of all tokens; a text
    with few patterns gives fewer. special_tokens: special tokens besides the end of a text.
    chat_template: CHATML or a file. Raises DataError or ConfigError before anything is written.
    """
    out = Path(out)
    text = RecordText(field, template)
    written, own = _chat_template(chat_template)
    special = _special_tokens([*own, *special_tokens])
    if vocab_size < 256 + len(special):
        raise ConfigError(
            f"--vocab-size: {vocab_size} is too small: 256 bytes and {len(special)} special tokens "
            f"are {256 + len(special)}"
        )
    existing = next((name for name in HfTokenizer.FILES if (out / name).exists()), None)
    if existing is not None and not overwrite:
        raise DataError(f"'{out / existing}' is there: choose another --out, or give --overwrite")
    sources, warnings = having_fields(find_sources(inputs, dataset, exclude=out), text)
    tokenizer = new_byte_level_bpe()
    parts: list[str] = []
    reader = _texts(sources, text, special, parts)
    tokenizer.train_from_iterator(reader, _trainer(vocab_size - len(special)))
    if not (sample := "".join(parts)):
        raise DataError(f"there is no text in the {len(sources)} inputs")
    config = {"eos_token": END_OF_TEXT, "bos_token": END_OF_TEXT, "pad_token": END_OF_TEXT}
    lock = locked(lock_beside(out.resolve()), "--out", out)
    with lock, staged_directory(out, HfTokenizer.FILES) as staging:
        save_tokenizer(staging, tokenizer, config, special)
        if written is not None:
            (staging / TEMPLATE_FILE).write_text(written, "utf-8")
    trained = HfTokenizer(out)
    size = trained.vocab_size
    if size < vocab_size:
        warnings.append(f"the text has patterns for {size} tokens only, not for {vocab_size}")
    unknown = sorted({*re.findall(r"<\|[^|>]+\|>", written or "")} - {*special})
    if unknown:
        warnings.append(
            f"--chat-template writes {', '.join(unknown)}: no special tokens without "
            "--special-token"
        )
    bytes_per_token = len(sample.encode()) / len(trained.encode(sample))
    return TrainedTokenizer(out, size, bytes_per_token, warnings)


def _special_tokens(given: Sequence[str]) -> list[str]:
    """Special tokens: the end of a text, and the given ones. ConfigError for a token that is empty,
    no text, or given twice."""
    special = [END_OF_TEXT, *given]
    for token in given:
        # Python decodes command-line bytes that are not UTF-8 to surrogates.
        if not token.strip() or mended(token) != token:
            raise ConfigError(f"--special-token: {token!r} is no token")
        if special.count(token) > 1:
            raise ConfigError(f"--special-token: {token} is there already")
    return special


def _chat_template(spec: str | None) -> tuple[str | None, tuple[str, ...]]:
    """The template that --chat-template names, and its special tokens. DataError for a damaged
    template."""
    if spec is None:
        return None, ()
    if spec.lower() == CHATML:
        return _CHATML, _CHATML_TOKENS
    given = partial(load_chat_template, ByteTokenizer(), spec)
    template = in_worker(given, f"the chat template '{spec}'", Bounds())
    return template.sources["default"], ()


def _trainer(size: int) -> tokenizers.trainers.BpeTrainer:
    """Trainer of a vocabulary of `size` tokens, without special tokens."""
    from tokenizers import pre_tokenizers, trainers

    return trainers.BpeTrainer(
        vocab_size=size,
        min_frequency=_LEAST_COUNT,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=sys.stderr.isatty(),
    )


def _texts(
    sources: Sequence[InputSource], text: RecordText, special: Sequence[str], sample: list[str]
) -> Iterator[str]:
    """Texts to train on. Special tokens in a text are left out, so that no merges come from special
    tokens. sample: list that gets the first texts, about _SAMPLE characters."""
    tokens = re.compile("|".join(map(re.escape, special)))
    split, missing = EvalSplit(0.0, 0, sources), _SAMPLE
    for block in read_blocks(sources, text, split, Position()):
        for piece in block.pieces:
            written = text.of_json(piece.text, piece.where)
            whole = whole_characters(written, piece.text)
            if whole != written:
                warn_once(f"a text has {HALVES}")
            if whole and missing > 0:
                sample.append(whole[:missing])
                missing -= len(whole)
            yield from filter(None, tokens.split(whole))
