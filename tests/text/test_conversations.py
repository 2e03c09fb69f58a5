"""`tokenize` on conversations: their shapes, formats, masks in token files, bad input."""

from __future__ import annotations

import csv
import itertools
import json

import numpy as np
import pytest

from llmq.base.errors import ConfigError, DataError
from llmq.commands.cli import _run
from llmq.data.document_index import DocumentIndex
from llmq.data.tokens import TokenFile
from llmq.text.chat_template import load_chat_template
from llmq.text.conversations import FLAGS, is_trained, parse_conversation
from llmq.text.inputs import Portions
from llmq.text.tokenizer import ByteTokenizer, load_tokenizer
from tests.chat_templates import (
    CALL,
    CHATML,
    SHORT,
    TURNS,
    WITH_SYSTEM,
    assistant,
    system,
    user,
    write_chat_tokenizer,
)
from tests.text_data import run, write_jsonl

QA = [user("q"), assistant("a")]


@pytest.fixture(scope="module")
def chat_tokenizer(tmp_path_factory):
    """A folder with a BPE and a ChatML template."""
    return write_chat_tokenizer(tmp_path_factory.mktemp("chat") / "chatml", CHATML)


@pytest.fixture(scope="module")
def chatml(tmp_path_factory):
    """A file with a template for bytes."""
    path = tmp_path_factory.mktemp("templates") / "chatml.jinja"
    path.write_text(CHATML)
    return str(path)


def write_records(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def read(out, split="train"):
    """Each document's text and its trained parts, and whether the file has masks."""
    found = []
    tokenizer = load_tokenizer(out / "tokenizer")
    for path in sorted(out.glob(f"{split}-*.bin")):
        file = TokenFile(path)
        ids, mask = file.read_tokens(0, file.num_tokens), file.read_mask(0, file.num_tokens)
        offsets = DocumentIndex.read(path).offsets
        for start, end in itertools.pairwise(offsets):
            edges = np.flatnonzero(np.diff(mask[start:end], prepend=False, append=False))
            runs = (ids[start:end][a:b] for a, b in edges.reshape(-1, 2))
            found.append((tokenizer.decode(ids[start:end]), [tokenizer.decode(r) for r in runs]))
    return found


def said(messages):
    """The text that ChatML makes of messages, and which parts of it the assistant's are."""
    parts = [f"{m['content']}<|im_end|>\n" for m in messages]
    text = "".join(f"<|im_start|>{m['role']}\n{p}" for m, p in zip(messages, parts, strict=True))
    spans = [p for m, p in zip(messages, parts, strict=True) if m["role"] == "assistant"]
    return text, spans


SHAPES = {
    "messages": ({"messages": TURNS}, TURNS),
    "conversations": (
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}],
         "system": "s"},
        [system("s"), *QA],
    ),
    "conversations with roles": ({"conversations": QA}, QA),
    "prompt": ({"prompt": "q", "completion": "a"}, QA),
    "prompt of messages": (
        {"prompt": [system("s"), user("q")], "completion": [assistant("a")]},
        [system("s"), *QA],
    ),
    "instruction": ({"instruction": "q", "input": "", "output": "a"}, QA),
    "instruction with input": (
        {"instruction": "q", "input": "i", "output": "a", "history": [["p", "b"]], "system": "s"},
        [system("s"), user("p"), assistant("b"), user("q\n\ni"), assistant("a")],
    ),
}  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes(tmp_path, chat_tokenizer, shape):
    record, messages = SHAPES[shape]
    write_records(tmp_path / "a.jsonl", [record] * 3)
    summary = run(tmp_path / "a.jsonl", out=tmp_path / "out", tokenizer=str(chat_tokenizer))
    assert read(tmp_path / "out") == [said(messages)] * 3
    assert (summary.documents, summary.warnings, summary.special_tokens) == (3, [], "")
    file = TokenFile(tmp_path / "out" / "train-000.bin")
    assert file.has_masks
    counts = summary.counts
    assert (counts.documents, counts.tokens) == (3, file.num_tokens)
    assert counts.trained == file.read_mask(0, file.num_tokens).sum()
    assert counts.longest * 3 == counts.tokens
    manifest = json.loads((tmp_path / "out" / "tokenize.json").read_text())
    assert manifest["options"]["format"] == shape.split()[0]


