"""Chat templates: the text, the ids and the trained tokens are those of transformers."""

from __future__ import annotations

import json

import numpy as np
import pytest

from llmq.base.errors import DataError
from llmq.text.chat_masks import Chat, token_mask
from llmq.text.chat_template import ChatTemplate, load_chat_template
from llmq.text.conversations import Conversation
from llmq.text.tokenizer import ByteTokenizer, HfTokenizer
from tests.chat_templates import (
    CHATML,
    SHORT,
    TEMPLATES,
    THINKING,
    TOOLS,
    TURNS,
    WITH_SYSTEM,
    WITH_TOOLS,
    assistant,
    system,
    tool,
    user,
    write_chat_tokenizer,
)

transformers = pytest.importorskip("transformers")

EVERYONE = {"short": (SHORT, None), "turns": (TURNS, None)}
ONE_MESSAGE = {"question": ([user("the cat")], None)}
SYSTEM = {"system": (WITH_SYSTEM, None)}
TOOLED = {"tools": (WITH_TOOLS, TOOLS), "calls without tools": (WITH_TOOLS, None)}
CONVERSATIONS = {
    "chatml": EVERYONE | SYSTEM | ONE_MESSAGE,
    "chatml marked": EVERYONE | SYSTEM | ONE_MESSAGE,
    "qwen2.5": EVERYONE | SYSTEM | TOOLED,
    "qwen3": EVERYONE | SYSTEM | {"thinking": (THINKING, None)},
    "llama-3.1": EVERYONE | SYSTEM | TOOLED,
    "mistral": EVERYONE,
    "phi-3": EVERYONE | SYSTEM,
    "gemma": EVERYONE,
    "zephyr": EVERYONE | SYSTEM,
    "parts": EVERYONE
    | {"parts": ([user([{"type": "text", "text": t} for t in "ab"]), *SHORT[1:]], None)},
}


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    """By name of the template: our tokenizer, our template, transformers' tokenizer."""
    folder = tmp_path_factory.mktemp("chat")
    made = {}

    def of(name):
        if name not in made:
            path = write_chat_tokenizer(folder / name, TEMPLATES[name])
            ours = HfTokenizer(path)
            theirs = transformers.AutoTokenizer.from_pretrained(path)
            made[name] = ours, load_chat_template(ours), theirs
        return made[name]

    return of


@pytest.mark.parametrize("name", TEMPLATES)
def test_text_and_ids_are_those_of_transformers(tokenizers, name):
    ours, template, theirs = tokenizers(name)
    for messages, tools in CONVERSATIONS[name].values():
        for prompt in (False, True):
            text = template.render(messages, tools=tools, add_generation_prompt=prompt).text
            how = {"tools": tools, "add_generation_prompt": prompt}
            assert text == theirs.apply_chat_template(messages, tokenize=False, **how)
            ids, offsets = ours.encode_with_offsets([text])[0]
            assert ids.tolist() == theirs.apply_chat_template(messages, return_dict=False, **how)
            assert ids.tolist() == ours.encode(text)
            assert offsets[0, 0] == 0 and offsets[-1, 1] == len(text)
            assert (offsets[1:, 0] <= offsets[:-1, 1]).all()  # no character is lost


def trained_parts(tokenizers, name, messages, train_on="assistant", tools=None, **more):
    """The texts of the trained runs of tokens."""
    ours, template, _ = tokenizers(name)
    ((text, spans),) = Chat(template, train_on).texts(Conversation(messages, tools, **more))
    ids, offsets = ours.encode_with_offsets([text])[0]
    mask = token_mask(offsets, spans)
    edges = np.flatnonzero(np.diff(mask, prepend=False, append=False)).reshape(-1, 2)
    return [ours.decode(ids[start:end]) for start, end in edges]


TRAINED = {
    "chatml": [
        "on the mat. 42<|im_end|>\n",
        "the mat.\n\n<|im_end|>\n",
        "'cat'<|im_end|>\n",
    ],
    "llama-3.1": ["on the mat. 42<|eot_id|>", "the mat.<|eot_id|>", "'cat'<|eot_id|>"],
    "mistral": [" on the mat. 42</s>", " the mat.\n\n</s>", " 'cat'</s>"],
    "phi-3": ["on the mat. 42<|end|>", "the mat.\n\n<|end|>", "'cat'<|end|></s>"],
    "gemma": [
        "on the mat. 42<end_of_turn>\n",
        "the mat.<end_of_turn>\n",
        "'cat'<end_of_turn>\n",
    ],
    "zephyr": ["on the mat. 42</s>\n", "the mat.\n\n</s>\n", "'cat'</s>\n"],
}
TRAINED["qwen2.5"] = TRAINED["chatml"]
TRAINED["chatml marked"] = [part.removesuffix("\n") for part in TRAINED["chatml"]]


