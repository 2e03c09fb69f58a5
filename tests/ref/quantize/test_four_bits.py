"""NF4 in NumPy: the codes that bitsandbytes makes of known numbers."""

import numpy as np

from llmq.ref.quantize import four_bits as ref


def quantized(x: np.ndarray) -> dict[str, np.ndarray]:
    """Codes and scales that are kept of x (n,)."""
    blocks = x.size // 64
    made = {"codes": np.zeros(x.size // 2, np.uint8), "scales": np.zeros(blocks, np.float32)}
    ref.nf4_quantize(made["codes"], made["scales"], x, x.size)
    made["mean"] = np.array([made["scales"].mean(dtype=np.float64)], np.float32)
    made["scale_codes"] = np.zeros(blocks, np.uint8)
    made["groups"] = np.zeros(-(-blocks // 256), np.float32)
    rest = (made["scales"], made["mean"], ref.scale_levels(), blocks)
    ref.nf4_quantize_scales(made["scale_codes"], made["groups"], *rest)
    return made


def decoded(made: dict[str, np.ndarray]) -> np.ndarray:
    out = np.full(2 * made["codes"].size, np.nan, np.float32)
    rest = (made["scale_codes"], made["groups"], made["mean"], ref.scale_levels(), out.size)
    ref.nf4_decode(out, made["codes"], *rest)
    return out


def known(blocks: int) -> np.ndarray:
    """Numbers that any program makes alike: F32 (64 * blocks,)."""
    i = np.arange(64 * blocks, dtype=np.int64)
    return ((i * 7919 % 1009 - 504) * (1 + i // 64 % 5)).astype(np.float32) / np.float32(4096)


# Codes of known(4) and known(300), by bitsandbytes 0.50 (quantize_4bit, nf4, blocks of 64, nested).
CODES = (
    "0ec8521fda7410ec9531fdb7420eda631feb8521fda7310ec9521fdb7420ed9631feb8521fda6310ec9521fd"
    "b7420ec9631feb8420fda6310ec9521fdb7410ec9631feb8420fda6310ec8521fdb7410ec9631feb8420eda6"
    "310ec8521fdb7410ec9631feb8420eda6310ec8521fda7410ec9531feb7420eda6310ec8521fda74"
)
SCALE_CODES = "02249adafc01235bd9fb01248fdbfe02259edb"
MEAN, GROUPS = 0.3650984764099121, [0.2501358985900879, 0.2501358985900879]


def test_codes_are_those_of_bitsandbytes():
    assert quantized(known(4))["codes"].tobytes().hex() == CODES
    made = quantized(known(300))
    assert made["mean"][0] == np.float32(MEAN)
    assert made["groups"].tolist() == [np.float32(g) for g in GROUPS]
    assert made["scale_codes"][::16].tobytes().hex() == SCALE_CODES


def test_levels_of_scales():
    levels = ref.scale_levels()
    assert len(np.unique(levels)) == 256 and levels[127] == 0 and levels[255] == 1
    np.testing.assert_array_equal(levels[:127], -levels[254:127:-1])
    # The largest ones: middles of 64 parts of [0.1, 1].
    want = 0.1 + 0.9 / 64 * (np.arange(64) + 0.5)
    np.testing.assert_allclose(levels[191:255], want, rtol=1e-6)  # F32


def test_decoded_is_near(rng):
    x = (rng.normal(size=64 * 600) * 0.02).astype(np.float32)
    x[64:128] = 0
    found = decoded(quantized(x))
    # Levels are at most 0.28 apart, which a scale multiplies; scales are right to 1 %.
    largest = np.repeat(np.abs(x.reshape(-1, 64)).max(axis=1), 64)
    assert (np.abs(found - x) <= 0.16 * largest + 1e-4).all()
    assert (found[64:128] == 0).all()
    assert np.corrcoef(found, x)[0, 1] > 0.995