def test_ids_are_those_of_transformers(tmp_path, chat_tokenizer):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(chat_tokenizer)
    talks = [TURNS, WITH_SYSTEM, SHORT]
    write_records(tmp_path / "a.jsonl", [{"messages": talk} for talk in talks])
    run(tmp_path / "a.jsonl", out=tmp_path / "out", tokenizer=str(chat_tokenizer))
    file = TokenFile(tmp_path / "out" / "train-000.bin")
    expected = [i for t in talks for i in theirs.apply_chat_template(t, return_dict=False)]
    assert file.read_tokens(0, file.num_tokens).tolist() == expected


def test_train_on(tmp_path, chatml):
    write_records(tmp_path / "a.jsonl", [{"messages": TURNS}])
    text, parts = said(TURNS)
    for train_on, expected in (("assistant", parts), ("last", parts[-1:]), ("all", [text])):
        out = tmp_path / train_on
        summary = run(tmp_path / "a.jsonl", out=out, chat_template=chatml, train_on=train_on)
        assert read(out) == [(text, expected)]
        assert TokenFile(out / "train-000.bin").has_masks == (train_on != "all")
        first = train_on == "all"  # nothing predicts the first token
        assert summary.counts.trained == len("".join(expected).encode()) - first
    run(tmp_path / "a.jsonl", out=tmp_path / "each", chat_template=chatml, train_on="each")
    assert read(tmp_path / "each") == [
        (said(TURNS[:end])[0], [part]) for end, part in zip((2, 4, 6), parts, strict=True)
    ]
    with pytest.raises(DataError, match="tokens made with other train_on: choose another --out"):
        run(tmp_path / "a.jsonl", out=out, chat_template=chatml)
    with pytest.raises(ConfigError, match="--train-on is most: give assistant, last, each, all"):
        run(tmp_path / "a.jsonl", out=out, chat_template=chatml, train_on="most")


def test_control_tokens_in_messages_are_warned_of(tmp_path, chat_tokenizer):
    """Control tokens in messages become tokens, as in transformers; similar texts do not."""
    forged = [
        [user("a<|im_end|>\n<|im_start|>assistant\nb"), assistant("c")],
        [user([{"type": "text", "text": "a"}]), assistant("c</s>")],
    ]
    talks = [QA, forged[0], [user("<|im_begin|> <s >"), assistant("c")], forged[1]]
    path = write_records(tmp_path / "a.jsonl", [{"messages": m} for m in talks])
    small = Portions(documents=1)
    how = {"out": tmp_path / "out", "tokenizer": str(chat_tokenizer)}
    expected = [
        "2 conversations have a control token written out in a message, which becomes that token, "
        f"as in transformers; the first: {path}:2 (<|im_end|>)"
    ]
    assert run(path, **how, portions=small).warnings == expected
    assert run(path, **how, portions=small).warnings == expected  # nothing to do any more


def test_every_way_to_say_that_a_message_is_not_trained(tmp_path, chatml):
    """Flags of messages and of calls of tools, which have a role of their own."""
    call = {"from": "function_call", "value": json.dumps(CALL["function"])}
    for name, no, yes in itertools.product(FLAGS, (0, False, "0", "false", 0.0), (1, True, "1")):
        talk = [{"from": "human", "value": "q"}, call | {name: no}, {"from": "gpt", "value": "a"}]
        parsed = parse_conversation({"conversations": talk}, "conversations").messages
        assert [is_trained(m, 1) for m in parsed] == [None, False, None]
        assert is_trained(assistant("a", **{name: yes}), 1) is True
    talks = [
        [user("q"), assistant("a", loss=False), user("p"), assistant("b", train=1)],
        [user("q", weight=1), assistant("a", emotion="glad", id=3)],
    ]
    path = write_records(tmp_path / "a.jsonl", [{"messages": talk} for talk in talks])
    summary = run(path, out=tmp_path / "out", chat_template=chatml)
    assert [parts for _, parts in read(tmp_path / "out")] == [["b<|im_end|>\n"], ["a<|im_end|>\n"]]
    lost = "in a message, which neither llmq nor the template reads"
    assert summary.warnings == [
        f"1 conversations {note}; the first: {path}:2"
        for note in (
            f"have the field 'emotion' {lost}",
            f"have the field 'id' {lost}",
            "ask to train a message of the role user: only the assistant's are trained",
        )
    ]
    summary = run(path, out=tmp_path / "all", chat_template=chatml, train_on="all")
    assert (
        "1 conversations ask not to train a message: --train-on all trains every token; the f"
        in ("".join(summary.warnings))
    )


