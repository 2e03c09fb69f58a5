"""Records of what the library `datasets` opens, a data set of the hub or a folder; streamed."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from llmq.base.errors import ConfigError, DataError
from llmq.base.records import Item, Wanted


@dataclass(frozen=True, slots=True)
class HubDataset:
    """name: of the hub, or a folder. config: one of its configurations, None: the only one."""

    name: str
    config: str | None
    split: str

    def __str__(self) -> str:
        config = "" if self.config is None else f":{self.config}"
        return f"data set {self.name}{config} ({self.split})"

    def facts(self) -> tuple[int, int]:
        """Bytes, as far as they are known, and a number that other contents do not have."""
        builder = self._builder()
        known = (builder.info.splits or {}).get(self.split)
        files = (builder.config.data_files or {}).get(self.split) or []
        # Names of the hub's files hold the revision; those of others come with time or version.
        identity = [builder.hash, *files, getattr(files, "origin_metadata", None)]
        digest = hashlib.blake2b(repr(identity).encode(), digest_size=7).digest()
        return (known and known.num_bytes) or 0, int.from_bytes(digest, "little")

    def field_names(self) -> list[str] | None:
        """Of its records; None where there is none."""
        builder = self._builder()
        stream = self._or_error(lambda: builder.as_streaming_dataset(split=self.split))
        if stream.column_names is not None:
            return stream.column_names
        first = self._or_error(lambda: next(iter(stream), None))
        return None if first is None else list(first)

    def read(self, wanted: Wanted, size: int, row: int) -> Iterator[Item]:
        """What is made of each record, without the empty ones, from this row on.

        size: of `facts`. DataError, also where the network fails; the same command goes on then.
        """
        builder = self._builder()
        stream = self._or_error(lambda: builder.as_streaming_dataset(split=self.split))
        if stream.column_names is not None:
            stream = stream.select_columns([*wanted.columns(stream.column_names, f"'{self}'")])
        known = (builder.info.splits or {}).get(self.split)
        rows = (known and known.num_examples) or 0
        records = iter(stream.skip(row) if row else stream)
        while (record := self._or_error(lambda: next(records, None))) is not None:
            row += 1
            where = f"{self}: record {row}"
            if text := wanted.of(record, where):
                done = size * min(row, rows) // rows if rows else 0
                yield Item(text, True, row, row, done, where)

    def _builder(self) -> Any:
        try:
            import datasets
        except ImportError as error:
            raise DataError(
                "--dataset needs the library datasets: pip install 'llmq-train[hub]'"
            ) from error
        return self._or_error(lambda: datasets.load_dataset_builder(self.name, self.config))

    def _or_error(self, function: Any) -> Any:
        try:
            return function()
        except Exception as error:  # of the library, of the network, of what it finds in files
            said = " ".join(str(error).split()) or type(error).__name__
            raise DataError(f"--dataset: cannot read the {self}: {said[:500]}") from error


def dataset_of(spec: str | None, split: str | None) -> HubDataset | None:
    """What --dataset NAME[:CONFIG] and --split name; a folder may have colons in its name."""
    if spec is None:
        if split is not None:
            raise ConfigError("--split: needs --dataset")
        return None
    name, colon, config = spec.rpartition(":")
    if not colon or os.path.isdir(spec):
        name, config = spec, None
    return HubDataset(name, config, split or "train")
