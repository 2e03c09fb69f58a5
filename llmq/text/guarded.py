"""Foreign tokenizers and chat templates, run in a separate process with bounds for each call.

If a tokenizer takes all memory, or a template never ends, the command ends with one line of error.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from llmq.base.worker import Answer, Begin, Bounds, Worker, in_worker
from llmq.options.presets import find_directory
from llmq.text.tokenizer import ByteTokenizer, HfTokenizer, Tokenizer, load_tokenizer

BOUNDS = Bounds(seconds=5, memory_per_byte=256, threads=True)  # bounds of one call
_ONCE = Bounds(seconds=20)  # bounds of one look_into, which may read a large vocabulary
_FACTS = ("vocab_size", "eos_id", "bos_id", "prefix_id", "added")


class TokenizerProcess:
    """Process that loads a tokenizer, and calls functions with the tokenizer."""

    def __init__(self, spec: str | Path) -> None:
        """spec: folder or name of the tokenizer, as in load_tokenizer."""
        self._what, self._lock = f"the tokenizer '{spec}' or its chat template", threading.Lock()
        self._worker = Worker(partial(_loaded, spec), BOUNDS)

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Result of function(tokenizer, *args); function, args and result are pickled. DataError if
        the call exceeds its bounds in time or memory, and in every call afterwards."""
        with self._lock:
            self._worker.send((function, args), [self._what])
            try:
                return self._worker.result()
            except KeyboardInterrupt:
                self._worker.result()  # else the next call would get this call's answer
                raise


def _loaded(spec: str | Path) -> Answer:
    tokenizer = load_tokenizer(spec)

    def answer(task: tuple[Callable[..., Any], tuple], begin: Begin) -> Any:
        function, args = task
        begin(0, len(str(args)))
        return function(tokenizer, *args)

    return answer


def _method(tokenizer: Tokenizer, name: str, *args: Any) -> Any:
    return getattr(tokenizer, name)(*args)


def _forwarded(name: str) -> Callable[..., Any]:
    return lambda tokenizer, *args: tokenizer.process.call(_method, name, *args)


class GuardedTokenizer(HfTokenizer):
    """HfTokenizer whose methods run in a TokenizerProcess."""

    def __init__(self, folder: Path) -> None:
        """DataError as in HfTokenizer, or if loading exceeds the bounds."""
        self.folder, self.process = folder, TokenizerProcess(folder)
        vars(self).update(self.process.call(_facts))

    encode, encode_batch, encode_with_offsets, decode, is_special, is_byte = map(
        _forwarded,
        ("encode", "encode_batch", "encode_with_offsets", "decode", "is_special", "is_byte"),
    )


def _facts(tokenizer: HfTokenizer) -> dict[str, Any]:
    return {name: getattr(tokenizer, name) for name in _FACTS}


def guarded_tokenizer(spec: str | Path) -> Tokenizer:
    """The tokenizer of a folder or repository, loaded in a worker process; for `bytes` a
    ByteTokenizer, which needs no worker process."""
    if str(spec) == ByteTokenizer.fingerprint:
        return ByteTokenizer()
    return GuardedTokenizer(find_directory(str(spec)) or Path(spec))


def process_of(tokenizer: Tokenizer) -> TokenizerProcess:
    """Process to run chat templates: the tokenizer's own, or a new one for ByteTokenizer."""
    if isinstance(tokenizer, GuardedTokenizer):
        return tokenizer.process
    return TokenizerProcess(ByteTokenizer.fingerprint)


def look_into(folder: Path, function: Callable[[Path], Any], name: Path | None = None) -> Any:
    """Result of function(folder), called in a new process, because it reads foreign tokenizer
    files. name: the folder to name in messages; None: `folder`. DataError if the call exceeds its
    bounds in time or memory."""
    return in_worker(partial(function, folder), f"the tokenizer '{name or folder}'", _ONCE)
