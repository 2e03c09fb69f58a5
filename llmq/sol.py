"""Speed of light: the tokens per second that a card's peak arithmetic would allow."""

from __future__ import annotations

from dataclasses import dataclass

from llmq.config import ModelConfig

# Dense peaks with fp32 accumulation in TFLOP/s: TF32, BF16, FP8 (0: none), by the driver's name
# for the card. NVIDIA's data sheets, as collected by llm.q; GH200, H200 and PRO 6000 WS added.
_HOPPER = (494.7, 989.4, 1978.9)
_A100 = (156.0, 312.0, 0.0)
PEAKS: dict[str, tuple[float, float, float]] = {
    "NVIDIA H100 80GB HBM3": _HOPPER,
    "NVIDIA H200": _HOPPER,
    "NVIDIA GH200 480GB": _HOPPER,
    "NVIDIA GH200 120GB": _HOPPER,
    "NVIDIA H100 PCIe": (378.0, 756.0, 1513.0),
    "NVIDIA B200": (1100.0, 2200.0, 4500.0),
    "NVIDIA A100-SXM4-40GB": _A100,
    "NVIDIA A100-SXM4-80GB": _A100,
    "NVIDIA A100-PCIE-40GB": _A100,
    "NVIDIA A100-PCIE-80GB": _A100,
    "NVIDIA A100 80GB PCIe": _A100,
    "NVIDIA L40S": (183.0, 362.05, 733.0),
    "NVIDIA L40": (90.5, 181.0, 362.0),
    "NVIDIA L4": (60.0, 121.0, 242.0),
    "NVIDIA A40": (74.8, 149.7, 0.0),
    "NVIDIA GeForce RTX 4090": (82.6, 165.2, 330.3),
    "NVIDIA GeForce RTX 4080": (48.7, 97.5, 194.9),
    "NVIDIA GeForce RTX 4070 Ti": (40.1, 80.2, 160.4),
    "NVIDIA GeForce RTX 4070": (29.1, 58.3, 116.6),
    "NVIDIA GeForce RTX 5090": (104.8, 209.5, 419.0),
    "NVIDIA GeForce RTX 5080": (56.3, 112.6, 225.1),
    "NVIDIA GeForce RTX 5070 Ti": (43.9, 87.9, 175.8),
    "NVIDIA GeForce RTX 5070": (30.9, 61.7, 123.5),
    "NVIDIA GeForce RTX 3090 Ti": (40.0, 80.0, 0.0),
    "NVIDIA GeForce RTX 3090": (35.6, 71.0, 0.0),
    "NVIDIA GeForce RTX 3080 Ti": (34.1, 68.2, 0.0),
    "NVIDIA GeForce RTX 3080": (29.8, 59.5, 0.0),
    "NVIDIA GeForce RTX 3070 Ti": (21.7, 43.5, 0.0),
    "NVIDIA GeForce RTX 3070": (20.3, 40.6, 0.0),
    "NVIDIA RTX A6000": (77.4, 154.8, 0.0),
    "NVIDIA RTX 6000 Ada Generation": (182.1, 364.2, 728.5),
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": (251.9, 503.8, 1007.6),
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": (251.9, 503.8, 1007.6),
    "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition": (219.5, 438.9, 877.9),
    "NVIDIA GB10": (29.7, 59.4, 118.8),
}

# Cards whose peak follows from a sibling's by multiprocessors x clock in MHz: their own, and the
# sibling with its own.
_RTX_4090 = ("NVIDIA GeForce RTX 4090", 128, 2520)
_RTX_5070 = ("NVIDIA GeForce RTX 5070", 48, 2512)
_RTX_3070 = ("NVIDIA GeForce RTX 3070", 46, 1725)
_RTX_A6000 = ("NVIDIA RTX A6000", 84, 1800)
_RTX_6000_ADA = ("NVIDIA RTX 6000 Ada Generation", 142, 2505)
_RTX_PRO_6000 = ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 188, 2617)
_SCALED: dict[str, tuple[int, int, tuple[str, int, int]]] = {
    "NVIDIA GeForce RTX 4080 SUPER": (80, 2550, _RTX_4090),
    "NVIDIA GeForce RTX 4070 Ti SUPER": (66, 2610, _RTX_4090),
    "NVIDIA GeForce RTX 4070 SUPER": (56, 2475, _RTX_4090),
    "NVIDIA GeForce RTX 4060 Ti": (34, 2535, _RTX_4090),
    "NVIDIA GeForce RTX 4060": (24, 2460, _RTX_4090),
    "NVIDIA GeForce RTX 5060 Ti": (36, 2572, _RTX_5070),
    "NVIDIA GeForce RTX 5060": (30, 2497, _RTX_5070),
    "NVIDIA GeForce RTX 3060 Ti": (38, 1665, _RTX_3070),
    "NVIDIA GeForce RTX 3060": (28, 1777, _RTX_3070),
    "NVIDIA RTX A5500": (80, 1665, _RTX_A6000),
    "NVIDIA RTX A5000": (64, 1695, _RTX_A6000),
    "NVIDIA RTX A4500": (56, 1650, _RTX_A6000),
    "NVIDIA RTX A4000": (48, 1560, _RTX_A6000),
    "NVIDIA RTX A2000": (26, 1200, _RTX_A6000),
    "NVIDIA RTX 5880 Ada Generation": (110, 2460, _RTX_6000_ADA),
    "NVIDIA RTX 5000 Ada Generation": (100, 2550, _RTX_6000_ADA),
    "NVIDIA RTX 4500 Ada Generation": (60, 2580, _RTX_6000_ADA),
    "NVIDIA RTX 4000 Ada Generation": (48, 2175, _RTX_6000_ADA),
    "NVIDIA RTX 2000 Ada Generation": (22, 2130, _RTX_6000_ADA),
    "NVIDIA RTX PRO 4000 Blackwell": (70, 2055, _RTX_PRO_6000),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FlopsPerToken:
    """Floating-point operations per trained token, by part; recomputation is not credited."""

    blocks: int
    lm_head: int
    attention: int


def flops_per_token(config: ModelConfig, seq_len: int) -> FlopsPerToken:
    """llm.q's formula: forward and two backward products; attention counts its causal half."""
    C, F, L = config.hidden_size, config.intermediate_size, config.num_layers
    width = config.num_heads * config.head_dim
    matrices = 3 if config.activation == "swiglu" else 2
    return FlopsPerToken(
        blocks=6 * L * C * (matrices * F + width + config.qkv_channels),
        lm_head=6 * config.vocab_size * C,
        attention=6 * L * width * seq_len,
    )


def peaks(name: str) -> tuple[float, float, float] | None:
    """TF32, BF16 and FP8 peak of a card in TFLOP/s by its driver name; None if unknown."""
    if name in _SCALED:
        sms, clock, (sibling, sibling_sms, sibling_clock) = _SCALED[name]
        ratio = sms * clock / (sibling_sms * sibling_clock)
        tf32, bf16, fp8 = (peak * ratio for peak in PEAKS[sibling])
        return tf32, bf16, fp8
    return PEAKS.get(name)


def nanoseconds_per_token(
    flops: FlopsPerToken, blocks_peak: float, model_peak: float, world_size: int = 1
) -> int:
    """llm.q's integer arithmetic: each part in whole nanoseconds; peaks in TFLOP/s."""
    parts = (
        (flops.blocks, blocks_peak),
        (flops.lm_head, model_peak),
        (flops.attention, model_peak),
    )
    return sum(int((f / 1000) / peak) for f, peak in parts) // world_size
