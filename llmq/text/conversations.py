"""Conversations in JSON records and rows of tables, in the formats of published data sets.

messages       {"messages": [{"role": "user", "content": "…"}, …]}, with "tools" if there are
conversations  {"conversations": [{"from": "human", "value": "…"}, …]}
prompt         {"prompt": "…", "completion": "…"}, texts or lists of messages
instruction    {"instruction": "…", "input": "…", "output": "…"}
pairs          {"prompt": "…", "chosen": "…", "rejected": "…"}: two conversations, the first one
               preferred; the prompt may be a field of any format above
labels         {"prompt": "…", "completion": "…", "label": true}: a conversation of any format
               above; label: true if the answer is desirable
classes        {"text": "…", "label": 2}: a text or a conversation, and its class
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from llmq.base.errors import DataError
from llmq.base.records import json_record
from llmq.data.tokens import WEIGHT_PARTS
from llmq.text.chat_template import (
    FUNCTION_CALL,
    REASONING,
    TOOL_CALLS,
    Message,
    as_tool_call,
    with_arguments,
)

TEXT = "text"
# Fields that a record of each format must have (REQUIRED), and may have (OPTIONAL).
REQUIRED = {
    "messages": ("messages",),
    "conversations": ("conversations",),
    "prompt": ("prompt", "completion"),
    "instruction": ("instruction", "output"),
    "pairs": ("chosen", "rejected"),
    "labels": ("label",),
    "classes": ("label",),
}
PAIRS, LABELS, CLASSES, PLAIN = "pairs", "labels", "classes", "prompt"
_EVERYWHERE = ("tools", "documents", "chat_template_kwargs")
_ANY = ("messages", "conversations", "instruction", "input", "history", "system", *_EVERYWHERE)
_WITH_ANSWER = ("prompt", "completion", "output", *_ANY)
OPTIONAL = {
    "messages": _EVERYWHERE,
    "conversations": ("system", *_EVERYWHERE),
    "prompt": ("system", *_EVERYWHERE),
    "instruction": ("input", "system", "history", *_EVERYWHERE),
    "pairs": ("prompt", *_ANY),
    "labels": _WITH_ANSWER,
    "classes": (TEXT, *_WITH_ANSWER),
}
FORMATS = ("auto", TEXT, *REQUIRED)

ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
# Roles by their names in other data sets.
_ROLES_OF_OTHERS = {
    **dict.fromkeys(("gpt", "chatgpt", "model"), "assistant"),
    **{"human": "user", "observation": "tool", "function_response": "tool"},
    "function_call": "assistant",
}
# Fields of published data sets that switch training of a message on or off, and their values.
FLAGS = ("weight", "train", "training", "loss")
_FLAG_VALUES = {"0": False, "0.0": False, "false": False, "1": True, "1.0": True, "true": True}


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages and other fields of a record that a chat template reads.

    tools, documents, variables: what the template gets besides messages. first_trained: index of
    the first message that may be trained; earlier messages are the prompt. is_text: True if the
    record is a prompt and a completion, both texts, without other fields. label: 1 for a desirable
    and 0 for an undesirable answer, or the number of a class; None without a label. text: the text
    of a record without messages, else None.
    """

    messages: list[Message]
    tools: list[Any] | None = None
    documents: list[Any] | None = None
    variables: dict[str, Any] = field(default_factory=dict)
    first_trained: int = 0
    is_text: bool = False
    label: int | None = None
    text: str | None = None

    def answered_by(self, other: Conversation) -> Conversation:
        """This conversation's prompt with the answer of another conversation."""
        answer = other.messages[other.first_trained :]
        is_text = self.is_text and other.is_text
        messages = [*self.messages[: self.first_trained], *answer]
        return replace(self, messages=messages, is_text=is_text)


