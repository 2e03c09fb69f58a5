"""Turns with an environment, in the forms of published templates."""

from __future__ import annotations

import pytest

from llmq.base.errors import DataError
from llmq.text.chat_template import SHIPPED, ChatTemplate
from llmq.text.chat_turns import behind_reply, call_form

TOLD = {
    "chatml": "\n<|im_start|>user\nand now?<|im_end|>\n<|im_start|>assistant\n",
    "qwen2.5": "\n<|im_start|>user\nand now?<|im_end|>\n<|im_start|>assistant\n",
    "llama3.1": "<|start_header_id|>user<|end_header_id|>\n\nand now?<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
}
ENDS = {"chatml": "<|im_end|>", "qwen2.5": "<|im_end|>", "llama3.1": "<|eot_id|>"}
CALL = '{"name": "add", "arguments": {"a": 1, "b": [2, "}"]}}'


def shipped(name: str) -> ChatTemplate:
    text = (SHIPPED / f"{name}.jinja").read_text()
    special = {"bos_token": "<s>", "eos_token": ENDS.get(name, "</s>")}
    return ChatTemplate({"default": text}, special, name)


@pytest.mark.parametrize("name", TOLD)
def test_texts_behind_replies(name):
    """The whole conversation is what the template writes of it."""
    template, end = shipped(name), ENDS[name]
    talk = [{"role": "user", "content": "probe"}, {"role": "assistant", "content": "I say"}]
    more = [*talk, {"role": "user", "content": "and now?"}]
    told = behind_reply(template, more, end)
    assert told == TOLD[name]
    prompt = template.render(talk[:1], add_generation_prompt=True).text
    assert template.render(more, add_generation_prompt=True).text == prompt + "I say" + end + told


@pytest.mark.parametrize(
    ("name", "reply"),
    [
        ("qwen2.5", f"I add.\n<tool_call>\n{CALL}\n</tool_call>"),
        ("qwen3", f"<tool_call>\n{CALL}\n</tool_call>"),
        ("llama3.1", CALL.replace("arguments", "parameters")),
        ("mistral-nemo", f'[TOOL_CALLS][{CALL[:-1]}, "id": "abcdefghi"}}]'),
    ],
)
def test_calls_of_tools_are_found_in_the_template_s_form(name, reply):
    form = call_form(shipped(name))
    call = {"name": "add", "arguments": {"a": 1, "b": [2, "}"]}}
    assert form.calls(reply) == [call]
    assert form.calls(reply.replace('"name"', '"nam')) == form.calls("I add nothing.") == []
    assert form.calls(f"as {CALL}") == [] and form.calls("") == []
    if name == "qwen2.5":
        assert form.calls(f"{reply}\n<tool_call>\n{CALL}\n</tool_call>") == [call, call]
    if name == "mistral-nemo":
        assert form.calls(f"[TOOL_CALLS][{CALL}, {CALL}]") == [call, call]


def test_a_template_without_calls():
    with pytest.raises(DataError, match="chatml writes no calls of tools as JSON objects"):
        call_form(shipped("chatml"))
