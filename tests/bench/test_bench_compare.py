"""Comparing two reports: what is faster, and what only seems to be."""

from __future__ import annotations

import json
import math

import pytest

from llmq.bench.report import describe
from llmq.bench.report_file import change, comparison
from llmq.commands.cli import _run
from tests.sweeps import MACHINE, ok

SAME = [1.00, 1.01, 0.99]


def test_a_change_is_of_medians_beyond_the_ranges():
    assert change([2.0, 2.02, 1.98], [1.0, 1.01, 0.99]) == (1.0, "faster")
    assert change([1.0, 1.01, 0.99], [2.0, 2.02, 1.98]) == (-0.5, "slower")
    assert change(SAME, [0.995, 0.98, 0.97]).verdict == "no difference to be seen"
    assert change([1.0], SAME) == (0.0, "one repeat: unknown")


def report(runs, machine=MACHINE):
    """runs: (options, seconds of the repeats or a status)."""
    found = []
    for options, seconds in runs:
        options = {"from-scratch": True, "device": "cpu"} | options
        run = describe(options) | {"options": options, "invocation": 0}
        if isinstance(seconds, str):
            run |= {"status": seconds, "message": "why"}
        else:
            outcome = ok(options, 64 / sorted(seconds)[len(seconds) // 2])
            outcome["result"]["step_seconds"] = seconds
            run |= outcome
        found.append(run)
    invocation = {"date": "d", "command": "c", "steps": 1, "repeats": 3}
    return {"machine": machine, "invocations": [invocation], "runs": found, "left": 0}


def test_reports_are_compared_row_by_row(tmp_path, capsys):
    tiny = {"model": "tiny", "lr": 1}
    one = report(
        [
            (tiny | {"batch-size": 1}, [1.0, 1.01, 0.99]),
            (tiny | {"batch-size": 2}, [1.0, 1.01, 0.99]),
            (tiny | {"batch-size": 3}, [1.0, 1.2, 0.9]),
            (tiny | {"batch-size": 4}, "hung"),
            (tiny | {"batch-size": 5}, [1.0] * 3),
            (tiny | {"batch-size": 7}, [1.0]),
        ]
    )
    other = report(
        [
            # Another order, and other spellings of the same options.
            (tiny | {"batch-size": "3", "watchdog": 9}, [1.05, 1.2, 0.8]),
            (tiny | {"batch-size": "2"}, [1.25, 1.26, 1.24]),
            (tiny | {"batch-size": "1"}, [0.5, 0.505, 0.495]),
            (tiny | {"batch-size": 4}, [1.0] * 3),
            (tiny | {"batch-size": 6}, [1.0] * 3),
            (tiny | {"batch-size": 7}, [1.0]),
        ],
        MACHINE | {"versions": {"llmq": "0.2", "NumPy": "2"}},
    )
    paths = [tmp_path / f"{name}.json" for name in "ab"]
    for path, content in zip(paths, (one, other), strict=True):
        path.write_text(json.dumps(content))
    assert _run(["bench", "--compare", *map(str, paths)]) == 0
    lines = capsys.readouterr().out.splitlines()
    a, b = paths
    assert lines[:4] == [f"From {a} to {b}", "", "They differ in:", "- llmq 0.1, 0.2"]
    assert "All runs: --lr=1" in lines
    table = [line for line in lines if line.startswith("|")]
    assert table[0].startswith("| run | tok/s before | tok/s after | change | verdict |")
    assert [(line.split(" | ")[0], line.split(" | ")[-1]) for line in table[2:]] == [
        ("| tiny bf16 1 x 4", "faster |"),
        ("| tiny bf16 2 x 4", "slower |"),
        ("| tiny bf16 3 x 4", "no difference to be seen |"),
        ("| tiny bf16 7 x 4", "one repeat: unknown |"),
    ]
    assert table[2].startswith("| tiny bf16 1 x 4 | 64 | 128 | +100.0% | faster")
    assert "| +0.0% | one repeat" in table[5]
    assert lines[-3:] == [
        f"- tiny bf16 4 x 4: hung in {a}",
        f"- tiny bf16 5 x 4: only in {a}",
        f"- tiny bf16 6 x 4: only in {b}",
    ]


def test_reports_without_a_common_run():
    tiny = {"model": "tiny"}
    lines = comparison(report([(tiny, SAME)]), report([]), ("a", "b"))
    assert "No run was measured in both." in lines and lines[-1].endswith(": only in a")
    cards = [MACHINE | {"gpu": {"driver": "1", "uuid": uuid}} for uuid in "xy"]
    lines = comparison(*(report([(tiny, SAME)], card) for card in cards), ("a", "b"))
    assert "- another card of the same kind" in lines


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not a report of llmq bench"),
        ("[]", "is not a report of llmq bench"),
        ('{"machine": null, "invocations": [], "runs": [{}]}', "is not a report of llmq bench"),
        (None, "a.json cannot be read: No such file or directory"),
    ],
)
def test_what_is_no_report(tmp_path, capsys, content, message):
    path = tmp_path / "a.json"
    if content is not None:
        path.write_text(content)
    assert _run(["bench", "--compare", str(path), str(path)]) == 2
    printed, err = capsys.readouterr()
    assert printed == "" and err.startswith("error: --compare: ") and message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("seconds", [math.nan, math.inf, 0.0, -1.0])
def test_speeds_that_are_none_are_not_compared(tmp_path, capsys, seconds):
    path = tmp_path / "a.json"
    path.write_text(json.dumps(report([({"model": "tiny"}, [1.0, 1.0, 1.0])])))
    content = json.loads(path.read_text())
    content["runs"][0]["result"]["step_seconds"] = [seconds, 1.0, 1.0]
    path.write_text(json.dumps(content))
    assert _run(["bench", "--compare", str(path), str(path)]) == 2
    printed, err = capsys.readouterr()
    assert printed == "" and err.count("\n") == 1
    assert f"(ValueError('a speed or a time of a step is {seconds}')" in err


@pytest.mark.parametrize("extra", ["--resume", "--model=tiny", "--config=a", "--out=b"])
def test_a_comparison_makes_no_runs(capsys, extra):
    assert _run(["bench", "--compare", "a.json", "b.json", extra]) == 2
    assert "--compare: reads two reports and makes no runs" in capsys.readouterr().err
