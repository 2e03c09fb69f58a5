"""How many functions a reader goes through from `Trainer.step` to the launch of a product."""

from __future__ import annotations

import sys

import numpy as np
import pytest

import llmq
from llmq.runtime.host_device import HostDevice

B, T = 2, 16
DELAYED = {"matmul_dtype": "e4m3", "fp8_recipe": "delayed", "mlp_dtype": "e4m3"}


def depth():
    """Frames from `Trainer.step` to that of whoever calls this function's caller; 0: not below."""
    frame, count = sys._getframe(2), 1
    while frame is not None and frame.f_code is not llmq.Trainer.step.__code__:
        frame, count = frame.f_back, count + 1
    return count if frame is not None else 0


@pytest.mark.parametrize(
    ("options", "nearest", "farthest"),
    [
        ({}, 12, 18),
        ({"matmul_dtype": "e4m3"}, 12, 21),
        (DELAYED, 12, 20),
    ],
    ids=["bf16", "jit", "delayed"],
)
def test_a_product_is_few_frames_below_a_step(monkeypatch, options, nearest, farthest):
    """nearest: attention's products. farthest: those that a format has an operand made by."""
    depths, launch = [], HostDevice.launch

    def counted(self, kernel, *args, **kwargs):
        if kernel.entry.startswith("matmul"):
            depths.append(depth())
        return launch(self, kernel, *args, **kwargs)

    shape = {"batch_size": B, "seq_len": T, "grad_accumulation": 1, "steps": 1}
    how = {"from_scratch": True, "device": "cpu", "gpus": 1, "tune": False}
    with llmq.Trainer(model="tiny", **shape, **how, **options) as trainer:
        tokens = np.zeros((B, T), np.int32)
        monkeypatch.setattr(HostDevice, "launch", counted)
        trainer.step([(tokens, tokens)])
    depths = [count for count in depths if count]
    assert min(depths) <= nearest and max(depths) <= farthest, (min(depths), max(depths))
