"""The picture of a sweep and its CSV."""

from __future__ import annotations

import csv
import io

import pytest

from llmq.bench.picture import figure_of, heat_maps
from llmq.bench.report import as_csv, describe
from llmq.bench.report_file import ReportFile, comparison, read_report
from tests.kept import kept_reports
from tests.sweeps import MACHINE, ok


def report(rows):
    """rows: options, speed or status, predicted speed."""
    runs = []
    for options, speed, predicted in rows:
        options = {"from-scratch": True, "seq-len": 64} | options
        run = describe(options) | {"options": options, "invocation": 0}
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


def titles(rows):
    return [axes.get_title() for axes in figure_of(report(rows)).axes]


def test_a_picture_has_speeds_and_a_map_of_two_options_that_vary():
    figure = figure_of(report([*GRID, FAILED, OTHER]))
    speeds, cells = figure.axes
    assert {line.get_label(): len(line.get_ydata()) for line in speeds.lines} == {
        "tiny": 4,
        "tiny-gpt2": 1,
    }
    assert speeds.get_xlim()[0] == speeds.get_ylim()[0] == 0
    title = "tiny: best tokens per second by --batch-size (columns) and --recompute-block (rows)"
    assert cells.get_title() == title
    texts = [text.get_text() for text in cells.texts]
    assert texts == ["1000", "12.35k", "", "900", "2000", "✗"]
    assert [label.get_text() for label in cells.get_xticklabels()] == ["1", "2", "4"]
    (image,) = cells.images
    assert image.get_alpha().tolist() == [[1, 1, 0], [1, 1, 0]]


@pytest.mark.parametrize("path", kept_reports()[::3], ids=lambda path: path.stem)
def test_kept_reports_have_pictures_and_are_compared(path):
    """A third of the kept reports, also of earlier versions."""
    kept = read_report(path, "--compare")
    assert figure_of(kept).axes
    assert len(as_csv(kept).splitlines()) == len(kept["runs"]) + 1
    table = [line for line in comparison(kept, kept, ("a", "a")) if line.startswith("|")]
    assert len(table) == 2 + sum(run["status"] == "ok" for run in kept["runs"])


def test_what_is_not_known_is_not_drawn():
    """One swept option makes no heat map, and failed runs no points."""
    lone = [({"model": "tiny", "batch-size": n}, 100.0 * n, None) for n in (1, 2)]
    assert titles(lone) == [""]
    assert figure_of(report([FAILED])) is None and figure_of(report([])) is None
    # Runs that are no product make a map with holes, values that are spelled apart are the same.
    pairs = [({"model": "tiny", "batch-size": b, "seq-len": t}, 1.0, None)
             for b, t in ((1, "64"), ("1", 64), (2, 32), (3, 16), (4, 8))]  # fmt: skip
    (found,) = heat_maps(report(pairs)["runs"], ["tiny"])
    assert len(found.columns) * len(found.rows) == 16
    assert sum(speed is None for line in found.speeds for speed in line) == 12
    assert not any(tried for line in found.tried for tried in line if not tried)


def test_a_picture_is_drawn_now_and_then_and_in_the_end(tmp_path):
    file, shown = ReportFile(tmp_path / "out"), tmp_path / "out.png"
    one, two = (report(GRID[:n]) | {"left": 4 - n, "running": None} for n in (1, 2))
    file.write(one)
    first = shown.read_bytes()
    assert first.startswith(b"\x89PNG")
    file.write(two)
    assert shown.read_bytes() == first
    assert "2 runs are still to be made" in (tmp_path / "out.md").read_text()
    file.write(two, stopped=True)
    assert shown.read_bytes() != first


def test_names_that_fonts_do_not_know():
    odd = [({"model": "a$b$\x1b[1m\udc80", "batch-size": b, "seq-len": t}, 9.0, None)
           for b in (1, 2) for t in (8, 16)]  # fmt: skip
    figure = figure_of(report(odd))
    figure.savefig(io.BytesIO(), format="png")
    assert figure.axes[1].get_title().startswith("a$b$\ufffd[1m\\udc80: best")


def test_csv_has_a_line_for_each_run_and_a_column_for_each_option():
    rows = list(csv.DictReader(io.StringIO(as_csv(report([*GRID, FAILED, OTHER])))))
    assert [row["model"] for row in rows] == ["tiny"] * 5 + ["tiny-gpt2"]
    assert [row["recompute-block"] for row in rows] == ["false", "true"] * 2 + ["true", ""]
    assert rows[2]["tokens_per_second"] == "12345.0" and rows[2]["status"] == "ok"
    assert len(rows[2]["step_seconds"].split()) == 3
    assert rows[4]["tokens_per_second"] == "" and rows[4]["message"] == "no <room>"
    assert rows[0]["memory_planned"] == str(1 << 30) and rows[0]["memory_used"] == ""
    assert as_csv(report([])) == "\n"
