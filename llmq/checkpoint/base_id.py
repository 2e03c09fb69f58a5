"""Identify the model that adapters are of, by a hash of its tensors, whatever files they are in."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from llmq.base.errors import LlmqError
from llmq.checkpoint.hf import HfWeights
from llmq.state.params import Slab

HASH_THREADS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseId:
    """The identity of a model. name: as a person knows it. sha256: of names, types, shapes and
    values of its tensors. nested: whether its files have other parts too, so that transformers
    loads all of them as one model and has this one inside.
    """

    name: str
    sha256: str
    nested: bool = False

    def record(self) -> dict[str, Any]:
        """For files."""
        return {name: value for name, value in asdict(self).items() if value is not False}

    @classmethod
    def of(cls, record: Any) -> BaseId | None:
        """From a record; None if it is none."""
        known = isinstance(record, Mapping) and record.keys() - {"nested"} == {"name", "sha256"}
        return cls(**record) if known else None


def base_id(name: str, weights: HfWeights, table: tuple[Slab, ...]) -> BaseId:
    """The identity of a model directory; reads all of it. table: without adapters."""
    params = [p for slab in table for p in slab.params if weights.has(p)]
    with ThreadPoolExecutor(HASH_THREADS) as pool:
        digests = list(pool.map(weights.digest, params))
    digest = hashlib.sha256("\n".join(sorted(digests)).encode()).hexdigest()
    return BaseId(name=name, sha256=digest, nested=weights.nested)


def random_base_id(name: str, seed: int) -> BaseId:
    """The identity of random weights."""
    digest = hashlib.sha256(f"{name} {seed}".encode()).hexdigest()
    return BaseId(name=f"{name}, random weights of --seed {seed}", sha256=digest)


def check_same_base(what: str, made_on: BaseId | None, base: BaseId | None) -> None:
    """LlmqError if adapters were made on another model than this one; what: has them."""
    if made_on is not None and base is not None and made_on.sha256 != base.sha256:
        raise LlmqError(
            f"{what} has adapters of the model '{made_on.name}', whose weights are not those of "
            f"'{base.name}': give that model instead"
        )
