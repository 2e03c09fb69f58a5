"""Turns of a conversation with an environment: the text that a chat template writes behind a reply,
and the tool calls in a reply, in the form in which the template writes tool calls."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from llmq.base.errors import DataError
from llmq.text.chat_template import TOOL_CALLS, ChatTemplate, Message, as_tool_call

_PROBE, _ASKED = "probe-of-a-reply", {"role": "user", "content": "?"}


def behind_reply(template: ChatTemplate, messages: Sequence[Message], end: str) -> str:
    """The text between the model's last reply and the model's next reply.

    messages: the whole conversation; at least one message follows the last reply. end: text that
    ends the reply, such as an end-of-turn token; the result does not repeat this text. DataError if
    the template shows no replies.
    """
    last = max(i for i, message in enumerate(messages) if message["role"] == "assistant")
    probed = [*messages[:last], {"role": "assistant", "content": _PROBE}, *messages[last + 1 :]]
    text = template.render(probed, add_generation_prompt=True).text
    if text.count(_PROBE) != 1:
        raise DataError(f"the chat template of {template.origin} does not show earlier replies")
    return text.partition(_PROBE)[2].lstrip().removeprefix(end)


class CallForm(NamedTuple):
    """How a template writes tool calls. opening: text in front of the JSON object of the first
    call; "" if a reply begins with the object."""

    opening: str

    def calls(self, reply: str) -> list[dict[str, Any]]:
        """The calls in a reply, {"name": text, "arguments": object}. Other text and other JSON are
        skipped."""
        found, decoder = [], json.JSONDecoder()
        if not self.opening and not reply.lstrip().startswith("{"):
            return found
        at = reply.find(self.opening)
        while at >= 0 and (at := reply.find("{", at)) >= 0:
            try:
                call, at = decoder.raw_decode(reply, at)
            except (ValueError, RecursionError):
                at += 1
                continue
            arguments = call.get("arguments", call.get("parameters", {}))
            if isinstance(call.get("name"), str) and isinstance(arguments, dict):
                found.append({"name": call["name"], "arguments": arguments})
        return found


def call_form(template: ChatTemplate) -> CallForm:
    """The form in which a template writes tool calls. DataError if the template does not write
    calls as JSON objects with a name."""
    function = {"name": _PROBE, "arguments": {"a": 1}}
    call = as_tool_call(function) | {"id": "123456789"}
    calling = {"role": "assistant", "content": "", TOOL_CALLS: [call]}
    saying = {"role": "assistant", "content": _PROBE}
    text, plain = (template.render([_ASKED, last]).text for last in (calling, saying))
    before, at = plain.partition(_PROBE)[0].rstrip(), text.find(_PROBE)
    start = text.rfind("{", 0, max(at, 0))
    if start < 0 or not CallForm("").calls(text[start:]) or not text.startswith(before):
        raise DataError(
            f"the chat template of {template.origin} writes no calls of tools as JSON objects: "
            "let `step` read them from the text"
        )
    return CallForm(text[len(before) : start].strip())
