"""Reference of the gradient norm."""

import numpy as np

from llmq.base.dtypes import STAT
from llmq.ref.common import compute, step_scalars

# name: sizes of the tensors.
CASES = {
    "one": (1,),
    "ragged": (7, 4096, 12345),
    "loop": (40000, 129),
    "qwen05b": (136134656, *[14912384] * 24, 896),
    "qwen15b": (233373696, *[46792704] * 28, 1536),
}

BLOCK = 1 << 16  # elements summed in F32 before the F64 sum


def global_norm_partials(partials, x, n):
    """Write partials that add up to sum(x^2): here the first partial is the whole sum, the others
    are zero."""
    flat = x.reshape(-1)
    total = 0.0
    for start in range(0, n, BLOCK):
        part = compute(flat[start : start + BLOCK])
        total += float(np.dot(part, part))
    partials[:] = 0
    partials[0] = total


def global_norm_sum(stats, partials, num_partials):
    """stats[norm_squared] += sum(partials)."""
    stats[STAT["norm_squared"]] += partials[:num_partials].sum()


def global_norm_combine(stats, gathered, world_size, maxima):
    """stats[k] = the sum over ranks, in the order of ranks; or the largest over ranks, if bit k of
    maxima is set."""
    stats[:] = 0
    for one in gathered:
        stats += one
    largest = [k for k in range(stats.size) if maxima >> k & 1]
    stats[largest] = np.fmax.reduce(gathered[:, largest])


def global_norm_finish(stats, scalars):
    """Write the norm of the mean gradient, clip factor / count, and whether to skip the update."""
    s = step_scalars(scalars)
    count = stats[STAT["count"]]
    norm = np.sqrt(stats[STAT["norm_squared"]]) / count if count > 0 else np.float64(0)
    stats[STAT["norm"]] = norm
    skip = count == 0 or not np.isfinite(norm)
    if not skip:
        loss = stats[STAT["loss"]] / count
        for value, limit in ((norm, s["norm_limit"]), (loss, s["loss_limit"])):
            skip = skip or (limit > 0 and not value <= np.float64(limit))
    clip = np.float64(s["grad_clip"])
    factor = clip / norm if clip > 0 and norm > clip else 1.0
    s["grad_scale"] = 0 if skip else factor / count
    s["skip_update"] = skip
