#!/usr/bin/env python3
"""The rates of cards from llm.q's published speeds: its own step is modelled, and fitted to them.

    PYTHONPATH=. tools/published_speeds.py > benchmarks/published.md

benchmarks/published.txt has the speeds. For each run on one GPU the launches of llm.q's step are
listed here, with its passes over memory: those of its state of 2025-12, of 2025-10 (RTX 5090, L40S)
and of 2026-05. They are replayed as a plan of ours is (`llmq.plan.cost`), with two numbers that are
not known: the shares of the bf16 and of the fp8 peak that matrix products reach. `_SUSTAINED` of
llmq/options/cards.py has those that make the errors' squares least. For each run the shares are
also fitted to all others, and predict it: the largest error is kept beside them.

The L2 cache gives what a launch reads soon after it was written or read: every byte that comes from
memory, or is written, takes the place of another one, of any age, so that exp(-D / size) of what
was touched D bytes ago is still there.

A GPU's neighbours are checked the same way: how far off a card's table is with the shares of
another one that is its like. This is the error of cards without a table.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import typer

from llmq.arch.model_config import ModelConfig
from llmq.base.dtypes import BF16, E4M3
from llmq.ops.attention import CUDNN_BACKWARD, CUDNN_FORWARD
from llmq.options.cards import Card, find_card
from llmq.options.presets import preset
from llmq.plan.cost import Rates
from llmq.plan.replay import replay
from llmq.runtime.cost import MOVES, Cost, Kind, attention_cost, product_cost
from llmq.runtime.device import Event
from llmq.runtime.kernel import Kernel
from llmq.runtime.plan_device import Mark, Trace, Work

TABLE = Path(__file__).parents[1] / "benchmarks" / "published.txt"
SEQ_LEN = 1024
NUMBERS = {
    "b": "batch-size",
    "a": "grad-accumulation",
    "lm": "lmhead-chunks",
    "ab": "attn-bwd-chunks",
}
SWITCHES = {
    "om": "offload-opt-m",
    "ov": "offload-opt-v",
    "oM": "offload-master",
    "oR": "offload-residual",
    "oQ": "offload-quants",
    "oG": "offload-gradients",
    "sW": "shard-weights",
    "sG": "shard-gradients",
    "pQ": "persistent-quants",
    "mAG": "memcpy-all-gather",
    "mSR": "memcpy-send-recv",
    "a2a": "all-to-all-reduce",
}
# MB of the L2 cache by the data sheets, and TB/s that it gives, as microbenchmarks have it.
CACHES = {
    "h100": (50, 5.5),
    "4090": (72, 5.0),
    "5090": (96, 7.0),
    "5060-ti": (32, 1.9),
    "pro-6000": (128, 7.0),
    "l40s": (96, 5.0),
}
# TFLOP/s of products on an H100 with cuBLASLt's first choice, which llm.q takes, in bf16 and fp8
# (`floors` of benchmarks/peers.json, less attention): it has worse ones for small models. Ours
# takes the fastest of several, and on the other cards no such difference is seen.
FIRST_CHOICE = {"0.5B": (676, 1198), "1.5B": (723, 1222), "3B": (723, 1318), "7B": (703, 1319)}
# A run that is predicted, but fits nothing: it is far slower than all others of its card, and it is
# not known why. In bf16 the same options are as fast as predicted, and so are as many tokens in fp8
# on an RTX PRO 6000 and an L40S.
ODD = {("5090", "0.5B", "e4m3", 32 * SEQ_LEN)}
LIKE = [("4090", "5090"), ("5090", "5060-ti"), ("4090", "5060-ti"), ("l40s", "pro-6000")]


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table. month: of the program."""

    card: str
    month: str
    gpus: int
    model: str
    dtype: str
    speed: float
    words: tuple[str, ...]

    def number(self, letters: str) -> int:
        """The number behind these letters, else 1."""
        found = [re.fullmatch(rf"{letters}(\d+)", word) for word in self.words]
        return next((int(match[1]) for match in found if match), 1)

    @property
    def micro_batch(self) -> int:
        """Tokens of it."""
        return self.number("b") * SEQ_LEN

    @property
    def fp8(self) -> bool:
        """Whether its blocks' products are in fp8."""
        return self.dtype == "e4m3"

    @property
    def fits(self) -> bool:
        """Whether it counts in a fit."""
        return (self.card, self.model, self.dtype, self.micro_batch) not in ODD

    def options(self) -> list[str]:
        """Its words as options of the command line."""
        return [spelled(word) for word in self.words]


