"""Reading logs, smoothing, and the page of curves: as a picture and in HTML."""

from __future__ import annotations

import io
import json
import re

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from llmq.commands.cli import _run
from llmq.report.plot import (
    LOSS,
    MAX_POINTS,
    _averages,
    figure_of,
    panels_of,
    read_log,
    read_runs,
    series_of,
    smoothed,
    thinned,
)


def write_log(path, steps, evals=(), others=(), start=()):
    records = [{"log": "cmd", "step": 0, "cmd": [], "resumed_at": 0}, *start]
    records += [{"log": "step", "step": s, "loss": loss} for s, loss in steps]
    records += [{"log": "eval", "step": s, "loss": loss} for s, loss in evals]
    return write_records(path, [*records, *others])


def write_records(path, records):
    path.write_text(json.dumps([{"time": "2026-11-26 00:00:00.000000000"} | r for r in records]))
    return path


def whole_run(path, steps=6, scale=1.0):
    """With every kind of number that a log may have."""
    records = [{"log": "cmd", "step": 0, "cmd": [], "resumed_at": 0}]
    for s in range(steps):
        if s == 2:
            for name in (None, "code"):
                named = {} if name is None else {"name": name}
                records.append({"log": "eval", "step": s, "loss": 4.0, **named})
            task = {"log": "task", "step": s, "name": "arc", "metric": "acc", "value": 0.25}
            records += [task, task | {"name": "piqa", "value": 0.5}]
            records.append(task | {"metric": "bits per byte", "value": 1.5})
        records.append(
            {"log": "step", "step": s, "loss": scale * (5 - s / 10), "norm": 1.0, "lr": 1e-3}
            | {"step_tokens": 1000, "duration_ms": 1_800_000}
        )
        for rank in range(2):
            gpu = {"log": "gpu", "step": s, "rank": rank, "power": 300_000, "clock": 1980 - rank}
            records.append(gpu | ({"clock": -1} if rank == 1 else {}))
    return write_records(path, records)


def test_curves(tmp_path):
    """Steps that a resumed run did again count once; null is no number."""
    path = write_log(tmp_path / "a.json", [(0, 5.0), (1, 4.0), (2, 3.0), (1, 3.5), (3, None)])
    (series,) = series_of(read_log(path))
    np.testing.assert_array_equal(series.x["step"], [0, 1, 3])
    np.testing.assert_array_equal(series.y, [5.0, 3.5, np.nan])


def test_everything_that_a_log_has(tmp_path):
    found = series_of(read_log(whole_run(tmp_path / "a.json")))
    assert [(s.panel, s.label) for s in found] == [
        (LOSS, "training"),
        (LOSS, "evaluation"),
        (LOSS, "evaluation code"),
        ("acc", "arc"),
        ("acc", "piqa"),
        ("bits per byte", "arc"),
        ("learning rate", "training"),
        ("gradient norm", "training"),
        ("tokens per second", "training"),
        ("GPU power (W)", "GPU 0"),
        ("GPU power (W)", "GPU 1"),
        ("GPU clock (MHz)", "GPU 0"),
    ]
    training, evaluation, power = found[0], found[1], found[9]
    np.testing.assert_array_equal(training.x["tokens"], [1000, 2000, 3000, 4000, 5000, 6000])
    np.testing.assert_array_equal(training.x["hours"], [0.5, 1, 1.5, 2, 2.5, 3])
    assert {axis: list(x) for axis, x in evaluation.x.items()} == {
        "step": [2],
        "tokens": [2000],  # it comes before step 2
        "hours": [1.0],
    }
    np.testing.assert_array_equal(power.x["tokens"], training.x["tokens"])
    assert set(power.y) == {300.0}
    np.testing.assert_allclose(found[8].y, 1000 / 1800)