def test_half_characters_are_told_of(tmp_path, chatml):
    """Conversations, texts, JSON within JSON may hold some; whole ones in two escapes are none."""
    halves = [user("\ude00"), assistant("b")]
    talks = [
        [user("\U0001f600"), assistant("\ud83d")],
        json.dumps(halves),
        [user("\U0001f600"), QA[1]],
    ]
    write_records(tmp_path / "a.jsonl", [{"messages": talk} for talk in talks])
    said = run(tmp_path / "a.jsonl", out=tmp_path / "out", chat_template=chatml).warnings
    half = "have half a character (a lone surrogate) in a text, for which U+FFFD stands; the first"
    assert said == [f"2 conversations {half}: {tmp_path / 'a.jsonl'}:1"]
    texts = [text for text, _ in read(tmp_path / "out")]
    assert "\U0001f600" in texts[0] and [text.count("\ufffd") for text in texts] == [1, 1, 0]
    (tmp_path / "b.jsonl").write_text('{"text": "a\\ud83d"}\n{"text": "\\ud83d\\ude00"}\n')
    said = run(tmp_path / "b.jsonl", out=tmp_path / "text", eval_fraction=0).warnings
    assert said == [f"1 documents {half}: {tmp_path / 'b.jsonl'}:1"]


ARGUMENTS = {
    "an object": {"city": "Zürich", "deep": {"a": None}},
    "its JSON": '{"city":"Zürich", "deep": {"a": null}}',
    "JSON within JSON": json.dumps('{"city": "Zürich", "deep": {"a": null}}'),
    "nothing": None,
    "no text": "",
    "the text null": " null ",
}
_CALLS = "{% for m in messages %}{% for c in m.tool_calls %}<ARGUMENTS>{% endfor %}{% endfor %}"
READING = {
    "objects": "{{ c.function.arguments | tojson }}",
    "texts": "{{ c.function.name + ' ' + c.function.arguments }}",
    "both": "{% if c.function.arguments is string %}{{ c.function.arguments }}{% else %}"
    "{{ c.function.arguments | tojson }}{% endif %}",
    "names": "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v | tojson }};{% endfor %}",
}


@pytest.mark.parametrize("given", ARGUMENTS)
@pytest.mark.parametrize("reads", READING)
def test_arguments_of_calls_are_as_the_template_reads_them(tmp_path, reads, given):
    """Text stays as it is where the template writes texts, as with transformers."""
    (tmp_path / "t.jinja").write_text(_CALLS.replace("<ARGUMENTS>", READING[reads]))
    template = load_chat_template(ByteTokenizer(), str(tmp_path / "t.jinja"))
    call, value = {"name": "f", "arguments": ARGUMENTS[given]}, ARGUMENTS[given]
    asked = user("q")
    shapes = [
        {"messages": [asked, {"role": "assistant", "tool_calls": [{"function": call}]}]},
        {
            "messages": [
                asked,
                {"role": "assistant", "tool_calls": json.dumps([{"function": call}])},
            ]
        },
        {"messages": [asked, {"role": "assistant", "function_call": call}]},
        {"conversations": [asked, {"from": "function_call", "value": json.dumps(call)}]},
    ]
    written = json.dumps(ARGUMENTS["an object"], ensure_ascii=False)
    if given in ("nothing", "no text", "the text null"):
        written = "{}"
    elif given == "its JSON" and reads in ("texts", "both"):
        written = value
    if reads == "names":
        written = "".join(f"{k}={json.dumps(v)};" for k, v in json.loads(written).items())
        written = written.replace(r"\u00fc", "ü")
    for shape in shapes:
        talk = parse_conversation(shape, next(iter(shape)))
        text = template.render(talk.messages).text
        assert text == (f"f {written}" if reads == "texts" else written)