@pytest.mark.parametrize("name", TRAINED)
def test_what_is_trained(tokenizers, name):
    assert trained_parts(tokenizers, name, TURNS) == TRAINED[name]
    assert trained_parts(tokenizers, name, TURNS, "last") == TRAINED[name][-1:]
    (whole,) = trained_parts(tokenizers, name, TURNS, "all")
    ours, template, _ = tokenizers(name)
    assert whole == ours.decode(ours.encode(template.render(TURNS).text))
    if "system" in CONVERSATIONS[name]:
        assert trained_parts(tokenizers, name, WITH_SYSTEM) == TRAINED[name]


def test_calls_of_tools_are_trained_and_answers_are_not(tokenizers):
    call = '{"name": "weather", "arguments": {"city": "Zürich"}}'
    assert trained_parts(tokenizers, "qwen2.5", WITH_TOOLS, tools=TOOLS) == [
        f"<tool_call>\n{call}\n</tool_call><|im_end|>\n",
        "on the mat<|im_end|>\n",
    ]
    assert trained_parts(tokenizers, "llama-3.1", WITH_TOOLS, tools=TOOLS) == [
        '{"name": "weather", "parameters": {"city": "Zürich"}}<|eot_id|>',
        "on the mat<|eot_id|>",
    ]


@pytest.mark.parametrize("name", ["chatml marked"])
def test_marks_give_the_mask_of_transformers(tokenizers, name):
    ours, template, theirs = tokenizers(name)
    for messages, _ in (EVERYONE | SYSTEM).values():
        ((text, spans),) = Chat(template, "assistant").texts(Conversation(messages))
        ids, offsets = ours.encode_with_offsets([text])[0]
        expected = theirs.apply_chat_template(messages, return_assistant_tokens_mask=True)
        assert ids.tolist() == expected["input_ids"]
        assert token_mask(offsets, spans).astype(int).tolist() == expected["assistant_masks"]


def test_a_token_across_a_border_is_trained(tokenizers, tmp_path):
    """` mat` is one token; the template ends its prompt with the blank, and marks what follows."""
    source = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }} {% else %}"
    source += "{% generation %}{{ m.content }}{% endgeneration %}{% endif %}{% endfor %}"
    folder = write_chat_tokenizer(tmp_path / "t", source)
    ours, theirs = HfTokenizer(folder), transformers.AutoTokenizer.from_pretrained(folder)
    messages = [user("the"), assistant("cat")]
    ((text, spans),) = Chat(load_chat_template(ours), "assistant").texts(Conversation(messages))
    ids, offsets = ours.encode_with_offsets([text])[0]
    assert (text, spans) == ("the cat", [(4, 7)])
    assert [ours.decode([i]) for i in ids] == ["the", " cat"]
    mask = token_mask(offsets, spans).astype(int).tolist()
    assert mask == [0, 1]
    theirs = theirs.apply_chat_template(messages, return_assistant_tokens_mask=True)
    assert mask == theirs["assistant_masks"]


def test_qwen3_trains_the_last_turn_with_its_thinking(tokenizers):
    last = ["<think>\non\nthe mat\n</think>\n\nfour<|im_end|>\n"]
    assert trained_parts(tokenizers, "qwen3", THINKING, "last") == last
    assert trained_parts(tokenizers, "qwen3", THINKING[2:]) == last
    assert trained_parts(tokenizers, "qwen3", TURNS, "last") == [
        "<think>\n\n</think>\n\n'cat'<|im_end|>\n"
    ]
    with pytest.raises(DataError) as error:
        trained_parts(tokenizers, "qwen3", THINKING)
    assert str(error.value).startswith(
        "message 2 (assistant) cannot be found in the text: the chat template of "
        f"'{tokenizers('qwen3')[0].folder}' renders the messages up to it in another way when "
        "others follow; give --train-on each or last, or a --chat-template with {% generation %} "
        "marks, a file or one by its name: chatml, gemma2, "
    )
    # Each turn is the last one of its own document, as it is when the model writes it.
    template = tokenizers("qwen3")[1]
    documents = Chat(template, "each").texts(Conversation(THINKING))
    assert [text for text, _ in documents] == [
        template.render(THINKING[:end]).text for end in (2, 4)
    ]
    assert [[text[a:b] for a, b in spans] for text, spans in documents] == [
        ["<think>\nthe cat\n</think>\n\ntwo<|im_end|>\n"],
        last,
    ]
    # Where thinking stays in the text, because no other question follows, all can be found.
    several = [user("a"), assistant("b", reasoning_content="c"), tool("d"), THINKING[3]]
    assert trained_parts(tokenizers, "qwen3", several) == [
        "<think>\nc\n</think>\n\nb<|im_end|>\n",
        *last,
    ]