def test_tokens_of_a_fork_begin_where_it_does(tmp_path):
    steps = [{"log": "step", "step": s, "loss": 1.0, "step_tokens": 10} for s in (5, 6)]
    path = write_log(tmp_path / "a.json", [], others=steps)
    np.testing.assert_array_equal(series_of(read_log(path))[0].x["tokens"], [60, 70])


def test_a_log_that_is_being_written(tmp_path):
    path = whole_run(tmp_path / "a.json")
    path.write_text(path.read_text()[:-30])
    assert len(series_of(read_log(path))[0].y) == 6


def tensorboard_mean(values, weight):
    """Smoothing of TensorBoard's scalar charts, as its line_chart_data_loader has it."""
    last, count, means = 0.0, 0, []
    for value in values:
        if np.isfinite(value):
            last, count = last * weight + (1 - weight) * value, count + 1
            means.append(last / (1 - weight**count))
        else:
            means.append(np.nan)
    return means


@pytest.mark.parametrize("weight", [0.0, 0.6, 0.99])
def test_smoothing_is_that_of_tensorboard(weight):
    values = np.random.default_rng(0).random(60)
    values[[3, 40]] = np.nan
    expected = tensorboard_mean(values, weight)
    np.testing.assert_allclose(smoothed(values, weight), expected, rtol=1e-12)  # another order
    assert np.isnan(smoothed(np.full(30, np.nan))).all()


def test_thinned_series_are_smoothed_by_what_they_stand_for():
    """Means of the values between kept points, with their numbers, have the mean of all values."""
    values = np.random.default_rng(0).normal(5.0, 1.0, 20_000)
    values[[7, 9_000]] = np.nan
    kept = thinned(values)
    averages, counts = _averages(values, kept)
    assert counts.sum() == 19_998
    np.testing.assert_allclose(np.nansum(averages * counts), np.nansum(values), rtol=1e-12)
    found = smoothed(averages, 0.999, counts)[100:]
    np.testing.assert_allclose(found, smoothed(values, 0.999)[kept][100:], atol=0.03)


# ------------------------------------------------------------------------------------------------
# The picture


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
    assert picture.shape[:2] == (500, 1000)
    assert picture.std() > 0.05, "something is drawn"
    assert [p.name for p in out.parent.iterdir()] == ["loss.png"]
    for suffix, start in ((".svg", b"<?xml"), (".pdf", b"%PDF")):
        assert _run(["plot", str(a), "--out", str(out.with_suffix(suffix))]) == 0
        assert out.with_suffix(suffix).read_bytes().startswith(start)


def test_one_step_is_a_point(tmp_path, monkeypatch):
    """On each axis; a line of one point would draw nothing."""
    monkeypatch.chdir(tmp_path)
    whole_run(tmp_path / "a.json", steps=1)
    for x in ("step", "tokens", "hours"):
        assert _run(["plot", "a.json", "--x", x, f"--out={x}.html"]) == 0
    (loss, *_) = read_runs([tmp_path / "a.json"], "tokens")["a"]
    assert loss.points and loss.x["tokens"].tolist() == [1000]


