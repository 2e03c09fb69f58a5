"""The documents that `tokenize` finds: every kind of input, long texts in pieces, bad inputs."""

from __future__ import annotations

import errno
import os
import sys

import pytest

import llmq.base.records
from llmq.base.errors import DataError
from llmq.data.tokens import TokenFile
from llmq.text.inputs import Portions, find_cut, find_files
from llmq.text.tokenizer import END_OF_TEXT, ByteTokenizer
from tests.text_data import (
    EOS,
    documents,
    encoded,
    ids,
    mixed_text,
    run,
    write_array,
    write_jsonl,
    write_parquet,
    write_zst,
)


def test_a_text_is_one_document(tmp_path):
    text = "Hello\r\nwörld\n\n 漢字"
    (tmp_path / "a.txt").write_bytes(text.encode())
    summary = run(tmp_path / "a.txt", out=tmp_path / "out")
    assert ids(tmp_path / "out") == encoded(text)
    assert summary.tokens == {"train": len(text.encode()) + 1, "eval": 0}
    assert (summary.documents, summary.vocab_size, summary.warnings) == (1, 257, [])
    assert summary.files == [tmp_path / "out" / "train-000.bin"]
    assert TokenFile(summary.files[0]).vocab_size == 257
    assert not summary.was_complete and not summary.was_resumed


def test_special_tokens_in_the_text_end_a_document(tmp_path):
    (tmp_path / "a.txt").write_text(f"one\n{END_OF_TEXT}\ntwo")
    run(tmp_path / "a.txt", out=tmp_path / "out")
    assert ids(tmp_path / "out") == [*b"one\n", EOS, *b"\ntwo", EOS]


def test_folders_globs_and_order(tmp_path):
    for name in ["d/b.txt", "d/a.md", "d/sub/c.py", "d/.hidden/x.txt", "d/.y.txt", "e1.txt"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "d" / "image.png").write_bytes(b"\x89PNG\0\xff")
    (tmp_path / "d" / "latin1.txt").write_bytes("ä".encode("latin-1"))
    (tmp_path / "d" / "empty.txt").touch()
    (tmp_path / "d" / "dangling").symlink_to(tmp_path / "none")
    out = tmp_path / "d" / "out"  # inside the input
    summary = run(tmp_path / "e*.txt", tmp_path / "d", tmp_path / "d" / "b.txt", out=out)
    assert ids(out) == encoded("e1.txt", "d/a.md", "d/b.txt", "d/sub/c.py")
    assert summary.documents == 4
    assert summary.warnings == ["2 files in folders are not text: left out"]
    assert run(tmp_path / "e*.txt", tmp_path / "d", out=out).was_complete


def test_links_to_folders_are_followed_once(tmp_path):
    folder, other = tmp_path / "d", tmp_path / "other"
    for path in (folder / "b", other):
        path.mkdir(parents=True)
    (folder / "b" / "b.txt").write_text("one")
    (other / "o.txt").write_text("two")
    (folder / "b" / "up").symlink_to(folder)  # a circle
    (folder / "c").symlink_to(folder / "b")  # seen before
    (folder / "z").symlink_to(other)
    assert [source.path for source in find_files([str(folder)], tmp_path / "out")] == [
        str(folder / "b" / "b.txt"),
        str(folder / "z" / "o.txt"),
    ]
    (folder / "out").symlink_to(other)
    assert len(find_files([str(folder)], folder / "out")) == 1


