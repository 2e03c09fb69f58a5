"""The planner: equal to a run to the byte, quick, without CUDA; what it says of too large a run."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from contextlib import redirect_stdout
from dataclasses import replace

import numpy as np
import pytest

from llmq.arch.model_config import ModelConfig
from llmq.base.dtypes import BF16
from llmq.commands.cli import _run
from llmq.options.cards import CARDS, find_card, spec_of
from llmq.options.option_types import parse_size
from llmq.options.options import TrainConfig
from llmq.options.options_io import make_config
from llmq.options.presets import preset
from llmq.plan.checks import installed_attention
from llmq.plan.estimate import Planner
from llmq.plan.memory import needed_bytes
from llmq.plan.plan import make_plan
from llmq.plan.report import run_plan
from llmq.plan.sol import flops_per_token
from llmq.runtime.device import HOST_SPEC
from llmq.runtime.machine import PLAN_SPEC
from llmq.runtime.plan_device import PlanDevice, Work
from tests.kept import kept_runs
from tests.models import hf_model, random_batch, trainer_for
from tests.without_cuda import WITHOUT_CUDA

BATCH = random_batch(np.random.default_rng(0))
FULL = {"device": "cpu", "from-scratch": True, "model": "Qwen2.5-0.5B", "batch-size": 4}


def options(**changes):
    return make_config(FULL | {name.replace("_", "-"): v for name, v in changes.items()})


# ------------------------------------------------------------------------------------------------
# The plan is the run

OPTION_SETS = {
    "fp32": {},
    "bf16": {"model_dtype": "bf16", "opt_m_dtype": "bf16", "opt_v_dtype": "bf16"},
    "mixed": {"model_dtype": "bf16", "master_dtype": "fp32", "grad_accum_dtype": "fp32"},
    "less": {"recompute_swiglu": True, "recompute_norm": True, "lmhead_chunks": 4},
    "halves": {"recompute_ffn": True, "recompute_qkv": True, "attn_bwd_chunks": 2},
    "least": {"recompute_block": True, "lmhead_chunks": 4, "model_dtype": "bf16", "z_loss": 1e-4},
    "host": {
        "zero_level": 3,
        "offload_master": True,
        "offload_opt_m": True,
        "offload_opt_v": True,
        "offload_gradients": True,
        "offload_residual": True,
        "write_combined": True,
    },
}


@pytest.mark.parametrize("model", ["qwen2", "qwen2_untied", "qwen3", "gpt2"])
def test_plan_equals_the_run(model, tmp_path):
    hf_model(model).save_pretrained(tmp_path)
    for changes in OPTION_SETS.values():
        with trainer_for(tmp_path, grad_accumulation=2, **changes) as trainer:
            assert trainer.usage != trainer.plan.usage, "nothing has used the stack yet"
            trainer.step([BATCH, BATCH])
            assert trainer.usage == trainer.plan.usage, changes
            trainer._step.train(1, 0.0, 0.0, [BATCH], numbers=[0])  # which ends an epoch
            assert trainer.usage == trainer.plan.usage, changes
            categories = trainer.plan.usage.categories
            sizes = trainer.plan.usage.sizes
            assert sum(categories["device"].values()) == sizes["device"] + sizes["stack"]
            assert sum(categories["pinned"].values()) == sizes["pinned"]
            assert sum(categories["write_combined"].values()) == sizes["write_combined"]
            assert trainer.plan.host_bytes == sizes["pinned"] + sizes["write_combined"]


def test_evaluation_needs_no_more_than_a_step(tmp_path):
    hf_model("qwen2").save_pretrained(tmp_path)
    with trainer_for(tmp_path) as trainer:
        trainer._step.evaluate([BATCH])
        trainer.step([BATCH])
        assert trainer.usage == trainer.plan.usage


def test_every_byte_of_weights_and_moments_is_where_it_belongs():
    model = preset("Qwen2.5-0.5B")
    plan = make_plan(options(model_dtype="bf16", opt_v_dtype="bf16"), model, HOST_SPEC)
    device = plan.usage.categories["device"]
    assert device["Gradients"] == device["Weights"] == device["Adam V"]
    assert device["Adam M"] == 2 * device["Weights"]
    assert "Master" not in device
    master = make_plan(options(model_dtype="bf16", master_dtype="fp32"), model, HOST_SPEC)
    assert master.usage.categories["device"]["Master"] == 2 * device["Weights"]


def test_counts_grow_as_they_should():
    model, config = preset("Qwen2.5-0.5B"), options()
    once = make_plan(replace(config, grad_accumulation=1), model, HOST_SPEC)
    often = make_plan(replace(config, grad_accumulation=5), model, HOST_SPEC)
    # The first micro-step writes gradients; adding to them takes temporaries.
    memory, more = (plan.usage.categories["device"] for plan in (once, often))
    assert memory.pop("Stack") < more.pop("Stack")
    assert memory == more
    assert (once.tokens, often.tokens) == (4096, 5 * 4096)
    # Weights are updated once however many micro-steps there are.
    assert 4.99 * once.flops < often.flops < 5 * once.flops
    assert 3 * once.traffic < often.traffic < 5 * once.traffic
    # Adding to gradients takes launches of its own.
    assert 4 * once.launches < often.launches < 6 * once.launches
    again = make_plan(replace(config, recompute_block=True).normalized(), model, HOST_SPEC)
    assert again.flops > 1.15 * make_plan(config, model, HOST_SPEC).flops


def test_flops_are_those_of_the_formula():
    """llm.q counts 6 FLOPs per weight, and causal attention without what its backward repeats."""
    model, config = preset("Qwen2.5-0.5B"), options(seq_len=64, batch_size=64)
    plan = make_plan(config, model, HOST_SPEC)
    flops = flops_per_token(model, 64)
    assert plan.flops / plan.tokens == pytest.approx(
        flops.blocks + flops.lm_head + flops.attention,
        rel=2e-3,  # norms, the optimizer, and the scores that attention's backward repeats
    )


# ------------------------------------------------------------------------------------------------
# What is printed


def plan(*args: str) -> int:
    return _run(["plan", "--model", "Qwen2.5-0.5B", "--from-scratch", *args])


def test_command_prints_a_table(capsys):
    assert plan("--batch-size=1", "--gpu-memory=24GiB") == 0
    out, err = capsys.readouterr()
    assert out.startswith("[Allocator State]\n            in MiB  Device | Managed | Pinned \n")
    assert "  Device:          any GPU\n" in out
    assert "  Parameters:      494,032,768\n" in out
    assert "  Tokens per step: 4,096\n" in out
    assert "              Free: " in out
    assert out.endswith("  Fits:            yes, into 24576 MiB\n")
    assert err == ""
    assert plan() == 0
    out = capsys.readouterr().out
    assert "Free" not in out
    assert out.endswith("give --gpu-memory\n")


def test_a_preset_is_planned_as_the_trained_model_that_train_takes(capsys):
    """With its own vocabulary; the printed command has what `train` needs to load it."""
    assert _run(["plan", "--model=Qwen2.5-7B", "--gpu-memory=70GiB"]) == 2
    out, err = capsys.readouterr()
    assert "  Parameters:      7,615,616,512\n" in out
    assert "\n  llmq train --model=Qwen/Qwen2.5-7B --download " in err
    assert _run(["plan", "--model=tiny"]) == 0  # which nobody has trained


@pytest.mark.parametrize(
    ("args", "fits", "limit"),
    [
        ((), None, None),
        (("--gpu-memory=24GiB",), True, "24GiB"),
        (("--gpu-memory=80GB", "--memory-limit=20GiB"), True, "20GiB"),
        (("--gpu-memory=2GiB",), False, "2GiB"),
        (("--device=cpu", "--memory-limit=1MiB"), False, "1MiB"),
    ],
)
def test_command_prints_json_and_says_by_its_status_whether_it_fits(capsys, args, fits, limit):
    status = plan("--json", "--batch-size=1", *args)
    out, err = capsys.readouterr()
    record = json.loads(out)
    assert status == (2 if fits is False else 0)
    assert err.startswith("error: out of memory: ") if fits is False else err == ""
    assert err.count("error: ") == (fits is False)
    assert record["fits"] is fits
    assert record["limit_bytes"] == (limit and parse_size(limit))
    assert record["device_bytes"] == sum(record["memory"]["device"].values())
    assert record["needed_bytes"] >= record["device_bytes"] > 2 << 30
    assert record["stack"][0].keys() == {"name", "bytes"}
    assert sum(row["bytes"] for row in record["stack"]) == record["memory"]["device"]["Stack"]
    assert record["parameters"] == 494_032_768


def test_what_costs_nothing_is_made_again_if_nobody_says():
    """The activation of a gated MLP in fp8 with delayed scales, if experts do not need it whole."""
    fp8 = {"batch-size": 2, "seq-len": 64, "matmul-dtype": "e4m3", "fp8-recipe": "delayed"}

    def kept(model, **changes):
        config = make_config(FULL | fp8 | {"model-dtype": "bf16"} | changes)
        usage = make_plan(config, preset(model), HOST_SPEC).usage
        return usage.categories["device"]["Activations"]

    no, yes = {"recompute-swiglu": False}, {"recompute-swiglu": True}
    for model, free in (("tiny", True), ("tiny-gpt-oss", False), ("tiny-gpt2", False)):
        assert kept(model, **no) > kept(model, **yes)
        assert kept(model) == kept(model, **(yes if free else no))
    assert kept("tiny", **{"fp8-recipe": "jit"}) == kept("tiny", **{"fp8-recipe": "jit"} | no)
    assert kept("tiny-qwen3-moe", **no) == kept("tiny-qwen3-moe", **yes)  # experts keep none
    part = {"recompute-layers": "0"}
    assert kept("tiny", **part) == kept("tiny", **yes) < kept("tiny", **part | yes)


def test_the_stream_between_halves_leaves():
    """Offloading residuals leaves two layers' tensors on the GPU, where no block is recomputed."""
    model = preset("tiny")
    size = 2 * 64 * model.hidden_size * BF16.itemsize
    for block in (False, True):
        given = {"batch-size": 2, "seq-len": 64, "recompute-block": block}
        plans = [
            make_plan(make_config(FULL | given | {"offload-between": on}), model, HOST_SPEC)
            for on in (False, True)
        ]
        assert block or plans[1].usage.device_bytes < plans[0].usage.device_bytes
        pinned = [sum(plan.usage.categories["pinned"].values()) for plan in plans]
        assert pinned[1] - pinned[0] == (model.num_layers - 2) * size * (1 - block)


