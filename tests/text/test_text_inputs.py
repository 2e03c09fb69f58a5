"""Sources of text beside plain files: templates, packed files, standard input, data sets of the
hub. No network: a data set here is a folder."""

from __future__ import annotations

import csv
import gzip
import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import zstandard

from llmq.base.errors import ConfigError, DataError
from llmq.commands.cli import _run
from llmq.text.inputs import HubDataset, Portions, dataset_of
from llmq.text.record_format import RecordText, one_field
from tests.text_data import (
    contents,
    documents,
    encoded,
    ids,
    interrupt_report,
    mixed_text,
    run,
    write_array,
    write_jsonl,
    write_parquet,
    zst,
)

# ------------------------------------------------------------------------------------------------
# Templates

RECORD = {"title": "T", "text": "long\ntext", "year": 1999, "rate": 0.5, "none": None, "a.b": "c"}


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (r"{title}\n{text}", "T\nlong\ntext"),
        ("{title}\n{text}", "T\nlong\ntext"),
        (r"\t{title}\\n{{x}}", "\tT\\n{x}"),
        ("{year} {rate} {none}.{a.b}", "1999 0.5 .c"),
        ("{title}{title}", "TT"),
        ("before {none}", ""),  # nothing of the record's own: no document
    ],
)
def test_a_template_takes_several_fields(template, expected):
    assert RecordText(template=template).of(RECORD, "x") == expected


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("text", r"^--template: 'text' names no field"),
        ("{text", r"^--template: expected '}'"),
        ("}", r"^--template: Single '}'"),
        ("{}", "nothing else"),
        ("{text:>5}", "nothing else"),
        ("{text!r}", "nothing else"),
    ],
)
def test_bad_templates(template, message):
    with pytest.raises(ConfigError, match=message):
        RecordText(template=template)


def write_pairs(path, pairs):
    path.write_text("".join(json.dumps({"a": a, "b": b}) + "\n" for a, b in pairs))
    return path


def test_templates_of_every_kind_of_record(tmp_path):
    pairs = [("one", "1"), (None, ""), ("two", None)]
    expected = encoded("one: 1", "two: ")
    pyarrow = pytest.importorskip("pyarrow")
    table = pyarrow.table({"b": [b for _, b in pairs], "a": [a for a, _ in pairs]})
    pytest.importorskip("pyarrow.parquet").write_table(table, tmp_path / "x.parquet")
    write_pairs(tmp_path / "x.jsonl", pairs)
    (tmp_path / "x.json").write_text(json.dumps([{"a": a, "b": b} for a, b in pairs]))
    for name in ("x.parquet", "x.jsonl", "x.json"):
        run(tmp_path / name, out=tmp_path / "out", template="{a}: {b}", overwrite=True)
        assert ids(tmp_path / "out") == expected
    with pytest.raises(DataError, match="made with other field, template"):
        run(tmp_path / "x.json", out=tmp_path / "out", field="a")
    with pytest.raises(DataError, match="made with other template"):
        run(tmp_path / "x.json", out=tmp_path / "out", template="{a}")


# ------------------------------------------------------------------------------------------------
# Tables that are texts, and HTML

CSV = 'title;text\r\nT;"one, ""1""\ntwo; 2"\r\n\r\nU;\r\n漢;three\r\n'


def test_csv_and_tsv_are_read_by_columns(tmp_path):
    """Quotes, line ends in fields, a byte order mark; empty texts are no documents."""
    expected = ['one, "1"\ntwo; 2', "three"]
    (tmp_path / "a.csv").write_bytes(b"\xef\xbb\xbf" + CSV.encode())
    (tmp_path / "b.tsv.gz").write_bytes(
        gzip.compress(CSV.replace(";", "\t").replace("two\t", "two;").encode())
    )
    for name in ("a.csv", "b.tsv.gz"):
        run(tmp_path / name, out=tmp_path / name[0])
        assert ids(tmp_path / name[0]) == encoded(*expected)
    how = {"template": "{title}: {text}", "out": tmp_path / "t"}
    run(tmp_path / "a.csv", **how)
    assert ids(tmp_path / "t") == encoded("T: " + expected[0], "U: ", "漢: three")
    with pytest.raises(DataError, match=r"a\.csv': no field 'body': use --field with one of title"):
        run(tmp_path / "a.csv", out=tmp_path / "out", field="body")
    for content, said in (
        ("text\na,b\n", "x.csv: row 1: 2 fields instead of 1, as the first line"),
        ("text,text\n1,2\n", "x.csv': its first line names a column twice"),
        ('text\n"a\n', "x.csv' is not readable as a table: "),
        (b"text\n\xff\n", "x.csv' is not UTF-8 text: convert it"),
    ):
        raw = content if isinstance(content, bytes) else content.encode()
        (tmp_path / "x.csv").write_bytes(raw)
        with pytest.raises(DataError, match=said):
            run(tmp_path / "x.csv", out=tmp_path / "out")