def test_nothing_is_overwritten_unasked(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_log(tmp_path / "a.json", [(0, 5.0), (1, 4.0)])
    for name in ("loss.html", "loss-2.html", "loss-3.html"):
        assert _run(["plot", "a.json", "--html"]) == 0
        assert capsys.readouterr().out == f"wrote {name}\n"
    (tmp_path / "loss.html").write_text("mine")
    assert _run(["plot", "a.json", "--out=loss.html"]) == 2
    assert "--out: 'loss.html' is there already: add --overwrite" in capsys.readouterr().err
    assert (tmp_path / "loss.html").read_text() == "mine"
    assert _run(["plot", "a.json", "--html", "--overwrite"]) == 0
    assert capsys.readouterr().out == "wrote loss.html\n"


@pytest.mark.parametrize("x", ["step", "tokens", "hours"])
def test_all_panels_on_one_page(tmp_path, x):
    logs = [whole_run(tmp_path / "a.json"), whole_run(tmp_path / "b.json", steps=3, scale=2.0)]
    runs = read_runs(logs, x)
    panels = panels_of(runs)
    assert panels == list(dict.fromkeys(s.panel for s in runs["a"]))
    axes = figure_of(runs, x).axes
    assert [a.get_title() for a in axes] == panels
    loss, tasks = axes[0], axes[1]
    assert legend_of(loss) == ["training", "evaluation", "evaluation code"]
    assert legend_of(tasks) == ["arc", "piqa"]
    faint, curve = loss.lines[:2]
    np.testing.assert_array_equal(faint.get_xdata(), runs["a"][0].x[x])
    np.testing.assert_array_equal(curve.get_ydata(), smoothed(runs["a"][0].y))
    assert loss.lines[-1].get_color() != faint.get_color()


def legend_of(axes):
    return [text.get_text() for text in axes.get_legend().get_texts()]


def test_legends_name_runs_and_cover_no_data(tmp_path):
    """The name is that of the run, not of its file; no legend lies over any axes."""
    logs = [tmp_path / f"{name}-2026-11-29T10-00-00.json" for name in ("talks", "other")]
    for log, name in zip(logs, ("talks", "other"), strict=True):
        records = json.loads(whole_run(log).read_text())
        records[0]["run"] = {"id": f"id-{name}", "name": name}
        write_records(log, records)
    figure = figure_of(read_runs(logs, "step"), "step")
    figure.savefig(io.BytesIO())
    (names,) = figure.legends
    assert [text.get_text() for text in names.get_texts()] == ["talks", "other"]
    legends = [names, *filter(None, (axes.get_legend() for axes in figure.axes))]
    assert len(legends) > 2
    for legend in legends:
        box = legend.get_window_extent()
        assert not any(box.overlaps(axes.bbox.shrunk(0.999, 0.999)) for axes in figure.axes)


@pytest.mark.parametrize("steps", [6, 1])
def test_panels_leave_no_cell_empty(tmp_path, steps):
    """A last panel without a neighbour takes the whole row."""
    runs = read_runs([whole_run(tmp_path / "a.json", steps)], "step")
    for dropped in (None, "gradient norm"):
        runs = {run: [s for s in of if s.panel != dropped] for run, of in runs.items()}
        axes = figure_of(runs, "step").axes
        cells = [ax.get_subplotspec() for ax in axes]
        taken = sum(len(cell.rowspan) * len(cell.colspan) for cell in cells)
        assert taken == cells[0].get_gridspec().nrows * cells[0].get_gridspec().ncols


def test_losses_of_other_units_have_axes_of_their_own(tmp_path):
    """A loss of pairs is no number of nats per token, and shares no axis with one."""
    logs = []
    for loss in ("ce", "dpo", "kto"):
        option = {"log": "option", "step": 0, "name": "loss", "value": loss}
        logs.append(write_log(tmp_path / f"{loss}.json", [(0, 5.0)], [(0, 5.0)], start=[option]))
    runs = read_runs(logs, "step")
    titles = [LOSS, "dpo loss (per pair)", "kto loss (per answer)"]
    assert panels_of(runs) == titles
    assert [{s.panel for s in of} for of in runs.values()] == [{title} for title in titles]


NONE = "is not a log of llmq train: what comes after 0 records, from byte 0 on, is no record"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot read the log"),
        ("[{", "has nothing to plot"),
        ('[{"log": "step"}]', NONE),
        ('[{"log": "step", "step": 1, TIME}]', "a record of step at step 1 has loss None, not a n"),
        ('[{"log": "eval", "step": 1, "loss": "x", TIME}]', "of eval at step 1 has loss 'x', not"),
        (
            '[{"log": "step", "step": 1%s, "loss": 5, TIME}]' % ("0" * 30),
            "a record is not as it should be (OverflowError(",
        ),
    ],
)
def test_what_is_no_log(tmp_path, capsys, content, message):
    path = tmp_path / "log.json"
    if content is not None:
        path.write_text(content.replace("TIME", '"time": "2026-11-26 00:00:00.000000000"'))
    out = tmp_path / "loss.png"
    assert _run(["plot", str(path), "--out", str(out)]) == 2
    printed, err = capsys.readouterr()
    assert (printed, err.count("\n")) == ("", 1)
    assert err.startswith("error: ")
    assert message in err
    assert not out.exists()


