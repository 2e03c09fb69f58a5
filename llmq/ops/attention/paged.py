"""Attention through a paged cache: keys and values of many sequences in blocks of one pool."""

from math import inf

from llmq.base.dtypes import F32
from llmq.base.tensor import Tensor
from llmq.ops.common import VECTOR_BYTES
from llmq.runtime.arena import align_up
from llmq.runtime.cost import BESIDE_ATTENTION
from llmq.runtime.device import Device
from llmq.runtime.kernel import Kernel, ceil_div

MAX_HEAD_DIM = 512
# Channels of a head up to which shared memory holds keys and values of two steps, else of one.
ONE_STAGE = 256
MAX_LATENT_DIM = 576  # channels of keys whose first channels are the values
THREADS = 128
STORE_THREADS = 256
SPLIT = 256  # keys of one partial result, as in cu/attention/paged.cu
FEW = 4  # queries of a sequence up to which its keys are split over thread blocks
FEW_ROWS, MANY_ROWS = 16, 64  # pairs (query, head) of a thread block
BLOCKS = 8  # thread blocks per multiprocessor, about, in a launch that splits keys
BLOCK = 16  # default number of positions in a block of the cache
EVERY = 2**31 - 1  # a window that contains all positions

_CACHE = "C[blocks,block_size,num_kv_heads,Hd]"
_SCALES = "bf16[blocks,block_size,num_kv_heads,2]? scales"
_QKV = "T[sequences,n,num_heads + 2*num_kv_heads,Hd] qkv"
_TABLE = "i32[sequences,max_blocks] table, i32[sequences] lengths, i32[sequences] new"
_SIZES = "i32 n, i32 max_blocks, i32 block_size, i32 num_heads, i32 num_kv_heads"
_READ = f"{_QKV}, sparse {_CACHE} k_cache, sparse {_CACHE}? v_cache, {_TABLE}, {_SIZES}"
_OUT = "out T[sequences,n,num_heads,Vd] out"
_PARTS = "[sequences,n,num_heads,splits,{}]"
_PARTIAL, _STATS = f"f32{_PARTS.format('Vd')} partial", f"f32{_PARTS.format('2')} stats"
_TYPES = "C=bf16|f32|e4m3"
_WHERE = "num_kv_heads >= 1, num_heads % num_kv_heads"
_GPU = f"Hd <= {MAX_LATENT_DIM}, Hd % 8"
_RULES = {
    "where": f"{_WHERE}, Vd <= Hd",
    "gpu": f"{_GPU}, Vd % 8",
    "types": _TYPES,
    "programmatic": True,
}
STORE = Kernel(
    "attention/paged.cu",
    "paged_store",
    f"sparse inout {_CACHE} k_cache, sparse inout {_CACHE}? v_cache, {_QKV}, {_TABLE}, {_SIZES}, "
    f"sparse inout {_SCALES}",
    where=_WHERE,
    gpu=_GPU,
    types=_TYPES,
    programmatic=True,
)
ATTEND = Kernel(
    "attention/paged.cu",
    "paged_attend",
    f"{_OUT}, {_READ}, i32 window, f32 scale, T[num_heads]? sinks, sparse {_SCALES}",
    **_RULES,
)
DECODE = Kernel(
    "attention/paged.cu",
    "paged_decode",
    f"{_OUT}, out {_PARTIAL}, out {_STATS}, inout i32[arrivals] arrived, {_QKV}, "
    f"sparse inout {_CACHE} k_cache, sparse inout {_CACHE}? v_cache, {_TABLE}, {_SIZES}, "
    f"i32 splits, i32 window, f32 scale, T[num_heads]? sinks, i32 stores, sparse inout {_SCALES}",
    **_RULES,
)


def _many_rows(itemsize: int, head_dim: int, *, latent: bool) -> int:
    """Pairs (query, head) of a thread block for many queries: its tiles must fit into 99 KiB."""
    if latent or head_dim > ONE_STAGE:
        return FEW_ROWS
    return MANY_ROWS >> (itemsize == 4) >> (head_dim > 128)


