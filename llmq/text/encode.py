"""Encoding of blocks of documents as token ids, in this process or in worker processes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import wait
from typing import Any

import numpy as np

from llmq.base.errors import ConfigError, DataError
from llmq.base.records import HALVES, whole_characters
from llmq.base.worker import Answer, Begin, Bounds, Worker, forks
from llmq.text.chat_masks import Chat, Completion, token_mask
from llmq.text.chat_template import text_of
from llmq.text.conversations import (
    CLASSES,
    FLAGS,
    Conversation,
    RecordConversation,
    check_whole,
    weight_of,
)
from llmq.text.inputs import Block, DocumentPart, Position
from llmq.text.record_format import RecordText
from llmq.text.token_shards import Ids
from llmq.text.tokenizer import Added, Tokenizer, load_tokenizer

# Position in the input behind a block, and the block's ids for training and for evaluation.
Encoded = tuple[Position, tuple[Ids, Ids]]

UNWEIGHTED = ("last", "each", "all")  # values of --train-on
_FORGED = (
    "have a control token written out in a message, which becomes that token, as in transformers"
)


@dataclass(frozen=True, slots=True)
class Recipe:
    """Settings of encoding, sent to worker processes. tokenizer: argument of load_tokenizer.
    wanted: reader of records. added: ids in front of and behind each text or completion; none for
    conversations. chat: renderer of conversations; None for texts. with_weights: True if messages
    have weights."""

    tokenizer: str
    wanted: RecordText | RecordConversation
    added: Added
    chat: Chat | Completion | None = None
    with_weights: bool = False

    def weighted(self) -> Recipe:
        """This recipe with weights of messages; ConfigError unless documents are whole
        conversations."""
        single = not self.wanted.in_pairs and self.wanted.form != CLASSES
        if not (self.is_chat and single and self.chat.train_on not in UNWEIGHTED):
            raise ConfigError(
                "--weights: is for conversations of which all answers are trained in one document, "
                "written by a chat template: leave it out"
            )
        return replace(self, with_weights=True)

    @property
    def with_masks(self) -> bool:
        """True if token files have masks of trained tokens."""
        partly = self.chat is not None and self.chat.train_on != "all"
        return self.wanted.in_pairs or self.wanted.form == CLASSES or partly

    @property
    def is_chat(self) -> bool:
        """True if a chat template writes the documents, special tokens included."""
        return isinstance(self.chat, Chat)

    def record(self) -> dict[str, Any]:
        """All settings that decide the ids, besides the tokenizer, for tokenize.json."""
        is_text = isinstance(self.wanted, RecordText)
        return {
            "field": self.wanted.field if is_text else None,
            "template": self.wanted.template if is_text else None,
            "special_tokens": [*self.added],
            "format": self.wanted.form,
            "train_on": self.chat and self.chat.train_on,
            **({"weights": True} if self.with_weights else {}),
            "chat_template": self.chat.template.fingerprint if self.is_chat else None,
        }


class Encoder:
    """Encoder of blocks of documents; each worker process has one."""

    def __init__(self, tokenizer: Tokenizer, recipe: Recipe) -> None:
        self.tokenizer, self.recipe = tokenizer, recipe
        before, after = recipe.added
        has_end = recipe.wanted.form == CLASSES or tokenizer.eos_id in (*before, *after)
        end = [] if has_end else [tokenizer.eos_id]
        self._added = [np.array(ids, np.int32) for ids in (before, [*after, *end])]
        controls = sorted(tokenizer.control_texts, key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, controls)) or r"(?!)")

    def encode(
        self, pieces: list[DocumentPart], begin: Begin = lambda number, size: None
    ) -> tuple[Ids, Ids]:
        """Ids of the documents for training, and of the documents for evaluation; an empty document
        has no ids. begin: function that is called before each document with its number and size.
        DataError for a bad record."""
        parts, chat = (_Parts(), _Parts()), self.recipe.chat
        for number, piece in enumerate(pieces):
            begin(number, len(piece.text))
            if chat is None:
                self._add_text(piece, parts[piece.is_eval])
            else:
                self._add_conversation(piece, chat, parts[piece.is_eval])
        return parts[0].joined(self.recipe.with_masks), parts[1].joined(self.recipe.with_masks)

    def _add_text(self, piece: DocumentPart, parts: _Parts) -> None:
        """Encode a text. An empty text gets no added tokens: these alone would be a document."""
        text = self.recipe.wanted.of_json(piece.text, piece.where)
        (text,) = _whole([text], piece, parts)
        before, after = self._added
        if piece.is_start and text:
            parts.add(before)
        parts.add(self.tokenizer.encode_batch([text])[0])
        if piece.is_end and text:
            parts.add(after)
            parts.end()

    def _add_conversation(
        self, piece: DocumentPart, chat: Chat | Completion, parts: _Parts
    ) -> None:
        """Encode a conversation, both conversations of a pair, or for labels the conversation and
        its prompt with the answer of `piece.other`. Tokens added behind a completion are
        trained."""
        wanted = self.recipe.wanted
        conversations = wanted.of_json(piece.text, piece.where)
        written = self.recipe.is_chat and conversations[0].text is None
        before, after = ([], []) if written else self._added
        label = conversations[0].label
        if not self.recipe.with_weights:
            check_whole(conversations, piece.where)
        if (other := piece.other) is not None:
            (answer,) = wanted.of_json(other.text, other.where)
            conversations.append(conversations[0].answered_by(answer))
        try:
            rendered = [
                text
                for each in conversations
                for text in (chat.texts(each) if each.text is None else [(each.text, [])])
            ]
        except DataError as error:
            raise DataError(f"{piece.where}: {error}") from error
        if self.recipe.is_chat:
            notes = [note for each in conversations for note in chat.notes(each)]
            parts.notes += [(note, piece.where) for note in dict.fromkeys(notes)]
        if forged := next(filter(None, map(self._forged, conversations)), None):
            parts.notes.append((_FORGED, f"{piece.where} ({forged})"))
        texts = _whole([text for text, _ in rendered], piece, parts)
        whole = chat.train_on == "all"
        encoded = self.tokenizer.encode_with_offsets(texts)
        for number, ((_, spans), (ids, offsets)) in enumerate(zip(rendered, encoded, strict=True)):
            mask = token_mask(offsets, spans)
            if self.recipe.with_weights:
                mask = self._weights(conversations[0], chat, offsets, mask)
            ids = np.concatenate([before, ids, after]).astype(np.int32)
            mask = np.concatenate([[whole] * len(before), mask, [True] * len(after)])
            mask = mask if self.recipe.with_weights else mask.astype(bool)
            if wanted.form == CLASSES:
                self._check_class(label, piece.where)
                ids, mask = np.append(ids, np.int32(label)), np.arange(len(ids) + 1) == len(ids)
            if not mask[wanted.in_pairs :].any():
                raise DataError(f"{piece.where}: no token of the conversation is trained")
            if wanted.in_pairs:  # nothing predicts the first token, so its mask bit holds the label
                mask[0] = number == 0 if label is None else label
            parts.add(ids, mask if self.recipe.with_masks else None)
            parts.end()

    def _weights(
        self, conversation: Conversation, chat: Chat, offsets: np.ndarray, mask: np.ndarray
    ) -> np.ndarray:
        """Weight of each token, float32 (n,): the weight of the token's message, 0 where the mask
        (n,) is False."""
        messages = conversation.messages
        of_messages = [weight_of(message, n) for n, message in enumerate(messages, 1)]
        weights = mask.astype(np.float32)
        for weight in {w for w in of_messages if w is not None and 0 < w < 1}:
            alone = [
                {**{k: v for k, v in m.items() if k not in FLAGS}, "weight": int(w == weight)}
                for m, w in zip(messages, of_messages, strict=True)
            ]
            if not any(m["weight"] and m["role"] == "assistant" for m in alone):
                continue  # no trained message has this weight
            ((_, spans),) = chat.texts(replace(conversation, messages=alone))
            weights[token_mask(offsets, spans)] = weight
        return weights

    def _check_class(self, label: int, where: str) -> None:
        """Raise DataError for a class that is no id of the tokenizer: token files store classes as
        ids."""
        if label >= (ids := self.tokenizer.vocab_size):
            raise DataError(
                f"{where}: field 'label' is {label}: a class is written as a token id, of which "
                f"the tokenizer has 0 to {ids - 1}; number classes from 0 on"
            )

    def _forged(self, conversation: Conversation) -> str | None:
        """First control token that a message's text contains, perhaps by accident; else None."""
        for message in conversation.messages:
            match = self._control.search(text_of(message.get("content")))
            if match is not None:
                return match[0]
        return None