def test_an_interrupted_table_goes_on(tmp_path, monkeypatch):
    texts = documents(9)
    with open(tmp_path / "a.csv", "w", newline="") as file:
        csv.writer(file).writerows([["text"], *([text] for text in texts)])
    small = Portions(documents=2, seconds=0.0)
    interrupt_report(monkeypatch, 2)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "a.csv", out=tmp_path / "out", portions=small)
    assert run(tmp_path / "a.csv", out=tmp_path / "out", portions=small).was_resumed
    assert ids(tmp_path / "out") == encoded(*texts)


def test_html_is_no_text(tmp_path):
    (tmp_path / "in").mkdir()
    page = tmp_path / "in" / "a.HTML"
    page.write_text("<p>one</p>")
    with pytest.raises(DataError, match=r"a\.HTML' is HTML, whose tags would be trained: write"):
        run(page, out=tmp_path / "out")
    (tmp_path / "in" / "b.txt").write_text("two")
    summary = run(tmp_path / "in", out=tmp_path / "out")
    assert ids(tmp_path / "out") == encoded("two")
    assert summary.warnings == ["1 files in folders are not text: left out"]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_missing_field_names_record_and_file(tmp_path, workers):
    path = write_pairs(tmp_path / "x.jsonl", [("one", "1")])
    path.write_text(path.read_text() + '{"a": "two", "c": "3"}\n')
    with pytest.raises(DataError) as error:
        run(path, out=tmp_path / "out", template="{a}{b}", workers=workers)
    wrong = "no field 'b': --template asks for it, and there is a, c"
    assert str(error.value).startswith(f"{path}:2: {wrong}")


def test_fields_that_a_template_cannot_have(tmp_path):
    write_array(tmp_path / "x.json", ["one"])
    with pytest.raises(DataError, match=r"x\.json: record 1: no field 'b': --template asks"):
        run(tmp_path / "x.json", out=tmp_path / "out", template="{text}{b}")
    write_parquet(tmp_path / "x.parquet", ["one"])
    with pytest.raises(DataError, match=r"x\.parquet': no field 'b': --template asks .* id, text"):
        run(tmp_path / "x.parquet", out=tmp_path / "out", template="{text}{b}")
    (tmp_path / "x.jsonl").write_text('{"text": ["a"]}')
    with pytest.raises(DataError, match=r"x\.jsonl:1: field 'text' is a list, which --template"):
        run(tmp_path / "x.jsonl", out=tmp_path / "out", template="{text}")


def test_the_text_is_said_once(tmp_path, capsys):
    assert one_field(None, None) == "text" and one_field(["a"], None) == "a"
    path = write_jsonl(tmp_path / "x.jsonl", ["one"])
    start = ["tokenize", str(path), "--tokenizer", "bytes", "--out", str(tmp_path / "out")]
    for more, said in (
        (["--field", "text", "--field", "id"], "--field: given 2 times; the text is one field"),
        (["--field", "text", "--template", "{id}"], "--field: excludes --template"),
        (["--split", "train"], "--split: needs --dataset"),
        (["--dataset", "x"], "give either files or --dataset"),
    ):
        assert _run([*start, *more]) == 2
        assert said in capsys.readouterr().err
    assert _run([start[0], *start[2:]]) == 2
    assert "give either files or --dataset" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert _run([*start, "--template", r"{id}\n{text}"]) == 0
    assert ids(tmp_path / "out") == encoded("0\none")


# ------------------------------------------------------------------------------------------------
# Packed files


