"""The search for what fits, `llmq plan --fit` and `llmq train --auto`."""

from __future__ import annotations

import itertools
import json
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest

from llmq.base.dtypes import GIB, MIB
from llmq.commands.cli import _run
from llmq.options.cards import find_card, spec_of
from llmq.options.options import TrainConfig
from llmq.options.options_io import make_config
from llmq.options.presets import preset, resolve_model
from llmq.plan import advice
from llmq.plan.cost import Network
from llmq.plan.estimate import FEW_LAYERS, Planner
from llmq.plan.fit import Fit, SearchResult, choose, eight_bit_gain
from llmq.plan.memory import Limits, OutOfMemory, SsdUse, needed_bytes
from llmq.plan.plan import Plan, make_plan
from llmq.plan.shrink import REARRANGING, ROUNDING, Shrinker, having
from llmq.plan.target import CONTEXT_WHEN_ASKED, MachineOptions, target
from llmq.runtime.device import HOST_SPEC
from llmq.runtime.gpu_info import drives_display
from llmq.runtime.machine import Machine
from tests.runs import make_workplace

FULL = {"from-scratch": True, "opt-m-dtype": "bf16", "opt-v-dtype": "bf16"}


@cache
def planner_for(model: str, card: str, backend: str = "cudnn") -> Planner:
    """The same one for all searches, which keeps its estimates."""
    chosen = find_card(card)
    return Planner(preset(model), spec_of(chosen), backend, chosen)


@contextmanager
def counted_plans() -> Iterator[tuple[list[int], dict[TrainConfig, Plan]]]:
    """The number of layers of each plan that is made in the `with` block: how long it takes; and
    those of more layers than estimates are made from."""
    layers, whole, make = [], {}, Planner.plan

    def counted(planner, config, *parts):
        layers.append(planner.model.num_layers)
        plan = make(planner, config, *parts)
        if planner.model.num_layers > 2 * FEW_LAYERS + 1:
            whole[config] = plan
        return plan

    with patch.object(Planner, "plan", counted):
        yield layers, whole


def search(
    model: str,
    card: str,
    host: float | None,
    fixed: tuple[str, ...] = (),
    memory: float | None = None,
    **options: object,
) -> list:
    """Candidates for a model on a card. host, memory: GiB; memory None: what the card has."""
    given = FULL | {"model": model, "batch-size": 16, "grad-accumulation": 32}
    given |= {name.replace("_", "-"): value for name, value in options.items()}
    config, planner = make_config(given), planner_for(model, card)
    memory = memory or planner.card.memory
    limits = Limits(device=int(memory * GIB), host=host and int(host * GIB))
    with counted_plans() as (layers, whole):
        found = Fit(config, planner, limits, frozenset(fixed)).search()
    # A plan of all layers takes 0.1 to 0.5 s, one of two or three 5 to 20 ms. The searches below
    # make up to 6, and 569 in all: the bounds let the search change, but not take twice as long.
    assert layers.count(planner.model.num_layers) <= 10 and len(layers) <= 1000
    speeds = [candidate.need.speed for candidate in found]
    assert speeds == sorted(speeds, reverse=True) and 1 <= len(found) <= 5
    for candidate in found:
        check(candidate, config, planner, limits, whole[candidate.config])
    return found


def check(candidate, config: TrainConfig, planner: Planner, limits: Limits, plan: Plan) -> None:
    """The candidate fits by its whole plan, and computes the same numbers in the same steps."""
    chosen, need = candidate.config, candidate.need
    assert needed_bytes(plan, planner.spec) == need.device <= limits.device
    assert plan.host_bytes == need.host
    assert limits.host is None or need.host <= limits.host
    product = config.batch_size * config.grad_accumulation
    assert chosen.batch_size * chosen.grad_accumulation == product
    chosen.validate_with(planner.model)
    for name in ("model_dtype", "master_dtype", "opt_m_dtype", "opt_v_dtype", "grad_accum_dtype"):
        assert getattr(chosen, name) == getattr(config, name)


