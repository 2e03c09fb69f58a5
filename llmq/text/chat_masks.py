"""Masks of conversations: the trained characters of a text, and the tokens of these characters.

`{% generation %}` marks in a template name the trained characters. Without marks, two renderings
find a message's characters: one of the messages before it, and one that ends with it. Both must be
prefixes of the whole text, else DataError is raised: Qwen3's template, for example, leaves out the
thinking of earlier turns. A token is trained if one of its characters is trained, as in
transformers' `return_assistant_tokens_mask`.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from llmq.base.errors import DataError
from llmq.text.chat_template import (
    FUNCTION_CALL,
    REASONING,
    TOOL_CALLS,
    ChatTemplate,
    Message,
    Rendered,
    shipped_templates,
    text_of,
)
from llmq.text.conversations import Conversation, check_roles, is_trained, unread

TRAIN_ON = ("assistant", "last", "each", "all")
Spans = list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Chat:
    """Renderer of conversations that finds the trained parts. train_on: "assistant" (all messages
    of the assistant), "last" (its last message), "each" (each of its messages, in a document of its
    own that ends with the message) or "all" (every token)."""

    template: ChatTemplate
    train_on: str

    def texts(self, conversation: Conversation) -> list[tuple[str, Spans]]:
        """Documents of a conversation, in order: the text of each document, and (start, end) of its
        trained parts in characters. DataError if the template refuses the conversation, a part
        cannot be found, or nothing is trained."""
        check_roles(conversation.messages, self.template.texts(conversation.tools))
        turns = self._turns(conversation)
        if self.train_on != "each":
            return [self._text(conversation, turns)]
        ends = [replace(conversation, messages=conversation.messages[: t + 1]) for t in turns]
        return [self._text(end, [turn]) for end, turn in zip(ends, turns, strict=True)]

    def _text(self, conversation: Conversation, turns: list[int]) -> tuple[str, Spans]:
        view = _View(self.template, conversation)
        whole = view.render()
        view.check_written(whole.text)
        if self.train_on == "all":
            spans = [(0, len(whole.text))]
        elif whole.generated is not None:
            spans = _marked(view, whole, turns)
        else:
            spans = [_found(view, whole.text, turn) for turn in turns]
        spans = [(start, end) for start, end in spans if end > start]
        if not spans:
            raise DataError(
                "no part of the conversation is trained: it needs a message of the assistant that "
                "its template writes out"
            )
        return whole.text, spans

    def _turns(self, conversation: Conversation) -> list[int]:
        """Indices, from 0, of the trained messages; [] with train_on "all"."""
        if self.train_on == "all":
            return []
        turns = [
            i
            for i, message in enumerate(conversation.messages)
            if i >= conversation.first_trained
            and message["role"] == "assistant"
            and is_trained(message, i + 1) is not False
        ]
        if not turns:
            raise DataError(
                "there is no message of the assistant to train on: leave the record out, or give "
                "--train-on all"
            )
        return turns[-1:] if self.train_on == "last" else turns

    def warnings(self) -> list[str]:
        """A warning if the template ends the last turn differently from earlier turns; else []."""
        if self.train_on != "assistant":
            return []
        talk = [{"role": role, "content": role} for role in ("user", "assistant")] * 2
        try:
            ((text, spans),) = self.texts(Conversation(talk))
        except DataError:  # the template will refuse real messages, too
            return []
        earlier, last = (text[a:b].partition("assistant")[2].strip() for a, b in spans[:2])
        if last.startswith(earlier) and bool(last) == bool(earlier):
            return []
        return [
            f"the chat template of {self.template.origin} ends the last turn with {last!r} and "
            f"those before it with {earlier or 'nothing'!r}, and so they are trained: --train-on "
            "each makes every turn a last one"
        ]

    def notes(self, conversation: Conversation) -> Iterator[str]:
        """Fields of a conversation that have no effect, as ends of sentences for warnings."""
        names = self.template.texts(conversation.tools)
        for name in unread(conversation.messages, names):
            yield f"have the field '{name}' in a message, which neither llmq nor the template reads"
        for number, message in enumerate(conversation.messages, 1):
            trained, role = is_trained(message, number), message["role"]
            if trained and role != "assistant" and self.train_on != "all":
                yield f"ask to train a message of the role {role}: only the assistant's are trained"
            if trained is False and self.train_on == "all":
                yield "ask not to train a message: --train-on all trains every token"


@dataclass(frozen=True, slots=True)
class Completion:
    """Renderer of a prompt and a completion without a chat template; the completion is trained.
    train_on: as in Chat; with a single completion all values but "all" mean the same."""

    train_on: str

    def texts(self, conversation: Conversation) -> list[tuple[str, Spans]]:
        """One document, as in Chat.texts. DataError for messages and other fields that need a
        template."""
        if not conversation.is_text:
            raise DataError(
                "this is more than the texts 'prompt' and 'completion', and there is no chat "
                "template to write it: give --chat-template"
            )
        prompt, completion = (message["content"] for message in conversation.messages)
        start = 0 if self.train_on == "all" else len(prompt)
        return [(prompt + completion, [(start, len(prompt) + len(completion))])]


class _View:
    """A conversation and its template; renders any number of the first messages."""

    def __init__(self, template: ChatTemplate, conversation: Conversation) -> None:
        self.template, self.conversation = template, conversation
        self.messages: Sequence[Message] = conversation.messages

    def render(self, count: int | None = None, *, prompt: bool = False) -> Rendered:
        return self.template.render(
            self.messages[:count],
            tools=self.conversation.tools,
            documents=self.conversation.documents,
            add_generation_prompt=prompt,
            variables=self.conversation.variables,
        )

    def check_written(self, text: str) -> None:
        """Raise DataError for a message if none of its words is in the text."""
        for number, message in enumerate(self.messages, 1):
            if not _has_words(text, message):
                raise DataError(
                    f"message {number} ({message['role']}) is lost: the chat template of "
                    f"{self.template.origin} writes no word of it"
                )


_WORD = re.compile(r"\w+")


def _has_words(text: str, message: Message) -> bool:
    """True if a word of the message is in the text, or the message has no words."""
    words = (match[0] for part in _texts_of(message) for match in _WORD.finditer(part))
    first = next(words, None)
    return first is None or first in text or any(word in text for word in words)


def _texts_of(message: Message) -> Iterator[str]:
    """Texts of a message: its content, its reasoning, and the names and arguments of its calls."""
    yield text_of(message.get("content"))
    yield from (message[name] for name in REASONING if isinstance(message.get(name), str))
    for name in (TOOL_CALLS, FUNCTION_CALL):
        yield from _texts_in(message.get(name))


def _texts_in(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _texts_in(inner)


def _marked(view: _View, whole: Rendered, turns: Sequence[int]) -> Spans:
    """(start, end) in characters of the marked parts of the messages with indices `turns`."""
    answers = [i for i, m in enumerate(view.messages) if m["role"] == "assistant"]
    if [*turns] == answers:
        return whole.generated
    of_each = dict(zip(answers, whole.generated, strict=False))
    if len(whole.generated) == len(answers) and all(
        _has_words(whole.text[slice(*span)], view.messages[i]) for i, span in of_each.items()
    ):
        return [of_each[turn] for turn in turns]
    spans: Spans = []
    for turn in turns:
        # Count the marks in front of the turn, and in front of the next answer. Neither count may
        # depend on later messages.
        after = next((i for i in answers if i > turn), None)
        before = _marks_upto(view, whole, turn) if turn else 0
        spans += whole.generated[before : after and _marks_upto(view, whole, after)]
    return spans


def _marks_upto(view: _View, whole: Rendered, turn: int) -> int:
    """Number of marked parts in the messages before index `turn`. DataError unless these parts are
    the first marked parts of the whole text."""
    upto = view.render(turn)
    marks = len(upto.generated)
    of_upto, of_whole = (
        [(span, text.text[slice(*span)]) for span in text.generated[:marks]]
        for text in (upto, whole)
    )
    if of_upto != of_whole:
        raise DataError(
            f"the marks of message {turn + 1} ({view.messages[turn]['role']}) cannot be told from "
            f"those of others: the chat template of {view.template.origin} marks the messages "
            "before it in another way when others follow; train on all of them, or give --train-on "
            "each"
        )
    return marks


def _found(view: _View, whole: str, turn: int) -> tuple[int, int]:
    """(start, end) in characters of message `turn` in the text `whole`, found by rendering the
    messages before it, and again with it. DataError if a rendering is no prefix of the text."""
    name = f"message {turn + 1} ({view.messages[turn]['role']})"
    origin = view.template.origin
    try:
        before = view.render(turn, prompt=True).text
        end = _end(view, whole, turn)
        as_last = view.render(turn + 1).text
    except DataError as error:
        raise DataError(f"{name} cannot be found in the text: {error}; give {_MARKED}") from error
    if end is not None and whole.startswith(before) and len(before) <= end:
        return len(before), end
    if not as_last.startswith(before):
        raise DataError(
            f"{name} cannot be found in the text: the chat template of {origin} does not write it "
            f"behind the prompt for it; give {_MARKED}"
        )
    raise DataError(
        f"{name} cannot be found in the text: the chat template of {origin} renders the messages "
        f"up to it in another way when others follow; give --train-on each or last, or {_MARKED}"
    )


_MARKED = "a --chat-template with {% generation %} marks, a file or one by its name: " + ", ".join(
    shipped_templates()
)


def _end(view: _View, whole: str, turn: int) -> int | None:
    """End in characters of message `turn` in the whole text; None if the rendering that ends with
    this message is no prefix of the whole text."""
    upto = view.render(turn + 1).text
    if whole.startswith(upto):
        return len(upto)
    # The template ends the last turn differently (gpt-oss), or closes the text with EOS (Phi-3).
    # Rendering with a prompt for the next message makes the turn an earlier one.
    asked = view.render(turn + 1, prompt=True).text
    before, prompt = view.render(turn).text, view.render(turn, prompt=True).text
    closing = view.template.special_tokens.get("eos_token", "")
    if not prompt.startswith(before):
        before = before.removesuffix(closing)
    prompt = prompt.removeprefix(before)
    upto = asked.removesuffix(prompt) if prompt else upto.removesuffix(closing)
    return len(upto) if asked.endswith(prompt) and whole.startswith(upto) else None


def token_mask(offsets: np.ndarray, spans: Spans) -> np.ndarray:
    """Mask of tokens, bool (n,): True for a token with a character in one of the spans. offsets:
    int (n, 2), the characters [start, end) of each token."""
    mask = np.zeros(len(offsets), bool)
    for start, end in spans:
        mask |= (offsets[:, 0] < end) & (offsets[:, 1] > start)
    return mask
