"""`tokenize` adds the special tokens that transformers adds, and reads no earlier output."""

from __future__ import annotations

import json
import shutil

import pytest
from tokenizers import Tokenizer, processors

from llmq.base.errors import ConfigError
from llmq.text.inputs import Portions
from llmq.text.tokenizer import END_OF_TEXT, HfTokenizer
from tests.text_data import encoded, ids, mixed_text, run, write_bpe, write_jsonl

BOS, EOS = "<s>", "</s>"


def make_tokenizer(folder, template=None, config=None, eos=EOS):
    """A BPE with a BOS and an EOS; template: of its post-processor."""
    folder.mkdir()
    path = write_bpe(folder) / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.add_special_tokens([BOS, EOS])
    if template is not None:
        pairs = [(t, tokenizer.token_to_id(t)) for t in (BOS, EOS, END_OF_TEXT) if t in template]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=template, special_tokens=pairs
        )
    tokenizer.save(str(path))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BOS, "eos_token": eos}
    (folder / "tokenizer_config.json").write_text(json.dumps(names | (config or {})))
    return folder


TOKENIZERS = {
    "none": ({}, [], []),
    "bos": ({"template": f"{BOS} $A"}, [BOS], []),
    "both": ({"template": f"{BOS} $A {EOS}"}, [BOS], [EOS]),
    "several": (
        {"template": f"{BOS} {END_OF_TEXT} $A {END_OF_TEXT}"},
        [BOS, END_OF_TEXT],
        [END_OF_TEXT],
    ),
    "config beside a file": (
        {"template": f"{BOS} $A", "config": {"add_bos_token": False, "add_eos_token": True}},
        [BOS],
        [],
    ),
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_special_tokens_are_those_of_transformers(tmp_path, name):
    transformers = pytest.importorskip("transformers")
    kwargs, before, after = TOKENIZERS[name]
    folder = make_tokenizer(tmp_path / "t", **kwargs)
    ours, theirs = HfTokenizer(folder), transformers.AutoTokenizer.from_pretrained(folder)
    sides = [[theirs.convert_tokens_to_ids(t) for t in side] for side in (before, after)]
    assert [*ours.added] == sides
    texts = ["one text", f"{BOS}two{EOS}", "three " * 9]
    write_jsonl(tmp_path / "a.jsonl", texts)
    run(tmp_path / "a.jsonl", out=tmp_path / "out", tokenizer=str(folder))
    end = [] if ours.eos_id in sides[1] else [ours.eos_id]
    expected = [token for text in texts for token in [*theirs(text)["input_ids"], *end]]
    assert ids(tmp_path / "out") == expected


def test_what_was_added_is_said(tmp_path):
    folder = make_tokenizer(tmp_path / "t", f"{BOS} $A {EOS}")
    write_jsonl(tmp_path / "a.jsonl", ["text", "", "more"])
    tokenizer = HfTokenizer(folder)
    one, two = (tokenizer.encode(token)[0] for token in (BOS, EOS))
    summary = run(tmp_path / "a.jsonl", out=tmp_path / "out", tokenizer=str(folder))
    said = f"special tokens of each document: {BOS} ({one}) before it, {EOS} ({two}) behind it"
    assert summary.describe().endswith(said)
    manifest = json.loads((tmp_path / "out" / "tokenize.json").read_text())
    assert manifest["options"]["special_tokens"] == [[one], [two]]
    text, more = tokenizer.encode("text"), tokenizer.encode("more")
    assert ids(tmp_path / "out") == [one, *text, two, one, *more, two]  # nothing for no text
    kwargs = {"out": tmp_path / "none", "tokenizer": str(folder), "special_tokens": "none"}
    assert "special tokens" not in run(tmp_path / "a.jsonl", **kwargs).describe()
    assert ids(tmp_path / "none") == [*text, two, *more, two]
    assert run(tmp_path / "a.jsonl", out=tmp_path / "bytes").special_tokens == ""
    with pytest.raises(ConfigError, match="--special-tokens is some: give auto or none"):
        run(tmp_path / "a.jsonl", **kwargs | {"special_tokens": "some"})


def test_a_long_text_has_them_once(tmp_path):
    small = Portions(size=400)
    folder = make_tokenizer(tmp_path / "t", f"{BOS} $A {EOS}")
    (tmp_path / "in").mkdir()
    for name in ("a", "b"):
        (tmp_path / "in" / f"{name}.txt").write_text(mixed_text(3000))
    tokenizer = HfTokenizer(folder)
    one, two = (tokenizer.encode(token)[0] for token in (BOS, EOS))
    for workers in (1, 2):
        out = tmp_path / str(workers)
        run(tmp_path / "in", out=out, tokenizer=str(folder), workers=workers, portions=small)
        found = ids(out)
        middle = len(found) // 2
        assert found[:middle] == found[middle:] and found.count(one) == found.count(two) == 2
        assert (found[0], found[-1]) == (one, two)


def test_an_earlier_output_is_no_input(tmp_path):
    source = tmp_path / "in"
    source.mkdir()
    (source / "a.txt").write_text("the text")
    run(source, out=source / "one", eval_fraction=0.5)
    (source / "notes").mkdir()
    (source / "notes" / "tokenize.json").write_text('{"text": "mine"}')
    (source / "one" / "more.txt").write_text("more")
    shutil.copytree(source / "one" / "tokenizer", source / "tokenizer")  # nothing says it is ours
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        (source / "tokenizer" / name).unlink()
    (source / "tokenizer" / "tokenizer.json").write_text("5")
    summary = run(source, out=source / "two")
    assert ids(source / "two") == encoded("the text", "mine", "more", "5")
    assert summary.warnings == []
    again = run(source, out=source / "two")
    assert again.was_complete, "the inputs are the same as before"


def test_an_input_folder_may_be_the_output(tmp_path):
    (tmp_path / "a.txt").write_text("the text")
    run(tmp_path, out=tmp_path)
    assert run(tmp_path, out=tmp_path).was_complete
    assert ids(tmp_path) == encoded("the text")
