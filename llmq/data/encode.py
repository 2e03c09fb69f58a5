"""Blocks of documents to token ids, in this process or in worker processes."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any

import numpy as np

from llmq.base.errors import DataError
from llmq.data.chat_masks import Chat, Completion, token_mask
from llmq.data.chat_template import text_of
from llmq.data.conversations import TEXT, Conversation, RecordConversation
from llmq.data.documents import Block, DocumentPart, Position
from llmq.data.record_text import RecordText, whole_characters
from llmq.data.token_shards import Ids
from llmq.data.tokenizer import Added, Tokenizer, load_tokenizer

# The end of a block in the input, and its ids for training and for evaluation.
Encoded = tuple[Position, tuple[Ids, Ids]]

_FORGED = (
    "have a control token written out in a message, which becomes that token, as in transformers"
)


@dataclass(frozen=True, slots=True)
class Recipe:
    """Says how documents become ids; it travels to worker processes.

    tokenizer: for load_tokenizer. wanted: the reader of records. added: ids before and behind
    each text, with or without the end of the text; conversations have none, completions do. chat:
    renders conversations; None for texts.
    """

    tokenizer: str
    wanted: RecordText | RecordConversation
    added: Added
    chat: Chat | Completion | None = None

    @property
    def with_masks(self) -> bool:
        """Whether the token files say which tokens are trained."""
        return self.chat is not None and self.chat.train_on != "all"

    @property
    def is_chat(self) -> bool:
        """Whether a chat template writes the documents, with all their special tokens."""
        return isinstance(self.chat, Chat)

    def record(self) -> dict[str, Any]:
        """Everything but the tokenizer that decides the ids, for tokenize.json."""
        is_text = isinstance(self.wanted, RecordText)
        return {
            "field": self.wanted.field if is_text else None,
            "template": self.wanted.template if is_text else None,
            "special_tokens": [*self.added],
            "format": TEXT if is_text else self.wanted.form,
            "train_on": self.chat and self.chat.train_on,
            "chat_template": self.chat.template.fingerprint if self.is_chat else None,
        }


class Encoder:
    """Encodes blocks; each worker process has one."""

    def __init__(self, tokenizer: Tokenizer, recipe: Recipe) -> None:
        self.tokenizer, self.recipe = tokenizer, recipe
        before, after = recipe.added
        end = [] if tokenizer.eos_id in (*before, *after) else [tokenizer.eos_id]
        self._added = [before, [*after, *end]]
        controls = sorted(tokenizer.control_texts, key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, controls)) or r"(?!)")

    def encode(self, pieces: list[DocumentPart]) -> tuple[Ids, Ids]:
        """Ids for training and for evaluation; an empty document has none. DataError."""
        if self.recipe.chat is not None:
            return self._encode_conversations(pieces, self.recipe.chat)
        texts = [
            piece.text
            if isinstance(piece.text, str)
            else self.recipe.wanted.of_json(piece.text, piece.where)
            for piece in pieces
        ]
        # An empty text gets no added tokens, which would be a document without text.
        before, after = (np.array(ids, np.int32) for ids in self._added)
        parts = _Parts(), _Parts()
        all_ids = self.tokenizer.encode_batch(texts)
        for piece, text, ids in zip(pieces, texts, all_ids, strict=True):
            of_split = parts[piece.is_eval]
            if piece.is_start and text:
                of_split.add(before)
            of_split.add(ids)
            if piece.is_end and text:
                of_split.add(after)
                of_split.end()
        return parts[0].joined(), parts[1].joined()

    def _encode_conversations(
        self, pieces: list[DocumentPart], chat: Chat | Completion
    ) -> tuple[Ids, Ids]:
        """Encode conversations; what is added to a completion is trained behind it."""
        before, after = [], []
        if not self.recipe.is_chat:
            before, after = self._added
        whole = chat.train_on == "all"
        rendered = []
        parts = _Parts(), _Parts()
        for piece in pieces:
            conversation = self.recipe.wanted.of_json(piece.text, piece.where)
            try:
                texts = chat.texts(conversation)
            except DataError as error:
                raise DataError(f"{piece.where}: {error}") from error
            notes = parts[piece.is_eval].notes
            notes += [(note, piece.where) for note in dict.fromkeys(chat.notes(conversation))]
            if forged := self._forged(conversation):
                notes.append((_FORGED, f"{piece.where} ({forged})"))
            rendered += [
                (piece, whole_characters(text, piece.text), spans) for text, spans in texts
            ]
        encoded = self.tokenizer.encode_with_offsets([text for _, text, _ in rendered])
        for (piece, _, spans), (ids, offsets) in zip(rendered, encoded, strict=True):
            mask = token_mask(offsets, spans)
            ids = np.concatenate([before, ids, after]).astype(np.int32)
            mask = np.concatenate([[whole] * len(before), mask, [True] * len(after)]).astype(bool)
            if not mask.any():
                raise DataError(f"{piece.where}: no token of the conversation is trained")
            of_split = parts[piece.is_eval]
            of_split.add(ids, mask if self.recipe.with_masks else None)
            of_split.end()
        return parts[0].joined(self.recipe.with_masks), parts[1].joined(self.recipe.with_masks)

    def _forged(self, conversation: Conversation) -> str | None:
        """The first control token that a message writes out, perhaps without meaning it."""
        for message in conversation.messages:
            found = self._control.search(text_of(message.get("content")))
            if found is not None:
                return found[0]
        return None


class _Parts:
    """Gathers the parts of `Ids`."""

    def __init__(self) -> None:
        self._parts, self._ends, self._count = [np.empty(0, np.int32)], [], 0
        self._masks = [np.empty(0, bool)]
        self.notes: list[tuple[str, str]] = []

    def add(self, ids: np.ndarray, mask: np.ndarray | None = None) -> None:
        """More ids."""
        self._parts.append(ids)
        self._count += len(ids)
        if mask is not None:
            self._masks.append(mask)

    def end(self) -> None:
        """A document ends here."""
        self._ends.append(self._count)

    def joined(self, with_masks: bool = False) -> Ids:
        mask = np.concatenate(self._masks) if with_masks else None
        ends = np.array(self._ends, np.int64)
        return Ids(np.concatenate(self._parts), ends, mask, self.notes)


# ------------------------------------------------------------------------------------------------
# Worker processes


_worker: Encoder


def _start_worker(recipe: Recipe) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread per worker
    global _worker
    _worker = Encoder(load_tokenizer(recipe.tokenizer), recipe)


def _end_with_parent() -> None:
    """A parent that is killed cannot say so, and the pool's queue never ends."""
    multiprocessing.parent_process().join()
    os._exit(1)


def _encode_in_worker(pieces: list[DocumentPart]) -> tuple[Ids, Ids]:
    return _worker.encode(pieces)


def encode_in_workers(blocks: Iterator[Block], recipe: Recipe, workers: int) -> Iterator[Encoded]:
    """Encode in other processes, in the order of the blocks, a few of them in flight."""
    spawn = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, spawn, _start_worker, (recipe,))
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