def test_a_folder_that_cannot_be_read(tmp_path, monkeypatch):
    """Tests may run as root, who may read everything."""
    (tmp_path / "d" / "secret").mkdir(parents=True)
    (tmp_path / "d" / "a.txt").write_text("one")
    scandir = os.scandir

    def refuse(path):
        if str(path).endswith("secret"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(DataError, match=r"cannot read the folder '.*secret': Permission denied"):
        find_files([str(tmp_path / "d")], tmp_path / "out")


@pytest.mark.parametrize(
    "name",
    ["a.jsonl", "a.json", "a.json.gz", "A.JSONL", "a.ndjson", "a.jsonl.zst", "a.json.zst"],
)
def test_jsonl(tmp_path, name):
    texts = documents(20)
    path = tmp_path / name
    write_zst(path, texts) if name.endswith(".zst") else write_jsonl(path, texts)
    summary = run(path, out=tmp_path / "out")
    assert ids(tmp_path / "out") == encoded(*texts)
    assert summary.documents == 20


def test_jsonl_oddities(tmp_path):
    """Blank lines, no last newline, empty and null texts, half a surrogate pair, a BOM."""
    lines = [
        b'\xef\xbb\xbf{"t": "bom"}',
        b"  ",
        b'{"t": ""}',
        b'{"t": null}',
        rb'{"t": "x\ud83dy"}',
        rb'{"t": "\uD83D\uDE00"}',
    ]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    summary = run(tmp_path / "a.jsonl", out=tmp_path / "out", field="t")
    assert ids(tmp_path / "out") == encoded("bom", "x\ufffdy", "😀")
    assert summary.documents == 3  # those without text are none


@pytest.mark.parametrize("read_bytes", [1, 7, 100, 1 << 18])
@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("name", ["a.json", "A.JSON", "a.json.gz"])
def test_json_array(tmp_path, monkeypatch, name, indent, read_bytes):
    """Arrays are read as by `datasets.load_dataset("json")`, in pieces of any size."""
    monkeypatch.setattr(llmq.base.records, "READ_BYTES", read_bytes)
    texts = ['a "{[" \\', "]}\\\\", "\\", '"', "漢字", *documents(10)]
    summary = run(write_array(tmp_path / name, texts, indent), out=tmp_path / "out")
    assert ids(tmp_path / "out") == encoded(*texts)
    assert summary.documents == len(texts)


def test_json_array_oddities(tmp_path):
    """A BOM, blanks, nested values before and behind the text; no records at all."""
    (tmp_path / "a.json").write_bytes(
        b'\xef\xbb\xbf \n[\r\n {"a": {"t": ["}"]}, "t": "x"} ,{"t":"y","b":[{}]}\t,\n'
        b'{"t": null}]\n \n'
    )
    (tmp_path / "b.json").write_text(" [ \n ] ")
    (tmp_path / "c.json").write_text("\n")
    summary = run(*sorted(tmp_path.glob("*.json")), out=tmp_path / "out", field="t")
    assert ids(tmp_path / "out") == encoded("x", "y")
    assert summary.documents == 2


def test_parquet(tmp_path):
    texts = [*documents(20), None, ""]
    write_parquet(tmp_path / "a.parquet", texts, field="content")
    summary = run(tmp_path / "a.parquet", out=tmp_path / "out", field="content")
    assert ids(tmp_path / "out") == encoded(*texts[:20])
    assert summary.documents == 20  # those without text are none


def test_byte_order_mark_is_dropped(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfabc")
    run(tmp_path / "a.txt", out=tmp_path / "out")
    assert ids(tmp_path / "out") == encoded("abc")


# ------------------------------------------------------------------------------------------------
# Long texts in pieces


@pytest.mark.parametrize("piece", [7, 50, 333])
def test_pieces_do_not_change_the_bytes(tmp_path, piece):
    small = Portions(size=max(piece, 20))
    text = mixed_text(5000)
    (tmp_path / "a.txt").write_bytes(text.encode())
    run(tmp_path / "a.txt", out=tmp_path / "out", portions=small)
    assert ids(tmp_path / "out") == [*ByteTokenizer().encode(text), EOS]


@pytest.mark.parametrize(
    ("block", "cut"),
    [
        (b"aaaaaa\nbb\nccc", 10),  # the last line end between visible characters
        (b"aaaaaaa\nb\n\nccc", 8),  # better than the one after a blank line
        (b"aaaaaaaab\n\nccc", 11),  # but that, if there is no other
        (b"aaaaaaa bb \nc\n", 12),  # a line end after a blank
        (b"aaaaaaaa\n bbbb\n", 14),  # not before a blank, nor at the end
        (b"a\nbbbbbb cccc dd", 13),  # a space in the second half
        (b"aaaaaaaaaaaaaa", 13),
        ("aaaaaaaa漢".encode(), 8),
        (b"aaaaaaaaa<|endof", 9),
        ("漢".encode(), 0),
        (b"", 0),
    ],
)
def test_where_a_text_is_cut(block, cut):
    assert find_cut(block) == cut


# ------------------------------------------------------------------------------------------------
# Bad inputs


def one_line(error):
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "x"', "not readable as JSON"),
        ("[1, 2]", "a list instead of a JSON object"),
        (
            '{"body": "x", "title": "y"}',
            "no field 'text': use --field with one of body, title, or, for conversations, --format",
        ),
        ('{"text": 5}', "field 'text' is a int, not a text"),
    ],
)
def test_bad_jsonl_lines(tmp_path, line, message):
    (tmp_path / "a.jsonl").write_text('{"text": "good"}\n\n' + line + "\n")
    with pytest.raises(DataError) as error:
        run(tmp_path / "a.jsonl", out=tmp_path / "out")
    assert f"a.jsonl:3: {message}" in one_line(error)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('[{"text": "x"}, {"text": bad}]', "a.json: record 2: not readable as JSON"),
        ('[{"text": "x"}, {"body": "x"}]', "a.json: record 2: no field 'text'"),
        ('[{"text": "x"}, {"text": 5}]', "a.json: record 2: field 'text' is a int"),
        ('[{"text": "x"}, 5, {"text": "x"}]', "is no array of JSON objects from byte 14 on"),
        ('[{"text": "x"} {"text": "x"}]', "is no array of JSON objects from byte 14 on"),
        ('[{"text": "x"},]', "is no array of JSON objects from byte 14 on"),
        ('[{"text": "x"}', "is no array of JSON objects from byte 14 on"),
        ('[{"text": "x"}] {"text": "x"}', "is no array of JSON objects from byte 14 on"),
        ('[{"text": "x]', "is no array of JSON objects from byte 0 on: mend it, or write one"),
        ("[1, 2]", "holds neither an object on each line nor an array of objects: write it as"),
        ('{\n"text": "x"\n}', "holds neither an object on each line nor an array of objects"),
        ('"text"', "holds neither an object on each line nor an array of objects"),
    ],
)
def test_bad_json(tmp_path, content, message):
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(DataError) as error:
        run(tmp_path / "a.json", out=tmp_path / "out")
    assert message in one_line(error)