def test_marks_that_others_change_are_not_guessed():
    """Qwen3's thinking, marked: the last turn has a mark more than the ones before it."""
    source = """\
{% set ns = namespace(question=0) %}
{% for m in messages %}{% if m.role == 'user' %}{% set ns.question = loop.index0 %}{% endif %}
{% endfor %}
{%- for m in messages %}
{%- if m.role == 'user' %}{{ '<' + m.content + '>' }}{% else %}
{%- if loop.index0 > ns.question %}{% generation %}{{ '(so)' }}{% endgeneration %}{% endif %}
{%- generation %}{{ m.content + '.' }}{% endgeneration %}
{%- endif %}{%- endfor %}"""
    template = ChatTemplate({"default": source}, {}, "'t'")

    def parts(train_on, *answers):
        messages = [m for answer in answers for m in (user("q"), answer)]
        found = Chat(template, train_on).texts(Conversation(messages))
        return [[text[a:b] for a, b in spans] for text, spans in found]

    a, b = assistant("a"), assistant("b")
    assert parts("assistant", a, b) == [["a.", "(so)", "b."]]
    assert parts("last", a, b) == parts("assistant", a | {"weight": 0}, b) == [["(so)", "b."]]
    assert parts("each", a, b) == [["(so)", "a."], ["(so)", "b."]]
    assert parts("assistant", a, b | {"weight": 0}) == [["a."]]
    # Here a mark depends on whether anything follows at all.
    source = "{% for m in messages %}{% generation %}{{ m.content }}{{ '.' if loop.last }}"
    template = ChatTemplate({"default": source + "{% endgeneration %}{% endfor %}"}, {}, "'t'")
    with pytest.raises(DataError, match=r"the marks of message 2 \(assistant\) cannot be told"):
        parts("assistant", a, b | {"weight": 0})


def test_lists_of_texts(tokenizers):
    """A template that knows no lists gets the texts put together."""
    messages = [user([{"type": "text", "text": t} for t in ("the ", "cat")]), assistant("mat")]
    plain = [user("the cat"), assistant("mat")]
    for name in ("parts", "chatml"):
        got = trained_parts(tokenizers, name, messages, "all")
        assert got == trained_parts(tokenizers, name, plain, "all")


IDEFICS = """\
{% for m in messages %}{{ m['role'].capitalize() }}
{%- if m['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}
{%- for line in m['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}{% endif %}
{%- endfor %}<end_of_utterance>
{% endfor %}
{%- if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"""
SEVERAL = [{"type": "text", "text": t} for t in ("the ", "cat")]


def test_templates_of_parts_get_parts(tmp_path):
    """Idefics3's writes a text as nothing, and a template of texts the list as Python has it."""
    folder = write_chat_tokenizer(tmp_path / "t", IDEFICS)
    template = load_chat_template(HfTokenizer(folder))
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    parts = [user(SEVERAL), assistant([{"type": "text", "text": "mat"}])]
    for messages in (parts, [user("the cat"), assistant("mat")]):
        ((text, spans),) = Chat(template, "assistant").texts(Conversation(messages))
        assert text == theirs.apply_chat_template(parts, tokenize=False)
        assert text == "User: the cat<end_of_utterance>\nAssistant: mat<end_of_utterance>\n"
        assert [text[a:b] for a, b in spans] == [" mat<end_of_utterance>\n"]
    # Here the user's contents are texts or parts, which differ, and the assistant's are texts.
    source = """\
{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content + ';' }}
{%- elif m.content is string %}{{ m.content + ';' }}
{%- else %}{% for part in m.content %}{{ '<' + part.text + '>' }}{% endfor %}{% endif %}
{%- endfor %}"""
    template = ChatTemplate({"default": source}, {}, "'t'")
    assert template.render(parts).text == "<the ><cat>mat;"


