"""[Placement] of `llmq plan`: where weights, gradients and moments lie, for people and programs."""

from dataclasses import asdict
from itertools import groupby
from operator import itemgetter
from typing import Any

from llmq.base.dtypes import OPTION_DTYPES
from llmq.report.tables import terminal_table
from llmq.state.placement import Placement, SlabPlacement, Store

# Tensors of a slab, the first columns of [Placement]; moments follow.
PLACED = ("work", "base", "master", "part", "transposed", "mirror", "gradient")
NAMES = {dtype: name for name, dtype in OPTION_DTYPES.items()}


def _groups(placement: Placement) -> list[tuple[str, SlabPlacement]]:
    """Names and placements of slabs; neighbours of equal placement share a name, "layers.0-27"."""
    groups = []
    kinds = [(name.partition(".")[0], slab) for name, slab in placement.slabs.items()]
    for (_, alike), run in groupby(zip(kinds, placement.slabs, strict=True), itemgetter(0)):
        first, *others = [name for _, name in run]
        last = f"-{others[-1].partition('.')[2]}" if others else ""
        groups.append((first + last, alike))
    return groups


def _stores(slab: SlabPlacement, placement: Placement) -> dict[str, Store | None]:
    """Stores by kind of tensor in column order, with the moments that any slab has."""
    names = dict.fromkeys(name for other in placement.slabs.values() for name in other.moments)
    moments = {name: slab.moments.get(name) for name in names}
    return {kind: getattr(slab, kind) for kind in PLACED} | moments


def placement_record(placement: Placement) -> dict[str, Any]:
    """The placement for programs. slabs: one row for neighbours of equal placement; head: see
    Placement."""
    rows = [
        {"slabs": name, "trainable": slab.trainable, "group": slab.group}
        | {kind: _record(store) for kind, store in _stores(slab, placement).items()}
        for name, slab in _groups(placement)
    ]
    return {"slabs": rows, "head": _record(placement.head)}


def _record(store: Store | None) -> dict[str, Any] | None:
    return None if store is None else asdict(store) | {"dtype": NAMES[store.dtype]}


def placement_table(placement: Placement) -> list[str]:
    """Lines of [Placement], without kinds of tensors that no slab has."""
    groups = [(name, slab, _stores(slab, placement)) for name, slab in _groups(placement)]
    every = dict.fromkeys(kind for *_, stores in groups for kind in stores)
    kinds = [kind for kind in every if any(stores[kind] for *_, stores in groups)]
    rows = []
    for name, slab, stores in groups:
        cells = [_words(stores[kind]) for kind in kinds]
        rows.append([name, slab.group if slab.trainable else "frozen", *cells])
    table = terminal_table(["slabs", "group", *kinds], rows, indent=2)
    head = [] if placement.head is None else [f"  LM head: {_words(placement.head)} beside these"]
    return [*table.splitlines(), *head]


def _words(store: Store | None) -> str:
    """A store in a few words: "bf16", "bf16 shard, pinned", "e4m3, in slots"."""
    if store is None:
        return "-"
    words = NAMES[store.dtype] + (" shard" if store.sharded else "")
    places = [store.memory.replace("_", "-")] if store.on_host else []
    return ", ".join([words, *places, *(["in slots"] if store.streamed else [])])