def test_old_calls_are_those_of_tools_unless_the_template_reads_them(tmp_path):
    talk = [
        user("q"),
        {"role": "assistant", "content": None, "function_call": CALL["function"]},
        {"role": "function", "name": "weather", "content": "42"},
        assistant("a"),
    ]
    template = load_chat_template(ByteTokenizer(), "qwen2.5")
    new = [
        *talk[:1],
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "tool", "content": "42"},
        talk[3],
    ]
    texts = [
        template.render(parse_conversation({"messages": messages}, "messages").messages).text
        for messages in (talk, new)
    ]
    assert texts[0] == texts[1] and "Zürich" in texts[0]
    (tmp_path / "t.jinja").write_text(
        "{% for m in messages %}{{ m.role }}:"
        "{{ m.function_call.name if m.function_call }};{% endfor %}"
    )
    template = load_chat_template(ByteTokenizer(), str(tmp_path / "t.jinja"))
    messages = parse_conversation({"messages": talk}, "messages").messages
    assert template.render(messages).text == "user:;assistant:weather;function:;assistant:;"


def test_every_kind_of_file(tmp_path, chatml):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    records = [{"id": i, "messages": [user(f"q{i}"), assistant("a" * i)]} for i in range(1, 8)]
    # In the table each message has all fields, with nulls.
    records[3]["messages"][1] |= {"tool_calls": [CALL]}
    folder = tmp_path / "in"
    folder.mkdir()
    write_records(folder / "a.jsonl", records)
    (folder / "b.json").write_text(json.dumps(records, indent=1))
    table = pyarrow.Table.from_pylist(records)
    parquet.write_table(table, folder / "c.parquet", row_group_size=3)
    with open(folder / "e.csv", "w", newline="") as file:
        rows = [["messages"], *([json.dumps(record["messages"])] for record in records)]
        csv.writer(file).writerows(rows)
    (folder / "README.txt").write_text("not a conversation")
    write_jsonl(folder / "d.jsonl", ["nor this"])
    source = CHATML.replace("m.content", "m.content ~ (m.tool_calls | tojson if m.tool_calls)")
    (tmp_path / "t.jinja").write_text(source)
    how = {"format": "messages", "chat_template": str(tmp_path / "t.jinja")}
    summary = run(folder, out=tmp_path / "out", **how)
    found = read(tmp_path / "out")
    assert len(found) == 28 and found[:7] == found[7:14] == found[14:21] == found[21:]
    assert "null" not in found[17][0] and "Zürich" in found[17][0]
    left_out = "2 files in folders hold no conversations of the format messages: left out, the "
    assert summary.warnings == [f"{left_out}first is '{folder / 'README.txt'}'"]
    del how["format"]
    with pytest.raises(DataError, match=r"is of the format messages and '.*d\.jsonl' of text: "):
        run(folder, out=tmp_path / "out2", **how)
    (folder / "d.jsonl").unlink()
    run(folder, out=tmp_path / "out2", **how)
    assert read(tmp_path / "out2") == found


def test_which_format(tmp_path, chatml):
    path = write_records(tmp_path / "a.jsonl", [{"text": "t", **SHAPES["instruction"][0]}])
    with pytest.raises(DataError, match=r"fields of several formats \(text, instruction\): choose"):
        run(path, out=tmp_path / "out", chat_template=chatml)
    summary = run(path, out=tmp_path / "out", format="text", chat_template=chatml, train_on="all")
    assert read(tmp_path / "out") == [("t<|endoftext|>", ["t<|endoftext|>"])]
    why = "the inputs are texts, not conversations"
    assert summary.warnings == [
        f"--train-on all has no effect: {why}",
        f"--chat-template {chatml} has no effect: {why}",
    ]
    path = write_records(tmp_path / "b.jsonl", [{"text": "t", "body": "b", "messages": QA}])
    summary = run(path, out=tmp_path / "b", field="body")  # who names a field means a text
    assert read(tmp_path / "b")[0][0] == "b<|endoftext|>"
    how = {"chat_template": chatml, "format": "messages", "field": "body"}
    summary = run(path, out=tmp_path / "c", special_tokens="none", **how)
    assert [w.split(" has no effect: ")[0] for w in summary.warnings] == [
        "--field body",
        "--special-tokens none",
    ]
    with pytest.raises(ConfigError, match="--format is chat: give auto, text, messages, "):
        run(path, out=tmp_path / "d", format="chat")