def _whole(texts: list[str], piece: DocumentPart, parts: _Parts) -> list[str]:
    """Texts of a document with U+FFFD for half characters; adds a note to `parts` if there are
    any."""
    mended = [whole_characters(text, piece.text) for text in texts]
    if mended != texts:
        parts.notes.append((f"have {HALVES}", piece.where))
    return mended


class _Parts:
    """Builder of `Ids` from parts in order."""

    def __init__(self) -> None:
        self._parts, self._ends, self._count = [np.empty(0, np.int32)], [], 0
        self._masks = [np.empty(0, bool)]
        self.notes: list[tuple[str, str]] = []

    def add(self, ids: np.ndarray, mask: np.ndarray | None = None) -> None:
        """Append ids (n,), with their mask (n,) or weights."""
        self._parts.append(ids)
        self._count += len(ids)
        if mask is not None:
            self._masks.append(mask)

    def end(self) -> None:
        """Record the end of a document."""
        self._ends.append(self._count)

    def joined(self, with_masks: bool = False) -> Ids:
        mask = np.concatenate(self._masks) if with_masks else None
        ends = np.array(self._ends, np.int64)
        return Ids(np.concatenate(self._parts), ends, mask, self.notes)


# ------------------------------------------------------------------------------------------------
# Worker processes


