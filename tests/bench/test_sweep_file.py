"""Files of sweeps: products of lists, and single runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmq.base.errors import ConfigError
from llmq.bench.report import describe
from llmq.bench.sweep_file import read_runs

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def rows(tmp_path):
    """The values of these options in each run of a file."""

    def read(text, names, given=()):
        path = tmp_path / "sweep.yaml"
        path.write_text(f"model: tiny\n{text}")
        return [tuple(run.get(n) for n in names) for run in read_runs(dict(given), path)]

    return read


def test_runs_have_lists_of_their_own_which_win(rows):
    text = "batch-size: [1, 2]\nlr: 3\nruns:\n- {recompute-block: true}\n- {batch: [8], lr: 1}\n"
    names = ("recompute-block", "batch-size", "learning-rate")
    assert rows(text, names) == [(True, 1, 3), (True, 2, 3), (None, 8, 1)]
    assert rows(text, names, {"batch-size": "4"}) == [(True, "4", 3), (None, "4", 1)]
    assert read_runs({"model": "tiny"}, None) == [{"from-scratch": True, "model": "tiny"}]


def test_equal_runs_are_made_once(rows):
    text = "lr: [1, 1.0, 2]\nwatchdog: [10, 20]\nruns:\n- {}\n- {lr: 1}\n"
    assert rows(text, ("learning-rate", "watchdog")) == [(1, 10), (2, 10)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "".join(
                f"{n}: [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]\n"
                for n in ("seed", "lr", "beta-1", "beta-2", "warmup", "grad-clip")
            ),
            "its lists stand for 1000000 runs",
        ),
        ("batch-size: [0, 1]", r"--batch-size: must be at least 1.*\(run --model=tiny"),
        ("where: lr > 1", "unknown option where"),
        ("runs: 3", "runs must be a list of mappings"),
        ("a: [", "is not valid"),
        ("batch-sise: 4", "unknown option batch-sise, did you mean batch-size"),
        ("ckpt_interval: 4", "--ckpt-interval: has no effect on a benchmark"),
        ("steps: 4", "--steps: has no effect on a benchmark"),
        ("adapter: a", "--adapter: a benchmark has random weights: give the rank"),
        ("batch: 4\nbatch_size: 2", "batch-size is given twice"),
        ("runs:\n- lr: 1\n  lr: 2", "line 4: lr is given in line 3 too"),
        ("runs: []", "an empty list"),
        ("batch: []", "an empty list"),
    ],
)
def test_wrong_files(rows, text, message):
    with pytest.raises(ConfigError, match=message):
        rows(text, ())


def test_missing_file(tmp_path):
    with pytest.raises(ConfigError, match="cannot read"):
        read_runs({}, tmp_path / "none.yaml")


@pytest.mark.parametrize("file", sorted(BENCHMARKS.glob("*/*.yaml")), ids=lambda p: p.name)
def test_our_own_files_are_valid(file):
    trains = file.stem.endswith("_law") or "tools/rate_sweep.py" in file.read_text()
    for options in read_runs({}, file, trains=trains):
        assert describe(options)["model"]
