"""Chat templates by name: their texts are those of the published ones, and marked.

golden/chat_templates.json has conversations, and what the templates that the models' makers publish
make of them, where these write all of it. Elsewhere the texts are our own: R1 with tools and with
thinking, Mistral with a system message before the last question (the templates say why).
"""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path

import pytest

from llmq.base.errors import DataError
from llmq.commands.cli import _run
from llmq.text.chat_masks import Chat, token_mask
from llmq.text.chat_template import load_chat_template, shipped_templates
from llmq.text.conversations import Conversation, parse_conversation
from llmq.text.tokenizer import ByteTokenizer, HfTokenizer, load_tokenizer
from tests.chat_templates import THINKING, write_chat_tokenizer
from tests.text.test_conversations import read, write_records

transformers = pytest.importorskip("transformers")

GOLDEN = json.loads((Path(__file__).parent / "golden" / "chat_templates.json").read_text())
TALKS, TEXTS = GOLDEN["talks"], GOLDEN["texts"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tokenizer without a template."""
    return write_chat_tokenizer(tmp_path_factory.mktemp("tokenizer") / "t")


def test_the_names():
    assert shipped_templates() == sorted(TEXTS) and len(TEXTS) >= 14
    with pytest.raises(DataError, match=r"--chat-template qwem: there is neither a file nor a tem"):
        load_chat_template(ByteTokenizer(), "qwem")


@pytest.mark.parametrize("name", TEXTS)
def test_texts_are_the_published_ones_and_marks_those_of_transformers(folder, name):
    ours, theirs = HfTokenizer(folder), transformers.AutoTokenizer.from_pretrained(folder)
    template = load_chat_template(ours, name)
    for talk, text in TEXTS[name].items():
        messages, tools = TALKS[talk]["messages"], TALKS[talk]["tools"]
        expected = text.replace("TODAY", date.today().isoformat())
        ((found, spans),) = Chat(template, "assistant").texts(Conversation(messages, tools))
        assert found == expected, talk
        # One mark for each answer, which begins behind the prompt for it.
        answers = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
        assert len(spans) == len(answers)
        assert all((messages[i]["content"].strip() or "weather") in found[a:b]
                   for i, (a, b) in zip(answers, spans, strict=True))  # fmt: skip
        prompt = template.render(messages[:-1], tools=tools, add_generation_prompt=True).text
        if name == "r1" and talk != "thinking":  # it asks for thinking, of which there is none
            prompt = prompt.removesuffix("<think>\n")
        assert found[: spans[-1][0]] == prompt
        how = {"tools": tools, "chat_template": template.source()}
        masked = theirs.apply_chat_template(messages, return_assistant_tokens_mask=True, **how)
        ids, offsets = ours.encode_with_offsets([found])[0]
        assert ids.tolist() == masked["input_ids"]
        assert token_mask(offsets, spans).astype(int).tolist() == masked["assistant_masks"]


@pytest.mark.parametrize("name", [name for name in TEXTS if "tools" in TEXTS[name]])
def test_arguments_as_text_are_those_of_transformers_where_it_writes_texts(folder, name):
    """Elsewhere they are those of the object, where transformers writes JSON within JSON."""
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    template = load_chat_template(HfTokenizer(folder), name)
    text, objects = '{"city":"Zürich",  "n": [1]}', TALKS["tools"]["messages"]
    as_text = json.loads(json.dumps(objects))
    for messages, given in ((objects, {"city": "Zürich", "n": [1]}), (as_text, text)):
        messages[1]["tool_calls"][0]["function"]["arguments"] = given
    how = {"chat_template": template.source(), "tokenize": False}
    tools = TALKS["tools"]["tools"]
    wanted = [theirs.apply_chat_template(m, tools=tools, **how) for m in (objects, as_text)]
    found = template.render(
        parse_conversation({"messages": as_text}, "messages").messages, tools=tools
    )
    assert found.text == (wanted[1] if text in wanted[1] else wanted[0])


@pytest.mark.parametrize("name", TEXTS)
def test_any_message_may_be_left_out(folder, name):
    """The marks of an answer are known whatever follows it."""
    template = load_chat_template(HfTokenizer(folder), name)
    for talk in TEXTS[name]:
        messages, tools = TALKS[talk]["messages"], TALKS[talk]["tools"]
        ((text, spans),) = Chat(template, "assistant").texts(Conversation(messages, tools))
        answers = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
        for left_out, turn in enumerate(answers):
            changed = [m | {"train": i != turn} for i, m in enumerate(messages)]
            found = Chat(template, "assistant").texts(Conversation(changed, tools))
            assert found == [(text, [s for i, s in enumerate(spans) if i != left_out])]
        assert Chat(template, "last").texts(Conversation(messages, tools))[0][1] == spans[-1:]
        each = Chat(template, "each").texts(Conversation(messages, tools))
        assert len(each) == len(answers) and each[-1] == (text, spans[-1:])


def test_thinking_of_several_turns_is_tokenized_by_a_name(tmp_path, folder, capsys):
    """Qwen3's own template refuses this; the name's template goes with the tokens."""
    path = write_records(tmp_path / "a.jsonl", [{"messages": THINKING}])
    out = tmp_path / "out"
    words = ["tokenize", str(path), "--tokenizer", str(folder), "--eval-fraction", "0"]
    assert _run([*words, "--out", str(out), "--chat-template", "Qwen3"]) == 0
    assert "warning" not in capsys.readouterr().out
    assert [parts for _, parts in read(out)] == [
        ["two<|im_end|>", "<think>\non\nthe mat\n</think>\n\nfour<|im_end|>"]
    ]
    source = load_chat_template(load_tokenizer(out / "tokenizer")).source()
    assert source == load_chat_template(ByteTokenizer(), "qwen3").source()


def test_ends_that_differ_are_said(folder):
    said = {name: Chat(load_chat_template(HfTokenizer(folder), name), "assistant").warnings()
            for name in TEXTS}  # fmt: skip
    assert [name for name, lines in said.items() if lines] == ["gpt-oss"]
    assert (
        "the last turn with '<|return|>' and those before it with 'nothing'" in (said["gpt-oss"][0])
    )