def spelled(word: str) -> str:
    """A word of the table as an option."""
    if word in SWITCHES:
        return f"--{SWITCHES[word]}"
    if word.startswith("r-"):
        return f"--recompute-{word.removeprefix('r-')}"
    letters = word.rstrip("0123456789")
    return f"--{NUMBERS[letters]}={word.removeprefix(letters)}"


def rows() -> list[Row]:
    """The table."""
    found = []
    for line in TABLE.read_text().splitlines():
        if not line.startswith("#"):
            card, month, gpus, model, dtype, speed, *words = line.split()
            found.append(Row(card, month, int(gpus), model, dtype, float(speed), tuple(words)))
    return found


# ------------------------------------------------------------------------------------------------
# llm.q's step

Bytes = dict[str, float]
"""Bytes that a launch reads or writes, by the name of the buffer."""


class Launches:
    """A trace that grows, and what of it the L2 cache still has."""

    def __init__(self, card: Card, cache: tuple[float, float]):
        """cache: MB, and TB/s."""
        self.card, self.trace = card, Trace()
        self._size, self._cheaper = 1e6 * cache[0], card.bandwidth / (1e3 * cache[1])
        self._moved = 0.0  # bytes to and from memory until now
        self._touched: dict[str, float] = {}  # when a buffer was read or written last
        self._written: dict[str, float] = {}
        self._events: dict[str, Event] = {}

    def _cached(self, size: float, before: float | None) -> float:
        return 0.0 if before is None else size * math.exp((before - self._moved) / self._size)

    def launch(
        self,
        entry: str,
        reads: Bytes,
        writes: Bytes,
        cost: Cost = MOVES,
        part: str = "",
        **host: int,
    ) -> None:
        """A kernel of the main stream, or a copy there. host: bytes loaded and stored, as Work has
        them."""
        cached = sum(self._cached(size, self._touched.get(name)) for name, size in reads.items())
        cached += sum(self._cached(size, self._written.get(name)) for name, size in writes.items())
        start, moved = self._moved, sum(reads.values()) + sum(writes.values()) - cached
        self._touched |= dict.fromkeys([*reads, *writes], start)
        self._written |= dict.fromkeys(writes, start)
        self._moved += moved
        size = int(moved + cached * self._cheaper)
        kind = cost.kind or Kind.moving(entry, size)
        file = "" if entry == "copy" else "x.cu"
        self.trace.append(Work("main", part, file, entry, kind, cost, size, **host))

    def copy(self, stream: str, size: int, *, after: str, then: str) -> None:
        """A copy to the card ("copy") or from it ("store"), after one event and before another."""
        self.mark(stream, after, wait=True)
        moved = {"loaded" if stream == "copy" else "stored": size}
        kind = Kind.moving("copy", size)
        self.trace.append(Work(stream, "", "", "copy", kind, MOVES, size, **moved))
        self.mark(stream, then)

    def mark(self, stream: str, name: str, wait: bool = False) -> None:
        """An event is recorded or waited for."""
        event = self._events.setdefault(name, Event())
        self.trace.append(Mark(stream, event, wait))