@dataclass(frozen=True, slots=True)
class RecordConversation:
    """Reader of conversations in records of one format; RecordText is the reader of texts. form:
    name of the format, a key of REQUIRED."""

    form: str

    @property
    def in_pairs(self) -> bool:
        """True if a record becomes two documents: one for each of its two answers, or one with its
        own answer and one with another record's answer."""
        return self.form in (PAIRS, LABELS)

    def columns(self, there: Sequence[str], where: str) -> Sequence[str]:
        """Fields to read; DataError, which begins with `where`, if a required field is missing."""
        missing = [f"'{name}'" for name in REQUIRED[self.form] if name not in there]
        if missing:
            raise DataError(
                f"{where}: no field {', '.join(missing)}: with --format {self.form} each record "
                f"needs the fields {', '.join(REQUIRED[self.form])}"
            )
        fields = REQUIRED[self.form] + OPTIONAL[self.form]
        return [name for name in there if name in fields]

    def of(self, record: Mapping[str, Any], where: str) -> bytes:
        """Row of a table as JSON bytes, without nulls, which stand for missing fields. DataError,
        which begins with `where`, for a value that JSON cannot hold."""
        try:
            return json.dumps(_without_nulls(record), ensure_ascii=False).encode()
        except TypeError as error:
            raise DataError(f"{where}: a value that no JSON can hold: {error}") from error

    def of_json(self, line: bytes, where: str) -> list[Conversation]:
        """The conversation of a JSON record, or both conversations of a pair. DataError, which
        begins with `where`, for a record without a conversation."""
        record = json_record(line, where)
        try:
            _check_required(record, self.form)
            if self.form == PAIRS:
                return parse_pair(record)
            parse = {LABELS: parse_labelled, CLASSES: parse_classified}.get(self.form)
            return [parse_conversation(record, self.form) if parse is None else parse(record)]
        except DataError as error:
            raise DataError(f"{where}: {error}") from error


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _without_nulls(v) for name, v in value.items() if v is not None}
    return [_without_nulls(v) for v in value] if isinstance(value, list) else value


def parse_conversation(record: dict[str, Any], form: str) -> Conversation:
    """Conversation of a record. DataError for missing or wrong fields."""
    _check_required(record, form)
    messages, first_trained = _PARSERS[form](record)
    system = record.get("system") if "system" in OPTIONAL[form] else None
    if system:
        messages = [{"role": "system", "content": _text(system, "system")}, *messages]
        first_trained += 1 if first_trained else 0
    if not messages:
        raise DataError("there are no messages")
    variables = _parsed(record, "chat_template_kwargs", dict) or {}
    tools, documents = (_parsed(record, name, list) for name in ("tools", "documents"))
    texts = [record[name] for name in REQUIRED[PLAIN]] if form == PLAIN else [None]
    is_text = all(isinstance(text, str) for text in texts) and not (system or tools or documents)
    return Conversation(messages, tools or None, documents, variables, first_trained, is_text)


def parse_pair(record: dict[str, Any]) -> list[Conversation]:
    """Both conversations of a record, the chosen one first; only answers are trained. If an answer
    begins with another role than the assistant's, both answers are whole conversations, and their
    common first messages are the prompt. DataError for missing or wrong fields."""
    answers = [_answer(record, name) for name in REQUIRED[PAIRS]]
    whole = [isinstance(a, list) and a and a[0]["role"] != "assistant" for a in answers]
    if any(whole) and all(isinstance(a, list) for a in answers):
        pairs = zip(*(answer[:-1] for answer in answers), strict=False)
        same = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        same = min(map(len, answers)) - 1 if same is None else same
        prompt, answers = answers[0][:same], [answer[same:] for answer in answers]
    else:
        prompt = _prompt(record)
    shared = {name: record[name] for name in OPTIONAL[PLAIN] if name in record}
    sides = [shared | {"prompt": prompt, "completion": answer} for answer in answers]
    return [parse_conversation(side, PLAIN) for side in sides]


def parse_labelled(record: dict[str, Any]) -> Conversation:
    """Return the conversation of a labelled record. Training covers the completion, or the last
    message if the record has no completion. DataError for missing or wrong fields."""
    label = _FLAG_VALUES.get(str(record["label"]).strip().lower())
    if label is None:
        raise DataError(f"field 'label' is {record['label']!r}, neither true nor false")
    conversation = _conversation_of(record)
    prompt = conversation.first_trained or len(conversation.messages) - 1
    return replace(conversation, first_trained=prompt, label=label)


def _conversation_of(record: dict[str, Any]) -> Conversation:
    """Conversation of a record, in the first format whose fields the record has. DataError if the
    record has the fields of no format."""
    forms = (PLAIN, "messages", "conversations", "instruction")
    form = next((f for f in forms if all(record.get(n) is not None for n in REQUIRED[f])), None)
    if form is None:
        raise DataError("there is nothing beside the label: no fields of a conversation")
    return parse_conversation(record, form)


def parse_classified(record: dict[str, Any]) -> Conversation:
    """Text or conversation of a record, with the number of its class. DataError for missing or
    wrong fields."""
    label = record["label"]
    if not isinstance(label, int) or label < 0:
        raise DataError(f"field 'label' is {label!r}, which is no class: those count from 0")
    if record.get(TEXT) is not None:
        return Conversation([], label=int(label), text=_text(record[TEXT], TEXT))
    return replace(_conversation_of(record), label=int(label))


def _answer(record: dict[str, Any], name: str) -> str | list[Message]:
    """Value of `chosen` or `rejected`: a text, or a list of messages."""
    value = record[name]
    if isinstance(value, str):
        return value
    return [_message(value, 1)] if isinstance(value, dict) else _messages(record, name)


