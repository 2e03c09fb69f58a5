"""The page of a sweep and its CSV."""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from html.parser import HTMLParser

import pytest

from llmq.bench.page import Cell, heat_map, number, page
from llmq.bench.report import as_csv, describe
from llmq.bench.report_file import ReportFile, comparison, read_report
from tests.kept import kept_reports
from tests.sweeps import MACHINE, ok


class Structure(HTMLParser):
    """Sections with their titles, and how many elements of each kind and class they have."""

    VOID = {"meta"}  # noqa: RUF012

    def __init__(self, text):
        super().__init__()
        self.open, self.sections, self.counts, self.texts = [], {}, {}, {}
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        if tag == "section":
            self.name = values["id"]
            self.counts[self.name], self.texts[self.name] = Counter(), []
        elif "section" in self.open:
            kind = f"{tag}.{values['class']}" if "class" in values else tag
            self.counts[self.name][kind] += 1
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "section" in self.open and data.strip():
            if self.open[-1] == "h2":
                self.sections[self.name] = data
            self.texts[self.name].append(data)


def report(rows):
    """rows: options, speed or status, predicted speed."""
    runs = []
    for options, speed, predicted in rows:
        options = {"from-scratch": True, "seq-len": 64} | options
        run = describe(options) | {"options": options, "invocation": 0, "peers": {}, "floor": None}
        outcome = {"status": speed, "message": "no <room>"}
        if not isinstance(speed, str):
            outcome = ok(options, speed)
            outcome["result"]["predicted"] = predicted
        runs.append(run | outcome)
    invocation = {"date": "d", "command": "llmq bench --config <a&b>", "steps": 1, "repeats": 3}
    return {"machine": MACHINE, "invocations": [invocation], "runs": runs, "left": 0}


GRID = [
    ({"model": "tiny", "batch-size": batch, "recompute-block": block}, speed, speed * 1.1)
    for (batch, block), speed in {
        (1, False): 1000.0, (1, True): 900.0, (2, False): 12_345.0, (2, True): 2000.0,
    }.items()
]  # fmt: skip
FAILED = ({"model": "tiny", "batch-size": 4, "recompute-block": True}, "does not fit", None)
OTHER = ({"model": "tiny-gpt2", "batch-size": 1}, 500.0, 400.0)


def test_the_structure_of_a_page():
    found = Structure(page(report([*GRID, FAILED, OTHER])))
    assert found.sections == {
        "memory": "Speed against memory",
        "predicted": "Measured against predicted",
        "heat-0": "tiny: best tokens per second by --batch-size (columns) and --recompute-block "
        "(rows)",
    }
    kinds = {
        name: {kind: n for kind, n in of.items() if kind.startswith("g.")}
        for name, of in found.counts.items()
    }
    assert kinds == {
        "memory": {"g.point": 5},
        "predicted": {"g.point": 5, "g.equal": 1},
        "heat-0": {"g.cell": 6},
    }
    texts = found.texts
    assert any(text.endswith("1000, predicted 1100 (+10.0%)") for text in texts["predicted"])
    cells = [text for text in texts["heat-0"] if text in ("1000", "900", "12.35k", "2000", "✗")]
    assert cells == ["1000", "12.35k", "900", "2000", "✗"]


@pytest.mark.parametrize("path", kept_reports()[::3], ids=lambda path: path.stem)
def test_kept_reports_have_pages_and_are_compared(path):
    """Also those of earlier versions: a third of all."""
    kept = read_report(path, "--compare")
    sections = Structure(page(kept)).sections
    assert "memory" in sections
    assert len(as_csv(kept).splitlines()) == len(kept["runs"]) + 1
    table = [line for line in comparison(kept, kept, ("a", "a")) if line.startswith("|")]
    assert len(table) == 2 + sum(run["status"] == "ok" for run in kept["runs"])


def test_a_page_loads_nothing_and_runs_nothing():
    text = page(report([*GRID, FAILED]))
    text = re.sub(r'xmlns(:xlink)?="[^"]+"', "", text)  # names, which nobody loads
    within = r"(?!\"?#)"  # parts of the page itself
    loads = rf"<script|<image|\b(?:src|href)\s*={within}|@import|url\({within}|https?:|data:"
    assert re.findall(loads, text) == []
    assert "<room>" not in text and "<a&b>" not in text


