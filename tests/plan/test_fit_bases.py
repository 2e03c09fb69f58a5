"""Searches beside adapters, for the format of the model too, and for the largest model."""

from __future__ import annotations

import json

import pytest

from llmq.base.dtypes import GIB
from llmq.commands.cli import _run
from llmq.options.options_io import make_config
from llmq.options.presets import preset
from llmq.plan import fit as searches
from llmq.plan.fit import Fit, search_bases
from llmq.plan.memory import Limits, OutOfMemory, needed_bytes
from llmq.plan.target import MachineOptions
from tests.plan.test_fit import planner_for

FULL = {"from-scratch": True, "opt-m-dtype": "bf16", "opt-v-dtype": "bf16"}


def bases(card: str, memory: float, host: float, **options: object) -> tuple:
    """The result for adapters of a small model: formats of the model, and speeds."""
    given = FULL | {"model": "gpt2-355m", "batch-size": 1, "grad-accumulation": 1}
    given |= {"lora-rank": 8} | options
    planner = planner_for("gpt2-355m", card)
    limits = Limits(device=int(memory * GIB), host=int(host * GIB))
    fixed = frozenset(name.replace("-", "_") for name in options)
    fit, found = search_bases(Fit(make_config(given), planner, limits, fixed))
    for candidate in found:
        plan = planner.plan(candidate.config)
        assert needed_bytes(plan, planner.spec) == candidate.need.device <= limits.device
        assert plan.host_bytes == candidate.need.host <= limits.host
    assert fit.base.base_dtype == found[0].config.base_dtype
    return [c.config.base_dtype for c in found], [c.need.speed for c in found]


def test_formats_of_the_model_beside_adapters():
    """8 bits as the card multiplies them, where that is faster; all of them with their speeds."""
    found, speeds = bases("4090", 4, 8)
    assert found[:3] == ["e4m3", "bf16", "nf4"]  # the coarsest is no faster
    of = dict(zip(reversed(found), reversed(speeds), strict=True))  # the first of each
    assert of["e4m3"] > 1.05 * of["bf16"] >= of["nf4"]
    assert bases("3090", 4, 8)[0][:3] == ["int8", "bf16", "nf4"]
    assert set(bases("4090", 4, 8, **{"base-dtype": "bf16"})[0]) == {"bf16"}
    assert set(bases("4090", 4, 8, **{"matmul-dtype": "bf16"})[0]) == {"bf16", "nf4"}


def test_no_format_fits():
    with pytest.raises(OutOfMemory, match="nothing fits: with --batch-size=1"):
        bases("4090", 0.5, 0.05)


def test_advice_knows_a_smaller_format(capsys):
    given = ["--model=gpt2-1558m", "--from-scratch", "--lora-rank=8", "--gpu-memory=2200MiB"]
    given += ["--batch-size=1", "--host-memory=1GiB"]
    assert _run(["plan", *given]) == 2
    assert "--base-dtype=nf4" in capsys.readouterr().err


def test_the_largest_model_that_fits():
    """A few presets are tried: with room in host memory a larger one than on the card alone."""
    few = ("gpt2-124m", "gpt2-355m", "gpt2-774m", "tiny")
    options = {"lora-rank": 8, "batch-size": 1, "grad-accumulation": 1, "base-dtype": "nf4"}
    config, fixed = make_config(options | {"from-scratch": True}), frozenset({"base_dtype"})

    def found(memory: float, host: float | None = None) -> str:
        sizes = {"gpu_memory": int(memory * GIB), "host_memory": host and int(host * GIB)}
        asked = MachineOptions(**sizes)
        name, _, where = next(searches._fits_by_size(config, asked, fixed, few))
        assert where.limits.host == (searches.ALONE if host is None else int(host * GIB))
        return name

    assert [found(gib) for gib in (0.75, 0.82, 1)] == ["gpt2-124m", "gpt2-355m", "gpt2-774m"]
    assert found(1, 0.05) == "gpt2-355m"


def test_the_command_for_the_largest_model(monkeypatch, capsys):
    monkeypatch.setattr(searches, "PRESETS", {"gpt2-124m": preset("gpt2-124m")})
    monkeypatch.setattr(searches, "NEWS_SECONDS", 0.0)
    fixed = ["--lora-rank=8", "--batch-size=1", "--grad-accumulation=1", "--base-dtype=nf4"]
    assert _run(["plan", "--largest", *fixed, "--card=4090", "--json"]) == 0
    out, err = capsys.readouterr()
    record = json.loads(out)
    assert "Searching, now gpt2-124m …" in err
    assert record["model"] == "gpt2-124m" and record["parameters"] == 124439808
    command = {*record["found"][0]["command"]}
    assert {"--model=openai-community/gpt2", "--download", "--base-dtype=nf4"} < command
    assert "--from-scratch" not in command, "adapters of random weights are refused"
    for flags, message in (
        (["--model=gpt2", "--card=4090"], "--largest: chooses the model, leave out --model"),
        (["--num-layers=2", "--card=4090"], "--largest: chooses the model, leave out --num-layers"),
        ([], "--largest: of how much memory? Give --gpu-memory or --card"),
        (["--card=4090", "--placement"], "--placement: has no meaning with --largest"),
        (["--gpu-memory=300MiB"], "no preset fits with these options"),
    ):
        assert _run(["plan", "--largest", *fixed, *flags]) == 2
        assert message in capsys.readouterr().err
