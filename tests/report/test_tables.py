"""Tables of the same rows for a terminal, in Markdown and CSV."""

from __future__ import annotations

import csv
import io

import pytest

from llmq.report.tables import csv_table, markdown_table, terminal_table

HEAD = ("run", "tok/s", "ok")
ROWS = [("tiny [bold]", 1234, True), ("a, b & <c>", "7", None)]


def test_markdown():
    lines = ["| run | tok/s | ok |", "| --- | --- | --- |"]
    lines += ["| tiny [bold] | 1234 | True |", "| a, b & <c> | 7 | None |"]
    assert markdown_table(HEAD, iter(ROWS)) == "\n".join(lines)
    assert markdown_table(HEAD, iter([])) == "", "there is no table without rows"


def test_csv():
    text = csv_table(HEAD, iter(ROWS))
    assert text == 'run,tok/s,ok\ntiny [bold],1234,true\n"a, b & <c>",7,\n'
    assert list(csv.reader(io.StringIO(text)))[2] == ["a, b & <c>", "7", ""]


def test_terminal_aligns_and_reads_no_markup():
    text = terminal_table(HEAD, iter(ROWS), right=(1,), indent=2)
    assert text.splitlines() == [
        "  run          tok/s  ok",
        "  tiny [bold]   1234  True",
        "  a, b & <c>       7  None",
    ]


@pytest.mark.parametrize("columns", ["20", "200"])
def test_terminal_cuts_nothing_whatever_its_width(monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setenv("FORCE_COLOR", "1")
    text = terminal_table(["x" * 150, "y"], [("z" * 300, "é")])
    assert text == f"{'x' * 150}{' ' * 152}y\n{'z' * 300}  é"
