"""The trained characters of a conversation's text, and the tokens that they make.

A template with `{% generation %}` marks says it itself. Otherwise the text of a message is what it
adds: the conversation is rendered up to it, as a prompt for it, and with it; both have to be
beginnings of the whole text. Nothing is guessed if they are not. Qwen3's template, for example,
leaves out the thinking of all turns but the last one, so that only the last one can be found; each
turn is the last one of the conversation that ends with it.

A token is trained if at least one of its characters is, as in transformers'
`return_assistant_tokens_mask`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from llmq.base.errors import DataError
from llmq.data.chat_template import ChatTemplate, Message, Rendered
from llmq.data.conversations import Conversation, check_roles, flattened

TRAIN_ON = ("assistant", "last", "each", "all")
Spans = list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Chat:
    """Renders conversations and finds their trained parts.

    train_on: "assistant", all its messages; "last", the last one of them; "each", every one, in a
    document of its own that ends with it; "all", every token.
    """

    template: ChatTemplate
    train_on: str

    def texts(self, conversation: Conversation) -> list[tuple[str, Spans]]:
        """Documents, each a text and the (start, end) of its trained parts in characters, in order.

        DataError if the template refuses it, a part cannot be found, or nothing is trained.
        """
        check_roles(conversation.messages, self.template.texts(conversation.tools))
        turns = self._turns(conversation)
        if self.train_on != "each":
            return [self._text(conversation, turns)]
        ends = [replace(conversation, messages=conversation.messages[: t + 1]) for t in turns]
        return [self._text(end, [turn]) for end, turn in zip(ends, turns, strict=True)]

    def _text(self, conversation: Conversation, turns: list[int]) -> tuple[str, Spans]:
        view = _View(self.template, conversation)
        whole = view.render()
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
        """Numbers of the messages that are trained, from 0."""
        if self.train_on == "all":
            return []
        first = conversation.first_trained
        turns = [
            i for i, m in enumerate(conversation.messages) if i >= first and _may_be_trained(m)
        ]
        if not turns:
            raise DataError(
                "there is no message of the assistant to train on: leave the record out, or give "
                "--train-on all"
            )
        return turns[-1:] if self.train_on == "last" else turns


def _may_be_trained(message: Message) -> bool:
    """Whether an assistant's message is not excluded by `weight` (OpenAI) or `train`."""
    excluded = message.get("train") is False or message.get("weight") == 0
    return message["role"] == "assistant" and not excluded


class _View:
    """A conversation under a template, which renders more or fewer of its messages."""

    def __init__(self, template: ChatTemplate, conversation: Conversation) -> None:
        self.template, self.conversation = template, conversation
        self.messages: Sequence[Message] = conversation.messages
        if any(isinstance(message.get("content"), list) for message in self.messages) and not (
            takes_parts(template, conversation.tools)
        ):
            self.messages = flattened(self.messages)

    def render(self, count: int | None = None, *, prompt: bool = False) -> Rendered:
        return self.template.render(
            self.messages[:count],
            tools=self.conversation.tools,
            documents=self.conversation.documents,
            add_generation_prompt=prompt,
            variables=self.conversation.variables,
        )


def takes_parts(template: ChatTemplate, tools: Sequence[object] | None) -> bool:
    """Whether it joins a content that is a list of texts, instead of printing the list."""
    texts = []
    for content in ("probe", [{"type": "text", "text": "probe"}]):
        try:
            message = {"role": "user", "content": content}
            texts.append(template.render([message], tools=tools).text)
        except DataError:
            return False
    return texts[0] == texts[1]


def _marked(view: _View, whole: Rendered, turns: Sequence[int]) -> Spans:
    """The template's marks of trained messages."""
    roles = [message["role"] for message in view.messages]
    if [*turns] == [i for i, role in enumerate(roles) if role == "assistant"]:
        return whole.generated
    spans: Spans = []
    for turn in turns:  # the number of marks before a message tells which are its own
        before = _marks_upto(view, whole, turn, turn) if turn else 0
        spans += whole.generated[before : _marks_upto(view, whole, turn + 1, turn)]
    return spans


def _marks_upto(view: _View, whole: Rendered, count: int, turn: int) -> int:
    """How many marks the first messages have; they must be the first ones of the whole text.

    turn: the message in question, for the error.
    """
    upto = view.render(count)
    marks = len(upto.generated)
    found, expected = (
        [(span, text.text[slice(*span)]) for span in text.generated[:marks]]
        for text in (upto, whole)
    )
    if found != expected:
        raise DataError(
            f"the marks of message {turn + 1} ({view.messages[turn]['role']}) cannot be told from "
            f"those of others: the chat template of {view.template.origin} marks the messages up "
            "to it in another way when others follow; train on all of them, or give --train-on each"
        )
    return marks


def _found(view: _View, whole: str, turn: int) -> tuple[int, int]:
    """(start, end) of a message in the text, by rendering up to it and with it."""
    name = f"message {turn + 1} ({view.messages[turn]['role']})"
    try:
        before = view.render(turn, prompt=True).text
        upto = view.render(turn + 1).text
    except DataError as error:
        raise DataError(f"{name} cannot be found in the text: {error}; {_REMEDY}") from error
    end = _end(view, whole, upto)
    if end is None or not whole.startswith(before) or len(before) > end:
        raise DataError(
            f"{name} cannot be found in the text: the chat template of {view.template.origin} "
            f"renders the messages up to it in another way when others follow; {_REMEDY}"
        )
    return len(before), end


_REMEDY = "give --train-on each or last, or --chat-template FILE with {% generation %} marks"


def _end(view: _View, whole: str, upto: str) -> int | None:
    """The end of the first messages' text within the whole one; None if it is no beginning."""
    if whole.startswith(upto):
        return len(upto)
    # Some templates, such as Phi-3's, close the whole text with EOS, whatever comes before.
    closing = view.template.special_tokens.get("eos_token")
    if closing and upto.endswith(closing) and whole.endswith(closing):
        upto = upto.removesuffix(closing)
        return len(upto) if whole.startswith(upto) else None
    return None


def token_mask(offsets: np.ndarray, spans: Spans) -> np.ndarray:
    """Whether each token has a character in one of the spans, (n,) bool.

    offsets: (n, 2), the [start, end) of each token's characters.
    """
    mask = np.zeros(len(offsets), bool)
    for start, end in spans:
        mask |= (offsets[:, 0] < end) & (offsets[:, 1] > start)
    return mask
