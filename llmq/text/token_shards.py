"""The folder that `llmq tokenize` writes: token files filled one after the other, and a manifest.

    train-000.bin …    token files of at most `shard_tokens` tokens
    train-000.docs …   ends of the documents of each token file
    train-000.sums …   checksums of the token file and its ends of documents
    eval-000.bin …     token files of the evaluation part, with the same companions
    tokenizer/         the tokenizer, for training and export
    tokenize.json      the manifest: options, inputs, counts of tokens, position in the inputs

The manifest is written after the counted tokens are on the disk. A resumed run drops all tokens in
the files beyond the manifest's counts.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from llmq.base.errors import DataError
from llmq.base.files import (
    disk_errors,
    make_directory,
    read_errors,
    read_json,
    sync_directory,
    sync_files,
    write_file,
)
from llmq.data.checksums import checksums_path
from llmq.data.document_file import documents_path, partial_path
from llmq.data.document_index import Counts, count_documents, count_duplicates
from llmq.data.identity import MANIFEST, SHARD_NAME, TokenizerId
from llmq.data.tokens import TokenFile, TokenWriter, mask_path
from llmq.text.conversations import TEXT
from llmq.text.inputs import InputSource, Position
from llmq.text.tokenizer import TEMPLATE_FILE, HfTokenizer, Tokenizer
from llmq.text.tokenizer_id import identity_of, tokenizer_of_folder

SPLITS = ("train", "eval")
MOST_NOTES = 50  # maximum number of different notes: messages may have fields of any name


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizeSummary:
    """Result of `tokenize`. tokens: number of tokens by split, "train" and "eval". files: the token
    files, sorted."""

    documents: int
    tokens: dict[str, int]
    files: list[Path]
    vocab_size: int
    was_complete: bool  # an earlier run had finished, and nothing was done
    was_resumed: bool
    warnings: list[str]
    special_tokens: str  # the tokens added to each document, in words
    counts: Counts

    def describe(self) -> str:
        """Lines for the console."""
        state = "had been written before" if self.was_complete else "written"
        lines = [f"{self.documents} documents, vocabulary of {self.vocab_size}: {state}"]
        for split, tokens in self.tokens.items():
            files = [path for path in self.files if path.name.startswith(split)]
            if files:
                pattern = files[0] if len(files) == 1 else files[0].parent / f"{split}-*.bin"
                lines.append(f"  {split}: {tokens} tokens in {pattern}")
        lines += [f"  {line}" for line in self.counts.lines()]
        if self.special_tokens:
            lines.append(f"  special tokens of each document: {self.special_tokens}")
        return "\n".join([*lines, *(f"warning: {text}" for text in self.warnings)])


class Ids(NamedTuple):
    """Part of a split. tokens: ids, int32 (n,). ends: int64 (k,), number of tokens in front of each
    end of a document. mask: bool (n,), or weights (n,); None without masks. notes: pairs of the end
    of a sentence about conversations, and the place of the record."""

    tokens: np.ndarray
    ends: np.ndarray
    mask: np.ndarray | None = None
    notes: Sequence[tuple[str, str]] = ()


class ShardWriter:
    """Writer of a split's tokens into files of `shard_tokens` tokens: train-000.bin, train-001.bin,
    …."""

    def __init__(
        self, out: Path, split: str, vocab_size: int, shard_tokens: int, tokens: int, **masks: bool
    ) -> None:
        """tokens: number of tokens of the last saved state; tokens written after this state are
        dropped. masks: with_masks, with_weights and in_pairs as in TokenWriter."""
        self.out, self.split, self._masks = out, split, masks
        self.vocab_size, self.shard_tokens, self.tokens = vocab_size, shard_tokens, tokens
        self.documents = 0  # number of documents that ended since the saved state
        number, keep = divmod(tokens, shard_tokens)
        path = _shard(out, split, number)
        kept = [mask_path(path), documents_path(path), path] if keep else []
        for complete in kept:  # files that were completed after the state was saved
            if complete.exists():
                os.replace(complete, partial_path(complete))
        for stale in _own_files(out, split):
            _, of_stale, suffix, _ = SHARD_NAME.fullmatch(stale.name).groups()
            is_later = int(of_stale) >= number or suffix == "mask"
            if is_later and stale not in map(partial_path, kept):
                stale.unlink()
        self._writer = self._open(number, keep) if keep else None

    def _open(self, number: int, keep: int = 0) -> TokenWriter:
        return TokenWriter(
            *(_shard(self.out, self.split, number), self.vocab_size),
            **self._masks,
            with_documents=True,
            with_checksums=True,
            keep_tokens=keep,
        )

    def write(self, ids: Ids) -> None:
        tokens, ends, mask, _ = ids
        self.documents += len(ends)
        while len(tokens):
            number, used = divmod(self.tokens, self.shard_tokens)
            if self._writer is None:
                self._writer = self._open(number)
            part = tokens[: self.shard_tokens - used]
            inside = int(np.searchsorted(ends, len(part), side="right"))
            of_part = None if mask is None else mask[: len(part)]
            self._writer.write(part, mask=of_part, ends=ends[:inside])
            self.tokens += len(part)
            mask = None if mask is None else mask[len(part) :]
            tokens, ends = tokens[len(part) :], ends[inside:] - len(part)
            if self.tokens % self.shard_tokens == 0:
                self.finish()

    def sync(self) -> None:
        if self._writer is not None:
            self._writer.sync()

    def finish(self) -> None:
        if self._writer is not None:
            writer, self._writer = self._writer, None
            writer.close()

    def suspend(self) -> None:
        if self._writer is not None:
            self._writer.suspend()


def _shard(folder: Path, split: str, number: int) -> Path:
    return folder / f"{split}-{number:03d}.bin"


def _own_files(out: Path, *splits: str) -> list[Path]:
    """Files in `out` with names of shards of these splits, complete or not, sorted."""
    matches = [(SHARD_NAME.fullmatch(path.name), path) for path in out.iterdir()]
    return sorted(path for match, path in matches if match and match[1] in splits)


def token_files(folder: Path) -> list[Path]:
    """Files of a folder with names of complete token files, sorted."""
    return [path for path in _own_files(folder, *SPLITS) if path.suffix == ".bin"]


# ------------------------------------------------------------------------------------------------
# The manifest


class Manifest:
    """Content of tokenize.json: options, inputs, counts of tokens, position in the inputs."""

    def __init__(self, out: Path, data: dict[str, Any], tokenizer: Tokenizer) -> None:
        self.out, self.data, self._tokenizer = out, data, tokenizer
        self._documents: int = data["documents"]  # written by interrupted runs
        self.was_complete: bool = data["complete"]
        self.was_resumed = not self.was_complete and data["position"] != asdict(Position())
        self.chat_template: str | None = None  # replaces the template in the tokenizer's copy

    def save(
        self, position: Position, shards: dict[str, ShardWriter], complete: bool = False
    ) -> None:
        """Force the token files to the disk, then record their counts. complete: True behind the
        last document, to save the tokenizer, too."""
        for writer in shards.values():
            writer.sync()
        if complete:
            _save_tokenizer(self._tokenizer, self.out / "tokenizer", self.chat_template)
        self.data["position"] = asdict(position)
        self.data["splits"] = {split: writer.tokens for split, writer in shards.items()}
        new = sum(writer.documents for writer in shards.values())
        self.data["documents"] = self._documents + new
        self.data["complete"] = complete
        self.write()

    def note_duplicates(self) -> None:
        """Record the number of evaluation documents that are also in the training files."""
        files = [TokenFile(path) for path in token_files(self.out)]
        sides = ([f for f in files if f.path.name.startswith(split)] for split in SPLITS)
        self.data["duplicates"] = count_duplicates(*sides)

    def note(self, ids: Ids) -> None:
        """Count the notes of `ids`, for warnings in the summary."""
        noted = self.data.setdefault("notes", {})
        for note, where in ids.notes:
            if note in noted or len(noted) < MOST_NOTES:
                first, count = noted.get(note, (where, 0))
                noted[note] = [first, count + 1]

    def write(self) -> None:
        write_file(self.out / MANIFEST, json.dumps(self.data, indent=1))

    def discard_if_empty(self) -> None:
        """Remove the files of a run that has not reached its first `save`."""
        if _is_empty(self.data):
            _remove(self.out)

    def summary(self, warnings: Sequence[str], seq_len: int | None) -> TokenizeSummary:
        """Summary of the result. warnings: about the inputs. seq_len: the summary counts longer
        documents. DataError if files are missing or damaged."""
        tokens, position = self.data["splits"], self.data["position"]
        files = token_files(self.out)
        opened = [TokenFile(path) for path in files]
        if sum(file.num_tokens for file in opened) != sum(tokens.values()):
            raise DataError(f"files are missing in '{self.out}': write them again with --overwrite")
        counts = count_documents(opened, seq_len)
        warnings = [*warnings, *counts.warnings()]
        kind = "documents" if self.data["options"]["format"] == TEXT else "conversations"
        for note, (first, count) in self.data.get("notes", {}).items():
            warnings.append(f"{count} {kind} {note}; the first: {first}")
        warnings += duplicates_line(self.data)
        if position["skipped"]:
            warnings.append(f"{position['skipped']} files in folders are not text: left out")
        fraction = self.data["options"]["eval_fraction"]
        for split in SPLITS:
            if fraction and not tokens[split]:
                warnings.append(
                    f"no tokens for {split}: {position['document']} documents with "
                    f"--eval-fraction {fraction}"
                )
        return TokenizeSummary(
            documents=self.data["documents"],
            tokens=tokens,
            files=files,
            vocab_size=self.data["vocab_size"],
            was_complete=self.was_complete,
            was_resumed=self.was_resumed,
            warnings=warnings,
            special_tokens=self._special_tokens(),
            counts=counts,
        )

    def _special_tokens(self) -> str:
        before, after = self.data["options"]["special_tokens"]
        sides = [(before, "before it"), (after, "behind it")]
        return ", ".join(
            f"{self._tokenizer.decode(ids)} ({' '.join(map(str, ids))}) {side}"
            for ids, side in sides
            if ids
        )


def open_manifest(
    out: Path,
    options: dict[str, Any],
    sources: Sequence[InputSource],
    tokenizer: Tokenizer,
    overwrite: bool,
) -> Manifest:
    """The manifest in `out`, or a new manifest if `out` is empty or overwrite is True. DataError if
    `out` holds tokens that were made with other options, inputs or tokenizer."""
    with disk_errors(out):
        make_directory(out)
    inputs = [source.identity for source in sources]
    path = out / MANIFEST
    earlier = load_manifest(path) if path.exists() and not overwrite else None
    if earlier is not None and not _is_empty(earlier):
        _check_same(path, earlier, identity_of(tokenizer), options, inputs)
        return Manifest(out, earlier, tokenizer)
    if overwrite or earlier is not None:  # an earlier run was killed before its first save
        _remove(out)
    if files := _own_files(out, *SPLITS):
        raise DataError(f"'{files[0]}' is of another origin: choose another --out or --overwrite")
    data = {
        "complete": False,
        "options": options,
        "tokenizer": identity_of(tokenizer).record(),
        "vocab_size": tokenizer.vocab_size,
        "eos_id": tokenizer.eos_id,
        "splits": dict.fromkeys(SPLITS, 0),
        "beside": ["docs", "sums"],
        "documents": 0,
        "position": asdict(Position()),
        "inputs": inputs,
    }
    manifest = Manifest(out, data, tokenizer)
    manifest.write()
    return manifest


def _is_empty(data: dict[str, Any]) -> bool:
    """True for the manifest of a run that has written nothing yet."""
    return not data["complete"] and data["position"] == asdict(Position())


def _remove(out: Path) -> None:
    """Remove all files of `tokenize`, the manifest first: token files without a manifest do not
    count."""
    for path in [out / MANIFEST, *_own_files(out, *SPLITS)]:
        path.unlink(missing_ok=True)


def _save_tokenizer(tokenizer: Tokenizer, folder: Path, chat_template: str | None) -> None:
    """Replace the tokenizer files in a folder by the files of this tokenizer."""
    is_there = isinstance(tokenizer, HfTokenizer) and tokenizer.folder.resolve() == folder.resolve()
    with disk_errors(folder):
        if not is_there:
            for path in (path for name in HfTokenizer.WRITTEN for path in folder.glob(name)):
                path.unlink()
            tokenizer.save(folder)
        if chat_template is not None:
            write_file(folder / TEMPLATE_FILE, chat_template)
        sync_files(folder)
        sync_directory(folder.parent)


def load_manifest(path: Path) -> dict[str, Any]:
    """Content of a tokenize.json. DataError for a damaged file."""
    try:
        data = read_json(path)
        _ = dict(data["options"]), list(data["inputs"]), Position(**data["position"])
        splits, shard_tokens = data["splits"], data["options"]["shard_tokens"]
        numbers = [*data["position"].values(), *splits.values(), data["vocab_size"], shard_tokens]
        numbers.append(data["documents"])
        sound = sorted(splits) == sorted(SPLITS)
        sound &= all(type(n) is int and n >= 0 for n in numbers) and shard_tokens > 0
        if not sound or type(data["complete"]) is not bool:
            raise ValueError("its fields are not what llmq tokenize writes")
        return data
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"cannot read '{path}': {error}; start again with --overwrite") from error


def _check_same(
    path: Path,
    data: dict[str, Any],
    tokenizer: TokenizerId,
    options: dict[str, Any],
    inputs: list[list],
) -> None:
    """Raise DataError if the manifest's tokens were made with other options or inputs."""
    then = data["options"]
    changed = [name for name in options if options[name] != then.get(name)]
    if "tokenizer" in changed:
        other = TokenizerId.from_record(data.get("tokenizer")) or "one that it does not name"
        changed[changed.index("tokenizer")] = f"tokenizer ({other} then, {tokenizer} now)"
    if inputs != data["inputs"]:
        then = len(data["inputs"])
        changed.append(f"inputs ({then} files then, {len(inputs)} now, or edited)")
    if changed:
        raise DataError(
            f"'{path.parent}' holds tokens made with other {', '.join(changed)}: choose another "
            "--out, or start again with --overwrite"
        )