class Step:
    """llm.q's step of a row. Sizes are named as in the model's configuration; nc is the residual
    stream in bytes."""

    def __init__(self, row: Row, card: Card):
        self.row, self.words, self.fp8 = row, set(row.words), row.fp8
        self.old = row.month < "2025-12"
        model: ModelConfig = preset(f"Qwen2.5-{row.model}")
        self.model, self.L, self.V = model, model.num_layers, model.vocab_size
        self.C, self.F = model.hidden_size, model.intermediate_size
        self.Q = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
        self.N = row.micro_batch
        self.nc = 2 * self.N * self.C
        self.block = self.C * (self.Q + self.C + 3 * self.F)  # matrices' elements
        self.on = Launches(card, CACHES[row.card])
        again = {word[2:] for word in row.words if word.startswith("r-")}
        again |= {"block": {"att", "ffn", "norm"}}.get("block" in again and "block", set())
        again |= {"qkv"} if "att" in again else set()
        again |= {"swiglu"} if "ffn" in again else set()
        self.again = again
        self._in_slot = [-1, -1]  # the block that each of two buffers has

    # -- pieces

    def product(
        self, out: str, a: str, b: str, sizes: tuple[int, int, int], *,
        fp8: bool, added: bool = False, part: str = "",
    ) -> None:  # fmt: skip
        """out (M, N) = a (M, K) @ b (N, K)."""
        M, N, K = sizes
        dtype = E4M3 if fp8 else BF16
        reads = {a: M * K * dtype.itemsize, b: N * K * dtype.itemsize}
        cost = product_cost(sizes, dtype, BF16, accumulate=added)
        if self.row.card == "h100":
            slower = (
                FIRST_CHOICE["7B"][fp8] / FIRST_CHOICE.get(self.row.model, FIRST_CHOICE["7B"])[fp8]
            )
            cost = replace(cost, flops=int(cost.flops * slower))
        reads |= {out: M * N * 2} if added else {}
        self.on.launch("matmul", reads, {out: M * N * 2}, cost, part)

    def moves(self, entry: str, reads: Bytes, writes: Bytes, **host: int) -> None:
        self.on.launch(entry, reads, writes, **host)

    def buffer(self, name: str, layer: int) -> str:
        """The buffer of an activation: one for each layer, or one that all share."""
        shared = {
            "ln1": self.fp8 or self.again & {"norm", "att"},
            "ln2": self.fp8 or self.again & {"norm", "ffn"},
            "qkv": "qkv" in self.again,
            "att": "att" in self.again,
            "res_att": "block" in self.again,
            "up": "ffn" in self.again,
            "swiglu": self.fp8 or "swiglu" in self.again,
            "ln1.q": "norm" in self.again,
            "ln2.q": "norm" in self.again,
            "att.q": True,
            "swiglu.q": "swiglu" in self.again,
        }[name]
        return ("stream" if name == "ln2" else name) if shared else f"{name}.{layer}"

    def residual(self, layer: int) -> str:
        if layer < 0:
            return "encoded"
        return f"res.{layer % 2}" if "oR" in self.words else f"res.{layer}"

    # -- linear layers

    def linear(
        self, out: str, inp: str, weight: str, layer: int, width: tuple[int, int], *,
        codes: bool = True, repeated: bool = False,
    ) -> None:  # fmt: skip
        """width: of the input, and of the output. codes: whether they have to be made. repeated:
        whether it is recomputed, for which the old program looks for the largest value anew."""
        (c_in, c_out), source = width, self.buffer(inp, layer)
        if self.fp8:
            if repeated and self.old:
                self.moves("abs_max", {source: 2 * self.N * c_in}, {})
            if codes:
                writes = {self.buffer(f"{inp}.q", layer): self.N * c_in}
                self.moves("quantize", {source: 2 * self.N * c_in}, writes)
            source = self.buffer(f"{inp}.q", layer)
        self.product(out, source, f"{weight}.{layer}", (self.N, c_out, c_in), fp8=self.fp8)

    def linear_backward(
        self, d_inp: str, d_out: str, inp: str, weight: str, layer: int, width: tuple[int, int], *,
        from_bf16: bool, largest: bool = False,
    ) -> None:  # fmt: skip
        """from_bf16: whether the input's transposed codes are made of its values. largest: whether
        the old program has to look for the gradient's largest value."""
        (c_in, c_out), N, of = width, self.N, f"{weight}.{layer}"
        added = "sG" not in self.words
        grad = f"grad.{of}" if added else f"grad.{weight}.{layer % 2}"
        if not self.fp8:
            self.product(d_inp, d_out, of, (N, c_in, c_out), fp8=False)
            sizes = (c_out, c_in, N)
            self.product(grad, self.buffer(inp, layer), d_out, sizes, fp8=False, added=added)
            return
        if largest and self.old:
            self.moves("abs_max", {d_out: 2 * N * c_out}, {})
        self.moves("quantize", {d_out: 2 * N * c_out}, {"d_out.q": N * c_out})
        self.moves("transpose", {of: c_in * c_out}, {"weight.t": c_in * c_out})
        self.product(d_inp, "d_out.q", "weight.t", (N, c_in, c_out), fp8=True)
        source = inp if from_bf16 else f"{inp}.q"
        size = N * c_in * (2 if from_bf16 else 1)
        self.moves("transpose", {self.buffer(source, layer): size}, {"inp.t": N * c_in})
        self.moves("transpose", {"d_out.q": N * c_out}, {"d_out.t": N * c_out})
        self.product(grad, "inp.t", "d_out.t", (c_out, c_in, N), fp8=True, added=added)

    # -- parts of a block

    def norm(
        self, layer: int, name: str, *, added: str = "", out: str = "", rows: str = ""
    ) -> None:
        """rows: what it normalizes; or the sum of it and `added`, which it writes to `out`."""
        writes = {self.buffer(name, layer): self.nc} | ({out: self.nc} if out else {})
        self.moves("norm", {rows: self.nc} | ({added: self.nc} if added else {}), writes)

    def norm_backward(self, of: str, out: str = "d_res") -> None:
        self.moves(
            "norm_backward", {"d_stream": self.nc, of: self.nc, "d_res": self.nc}, {out: self.nc}
        )

    def rope(self, qkv: str, backward: bool) -> None:
        model, whole = self.model, 2 * self.N * self.Q
        turned = 2 * self.N * (model.num_heads + model.num_kv_heads) * model.head_dim
        if self.old:  # not in place
            self.moves("rope", {qkv: whole}, {f"turned.{qkv}": whole})
        else:  # backward it looks for the largest value, too
            self.moves("rope", {qkv: whole if backward else turned}, {qkv: turned})

    def attention(self, kernel: Kernel, reads: Bytes, writes: Bytes, parts: int = 1) -> None:
        model = self.model
        times = 2 if kernel is CUDNN_FORWARD else 5
        flops = times * self.N * SEQ_LEN * model.num_heads * model.head_dim // parts
        cost = attention_cost(kernel, BF16, flops, (SEQ_LEN, model.head_dim, SEQ_LEN))
        for _ in range(parts):
            split = [{name: size / parts for name, size in of.items()} for of in (reads, writes)]
            self.on.launch(kernel.entry, *split, cost)

    def attend(self, layer: int) -> None:
        reads = {self.buffer("qkv", layer): 2 * self.N * self.Q}
        self.attention(CUDNN_FORWARD, reads, {self.buffer("att", layer): self.nc})

    def swiglu(self, layer: int, out: str, bytes_each: int) -> None:
        reads = {self.buffer("up", layer): 4 * self.N * self.F}
        self.moves("swiglu", reads, {self.buffer(out, layer): bytes_each * self.N * self.F})

    # -- what comes from host memory

    def gather(self, layer: int) -> None:
        """A block's work weights, one block ahead, where they are not all on the card."""
        if "sW" not in self.words or self._in_slot[layer % 2] == layer or not 0 <= layer < self.L:
            return
        self._in_slot[layer % 2] = layer
        size = (1 if self.fp8 else 2) * self.block
        if "pQ" not in self.words and (self.fp8 or self.old):
            # Made of the masters by the main stream; the old program copied bf16 there, too.
            away = {"loaded": 2 * self.block} if "oM" in self.words else {}
            reads = {} if away else {f"master.{layer}": 2 * self.block}
            entry = "quantize" if self.fp8 else "copy"
            self.moves(entry, reads, {f"work.{layer % 2}": size}, **away)
        elif ("oQ" if self.fp8 else "oM") in self.words:
            self.on.copy("copy", size, after=f"free.{layer % 2}", then=f"have.{layer}")

    def fetch_residual(self, layer: int) -> None:
        if "oR" in self.words and layer >= 0:
            self.on.copy("copy", self.nc, after=f"res.{layer % 2}", then=f"fetched.{layer}")

    def put_residual(self, layer: int) -> None:
        if "oR" in self.words:
            self.on.mark("main", f"ready.{layer}")
            self.on.copy("store", self.nc, after=f"ready.{layer}", then=f"put.{layer}")

    def gather_head(self) -> None:
        """Where embedding and head are two, they share a buffer; only the head is waited for."""
        if {"sW", "oM"} <= self.words and not self.model.tied_embeddings:
            self.on.mark("main", "before head")
            self.on.copy("copy", 2 * self.V * self.C, after="before head", then="head")
            self.on.mark("main", "head", wait=True)

    def add_gradients(self, layer: int) -> None:
        """Where they are divided, a kernel adds those of the block two before to their sums."""
        if "sG" in self.words and 0 <= layer < self.L:
            size = 2 * self.block
            away = {"loaded": size, "stored": size} if "oG" in self.words else {}
            sums = {} if away else {f"sums.{layer}": size}
            self.moves("add", {f"grads.{layer % 2}": size} | sums, sums, **away)

    # -- passes

    def forward(self) -> None:
        C, F, Q, on = self.C, self.F, self.Q, self.on
        self.moves("embedding", {"embedding": self.nc}, {"encoded": self.nc})
        self.gather(0)
        for layer in range(self.L):
            self.gather(layer + 1)
            on.mark("main", f"have.{layer}", wait=True)
            self.end_of_block(layer - 1, "ln1", layer)
            self.linear(self.buffer("qkv", layer), "ln1", "qkv_w", layer, (C, Q))
            self.rope(self.buffer("qkv", layer), backward=False)
            self.attend(layer)
            if self.fp8:
                self.moves("abs_max", {self.buffer("att", layer): self.nc}, {})
            self.linear("stream", "att", "out_w", layer, (C, C))
            out = self.buffer("res_att", layer)
            self.norm(layer, "ln2", rows=self.residual(layer - 1), added="stream", out=out)
            self.linear(self.buffer("up", layer), "ln2", "up_w", layer, (C, 2 * F))
            self.swiglu(layer, "swiglu", 2)
            self.linear("stream", "swiglu", "down_w", layer, (F, C))
            on.mark("main", f"free.{layer % 2}")
        self.end_of_block(self.L - 1, "ln2", self.L - 1)

    def end_of_block(self, layer: int, name: str, of: int) -> None:
        """The residual sum and the next block's norm, in one kernel."""
        if layer < 0:
            self.norm(of, name, rows="encoded")
            return
        out = self.residual(layer)
        self.norm(of, name, rows=self.buffer("res_att", layer), added="stream", out=out)
        self.put_residual(layer)

    def head(self) -> None:
        chunks, C, V, sms = self.row.number("lm"), self.C, self.V, self.on.card.num_sms
        n = self.N // chunks
        logits = 2 * n * V
        self.moves("zero", {}, {"d_stream": self.nc})
        self.moves("zero", {}, {"d_res": self.nc})
        self.gather_head()
        for _ in range(chunks):
            self.product("logits", "stream", "head_w", (n, V, C), fp8=False, part="head")
            reads = {"logits": logits}
            if self.row.card != "h100" or self.row.month < "2026":
                # Each row twice; a block has a row, and a multiprocessor a block.
                share = math.exp(-min(2 * sms * V, logits) / (1e6 * CACHES[self.row.card][0]))
                reads |= {"again": logits * (1 - share)}
            self.moves("classifier", reads, {"logits": logits})
            how = {"fp8": False, "part": "head"}
            self.product("grad.head", "stream", "logits", (V, C, n), added=True, **how)
            self.product("d_stream", "logits", "head_w", (n, C, V), **how)

    def recompute(self, layer: int) -> None:
        C, F, Q, again = self.C, self.F, self.Q, self.again
        ln1, whole = bool(again & {"norm", "att"}), "block" in again
        if ln1:
            self.norm(layer, "ln1", rows=self.residual(layer - 1))
        if "qkv" in again:
            repeated = {"codes": ln1, "repeated": True}
            self.linear(self.buffer("qkv", layer), "ln1", "qkv_w", layer, (C, Q), **repeated)
            self.rope(self.buffer("qkv", layer), backward=False)
        if "att" in again:
            self.attend(layer)
        if whole:
            self.linear("stream", "att", "out_w", layer, (C, C))
            out = self.buffer("res_att", layer)
            self.norm(layer, "ln2", rows=self.residual(layer - 1), added="stream", out=out)
        elif again & {"norm", "ffn"}:
            self.norm(layer, "ln2", rows=self.buffer("res_att", layer))
        if "ffn" in again:
            self.linear(self.buffer("up", layer), "ln2", "up_w", layer, (C, 2 * F), repeated=True)
        if "swiglu" in again:
            self.swiglu(layer, "swiglu.q" if self.fp8 else "swiglu", 1 if self.fp8 else 2)

    def backward(self) -> None:
        on, last = self.on, self.L - 1
        self.head()
        self.norm_backward(self.residual(last))
        on.mark("main", f"res.{last % 2}")
        self.fetch_residual(last - 1)
        self.gather(last)
        for layer in range(last, -1, -1):
            self.add_gradients(layer + 2)
            self.fetch_residual(layer - 2)
            self.gather(layer - 1)
            on.mark("main", f"have.{layer}", wait=True)
            on.mark("main", f"fetched.{layer - 1}", wait=True)
            self.recompute(layer)
            self.block_backward(layer)
            on.mark("main", f"res.{(layer - 1) % 2}")
            on.mark("main", f"free.{layer % 2}")
        self.add_gradients(1)
        self.add_gradients(0)
        rows = {"d_embedding": self.nc}
        self.moves("embedding_backward", {"d_encoded": self.nc} | rows, rows)

    def block_backward(self, layer: int) -> None:
        C, F, Q, N = self.C, self.F, self.Q, self.N
        norm, ln1 = "norm" in self.again, bool(self.again & {"norm", "att"})
        up, whole = self.buffer("up", layer), {"from_bf16": False, "largest": True}
        self.linear_backward("d_swiglu", "d_res", "swiglu", "down_w", layer, (F, C), **whole)
        self.moves("swiglu_backward", {"d_swiglu": 2 * N * F, up: 4 * N * F}, {up: 4 * N * F})
        self.linear_backward("d_stream", up, "ln2", "up_w", layer, (C, 2 * F), from_bf16=norm)
        self.norm_backward(self.buffer("res_att", layer))
        whole["from_bf16"] = True
        self.linear_backward("d_stream", "d_res", "att", "out_w", layer, (C, C), **whole)
        reads = {self.buffer("qkv", layer): 2 * N * Q, self.buffer("att", layer): self.nc}
        reads |= {"d_stream": self.nc}
        self.attention(CUDNN_BACKWARD, reads, {"d_qkv": 2 * N * Q}, self.row.number("ab"))
        self.rope("d_qkv", backward=True)
        whole["from_bf16"] = ln1
        self.linear_backward("d_stream", "d_qkv", "ln1", "qkv_w", layer, (C, Q), **whole)
        of = ("d_out.q", N * Q) if self.fp8 else ("d_qkv", 2 * N * Q)
        self.moves("bias", dict([of]), {})
        self.norm_backward(self.residual(layer - 1), "d_res" if layer else "d_encoded")

    def micro_step(self) -> Trace:
        """One in the middle of a step: the second, with what the first leaves in the cache."""
        for _ in range(2):
            self.on.trace = Trace()
            self.forward()
            self.backward()
        return self.on.trace

    def update(self) -> Trace:
        """The norm of the gradients, and AdamW by blocks, whose state comes one block ahead."""
        self.on.trace = Trace()
        words, P = self.words, self.block
        tables = (1 if self.model.tied_embeddings else 2) * self.V * self.C
        oG = {"loaded": 2 * P} if "oG" in words else {}
        away = sum(2 for word in ("om", "ov") if word in words)
        apart = "oM" in words and (self.fp8 or "sW" in words)  # masters are no work weights
        tables_away = away + (2 if apart and "sW" in words else 0)
        away += 2 if apart else 0
        host = {"loaded": tables_away * tables, "stored": tables_away * tables}
        reads = {"gradients": 2 * tables, "tables": (6 - tables_away) * tables}
        self.moves("norm_of_gradients", {"gradients": 2 * tables}, {})
        self.moves("adamw", reads, {"tables": (6 - tables_away) * tables}, **host)
        for layer in range(self.L):
            reads = {} if oG else {f"gradients.{layer}": 2 * P}
            self.moves("norm_of_gradients", reads, {}, **oG)
        for layer in range(self.L):
            if away:
                self.on.copy("copy", away * P, after=f"updated.{layer % 2}", then=f"state.{layer}")
                self.on.mark("main", f"state.{layer}", wait=True)
            reads = {} if oG else {f"gradients.{layer}": 2 * P}
            state = {f"state.{layer}": 6 * P}
            self.moves("adamw", reads | state, state, **oG)
            if self.fp8 and (apart or "sW" not in words or "pQ" in words):
                stored = {"stored": P} if "oQ" in words else {}
                writes = {} if stored else {f"work.{layer}": P}
                self.moves("quantize", {f"state.{layer}": 2 * P}, writes, **stored)
            if away:
                self.on.mark("main", f"done.{layer}")
                self.on.copy("store", away * P, after=f"done.{layer}", then=f"updated.{layer % 2}")
        return self.on.trace