def test_messages_of_which_no_word_is_written_are_refused():
    source = CHATML.replace("messages %}", "messages if m.role != 'tool' %}", 1)
    chat = Chat(ChatTemplate({"default": source}, {}, "'t'"), "assistant")
    with pytest.raises(DataError) as error:
        chat.texts(Conversation([*SHORT, tool("zero"), assistant("one")]))
    assert str(error.value) == (
        "message 3 (tool) is lost: the chat template of 't' writes no word of it"
    )
    assert chat.texts(Conversation([*SHORT, tool("\n"), assistant("cat")]))


GPT_OSS = """\
{% for m in messages %}{{ '<|start|>' + m.role }}
{%- if m.role == 'assistant' %}{{ '<|channel|>final' }}{% endif %}
{{- '<|message|>' + m.content }}
{%- if loop.last and m.role == 'assistant' and not add_generation_prompt %}{{ '<|return|>' }}
{%- else %}{{ '<|end|>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"""
METHARME = """\
{% for m in messages %}
{{- ('<|model|>' if m.role == 'assistant' else '<|user|>') + m.content }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|model|>' }}{% else %}{{ eos_token }}{% endif %}"""


@pytest.mark.parametrize(
    ("source", "parts", "said"),
    [
        (GPT_OSS, ["<|channel|>final<|message|>a<|end|>", "<|channel|>final<|message|>b<|return|>"],
         "the last turn with '<|return|>' and those before it with '<|end|>', and so they"),
        (METHARME, ["a", "b</s>"], "the last turn with '</s>' and those before it with 'nothing'"),
        (TEMPLATES["phi-3"], ["a<|end|>\n", "b<|end|>\n</s>"], None),
        (CHATML, ["a<|im_end|>\n", "b<|im_end|>\n"], None),
    ],
)  # fmt: skip
@pytest.mark.parametrize("eos", ["</s>", "<|return|>"])
def test_ends_of_earlier_turns(source, parts, said, eos):
    """Ends of earlier turns are trained; a warning says where these differ from the last end."""
    chat = Chat(ChatTemplate({"default": source}, {"eos_token": eos}, "'t'"), "assistant")
    talk = [user("p"), assistant("a"), user("q"), assistant("b")]
    ((text, spans),) = chat.texts(Conversation(talk))
    assert [text[a:b] for a, b in spans] == [part.replace("</s>", eos) for part in parts]
    assert [said.replace("</s>", eos) in text for text in chat.warnings()] == [True] * bool(said)
    assert Chat(chat.template, "each").warnings() == []


@pytest.mark.parametrize(
    ("name", "messages", "message"),
    [
        ("gemma", WITH_SYSTEM, "says: System role not supported"),
        ("mistral", [*SHORT, assistant("again")], "says: Roles must alternate"),
        ("llama-3.1", [user("a"), assistant(None, tool_calls=WITH_TOOLS[1]["tool_calls"] * 2)],
         "says: This model can make one call at a time"),
        ("qwen2.5", [user("a"), {"role": "asistant", "content": "b"}],
         "message 2 has the unknown role 'asistant': the template and llmq know system, "),
        ("gemma", [assistant("first")], "message 1 (assistant) cannot be found in the text"),
        ("chatml", [system("a"), user("b")], "there is no message of the assistant to train on"),
    ],
)  # fmt: skip
def test_bad_conversations(tokenizers, name, messages, message):
    with pytest.raises(DataError) as error:
        trained_parts(tokenizers, name, messages)
    assert message in str(error.value)


# ------------------------------------------------------------------------------------------------
# Where templates come from


def both(folder, **how):
    """The texts that we and transformers render with a folder's template."""
    template = load_chat_template(HfTokenizer(folder))
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    ours = template.render([user("x")], **how).text
    assert ours == theirs.apply_chat_template([user("x")], tokenize=False, **how)
    return ours


def test_several_templates(tmp_path):
    named = [{"name": name, "template": f"{name} {{{{ eos_token }}}}"} for name in ("default", "b")]
    folder = write_chat_tokenizer(tmp_path / "t", chat_template=named)
    assert both(folder) == both(folder, tools=TOOLS) == "default </s>"
    named[1]["name"] = "tool_use"
    folder = write_chat_tokenizer(tmp_path / "u", chat_template=named)
    assert [both(folder), both(folder, tools=TOOLS)] == ["default </s>", "b </s>"]
    tokenizer = HfTokenizer(folder)
    assert load_chat_template(tokenizer, "tool_use").source() == named[1]["template"]
    folder = write_chat_tokenizer(tmp_path / "v", chat_template=named[1:])
    with pytest.raises(DataError, match=r"has several chat templates \(tool_use\) and none is"):
        load_chat_template(HfTokenizer(folder)).source()