def test_bad_parquet(tmp_path):
    write_parquet(tmp_path / "a.parquet", ["x"], field="body")
    with pytest.raises(DataError, match="no field 'text': use --field with one of id, body"):
        run(tmp_path / "a.parquet", out=tmp_path / "out")
    with pytest.raises(DataError, match=r"row 1: field 'id' is a int"):
        run(tmp_path / "a.parquet", out=tmp_path / "out2", field="id")
    (tmp_path / "b.parquet").write_bytes(b"no parquet")
    with pytest.raises(DataError, match="cannot read"):
        run(tmp_path / "b.parquet", out=tmp_path / "out3")


def test_files_of_a_folder_that_lack_the_field(tmp_path):
    """Files without the field are left out with a warning, as long as others have the field."""
    folder, out = tmp_path / "d", tmp_path / "out"
    folder.mkdir()
    write_parquet(folder / "a.parquet", ["no"], field="body")
    (folder / "b.jsonl").write_text('\n{"url": "no"}\n{"text": "neither"}\n')
    write_jsonl(folder / "c.jsonl", ["one"])
    (folder / "d.jsonl").write_text("\n")  # no record at all
    (folder / "e.txt").write_text("two")
    write_parquet(folder / "f.parquet", ["three"])
    warning = (
        f"2 files in folders have no field 'text': left out, the first is '{folder}/a.parquet'"
    )
    summary = run(folder, out=out)
    assert ids(out) == encoded("one", "two", "three")
    assert summary.warnings == [warning] == run(folder, out=out).warnings
    assert f"\nwarning: {warning}" in summary.describe()
    with pytest.raises(DataError, match="no field 'text': use --field with one of id, body"):
        run(folder, folder / "a.parquet", out=tmp_path / "named")
    run(folder, out=out, field="body", overwrite=True)
    assert ids(out) == encoded("no", "two")


def test_bad_files_of_a_folder_are_still_errors(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", ["good"])
    for name, content, message in (
        ("b.jsonl", b"{", r"b.jsonl:1: not readable as JSON"),
        ("b.jsonl", b"[1]", r"b.jsonl:1: a list instead of a JSON object"),
        ("b.jsonl", b'{"text": "x"}\n{"body": "x"}', r"b.jsonl:2: no field 'text'"),
        ("b.jsonl.gz", b"no gzip", r"cannot read '.*b.jsonl.gz'"),
        ("b.json.gz", b"no gzip", r"cannot read '.*b.json.gz'"),
        ("b.parquet", b"no parquet", r"cannot read '.*b.parquet'"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=message):
            run(tmp_path, out=tmp_path / "out", overwrite=True)
        (tmp_path / name).unlink()


def test_parquet_without_pyarrow(tmp_path, monkeypatch):
    (tmp_path / "a.parquet").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match="needs pyarrow: pip install pyarrow"):
        run(tmp_path / "a.parquet", out=tmp_path / "out")


def test_bad_inputs(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "empty").mkdir()
    (tmp_path / "blank.txt").touch()
    (tmp_path / "latin1.txt").write_bytes(b"abc\xe4")
    (tmp_path / "binary.txt").write_bytes(b"\x80" * 3000)
    data = write_jsonl(tmp_path / "a.jsonl.gz", documents(50)).read_bytes()
    (tmp_path / "short.jsonl.gz").write_bytes(data[:-50])
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "image").write_bytes(b"\0")
    for name, message in {
        "none.txt": "is not there",
        "*.md": "is not there",
        "empty": "holds no files",
        "pipe": "is not a file",
        "blank.txt": "there is no text in the 1 input files",
        "text": "there is no text in the 1 input files",
        "latin1.txt": "not UTF-8 text at byte 3",
        "binary.txt": "not UTF-8 text at byte 0",
        "short.jsonl.gz": "cannot read",
    }.items():
        with pytest.raises(DataError, match=message) as error:
            run(tmp_path / name, out=tmp_path / "out", overwrite=True)
        assert name in one_line(error) or "no text" in message


def test_binary_without_boundaries_ends(tmp_path):
    small = Portions(size=100)
    (tmp_path / "a.txt").write_bytes(b"\x80" * 300)
    with pytest.raises(DataError, match="not UTF-8 text at byte 0"):
        run(tmp_path / "a.txt", out=tmp_path / "out", portions=small)