def test_any_gpu_is_planned_to_need_what_each_one_needs():
    """Also those whose products leave the activation to a kernel of its own, and its scratch."""

    def needed(**more):
        config = make_config(FULL | {"seq-len": 1024, "gpus": 1, "device": "cuda"} | more)
        model = replace(preset(config.model), num_layers=1)
        return [
            make_plan(config, model, spec).usage.device_bytes
            for spec in (spec_of(find_card("h100")), spec_of(find_card("4090")), PLAN_SPEC)
        ]

    h100, ada, anyone = needed(**{"batch-size": 16, "lmhead-chunks": 64, "lora-rank": 16})
    assert h100 < ada <= anyone


@pytest.mark.parametrize(
    ("device", "run"),
    [
        pytest.param(device, run, id=f"{report}-{run['model']}")
        for report, device, run in kept_runs()
        if run["options"].get("memory-limit")
    ][::2],
)
def test_what_ran_in_little_memory_still_does(device, run):
    config, model, spec = make_config(run["options"]), preset(run["model"]), spec_of(CARDS[device])
    plan = make_plan(config, model, spec, installed_attention(config, model, spec), run["gpus"])
    assert needed_bytes(plan, spec) <= config.memory_limit


def test_attention_is_cut_only_where_that_saves_memory():
    model = preset("Qwen2.5-0.5B")

    def parts(**options):
        config = make_config({"from_scratch": True, "attn_bwd_chunks": 8} | options)
        card = find_card("h100")
        planner = Planner(model, spec_of(card), "cudnn", card)
        found = planner.with_fewest_parts(config)
        stacks = [planner.plan(c).usage.sizes["stack"] for c in (config, found)]
        assert stacks[1] <= stacks[0]
        return found.attn_bwd_chunks

    assert parts(batch_size=8) == 1  # logits are far larger than the workspace
    assert parts(batch_size=8, seq_len=4096, lmhead_chunks=512) == 8  # here the workspace is
    assert parts(batch_size=8, attn_bwd_chunks=1) == 1
    # Heads have 7 query heads each: 6 parts for every key/value head leave 2 in one, as 4 do.
    assert parts(batch_size=1, seq_len=32768, lmhead_chunks=128, attn_bwd_chunks=12) == 8