def test_names_that_mean_something_to_matplotlib(tmp_path, monkeypatch):
    labels = []
    legend = Figure.legend

    def keep(figure, *given, **options):
        labels.extend(text.get_text() for text in legend(figure, *given, **options).get_texts())

    monkeypatch.setattr(Figure, "legend", keep)
    logs = [write_log(tmp_path / f"{name}.json", [(0, 5.0)]) for name in ("a$_$b", "_c")]
    assert _run(["plot", *map(str, logs), "--out", str(tmp_path / "loss.png")]) == 0
    assert labels == [r"a\$_\$b", " _c"]


def test_logs_of_the_same_name(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
    logs = [write_log(tmp_path / folder / "log.json", [(0, 5.0)]) for folder in ("a", "b")]
    assert list(read_runs(logs, "step")) == [str(log) for log in logs]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--out", "loss.jpgg"], "--out: 'loss.jpgg' must end in .png, .svg, .pdf or .html"),
        (["--html", "--out", "a.png"], "--html: writes a page, but --out 'a.png' is a picture"),
        (["--x", "days"], "--x: expected step or tokens or hours, got 'days'"),
        (["--x", "hours"], "does not say how many hours its steps took"),
    ],
)
def test_what_cannot_be_drawn(tmp_path, capsys, monkeypatch, args, message):
    monkeypatch.chdir(tmp_path)
    write_log(tmp_path / "a.json", [(0, 5.0), (1, 4.0)])
    assert _run(["plot", "a.json", *args]) == 2
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
    assert _run(["plot", "a.json", "a.json"]) == 2
    assert "a log is given twice" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------
# The page


@pytest.fixture
def page(tmp_path, monkeypatch):
    """A page of two runs, the second with a name that is markup."""
    monkeypatch.chdir(tmp_path)
    whole_run(tmp_path / "a.json")
    whole_run(tmp_path / "<b>&.json", steps=3, scale=2.0)
    assert _run(["plot", "a.json", "<b>&.json", "--x", "tokens", "--html"]) == 0
    return tmp_path / "loss.html"


def test_a_page_holds_all_and_loads_nothing(page):
    text = page.read_text()
    assert re.findall(r"\b(?:src|href)\s*=|@import|url\(|fetch\(|XMLHttp|\bimport\b", text) == []
    assert set(re.findall(r"https?://[^\s\"']+", text)) == {"http://www.w3.org/2000/svg"}
    data = json.loads(re.search(r"^const data = (.*);$", text, re.MULTILINE)[1])
    assert (data["x"], list(data["axes"])) == ("tokens", ["step", "tokens", "hours"])
    assert list(data["runs"]) == ["a", "<b>&"]
    assert "<b>" not in text.replace("\\u003cb>", "")
    training = data["series"][0]
    assert training["x"]["tokens"] == [1000, 2000, 3000, 4000, 5000, 6000]
    np.testing.assert_allclose(training["y"], [5 - s / 10 for s in range(6)])
    assert {s["panel"] for s in data["series"]} == set(data["panels"])


def test_long_series_are_thinned_to_their_extremes():
    values = np.zeros(100_000)
    values[[12_345, 54_321]] = 9.0, -9.0
    values[777] = np.nan
    kept = thinned(values)
    assert len(kept) <= MAX_POINTS + 2
    assert {0, 12_345, 54_321, 99_999} <= set(kept) and (np.diff(kept) > 0).all()
    np.testing.assert_array_equal(thinned(np.zeros(5)), np.arange(5))
    assert len(thinned(np.full(10_000, np.nan))) == 2