def test_a_model_with_room_to_spare_keeps_its_options():
    best = search("Qwen2.5-0.5B", "h100", 100, grad_accumulation=1)[0]
    assert best.need.host < GIB
    assert not best.config.recompute_ffn and not best.config.offload_opt_m
    assert best.config.batch_size >= 16


def test_7b_in_16_gib():
    found = search("Qwen2.5-7B", "5060 ti", 64, grad_accumulation=4)[0]
    best, speed = found.config, found.need.speed
    # 7.6e9 weights in bf16 are 14.2 GiB: neither they nor anything else as large can stay.
    assert best.shard_weights and best.offload_master
    assert best.offload_opt_m and best.offload_opt_v and best.offload_gradients
    assert speed > 889  # llm.q's published run on this card, with all blocks recomputed


def test_what_was_given_stays():
    fixed = {"recompute_block": True, "lmhead_chunks": 2, "offload_opt_m": False}
    found = search("Qwen2.5-1.5B", "4070", None, tuple(fixed), **fixed, grad_accumulation=1)
    for candidate in found:
        assert {name: getattr(candidate.config, name) for name in fixed} == fixed


def test_without_host_memory_there_is_another_way():
    found = search("Qwen2.5-0.5B", "5060 ti", 32, memory=8, grad_accumulation=1)
    assert any(candidate.need.host > GIB for candidate in found)
    assert any(candidate.need.host < GIB for candidate in found)


FEW = {"batch_size": 1, "grad_accumulation": 1}


def test_state_goes_to_files_where_host_memory_is_short():
    """Predicted at the disk's rates: a faster disk makes the same step faster."""
    given = {"grad_accumulation": 2, "batch_size": 8, "offload_dir": ["/disk"]}
    (best, *_) = search("Qwen2.5-1.5B", "4060", 2, **given)
    assert best.config.ssd and best.need.host <= 2 * GIB
    planner = planner_for("Qwen2.5-1.5B", "4060")
    use = SsdUse.of(planner.plan(best.config))
    assert use.nbytes > GIB and use.read >= use.written > 0
    fast = Planner(*planner_args(planner), replace(planner.card, disk=(12.0, 4.0)))
    moved = [rate * use.read / 6e9 + rate * use.written / 2e9 for rate in (1.0, 0.5)]
    gained = best.need.time.total - fast.exact(best.config).time.total
    assert 0 < gained <= 1.01 * (moved[0] - moved[1])
    assert "a disk rated for 600 TB lasts" in use.words(best.need.time.total)


def planner_args(planner: Planner) -> tuple:
    return planner.model, planner.spec, planner.backend


def refusal(model: str, host: float | None, memory: float, **options: object) -> str:
    with pytest.raises(OutOfMemory) as error:
        search(model, "4090", host, memory=memory, **FEW, **options)
    headline = error.value.headline
    assert headline.startswith("nothing fits: with --batch-size=1 ") and "\n" not in headline
    return str(error.value)


def help_in(text: str) -> list[str]:
    """The lines on what would help, one each."""
    lines = text.partition("what would help:\n")[2].splitlines()
    found = list(itertools.takewhile(lambda line: line.startswith("  "), lines))
    return [line.strip() for line in found]


def test_refusal_for_want_of_host_memory():
    text = refusal("gpt2-1558m", 6, 2.0)
    assert " it is out of host memory: " in text and " 6144 MiB are available (largest: " in text
    ways = help_in(text)
    # Follow the advice.
    (host,) = [way for way in ways if way.endswith(" of host memory")]
    assert search("gpt2-1558m", "4090", int(host.split()[0]) / 1024, memory=2, **FEW)
    (model,) = [way for way in ways if way.startswith("--model=")]
    assert search(model.removeprefix("--model="), "4090", 6, memory=2, **FEW)