# ------------------------------------------------------------------------------------------------
# Fits


class Model:
    """The modelled step of a row, at any shares of the peaks."""

    def __init__(self, row: Row):
        self.row = row
        self.card = find_card(row.card.replace("-", " "))
        step = Step(row, self.card)
        self.traces = ((step.micro_step(), row.number("a")), (step.update(), 1))

    def speed(self, shares: tuple[float, float]) -> float:
        """Tokens per second."""
        rates = Rates(replace(self.card, sustained=shares, measured=None))
        seconds = sum(count * replay(trace, rates).wall for trace, count in self.traces)
        return self.row.micro_batch * self.row.number("a") / seconds

    def error(self, shares: tuple[float, float]) -> float:
        """The logarithm of what is predicted over what is published."""
        return math.log(self.speed(shares) / self.row.speed)


class Fit(NamedTuple):
    """shares: of the peaks of bf16 and fp8. left_out: how far off each row is, in percent, with the
    shares of all others."""

    shares: tuple[float, float]
    left_out: dict[Row, float]

    @property
    def worst(self) -> float:
        """Percent by which a row that counts is off, at most."""
        return max(abs(error) for row, error in self.left_out.items() if row.fits)


NUDGE = 0.02  # by which shares are changed, to see what that changes


def fit(models: list[Model], shares: tuple[float, float], rounds: int = 3) -> Fit:
    """Least squares of errors, around these shares, by Gauss and Newton."""
    counted = np.array([model.row.fits for model in models])

    def step(rows: np.ndarray) -> np.ndarray:
        return np.linalg.lstsq(slopes[rows], -now[rows], rcond=None)[0]

    for _ in range(rounds):
        now = np.array([model.error(shares) for model in models])
        nudged = [tuple(s * (1 + NUDGE * (i == k)) for i, s in enumerate(shares)) for k in (0, 1)]
        changes = [[model.error(other) for model in models] - now for other in nudged]
        slopes = np.array(changes).T / math.log(1 + NUDGE)
        shares = tuple(map(float, shares * np.exp(step(counted))))
    left_out = {}
    for place, model in enumerate(models):
        others = counted & (np.arange(len(models)) != place)
        error = now[place] + slopes[place] @ step(others)
        left_out[model.row] = 100 * math.expm1(error)
    return Fit(shares, left_out)


