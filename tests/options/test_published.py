"""The command lines of llm.q's published benchmarks run unchanged."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from llmq.commands.cli import _run
from llmq.options.conditions import Ranks
from llmq.options.rules import RULES
from tests.published import Row, rows

# Those that all of them have, less --gpus and what the table says.
COMMON = (
    "--train-file=data/tiny-stories-qwen/train-*.bin --eval-file=data/tiny-stories-qwen/eval.bin "
    "--ckpt-interval=10000 --from-scratch --seq-length=1024 --model-dtype=bf16 --opt-m-dtype=bf16 "
    "--opt-v-dtype=bf16 --use-cuda-graphs"
).split()
# Options of rows that do nothing there, by model, format and micro-batch.
IDLE = {("14B", "bf16", 8): ["--offload-master"]}


def commands() -> list[Row]:
    """The table, each command once; those of older programs have others' options."""
    by_command = {(row.gpus, row.model, row.dtype, row.words): row for row in rows()}
    return [row for row in by_command.values() if row.month >= "2025-12"]


@pytest.mark.parametrize("row", commands(), ids=str)
def test_published_command_lines(monkeypatch, capsys, row):
    runs = []
    stub = SimpleNamespace(run_training=lambda *args: runs.append(args))
    monkeypatch.setitem(sys.modules, "llmq.run.training", stub)
    command = ["train", f"--model=Qwen2.5-{row.model}", *COMMON, f"--gpus={row.gpus}"]
    command += [f"--matmul-dtype={row.dtype}", *row.options()]
    assert _run(command) == 0
    ((config, model, *_),) = runs
    sizes = {"0.5B": 896, "1.5B": 1536, "3B": 2048, "7B": 3584}
    assert model.hidden_size == sizes.get(row.model, 5120)
    assert config.matmul_dtype == row.dtype
    for option in row.options():
        name, _, value = option.removeprefix("--").replace("-", "_").partition("=")
        assert getattr(config, name) == (int(value) if value else True)
    if row.month == "2025-12":
        tokens = config.batch_size * config.seq_len * config.grad_accumulation * config.gpus
        assert tokens in (2**19, 516_096, 522_240)
    assert RULES.idle(config, ranks=Ranks(config.gpus)) == []
    warned = [line.split()[1] for line in capsys.readouterr().err.splitlines()]
    assert warned == IDLE.get((row.model, row.dtype, config.batch_size), [])
