"""`llmq show`: print documents of token files as text with marks around trained tokens."""

import io
import itertools
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from llmq.base.console import print_own, printable
from llmq.base.errors import ConfigError, DataError
from llmq.data.document_file import has_pairs
from llmq.data.document_index import DocumentIndex, count_documents
from llmq.data.identity import tokenizers_of_files
from llmq.data.tokens import TokenFile, open_token_files
from llmq.text.guarded import guarded_tokenizer
from llmq.text.tokenizer import ByteTokenizer, Tokenizer, continuation

DOCUMENTS = 3  # number of documents that are printed if no limit is given
LONGEST = 4096  # maximum number of tokens of a document that are printed


class Marks(NamedTuple):
    """Texts in front of and behind trained tokens, and in front of and behind masked tokens."""

    trained: tuple[str, str]
    masked: tuple[str, str]


COLOURS = Marks(("\033[32m", "\033[0m"), ("\033[2m", "\033[0m"))
PLAIN = Marks(("⟦", "⟧"), ("", ""))


def marks_here() -> Marks:
    """The marks on standard output: colours on a terminal, unless NO_COLOR is set."""
    return COLOURS if sys.stdout.isatty() and not os.environ.get("NO_COLOR") else PLAIN


class Document(NamedTuple):
    """Document of token files. number: from 1, over all files. ids: int32 (n,). mask: bool (n,),
    True for tokens trained as targets. chosen: True for the preferred document of a pair, False for
    the other one; None for a document without a pair."""

    number: int
    path: Path
    ids: np.ndarray
    mask: np.ndarray
    chosen: bool | None = None


def run_show(
    patterns: Sequence[str],
    *,
    tokenizer: str | None,
    document: int | None,
    limit: int | None,
    ids: bool,
    seq_len: int | None,
    document_separator: int | None,
) -> None:
    """Print documents of token files, pairs side by side, and counts over all documents.

    patterns: token files, or folders of `llmq tokenize`. tokenizer: name or folder; None: the
    tokenizer beside the files. document: number of the first document to print, from 1. limit:
    number of documents to print. ids: True to print one line for each token. seq_len: number of
    tokens behind which a mark shows that training cuts a document; None: no marks.
    """
    files = open_token_files([_pattern(pattern) for pattern in patterns])
    decoder = guarded_tokenizer(tokenizer) if tokenizer is not None else _tokenizer_beside(files)
    vocab_size = max(file.vocab_size for file in files)
    if vocab_size > decoder.vocab_size:
        raise DataError(
            f"'{files[0].path}' has a vocabulary of {vocab_size} tokens, the tokenizer only "
            f"{decoder.vocab_size}: give the right one with --tokenizer"
        )
    counts = count_documents(files, seq_len, document_separator)
    if document is not None and document > counts.documents:
        raise ConfigError(f"--document is {document}: there are {counts.documents} documents")
    if limit is None:
        limit = DOCUMENTS if document is None else 1
    marks = marks_here()
    if not ids and all(has_pairs(file.path) for file in files):  # documents 2n - 1 and 2n
        first = (document or 1) + (document or 1) % 2 - 1
        documents = _documents(files, first, 2 * limit, document_separator)
        bodies = ((a, _pair(a, b, decoder)) for a, b in zip(documents, documents, strict=True))
        marks = PLAIN
    else:
        show = _table if ids else partial(_text, marks=marks)
        documents = _documents(files, document or 1, limit, document_separator)
        bodies = ((each, show(each, decoder, seq_len=seq_len)) for each in documents)
    for each, body in bodies:
        print(_head(each, counts.documents))
        for line in body:
            print_own(line)
    if limit:
        shown = "green" if marks is COLOURS else "between {} and {}".format(*marks.trained)
        print(f"trained tokens: {'lines with +' if ids else shown}")
    print(f"{counts.documents} documents")
    for line in counts.lines():
        print(line)
    print(f"without a trained token: {counts.untrained}")
    if len(files) > 1:
        print(
            f"order in training: sequences of all {len(files)} files shuffled together; with "
            "--data-order llmq file after file"
        )


def first_documents(
    patterns: Sequence[str],
) -> Iterator[tuple[np.ndarray, np.ndarray, Tokenizer]]:
    """All documents of token files, in order: ids (n,) int32, mask (n,) bool of trained tokens, and
    the tokenizer that `llmq tokenize` has copied beside the files."""
    files = open_token_files(patterns)
    decoder = _tokenizer_beside(files)
    for document in _documents(files, 1, sys.maxsize, None):
        yield document.ids, document.mask, decoder


