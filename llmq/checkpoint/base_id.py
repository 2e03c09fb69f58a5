"""Identities of base models. A file of adapters records the identity of its base model."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from llmq.base.errors import LlmqError
from llmq.checkpoint.hf import HfWeights
from llmq.checkpoint.source_model import HASH_THREADS
from llmq.state.params import Slab


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseId:
    """The identity of a base model. name: the model's name as the user gave it. sha256: digest of
    names, dtypes, shapes and values of the tensors. nested: True if transformers wraps the language
    model in a larger one, because the files also hold other parts (vision tower).
    """

    name: str
    sha256: str
    nested: bool = False

    def record(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not False}

    @classmethod
    def of(cls, record: Any) -> BaseId | None:
        """Return the identity in a record; None if `record` holds no identity."""
        known = isinstance(record, Mapping) and record.keys() - {"nested"} == {"name", "sha256"}
        return cls(**record) if known else None


def base_id(name: str, weights: HfWeights, table: tuple[Slab, ...]) -> BaseId:
    """Return the identity of a model directory; reads all weights. table: the weight table without
    adapters."""
    params = [p for slab in table for p in slab.params if weights.has(p)]
    with ThreadPoolExecutor(HASH_THREADS) as pool:
        digests = list(pool.map(weights.digest, params))
    digest = hashlib.sha256("\n".join(sorted(digests)).encode()).hexdigest()
    return BaseId(name=name, sha256=digest, nested=weights.nested)


def random_base_id(name: str, seed: int) -> BaseId:
    digest = hashlib.sha256(f"{name} {seed}".encode()).hexdigest()
    return BaseId(name=f"{name}, random weights of --seed {seed}", sha256=digest)


def check_same_base(what: str, made_on: BaseId | None, base: BaseId | None) -> None:
    """LlmqError if adapters were trained on another model than `base`. what: the owner of the
    adapters, for the message. made_on: the adapters' base model. If one of the two is None there is
    no error."""
    if made_on is not None and base is not None and made_on.sha256 != base.sha256:
        raise LlmqError(
            f"{what} has adapters of the model '{made_on.name}', whose weights are not those of "
            f"'{base.name}': give that model instead"
        )