@pytest.mark.parametrize("args", [(), ("--fit", "--gpu-memory=80GiB"), ("--gpus=1", "--json")])
def test_options_that_do_nothing_are_said(capsys, args):
    assert plan("--batch-size=1", "--memcpy-all-gather", *args) == 0
    assert capsys.readouterr().err == "warning: --memcpy-all-gather has no effect with one GPU\n"
    assert plan("--batch-size=1", "--memcpy-all-gather", "--gpus=2") == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--device=cpu", "--gpu-memory=1GiB"), "--gpu-memory: has no meaning with --device cpu"),
        (("--device=cpu", "--card=4090"), "--card: has no meaning with --device cpu"),
        (("--host-memory=some",), "--host-memory: expected a size"),
        (("--gpu-memory=lots",), "--gpu-memory: expected a size"),
    ],
)
def test_command_refuses(capsys, args, message):
    assert plan(*args) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith(f"error: {message}")


def test_command_predicts_the_speed_of_a_known_card(capsys):
    assert plan("--batch-size=16", "--opt-m-dtype=bf16", "--opt-v-dtype=bf16", "--card=h100") == 0
    out = capsys.readouterr().out
    assert "  Device:          NVIDIA H100 80GB HBM3\n" in out
    (line,) = [line for line in out.splitlines() if line.startswith("  Predicted: ")]
    # Measured: 152,071, before products had more in them.
    assert 160_000 < int(line.split()[1].replace(",", "")) < 180_000
    (line,) = [line for line in out.splitlines() if line.startswith("  Of which: ")]
    assert sum(float(part.rstrip("%,")) for part in line.split() if "%" in part) == (
        pytest.approx(100, abs=0.3)  # five numbers with a digit after the point
    )
    assert "  Card's speed:    measured on this card\n" in out
    assert out.endswith("  Fits:            yes, into 80998 MiB\n")
    args = ("--batch-size=1", "--offload-opt-m", "--offload-opt-v", "--card=5060 ti", "--json")
    assert plan(*args, "--host-memory=1GiB") == 2
    out, err = capsys.readouterr()
    record = json.loads(out)
    assert record["predicted"]["source"].startswith("from llm.q's published speeds")
    assert record["predicted"]["step_seconds"] == pytest.approx(
        sum(record["predicted"]["parts_seconds"].values())
    )
    assert record["needed_bytes"] < record["limit_bytes"]
    assert record["host_bytes"] > record["host_limit_bytes"] == 1 << 30
    assert record["fits"] is False
    assert err.startswith("error: out of host memory: ")
    for host, verdict in ((1, "no"), (8, "yes")):
        assert plan(*args[:-1], f"--host-memory={host}GiB") == (0 if verdict == "yes" else 2)
        out = capsys.readouterr().out
        memory = f"into 15872 MiB and {host * 1024} MiB of host memory"
        assert out.endswith(f"  Fits:            {verdict}, {memory}\n")


