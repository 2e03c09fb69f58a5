"""The command lines of llm.q's published benchmarks run unchanged."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from llmq.commands.cli import _run
from llmq.options.conditions import Ranks
from llmq.options.rules import RULES

# Those that all of them have, less --gpus and what the table says.
COMMON = (
    "--train-file=data/tiny-stories-qwen/train-*.bin --eval-file=data/tiny-stories-qwen/eval.bin "
    "--ckpt-interval=10000 --from-scratch --seq-length=1024 --model-dtype=bf16 --opt-m-dtype=bf16 "
    "--opt-v-dtype=bf16 --use-cuda-graphs"
).split()
NUMBERS = {
    "b": "batch-size",
    "a": "grad-accumulation",
    "lm": "lmhead-chunks",
    "ab": "attn-bwd-chunks",
}
SWITCHES = {
    "om": "offload-opt-m",
    "ov": "offload-opt-v",
    "oM": "offload-master",
    "oR": "offload-residual",
    "oQ": "offload-quants",
    "oG": "offload-gradients",
    "sW": "shard-weights",
    "sG": "shard-gradients",
    "pQ": "persistent-quants",
    "mAG": "memcpy-all-gather",
    "mSR": "memcpy-send-recv",
    "a2a": "all-to-all-reduce",
}
# GPUs, size of the Qwen2.5 model, format, options. Where both formats have the same options, both.
PUBLISHED = """
1 0.5B e4m3,bf16 b32 a16
1 1.5B e4m3 b32 a16
1 1.5B bf16 b32 a16 lm4
1 3B e4m3,bf16 b16 a32
1 7B e4m3 b16 a32 lm4 ab4 r-ffn r-norm oR
1 7B bf16 b4 a128 lm2 ab2
1 14B e4m3 b16 a32 lm2 om ov oM r-ffn r-norm oR
1 14B bf16 b8 a64 lm2 ab2 om ov oM r-ffn oR
8 0.5B e4m3 b64 a1
8 0.5B bf16 b32 a2
8 1.5B e4m3 b32 a2
8 1.5B bf16 b32 a2 lm4
8 3B e4m3,bf16 b16 a4
8 7B e4m3 b16 a4 lm4 ab4 r-swiglu r-norm oR
8 7B bf16 b8 a8 lm2 ab2
8 14B e4m3 b16 a4 lm2 ab2 r-ffn r-norm oR sW pQ
8 14B bf16 b16 a4 lm2 ab2 r-ffn r-norm oR sW
1 0.5B e4m3,bf16 b16 a32 lm16
1 1.5B e4m3,bf16 b4 a128 lm4
1 3B e4m3 b4 a128 lm4 oM ov om
1 3B bf16 b4 a128 lm4 ov om r-swiglu
1 7B e4m3 b16 a32 lm16 om ov r-block oM sW pQ oQ oR ab16
1 7B bf16 b16 a32 lm16 om ov r-block oM sW oR ab16
1 14B e4m3 b32 a16 lm32 om ov r-block oM sW pQ oQ oR sG oG ab32
1 14B bf16 b32 a16 lm32 om ov r-block oM sW oR sG oG ab32
4 0.5B e4m3,bf16 b16 a8 lm2 ab4 mAG
4 1.5B e4m3 b8 a16 lm2 ab4 mAG
4 1.5B bf16 b8 a16 lm4 ab4 mAG oR r-norm
4 3B e4m3 b4 a32 lm4 ab4 mAG om r-norm
4 3B bf16 b4 a32 lm4 ab4 mAG om r-norm r-swiglu
4 7B e4m3 b16 a8 lm8 ab4 mAG om ov r-ffn r-norm oM sW sG mSR a2a pQ oQ
4 7B bf16 b16 a8 lm8 ab4 mAG om ov r-ffn r-norm oM sW sG mSR a2a oR
4 14B e4m3 b16 a8 lm8 ab4 mAG om ov r-block oM sW sG mSR a2a pQ oQ oR
4 14B bf16 b32 a4 lm8 ab4 mAG om ov r-block oM sW sG mSR a2a oR
4 32B e4m3 b32 a4 lm8 ab4 mAG om ov r-block oM sW sG oR oG pQ oQ
4 32B bf16 b32 a4 lm8 ab4 mAG om ov r-block oM sW sG oR oG
1 0.5B e4m3 b12 a42 lm6
1 0.5B bf16 b10 a51 lm5
1 1.5B e4m3 b8 a64 lm4 r-block oR
1 1.5B bf16 b8 a64 lm4 r-ffn r-att
1 3B e4m3 b16 a32 lm8 ab4 r-ffn r-att r-norm om ov oM oR
1 3B bf16 b16 a32 lm8 ab4 r-ffn r-qkv r-norm om ov oR sW oM
1 7B e4m3 b32 a16 lm32 ab32 r-block om ov oM oR sG oG sW pQ oQ
1 7B bf16 b32 a16 lm32 ab32 r-block om ov oM oR sG oG sW
1 7B e4m3,bf16 b8 a64 lm2
1 14B e4m3 b8 a64 lm2 om ov oM
1 14B bf16 b4 a128 lm2 om ov
4 0.5B e4m3,bf16 b32 a4
4 1.5B e4m3,bf16 b32 a4
4 3B e4m3,bf16 b16 a8
4 7B e4m3 b16 a8 lm4 ab4
4 7B bf16 b8 a16
4 14B e4m3 b8 a16 lm2 om ov oR
4 14B bf16 b4 a32 lm2 om
4 32B e4m3 b16 a8 lm2 om ov oM r-block sW pQ
4 32B bf16 b16 a8 lm2 om ov oM r-block sW
8 14B e4m3 b8 a8 lm2 om ov oR
8 14B bf16 b4 a16 lm2
8 7B e4m3 b16 a4 lm4 ab4
8 32B e4m3 b16 a4 lm2 om ov r-ffn sG r-norm oR
8 32B bf16 b16 a4 lm2 r-ffn r-norm sG sW
"""
# The rows above whose options do nothing somewhere, and which options these are.
IDLE = {("1 14B bf16 b8 a64 lm2 ab2 om ov oM r-ffn oR", "bf16"): ["--offload-master"]}
# Tokens of a step, where they are not 2**19.
ODD_TOKENS = {"b12 a42": 516_096, "b10 a51": 522_240}


def spelled(word: str) -> str:
    """A word of the table as an option."""
    if word in SWITCHES:
        return f"--{SWITCHES[word]}"
    if word.startswith("r-"):
        return f"--recompute-{word.removeprefix('r-')}"
    letters = word.rstrip("0123456789")
    return f"--{NUMBERS[letters]}={word.removeprefix(letters)}"


def rows() -> list[tuple[str, str]]:
    """Row and format."""
    table = [row for row in PUBLISHED.splitlines() if row]
    return [(row, dtype) for row in table for dtype in row.split()[2].split(",")]


@pytest.mark.parametrize(("row", "dtype"), rows())
def test_published_command_lines(monkeypatch, capsys, row, dtype):
    gpus, size, _, *words = row.split()
    options = [spelled(word) for word in words]
    runs = []
    stub = SimpleNamespace(run_training=lambda *args: runs.append(args))
    monkeypatch.setitem(sys.modules, "llmq.train.loop", stub)
    command = ["train", f"--model=Qwen2.5-{size}", *COMMON, f"--gpus={gpus}"]
    command += [f"--matmul-dtype={dtype}", *options]
    assert _run(command) == 0
    ((config, model, _, _),) = runs
    assert model.hidden_size == {"0.5B": 896, "1.5B": 1536, "3B": 2048, "7B": 3584}.get(size, 5120)
    assert config.matmul_dtype == dtype
    for option in options:
        name, _, value = option.removeprefix("--").replace("-", "_").partition("=")
        assert getattr(config, name) == (int(value) if value else True)
    tokens = config.batch_size * config.seq_len * config.grad_accumulation * config.gpus
    assert tokens == ODD_TOKENS.get(" ".join(words[:2]), 2**19)
    assert RULES.idle(config, ranks=Ranks(config.gpus)) == []
    warned = [line.split()[1] for line in capsys.readouterr().err.splitlines()]
    assert warned == IDLE.get((row, dtype), [])
