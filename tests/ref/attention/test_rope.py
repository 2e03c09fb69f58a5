"""References of rope, and the table of angles, against transformers."""

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from llmq.arch.rope_scaling import RopeScaling
from llmq.base.dtypes import BF16
from llmq.ops.attention.rope import inverse_frequencies, make_table
from llmq.ref.attention import rope as ref

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_positions": 512,
}
FACTORS = tuple(np.linspace(1, 40, 48).tolist())
SCALINGS = {
    "none": None,
    "yarn": RopeScaling(kind="yarn", factor=4.0, original_max_positions=512),
    "yarn of all fields": RopeScaling(
        kind="yarn", factor=8.0, original_max_positions=300, beta_fast=20.0, beta_slow=2.0,
        mscale=0.7, mscale_all_dim=1.1, truncate=False,
    ),
    "longrope": RopeScaling(
        kind="longrope", factor=None, original_max_positions=512, long_factor=FACTORS,
        short_factor=FACTORS[::-1],
    ),
    "dynamic": RopeScaling(kind="dynamic", factor=2.0, original_max_positions=2048),
    "linear": RopeScaling(kind="linear", factor=4.0),
    "llama3": RopeScaling(kind="llama3", **LLAMA3),
}  # fmt: skip


def transformers_rope(head_dim: int, theta: float, scaling: RopeScaling | None):
    """The module that makes transformers' angles, and its length of the table's rows."""
    parameters = {"rope_type": "default"} if scaling is None else scaling.write()
    parameters["rope_theta"] = theta
    config = LlamaConfig(
        hidden_size=2 * head_dim,
        num_attention_heads=2,
        head_dim=head_dim,
        max_position_embeddings=2048,
        rope_parameters=parameters,
    )
    return LlamaRotaryEmbedding(config)


@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS.keys())
@pytest.mark.parametrize("head_dim, theta", [(64, 1e6), (80, 5e5), (96, 1e4), (128, 1e6)])
def test_table_equals_transformers(head_dim, theta, scaling):
    """In sequences of all lengths: of longrope up to the first length, and beyond it."""
    if scaling is not None and scaling.kind == "longrope" and head_dim != 96:
        pytest.skip("its factors are of 48 frequencies")
    module = transformers_rope(head_dim, theta, scaling)
    for positions in (2048, 512) if scaling is None or scaling.kind != "dynamic" else (2048, 3000):
        cos, sin = module(torch.zeros(1), torch.arange(positions)[None])
        want_inv_freq = module.inv_freq.numpy()
        inv_freq = inverse_frequencies(head_dim, theta, scaling, positions)
        assert inv_freq.dtype == np.float32
        equal = inv_freq == want_inv_freq
        # torch's F32 power is not always the nearest F32; llama3's interpolation makes that error
        # of 2^-24 a few times larger, and yarn's has other roundings.
        assert (~equal).sum() <= (1 if scaling is None or scaling.kind != "yarn" else 9)
        np.testing.assert_allclose(inv_freq, want_inv_freq, rtol=2**-21)

        length = 1.0 if scaling is None else scaling.attention(2048)
        assert length == module.attention_scaling
        table = make_table(positions, head_dim, theta, scaling, length)
        assert table.dtype == np.float32 and table.shape == (positions, head_dim // 2, 2)
        want = np.stack([cos[0, :, : head_dim // 2], sin[0, :, : head_dim // 2]], -1)
        # At equal angles ours is the nearest F32, torch's may be the next one.
        atol = 2**-24 if length == 1 else 2**-22
        np.testing.assert_allclose(table[:, equal], want[:, equal], rtol=0, atol=atol)


def test_unknown_scaling_raises():
    with pytest.raises(ValueError, match="axial"):
        make_table(8, 64, 1e4, RopeScaling(kind="axial", factor=2.0))


@pytest.mark.parametrize("dtype", [np.float64, np.float32, BF16.numpy], ids=["f64", "f32", "bf16"])
@pytest.mark.parametrize("first_position", [0, 7])
def test_forward_equals_transformers(rng, dtype, first_position):
    B, T, Hq, Hkv, Hd = 2, 5, 4, 2, 64
    table = make_table(16, Hd, 1e4, None)
    before = rng.normal(size=(B, T, Hq + 2 * Hkv, Hd)).astype(dtype)
    qkv = before.copy()
    starts = np.full((B, T), -first_position, np.int32)
    ref.rope_forward(qkv, table, B * T, T, Hq, Hkv, starts)

    wide = before.astype(np.float64 if dtype == np.float64 else np.float32)
    q, k, _ = torch.tensor(wide).transpose(1, 2).split([Hq, Hkv, Hkv], dim=1)
    rows = torch.tensor(table[first_position : first_position + T].astype(wide.dtype))
    cos, sin = (torch.cat([rows[..., i], rows[..., i]], -1)[None] for i in range(2))
    q, k = apply_rotary_pos_emb(q, k, cos, sin)
    want = torch.cat([q, k], 1).transpose(1, 2).numpy().astype(dtype)
    # Exact: the same two products and one sum, rounded to BF16 at the end.
    np.testing.assert_array_equal(qkv[:, :, : Hq + Hkv], want)
    np.testing.assert_array_equal(qkv[:, :, Hq + Hkv :], before[:, :, Hq + Hkv :])


def test_backward_is_the_transposed_rotation(rng):
    B, T, Hq, Hkv, Hd = 2, 5, 3, 1, 80
    table = make_table(T, Hd, 1e4, None)
    x, d_out = (rng.normal(size=(B, T, Hq + 2 * Hkv, Hd)) for _ in range(2))
    out, d_x = x.copy(), d_out.copy()
    ref.rope_forward(out, table, B * T, T, Hq, Hkv)
    ref.rope_backward(d_x, table, B * T, T, Hq, Hkv)
    # F64; <d_out, R x> = <R^T d_out, x> for each token, up to the order of the sums.
    np.testing.assert_allclose((d_out * out).sum((2, 3)), (d_x * x).sum((2, 3)), rtol=1e-11)
    np.testing.assert_array_equal(d_x[:, :, Hq + Hkv :], d_out[:, :, Hq + Hkv :])
