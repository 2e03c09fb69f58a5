"""Turn text files, JSON and Parquet into token files, in constant memory, resumable.

One process reads and writes, worker processes encode. Results are written in the order of the
inputs, so the files do not depend on the number of workers. From time to time the files written so
far are forced to the disk and the place in the input is saved; after an interruption the same
command cuts the files back to that place and goes on, with the same result to the byte.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from llmq.base.errors import ConfigError, DataError
from llmq.base.files import locked
from llmq.base.records import check_text
from llmq.data.documents import (
    Block,
    EvalSplit,
    Piece,
    Position,
    Source,
    find_sources,
    having_field,
    read_blocks,
)
from llmq.data.token_shards import (
    SPLITS,
    Ids,
    Manifest,
    ShardWriter,
    TokenizeSummary,
    open_manifest,
)
from llmq.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from llmq.data.tokens import MAX_TOKENS

SAVE_SECONDS = 15.0  # how often the state is saved: what an interruption costs at most
REPORT_SECONDS = 10.0  # between lines of progress where there is no terminal
_SMALL_INPUT = 4 << 20  # bytes; below, starting workers takes longer than encoding


def tokenize(
    inputs: Sequence[str],
    *,
    tokenizer: str,
    out: str | Path,
    field: str = "text",
    eval_fraction: float = 0.01,
    shard_tokens: int = 100_000_000,
    seed: int = 0,
    workers: int | None = None,
    overwrite: bool = False,
    progress: bool = True,
    special_tokens: str = "auto",
) -> TokenizeSummary:
    """Write the documents of `inputs`, each ended by the tokenizer's end-of-text token, to `out`.

    inputs: files, folders and glob patterns. tokenizer: see load_tokenizer. field: of JSON and
    Parquet; files of folders that lack it are left out, if others have it. eval_fraction: of the
    documents, at least one of two or more (of a single text: its last part); 0: none. workers:
    processes; 1 encodes in this one, None chooses. special_tokens: "auto" adds to each document
    what transformers' AutoTokenizer adds to a text; where the end-of-text token is among that, it
    is not added again. "none": nothing but the end of the text. Continues an interrupted run with
    the same arguments; does nothing if it was complete. DataError or ConfigError for what the user
    can mend.
    With workers, a script that calls this needs the usual `if __name__ == "__main__":`.
    """
    _check_options(eval_fraction, shard_tokens, workers, special_tokens)
    out = Path(out)
    sources, warnings = having_field(find_sources(inputs, exclude=out), field)
    loaded = load_tokenizer(tokenizer)
    if loaded.eos_id is None:
        raise DataError(
            f"the tokenizer '{tokenizer}' names no end-of-text token: set eos_token in its "
            "tokenizer_config.json"
        )
    options = {
        "tokenizer": loaded.fingerprint,
        "field": field,
        "eval_fraction": eval_fraction,
        "shard_tokens": shard_tokens,
        "seed": seed,
        "special_tokens": [*loaded.added] if special_tokens == "auto" else [[], []],
    }
    if workers is None:
        workers = _default_workers(sources, loaded)
    encode = _Encoder(loaded, field, options["special_tokens"]).encode_blocks
    if workers > 1:
        of_workers = (tokenizer, field, options["special_tokens"])
        encode = partial(_encode_in_workers, of_workers=of_workers, workers=workers)
    with locked(out / ".lock", "--out", out):
        manifest = open_manifest(out, options, sources, loaded, overwrite)
        if manifest.data["complete"]:
            return manifest.summary(warnings, was_complete=True)
        was_resumed = manifest.data["position"] != asdict(Position())
        try:
            _run(manifest, sources, encode, progress)
        except BaseException:
            manifest.discard_if_empty()
            raise
        return manifest.summary(warnings, was_resumed=was_resumed)


def _check_options(
    eval_fraction: float, shard_tokens: int, workers: int | None, special_tokens: str
) -> None:
    if not 0 <= eval_fraction < 1:
        raise ConfigError(f"--eval-fraction is {eval_fraction}: give at least 0 and less than 1")
    if not 0 < shard_tokens <= MAX_TOKENS:
        raise ConfigError(f"--shard-tokens is {shard_tokens}: give 1 to {MAX_TOKENS}")
    if workers is not None and workers < 1:
        raise ConfigError(f"--workers is {workers}: give at least 1")
    if special_tokens not in ("auto", "none"):
        raise ConfigError(f"--special-tokens is {special_tokens}: give auto or none")


def _default_workers(sources: Sequence[Source], tokenizer: Tokenizer) -> int:
    """Bytes are encoded faster than they are sent to another process."""
    small = sum(source.size for source in sources) < _SMALL_INPUT
    if small or isinstance(tokenizer, ByteTokenizer):
        return 1
    cpus = getattr(os, "process_cpu_count", os.cpu_count)() or 1  # the former since Python 3.13
    return min(cpus, 16)


def _run(
    manifest: Manifest,
    sources: Sequence[Source],
    encode: Callable[[Iterator[Block]], Iterator[Encoded]],
    progress: bool,
) -> None:
    """Encode from the manifest's position to the end, saving the state now and then."""
    options, state = manifest.data["options"], manifest.data
    shards = {
        split: ShardWriter(manifest.out, split, state["vocab_size"], options["shard_tokens"], done)
        for split, done in state["splits"].items()
    }
    split = EvalSplit(options["eval_fraction"], options["seed"], sources)
    start = Position(**state["position"])
    encoded = encode(read_blocks(sources, options["field"], split, start))
    report = _Report(sum(source.size for source in sources), progress)
    saved = time.monotonic()
    try:
        with report, closing(encoded):
            for end, tokens in encoded:
                for name, ids in zip(SPLITS, tokens, strict=True):
                    shards[name].write(ids)
                report.update(end.bytes_read, sum(writer.tokens for writer in shards.values()))
                if time.monotonic() - saved >= SAVE_SECONDS:
                    manifest.save(end, shards)
                    saved = time.monotonic()
        if not any(writer.tokens for writer in shards.values()):
            raise DataError(f"there is no text in the {len(sources)} input files")
        for writer in shards.values():
            writer.finish()
        manifest.save(end, shards, complete=True)
    finally:
        for writer in shards.values():
            writer.suspend()


