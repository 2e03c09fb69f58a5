"""`llmq verify`: runs with and without what saves memory, and what is said where they differ."""

from __future__ import annotations

import json
import math
import re

import numpy as np
import pytest

from llmq.base.errors import LlmqError
from llmq.bench import verify
from llmq.commands.cli import _run
from llmq.options.options_io import make_config
from llmq.options.presets import resolve_model
from llmq.plan.memory import needed_bytes
from llmq.plan.plan import make_plan
from llmq.run.trainer import Trainer
from llmq.runtime.device import HOST_SPEC
from llmq.runtime.host_device import HostDevice
from tests.conftest import gpu_problem
from tests.runs import flags, make_workplace, options

FP8 = {"model_dtype": "bf16", "matmul_dtype": "e4m3"}


@pytest.fixture(autouse=True)
def workplace(tmp_path, monkeypatch):
    monkeypatch.chdir(make_workplace(tmp_path))


def run(*arguments, **changes):
    """Exit status of a verification of two steps."""
    return _run(["verify", "--verify-steps=2", *arguments, *flags(**changes)])


CASES = {
    "nothing": {},
    "block": {"recompute_block": ""},
    "layers": {"recompute_block": "", "recompute_layers": "1"},
    "bf16": {"model_dtype": "bf16", "recompute_ffn": "", "recompute_norm": "", "recompute_qkv": ""},
    "attention_chunks": {"attn_bwd_chunks": 2, "recompute_att": ""},
    "residual": {"offload_residual": "", "recompute_block": ""},
    "optimizer": {"model_dtype": "bf16", "master_dtype": "fp32", "offload_master": "",
                  "offload_opt_m": "", "offload_opt_v": ""},
    "zero_copy": {"offload_opt_m": "", "use_zero_copy": "", "write_combined": ""},
    "zero3": {"zero_level": 3, "offload_gradients": "", "grad_accum_dtype": "fp32"},
    "fp8": {**FP8, "recompute_swiglu": "", "shard_weights": "", "persistent_quants": "",
            "offload_quants": ""},
    "delayed": {**FP8, "fp8_recipe": "delayed", "recompute_block": ""},
    "two_ranks": {"gpus": 2, "zero_level": 2, "recompute_block": "", "offload_opt_m": ""},
    "ssd": {**FP8, "zero_level": 3, "recompute_block": "", "persistent_quants": "",
            "offload_dir": "files", "ssd": "opt-m,opt-v,master,weights,gradients"},
    "copies": {"gpus": 2, "zero_level": 3, "memcpy_all_gather": "", "memcpy_send_recv": "",
               "all_to_all_reduce": ""},
}  # fmt: skip


@pytest.mark.parametrize("changes", CASES.values(), ids=CASES)
def test_options_that_save_memory_change_nothing(capsys, changes):
    assert run("--json", **changes) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["equal"]
    assert [row["name"] for row in found["results"]] == ["step 0", "step 1", "evaluation"]
    assert all(row["with"] == row["without"] for row in found["results"])
    assert found["results"][0]["with"]["norm"] > 0
    given = {flag.partition("=")[0] for flag in found["options"]}
    kept = {"model_dtype", "master_dtype", "grad_accum_dtype", "matmul_dtype", "fp8_recipe", "gpus"}
    kept |= {"zero_level", "all_to_all_reduce"} if "gpus" in changes else set()
    assert given >= {f"--{name.replace('_', '-')}" for name in changes if name not in kept}
    assert "--use-cuda-graphs" not in given, "there are none on the CPU"
    assert not given & {f"--{name.replace('_', '-')}" for name in kept}


@pytest.mark.gpu
@pytest.mark.skipif(gpu_problem() is not None, reason=str(gpu_problem()))
@pytest.mark.parametrize("formats", [{"model_dtype": "bf16"}, FP8], ids=["bf16", "fp8"])
@pytest.mark.parametrize("ssd", [False, True])
def test_on_a_gpu(formats, ssd, capsys):
    memory = dict.fromkeys(("recompute_block", "offload_residual", "offload_opt_m"), "")
    if ssd:
        memory |= {"offload_dir": "files", "ssd": "opt-m,opt-v,gradients,master"}
        memory |= {"persistent_quants": "", "offload_quants": ""} if formats is FP8 else {}
    assert run("--verify-steps=4", **formats, **memory, zero_level=3, device="cuda") == 0
    assert "--use-cuda-graphs" in capsys.readouterr().out