def test_files_win_over_the_configuration(tmp_path):
    folder = write_chat_tokenizer(tmp_path / "t", "config")
    assert both(folder) == "config"
    (folder / "chat_template.jinja").write_text("file")
    assert both(folder) == "file"
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    assert [both(folder), both(folder, tools=TOOLS)] == ["file", "tools"]


def test_special_tokens_in_a_template(tmp_path):
    source = "{{ bos_token }}|{{ eos_token }}|{{ pad_token }}|{{ unk_token is defined }}"
    folder = write_chat_tokenizer(
        tmp_path / "t", source, pad_token={"__type": "AddedToken", "content": "<p>"}
    )
    assert both(folder) == "<s>|</s>|<p>|False"
    (folder / "special_tokens_map.json").write_text(json.dumps({"pad_token": "<q>"}))
    assert both(folder) == "<s>|</s>|<q>|False"


def test_fields_that_are_null_are_absent(tmp_path):
    source = "{% for m in messages %}{{ m.name is defined }} {{ m.content }};{% endfor %}"
    folder = write_chat_tokenizer(tmp_path / "t", source)
    template = load_chat_template(HfTokenizer(folder))
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    messages = [user("x", name=None), user("x", name="y"), assistant(None)]
    text = template.render(messages).text
    assert text == theirs.apply_chat_template(messages, tokenize=False) == "False x;True x;False ;"


def test_no_template_and_broken_ones(tmp_path):
    folder = write_chat_tokenizer(tmp_path / "t")
    assert load_chat_template(HfTokenizer(folder)) is None
    assert load_chat_template(ByteTokenizer()) is None
    file = tmp_path / "given.jinja"
    for content, message in (
        ("{% for %}", "given.jinja' is no template: "),
        (b"\xff", "given.jinja' is not UTF-8 text"),
        (None, "cannot read the chat template"),
    ):
        file.unlink(missing_ok=True)
        if content is not None:
            file.write_bytes(content if isinstance(content, bytes) else content.encode())
        with pytest.raises(DataError, match=message):
            load_chat_template(HfTokenizer(folder), str(file))
    folder = write_chat_tokenizer(tmp_path / "u", chat_template=[{"name": "default"}])
    with pytest.raises(DataError, match="its chat_template is neither a text nor a list"):
        load_chat_template(HfTokenizer(folder))


def test_templates_run_in_a_sandbox(tmp_path):
    (tmp_path / "t.jinja").write_text("{{ messages.__class__.__mro__ }}")
    template = load_chat_template(ByteTokenizer(), str(tmp_path / "t.jinja"))
    with pytest.raises(DataError, match="unsafe"):
        template.render([user("x")])
    (tmp_path / "t.jinja").write_text("{{ messages.append(1) }}")
    with pytest.raises(DataError, match="is unsafe"):
        load_chat_template(ByteTokenizer(), str(tmp_path / "t.jinja")).render([user("x")])


def test_marks_in_a_macro_are_refused(tmp_path):
    source = "{% macro say(m) %}{% generation %}{{ m.content }}{% endgeneration %}{% endmacro %}"
    source += "{% for m in messages %}{{ '- ' ~ say(m) }}{% endfor %}"
    (tmp_path / "t.jinja").write_text(source)
    template = load_chat_template(ByteTokenizer(), str(tmp_path / "t.jinja"))
    with pytest.raises(DataError, match="inside of a macro"):
        template.render([user("x"), assistant("y")])


def test_bytes_know_their_characters():
    text = "aé漢<|endoftext|>👍\n"
    ((ids, offsets),) = ByteTokenizer().encode_with_offsets([text])
    assert ids.tolist() == ByteTokenizer().encode(text)
    places = [(0, 1), *[(1, 2)] * 2, *[(2, 3)] * 3, (3, 16), *[(16, 17)] * 4, (17, 18)]
    assert [tuple(pair) for pair in offsets.tolist()] == places


def test_offsets_without_trimming(tmp_path):
    """GPT-2's post-processor takes blanks out of a token's characters."""
    from tokenizers import Tokenizer, processors

    source = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %};"
    folder = write_chat_tokenizer(tmp_path / "t", source + "{% endfor %}")
    path = folder / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    tokenizer.save(str(path))
    ours = HfTokenizer(folder)
    ((text, spans),) = Chat(load_chat_template(ours), "assistant").texts(
        Conversation([assistant("a \n ")])
    )
    ids, offsets = ours.encode_with_offsets([text])[0]
    assert ours.decode(ids[token_mask(offsets, spans)]) == "a \n "