def test_what_is_not_known_is_not_drawn():
    """On the CPU nothing is predicted; one swept option makes no map; a sweep may have failed."""
    lone = [({"model": "tiny", "batch-size": n}, 100.0 * n, None) for n in (1, 2)]
    assert list(Structure(page(report(lone))).sections) == ["memory"]
    assert list(Structure(page(report([FAILED]))).sections) == []
    assert list(Structure(page(report([]) | {"left": 2})).sections) == []
    # Runs that are no product make a map with holes, values that are spelled apart are the same.
    pairs = [({"model": "tiny", "batch-size": b, "seq-len": t}, 1.0, None)
             for b, t in ((1, "64"), ("1", 64), (2, 32), (3, 16), (4, 8))]  # fmt: skip
    found = Structure(page(report(pairs)))
    assert found.counts["heat-0"]["g.cell"] == 16


def test_a_page_is_drawn_now_and_then_and_in_the_end(tmp_path):
    file, shown = ReportFile(tmp_path / "out"), tmp_path / "out.html"
    one, two = (report(GRID[:n]) | {"left": 4 - n, "running": None} for n in (1, 2))
    file.write(one)
    assert shown.read_text() == page(one)
    file.write(two)
    assert shown.read_text() == page(one)
    assert "2 runs are still to be made" in (tmp_path / "out.md").read_text()
    file.write(two, stopped=True)
    assert shown.read_text() == page(two)
    file.write(report(GRID) | {"running": None})
    assert shown.read_text() == page(report(GRID))


def fills(drawn):
    """The colours of the cells, in their order."""
    return re.findall(r'<g class="cell">.*?fill: (#\w+)', drawn, re.DOTALL)


def test_colours_of_a_heat_map():
    cells = [[Cell(1.0, "1", "a"), Cell(3.0, "3", "b")], [Cell(None, "", "c"), Cell(2.0, "2", "d")]]
    found = fills(heat_map(["x", "y"], ["p", "q"], cells))
    lights = [sum(bytes.fromhex(color[1:])) for color in found]
    assert lights[2] > lights[0] > lights[3] > lights[1] and found[2] == "#f4f4f4"
    assert len(fills(heat_map(["x"], ["p"], [[Cell(5.0, "5", "")]]))) == 1


def test_pictures_are_the_same_each_time_and_say_what_text_says():
    cell = Cell(2.0, "2", "a$b$\x1b[1m\udc80<é>: 2")
    drawn = heat_map(["_model"], ["p"], [[cell]])
    assert drawn == heat_map(["_model"], ["p"], [[cell]])
    found = Structure(f"<section id='x'>{drawn}</section>").texts["x"]
    assert "_model" in found and "a$b$\ufffd[1m\\udc80<é>: 2" in found
    assert drawn.isprintable() or not re.search(r"[\x00-\x08\x0b-\x1f\ud800-\udfff]", drawn)


def test_numbers():
    assert [number(n) for n in (0.25, 999.0, 9999.0, 153_123.0, 2.5e6, 3e9)] == [
        "0.25", "999", "9999", "153.1k", "2.5M", "3B",
    ]  # fmt: skip


def test_csv_has_a_line_for_each_run_and_a_column_for_each_option():
    rows = list(csv.DictReader(io.StringIO(as_csv(report([*GRID, FAILED, OTHER])))))
    assert [row["model"] for row in rows] == ["tiny"] * 5 + ["tiny-gpt2"]
    assert [row["recompute-block"] for row in rows] == ["false", "true"] * 2 + ["true", ""]
    assert rows[2]["tokens_per_second"] == "12345.0" and rows[2]["status"] == "ok"
    assert len(rows[2]["step_seconds"].split()) == 3
    assert rows[4]["tokens_per_second"] == "" and rows[4]["message"] == "no <room>"
    assert rows[0]["memory_planned"] == str(1 << 30) and rows[0]["memory_used"] == ""
    assert as_csv(report([])) == "\n"