def test_what_goes_to_host_memory_is_chosen_as_a_whole():
    """The cheapest to put there comes first; where both memories are nearly full it is too large,
    or too small."""
    memory, host, hosted = 4.5, 8.27, "residual opt_m opt_v master"
    sizes = FEW | {"matmul_dtype": "e4m3"}
    lightest = {"recompute_block", "shard_weights", "shard_gradients"}
    names = lightest | {f"offload_{name}" for name in hosted.split()}
    given = FULL | {"model": "Qwen2.5-1.5B", "lmhead-chunks": 4}
    given |= {name.replace("_", "-"): value for name, value in sizes.items()}
    planner = planner_for("Qwen2.5-1.5B", "4090")
    need = planner.exact(make_config(given | {n.replace("_", "-"): True for n in names}))
    assert (need.device / GIB, need.host / GIB) == pytest.approx((memory, host), abs=0.1)
    # Room for nothing else: the least that anything saves by going elsewhere is 80 MiB.
    found = search("Qwen2.5-1.5B", "4090", host + 0.06, memory=memory + 0.06, **sizes)
    assert found[0].need.host > host - 0.1


def test_refusal_of_what_fits_after_all():
    """Estimates may be wrong; with nothing missing there is nothing to say of what is missing."""
    config = make_config({"model": "tiny", "batch-size": 1, "grad-accumulation": 6, "seq-len": 32})
    planner = Planner(preset("tiny"), HOST_SPEC, "native", find_card("4090"))
    assert str(advice.refusal(config, planner, Limits(device=64 * MIB), frozenset())) == (
        "nothing was found, but without --fit or --auto this fits:\n"
        "  llmq train --model=tiny --batch-size=1 --seq-len=32 --grad-accumulation=6"
    )


def test_refusal_where_coarser_numbers_help():
    # Master, gradients and both moments of 1.56e9 weights are 2.9 GiB each in bf16.
    text = refusal("gpt2-1558m", 8.5, 2.0)
    assert help_in(text)[0] == "--opt-m-dtype=e4m3 --opt-v-dtype=e4m3"
    # The command that is printed fits.
    (command,) = (line for line in text.splitlines() if line.startswith("  llmq train "))
    where = ["--card=4090", "--gpu-memory=2GiB", f"--host-memory={int(8.5 * GIB)}"]
    assert _run(["plan", *shlex.split(command)[2:], *where]) == 0


def test_refusal_for_want_of_device_memory():
    """A refusal takes one plan of all layers, and few plans of few layers."""
    with counted_plans() as (layers, _):
        text = refusal("Qwen2.5-0.5B", None, 2.0, seq_len=32768)
    assert layers.count(preset("Qwen2.5-0.5B").num_layers) == 1 and len(layers) < 400
    assert " it is out of memory: " in text and "out of host memory" not in text
    assert help_in(text) == ["--seq-len=8192"]
    assert " --seq-len=8192 " in text.splitlines()[-1]


def test_machines_share_a_state_where_one_has_no_room_for_it():
    config = make_config({"model": "Qwen2.5-32B", "zero_level": 3, "recompute_block": True})
    card = find_card("h100")
    args = (preset("Qwen2.5-32B"), spec_of(card), "cudnn", card, 64)
    limits = Limits(device=int(64e9), host=GIB)  # no room there either
    for machines in (8, 1):
        shrinker = Shrinker(Planner(*args, network=Network(machines, 50e9)), limits)
        changes = shrinker.shrink(config, REARRANGING[-3:])
        assert changes == ([{"shard_over": "world"}] if machines > 1 else [])
        copying = replace(config, memcpy_all_gather=True)
        assert shrinker.allowed(copying, {"shard_over": "world"}) is None