def test_the_steps_are_those_of_training():
    given = make_config(options(recompute_block=True, steps=2))
    model, model_dir = resolve_model(given.model, given.from_scratch)
    found = verify.compare(given, model, model_dir, steps=2)
    with Trainer.from_config(given, model, model_dir) as trainer:
        trainer.load_weights()
        assert [trainer.step(), trainer.step()] == list(found.having[:2]) == list(found.without[:2])


def test_what_is_printed(capsys):
    assert run(recompute_ffn="", lmhead_chunks=2) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["[Verify]", "  Options: --recompute-swiglu --recompute-ffn"]
    assert lines[3].startswith("    step 0 | loss   5.5") and lines[3].endswith(" | equal")
    assert lines[-1] == "Bitwise equal: step 0 to evaluation."


@pytest.fixture
def wrong(monkeypatch):
    """wrong(change): recomputed activations of the MLP go through change(values), in place."""

    def patch(change):
        launch, count = HostDevice.launch, {}

        def run_kernel(self, kernel, grid, block, args, **rest):
            launch(self, kernel, grid, block, args, **rest)
            if kernel.entry == "swiglu_backward" and args[-1] is not None:
                count[self] = count.get(self, 0) + 1
                if count[self] == 6:  # of two layers, in the second step
                    change(args[-1].numpy())

        monkeypatch.setattr(HostDevice, "launch", run_kernel)

    return patch


def test_a_difference(wrong, capsys):
    wrong(lambda values: np.multiply(values, 1.5, out=values))
    assert run(recompute_swiglu="") == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[3].endswith(" | equal")
    assert re.match(r"    step 1 \| DIFFERENT: norm \d\.\d+ -> \d\.\d+$", lines[4])  # not the loss
    assert lines[5].startswith("evaluation | DIFFERENT: loss 5.")
    assert lines[-1] == "Different: 2 of 3, from step 1 on."


def test_numbers_that_are_not_finite(wrong, capsys):
    wrong(lambda values: values.fill(np.nan))
    assert run("--json", recompute_swiglu="") == 1
    rows = json.loads(capsys.readouterr().out)["results"]
    assert rows[1]["with"]["norm"] is None and rows[1]["without"]["norm"] > 0
    assert not rows[1]["equal"]


def test_nan_equals_nan(monkeypatch, capsys):
    monkeypatch.setattr(
        verify.Trainer, "learning_rate", lambda self, step: math.inf if step == 0 else 0.0
    )
    assert run() == 0
    assert "norm        nan | equal" in capsys.readouterr().out


def test_random_tokens_need_no_files(capsys):
    options = ["--model=tiny", "--from-scratch", "--device=cpu", "--batch-size=1", "--seq-len=16"]
    command = ["verify", "--verify-steps=1", *options, "--train-file=none.bin", "--recompute-norm"]
    assert _run([*command, "--grad-accumulation=1"]) == 2
    assert "none.bin" in capsys.readouterr().err
    assert _run([*command, "--grad-accumulation=1", "--synthetic"]) == 0


def test_options_that_do_nothing_are_said(capsys):
    given = {"debug_time_breakdown": False, "ckpt_major": 5, "steps": 9}
    given |= {"ckpt_keep_n": 0, "ckpt_interval": 1}
    assert run("--verify-steps=1", all_to_all_reduce="", **given) == 0
    assert capsys.readouterr().err == (
        "warning: --ckpt-major has no effect with --ckpt-keep-n 0: nothing is deleted\n"
        "warning: --debug-time-breakdown: without effect on a verification\n"
        "warning: --steps=9 has no effect on a verification, which takes --verify-steps 1\n"
        "warning: --all-to-all-reduce has no effect with one GPU\n"
    )


def test_nothing_is_resumed(capsys):
    assert run(**{"continue": ""}) == 2
    assert capsys.readouterr().err == (
        "error: --continue: a verification starts with the model's weights: leave it out\n"
    )


def test_memory_that_is_not_there(capsys):
    """The first run is the one that needs more."""
    given = make_config(options(recompute_block=True))
    model, _ = resolve_model(given.model, given.from_scratch)
    needed = needed_bytes(make_plan(given, model, HOST_SPEC), HOST_SPEC)
    assert run(recompute_block="", memory_limit=needed) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: without the options that are to be verified the run does not fit")
    assert "verify them with a smaller --model, --batch-size or --seq-len" in err
    assert "--recompute" not in err


def test_other_errors_pass_through(monkeypatch):
    def fail(self):
        raise LlmqError("no weights")

    monkeypatch.setattr(verify.Trainer, "load_weights", fail)
    with pytest.raises(LlmqError, match="no weights"):
        given = make_config(options())
        verify.compare(given, *resolve_model(given.model, True), steps=1)