def fits() -> dict[tuple[str, str], tuple[list[Model], Fit]]:
    """The fit of each table, which is of a card and of the month of a program."""
    of_one = [Model(row) for row in rows() if row.gpus == 1]
    tables: dict[tuple[str, str], list[Model]] = {}
    for model in of_one:
        tables.setdefault((model.row.card, model.row.month), []).append(model)
    return {key: (found, fit(found, found[0].card.sustained)) for key, found in tables.items()}


def main() -> None:
    """Print the fits of all tables."""
    found = fits()
    print("`tools/published_speeds.py`: llm.q's speeds by its step, modelled, and fitted rates\n")
    print("| card | program | bf16 | fp8 | left out, off at most |")
    print("| --- | --- | --- | --- | --- |")
    for (_, month), (models, fitted) in found.items():
        bf16, fp8 = fitted.shares
        name = models[0].card.name
        print(f"| {name} | {month} | {bf16:.3f} | {fp8:.3f} | {fitted.worst:.1f} % |")
    print("\n| table of | by the shares of | off at most |\n| --- | --- | --- |")
    by_card = {card: both for (card, _), both in found.items()}
    for of, by in [*LIKE, *(pair[::-1] for pair in LIKE)]:
        shares = by_card[by][1].shares
        errors = [model.error(shares) for model in by_card[of][0] if model.row.fits]
        print(f"| {of} | {by} | {100 * math.expm1(max(errors, key=abs)):+.1f} % |")
    print("\n| card | program | model | format | options | tokens/s | by the others |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for _, fitted in found.values():
        for row, error in fitted.left_out.items():
            what = [row.card, row.month, row.model, row.dtype, " ".join(row.words)]
            note = "" if row.fits else ", not fitted"
            print(f"| {' | '.join(what)} | {row.speed:,.0f} | {error:+.1f} %{note} |")


if __name__ == "__main__":
    typer.run(main)