def test_host_memory_where_the_card_is_not_known(capsys):
    args = ("--batch-size=1", "--offload-opt-m", "--offload-opt-v")
    assert plan(*args, "--host-memory=1GiB") == 2
    out, err = capsys.readouterr()
    assert out.endswith("  Fits:            no, into 1024 MiB of host memory\n")
    assert err.startswith("error: out of host memory: ")
    assert plan(*args, "--host-memory=100GiB") == 0
    assert capsys.readouterr().out.endswith("compare with the card, or give --gpu-memory\n")
    for host, fits in ((1, False), (100, None)):
        plan(*args, f"--host-memory={host}GiB", "--json")
        assert json.loads(capsys.readouterr().out)["fits"] is fits


def test_plans_of_any_size_are_made(capsys):
    """FLOPs beyond 2^63; fp8 on the CPU, of whose speed the advice needs to know something."""
    large = ("--batch-size=1000000", "--lmhead-chunks=1")  # otherwise each plan goes through 512
    assert plan(*large, "--gpu-memory=24GiB") == 2
    out, err = capsys.readouterr()
    assert "  Tokens per step: 4,096,000,000\n" in out and err.startswith("error: out of memory: ")
    fp8 = ["--model=tiny", "--from-scratch", "--device=cpu", "--matmul-dtype=e4m3"]
    assert _run(["plan", *fp8, "--memory-limit=80MiB"]) == 2
    assert "makes it fit:\n" in capsys.readouterr().err
    assert _run(["plan", "--fit", *fp8, "--memory-limit=80MiB"]) == 0


