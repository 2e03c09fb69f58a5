"""Chat templates: from messages to text, as transformers' apply_chat_template does.

A template is a program in jinja2's language, run in jinja2's sandbox. Marks `{% generation %} … {%
endgeneration %}` surround text that the model writes; rendering returns the places of marked text.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from llmq.base.errors import DataError
from llmq.base.files import check_readable, read_errors
from llmq.base.records import MAX_RECORD
from llmq.text.tokenizer import (
    END_OF_TEXT,
    TEMPLATE_FILE,
    TEMPLATES,
    HfTokenizer,
    Tokenizer,
    read_json,
)
from llmq.text.tokenizer_files import OWN_TOKENS

SHIPPED = Path(__file__).with_name("chat_templates")
"""Folder of templates of published formats, NAME.jinja, which mark the model's text."""
_CONTROL = re.compile(r"<[^<>\s]+>")
_PROBE = "probe"  # content of a test message, to see where and how a template writes contents
_HALF = re.compile("[\ud800-\udfff]")
_SPECIAL = [f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")]
TOOL_CALLS, FUNCTION_CALL = "tool_calls", "function_call"  # list of calls; one call (older)
REASONING = ("reasoning_content", "thinking", "reasoning")  # names of the same field

Message = dict[str, Any]


class Rendered(NamedTuple):
    """Text of a conversation. generated: (start, end) of each marked part, in characters; None for
    a template without marks."""

    text: str
    generated: list[tuple[int, int]] | None


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """Chat templates of a tokenizer. sources: texts of the templates by name; a single template has
    the name "default". special_tokens: texts of special tokens by role, such as `eos_token`.
    origin: the file or folder of the templates, for messages."""

    sources: Mapping[str, str]
    special_tokens: Mapping[str, str]
    origin: str

    @property
    def fingerprint(self) -> str:
        """SHA-256 in hex of everything that decides the text of a conversation."""
        content = json.dumps([dict(self.sources), dict(self.special_tokens)], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()

    def source(self, tools: Sequence[Any] | None = None) -> str:
        """The template that transformers chooses: "tool_use" with tools, if there is one, else
        "default". DataError if there is no default."""
        if tools is not None and len(self.sources) > 1 and "tool_use" in self.sources:
            return self.sources["tool_use"]
        if "default" not in self.sources:
            raise DataError(
                f"{self.origin} has several chat templates ({', '.join(self.sources)}) and none is "
                "the default: choose one with --chat-template NAME"
            )
        return self.sources["default"]

    def texts(self, tools: Sequence[Any] | None = None) -> frozenset[str]:
        """Literal texts and field names in the template's expressions, such as names of roles."""
        return _constants(self.source(tools))

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Any] | None = None,
        documents: Sequence[Any] | None = None,
        add_generation_prompt: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> Rendered:
        """Text of a conversation. Contents of messages become texts or lists of parts, whichever
        form the template reads. variables: further variables of the template. DataError with the
        template's words if the template refuses or fails."""
        source = self.source(tools)
        try:
            return _render(
                source,
                _as_read(source, messages),
                tools=tools,
                documents=documents,
                add_generation_prompt=add_generation_prompt,
                **{**self.special_tokens, **(variables or {})},
            )
        except _MarkError:
            raise DataError(
                f"the chat template of {self.origin} has {{% generation %}} inside of a macro, a "
                "filter or a set block, where its place in the text is unknown: move it out"
            ) from None
        except MemoryError:  # the worker process reports this
            raise
        except Exception as error:  # the template is a program that may raise anything
            raise DataError(f"the chat template of {self.origin} says: {_said(error)}") from error


def _said(error: Exception) -> str:
    return " ".join(str(error).split())[:500] or type(error).__name__


def _refuse_half_characters(text: str, *given: Any) -> None:
    """Raise ValueError if `text` has a lone surrogate, which UTF-8 cannot encode, unless `given`
    has lone surrogates, too."""
    half = _HALF.search(text)
    if half is not None and not _HALF.search(json.dumps(given, ensure_ascii=False, default=str)):
        raise ValueError(f"it writes half a character, U+{ord(half[0]):04X}")


class _MarkError(Exception):
    """Signal that marked text is not at the place of its mark."""


def _render(source: str, messages: Sequence[Message], **given: Any) -> Rendered:
    """Render a template. Raises any exception of the template, and _MarkError."""
    template = _compiled(source)
    environment: _Environment = template.environment
    pieces: list[str] = []
    environment.start()
    for piece in template.generate(messages=[*map(_as_template_sees, messages)], **given):
        pieces.append(piece)
        environment.written += len(piece)
        if environment.written > MAX_RECORD:
            raise ValueError(f"it writes more than {MAX_RECORD >> 20} MiB of text")
    text = "".join(pieces)
    _refuse_half_characters(text, messages, given)
    generated = environment.generated if environment.marks else None
    for start, part in generated or ():
        if text[start : start + len(part)] != part:
            raise _MarkError
    return Rendered(text, generated and [(start, start + len(part)) for start, part in generated])


def _as_template_sees(message: Message) -> Message:
    """Message without null fields, and with the reasoning under all names that templates read, as
    in transformers."""
    kept = {name: value for name, value in message.items() if value is not None}
    reasoning = next((kept[name] for name in REASONING if name in kept), None)
    if reasoning is None:
        return kept
    return {"thinking": reasoning, **kept, "reasoning_content": reasoning}


# ------------------------------------------------------------------------------------------------
# Contents that are texts, and lists of parts; calls of tools


def _as_read(source: str, messages: Sequence[Message]) -> list[Message]:
    """Messages with contents and calls of tools in the form that a template reads."""
    forms, converted, is_old = _forms(source), [], False
    for message in messages:
        message = _in_form(message, forms)
        if message.get(FUNCTION_CALL) and FUNCTION_CALL not in _constants(source):
            is_old = True
            message = {**message, TOOL_CALLS: [as_tool_call(message[FUNCTION_CALL])]}
            del message[FUNCTION_CALL]
        elif is_old and message["role"] == "function":
            message = message | {"role": "tool"}
        if message.get(TOOL_CALLS):
            calls = [_call_in_form(call, _reads_arguments(source)) for call in message[TOOL_CALLS]]
            message = message | {TOOL_CALLS: calls}
        converted.append(message)
    return converted


def as_tool_call(function: dict[str, Any]) -> dict[str, Any]:
    """Element of `tool_calls` for a call {"name": text, "arguments": object} of a function."""
    return {"type": "function", "function": function}


def with_arguments(call: dict[str, Any], arguments: Any) -> dict[str, Any]:
    """Copy of a tool call with these arguments, which stand in the call's field "function" if there
    is one."""
    if "function" in call:
        return call | {"function": call["function"] | {"arguments": arguments}}
    return call | {"arguments": arguments}


def _call_in_form(call: dict[str, Any], reads: _Reads) -> dict[str, Any]:
    """Call with arguments in the form that a template reads; JSON text stays if the template reads
    both forms."""
    given = call.get("function", call).get("arguments")
    if isinstance(given, str) and not reads.texts:
        return with_arguments(call, json.loads(given))
    if isinstance(given, dict) and reads.texts and not reads.parts:
        return with_arguments(call, _to_json(given))
    return call


@lru_cache(maxsize=64)
def _reads_arguments(source: str) -> _Reads:
    """Forms of a call's arguments that a template can write as JSON: `texts` is True for JSON text,
    `parts` for objects."""
    given, text = {_PROBE: 1}, f'{{"{_PROBE}":1}}'
    as_object, as_text = (
        _written(source, [{"role": "user", "content": "?"}, _calling(arguments)])
        for arguments in (given, text)
    )
    return _Reads(text in as_text, _PROBE in as_object and str(given) not in as_object)


def _calling(arguments: Any) -> Message:
    call = as_tool_call({"name": "f", "arguments": arguments}) | {"id": "123456789"}
    return {"role": "assistant", "content": "", TOOL_CALLS: [call]}


def text_of(content: Any) -> str:
    """Text of a message's content, which is a text, a list of parts, or None."""
    if isinstance(content, list):
        return "".join(part["text"] for part in content)
    return content or ""


def _in_form(message: Message, forms: Mapping[str, _Reads]) -> Message:
    """Message with its content in the form that the template reads for the role."""
    content = message.get("content")
    reads = forms.get(message["role"], forms["user"])
    if isinstance(content, list) and not reads.parts:
        return message | {"content": text_of(content)}
    if isinstance(content, str) and not reads.texts:
        return message | {"content": _parts(content)}
    return message


def _parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


class _Reads(NamedTuple):
    """Forms of a value that a template accepts. texts: True if it accepts a text. parts: True if it
    accepts a list of parts, or an object."""

    texts: bool
    parts: bool


@lru_cache(maxsize=64)
def _forms(source: str) -> dict[str, _Reads]:
    """Forms of contents that a template reads, by role; only texts if the template refuses both
    forms."""
    forms: dict[str, _Reads] = {}
    for role in ("user", "assistant", "system"):
        message = {"role": role, "content": _PROBE}
        question = _in_form({"role": "user", "content": "?"}, forms or {"user": _Reads(True, True)})
        beside = {"user": [[], []], "assistant": [[question], []], "system": [[], [question]]}[role]
        as_text, as_parts = (
            _written(source, [*beside[0], message | {"content": content}, *beside[1]])
            for content in (_PROBE, _parts(_PROBE))
        )
        printed = any(f"{q}text{q}: {q}{_PROBE}{q}" in as_parts for q in "'\"")
        parts = _PROBE in as_parts and not printed
        forms[role] = _Reads(_PROBE in as_text or not parts, parts)
    return forms


def _written(source: str, messages: Sequence[Message]) -> str:
    """Text that a template writes for messages, with special tokens as empty texts; "" if the
    template fails."""
    given = {"tools": None, "documents": None, "add_generation_prompt": False}
    with suppress(Exception):  # the template is a program that may raise anything
        return _render(source, messages, **given, **dict.fromkeys(_SPECIAL, "")).text
    return ""


# ------------------------------------------------------------------------------------------------
# Finding a tokenizer's template


def load_chat_template(tokenizer: Tokenizer, given: str | None = None) -> ChatTemplate | None:
    """The chat template of a tokenizer, or the `given` one: a file, or the name of a template of
    the tokenizer or in SHIPPED. None for a tokenizer without a template; DataError for a damaged or
    missing template."""
    folder = tokenizer.folder if isinstance(tokenizer, HfTokenizer) else None
    special = _special_tokens(folder) if folder else dict.fromkeys(_SPECIAL[:2], END_OF_TEXT)
    sources = _sources_of(folder) if folder else {}
    origin = f"'{folder}'"
    if given is not None and given in sources and not Path(given).is_file():
        sources = {"default": sources[given]}
    elif given is not None:
        sources, origin = {"default": _given_template(given)}, f"'{given}'"
    template = ChatTemplate(sources, special, origin)
    for name, source in sources.items():
        try:
            _compiled(source)
        except Exception as error:  # jinja2's errors, and those of Python's compiler
            what = "" if name == "default" else f" '{name}'"
            raise DataError(
                f"the chat template{what} of {origin} is no template: {_said(error)}"
            ) from None
    return template if sources else None


def shipped_templates() -> list[str]:
    """Names of the templates in SHIPPED."""
    return sorted(path.stem for path in SHIPPED.glob("*.jinja"))


def _given_template(given: str) -> str:
    path = Path(given)
    if not path.exists() and given.lower() in shipped_templates():
        return _read_template(SHIPPED / f"{given.lower()}.jinja")
    if not path.exists() and path.name == given and "." not in given:
        raise DataError(
            f"--chat-template {given}: there is neither a file nor a template of this name: give "
            f"a file, or one of {', '.join(shipped_templates())}"
        )
    return _read_template(path)


def _sources_of(folder: Path) -> dict[str, str]:
    """Templates of a model folder by name; files take precedence over tokenizer_config.json, as in
    transformers."""
    files = {path.stem: path for path in sorted((folder / TEMPLATES).glob("*.jinja"))}
    if (folder / TEMPLATE_FILE).is_file():
        files = {"default": folder / TEMPLATE_FILE, **files}
    if files:
        return {name: _read_template(path) for name, path in files.items()}
    path = folder / "tokenizer_config.json"
    content = read_json(path).get("chat_template")
    try:
        if isinstance(content, list):
            content = {entry["name"]: entry["template"] for entry in content}
        sources = {"default": content} if isinstance(content, str) else dict(content or {})
    except (TypeError, KeyError, ValueError):
        sources = {"": None}
    if not all(isinstance(text, str) for pair in sources.items() for text in pair):
        raise DataError(f"'{path}': its chat_template is neither a text nor a list of named texts")
    return sources


def _read_template(path: Path) -> str:
    try:
        with read_errors(f"the chat template '{path}'"):
            check_readable(path)
            return path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"the chat template '{path}' is not UTF-8 text") from error


