"""Reference of dropout: which elements stay is a function of seed, step, sequence and place."""

import numpy as np

from llmq.ref.common import compute, mix_seed, random_bits, step_scalars

# name: (sequences, elements of a sequence)
CASES = {"one": (1, 8), "ragged": (3, 1000), "several_blocks": (2, 5000), "qwen7b": (4, 3670016)}


def dropout(out, x, scalars, threshold, scale, salt, per_sequence, n, *, add):
    """out = [out +] scale * x where an element stays, [out +] 0 elsewhere; rounded once."""
    s = step_scalars(scalars)
    seed = mix_seed(int(s["seed"]), int(s["step"]), salt)
    flat, values = out.reshape(-1), x.reshape(-1)
    for start in range(0, n, per_sequence):
        part = slice(start, start + per_sequence)
        sequence = int(s["first_sequence"]) + start // per_sequence * int(s["sequence_stride"])
        first = np.uint64(sequence * per_sequence)
        index = first + np.arange(min(per_sequence, n - start), dtype=np.uint64)
        stays = random_bits(seed, index) >= np.uint32(threshold)
        kept = np.where(stays, compute(values[part]) * np.float32(scale), np.float32(0))
        flat[part] = compute(flat[part]) + kept if add else kept