def _prompt(record: dict[str, Any]) -> str | list[Message]:
    if record.get("prompt") is not None:
        return record["prompt"]
    if record.get("instruction") is not None:
        return _of_instruction(record | {"output": ""})[0][:-1]
    for name in ("messages", "conversations"):
        if record.get(name) is not None:
            return _messages(record, name)
    raise DataError("there is no prompt: no field 'prompt', 'instruction', 'messages'")


def _check_required(record: dict[str, Any], form: str) -> None:
    for name in REQUIRED[form]:
        if record.get(name) is None:
            raise DataError(f"no field '{name}' in a record of the format {form}")


def _of_prompt(record: dict[str, Any]) -> tuple[list[Message], int]:
    sides = []
    for name, role in (("prompt", "user"), ("completion", "assistant")):
        value = record[name]
        is_text = isinstance(value, str)
        sides.append([{"role": role, "content": value}] if is_text else _messages(record, name))
    return [*sides[0], *sides[1]], len(sides[0])


def _of_instruction(record: dict[str, Any]) -> tuple[list[Message], int]:
    turns = []
    history = _parsed(record, "history", list) or []
    for pair in history:
        if not isinstance(pair, list) or len(pair) != 2:
            raise DataError("field 'history' is no list of pairs, of an instruction and an output")
        turns.append((_text(pair[0], "history"), _text(pair[1], "history")))
    question = _text(record["instruction"], "instruction")
    if given := _text(record.get("input") or "", "input"):
        question = f"{question}\n\n{given}"
    turns.append((question, _text(record["output"], "output")))
    messages = []
    for asked, said in turns:
        messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
    return messages, 0


_PARSERS = {
    "messages": lambda record: (_messages(record, "messages"), 0),
    "conversations": lambda record: (_messages(record, "conversations"), 0),
    "prompt": _of_prompt,
    "instruction": _of_instruction,
}


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise DataError(f"field '{name}' is a {type(value).__name__}, not a text")
    return value


def _parsed(record: dict[str, Any], name: str, kind: type) -> Any:
    """Value of a field, parsed if it is JSON text, as in Parquet files; None if absent. DataError
    for a value of another type than `kind`."""
    value = record.get(name)
    if isinstance(value, str):
        try:
            value = json.loads(value or "null")
        except ValueError as error:
            raise DataError(f"field '{name}' is a text that is no JSON: {error}") from error
    if value is not None and not isinstance(value, kind):
        raise DataError(f"field '{name}' is a {type(value).__name__}, not a {kind.__name__}")
    return value


# ------------------------------------------------------------------------------------------------
# Messages


def _messages(record: dict[str, Any], name: str) -> list[Message]:
    values = _parsed(record, name, list)
    if values is None:  # the field was the text "null"
        raise DataError(f"field '{name}' holds no list")
    messages = []
    for number, value in enumerate(values, 1):
        if not isinstance(value, dict):
            raise DataError(f"message {number} is a {type(value).__name__}, not an object")
        messages.append(_message(value, number))
    return messages


def _message(value: dict[str, Any], number: int) -> Message:
    """Message with the fields `role` and `content`, which other data sets call `from` and `value`.
    DataError for a message without role or content, or with other contents than texts."""
    is_trained(value, number)
    message = {key: v for key, v in value.items() if key not in ("from", "value")}
    for key, other in (("role", "from"), ("content", "value")):
        if key not in message and other in value:
            message[key] = value[other]
    role = message.get("role")
    if not isinstance(role, str):
        raise DataError(f"message {number} has no role")
    if role not in ROLES:
        message["role"] = _ROLES_OF_OTHERS.get(role, role)
    if role == "function_call":
        message |= {"content": None, "tool_calls": _calls(message.get("content"), number)}
    _parse_calls(message, number)
    content = message.get("content")
    beside = (TOOL_CALLS, FUNCTION_CALL, "reasoning_content")
    if content is None and not any(message.get(name) for name in beside):
        raise DataError(f"message {number} ({role}) has no content")
    if isinstance(content, list):
        _check_parts(content, number, role)
        message["content"] = [{"type": "text"} | part for part in content]
    elif content is not None and not isinstance(content, str):
        raise DataError(f"message {number} ({role}): its content is a {type(content).__name__}")
    return message


def _check_parts(parts: list[Any], number: int, role: str) -> None:
    for part in parts:
        kind = part.get("type", "text") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            name = kind if isinstance(part, dict) else type(part).__name__
            raise DataError(
                f"message {number} ({role}): a part of its content is {name!r}; only texts can be "
                "trained"
            )