def _special_tokens(folder: Path) -> dict[str, str]:
    """Texts of special tokens that a template may name, as transformers finds them."""
    config = read_json(folder / "tokenizer_config.json")
    named = (
        {} if "added_tokens_decoder" in config else read_json(folder / "special_tokens_map.json")
    )
    of_class = OWN_TOKENS.get(str(config.get("tokenizer_class")).removesuffix("Fast"), {})
    tokens = {f"{name}_token": text for name, text in of_class.items()}
    for source in (config, named):
        tokens.update({name: source[name] for name in _SPECIAL if name in source})
    texts = {n: t.get("content") if isinstance(t, dict) else t for n, t in tokens.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


# ------------------------------------------------------------------------------------------------
# The end of a turn


class Stop(NamedTuple):
    """The end of an assistant's turn. ids: token ids each of which ends the turn; the id that the
    template writes is the first. text: the end that the template writes if this end is no single
    token, else None."""

    ids: Collection[int]
    text: str | None


def end_of_turn(template: ChatTemplate, tokenizer: Tokenizer) -> Stop:
    """The end that the template writes behind a reply, and the tokenizer's EOS."""
    ids = set() if tokenizer.eos_id is None else {tokenizer.eos_id}
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _PROBE}]
    with suppress(DataError):  # the template will refuse real messages, too
        tail = template.render(messages).text.rpartition(_PROBE)[2].lstrip()
        first = tokenizer.encode(tail)[:1]
        if first and tokenizer.is_special(first[0]):
            return Stop([first[0], *sorted(ids - {first[0]})], None)
        if tail:
            return Stop([*ids], tail.splitlines()[0].rstrip())
    return Stop([*ids], None)


