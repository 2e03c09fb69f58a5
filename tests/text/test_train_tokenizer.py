"""A tokenizer of one's own text: its files, the same ids everywhere, and a model that uses it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer

import tests.text_data
from llmq.base.errors import ConfigError, DataError
from llmq.commands.cli import _run
from llmq.options.presets import PRESETS
from llmq.text.chat_template import end_of_turn, load_chat_template
from llmq.text.tokenizer import END_OF_TEXT, HfTokenizer
from llmq.text.train_tokenizer import train_tokenizer
from tests.runs import flags, records
from tests.text.test_tokenizer_config import TEXT, export
from tests.text_data import documents, ids, write_jsonl

SIZE = 400
CHAT = ("<|im_start|>", "<|im_end|>")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "a.jsonl"
    source = Path(tests.text_data.__file__).read_text().split("\n\n")
    return write_jsonl(path, [*documents(20), *source, f"x{END_OF_TEXT}y " * 9, "don't stop"])


@pytest.fixture(scope="module")
def trained(text, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained") / "tokenizer"
    result = train_tokenizer(
        [str(text)],
        vocab_size=SIZE,
        out=folder,
        special_tokens=["<tool>"],
        chat_template="ChatML",
    )
    assert result.warnings == [] and result.vocab_size == SIZE
    assert f"Tokenizer of {SIZE} tokens written to {folder}" in result.describe()
    return folder


def test_bytes_come_first_and_special_tokens_last(trained):
    tokenizer = HfTokenizer(trained)
    vocabulary = Tokenizer.from_file(str(trained / "tokenizer.json")).get_vocab()
    assert sorted(vocabulary.values()) == list(range(SIZE))
    special = [END_OF_TEXT, *CHAT, "<tool>"]
    assert [vocabulary[token] for token in special] == list(range(SIZE - 4, SIZE))
    assert (tokenizer.eos_id, tokenizer.bos_id, tokenizer.added) == (SIZE - 4, SIZE - 4, ([], []))
    assert all(id < 256 for token, id in vocabulary.items() if len(token) == 1)
    assert not any("endof" in token for token in vocabulary.keys() - {END_OF_TEXT})
    anything = "".join(map(chr, range(1, 700)))
    assert tokenizer.decode(tokenizer.encode(anything)) == anything


def test_the_same_text_makes_the_same_files(text, trained, tmp_path, monkeypatch):
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    options = {"vocab_size": SIZE, "special_tokens": ["<tool>"], "chat_template": "chatml"}
    train_tokenizer([str(text)], out=tmp_path / "again", **options)
    assert contents(tmp_path / "again") == contents(trained)
    with pytest.raises(DataError, match=r"tokenizer\.json' is there: choose another --out, or"):
        train_tokenizer([str(text)], out=tmp_path / "again", **options)
    (tmp_path / "again" / "vocab.json").write_text("{}")  # of another tokenizer
    train_tokenizer([str(text)], out=tmp_path / "again", overwrite=True, **options)
    assert contents(tmp_path / "again") == contents(trained)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("preset", [None, *(name for name in PRESETS if name.startswith("tiny"))])
def test_transformers_makes_the_same_ids(trained, tmp_path, preset):
    transformers = pytest.importorskip("transformers")
    folder = trained if preset is None else export(tmp_path / "out", preset, trained)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    text = f"{TEXT} don't e\u0301{END_OF_TEXT}<|im_start|>user<tool>"
    assert theirs(text)["input_ids"] == HfTokenizer(trained).encode(text)
    assert theirs.eos_token_id == HfTokenizer(trained).eos_id
    # Qwen3.5 with experts has a class by its type, whose words have marks in them.
    other = preset == "tiny-qwen3.5-moe"
    assert Path(folder, "tokenization_exact.py").exists() == other
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]
    said = "<|im_start|>user\nHi<|im_end|>\n"
    answered = said + "<|im_start|>assistant\nYes<|im_end|>\n"
    asked = {"tokenize": False, "add_generation_prompt": True}
    assert theirs.apply_chat_template(chat, tokenize=False) == answered
    ours = load_chat_template(HfTokenizer(folder))
    assert ours.render(chat).text == answered
    end = HfTokenizer(folder).encode("<|im_end|>")[0]
    assert end_of_turn(ours, HfTokenizer(folder)).ids[0] == end
    assert theirs.apply_chat_template(chat[:1], **asked) == said + "<|im_start|>assistant\n"


def test_a_text_with_few_patterns_makes_fewer_tokens(tmp_path):
    (tmp_path / "a.txt").write_text("abab ab\n")
    result = train_tokenizer([str(tmp_path / "a.txt")], vocab_size=300, out=tmp_path / "t")
    assert result.vocab_size == 258  # the bytes, "ab" and the end of the text
    assert result.bytes_per_token == 8 / 5
    assert result.warnings == ["the text has patterns for 258 tokens only, not for 300"]
    assert HfTokenizer(tmp_path / "t").encode("ab" + END_OF_TEXT) == [256, 257]


def test_what_cannot_be_made(text, tmp_path):
    def make(*inputs, **options):
        given = {"vocab_size": SIZE, "out": tmp_path / "t"} | options
        return train_tokenizer([*map(str, inputs)] or [str(text)], **given)

    template = tmp_path / "template"
    template.write_text("{{ '<|user|>' }}")
    (tmp_path / "blank.txt").touch()
    (tmp_path / "bad").write_text("{% for")
    for error, said, given in (
        (
            ConfigError,
            "--vocab-size: 258 is too small: 256 bytes and 3 special",
            {"vocab_size": 258},
        ),
        (ConfigError, "--special-token: <a> is there already", {"special_tokens": ["<a>", "<a>"]}),
        (ConfigError, "--special-token: .* is there already", {"special_tokens": [END_OF_TEXT]}),
        (ConfigError, "--special-token: ' ' is no token", {"special_tokens": [" "]}),
        (ConfigError, r"--special-token: '\\udcff' is no token", {"special_tokens": ["\udcff"]}),
        (DataError, "--chat-template none: there is neither", {"chat_template": "none"}),
        (DataError, "is no template: ", {"chat_template": str(tmp_path / "bad")}),
        (DataError, "no field 'body'", {"field": "body"}),
    ):
        with pytest.raises(error, match=said):
            make(**{"chat_template": "chatml"} | given)
    with pytest.raises(DataError, match="there is no text in the 1 inputs"):
        make(tmp_path / "blank.txt")
    assert not (tmp_path / "t").exists()
    (warning,) = make(chat_template=str(template)).warnings
    assert warning.startswith("--chat-template writes <|user|>: no special tokens without")
    assert (tmp_path / "t" / "chat_template.jinja").read_text() == template.read_text()


def test_own_bpe_from_scratch(text, tmp_path, monkeypatch, capsys):
    """The recipe of docs/data.md: tokenizer, token files, a model with its vocabulary, export."""
    transformers = pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LLMQ_CACHE_DIR", str(tmp_path / "cache"))
    shutil.copy(text, "a.jsonl")
    own = "train-tokenizer a.jsonl --vocab-size 300 --out data/tokenizer --chat-template chatml"
    assert _run(own.split()) == 0
    made = "tokenize a.jsonl --tokenizer data/tokenizer --out data/own --eval-fraction 0.2"
    assert _run(made.split()) == 0, capsys.readouterr().err
    files = {"train-file": "data/own/train*.bin", "eval-file": "data/own/eval*.bin"}
    sizes = {"hidden-size": 32, "num-heads": 2, "intermediate-size": 64, "num-layers": 1}
    run = flags(model="tiny", steps=1, **files, **sizes, **{"vocab-size": "auto"})
    assert _run(["train", *run]) == 0, capsys.readouterr().err
    assert {r["name"]: r["value"] for r in records("option")}["vocab-size"] == 300
    config = json.loads(Path("out/config.json").read_text())
    assert (config["vocab_size"], config["eos_token_id"]) == (300, 297)
    theirs = transformers.AutoTokenizer.from_pretrained("out")
    documents = [json.loads(line)["text"] for line in Path("a.jsonl").read_text().splitlines()]
    count = sum(len(theirs(text)["input_ids"]) + 1 for text in documents)
    assert len(ids("data/own")) + len(ids("data/own", "eval")) == count
    assert theirs.chat_template is not None
