"""Final losses of many runs by one trainer, and the ladder of rates that `llmq sweep-lr` climbs."""

from __future__ import annotations

import json
import math

import pytest

from llmq.base.errors import ConfigError, LlmqError
from llmq.bench import losses
from llmq.bench.losses import lowest, measure_losses, run_sweep_lr
from llmq.bench.sweep_file import read_runs
from llmq.data.tokens import open_token_files
from llmq.run.trainer import Trainer
from llmq.text.tokenize import tokenize

SMALL = {
    "model": "tiny-qwen3",
    "vocab-size": "auto",
    "hidden-size": 64,
    "num-heads": 1,
    "num-kv-heads": 1,
    "head-dim": 64,
    "intermediate-size": 64,
    "num-layers": 1,
    "model-dtype": "fp32",
    "device": "cpu",
    "gpus": 1,
    "seq-len": 16,
    "batch-size": 2,
    "grad-accumulation": 1,
    "eval-num-steps": 2,
    "learning-rate": 0.01,
    "steps": 4,
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    text = folder / "a.txt"
    text.write_text("\n".join(f"{n} and {n * n}" for n in range(300)))
    tokenize([str(text)], tokenizer="bytes", out=folder, eval_fraction=0.0)
    return {"train-file": f"{folder}/train*.bin", "eval-file": "split:0.1"}


def trained_tokens(data):
    """The tokens of the part for training, in whole steps of 32."""
    (file,) = open_token_files([data["train-file"]])
    sequences = (file.num_tokens - 1) // 16
    return -(-(sequences - int(0.1 * sequences)) // 2) * 32


def rows(data, **lists):
    given = SMALL | data | {name.replace("_", "-"): value for name, value in lists.items()}
    return [row for one in _product(given) for row in read_runs(one, None, trains=True)]


def _product(given):
    for rate in given.pop("rates", [given["learning-rate"]]):
        yield given | {"learning-rate": rate}


def test_a_run_of_a_sweep_is_the_run_by_itself(device, data, tmp_path, monkeypatch):
    """Rates and lengths share a trainer, and each of their losses is that of a run of its own."""
    data = data | {"device": device}
    opened, open_one = [], Trainer.from_config.__func__
    by_config = classmethod(lambda cls, *args: opened.append(1) or open_one(cls, *args))
    monkeypatch.setattr(Trainer, "from_config", by_config)
    wanted = rows(data, rates=[0.01, 0.03]) + rows(data, steps=6, **{"warmup": 2})
    done = measure_losses(wanted, tmp_path / "runs.json")
    assert len(opened) == 1 and [run["options"] for run in done] == wanted
    for run in done[1:]:
        with Trainer(**{k.replace("-", "_"): v for k, v in run["options"].items()}) as alone:
            losses = [alone.step().loss for _ in range(alone.config.steps)]
            assert run["train_loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-12)
            assert run["loss"] == alone.validate(2).loss
    assert [run["tokens"] for run in done] == [128, 128, 192]
    assert {run["unique"] for run in done} == {trained_tokens(data)}


def test_what_is_done_is_not_made_again(data, tmp_path, monkeypatch):
    out = tmp_path / "runs.json"
    first = measure_losses(rows(data), out)
    monkeypatch.setattr(Trainer, "from_config", None)
    assert measure_losses(rows(data), out) == first
    report = json.loads(out.read_text())
    assert report["device"] and len(report["tokenizer"]) > 3
    monkeypatch.undo()
    out.write_text(json.dumps(report | {"tokenizer": "another"}))
    with pytest.raises(ConfigError, match="is of tokenizer another"):
        measure_losses(rows(data, steps=5), out)


def test_a_run_that_diverges_is_a_line_and_no_error(data, tmp_path):
    (run,) = measure_losses(rows(data, rates=[1e38], steps=6, grad_clip=0), tmp_path / "r.json")
    assert run["loss"] is None and run["train_loss"] is None


@pytest.mark.parametrize("odd", [{"steps": -1}, {"learning-rate": 0}, {"lora-rank": 4}])
def test_what_makes_no_sweep_is_refused(odd, data, tmp_path):
    (flag,) = odd
    with pytest.raises(ConfigError, match=f"--{flag}: "):
        measure_losses([SMALL | {"from-scratch": True} | data | odd], tmp_path / "r.json")
    assert not (tmp_path / "r.json").exists()


def ladder_of(best: float, monkeypatch):
    """run_sweep_lr's report where the loss is lowest at some rate."""
    made = []

    def measured(wanted, out):
        records = [
            {
                "options": row,
                "learning_rate": row["learning-rate"],
                "loss": None
                if row["learning-rate"] > 0.5
                else 3 + 0.1 * math.log2(row["learning-rate"] / best) ** 2,
                "width": 256,
                "optimizer": row.get("optimizer", "adamw"),
                "tokens": 1 << 24,
                "tokens_per_step": 1 << 14,
            }
            for row in wanted
        ]
        made.append(len(records))
        out.write_text(json.dumps({"runs": records}))
        return records

    monkeypatch.setattr(losses, "measure_losses", measured)
    return made


@pytest.mark.parametrize(("best", "made"), [(0.003, [5]), (0.011, [5, 6]), (0.0004, [5, 6])])
def test_a_ladder_goes_on_until_the_best_rate_is_inside(best, made, tmp_path, monkeypatch, capsys):
    lengths, out = ladder_of(best, monkeypatch), tmp_path / "rates.json"
    run_sweep_lr({"train-file": "x", "eval-file": "split"}, depth=4, rates=5, out=out)
    found = json.loads(out.read_text())
    assert lengths == made
    assert math.isclose(found["rate"], best, rel_tol=0.01)  # a parabola has no error but rounding
    assert found["width"] == 256 and len(found["runs"]) == made[-1]
    assert f"{found['rate']:g}" in capsys.readouterr().out


def test_a_ladder_of_muon_climbs_both_rates(tmp_path, monkeypatch):
    """That of what AdamW trains beside it is a multiple, so that one trainer makes all runs."""
    out = tmp_path / "rates.json"
    ladder_of(0.02, monkeypatch)
    given = {"train-file": "x", "eval-file": "split", "optimizer": "muon"}
    run_sweep_lr(given, depth=4, rates=5, out=out)
    found = json.loads(out.read_text())
    assert (found["optimizer"], found["muon_share"]) == ("muon", 0.25)
    rates = [(r["options"]["learning-rate"], r["options"]["muon-lr"]) for r in found["runs"]]
    assert rates == [(0.016 * 2.0**n, 0.004 * 2.0**n) for n in range(-2, 3)]
    run_sweep_lr(given | {"muon-lr": 0.01}, depth=4, rates=5, out=out)
    assert {r["options"]["muon-lr"] for r in json.loads(out.read_text())["runs"]} == {0.01}


def test_a_ladder_that_diverges_everywhere_is_an_error():
    runs = [{"learning_rate": 2.0**n, "loss": None} for n in range(3)]
    with pytest.raises(LlmqError, match="all runs diverged"):
        lowest(runs)
    runs[0]["loss"] = 3.0
    assert lowest(runs) == 1.0
    with pytest.raises(ConfigError, match="at least 3"):
        run_sweep_lr({}, depth=4, rates=2, out=None)