# ------------------------------------------------------------------------------------------------
# Checking a folder


class Tokenized:
    """The content that a folder must have by its manifest. tokens: number of tokens by split, which
    decides the number of files. made: identity of the tokenizer; None if not recorded."""

    def __init__(self, folder: Path, manifest: dict[str, Any]) -> None:
        self.folder, self.complete = folder, manifest["complete"]
        self.tokens: dict[str, int] = manifest["splits"]
        self.vocab_size: int = manifest["vocab_size"]
        self.shard_tokens: int = manifest["options"]["shard_tokens"]
        self.made = TokenizerId.from_record(manifest.get("tokenizer"))

    @classmethod
    def read(cls, folder: Path) -> Tokenized:
        """Read the expected content of a folder from its manifest. DataError for a damaged or
        missing manifest."""
        path = folder / MANIFEST
        with read_errors(path):
            os.stat(path)
        return cls(folder, load_manifest(path))

    def check(self) -> None:
        """Raise DataError unless all token files and the tokenizer are there."""
        for split in SPLITS:
            missing = self.missing(split)
            if missing is not None:
                raise DataError(
                    f"{missing}: copy the folder again, or tokenize the data again with --overwrite"
                )
        if self.complete and self.made is not None:
            self._check_tokenizer(self.made)

    def missing(self, split: str) -> str | None:
        """Message about the first token file that is missing; None if no file is."""
        full, rest = divmod(self.tokens[split], self.shard_tokens)
        existing = {*token_files(self.folder)}
        count = full + (rest > 0)
        # A generator, because a damaged count may be too large to visit all files.
        missing = (n for n in range(count) if _shard(self.folder, split, n) not in existing)
        if (first := next(missing, None)) is None:
            return None
        path = _shard(self.folder, split, first)
        if first == full and not self.complete:  # the file was being written
            path = partial_path(path)
            if path.exists():
                return None
        return f"'{path}' is missing, of {count} that were written for {split}"

    def _check_tokenizer(self, made: TokenizerId) -> None:
        folder = self.folder / "tokenizer"
        copy = tokenizer_of_folder(folder)
        if copy is None or copy.fingerprint != made.fingerprint:
            problem = "missing or damaged" if copy is None else f"{copy}, not {made}"
            raise DataError(
                f"the tokenizer in '{folder}' is {problem}: copy the whole folder again, or "
                "tokenize the data again"
            )

    def check_file(self, file: TokenFile) -> None:
        """Raise DataError unless a token file of the folder agrees with the manifest."""
        split, number = SHARD_NAME.fullmatch(file.path.name).group(1, 2)
        for path in (documents_path(file.path), checksums_path(file.path)):
            if not path.exists():
                raise DataError(
                    f"'{path}' is missing: copy it together with '{file.path}', or tokenize the "
                    "data again"
                )
        if file.vocab_size != self.vocab_size:
            raise self._contradicted(file, f"a vocabulary of {self.vocab_size}")
        full, rest = divmod(self.tokens[split], self.shard_tokens)
        if int(number) < full or self.complete:
            expected = self.shard_tokens if int(number) < full else rest * (int(number) == full)
            if file.num_tokens != expected:
                what = f"{expected} tokens" if expected else "no such file"
                raise self._contradicted(file, what)

    def _contradicted(self, file: TokenFile, what: str) -> DataError:
        return DataError(
            f"'{file.path}' has {file.num_tokens} tokens and a vocabulary of {file.vocab_size}, "
            f"but '{self.folder / MANIFEST}' speaks of {what}: copy the whole folder again, or "
            "tokenize the data again with --overwrite"
        )


def duplicates_line(manifest: Mapping[str, Any]) -> list[str]:
    """A line about evaluation documents that are also training documents; [] if there are none."""
    count, of = manifest.get("duplicates", (0, 0))
    line = f"{count} of {of} documents for evaluation are among those for training, word for word"
    return [f"{line}: their loss says nothing of other texts"] if count else []


def gaps(files: Iterable[Path]) -> list[str]:
    """Warnings, one line each, about folders of token files in which files of a split are missing.
    files: token files of all these folders."""
    matches = [(path.parent, SHARD_NAME.fullmatch(path.name)) for path in files]
    lines: dict[str, None] = {}
    for folder, split in dict.fromkeys((folder, match[1]) for folder, match in matches if match):
        if not (folder / MANIFEST).exists():
            continue
        try:
            made = Tokenized.read(folder)
        except DataError:  # a damaged manifest counts as none
            continue
        missing = made.missing(split)
        if missing is not None:
            lines[f"WARNING: {missing}: what is there is read"] = None
        elif not made.complete:
            unfinished = "is unfinished: the same tokenize command goes on"
            lines[f"WARNING: '{folder}' {unfinished}; what is there is read"] = None
    return list(lines)