# ------------------------------------------------------------------------------------------------
# Encoding, in this process or in others


# Where a block ends in the input, and its ids for training and for evaluation.
Encoded = tuple[Position, tuple[Ids, Ids]]


class _Parts:
    """Gathers what becomes `Ids`."""

    def __init__(self) -> None:
        self._parts, self._ends, self._count = [np.empty(0, np.int32)], [], 0

    def add(self, ids: np.ndarray) -> None:
        """More ids."""
        self._parts.append(ids)
        self._count += len(ids)

    def end(self) -> None:
        """A document ends here."""
        self._ends.append(self._count)

    def joined(self) -> Ids:
        return Ids(np.concatenate(self._parts), np.array(self._ends, np.int64))


class _Encoder:
    """Encodes blocks; each worker process has one."""

    def __init__(self, tokenizer: Tokenizer, field: str, added: Sequence[list[int]]) -> None:
        """added: ids before and behind each document; the end of the text need not be among them.

        Ids of nothing but added tokens would be a document without text, so an empty one has none.
        """
        self.tokenizer = tokenizer
        self.field = field
        before, after = added
        end = [] if tokenizer.eos_id in (*before, *after) else [tokenizer.eos_id]
        self._before, self._after = np.array(before, np.int32), np.array([*after, *end], np.int32)

    def encode(self, pieces: list[Piece]) -> tuple[Ids, Ids]:
        """For training and for evaluation; an empty document has no ids."""
        texts = [
            piece.text
            if isinstance(piece.text, str)
            else _parse_json(piece.text, self.field, piece.where)
            for piece in pieces
        ]
        parts = _Parts(), _Parts()
        all_ids = self.tokenizer.encode_batch(texts)
        for piece, text, ids in zip(pieces, texts, all_ids, strict=True):
            of_split = parts[piece.is_eval]
            if piece.is_start and text:
                of_split.add(self._before)
            of_split.add(ids)
            if piece.is_end and text:
                of_split.add(self._after)
                of_split.end()
        return parts[0].joined(), parts[1].joined()

    def encode_blocks(self, blocks: Iterator[Block]) -> Iterator[Encoded]:
        """Encode in this process."""
        for block in blocks:
            yield block.end, self.encode(block.pieces)