def _calls(content: Any, number: int) -> list[dict[str, Any]]:
    """Tool calls of a `function_call` message, parsed from its content: JSON of a call or a list.
    DataError for other content."""
    try:
        calls = json.loads(content)
        calls = calls if isinstance(calls, list) else [calls]
        return [
            as_tool_call({"name": call["name"], "arguments": call.get("arguments")})
            for call in calls
        ]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DataError(
            f"message {number} (function_call) is no JSON with name and arguments"
        ) from error


def _parse_calls(message: Message, number: int) -> None:
    """Replace the calls of a message by objects with arguments. DataError for other values."""
    try:
        if calls := _parsed(message, TOOL_CALLS, list):
            message[TOOL_CALLS] = [_parsed_call(call) for call in calls]
        if call := _parsed(message, FUNCTION_CALL, dict):
            message[FUNCTION_CALL] = _parsed_call(call)
    except DataError as error:
        raise DataError(f"message {number} ({message['role']}): {error}") from error


def _parsed_call(call: Any) -> dict[str, Any]:
    """Call of a tool whose arguments are an object or the object's JSON text; {} for none."""
    inner = call.get("function", call) if isinstance(call, dict) else call
    if not isinstance(inner, dict):
        raise DataError(f"a call of a tool is a {type(inner).__name__}, not an object")
    if "name" not in inner or ("arguments" not in inner and "parameters" in inner):
        return call  # another kind of call, which a template may know
    return with_arguments(call, _arguments(inner.get("arguments")))


def _arguments(given: Any) -> dict[str, Any] | str:
    """Arguments of a call, unchanged if they are an object or the object's JSON text; {} for none.
    DataError for other values."""
    parsed, texts = given, 0
    while isinstance(parsed, str):
        try:
            parsed, texts = json.loads(parsed.strip() or "null"), texts + 1
        except ValueError as error:
            raise DataError(f"the arguments of a call are no JSON: {error}") from error
    if parsed is not None and not isinstance(parsed, dict):
        raise DataError(f"the arguments of a call are a {type(parsed).__name__}, not an object")
    return given if parsed is not None and texts == 1 else parsed or {}


def check_roles(messages: Sequence[Message], known: Collection[str]) -> None:
    """Raise DataError for a message whose role is neither in ROLES nor known to the template."""
    for number, message in enumerate(messages, 1):
        role = message["role"]
        if role not in ROLES and role not in known:
            raise DataError(
                f"message {number} has the unknown role {role!r}: the template and llmq know "
                f"{', '.join(ROLES)}"
            )


def weight_of(message: Message, number: int) -> float | None:
    """Weight, 0 to 1, that the fields of FLAGS give a message; None without these fields. number:
    the message's number from 1, for errors. DataError for a bad value, or for fields that
    contradict each other."""
    weights: dict[str, float] = {}
    for name in FLAGS:
        if (value := message.get(name)) is not None:
            known = _FLAG_VALUES.get(str(value).strip().lower())
            parts = value * WEIGHT_PARTS if name == "weight" and isinstance(value, float) else -1
            if known is None and not (0 <= parts <= WEIGHT_PARTS and abs(parts % 1 - 0.5) > 0.499):
                raise DataError(
                    f"message {number}: '{name}' is {value!r}: a message is trained (1, true) or "
                    f"not (0, false); 'weight' may also be a multiple of {1 / WEIGHT_PARTS} between"
                )
            weights[name] = round(parts) / WEIGHT_PARTS if known is None else float(known)
    if len({*weights.values()}) > 1:
        raise DataError(f"message {number}: {' and '.join(weights)} contradict each other")
    return next(iter(weights.values()), None)


def is_trained(message: Message, number: int) -> bool | None:
    """True for a message with a weight above 0, False for weight 0, None without a weight."""
    weight = weight_of(message, number)
    return None if weight is None else weight > 0


def check_whole(conversations: Sequence[Conversation], where: str) -> None:
    """Raise DataError for a message with a weight between 0 and 1."""
    for number, message in (m for each in conversations for m in enumerate(each.messages, 1)):
        if (weight := weight_of(message, number)) not in (None, 0, 1):
            raise DataError(
                f"{where}: message {number} has the weight {weight}: give --weights, and tokens "
                "count as much as that"
            )


def unread(messages: Sequence[Message], names: Collection[str]) -> Iterator[str]:
    """Fields of messages that neither llmq nor the template reads. names: fields that the template
    may read."""
    known = {"role", "content", "from", "value", "tool_call_id", FUNCTION_CALL, *FLAGS, *names}
    if known & {*REASONING}:
        known |= {*REASONING}
    yield from dict.fromkeys(k for m in messages for k, v in m.items() if v and k not in known)
