"""Tokenizers and chat templates of others, run in a process of their own, each call within bounds.

A tokenizer that explodes, or a template that never ends, is then one line, in whatever command.
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

BOUNDS = Bounds(seconds=5, memory_per_byte=256, threads=True)  # of a call
_ONCE = Bounds(seconds=20)  # of all that is looked up in a large vocabulary
_FACTS = ("vocab_size", "eos_id", "bos_id", "prefix_id", "added")


class TokenizerProcess:
    """A process that has loaded a tokenizer, and calls functions of it."""

    def __init__(self, spec: str | Path) -> None:
        """spec: the tokenizer's folder or name, as load_tokenizer takes it."""
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
                self._worker.result()  # else the next call would get this answer
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
    """The tokenizer in a model folder, which a process of its own runs."""

    def __init__(self, folder: Path) -> None:
        """DataError as of HfTokenizer, or where loading takes more than the bounds."""
        self.folder, self.process = folder, TokenizerProcess(folder)
        vars(self).update(self.process.call(_facts))

    encode, encode_batch, encode_with_offsets, decode, is_special, is_byte = map(
        _forwarded,
        ("encode", "encode_batch", "encode_with_offsets", "decode", "is_special", "is_byte"),
    )


def _facts(tokenizer: HfTokenizer) -> dict[str, Any]:
    return {name: getattr(tokenizer, name) for name in _FACTS}


def guarded_tokenizer(spec: str | Path) -> Tokenizer:
    """The tokenizer of a folder or name, in a process of its own unless it is ByteTokenizer."""
    if str(spec) == ByteTokenizer.fingerprint:
        return ByteTokenizer()
    return GuardedTokenizer(find_directory(str(spec)) or Path(spec))


def process_of(tokenizer: Tokenizer) -> TokenizerProcess:
    """Process of a GuardedTokenizer, to run chat templates; of another tokenizer a new one."""
    if isinstance(tokenizer, GuardedTokenizer):
        return tokenizer.process
    return TokenizerProcess(ByteTokenizer.fingerprint)


def look_into(folder: Path, function: Callable[[Path], Any], name: Path | None = None) -> Any:
    """Result of function(folder), which reads tokenizer files in a process that ends with the call.
    name: the folder in messages, if another. DataError if the call exceeds its bounds in time or
    memory."""
    return in_worker(partial(function, folder), f"the tokenizer '{name or folder}'", _ONCE)