def lacking_tokens(template: ChatTemplate, tokenizer: Tokenizer) -> list[str]:
    """Texts such as <|im_end|> in the template's output that are no single token of the
    tokenizer."""
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
    texts: dict[str, None] = {}
    for start in ([{"role": "system", "content": "!"}], []):
        with suppress(DataError):  # some templates refuse a system message
            texts |= dict.fromkeys(_CONTROL.findall(template.render([*start, *messages]).text))
    return [text for text in texts if len(tokenizer.encode(text)) > 1]


# ------------------------------------------------------------------------------------------------
# jinja2's environment with the settings of transformers


class _Environment(ImmutableSandboxedEnvironment):
    """jinja2's sandbox for one template. marks: True if the template has generation blocks."""

    marks = False

    def start(self) -> None:
        """Begin a new text, without characters and marks."""
        self.written = 0  # characters so far
        self.generated: list[tuple[int, str]] = []


class _Generation(Extension):
    """The tag `{% generation %}`, which records the text and the place of its block."""

    tags = frozenset({"generation"})

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        self.environment.marks = True
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_note"), [], [], body).set_lineno(line)

    def _note(self, caller: Any) -> str:
        text = caller()
        self.environment.generated.append((self.environment.written, text))
        return text


@lru_cache(maxsize=64)
def _compiled(source: str) -> jinja2.Template:
    """The compiled template. jinja2.TemplateError for a malformed source."""
    environment = _Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        optimized=False,  # True would compute constant expressions of any size at compile time
        extensions=[_Generation, "jinja2.ext.loopcontrols"],
    )
    environment.filters["tojson"] = _to_json
    del environment.globals["lipsum"]  # writes filler text of any length
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(source)


@lru_cache(maxsize=64)
def _constants(source: str) -> frozenset[str]:
    tree = _compiled(source).environment.parse(source)
    values = [node.value for node in tree.find_all(nodes.Const)]
    values += [node.attr for node in tree.find_all(nodes.Getattr)]
    return frozenset(value for value in values if isinstance(value, str))


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Value as JSON; jinja2's own filter escapes `<` and `'` for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)
