"""cuBLASLt offers only kernels that multiply by mma.sync, as every GPU since Ampere runs them.

    PYTHONPATH=tools/mma_sync LLMQ_CAPABILITY=89 LLMQ_CACHE_DIR=FOLDER llmq bench ...

Python runs a file of this name when it starts. On an H100 or H200 the library's choice are kernels
of Hopper, faster than those of the cards people have. In place of what its heuristic finds come
configurations of ALGORITHM that take no more shared memory than a GeForce card has, those with
large tiles first. They are not in the order of their speed, so that products must be tuned; what
was tuned lies in FOLDER, apart from that of other runs. fp8 codes have no such kernel on Hopper:
their products are refused.
"""

import ctypes
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
from nvmath.bindings import cublasLt as lt

ALGORITHM = 21  # its kernels are Ampere's
SHARED_BYTES = 99 << 10  # of a block
MOST = 8  # configurations of a tile
F32 = 0  # cudaDataType_t


def read(kind: str, handle: int, name: int, count: int = 1) -> list[int]:
    """An attribute that is up to so many numbers of 32 bits."""
    found, written = np.zeros(count, np.int32), np.zeros(1, np.uint64)
    function = getattr(lt, f"{kind}_get_attribute")
    function(handle, name, found.ctypes.data, found.nbytes, written.ctypes.data)
    return found[: int(written[0]) // 4].tolist()


def sizes(names: Any, values: list[int]) -> dict[int, tuple[int, int]]:
    """The two numbers in each name that has two: 128 and 64 of TILE_128x64, 32 and 3 of
    STAGES_32x3."""
    named = {int(member): re.findall(r"\d+", member.name) for member in names}
    pairs = {value: named.get(value, ()) for value in values}
    return {value: (int(p[0]), int(p[1])) for value, p in pairs.items() if len(p) == 2}


def configurations(algorithm: np.ndarray, itemsize: int) -> Iterator[tuple[int, np.ndarray]]:
    """A tile, and the algorithm with it: all tiles and stages that fit, large tiles and deep stages
    first, in both orders of blocks."""
    caps, config = lt.MatmulAlgoCapAttribute, lt.MatmulAlgoConfigAttribute
    at = algorithm.ctypes.data
    tiles = sizes(lt.MatmulTile, read("matmul_algo_cap", at, caps.TILE_IDS, 1024))
    stages = sizes(lt.MatmulStages, read("matmul_algo_cap", at, caps.STAGES_IDS, 1024))
    deep = sorted(stages.items(), key=lambda item: -item[1][0] * item[1][1])
    for tile, (rows, columns) in sorted(tiles.items(), key=lambda item: -min(item[1])):
        for stage, (depth, count) in deep:
            if (rows + columns) * depth * count * itemsize > SHARED_BYTES:
                continue
            for order in (0, 1):
                made = algorithm.copy()
                values = {
                    config.TILE_ID: tile,
                    config.STAGES_ID: stage,
                    config.CTA_SWIZZLING: order,
                }
                for name, value in values.items():
                    given = np.array([value], np.int32)
                    lt.matmul_algo_config_set_attribute(
                        made.ctypes.data, name, given.ctypes.data, 4
                    )
                yield tile, made


def heuristic(*args: int) -> None:
    """In place of matmul_algo_get_heuristic, with its arguments."""
    handle, desc, *layouts, _, count, results, found = args
    compute, scale = lt.MatmulDescAttribute.COMPUTE_TYPE, lt.MatmulDescAttribute.SCALE_TYPE
    types = [read("matmul_desc", desc, name)[0] for name in (compute, scale)]
    types += [read("matrix_layout", x, lt.MatrixLayoutAttribute.TYPE)[0] for x in layouts]
    algorithm = np.zeros(64, np.uint8)
    lt.matmul_algo_init(handle, *types, ALGORITHM, algorithm.ctypes.data)
    dtype, usable, of_tile = lt.matmul_heuristic_result_dtype, [], Counter()
    for tile, made in configurations(algorithm, 4 if types[2] == F32 else 2):
        result = np.zeros(1, dtype)
        if of_tile[tile] == MOST or len(usable) == count:
            continue
        try:
            lt.matmul_algo_check(handle, desc, *layouts, made.ctypes.data, result.ctypes.data)
        except lt.cuBLASLtError:
            continue
        result["algo"] = made.view(dtype["algo"])
        usable.append(result)
        of_tile[tile] += 1
    if usable:
        all_of_them = np.concatenate(usable)
        ctypes.memmove(results, all_of_them.ctypes.data, all_of_them.nbytes)
    ctypes.c_int.from_address(found).value = len(usable)


lt.matmul_algo_get_heuristic = heuristic