def _pattern(given: str) -> str:
    """Glob pattern of an argument: all token files of a folder, or of a folder in data/ with this
    name; else the argument itself."""
    inside = os.path.join("data", given)
    folder = inside if not os.path.lexists(given) and os.path.isdir(inside) else given
    return os.path.join(folder, "*.bin") if os.path.isdir(folder) else given


def _tokenizer_beside(files: Sequence[TokenFile]) -> Tokenizer:
    """Tokenizer that `llmq tokenize` has copied beside the files; DataError without a copy."""
    path = files[0].path
    beside = path.parent / "tokenizer"
    (made,) = (made for _, made in tokenizers_of_files(path))
    if beside.is_dir() and made is not None:
        return guarded_tokenizer(beside)
    if made is not None and made.fingerprint == ByteTokenizer.fingerprint:
        return ByteTokenizer()
    raise DataError(
        f"nothing says which tokenizer made '{path}': give --tokenizer, bytes or a folder with "
        "tokenizer.json"
    )


def _documents(
    files: Sequence[TokenFile], first: int, limit: int, separator: int | None
) -> Iterator[Document]:
    number = 0
    for file in files:
        index = DocumentIndex.read(file, separator)
        begin = max(first - 1 - number, 0)
        for i in range(begin, min(len(index), first - 1 + limit - number)):
            start, end = int(index.offsets[i]), int(index.offsets[i + 1])
            ids, mask = file.read_tokens(start, end - start), file.read_mask(start, end - start)
            chosen = bool(mask[:1].any()) if index.in_pairs else None
            mask[:1] = False  # the first token is never a target
            yield Document(number + i + 1, file.path, ids, mask, chosen)
        number += len(index)
        file.close()


def _pair(chosen: Document, other: Document, tokenizer: Tokenizer) -> Iterator[str]:
    """Lines of a pair: the prompt, then both answers side by side, as wide as the terminal."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    texts = ["".join(_text(each, tokenizer, PLAIN, None)) for each in (chosen, other)]
    prompt = texts[0].partition(PLAIN.trained[0])[0]
    if texts[1].startswith(prompt):
        yield prompt
        texts = [text.removeprefix(prompt) for text in texts]
    drawn = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="", expand=True)
    for each in (chosen, other):
        label = "chosen" if each.chosen else "rejected"
        if chosen.chosen == other.chosen:  # a label, and another record's answer
            label = f"label {'true' if each.chosen else 'false'}" if each is chosen else "unrelated"
        drawn.add_column(Text(f"--- {label} ---"), ratio=1, overflow="fold")
    drawn.add_row(*map(Text, texts))
    file, width = io.StringIO(), shutil.get_terminal_size((100, 24)).columns
    Console(file=file, width=width, color_system=None, legacy_windows=False).print(drawn)
    yield from (line.rstrip() for line in file.getvalue().splitlines())


def _head(document: Document, total: int) -> str:
    return (
        f"--- document {document.number} of {total} in {document.path}: {len(document.ids)} "
        f"tokens, {int(document.mask.sum())} trained ---"
    )


def _cut_line(seq_len: int) -> str:
    return f"--- cut at --seq-len {seq_len} ---"


def _text(
    document: Document, tokenizer: Tokenizer, marks: Marks, seq_len: int | None
) -> Iterator[str]:
    """Text of a document with marks, in two parts if seq_len cuts the document."""
    shown = document.ids[:LONGEST].tolist()
    changes = np.flatnonzero(np.diff(document.mask[:LONGEST])) + 1
    is_cut = seq_len is not None and seq_len < len(shown)
    edges = sorted({0, *changes.tolist(), len(shown), *([seq_len] if is_cut else [])})
    text = ""
    for start, end in itertools.pairwise(edges):
        part = continuation(tokenizer, shown[:start], shown[start:end])
        opening, closing = marks.trained if document.mask[start] else marks.masked
        text += opening + printable(part) + closing
        if end == seq_len and is_cut:
            yield from (text, _cut_line(seq_len))
            text = ""
    yield text
    if len(document.ids) > LONGEST:
        yield f"--- {len(document.ids) - LONGEST} more tokens ---"


def _table(document: Document, tokenizer: Tokenizer, seq_len: int | None) -> Iterator[str]:
    """One line for each token: its position, its id, + if it is trained or - if not, and its
    text."""
    width = len(str(int(document.ids.max(initial=0))))
    pairs = zip(document.ids.tolist(), document.mask.tolist(), strict=True)
    for position, (token, is_trained) in enumerate(pairs):
        if position == seq_len:
            yield _cut_line(seq_len)
        mark = "+" if is_trained else "-"
        text = printable(repr(tokenizer.decode([token])))
        yield f"{position:6d}  {token:{width}d}  {mark}  {text}"
