"""What launches are told apart by when their times are kept: the same on a plan and on a GPU."""

from __future__ import annotations

from typing import NamedTuple

from llmq.base.dtypes import BF16, E4M3, DType
from llmq.base.tensor import Tensor

# Products of our own, which take about as long as the library's of the same matrices: where these
# are among their arguments, and a word for what they do besides.
FUSED = {
    "matmul_adapted": (1, "adapted"),
    "matmul_exp": (3, "exp"),
    "matmul_gradient": (1, "gradient"),
    "matmul_swiglu": (2, "swiglu"),
    "matmul_swiglu_backward": (1, "swiglu_backward"),
}
# Files of matrix products.
PRODUCTS = ("matmul", "matmul_int8.cu", *(f"{entry}.cu" for entry in FUSED))
LONGER = ("swiglu", "swiglu_backward")  # of these words, those that say it takes longer
OPERANDS = 6  # arguments of these: a, b, h and tail of adapters, and two scales


class Kind(NamedTuple):
    """name: words from the most telling one on, with `/` between them: what differs only in the
    last ones takes about as long. sizes: of a product (M, N, K); of attention (FLOPs, sequence
    length, head size, window); of all others (bytes of device memory,).
    """

    name: str
    sizes: tuple[int, ...]

    @property
    def is_product(self) -> bool:
        """Whether it is a matrix product of the library."""
        return self.name.startswith("matmul")


def launch_kind(file: str, entry: str, args: tuple, flops: int, device_bytes: int) -> Kind:
    """Of one launch, copy or fill: file and entry of its kernel, or "" and what it does."""
    tensors = _names(args)
    if entry in FUSED:
        library, (a, b), (m, n, k), fast = fused_product(entry, args)
        out = _result_dtype(entry, args).name
        words = [a.dtype.name, "0", str(int(b.shape == (n, k))), "0", out, *_does(entry, args)]
        if library == "matmul_fp8":
            words[:4] = [str(int(fast)), a.dtype.name, "0"]  # as below
        if entry == "matmul_adapted" and tensors[-1] != "-":
            words.append("addend")
        return Kind("/".join([library, *words]), (m, n, k))
    if entry == "matmul_mxfp8":  # whichever is faster of the two
        entry = "matmul_fp8"
    if entry.startswith("matmul"):
        m, n, k, *flags = [x for x in args if isinstance(x, int)]
        out, a = tensors[:2]
        words = [a, *map(str, reversed(flags)), out]
        if entry == "matmul_fp8":  # whether sums are fast matters more than which 8-bit format
            words[:2] = words[1::-1]
        if file == "matmul" and tensors[-2] != "-":  # the last one is the workspace
            words.append("addend")
        return Kind("/".join([entry, *words]), (m, n, k))
    if file.startswith("attention") and flops:
        sizes = (flops, *attention_sizes(file, entry, args))
        return Kind(f"{entry}/{file.partition('.')[2] or 'library'}/{tensors[0]}", sizes)
    return Kind(f"{entry}/{','.join(tensors)}", (device_bytes,))


def _does(entry: str, args: tuple) -> list[str]:
    """The words of what a launch of FUSED does: what takes longer does so by as much as it writes,
    what is kept, codes or tensors."""
    first, word = FUSED[entry]
    besides = args[:first] + args[first + OPERANDS :]
    return [word, ",".join(_names(besides))] if word in LONGER else [word]


def fused_product(
    entry: str, args: tuple
) -> tuple[str, tuple[Tensor, Tensor], tuple[int, int, int], bool]:
    """Of a launch of FUSED: the library's entry point of the same product, its a and b, M, N, K,
    and whether it sums with fewer bits if these are codes."""
    first, _ = FUSED[entry]
    a, b = args[first : first + 2]
    m, k = a.shape
    fast = entry != "matmul_gradient" or args[-1] == 0
    return "matmul" if a.dtype == BF16 else "matmul_fp8", (a, b), (m, b.size // k, k), fast


class More(NamedTuple):
    """What a launch does beside the library's product of the same matrices. nbytes: what it moves.
    turns: whether it writes codes in both layouts."""

    nbytes: int = 0
    turns: bool = False


def more_work(entry: str, args: tuple, device_bytes: int) -> More:
    """Nothing of launches that are not of FUSED, and of those that hide what they do besides."""
    if entry not in FUSED or entry == "matmul_gradient":
        return More()
    _, (a, b), (m, n, _), _ = fused_product(entry, args)
    result = m * n * _result_dtype(entry, args).itemsize
    nbytes = max(device_bytes - a.nbytes - b.nbytes - result, 0)
    behind = args[FUSED[entry][0] + 2 :]
    codes = [x for x in behind if isinstance(x, Tensor) and x.dtype.itemsize == 1]
    return More(nbytes, turns=len(codes) == 2)


def _result_dtype(entry: str, args: tuple) -> DType:
    """What the library would write of the product of a launch of FUSED."""
    has_scale = entry == "matmul_swiglu" and args[-6] is not None  # of codes, see ops/matmul_swiglu
    return E4M3 if has_scale else BF16


def attention_sizes(file: str, entry: str, args: tuple) -> tuple[int, int, int]:
    """Sequence length, head size and how many keys a query sees, of the arguments of one of
    attention's kernels."""
    if entry == "attention_gradient":  # whose tensors are matrices
        seq_len, num_heads, num_kv_heads = args[-3:]
        return seq_len, args[0].shape[1] // (num_heads + 2 * num_kv_heads), seq_len
    _, seq_len, _, head_dim = args[0].shape
    return (
        seq_len,
        head_dim,
        args[-2 if (file, entry) == ("attention", "attention_forward") else -1],
    )


def library_heads(file: str, entry: str, args: tuple) -> tuple[int, int, int] | None:
    """Parts of the heads, query heads, key/value heads of the library's backward; else None."""
    if (file, entry) != ("attention", "attention_backward"):
        return None
    parts, _, num_heads, num_kv_heads = args[-6:-2]
    return parts, num_heads, num_kv_heads


def _names(args: tuple) -> list[str]:
    """The formats of the tensors among these arguments, "-" for each that could be one."""
    return [
        x.dtype.name if isinstance(x, Tensor) else "-"
        for x in args
        if x is None or isinstance(x, Tensor)
    ]
