"""What launches are told apart by when their times are kept: the same on a plan and on a GPU."""

from __future__ import annotations

from typing import NamedTuple

from llmq.base.tensor import Tensor


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
    tensors = [x.dtype.name if isinstance(x, Tensor) else "-" for x in args if _points(x)]
    if entry.startswith("matmul"):
        m, n, k, *flags = [x for x in args if isinstance(x, int)]
        out, a = tensors[:2]
        more = []
        if entry == "matmul_adapted":  # takes about as long as the library's
            by_rows = int(args[2].shape[0] == n)
            entry, flags = ("matmul", [0, by_rows, 0]) if a == "bf16" else ("matmul_fp8", [0, 1])
            more = ["adapted"]
        words = [a, *map(str, reversed(flags)), out, *more]
        if entry == "matmul_fp8":  # whether sums are fast matters more than which 8-bit format
            words[:2] = words[1::-1]
        if file == "matmul" and tensors[-2] != "-":  # the last one is the workspace
            words.append("addend")
        return Kind("/".join([entry, *words]), (m, n, k))
    if file.startswith("attention") and flops:
        _, seq_len, _, head_dim = args[0].shape
        sizes = (flops, seq_len, head_dim, attention_window(file, entry, args))
        return Kind(f"{entry}/{file.partition('.')[2] or 'library'}/{tensors[0]}", sizes)
    return Kind(f"{entry}/{','.join(tensors)}", (device_bytes,))


def attention_window(file: str, entry: str, args: tuple) -> int:
    """How many keys a query sees, of the arguments of one of attention's kernels."""
    return args[-2 if (file, entry) == ("attention", "attention_forward") else -1]


def library_heads(file: str, entry: str, args: tuple) -> tuple[int, int, int] | None:
    """Parts of the heads, query heads, key/value heads of the library's backward; else None."""
    if (file, entry) != ("attention", "attention_backward"):
        return None
    parts, _, num_heads, num_kv_heads = args[-6:-2]
    return parts, num_heads, num_kv_heads


def _points(value: object) -> bool:
    """Whether an argument is a tensor, or could be."""
    return value is None or isinstance(value, Tensor)
