"""Reference of the AdamW update."""

import numpy as np

from llmq.ref.common import SCALE_BLOCK, Scaled, Stored, mix_seed, neighbour_bits, step_scalars

# name: ends of the parameters in the slab, in elements; every second parameter decays.
CASES = {
    "one": (128,),
    "three": (256, 384, 2432),
    "ragged_grid": (2048, 4096, 4224, 5120),
    "qwen05b": (4358144, 14912384),  # attention and MLP of one block
    "qwen15b": (13762560, 46792704),
}

BLOCK = 1 << 16  # elements at a time: few calls, and a block's data stay in the L2 cache


def adamw(
    param, work, grad, m, v, m_scale, v_scale, segments, num_segments, scalars, one_minus_beta1,
    one_minus_beta2, epsilon, weight_decay, lr_scale, salt, first, n,
):  # fmt: skip
    """Run one step of AdamW on a slab; llmq.ops.update.adamw explains arguments and formula."""
    s = step_scalars(scalars)
    if s["skip_update"]:
        return
    real = np.float64 if param.dtype == np.float64 else np.float32
    lr = real(s["lr"]) * real(lr_scale)
    constants = {
        "grad_scale": real(s["grad_scale"]),
        "one_minus_beta1": real(one_minus_beta1),
        "one_minus_beta2": real(one_minus_beta2),
        "root_correction": np.sqrt(real(s["beta2_correction"])),
        "epsilon": real(epsilon),
        "step_size": lr * real(s["beta1_correction"]),
    }
    seed = mix_seed(int(s["seed"]), int(s["step"]), salt)
    temporaries = np.empty((2, min(BLOCK, n)), real)
    start = first
    for end, decays in segments.tolist():
        end = min(end, first + n)
        decay = lr * real(weight_decay) if decays else real(0)
        for low in range(start, end, BLOCK):
            part = slice(low - first, min(low + BLOCK, end) - first)
            scales = slice(part.start // SCALE_BLOCK, part.stop // SCALE_BLOCK)
            stored = [Stored(param[part]), Stored(m[part]), Stored(v[part])]
            if m_scale is not None:
                stored[1] = Scaled(m[part], m_scale[scales], root=False)
            if v_scale is not None:
                stored[2] = Scaled(v[part], v_scale[scales], root=True)
            values = [x.load(real) for x in stored]
            _update(*values, grad[part].astype(real, copy=False), decay, constants, temporaries)
            _round(stored, values, seed, low)
            if work is not None:
                work[part] = param[part]
        start = max(start, end)


def _update(
    p: np.ndarray,
    m: np.ndarray,
    v: np.ndarray,
    g: np.ndarray,
    decay: np.floating,
    constants: dict[str, np.floating],
    temporaries: np.ndarray,
) -> None:
    """Update p, m and v in place, in the kernel's order of operations."""
    t, u = temporaries[:, : p.size]
    np.multiply(g, constants["grad_scale"], out=t)
    np.subtract(t, m, out=u)
    u *= constants["one_minus_beta1"]
    m += u
    t *= t
    t -= v
    t *= constants["one_minus_beta2"]
    v += t
    np.sqrt(v, out=t)
    t *= constants["root_correction"]
    t += constants["epsilon"]
    np.divide(m, t, out=u)
    u *= constants["step_size"]
    if decay:
        np.multiply(p, decay, out=t)
        u += t
    p -= u


def _round(stored: list[Stored], values: list[np.ndarray], seed: int, first: int) -> None:
    """Write rounded values back, with separate random bits for each element of p, m and v."""
    if not any(x.rounds for x in stored):
        return
    shared, own = (neighbour_bits(one, first, values[0].size) for one in (seed, mix_seed(seed)))
    bits = (shared, own, shared)  # p uses the low halves, v the high halves
    for one, value, b, high in zip(stored, values, bits, (False, False, True), strict=True):
        if one.rounds:
            one.round(value, b, high)