def _parse_json(line: bytes, field: str, where: str) -> str:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not readable as JSON: {error}; mend or remove it") from error
    if not isinstance(record, dict):
        raise DataError(f"{where}: a {type(record).__name__} instead of a JSON object on each line")
    if field not in record:
        raise DataError(f"{where}: no field '{field}': use --field with one of {', '.join(record)}")
    text = check_text(record[field], field, where)
    if b"\\ud" in line.lower():  # JSON can write half a character, which no UTF-8 text can hold
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


_worker: _Encoder


def _start_worker(tokenizer: str, field: str, added: Sequence[list[int]]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread per worker
    global _worker
    _worker = _Encoder(load_tokenizer(tokenizer), field, added)


def _encode_in_worker(pieces: list[Piece]) -> tuple[Ids, Ids]:
    return _worker.encode(pieces)


def _encode_in_workers(
    blocks: Iterator[Block], of_workers: tuple[Any, ...], workers: int
) -> Iterator[Encoded]:
    """Encode in other processes, in the order of the blocks, a few of them in flight.

    of_workers: the arguments of _start_worker.
    """
    spawn = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, spawn, _start_worker, of_workers)
    waiting: deque[tuple[Position, Future]] = deque()
    try:
        for block in blocks:
            waiting.append((block.end, pool.submit(_encode_in_worker, block.pieces)))
            if len(waiting) > 2 * workers:
                end, future = waiting.popleft()
                yield end, future.result()
        for end, future in waiting:
            yield end, future.result()
    except BrokenProcessPool as error:
        raise DataError(
            "a worker process died, perhaps for lack of memory: run it again with fewer --workers "
            "to go on where it was"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


# ------------------------------------------------------------------------------------------------
# Progress


class _Report:
    """A progress bar on a terminal, else a line now and then; both on stderr."""

    def __init__(self, total_bytes: int, enabled: bool) -> None:
        self._total = total_bytes
        self._enabled = enabled
        self._bar = _progress_bar(total_bytes) if enabled and sys.stderr.isatty() else None
        self._start = self._last = time.monotonic()
        self._first_tokens: int | None = None

    def update(self, bytes_read: int, tokens: int) -> None:
        """bytes_read and tokens: so far, over all runs."""
        now = time.monotonic()
        if self._first_tokens is None:
            self._first_tokens = tokens
        rate = (tokens - self._first_tokens) / max(now - self._start, 1e-9)
        text = f"{tokens / 1e6:.1f}M tokens, {rate / 1e6:.2f}M/s"
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=bytes_read, tokens=text)
        elif self._enabled and now - self._last >= REPORT_SECONDS:
            self._last = now
            percent = 100 * bytes_read / max(self._total, 1)
            print(f"tokenize {percent:5.1f}% | {text}", file=sys.stderr, flush=True)

    def __enter__(self) -> _Report:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()


def _progress_bar(total_bytes: int) -> Any:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeRemainingColumn,
    )

    bar = Progress(
        TextColumn("tokenize"),
        BarColumn(),
        TaskProgressColumn(),
        DownloadColumn(),
        TextColumn("{task.fields[tokens]}"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )
    bar.add_task("tokenize", total=total_bytes, tokens="")
    return bar
