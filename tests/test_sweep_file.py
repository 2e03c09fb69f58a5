"""Files of sweeps: grids, lists that go together, conditions, single runs."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest

from llmq.base.errors import ConfigError
from llmq.bench.sweep_file import Condition, read_runs

VALUES = {"batch-size": 4, "seq-len": 1024, "model-dtype": "bf16", "lr": 1e-4, "memory-limit": None}
VALUES |= {"recompute-block": True, "offload-master": False, "continue": None}


def holds(text):
    return Condition(text, VALUES).holds(VALUES.__getitem__)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("batch-size * seq-len <= 4096", True),
        ("batch_size*seq_len<4096", False),
        ("batch-size - 1 == 3 and seq-len % 3 == 1", True),
        ("2 + 3 * 4 == 14 and (2 + 3) * 4 == 20 and 7 // 2 * 2 == 6 and 10 - 4 - 3 == 3", True),
        ("-batch-size == - 4 and 1e-4 == lr and seq-len / 8 > 127.5", True),
        ("1 <= batch-size < 4", False),
        ("1 < batch-size <= 4 != 5", True),
        ("model-dtype == 'bf16' and model-dtype != \"fp32\"", True),
        ("model-dtype in ['fp32', 'e4m3'] or batch-size not in [1, 2, 3]", True),
        ("model-dtype in []", False),
        ("batch-size in [1, 4]", True),
        ("not recompute-block or offload-master", False),
        ("not (recompute-block and offload-master)", True),
        ("recompute-block == true and offload-master == False and memory-limit == none", True),
        ("not not recompute-block", True),
        ("seq-len * 1MiB <= 1GiB and 1GiB == 1024 * 1MiB", True),
        ("batch-size == 4 or batch-size < memory-limit", True),  # the rest is not looked at
        ("'a' < 'b'", True),
        ("model-dtype == none or memory-limit != 3 and 'a\\b' != 'a'", True),
        ("continue == none\n  and batch-size\n  == 4.0", True),
    ],
)
def test_conditions(text, expected):
    assert holds(text) is expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("batch-size *", "invalid syntax"),
        ("batch-size * <= 3", "invalid syntax"),
        ("(batch-size < 3", "'\\(' was never closed"),
        ("batch-size < 3)", "unmatched '\\)'"),
        ("batch-size 3", "invalid syntax"),
        ("batch-size ** 3 < 9", "a condition has no pow"),
        ("[1, 2][0] == 1", "a condition has no subscript"),
        ("'bf16' 'fp32' == model-dtype", "a condition has no call"),
        ("model-dtype in ['bf16' 'fp32']", "a condition has no call"),
        ("(1, 2) == (1, 2)", "a condition has no tuple"),
        ("batch-size = 4", "cannot read '= 4'"),
        ("batch-size < 3 # 5", "cannot read '# 5'"),
        ("batch-sise < 3", "unknown option batch-sise, did you mean batch-size"),
        ("model-dtype == xyzzy", "unknown option xyzzy, text stands in quotes"),
        ("lambda: 1", "unknown option lambda"),
        ("__import__('os').system('ls')", "unknown option __import__"),
        ("model-dtype.upper() == 'BF16'", "cannot read .\\.upper"),
        ("recompute-block(3)", "a condition has no call"),
        ("batch-size < 3; 1", "cannot read '; 1'"),
        ("'bf16", "cannot read"),
        ("", "invalid syntax"),
        ("not", "invalid syntax"),
        ("batch-size not [4]", "invalid syntax"),
        ("12abc == 3", "12abc is no number"),
        ("1e999 > 3", "1e999 is no number"),
        ("batch-size", "4 is neither true nor false"),
        ("batch-size and true", "4 is neither true nor false"),
        ("not batch-size", "4 is neither true nor false"),
        ("model-dtype == 'fp32' or 'bf16'", "'bf16' is neither true nor false"),
        ("batch-size < memory-limit", "'<' not supported between instances of 'int' and 'None"),
        ("batch-size < '4'", "'<' not supported between instances of 'int' and 'str'"),
        ("batch-size == '4'", "4 never equals '4': number and text"),
        ("batch-size != '4'", "4 never equals '4': number and text"),
        ("batch-size in [1, '4']", "4 never equals '4': number and text"),
        ("recompute-block == 1", "True never equals 1: switch and number"),
        ("model-dtype == ['bf16']", "'bf16' never equals \\['bf16'\\]: text and list"),
        ("model-dtype - 1 == 3", "unsupported operand"),
        ("'a' * 1000000000 == 'a'", "will not evaluate something that long"),
        ("batch-size / 0 < 1", "division by zero"),
        ("batch-size in 4", "in needs a list, got 4"),
        ("(" * 1000 + "1" + ")" * 1000, "nested"),
        ("-" * 1000 + "1 < 2", "nested"),
        ("not " * 1000 + "true", "nested"),
    ],
)
def test_what_is_no_condition(text, message):
    with pytest.raises(ConfigError, match=message) as caught:
        holds(text)
    assert str(caught.value).startswith("where: ") and "\n" not in str(caught.value)


# -- files ---------------------------------------------------------------------------------------


@pytest.fixture
def rows(tmp_path):
    """The rows that a file stands for, as the values of some options."""

    def read(text, names, given=None):
        path = tmp_path / "sweep.yaml"
        path.write_text("model: tiny\n" + text)
        return [tuple(run.get(name) for name in names) for run in read_runs(given or {}, path)]

    return read


def test_lists_go_together_under_zip(rows):
    text = "zip: {batch: [1, 2, 4], seq_len: [256, 128, 64]}\nrecompute-block: [false, true]\n"
    names = ("recompute-block", "batch-size", "seq-len")
    pairs = [(1, 256), (2, 128), (4, 64)]
    assert rows(text, names) == [(r, *pair) for r in (False, True) for pair in pairs]
    both = "zip:\n- {batch-size: [1, 2]}\n- {seq-len: [64, 32], lr: [1, 2]}\n"
    found = rows(both, ("batch-size", "seq-len", "learning-rate"))
    assert found == [(1, 64, 1), (1, 32, 2), (2, 64, 1), (2, 32, 2)]


def test_conditions_choose_rows(rows):
    names = ("batch-size", "seq-len", "grad-accumulation")
    text = "batch-size: [1, 2, 4]\nseq-len: [64, 128]\nwhere: batch-size * seq-len <= 128\n"
    assert [row[:2] for row in rows(text, names)] == [(1, 64), (1, 128), (2, 64)]
    both = text + "grad-accumulation: [1, 4]\n"
    both = both.replace("where: ", "where:\n- grad-accumulation != 4 or batch-size == 1\n- ")
    expected = [(1, 64, 1), (1, 64, 4), (1, 128, 1), (1, 128, 4), (2, 64, 1)]
    assert rows(both, names) == expected
    # An option that is not given has its default, and text from the command line is a number.
    assert rows("where: grad-accumulation == 4", names, {"seq-len": "64"}) == [(None, "64", None)]
    assert rows("seq-len: 64\nwhere: seq-len == 32", names, {"seq-len": "32"})[0][1] == "32"


def test_invalid_combinations_may_be_excluded(rows):
    text = "batch-size: [0, 1]\n"
    with pytest.raises(ConfigError, match=r"--batch-size: must be at least 1.*\(run --model=tiny"):
        rows(text, ("batch-size",))
    assert rows(text + "where: batch-size > 0\n", ("batch-size",)) == [(1,)]


def test_runs_have_lists_and_conditions_of_their_own(rows):
    text = (
        "batch-size: [1, 2]\n"
        "zip: {seq-len: [32, 64], lr: [1, 2]}\n"
        "where: batch-size * seq-len <= 64\n"
        "runs:\n"
        "- {recompute-block: true, where: lr == 1}\n"
        "- {batch-size: 8, seq-len: 8}\n"
        "- {zip: {batch-size: [1, 2], seq-len: [8, 4]}, lr: 3}\n"
    )
    assert rows(text, ("recompute-block", "batch-size", "seq-len", "learning-rate")) == [
        (True, 1, 32, 1),
        (True, 2, 32, 1),
        (None, 8, 8, 1),
        (None, 8, 8, 2),
        (None, 1, 8, 3),
        (None, 2, 4, 3),
    ]


def test_the_command_line_wins_over_lists_that_go_together(rows):
    text = "zip: {lr: [1, 2], batch-size: [1, 2]}"
    found = rows(text, ("learning-rate", "batch-size"), {"batch-size": "8"})
    assert found == [(1, "8"), (2, "8")]


def test_equal_runs_are_made_once(rows):
    text = "zip: {lr: [1, 1.0, 2], watchdog: [10, 20, 10]}\nruns:\n- {}\n- {lr: 1}\n"
    assert rows(text, ("learning-rate", "watchdog")) == [(1, 10), (2, 10)]


def test_the_file_of_the_page(tmp_path):
    """The numbers that docs/sweeps.md shows are of its file."""
    page = (Path(__file__).parents[1] / "docs" / "sweeps.md").read_text()
    block = re.search(r"the command line wins\.\n\n((?:    .*\n)+)", page)[1]
    path = tmp_path / "sweep.yaml"
    path.write_text(textwrap.dedent(block))
    runs = read_runs({}, path)
    assert f"[7/{len(runs)}]" in page
    assert max(int(run["batch-size"]) * int(run["seq-len"]) for run in runs) == 32768
    assert {run["batch-size"] * run["grad-accumulation"] for run in runs} == {64}
    large = [run for run in runs if run["model"] == "Qwen2.5-1.5B"]
    assert large and all(run["recompute-block"] for run in large)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("zip: {lr: [1, 2], seed: [1]}", "equally long: lr has 2, seed has 1"),
        ("zip: {lr: 1}", "zip must be a mapping of options to lists"),
        ("zip: [1, 2]", "zip must be a mapping of options to lists"),
        ("zip: {lr: []}", "an empty list"),
        (
            "lr: 1\nzip: {lr: [1, 2], seed: [1, 2]}",
            "learning-rate is given twice, once of it under zip",
        ),
        ("zip:\n- {lr: [1]}\n- {learning-rate: [1]}", "is given twice"),
        ("zip: {nonsense: [1, 2]}", "unknown option nonsense"),
        ("zip: {steps: [1, 2]}", "--steps: has no effect on a benchmark"),
        (
            "".join(
                f"{n}: [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]\n"
                for n in ("seed", "lr", "beta-1", "beta-2", "warmup", "grad-clip")
            ),
            "its lists stand for 1000000 runs",
        ),
        ("where: true", "where must be a condition or a list of conditions"),
        ("where: [1]", "where must be a condition or a list of conditions"),
        ("where: batch-size > 99", "none of the 1 runs meets `where`"),
        ("where: batch-size >", "where: batch-size >: invalid syntax"),
        ("lr: [1, x]\nwhere: lr > 0", "where: lr > 0: --learning-rate: expected a number"),
    ],
)
def test_wrong_files(rows, text, message):
    with pytest.raises(ConfigError, match=message):
        rows(text, ())
