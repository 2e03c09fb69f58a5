"""Reading logs, smoothing, and the picture."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.image import imread

from llmq.commands.cli import _run
from llmq.train.plot import curve, read_log, smoothed


def write_log(path, steps, evals=()):
    records = [{"log": "cmd", "step": 0, "cmd": []}]
    records += [{"log": "step", "step": s, "loss": loss} for s, loss in steps]
    records += [{"log": "eval", "step": s, "loss": loss} for s, loss in evals]
    path.write_text(json.dumps(records))
    return path


def test_curves(tmp_path):
    """Steps that a resumed run did again count once; null is no number."""
    path = write_log(tmp_path / "a.json", [(0, 5.0), (1, 4.0), (2, 3.0), (1, 3.5), (3, None)])
    steps, losses = curve(read_log(path), "step")
    np.testing.assert_array_equal(steps, [0, 1, 2, 3])
    np.testing.assert_array_equal(losses, [5.0, 3.5, 3.0, np.nan])
    assert [len(part) for part in curve(read_log(path), "eval")] == [0, 0]


def test_smoothing_is_a_mean_over_a_window():
    values = np.random.default_rng(0).random(60)
    values[[3, 40]] = np.nan
    expected = [np.nanmean(values[max(i - 10, 0) : i + 11]) for i in range(60)]
    np.testing.assert_allclose(smoothed(values), expected, rtol=1e-12)  # summed in another order
    np.testing.assert_array_equal(smoothed(np.array([2.0])), [2.0])
    assert np.isnan(smoothed(np.full(30, np.nan))).all()


def test_picture(tmp_path, capsys):
    a = write_log(
        tmp_path / "a.json", [(i, 5 - i / 50) for i in range(100)], [(50, 4.1), (99, 3.2)]
    )
    b = write_log(tmp_path / "b.json", [(0, 5.0)])
    c = write_log(tmp_path / "c.json", [], [(7, 4.0)])
    out = tmp_path / "pictures" / "loss.png"
    assert _run(["plot", str(a), str(b), str(c), "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"wrote {out}\n"
    picture = imread(out)
    assert picture.shape[:2] == (600, 960)
    assert picture.std() > 0.05, "something is drawn"
    assert [p.name for p in out.parent.iterdir()] == ["loss.png"]
    for suffix, start in ((".svg", b"<?xml"), (".pdf", b"%PDF")):
        assert _run(["plot", str(a), "--out", str(out.with_suffix(suffix))]) == 0
        assert out.with_suffix(suffix).read_bytes().startswith(start)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot read the log"),
        ("[{", "is not a log of llmq train"),
        ('{"log": "step"}', "is not a log of llmq train: it holds no array"),
        ("[1, 2]", "is not a log of llmq train: it holds no array"),
        ('[{"log": "cmd"}]', "has nothing to plot"),
        ('[{"log": "step"}]', "a record of step has step None and loss None, not numbers"),
        ('[{"log": "step", "step": 1}]', "a record of step has step 1 and loss None"),
        ('[{"log": "eval", "step": 1, "loss": "x"}]', "record of eval has step 1 and loss 'x'"),
        ('[{"log": "step", "step": "1", "loss": 5}]', "has step '1' and loss 5, not numbers"),
        ("[" * 100_000, "is not a log of llmq train"),
    ],
)
def test_what_is_no_log(tmp_path, capsys, content, message):
    path = tmp_path / "log.json"
    if content is not None:
        path.write_text(content)
    out = tmp_path / "loss.png"
    assert _run(["plot", str(path), "--out", str(out)]) == 2
    printed, err = capsys.readouterr()
    assert (printed, err.count("\n")) == ("", 1)
    assert err.startswith("error: ")
    assert message in err
    assert not out.exists()


def test_names_that_mean_something_to_matplotlib(tmp_path, monkeypatch):
    labels = []
    legend = Axes.legend

    def keep(axes):
        labels.extend(text.get_text() for text in legend(axes).get_texts())

    monkeypatch.setattr(Axes, "legend", keep)
    logs = [write_log(tmp_path / f"{name}.json", [(0, 5.0)]) for name in ("a$_$b", "_c")]
    assert _run(["plot", *map(str, logs), "--out", str(tmp_path / "loss.png")]) == 0
    assert labels == [r"a\$_\$b: training", " _c: training"]


def test_unknown_kind_of_picture(tmp_path, capsys):
    log = write_log(tmp_path / "a.json", [(0, 5.0)])
    assert _run(["plot", str(log), "--out", str(Path("loss.jpgg"))]) == 2
    assert "--out: 'loss.jpgg' must end in .png, .svg or .pdf" in capsys.readouterr().err
