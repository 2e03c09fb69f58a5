"""The speed-of-light formula against the numbers that llm.q publishes."""

from __future__ import annotations

import pytest

from llmq.options.presets import preset
from llmq.plan.sol import flops_per_token, nanoseconds_per_token, peaks

H100 = "NVIDIA H100 80GB HBM3"

# Tokens/s at the ceiling on an H100, T = 1024, in thousands: E4M3 and BF16.
CEILINGS = {
    "Qwen2.5-0.5B": (489.7, 319.8),
    "Qwen2.5-1.5B": (176.9, 103.9),
    "Qwen2.5-3B": (93.0, 52.2),
    "Qwen2.5-7B": (42.2, 23.0),
    "Qwen2.5-14B": (21.6, 11.6),
    "Qwen2.5-32B": (9.9, 5.1),
}


@pytest.mark.parametrize("name", CEILINGS)
def test_ceilings(name):
    flops = flops_per_token(preset(name), 1024)
    _, bf16, fp8, _ = peaks(H100)
    for peak, ceiling in zip((fp8, bf16), CEILINGS[name], strict=True):
        rate = 1e9 / nanoseconds_per_token(flops, peak, bf16, bf16)
        assert rate / 1000 == pytest.approx(ceiling, abs=0.05)  # published with one digit


@pytest.mark.parametrize(
    ("card", "name", "fp8", "gpus", "tps", "published"),
    [
        (H100, "Qwen2.5-0.5B", True, 1, 164e3, 33.6),
        (H100, "Qwen2.5-0.5B", False, 1, 150e3, 46.9),
        (H100, "Qwen2.5-1.5B", True, 1, 72.9e3, 41.2),
        (H100, "Qwen2.5-7B", True, 1, 19.1e3, 45.3),
        (H100, "Qwen2.5-0.5B", True, 8, 1307e3, 33.2),
        ("NVIDIA GeForce RTX 4090", "Qwen2.5-0.5B", True, 1, 47.6e3, 58.3),
        ("NVIDIA GeForce RTX 5060 Ti", "Qwen2.5-0.5B", False, 1, 13.0e3, 85.3),
    ],
)
def test_published_runs(card, name, fp8, gpus, tps, published):
    _, bf16, fp8_peak, _ = peaks(card)
    flops = flops_per_token(preset(name), 1024)
    ns = nanoseconds_per_token(flops, fp8_peak if fp8 else bf16, bf16, bf16, gpus)
    assert 100 * tps * ns / 1e9 == pytest.approx(published, rel=0.01)  # tps has three digits


def test_flops_by_hand():
    model = preset("Qwen2.5-0.5B")
    L, C, F, V = 24, 896, 4864, 151936
    flops = flops_per_token(model, 2048)
    assert flops.blocks == 6 * L * C * (3 * F + C + 64 * (14 + 2 * 2))
    assert flops.lm_head == 6 * V * C
    assert flops.attention == 6 * L * 896 * 2048


def test_gelu_has_two_matrices():
    model = preset("gpt2")
    assert flops_per_token(model, 1).blocks == 6 * 12 * 768 * (2 * 3072 + 768 + 3 * 768)


def test_unknown_card():
    assert peaks("NVIDIA GeForce GTX 1080") is None


# BF16 TFLOP/s of NVIDIA's data sheets.
SHEETS = {
    "NVIDIA GeForce RTX 3060 Ti": 32.4,
    "NVIDIA GeForce RTX 3060": 25.5,
    "NVIDIA RTX A5500": 136.4,
    "NVIDIA RTX A5000": 111.1,
    "NVIDIA RTX A4500": 94.6,
    "NVIDIA RTX A4000": 76.7,
    "NVIDIA RTX A2000": 31.9,
    "NVIDIA RTX 5880 Ada Generation": 277.1,
    "NVIDIA RTX 5000 Ada Generation": 261.1,
    "NVIDIA RTX 4500 Ada Generation": 158.5,
    "NVIDIA RTX 4000 Ada Generation": 106.9,
    "NVIDIA RTX 2000 Ada Generation": 48.0,
}


def test_scaled_cards():
    for card, sheet in SHEETS.items():
        assert peaks(card)[1] == pytest.approx(sheet, rel=0.003), card  # clocks are rounded
    tf32, bf16, fp8, int8 = peaks("NVIDIA GeForce RTX 4060")
    assert (bf16 / tf32, fp8 / bf16, int8 / bf16) == pytest.approx((2, 2, 4), rel=0.001)


# Dense TOP/s of signed bytes, from data sheets.
INT8_SHEETS = {
    "A100-SXM4-80GB": 624,
    "A40": 299.3,
    "RTX A6000": 309.7,
    "L4": 242,
    "H100 80GB HBM3": 1979,
    "GeForce RTX 3090": 284,
    "GeForce RTX 4090": 660.6,
    "GeForce RTX 5090": 838,
}


def test_peaks_of_signed_bytes():
    for card, sheet in INT8_SHEETS.items():
        assert peaks(f"NVIDIA {card}")[3] == pytest.approx(sheet, rel=0.002), card