def test_shrinking_takes_the_cheapest_and_nothing_superfluous():
    config = make_config(FULL | {"model": "Qwen2.5-0.5B", "batch-size": 32, "lmhead-chunks": 1})
    planner = planner_for("Qwen2.5-0.5B", "4090")
    before = planner.estimate(config)
    limits = Limits(device=int(0.6 * before.device))
    shrinker = Shrinker(planner, limits)
    changes = shrinker.shrink(config, REARRANGING)
    assert shrinker.excess(config) and not shrinker.excess(having(config, changes))
    for change in changes[:-1]:
        rest = [c for c in changes if c is not change]
        assert shrinker.excess(having(config, rest)), change
    fixed = Shrinker(planner, limits, frozenset({"recompute_swiglu"}))
    then = having(config, fixed.shrink(config, REARRANGING))
    assert not fixed.excess(then)
    assert not then.recompute_swiglu
    # With everything forbidden nothing is found.
    names = frozenset(name for saver in REARRANGING for name in saver(config))
    assert Shrinker(planner, limits, names).shrink(config, REARRANGING) == []


# ------------------------------------------------------------------------------------------------
# The commands

PLAN = ["plan", "--fit", "--model=Qwen2.5-0.5B", "--from-scratch", "--batch-size=8"]
PLAN += ["--grad-accumulation=1"]


