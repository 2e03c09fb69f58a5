"""What a folder of `llmq tokenize` must hold, as its manifest says: token files and what is beside.

How many token files there are follows from the counts of tokens. The files beside them are recorded
under "beside"; manifests of versions before that say nothing of them.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from llmq.base.errors import DataError
from llmq.data.checksums import checksums_path
from llmq.data.document_file import documents_path, partial_path
from llmq.data.identity import MANIFEST, SHARD_NAME, TokenizerId, tokenizer_of_folder
from llmq.data.token_shards import SPLITS, load_manifest
from llmq.data.tokens import TokenFile

_BESIDE = {"docs": documents_path, "sums": checksums_path}


@dataclass(frozen=True, slots=True)
class Tokenized:
    """Of one folder. tokens: by split. beside: suffixes of what lies beside each token file. made:
    what made the ids, where that is recorded.
    """

    folder: Path
    complete: bool
    tokens: dict[str, int]
    shard_tokens: int
    vocab_size: int
    beside: tuple[str, ...]
    made: TokenizerId | None

    @classmethod
    def read(cls, folder: Path) -> Tokenized:
        """DataError if the manifest is damaged, or there is none."""
        path = folder / MANIFEST
        try:
            stat = os.stat(path)
        except OSError as error:
            raise DataError(f"cannot read '{path}': {error.strerror}") from error
        return _tokenized(folder, (stat.st_mtime_ns, stat.st_size, stat.st_ino))

    def check(self) -> None:
        """DataError unless all token files and the tokenizer are there."""
        for split in SPLITS:
            missing = self.missing(split)
            if missing is not None:
                raise DataError(
                    f"{missing}: copy the folder again, or tokenize the data again with --overwrite"
                )
        if self.complete and self.made is not None:
            self._check_tokenizer(self.made)

    def missing(self, split: str) -> str | None:
        """In words, the first token file that was written and is not there; None if all are."""
        full, rest = divmod(self.tokens[split], self.shard_tokens)
        there = {path.name for path in token_files(self.folder)}
        count = full + (rest > 0)
        # A number may be damaged, and say that there are more files than any loop could look at.
        first = next((n for n in range(count) if _name(split, n) not in there), None)
        if first is None:
            return None
        path = self.folder / _name(split, first)
        if first == full and not self.complete:  # it was being written
            path = partial_path(path)
            if path.exists():
                return None
        return f"'{path}' is missing, of {count} that were written for {split}"

    def _check_tokenizer(self, made: TokenizerId) -> None:
        folder = self.folder / "tokenizer"
        found = tokenizer_of_folder(folder)
        if found is None or found.fingerprint != made.fingerprint:
            what = "missing or damaged" if found is None else f"{found}, not {made}"
            raise DataError(
                f"the tokenizer in '{folder}' is {what}: copy the whole folder again, or tokenize "
                "the data again"
            )

    def check_file(self, file: TokenFile) -> None:
        """DataError unless a token file of the folder is as the manifest says."""
        split, number = SHARD_NAME.fullmatch(file.path.name).group(1, 2)
        for suffix in self.beside:
            path = _BESIDE[suffix](file.path)
            if not path.exists():
                raise DataError(
                    f"'{path}' is missing: copy it together with '{file.path}', or tokenize the "
                    "data again"
                )
        if file.vocab_size != self.vocab_size:
            raise self._contradicted(file, f"a vocabulary of {self.vocab_size}")
        full, rest = divmod(self.tokens[split], self.shard_tokens)
        if int(number) < full or self.complete:
            here = self.shard_tokens if int(number) < full else rest * (int(number) == full)
            if file.num_tokens != here:
                raise self._contradicted(file, f"{here} tokens" if here else "no such file")

    def _contradicted(self, file: TokenFile, what: str) -> DataError:
        return DataError(
            f"'{file.path}' has {file.num_tokens} tokens and a vocabulary of {file.vocab_size}, "
            f"but '{self.folder / MANIFEST}' speaks of {what}: copy the whole folder again, or "
            "tokenize the data again with --overwrite"
        )


def gaps(files: Iterable[Path]) -> list[str]:
    """What to say before these token files are read: of folders that should have others beside."""
    matches = [(path.parent, SHARD_NAME.fullmatch(path.name)) for path in files]
    lines: dict[str, None] = {}
    for folder, split in dict.fromkeys((folder, match[1]) for folder, match in matches if match):
        if not (folder / MANIFEST).exists():
            continue
        try:
            made = Tokenized.read(folder)
        except DataError:  # such a manifest counts as none
            continue
        missing = made.missing(split)
        if missing is not None:
            lines[f"WARNING: {missing}: what is there is read"] = None
        elif not made.complete:
            unfinished = "is unfinished: the same tokenize command goes on"
            lines[f"WARNING: '{folder}' {unfinished}; what is there is read"] = None
    return list(lines)


def token_files(folder: Path) -> list[Path]:
    """The files named like token files in it, whatever they are, sorted."""
    names = (SHARD_NAME.fullmatch(name) for name in sorted(os.listdir(folder)))
    return [folder / m[0] for m in names if m and m[3] == "bin" and not m[4]]


def _name(split: str, number: int) -> str:
    return f"{split}-{number:03d}.bin"


@functools.lru_cache(maxsize=64)
def _tokenized(folder: Path, stamps: tuple[int, ...]) -> Tokenized:
    """stamps: of the manifest, which may be large: it names all inputs."""
    data = load_manifest(folder / MANIFEST)
    return Tokenized(
        folder,
        data["complete"],
        data["splits"],
        data["options"]["shard_tokens"],
        data["vocab_size"],
        tuple(suffix for suffix in _BESIDE if suffix in data.get("beside", [])),
        TokenizerId.from_record(data.get("tokenizer")),
    )