def test_a_plan_counts_all_chunks_of_the_logits(monkeypatch):
    """A plan that launches two chunks counts as much as one that launches all."""
    fp8 = {"matmul-dtype": "e4m3", "head-dtype": "e4m3"}
    adapters = {"lora-rank": 8, "lora-targets": "q,head", "from-scratch": False}
    for options in ({}, fp8, adapters, {"loss": "dpo", "packing": "best-fit"}):
        own = {"model": "tiny", "from-scratch": True, "batch-size": 2, "seq-len": 256}
        config = make_config(own | {"lmhead-chunks": 8} | options)
        plans = [make_plan(config, preset("tiny"), PLAN_SPEC)]
        with monkeypatch.context() as patched:
            patched.setattr(PlanDevice, "alike", lambda self, items: items)
            plans.append(make_plan(config, preset("tiny"), PLAN_SPEC))
        counted = [replace(plan, micro_steps=(), update=[]) for plan in plans]
        assert counted[0] == counted[1]
        works = [
            [item for trace, _ in plan.micro_steps for item in trace if isinstance(item, Work)]
            for plan in plans
        ]
        assert works[0] == works[1]


def test_dry_run_is_the_plan(capsys):
    args = ["--model=tiny", "--from-scratch", "--device=cpu"]
    assert _run(["train", "--dry-run", *args]) == 0
    dry = capsys.readouterr().out
    assert _run(["plan", *args]) == 0
    shared = [line for line in capsys.readouterr().out.splitlines() if "Free" not in line]
    assert [line for line in dry.splitlines() if "Free" not in line][:-1] == shared[:-1]


def test_attention_backend_of_the_plan(monkeypatch):
    """A GPU is taken to have cuDNN, whose workspace is on the stack."""
    model = preset("Qwen2.5-0.5B")

    def stack_names(config: TrainConfig, model: ModelConfig = model) -> str:
        with redirect_stdout(io.StringIO()) as out:
            run_plan(config, model, json=True)
        return json.loads(out.getvalue())["memory"]["device"]["Stack"]

    gpu = {"device": "cuda", "model_dtype": "bf16", "seq_len": 4096, "lmhead_chunks": 64}
    cudnn = stack_names(options(**gpu))
    native = stack_names(options(**gpu, attention="native"))
    assert cudnn > native
    assert stack_names(options(**gpu, attention="cudnn")) == cudnn
    assert stack_names(options(**gpu | {"model_dtype": "fp32"})) > 0  # cuDNN has none for F32


def test_big_models_are_planned_in_little_memory_and_without_cuda():
    args = "plan --model Qwen2.5-7B --from-scratch --gpu-memory 180GiB --recompute-ffn".split()
    # Not ru_maxrss, which a new process inherits from the one that started it.
    report = "print(*(x.split()[1] for x in open('/proc/self/status') if x.startswith('VmHWM')))"
    code = f"import atexit; atexit.register(lambda: exec({report!r}))\n{WITHOUT_CUDA}"
    command = [sys.executable, "-c", code, *args]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    *_, fits, kilobytes = done.stdout.splitlines()
    assert fits == "  Fits:            yes, into 184320 MiB"
    assert int(kilobytes) < 500_000


def test_json_says_what_is_launched(capsys):
    """Launches by kind add up to the plan's, and their seconds to the main stream's."""
    args = ("--model=tiny", "--batch-size=8", "--recompute-block", "--gpus=1", "--json")
    assert plan(*args, "--card=5060 ti") == 0
    record = json.loads(capsys.readouterr().out)
    kinds = {kind.pop("kind"): kind for kind in record["kinds"]}
    assert list(kinds) == sorted(kinds)

    def total(name):
        return sum(kind[name] for kind in kinds.values())

    # The start of a step fills and copies little, in no micro-step.
    assert 0 <= record["launches"] - total("launches") < 10
    assert total("flops") == record["flops_per_token"] * record["tokens_per_step"]
    assert total("bytes") == pytest.approx(record["traffic_bytes"], rel=0.01)
    assert total("seconds") == pytest.approx(record["predicted"]["step_seconds"], rel=1e-6)
    forward = [kind for name, kind in kinds.items() if name.startswith("attention_forward")]
    assert sum(kind["launches"] for kind in forward) == 2 * 4 * preset("tiny").num_layers
    assert plan(*args) == 0
    unknown = json.loads(capsys.readouterr().out)["kinds"]
    assert {kind["seconds"] for kind in unknown} == {None}