@pytest.mark.parametrize("pack", [gzip.compress, zst])
@pytest.mark.parametrize("fraction", [0.0, 0.25])
def test_packed_texts_are_cut_like_plain_ones(tmp_path, pack, fraction):
    small = Portions(size=300)
    text = "\ufeff" + mixed_text(4000)
    plain = tmp_path / "plain.txt"
    plain.write_text(text)
    packed = tmp_path / f"packed.txt{'.gz' if pack is gzip.compress else '.zst'}"
    packed.write_bytes(pack(text.encode()))
    run(plain, out=tmp_path / "a", eval_fraction=fraction, portions=small)
    run(packed, out=tmp_path / "b", eval_fraction=fraction, portions=small)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert len([*(tmp_path / "b").glob("*.bin")]) == (2 if fraction else 1)


@pytest.mark.parametrize("count", [0, 299, 300, 301, 600])
def test_the_end_of_a_packed_text(tmp_path, count):
    small = Portions(size=300)
    (tmp_path / "x.txt.gz").write_bytes(gzip.compress(b"a" * count))
    (tmp_path / "y.txt").write_text("b")
    run(tmp_path / "x.txt.gz", tmp_path / "y.txt", out=tmp_path / "out", portions=small)
    assert ids(tmp_path / "out") == encoded(*["a" * count] * bool(count), "b")