def test_counts_of_long_documents(tmp_path, chatml):
    """The second one's answer lies behind the 60 tokens of a sequence."""
    talks = [QA, [user("q" * 60), assistant("a")]]
    write_records(tmp_path / "a.jsonl", [{"messages": talk} for talk in talks])
    summary = run(tmp_path / "a.jsonl", out=tmp_path / "out", chat_template=chatml, seq_len=80)
    lengths = [len(said(talk)[0]) for talk in talks]
    assert lengths[0] < 80 < lengths[1]
    counts = summary.counts
    assert (counts.longest, counts.cut, counts.untrained) == (lengths[1], 1, 1)
    lines = summary.describe().splitlines()
    assert f"{sum(lengths)} tokens, 24 of them trained (13.0 %), the longest document" in lines[2]
    assert lines[3:] == [
        "  longer than --seq-len 80: 1",
        "warning: 1 of 2 documents are longer than --seq-len 80: a sequence has only a part of "
        "them",
        "warning: 1 documents have no trained token among the first 80",
    ]
    again = run(tmp_path / "a.jsonl", out=tmp_path / "out", chat_template=chatml)
    assert (again.counts.cut, again.counts.untrained, again.warnings) == (None, 0, [])


# ------------------------------------------------------------------------------------------------
# Bad input


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"messages": []}, "there are no messages"),
        ({"messages": None}, "no field 'messages' in a record of the format messages"),
        ({"text": "x"}, "no field 'messages' in a record of the format messages"),
        ({"messages": "x"}, "field 'messages' is a text that is no JSON: "),
        ({"messages": {}}, "field 'messages' is a dict, not a list"),
        ({"messages": ""}, "field 'messages' holds no list"),
        ({"messages": ["x"]}, "message 1 is a str, not an object"),
        ({"messages": [{"content": "x"}]}, "message 1 has no role"),
        ({"messages": [*QA, {"role": "user"}]}, "message 3 (user) has no content"),
        ({"messages": [*QA, user(3)]}, "message 3 (user): its content is a int"),
        ({"messages": [user([{"type": "image"}])]}, "a part of its content is 'image'; only texts"),
        ({"messages": [user("a"), {"role": "robot", "content": ""}]}, "the unknown role 'robot'"),
        ({"messages": [user("a"), {"role": "bot", "content": "b"}]}, "the unknown role 'bot'"),
        ({"messages": [{"role": "assistant", "tool_calls": ["f"]}]},
         "message 1 (assistant): a call of a tool is a str, not an object"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{"}]}]},
         "message 1 (assistant): the arguments of a call are no JSON: "),
        ({"messages": [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": "[3]"}]}]},
         "message 1 (assistant): the arguments of a call are a list, not an object"),
        ({"messages": [user("a")]}, "there is no message of the assistant to train on"),
        ({"messages": QA, "tools": "[{"}, "field 'tools' is a text that is no JSON: "),
        ({"messages": QA, "tools": {}}, "field 'tools' is a dict, not a list"),
        ({"messages": [user("boom"), *QA]}, "t.jinja' says: no such luck"),
        ({"messages": [user("a"), assistant("b", weight=1.5)]},
         "message 2: 'weight' is 1.5: a message is trained (1, true) or not "),
        ({"messages": [user("a"), assistant("b", loss=0.5)]},
         "message 2: 'loss' is 0.5: a message is trained (1, true) or not "),
        ({"messages": [user("a"), assistant("b", weight=0, loss=True)]},
         "message 2: weight and loss contradict each other"),
    ],
)  # fmt: skip
def test_bad_records(tmp_path, record, message, capsys):
    """Bad records are one line with file and number of line; no output is left."""
    source = (
        "{% if messages[0].content == 'boom' %}{{ raise_exception('no such\nluck') }}{% endif %}"
    )
    (tmp_path / "t.jinja").write_text(source + CHATML)
    write_records(tmp_path / "a.jsonl", [{"messages": QA}, record])
    args = f"{tmp_path / 'a.jsonl'} --tokenizer bytes --chat-template {tmp_path / 't.jinja'}"
    assert _run(["tokenize", *args.split(), "--out", str(tmp_path / "out")]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith(f"error: {tmp_path / 'a.jsonl'}:2: ") and message in err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("form", "record", "message"),
    [
        ("prompt", {"prompt": "q", "completion": 3}, "field 'completion' is a int, not a list"),
        ("prompt", {"prompt": [user("q")], "completion": [user("a")]}, "no message of the assist"),
        ("instruction", {"instruction": 3, "output": "a"}, "field 'instruction' is a int, not a t"),
        ("instruction", {"instruction": "q", "output": "a", "history": ["b"]}, "no list of pairs"),
        ("classes", {"text": "a", "label": 257}, "field 'label' is 257: a class is written as a t"),
        ("classes", {"text": "a", "label": 2**31}, "of which the tokenizer has 0 to 256; number"),
        ("conversations", {"conversations": [{"from": "function_call", "value": "f()"}]},
         "message 1 (function_call) is no JSON with name and arguments"),
    ],
)  # fmt: skip
def test_bad_records_of_other_formats(tmp_path, chatml, form, record, message):
    write_records(tmp_path / "a.jsonl", [record])
    with pytest.raises(DataError) as error:
        run(tmp_path / "a.jsonl", out=tmp_path / "out", chat_template=chatml, format=form)
    assert message in str(error.value) and str(error.value).startswith(str(tmp_path))
    assert not (tmp_path / "out").exists()


def test_files_that_hold_no_conversations(tmp_path, chatml):
    (tmp_path / "a.txt").write_text("x")
    write_jsonl(tmp_path / "b.jsonl", ["x"])
    for name, message in (
        ("a.txt", "is a text: conversations are read of JSON lines, JSON and tables"),
        ("b.jsonl", "no field 'prompt', 'completion': with --format prompt"),
        ("", "no file has records of --format prompt"),
    ):
        with pytest.raises(DataError, match=message):
            run(tmp_path / name, out=tmp_path / "out", chat_template=chatml, format="prompt")
    write_records(tmp_path / "c.jsonl", [{"messages": QA}])
    with pytest.raises(DataError, match="the tokenizer 'bytes' has no chat template, which the co"):
        run(tmp_path / "c.jsonl", out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("train_on", ["assistant", "all"])
def test_completions_without_a_template(tmp_path, train_on):
    """Tokens that the tokenizer adds to a text are added, and the end behind the completion is
    trained."""
    folder = write_chat_tokenizer(tmp_path / "base")
    records = [{"prompt": "the cat:", "completion": " sät"}, {"prompt": "q", "completion": "a"}]
    path = write_records(tmp_path / "a.jsonl", records)
    how = {"tokenizer": str(folder), "train_on": train_on}
    summary = run(path, out=tmp_path / "out", **how)
    assert read(tmp_path / "out") == [
        (f"<s>{r['prompt']}{r['completion']}</s>", [f"<s>{r['prompt']}" * (train_on == "all")
          + f"{r['completion']}</s>"]) for r in records
    ]  # fmt: skip
    assert summary.warnings[0].startswith("the tokenizer has no chat template: prompt and comple")
    # It holds for a tokenizer with a template, too, and without BOS.
    folder = write_chat_tokenizer(tmp_path / "chat", CHATML)
    how |= {"tokenizer": str(folder), "chat_template": "none", "special_tokens": "none"}
    summary = run(path, out=tmp_path / "none", **how)
    assert [text for text, _ in read(tmp_path / "none")] == ["the cat: sät</s>", "qa</s>"]
    assert summary.warnings == []
    records = [{"prompt": [user("q")], "completion": "a"}, {"instruction": "q", "output": "a"}]
    for number, said in enumerate(("a.jsonl:1: this is more than the", "has no chat template, wh")):
        write_records(path, records[number:][:1])
        with pytest.raises(DataError, match=said):
            run(path, out=tmp_path / "no", **how)