def _shared_bytes(itemsize: int, head_dim: int, rows: int, *, latent: bool) -> int:
    """Bytes of the kernels' shared memory: queries, stages of keys and values, scores and
    probabilities. latent: values are the first channels of keys."""
    wide = head_dim > ONE_STAGE
    if itemsize == 2:
        step, row = 64 if head_dim <= 64 else 32, align_up(head_dim, 16)
    else:
        step, row = 32 if head_dim <= 128 else 8 if latent or wide else 16, head_dim
    tiles = (rows + (2 if latent or wide else 4) * step) * (row * itemsize + VECTOR_BYTES)
    return tiles + rows * (step + 4) * 4 + rows * (step + 8) * itemsize


def _expect_numbers(window: int | None, scale: float | None, head_dim: int) -> tuple[int, float]:
    """The window and the factor of scores, with defaults for None. ValueError for a wrong one."""
    if window is not None and window < 1:
        raise ValueError(f"paged.attend: window must be at least 1, got {window}")
    scale = head_dim**-0.5 if scale is None else scale
    if not 0 < scale < inf:
        raise ValueError(f"paged.attend: scale must be positive, got {scale}")
    return EVERY if window is None else window, scale


def _consts(
    head_dim: int, block_size: int, values: int, *, latent: bool, softcap: int
) -> dict[str, int]:
    """Compile-time constants of ATTEND and DECODE. values: channels of a value. softcap: 0 for no
    cap."""
    consts = {"HEAD_DIM": head_dim, "BLOCK_SIZE": block_size, "VALUE_DIM": values}
    return consts | {"LATENT": int(latent)} | ({"SOFTCAP": softcap} if softcap else {})


def store(
    dev: Device,
    qkv: Tensor,
    k_cache: Tensor,
    v_cache: Tensor | None,
    table: Tensor,
    lengths: Tensor,
    new: Tensor,
    num_heads: int,
    num_kv_heads: int,
    scales: Tensor | None = None,
) -> None:
    """Store keys and values of the new tokens of each sequence s: the first new[s] of n tokens,
    behind the lengths[s] tokens that the cache already holds.

    qkv: (S, n, Hq + 2 Hkv, Hd), rotated already. k_cache, v_cache: (blocks, block_size, Hkv, Hd);
    v_cache None: values are the first channels of keys, and the values in qkv are not read. scales:
    BF16 (blocks, block_size, Hkv, 2), powers of two for each row of keys and of values, if the
    caches hold E4M3 codes; else None.
    table: I32 (S, max_blocks), the numbers of each sequence's blocks; entries that no token needs
    may be anything. lengths, new: I32 (S,); new 0: an idle sequence, for which nothing is stored.
    The device reads table, lengths and new unchecked: lengths[s] + new[s] must be at most
    max_blocks * block_size, and two sequences must not write to one block.
    """
    given = {"qkv": qkv, "k_cache": k_cache, "table": table}
    sequences, n, head_dim, _, block_size, max_blocks = STORE.dims(
        **given, num_heads=num_heads, num_kv_heads=num_kv_heads
    )
    sizes = (n, max_blocks, block_size)
    vectors = n * num_kv_heads * ceil_div(head_dim * qkv.dtype.itemsize, VECTOR_BYTES)
    dev.launch(
        STORE,
        (ceil_div(vectors, STORE_THREADS), sequences),
        STORE_THREADS,
        (k_cache, v_cache, qkv, table, lengths, new, *sizes, num_heads, num_kv_heads, scales),
        consts={"HEAD_DIM": head_dim},
        cost=BESIDE_ATTENTION,
    )