@pytest.mark.parametrize(
    "name", ["x.txt.gz", "x.jsonl.gz", "x.txt.zst", "x.jsonl.zst", "x.json.zst"]
)
def test_packed_files_that_end_too_early_or_are_none(tmp_path, name):
    data = json.dumps({"text": mixed_text(3000)}).encode()
    packed = gzip.compress(data) if name.endswith("gz") else zst(data)
    for content in (packed[: len(packed) // 2 + 40], packed[:-5], b"no such thing " * 9):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=rf"cannot read '.*{name}'"):
            run(tmp_path / name, out=tmp_path / "out", overwrite=True)


def test_without_zstandard(tmp_path, monkeypatch):
    (tmp_path / "x.txt.zst").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(DataError, match="needs zstandard: pip install zstandard"):
        run(tmp_path / "x.txt.zst", out=tmp_path / "out")


# ------------------------------------------------------------------------------------------------
# Standard input


@pytest.fixture
def piped(monkeypatch):
    def pipe(data):
        given = SimpleNamespace(buffer=io.BytesIO(data), close=lambda: None)
        monkeypatch.setattr(sys, "stdin", given)

    return pipe


def test_standard_input_is_an_input(tmp_path, piped):
    text = mixed_text(2000)
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "b.txt").write_text("b")
    run(tmp_path / "a.txt", out=tmp_path / "file", eval_fraction=0.1)
    piped(text.encode())
    run("-", out=tmp_path / "out", eval_fraction=0.1)
    assert contents(tmp_path / "out") == contents(tmp_path / "file")
    assert not list((tmp_path / "out").glob("*standard-input*"))
    piped(b"one")
    run(tmp_path / "b.txt", "-", out=tmp_path / "two")
    assert ids(tmp_path / "two") == encoded("b", "one")


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.compress], ids=["gzip", "zstd"])
def test_standard_input_may_be_packed(tmp_path, piped, pack):
    piped(pack(write_jsonl(tmp_path / "x.jsonl", ["one", "two"]).read_bytes()))
    run("-", out=tmp_path / "records")
    assert ids(tmp_path / "records") == encoded("one", "two")
    packed = pack(b"some text\n" * 500)
    piped(packed)
    run("-", out=tmp_path / "text")
    assert ids(tmp_path / "text") == encoded("some text\n" * 500)
    piped(packed[: len(packed) // 2])
    with pytest.raises(DataError, match="cannot read"):
        run("-", out=tmp_path / "torn")


def test_the_same_standard_input_goes_on(tmp_path, piped, monkeypatch):
    small = Portions(size=300, seconds=0.0)
    data = mixed_text(4000).encode()
    piped(data)
    run("-", out=tmp_path / "whole", portions=small)
    interrupt_report(monkeypatch, 4)
    piped(data)
    with pytest.raises(KeyboardInterrupt):
        run("-", out=tmp_path / "out", portions=small)
    assert not list((tmp_path / "out").glob("*standard-input*"))
    piped(data)
    assert run("-", out=tmp_path / "out", portions=small).was_resumed
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    piped(data)
    assert run("-", out=tmp_path / "out", portions=small).was_complete
    piped(data[:-1] + b"!")
    with pytest.raises(DataError, match="made with other inputs"):
        run("-", out=tmp_path / "out", portions=small)


def test_standard_input_that_cannot_be(tmp_path, piped):
    piped(b"one")
    with pytest.raises(DataError, match="given twice"):
        run("-", "-", out=tmp_path / "out")
    with pytest.raises(DataError, match="no tokenizer"):
        run("-", out=tmp_path / "out", tokenizer=str(tmp_path / "none"))
    assert not (tmp_path / "out").exists()


# ------------------------------------------------------------------------------------------------
# Data sets


@pytest.fixture
def dataset(tmp_path):
    """A folder that `datasets` opens as a data set of two configurations."""
    pytest.importorskip("datasets")
    folder = tmp_path / "set"
    folder.mkdir()
    write_jsonl(folder / "first.jsonl", documents(7))
    write_jsonl(folder / "last.jsonl", documents(3, seed=1))
    write_jsonl(folder / "other.jsonl", documents(5, seed=2))
    files = {"train": "first.jsonl", "test": "last.jsonl"}
    configs = [
        {"config_name": "en", "data_files": [{"split": s, "path": p} for s, p in files.items()]},
        {"config_name": "de", "data_files": "other.jsonl"},
    ]
    (folder / "README.md").write_text(f"---\nconfigs: {json.dumps(configs)}\n---\n")
    return str(folder)


def test_records_of_a_data_set(dataset, tmp_path):
    out = tmp_path / "out"
    for spec, split, expected in (
        (f"{dataset}:en", None, documents(7)),
        (f"{dataset}:en", "test", documents(3, seed=1)),
        (f"{dataset}:de", "train", documents(5, seed=2)),
    ):
        summary = run(out=out, dataset=dataset_of(spec, split), overwrite=True)
        assert ids(out) == encoded(*expected)
        assert summary.documents == len(expected)
    text = HubDataset(dataset, "de", "train")
    run(out=out, dataset=text, template="{id} {text}", overwrite=True)
    assert ids(out) == encoded(*(f"{i} {t}" for i, t in enumerate(documents(5, seed=2))))
    assert run(out=out, dataset=text, template="{id} {text}").was_complete
    with pytest.raises(DataError, match="made with other inputs"):
        run(out=out, dataset=HubDataset(dataset, "en", "train"), template="{id} {text}")


def test_data_sets_that_cannot_be_read(dataset, tmp_path, monkeypatch):
    for spec, split, options, said in (
        (dataset, None, {}, "cannot read the data set .*'en', 'de'"),  # which one?
        (f"{dataset}:fr", None, {}, "cannot read the data set .*:fr"),
        (f"{dataset}:en", "dev", {}, "cannot read the data set .*dev"),
        (f"{dataset}:en", None, {"field": "body"}, "no field 'body': use --field with one of id, "),
        (str(tmp_path / "none"), None, {}, "cannot read the data set"),
    ):
        with pytest.raises(DataError, match=said) as error:
            run(out=tmp_path / "out", dataset=dataset_of(spec, split), **options)
        assert len(str(error.value)) < 800
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"^--dataset needs the library datasets: pip install"):
        run(out=tmp_path / "out", dataset=dataset_of(dataset, None))


def test_a_data_set_goes_on_where_it_was(dataset, tmp_path, monkeypatch):
    small = Portions(documents=2, seconds=0.0)
    chosen = HubDataset(dataset, "en", "train")
    run(out=tmp_path / "whole", dataset=chosen, portions=small)
    interrupt_report(monkeypatch, 3)
    with pytest.raises(KeyboardInterrupt):
        run(out=tmp_path / "out", dataset=chosen, portions=small)
    assert run(out=tmp_path / "out", dataset=chosen, portions=small).was_resumed
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    path = Path(dataset, "first.jsonl")
    write_jsonl(path, documents(8))  # another content
    with pytest.raises(DataError, match="made with other inputs"):
        run(out=tmp_path / "out", dataset=chosen, portions=small)