def test_command_prints_command_lines(capsys):
    assert _run([*PLAN, "--gpu-memory=16GiB", "--host-memory=8GiB", "--log-file=x.json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.startswith("[Fit]\n  Device:          any GPU, 16384 MiB\n")
    assert "  Host memory:     8192 MiB\n  Tokens per step: 8,192, as given\n" in out
    assert "  Speed:           of NVIDIA GeForce RTX 5060 Ti, from llm.q's published" in out
    commands = [line.strip() for line in out.splitlines() if line.startswith("   llmq train ")]
    assert commands and all("--log-file=x.json" in command for command in commands)
    for command in commands:
        assert _run([*shlex.split(command)[1:], "--dry-run"]) == 0
    assert "Tokens per step: 8,192" in capsys.readouterr().out


@pytest.mark.parametrize("gpus", [None, 2])
def test_command_lines_are_for_as_many_gpus(capsys, monkeypatch, gpus):
    """Without --gpus training would take all there are, and not the one that was planned for."""
    monkeypatch.setattr("llmq.plan.fit.eight_bit_gain", lambda *_: [])  # has tests of its own
    assert _run([*PLAN, "--card=4090", *([f"--gpus={gpus}"] if gpus else [])]) == 0
    commands = [line for line in capsys.readouterr().out.splitlines() if "llmq train " in line]
    assert commands and all(f" --gpus={gpus or 1}" in command for command in commands)


@pytest.mark.parametrize(("model", "limit"), [("tiny", 18), ("tiny", 24), ("tiny-gpt2", 20)])
def test_command_on_the_cpu_where_offloading_saves_nothing(capsys, model, limit):
    where = ["--device=cpu", f"--memory-limit={limit}MiB", "--seq-len=32"]
    assert _run(["plan", "--fit", f"--model={model}", "--from-scratch", *where]) == 0
    out = capsys.readouterr().out
    assert " sequences, " in out and "--gpus" not in out and "--offload" not in out


def test_command_prints_json(capsys):
    assert _run([*PLAN, "--card=4090", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["card"] == record["device"] == "NVIDIA GeForce RTX 4090"
    assert record["host_limit_bytes"] is None
    best = record["found"][0]
    assert best["needed_bytes"] <= record["limit_bytes"]
    assert best["command"][:2] == ["llmq", "train"]
    assert best["predicted"]["tokens_per_second"] > 30_000
    given = {}
    for word in best["command"][2:]:
        name, _, value = word.removeprefix("--").partition("=")
        given[name] = value or True
    config, card = make_config(given), find_card("4090")
    plan = make_plan(config, preset(config.model), spec_of(card), "cudnn")
    assert needed_bytes(plan, spec_of(card)) == best["needed_bytes"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "--fit: how much memory is there? Give --gpu-memory or --card"),
        (["--card=GTX 1080"], "--card: no card is known as 'GTX 1080'"),
        (
            ["--card=3090", "--matmul-dtype=e4m3"],
            "--matmul-dtype: e4m3 needs compute capability 8.9",
        ),
    ],
)
def test_command_refuses(capsys, args, message):
    assert _run([*PLAN, *args]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("error: ")) == ("", 1)
    assert err.startswith(f"error: {message}")


def auto(*args: str) -> int:
    return _run(["train", "--auto", "--model=model", "--from-scratch", "--device=cpu", *args])


TRAIN = (
    "--model-dtype=fp32 --seq-len=16 --batch-size=2 --grad-accumulation=2 --steps=2 "
    "--train-file=data/train-*.bin --eval-file=data/eval.bin --log-gpu-util=0"
).split()


def test_auto_trains_as_it_says(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(make_workplace(tmp_path))
    assert auto(*TRAIN, "--log-file=log.json", "--no-recompute-norm") == 0
    out = capsys.readouterr().out
    said, _, trained = out.partition("[Options]")
    (command,) = [line.strip() for line in said.splitlines() if line.startswith("   llmq train")]
    assert "tokens/s" not in said, "nothing is known of a CPU's speed"
    (record,) = (r for r in json.loads(Path("log.json").read_text()) if r["log"] == "cmd")
    assert record["cmd"] == shlex.split(command)
    steps = [line for line in trained.splitlines() if line.startswith("[T]")]
    assert len(steps) == 2
    # The command line that it prints does the same again, as another run.
    assert _run([*shlex.split(command)[1:], "--overwrite"]) == 0
    again = [line for line in capsys.readouterr().out.splitlines() if line.startswith("[T]")]
    assert [line.split("|")[2:4] for line in again] == [line.split("|")[2:4] for line in steps]


def test_auto_evaluates_less_than_a_micro_batch(tmp_path, monkeypatch, capsys):
    """The validation file has 7 sequences, 16 are a step, and all of them fit into memory."""
    monkeypatch.chdir(make_workplace(tmp_path))
    sizes = ["--batch-size=16", "--grad-accumulation=1", "--steps=1"]
    assert auto(*TRAIN, *sizes) == 0
    out = capsys.readouterr().out
    assert "1. 16 x 1 sequences" in out and "Done. validation loss" in out


def test_auto_saves_memory_where_it_must(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(make_workplace(tmp_path))
    model, _ = resolve_model("model", True)
    sizes = {"seq-len": 64, "batch-size": 8, "grad-accumulation": 1, "model-dtype": "fp32"}
    plan = make_plan(
        make_config({"model": "model", "from-scratch": True} | sizes), model, HOST_SPEC
    )
    limit = int(0.8 * needed_bytes(plan, HOST_SPEC))
    args = [f"--{name}={value}" for name, value in sizes.items()]
    assert auto("--dry-run", *args, f"--memory-limit={limit}") == 0
    assert "  Fits:            yes" in capsys.readouterr().out
    # An option that is given explicitly stays, even if that makes it impossible.
    kept = [f"--no-recompute-{name}" for name in ("swiglu", "norm", "ffn", "qkv", "att", "block")]
    kept += ["--lmhead-chunks=1", "--batch-size=8", "--grad-accumulation=1"]
    assert auto("--dry-run", *args, *kept, "--memory-limit=100KiB") == 2
    assert capsys.readouterr().err.startswith("error: nothing fits: with --batch-size=1 it is out")


def test_choice_for_a_gpu(monkeypatch, capsys):
    card = find_card("4090")
    machine = Machine(kind="cuda", spec=spec_of(card), note=None)
    monkeypatch.setattr("llmq.plan.target.choose_machine", lambda *_: machine)
    monkeypatch.setattr("llmq.plan.target.attention_backend", lambda *_: "cudnn")
    monkeypatch.setattr("llmq.plan.memory.available_host_memory", lambda: 9 * GIB)
    monkeypatch.setattr("llmq.plan.fit.eight_bit_gain", lambda *_: [])  # has tests of its own
    given = FULL | {"model": "Qwen2.5-0.5B", "batch-size": 8, "grad-accumulation": 1}
    config = make_config(given)
    sizes = []
    for free in (20 * GIB, 5 * GIB):
        monkeypatch.setattr("llmq.runtime.gpu_info.least_free", lambda _, free=free: free)
        chosen = choose(config, preset("Qwen2.5-0.5B"), frozenset())
        plan = make_plan(chosen, preset("Qwen2.5-0.5B"), machine.spec, "cudnn")
        sizes.append(plan.usage.device_bytes)
        assert sizes[-1] < free and plan.host_bytes < 9 * GIB
    assert sizes[1] < sizes[0]
    out = capsys.readouterr().out
    assert "  Device:          NVIDIA GeForce RTX 4090, 20224 MiB\n" in out
    assert "  Host memory:     6656 MiB\n  Left free:       512 MiB (--reserve)\n" in out


@pytest.mark.parametrize(
    ("name", "asked", "display", "left"),
    [
        ("NVIDIA GeForce RTX 4090", None, False, 512 * MIB),
        ("NVIDIA H100 80GB HBM3", None, False, 0),
        ("NVIDIA H100 80GB HBM3", None, True, 512 * MIB),
        ("NVIDIA GeForce RTX 4090", 0, True, 0),
        ("NVIDIA H100 80GB HBM3", GIB, False, GIB),
    ],
)
def test_what_stays_free_for_a_desktop(monkeypatch, name, asked, display, left):
    """In the choice for a GPU: of what is free there, and before --memory-limit."""
    machine = Machine(kind="cuda", spec=replace(spec_of(find_card("4090")), name=name), note=None)
    monkeypatch.setattr("llmq.plan.target.choose_machine", lambda *_: machine)
    monkeypatch.setattr("llmq.plan.target.attention_backend", lambda *_: "native")
    monkeypatch.setattr("llmq.runtime.gpu_info.least_free", lambda _: 4 * GIB)
    monkeypatch.setattr("llmq.runtime.gpu_info.drives_display", lambda _: display)
    searched = []

    def search(fit, where):
        searched.append(where)
        raise OutOfMemory("none")

    monkeypatch.setattr(SearchResult, "of", search)
    free = 4 * GIB + CONTEXT_WHEN_ASKED
    for limit, device in ((None, free - left), (2 * GIB, 2 * GIB)):
        config = make_config({"model": "tiny", "memory-limit": limit})
        with pytest.raises(OutOfMemory, match="none"):
            choose(config, preset("tiny"), frozenset(), asked)
        assert (searched[-1].limits.device, searched[-1].reserve) == (device, left)


def planned_for(fit: bool, reserve: int | None = None, memory: int | None = None, **options):
    """Bytes for the run, and bytes that stay free, of `llmq plan --card 4090`."""
    config = make_config({"model": "tiny"} | {n.replace("_", "-"): v for n, v in options.items()})
    asked = MachineOptions(gpu_memory=memory, card="4090", reserve=reserve)
    where = target(config, preset("tiny"), asked, search=fit)
    return where.limits.device, where.reserve


def test_what_stays_free_in_a_plan():
    whole, desktop = spec_of(find_card("4090")).memory, 512 * MIB
    assert planned_for(fit=False) == (whole, 0)
    assert planned_for(fit=False, reserve=GIB) == (whole - GIB, GIB)
    assert planned_for(fit=True) == (whole - desktop, desktop)
    assert planned_for(fit=True, reserve=0) == (whole, 0)
    assert planned_for(fit=True, memory_limit=4 * GIB) == (4 * GIB, desktop)
    # Who says how much memory there is, is taken at his word.
    assert planned_for(fit=True, memory=8 * GIB) == (8 * GIB, 0)
    assert planned_for(fit=True, memory=8 * GIB, reserve=GIB) == (7 * GIB, GIB)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--reserve=1GiB"], "--reserve: of how much memory? Give --gpu-memory or --card"),
        (["--card=3070", "--reserve=8GiB"], "--reserve: 8192 MiB leave nothing of the 7782 MiB"),
        (["--device=cpu", "--reserve=1GiB"], "--reserve: has no meaning with --device cpu"),
    ],
)
def test_reserves_that_mean_nothing(capsys, args, message):
    for fit in ([], ["--fit"]):
        assert _run(["plan", "--model=tiny", "--from-scratch", *args, *fit]) == 2
        assert capsys.readouterr().err.startswith(f"error: {message}")


def test_auto_on_the_cpu_reserves_nothing(capsys):
    assert _run(["train", "--model=tiny", "--from-scratch", "--device=cpu", "--auto",
                 "--reserve=1GiB"]) == 2  # fmt: skip
    assert capsys.readouterr().err.startswith("error: --reserve: has no meaning on the CPU")


@pytest.mark.parametrize(
    ("card", "options", "flags"),
    [
        (
            "4090",
            {},
            ["--matmul-dtype=e4m3", "--matmul-dtype=e4m3 --head-dtype=e4m3"],
        ),
        ("4090", {"matmul-dtype": "e4m3"}, ["--head-dtype=e4m3"]),
        ("4090", {"matmul-dtype": "e4m3", "head-dtype": "e4m3"}, []),
        ("4090", {"model-dtype": "fp32"}, []),
        ("3090", {}, []),  # has no fp8, and everything fits
    ],
)
def test_coarser_numbers_that_are_faster(card, options, flags):
    given = FULL | {"model": "gpt2", "batch-size": 4, "grad-accumulation": 1} | options
    planner = planner_for("gpt2", card, "native")
    fit = Fit(make_config(given), planner, Limits(device=20 * GIB), frozenset({"model_dtype"}))
    best = fit.search()[0]
    found = eight_bit_gain(fit, best)
    assert [way.flags for way in found] == flags
    speeds = [best.need.speed, *(way.speed for way in found)]
    assert all(after > 1.05 * before for before, after in itertools.pairwise(speeds))


def test_moments_of_8_bits_where_they_make_room():
    given = FULL | {"model": "gpt2-355m", "batch-size": 2, "grad-accumulation": 1}
    planner = planner_for("gpt2-355m", "3090")
    fit = Fit(make_config(given), planner, Limits(device=int(2.8 * GIB)), frozenset())
    (way,) = eight_bit_gain(fit, fit.search()[0])
    assert way.flags == "--opt-m-dtype=e4m3 --opt-v-dtype=e4m3"


@pytest.mark.parametrize(("mode", "active", "drives"), [(0, 0, False), (1, 0, True), (0, 1, True)])
def test_whether_a_card_drives_a_display(monkeypatch, mode, active, drives):
    """NVML tells of the second of two GPUs; without NVML no display is known."""
    monkeypatch.setattr("llmq.runtime.gpu_info.bus_id", lambda index: f"0000:{index:02}:00.0")
    nvml = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByPciBusId=lambda bus: bus == "0000:01:00.0",
        nvmlDeviceGetDisplayMode=lambda second: mode * second,
        nvmlDeviceGetDisplayActive=lambda second: active * second,
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert drives_display(2) is drives and not drives_display(1)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert not drives_display(2)


def test_codes_in_mlps_make_room():
    """Only where scales are delayed, which products need for it; and not where it was refused."""
    planner = planner_for("tiny", "4090", "native")
    given = FULL | {"model": "tiny", "batch-size": 8, "matmul-dtype": "e4m3"}
    delayed = make_config(given | {"fp8-recipe": "delayed"})
    limits = Limits(device=planner.estimate(replace(delayed, mlp_dtype="e4m3")).device)
    others = frozenset({"opt_m_dtype", "opt_v_dtype", "grad_accum_dtype", "master_dtype"})
    found = [
        Shrinker(planner, limits, fixed).shrink(config, ROUNDING)
        for config, fixed in (
            (delayed, others),
            (delayed, others | {"mlp_dtype"}),
            (make_config(given), others),
        )
    ]
    assert found == [[{"mlp_dtype": "e4m3"}], [], []]