def attend(
    dev: Device,
    out: Tensor,
    qkv: Tensor,
    k_cache: Tensor,
    v_cache: Tensor | None,
    table: Tensor,
    lengths: Tensor,
    new: Tensor,
    num_heads: int,
    num_kv_heads: int,
    window: int | None = None,
    sinks: Tensor | None = None,
    *,
    scale: float | None = None,
    softcap: int = 0,
    arrived: Tensor | None = None,
    stores: bool = True,
    scales: Tensor | None = None,
) -> None:
    """Store the new tokens of each sequence in the cache, and compute their attention: token i of
    sequence s, at position lengths[s] + i, sees positions up to its own. Other tensors: see store.

    out: (S, n, Hq, Hd) or (S, n, Hq*Hd), 0 from token new[s] on; without v_cache (S, n, Hq, Vd),
    as values are the first Vd channels of keys. window: number of positions that a token sees, its
    own included; None: all. sinks: (Hq,), for each head a score without a value. scale, softcap:
    see attention.forward. arrived: at least `arrivals` I32 zeros, which stay zeros; with them a GPU
    needs one launch for few tokens. stores: False if the cache already has the new tokens.

    On a GPU a token's bits depend on its sequence alone, not on n: sums over SPLIT keys each are
    added one after the other. ValueError for a window below 1, or a scale that is not positive.

    Cost:    reads the used part of the cache once for 16 query heads of a key/value head, which is
             not counted; two launches. With `arrived` and n <= FEW: one launch, and scratch of
             4 * S * n * Hq * (Vd + 2) bytes for each SPLIT positions of the table.
    """
    heads = {"num_heads": num_heads, "num_kv_heads": num_kv_heads}
    given = {"qkv": qkv, "k_cache": k_cache, "table": table} | heads
    sequences, n, head_dim, _, block_size, max_blocks = STORE.dims(**given)
    numbers = (*_expect_numbers(window, scale, head_dim), sinks)
    latent, on_gpu = v_cache is None, dev.spec.capability > 0
    if out.shape == (sequences, n, num_heads * head_dim):
        out = out.view(sequences, n, num_heads, head_dim)
    if on_gpu and not latent and head_dim > MAX_HEAD_DIM:
        raise ValueError(f"paged.attend: Hd must be at most {MAX_HEAD_DIM}, got {head_dim}")
    sizes = (n, max_blocks, block_size, num_heads, num_kv_heads)
    read = (qkv, k_cache, v_cache, table, lengths, new, *sizes)
    consts = _consts(head_dim, block_size, out.shape[3], latent=latent, softcap=softcap)
    if n <= FEW and on_gpu and arrived is not None:
        _decode(dev, out, arrived, read, consts, (*numbers, int(stores), scales))
        return
    if stores:
        store(dev, qkv, k_cache, v_cache, table, lengths, new, num_heads, num_kv_heads, scales)
    rows = _many_rows(qkv.dtype.itemsize, head_dim, latent=latent)
    tiles = sequences * ceil_div(n * (num_heads // num_kv_heads), rows)
    dev.launch(
        ATTEND, (num_kv_heads, tiles), THREADS, (out, *read, *numbers, scales),
        smem=_shared_bytes(qkv.dtype.itemsize, head_dim, rows, latent=latent),
        consts=consts | {"ROWS": rows}, cost=BESIDE_ATTENTION,
    )  # fmt: skip


def arrivals(sequences: int, num_heads: int) -> int:
    """Number of elements that `arrived` needs for calls of up to FEW tokens per sequence."""
    return sequences * FEW * num_heads


def _decode(
    dev: Device,
    out: Tensor,
    arrived: Tensor,
    read: tuple,
    consts: dict[str, int],
    last: tuple,
) -> None:
    """Compute `attend` for few tokens per sequence. read, last: arguments of DECODE in its
    order."""
    qkv, _, v_cache, _, _, _, n, max_blocks, block_size, num_heads, num_kv_heads = read
    sequences, head_dim, values = qkv.shape[0], qkv.shape[3], out.shape[3]
    tiles = sequences * ceil_div(n * (num_heads // num_kv_heads), FEW_ROWS)
    splits = ceil_div(max_blocks * block_size, SPLIT)
    at_once = ceil_div(BLOCKS * dev.spec.num_sms, num_kv_heads * tiles)
    parts = (sequences, n, num_heads, splits)
    with (
        dev.scratch("paged_partial", (*parts, values), F32) as partial,
        dev.scratch("paged_stats", (*parts, 2), F32) as stats,
    ):
        dev.launch(
            DECODE,
            (min(splits, at_once), num_kv_heads, tiles),
            THREADS,
            (out, partial, stats, arrived, *read, splits, *last),
            consts=consts | {"ROWS": FEW_ROWS},
            smem=_shared_bytes(qkv.dtype.itemsize, head_dim, FEW_ROWS, latent=v_cache is None),
            cost=BESIDE_ATTENTION,
        )
