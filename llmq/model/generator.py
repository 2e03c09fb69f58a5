"""Generation with a paged key-value cache and continuous batching, from the weights of a `Step` or
of a model alone.

    prompts -> blocks of keys and values, states       prefill: some texts, many tokens
    last token -> next token, for each text            decode: all texts, one token each

Texts enter and leave the batch between two passes. A `Cache` holds keys and values in blocks of
BLOCK tokens, and a row of states for each text (`HalfSpec.cached`, `HalfSpec.carried`). Texts with
the same prompt share the prompt's full blocks. A text takes a block when its next token needs one.
Without a free block the newest text gives its blocks back, waits, and is prefilled again later.

If no text enters and no block is missing, the host enqueues the next pass before it reads the last
pass's tokens: tokens go from pass to pass on the device. For a text that ends with one of its
`stop` ids, the device then computes one more token, which is dropped. Results are the same bits.

A product may round a row differently in a pass with another number of rows. With `exact`, a text's
bits do not depend on its neighbours. Then all decode passes of a GPU have the same number of rows,
a pass over a prompt has one prompt, and a text enters only if all its blocks are free, so that no
text is prefilled twice.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from math import isfinite
from typing import NamedTuple

import numpy as np

from llmq.arch.model_config import ModelConfig
from llmq.base.dtypes import I32, DType
from llmq.base.errors import NOT_FINITE, ConfigError, LlmqError
from llmq.base.step_inputs import StepInputs
from llmq.base.tensor import Tensor
from llmq.formats import OPERANDS
from llmq.formats.operands import Operands
from llmq.model.activations import BLOCK, Cache, CacheOfPass, Rings
from llmq.model.halves.attention import rope_tables
from llmq.model.inference import scoring_options
from llmq.model.model import Model
from llmq.model.passes import REQUEST_FIELDS, Chosen, Pass, PassInputs
from llmq.model.texts import Completion, FreeBlocks, NewToken, Prompt, Request, Text
from llmq.options.options import StepOptions
from llmq.runtime.arena import ALIGN, align_up
from llmq.runtime.device import Device
from llmq.state.weights import Weights

PIECE = 1024  # most tokens of prompts in one pass
SHORTEST_PIECE = 256  # least tokens of a pass over prompts with rings, unless `piece` is smaller
STEP = 64  # most keys that an attention kernel reads at a time
PROMPTS = 4  # most prompts that are computed together with rings
CODED_ROWS = 4  # least tokens in one pass if products multiply codes


class _Flight(NamedTuple):
    """A pass whose chosen tokens the host has not read. slots: the slots of `texts` in this pass.
    turn: see Chosen."""

    texts: list[Text]
    slots: list[int]
    turn: int


class Generator:
    """Continues at most `slots` texts at a time, of at most `positions` tokens each, prompts
    included. A block holds keys and values of BLOCK tokens. The constructor allocates all
    memory."""

    def __init__(
        self,
        dev: Device,
        config: ModelConfig,
        weights: Weights,
        *,
        slots: int,
        positions: int,
        blocks: int,
        piece: int = PIECE,
        kv_dtype: DType | None = None,
        rings: bool = False,
        exact: bool = False,
        options: StepOptions | None = None,
        scalars: Tensor | None = None,
    ):
        """weights: a `Step`'s, with the step's options and StepScalars; or placement.resident's.
        blocks: number of blocks, at least blocks_of(positions) + 1. piece: most tokens of prompts
        in one pass. kv_dtype: format of keys and values, E4M3 or the model's. rings: True: layers
        with a window keep only tokens that later tokens see, if this takes less memory. exact:
        True: a text's bits do not depend on its neighbours; ConfigError if that cannot be had."""
        self.dev, self.config, self.weights = dev, config, weights
        constants, shards = len(dev.constants), dev.mesh.size("shard")
        self.positions, self.num_blocks = positions, blocks
        dtype = weights.placement["embed"].work.dtype
        alone = scoring_options(config, dtype, 1, 4).for_step
        self._options = alone if options is None else _of_generation(options, alone)
        self._exact, rows = exact, self._least_rows(exact=exact)
        self.slots = slots = max(slots, rows)
        self._scalars = scalars
        self._carries = any(
            spec.carried for layer in range(config.num_layers) for spec in config.halves(layer)
        )
        # Filler tokens would change a prompt's state. So its passes have exactly its tokens, and
        # idle texts beside it if the rows are too few.
        beside = rows if self._carries else 1
        self._rings, piece = self._rings_of(piece) if rings else (None, piece)
        self._cache = Cache(dev, config, kv_dtype or dtype, blocks, slots + beside, self._rings)
        self._tables = rope_tables(dev, config, positions)
        self._seen = dev.alloc("seen", (slots, -(-config.outputs // 32)), I32, "Activations")
        self._inputs = self._inputs_of_texts()
        self._chosen = Chosen(dev, slots)
        self._decodes = {B: self._pass(self._inputs, B, 1, 0) for B in self._decode_sizes(rows)}
        self._prefills = self._prompt_passes(min(piece, positions), piece, beside, rows)
        streams = any(slab.work.streamed for slab in weights.placement.slabs.values())
        words = (shards, ALIGN // 4)
        gathers = streams and shards > 1
        self._busy = dev.alloc("busy", words, I32, "Activations") if gathers else None
        self._shares = shards > 1
        smallest = next(iter(self._decodes.values()))
        self._idle_pass = ("decode", smallest, self._decoding(smallest))
        self.constants = dev.constants[constants:]
        self._free = FreeBlocks(blocks)
        self._prompts: dict[tuple[int, ...], Prompt] = {}
        self._waiting: deque[Text] = deque()
        self._running: list[Text] = []
        self._count = 0  # number of requests so far
        self._flight: _Flight | None = None
        # Several ranks agree on each pass, and the CPU computes a pass at once.
        self.goes_ahead = self._busy is None and dev.spec.capability > 0

    def _least_rows(self, *, exact: bool) -> int:
        """Return the least number of tokens in a pass. ConfigError if `exact` cannot be had."""
        if OPERANDS[self._options.precision.matmul_dtype] is Operands:
            return 1
        if exact:
            raise ConfigError("--exact: excludes fp8 and int8 products: texts share their scales")
        return CODED_ROWS

    def _decode_sizes(self, least: int) -> list[int]:
        """Return the numbers of rows of decode passes, each at least `least`."""
        if self._exact and self.dev.spec.capability > 0:
            return [self.slots]
        return [B for B in _powers(self.slots) if least <= B]

    def _rings_of(self, piece: int) -> tuple[Rings | None, int]:
        """Rings of layers with a window (None unless they take less memory than blocks), and the
        most tokens of prompts in one pass. The first key that a pass reads is a multiple of
        STEP."""
        windows = {n: self.config.window_of(n) for n in range(self.config.num_layers)}
        seen = max((window for window in windows.values() if window), default=self.positions)
        shorter = min(piece, max(SHORTEST_PIECE, seen // 2))
        length = self.blocks_of(seen + shorter + STEP) + 1
        texts = self.slots + (1 if self._carries else min(PROMPTS, self.slots))
        if texts * length >= self.num_blocks:
            return None, piece
        layers = frozenset(layer for layer, window in windows.items() if window)
        return Rings(texts, length, layers), shorter

    def _inputs_of_texts(self) -> PassInputs:
        """The inputs of the passes that compute one token of each text."""
        room, how = self.blocks_of(self.positions), {"ahead": True, "rings": bool(self._rings)}
        inputs = PassInputs(self.dev, self.slots, 1, room, REQUEST_FIELDS, **how)
        if self._rings is not None:
            self._ring_table = self._rings.table(room)
            inputs.arrays["window_table"][:] = self._ring_table[: self.slots]
        return inputs

    def _prompt_passes(self, longest: int, piece: int, beside: int, least: int) -> list[Pass]:
        """The passes over prompts, with at least `least` rows each: passes over `beside` texts with
        up to `longest` tokens, and passes over more texts with `piece` tokens together."""
        shapes = [(beside, T) for T in _powers(longest, 1 if self._carries else 2)]
        if not self._carries and not self._exact:
            shapes += [
                (B, min(piece // B, longest)) for B in _powers(min(self.slots, piece), 2)[1:]
            ]
        room, ringed = self.blocks_of(self.positions), self._rings is not None
        return [
            self._pass(PassInputs(self.dev, B, T, room, {}, rings=ringed), B, T, self.slots)
            for B, T in shapes
            if least <= B * T
        ]

    @staticmethod
    def blocks_of(tokens: int) -> int:
        """Number of blocks that hold this number of tokens of a text."""
        return -(-tokens // BLOCK)

    @property
    def block_bytes(self) -> int:
        """Bytes that one more block takes at most."""
        tensors = [t for half in self._cache.blocks.values() for t in half.values()]
        return sum(align_up(tensor.nbytes // self.num_blocks) for tensor in tensors)

    def _pass(self, inputs: PassInputs, B: int, T: int, first_state: int) -> Pass:
        """A Pass over B texts with T tokens each. first_state: the first text's row of states."""
        batch = replace(self._options.batch, batch_size=B, seq_len=T, context_parallel=1)
        memory = replace(self._options.memory, lmhead_chunks=1)
        rows = inputs.rows(B)
        of_pass = (rows["table"], rows["lengths"], rows["new"])
        tokens = rows["tokens"] if "tokens" in rows else self._chosen.tokens.rows(0, B).view(B, 1)
        states = (first_state, first_state + B)
        tables = (self._tables, rows.get("window_table"))
        cache = CacheOfPass(self._cache, *of_pass, states, *tables)
        model = Model(
            self.dev,
            self.config,
            self._options._replace(batch=batch, memory=memory),
            self.weights,
            "native",
            StepInputs(tokens, first_key=rows["first_key"]),
            scalars=self._scalars,
            cache=cache,
        )
        return Pass(inputs, model, self._cache, B, T)

    def _decoding(self, each: Pass) -> Callable[[bool], None]:
        return partial(
            each.decode, chosen=self._chosen, seen=self._seen, outputs=self.config.outputs
        )

    def rehearse(self) -> None:
        """Run each kind of pass once, on a device that only plans, or to load kernels and capture
        graphs. Ranks exchange nothing but weights."""
        self._chosen.put((), ())
        passes = [("prefill", each, each.forward) for each in self._prefills]
        passes += [("decode", each, self._decoding(each)) for each in self._decodes.values()]
        for kind, each, fn in passes:
            self._enqueue(kind, each, fn, stale=False)
        if self._shares:
            self._enqueue(*self._idle_pass, stale=True)

    # -- passes ----------------------------------------------------------------------------------

    def _run(self, kind: str, each: Pass, fn: Callable[[bool], None], *, busy: bool = True) -> bool:
        """Enqueue a pass; return False if no rank wants one. If weights are gathered in each pass,
        all ranks enqueue the pass together. busy: True if this rank wants the pass."""
        if not self._any_busy(busy):
            return False
        self._enqueue(kind, each, fn, stale=self.weights.take_stale())
        return True

    def _enqueue(self, kind: str, each: Pass, fn: Callable[[bool], None], *, stale: bool) -> None:
        each.inputs.upload()
        with self.dev.rows_apart() if self._exact else nullcontext():
            self.dev.replay((kind, each.texts, each.tokens, stale), partial(fn, stale))

    def _any_busy(self, busy: bool) -> bool:
        if self._busy is None:
            return busy
        shards, words = self._busy.shape
        own = self._busy.rows(index := self.dev.mesh.index("shard"), index + 1).view(words)
        self.dev.upload(own, np.full(words, busy, np.int32))
        self.dev.mesh.group("shard").all_gather(self._busy.view(shards * words), own)
        return self.dev.kind == "plan" or bool(self.dev.download(self._busy).any())

    def _idle(self, *, busy: bool) -> bool:
        """Enqueue a pass over no text, for ranks that gather weights."""
        kind, each, fn = self._idle_pass
        each.inputs.arrays["new"][:] = 0
        return self._run(kind, each, fn, busy=busy)

    # -- requests --------------------------------------------------------------------------------

    def run(
        self, requests: Sequence[Request], stopped: Callable[[], bool] = lambda: False
    ) -> Iterator[tuple[int, Completion]]:
        """Yield each request's index and Completion when it ends. stopped: as for `stream`."""
        found: dict[int, list[NewToken]] = {}
        for token in self.stream(requests, stopped):
            found.setdefault(token.index, []).append(token)
            if token.finish is not None:
                tokens = found.pop(token.index)
                logprobs = np.array([each.logprob for each in tokens], np.float32)
                yield token.index, Completion([t.id for t in tokens], logprobs, token.finish)

    def stream(
        self, requests: Sequence[Request], stopped: Callable[[], bool] = lambda: False
    ) -> Iterator[NewToken]:
        """Yield the requests' tokens as they are chosen; waits for the device before each.
        Neighbouring requests with one prompt share memory. All ranks call this method, each with
        its own requests. stopped: called before each pass; True ends all texts. ValueError for a
        request that does not fit; LlmqError if a prediction is not a number."""
        first = self._count
        self._chosen.put((), ())
        try:
            for request in requests:
                self.add(request)
            if self._shares:
                self._idle(busy=True)  # gathers the weights that an update has left, on all ranks
            while (self._waiting or self._running) and not stopped():
                for token in self.step():
                    yield token._replace(index=token.index - first)
        finally:
            self._forget()
            for text in (*self._running, *self._waiting):
                self.drop(text.index)
            self._drop_prompts()
            while self._busy is not None and self._idle(busy=False):
                pass  # other ranks go on, also after an error

    def add(self, request: Request) -> int:
        """Let a request wait for the next `step` that has room; returns the index of its tokens.
        ValueError for a request that does not fit."""
        if not 0 < len(request.prompt) < self.positions:
            raise ValueError(
                f"generate: a prompt has {len(request.prompt)} tokens; there have to be from 1 to "
                f"{self.positions - 1}"
            )
        index, self._count = self._count, self._count + 1
        self._waiting.append(Text(index, request, list(request.prompt)))
        return index

    def drop(self, index: int) -> None:
        """Give up a request that has not ended."""
        for text in (*self._running, *self._waiting):
            if text.index == index:
                (self._running if text.slot >= 0 else self._waiting).remove(text)
                self._leave(text)

    def step(self) -> list[NewToken]:
        """Let waiting requests begin if there is room, and choose a token of each running text;
        waits for the device. LlmqError if a prediction is not a number."""
        if self._flight is None:
            self._admit()
            self._extend()
            if not self._running:
                return []
            self._flight = self._start(self._running)
        flight, self._flight = self._flight, None
        following = self._following(flight)
        if following:
            self._flight = self._start(following, ahead=1)
        return self._read(flight)

    def _forget(self) -> None:
        """Wait for the pass in flight, and drop its tokens."""
        if self._flight is not None:
            self._chosen.read(self._flight.turn)
            self._flight = None

    def _following(self, flight: _Flight) -> list[Text]:
        """The texts of the next pass, if it can be enqueued before the tokens of `flight` are
        known."""
        if not self.goes_ahead:
            return []
        going = [
            text
            for text in flight.texts
            if text.slot >= 0 and not text.ends(len(text.ids) + 1, self.positions)
        ]
        may_enter = self._waiting and len(going) < self.slots
        if not going or may_enter or max(t.slot for t in going) >= self._size_for(len(going)):
            return []
        short = [t for t in going if self.blocks_of(len(t.ids) + 1) > len(t.blocks)]
        if len(short) > len(self._free):
            return []
        for text in short:
            self._lengthen(text)
        return going

    def _admit(self) -> None:
        """Start waiting texts while there is room for their next token, and for one more block of
        each running text."""
        while self._waiting and len(self._running) < self.slots:
            text = self._waiting[0]
            prompt = self._prompts.get(tuple(text.ids[:-1]))
            if prompt is None:
                self._drop_prompts()
            shared = 0 if prompt is None else len(prompt.ids) // BLOCK
            needed = self.blocks_of(self._last_length(text)) + 1 - shared
            if self._running and len(self._free) < needed + self._reserved():
                return
            if prompt is None:
                self._prefill(self._next_prompts())
                prompt = self._prompts[tuple(text.ids[:-1])]
            self._waiting.popleft()
            self._enter(text, prompt)
            self._running.append(text)

    def _last_length(self, text: Text) -> int:
        """Number of the text's tokens for which it takes blocks when it enters."""
        if not self._exact:
            return len(text.ids)
        return min(len(text.request.prompt) + text.request.max_new_tokens, self.positions)

    def _reserved(self) -> int:
        """Number of free blocks that running texts keep for their next tokens."""
        if not self._exact:
            return len(self._running)
        return sum(self.blocks_of(self._last_length(t)) - len(t.blocks) for t in self._running)

    def _drop_prompts(self) -> None:
        for prompt in self._prompts.values():
            self._free.give_back(prompt.blocks)
        self._prompts.clear()

    def _next_prompts(self) -> list[list[int]]:
        """The next waiting texts' prompts, which are computed together: at least one, and more
        while free blocks last."""
        found: dict[tuple[int, ...], list[int]] = {}
        alone = self._carries or self._exact
        most = 1 if alone else max(each.texts for each in self._prefills)
        if self._rings is not None:
            most = min(most, self._rings.texts - self.slots)
        room = len(self._free) - len(self._running)
        for text in itertools.islice(self._waiting, self.slots - len(self._running)):
            ids, key = text.ids[:-1], tuple(text.ids[:-1])
            room -= self.blocks_of(len(text.ids)) + 2
            if found and (room < 0 or (key not in found and len(found) == most)):
                break
            found[key] = ids
        return list(found.values())

    def _prefill(self, prompts: list[list[int]]) -> None:
        """Compute keys, values and states of these prompts, for the texts that begin with them."""
        for ring, ids in enumerate(prompts):
            blocks = self._free.take(self.blocks_of(len(ids)))
            self._prompts[tuple(ids)] = Prompt(ids, blocks, ring)
        for states in self._cache.states.values():
            for tensor in states.values():
                self.dev.zero(tensor.rows(self.slots, self.slots + 1))
        left = {key: 0 for key in map(tuple, prompts) if key}  # number of computed tokens by prompt
        while left:
            each = self._prefill_of(len(left), max(len(key) - start for key, start in left.items()))
            each.inputs.clear()
            rows = list(left.items())[: 1 if self._carries else each.texts]
            for row, (key, start) in enumerate(rows):
                ids, blocks, ring = self._prompts[key]
                each.inputs.put(row, ids[start : start + each.tokens], start, blocks)
                if self._rings is not None:
                    table = each.inputs.arrays["window_table"]
                    table[row] = self._ring_table[self.slots + ring]
                left[key] = start + each.tokens
                if left[key] >= len(ids):
                    del left[key]
            self._run("prefill", each, each.forward)

    def _prefill_of(self, texts: int, tokens: int) -> Pass:
        """The smallest pass that holds `texts` texts of `tokens` tokens; if none does, the one with
        most tokens among the passes over enough texts. With states: the largest pass of at most
        `tokens` tokens."""
        if self._carries:
            return max((p for p in self._prefills if p.tokens <= tokens), key=lambda p: p.tokens)
        widest = max(each.texts for each in self._prefills)
        wide = min(each.texts for each in self._prefills if each.texts >= min(texts, widest))
        fitting = [each for each in self._prefills if each.texts == wide]
        holding = [each for each in fitting if each.tokens >= tokens]
        if not holding:
            return max(fitting, key=lambda p: p.tokens)
        return min(holding, key=lambda p: p.tokens)

    def _enter(self, text: Text, prompt: Prompt) -> None:
        """Give a text a slot, and the blocks, rings and states of its computed prompt."""
        used = {other.slot for other in self._running}
        text.slot = next(slot for slot in range(self.slots) if slot not in used)
        full = len(prompt.ids) // BLOCK
        text.blocks = prompt.blocks[:full]
        self._free.share(text.blocks)
        if full < len(prompt.blocks):
            (own,) = self._free.take(1)
            for (layer, _), tensors in self._cache.blocks.items():
                for tensor in () if self._is_ringed(layer) else tensors.values():
                    self._copy_row(tensor, own, prompt.blocks[full])
            text.blocks.append(own)
        self._copy_ring(text.slot, self.slots + prompt.ring)
        for states in self._cache.states.values():
            for tensor in states.values():
                self._copy_row(tensor, text.slot, self.slots)
        arrays = self._inputs.arrays
        for name in REQUEST_FIELDS:
            if name != "position":
                arrays[name][text.slot] = getattr(text.request, name)
        arrays["table"][text.slot, : len(text.blocks)] = text.blocks
        if text.request.repetition != 1:
            bits = np.zeros(self._seen.shape[1] * 32, np.uint8)
            bits[text.ids] = 1
            words = np.packbits(bits, bitorder="little").view(np.int32)
            self.dev.upload(self._seen.rows(text.slot, text.slot + 1), words[None])

    def _leave(self, text: Text) -> None:
        """Free a text's blocks and slot."""
        self._free.give_back(text.blocks)
        text.blocks, text.slot = [], -1

    def _is_ringed(self, layer: int) -> bool:
        return self._rings is not None and layer in self._rings.layers

    def _copy_ring(self, to: int, ring: int) -> None:
        """Copy a text's keys and values in layers with rings, from one ring to another."""
        for (layer, _), tensors in self._cache.blocks.items():
            for tensor in tensors.values() if self._is_ringed(layer) else ():
                n = self._rings.length
                self.dev.copy(
                    tensor.rows(to * n, (to + 1) * n), tensor.rows(ring * n, (ring + 1) * n)
                )

    def _copy_row(self, tensor: Tensor, to: int, row: int) -> None:
        self.dev.copy(tensor.rows(to, to + 1), tensor.rows(row, row + 1))

    def _move(self, text: Text, slot: int) -> None:
        """Move a text to another slot, which is free."""
        self._copy_row(self._seen, slot, text.slot)
        self._copy_ring(slot, text.slot)
        for states in self._cache.states.values():
            for tensor in states.values():
                self._copy_row(tensor, slot, text.slot)
        for name, array in self._inputs.arrays.items():
            if name != "window_table":
                array[slot] = array[text.slot]
        text.slot = slot

    def _extend(self) -> None:
        """Give each text the block of its next token. If blocks are too few, the newest texts wait
        again."""
        for text in list(self._running):
            if text.slot < 0 or self.blocks_of(len(text.ids)) == len(text.blocks):
                continue
            if not len(self._free):
                self._drop_prompts()
            while not len(self._free):
                last = self._running.pop()
                self._leave(last)
                self._waiting.appendleft(last)
            if text.slot >= 0:
                self._lengthen(text)

    def _lengthen(self, text: Text) -> None:
        """Give a text one more block."""
        (block,) = self._free.take(1)
        self._inputs.arrays["table"][text.slot, len(text.blocks)] = block
        text.blocks.append(block)

    def _size_for(self, texts: int) -> int:
        """Number of texts of the smallest decode pass that holds `texts` texts."""
        return min(B for B in self._decodes if texts <= B)

    def _start(self, texts: list[Text], ahead: int = 0) -> _Flight:
        """Enqueue the pass that chooses the next token of each text. ahead: number of each text's
        tokens that the device has chosen and the host has not read."""
        size = self._size_for(len(texts))
        used = {text.slot for text in texts}
        free = (slot for slot in range(size) if slot not in used)
        for text in texts:
            if text.slot >= size:
                self._move(text, next(free))
        slots = [text.slot for text in texts]
        lengths = np.array([len(text.ids) + ahead for text in texts])
        arrays = self._inputs.arrays
        if not ahead:
            self._chosen.put(slots, [text.ids[-1] for text in texts])
        arrays["first_key"][slots, 0] = 1 - lengths
        arrays["new"][:] = 0
        arrays["lengths"][slots], arrays["new"][slots] = lengths - 1, 1
        arrays["position"][slots] = lengths
        each = self._decodes[size]
        self._run("decode", each, self._decoding(each))
        return _Flight(texts, slots, self._chosen.send())

    def _read(self, flight: _Flight) -> list[NewToken]:
        """The tokens that a pass has chosen for the texts that still run; waits for the device."""
        chosen, logprobs = self._chosen.read(flight.turn)
        ids, found = chosen[flight.slots].tolist(), logprobs[flight.slots].tolist()
        tokens, going = [], []
        for text, new, logprob in zip(flight.texts, ids, found, strict=True):
            if text.slot < 0:
                continue
            if not isfinite(logprob):
                raise LlmqError(NOT_FINITE)
            text.ids.append(new)
            finish = text.finish(new, self.positions)
            if finish is None:
                going.append(text)
            else:
                self._leave(text)
            tokens.append(NewToken(text.index, new, logprob, finish))
        self._running = going
        return tokens


def _of_generation(options: StepOptions, alone: StepOptions) -> StepOptions:
    """The options of passes that keep no activations. Delayed fp8 scales describe a step's own
    tensors, so that these passes compute scales from their tensors."""
    how = {"fp8_recipe": "jit", "mlp_dtype": options.precision.model_dtype}
    precision = replace(options.precision, **how)
    return options._replace(memory=alone.memory, precision=precision)


def _powers(most: int, step: int = 1) -> list[int]:
    """The powers of 2^step below `most`, then `most`."""
    return [*(1 << n for n in range(0, (most - 1).bit_length(), step)), most]