def encode_in_workers(
    blocks: Iterator[Block], encoder: Encoder, workers: int, bounds: Bounds
) -> Iterator[Encoded]:
    """Position and ids of each block, in order. Worker processes encode the blocks, and at most
    three blocks for each process are in flight. DataError names the record at which the tokenizer
    or the template exceeds the bounds."""
    make = partial(_answering, encoder.recipe, encoder if forks() else None)
    pool = [Worker(make, bounds) for _ in range(workers)]
    idle, busy = [*pool], {}
    ends: dict[int, Position] = {}
    done: dict[int, tuple[Ids, Ids]] = {}
    numbered, next_one, is_over = enumerate(blocks), 0, False
    try:
        while True:
            while idle and not is_over and len(ends) < 3 * workers:
                number, block = next(numbered, (-1, None))
                if is_over := block is None:
                    break
                worker, ends[number] = idle.pop(), block.end
                worker.send(block.pieces, [piece.where for piece in block.pieces])
                busy[worker.connection] = worker, number
            if not busy:
                return
            for connection in wait([*busy]):
                worker, number = busy.pop(connection)
                done[number] = worker.result()
                idle.append(worker)
            while next_one in done:
                yield ends.pop(next_one), done.pop(next_one)
                next_one += 1
    finally:
        for worker in pool:
            worker.close()


def _answering(recipe: Recipe, encoder: Encoder | None) -> Answer:
    """The function that a worker process calls for each block. encoder: the encoder that a forked
    process inherits; None: the process loads an encoder."""
    return (encoder or Encoder(load_tokenizer(recipe.tokenizer), recipe)).encode
