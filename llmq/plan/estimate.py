"""Estimates of memory and time in a few milliseconds, from plans of a few layers.

Each layer beyond the second adds as much as any other layer of its kind. So two small plans give
any number of layers, plus one plan for each further kind, such as layers with and without a window.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice

import numpy as np

from llmq.arch.model_config import ModelConfig
from llmq.base.shares import EQUAL
from llmq.model.activations import Recompute
from llmq.options.cards import Card
from llmq.options.option_types import layer_set
from llmq.options.options import TrainConfig
from llmq.plan.cost import ONE_MACHINE, Network, StepTime, step_time
from llmq.plan.cost import PARTS as TIMES
from llmq.plan.memory import needed_bytes, page_tables
from llmq.plan.plan import PARTS, Plan, make_plan
from llmq.plan.shares import ROWS, shared_time, shares_of, times_of
from llmq.runtime.attention_parts import divisions
from llmq.runtime.device import DeviceSpec
from llmq.runtime.mesh import DATA
from llmq.state.placement import mesh_of

FEW_LAYERS = 2  # at least the number of buffers that layers alternate between
RECOMPUTE = tuple(f"recompute_{name}" for name in Recompute._fields)

# Options without influence on the update. Configurations that differ only in these options share
# the update's plan.
WITHOUT_UPDATE = dict.fromkeys((*RECOMPUTE, "offload_residual", "offload_between"), False)
WITHOUT_UPDATE |= dict.fromkeys(
    ("batch_size", "grad_accumulation", "lmhead_chunks", "attn_bwd_chunks"), 1
)
WITHOUT_UPDATE["seq_len"] = 16  # least sequence length of fp8 products


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Needs of one configuration. device: bytes of device memory of each rank. host: bytes of host
    memory of all ranks together. tokens: tokens of a step."""

    device: int
    host: int
    tokens: int
    time: StepTime

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return self.tokens / self.time.total


class Planner:
    """Plans of one model for one kind of machine, with a cache. gpus: GPUs of one machine."""

    def __init__(
        self,
        model: ModelConfig,
        spec: DeviceSpec,
        backend: str,
        card: Card,
        world_size: int = 1,
        visible_share: float = 1.0,
        network: Network = ONE_MACHINE,
        gpus: int | None = None,
        cards: tuple[Card, ...] = (),
    ):
        """world_size: GPUs of all machines in the network. visible_share: as in step_time. gpus:
        GPUs of the planned machine; None if all machines have the same number. cards: one for each
        rank if the GPUs of one machine differ; (): every GPU is `card`."""
        self.cards = cards
        self.network = network
        self.model, self.spec, self.backend = model, spec, backend
        self.card, self.world_size, self.visible_share = card, world_size, visible_share
        self.gpus = gpus or world_size // network.machines
        self._estimates: dict[TrainConfig, Estimate] = {}
        self._measured: dict[tuple[TrainConfig, tuple[int, ...], str], np.ndarray] = {}

    def of(self, model: ModelConfig) -> Planner:
        """Return a planner of another model for the same machine."""
        return Planner(
            model,
            self.spec,
            self.backend,
            self.card,
            self.world_size,
            self.visible_share,
            self.network,
            self.gpus,
            self.cards,
        )

    def plan(self, config: TrainConfig, parts: tuple[str, ...] = PARTS) -> Plan:
        """Return the exact plan. parts: as in make_plan."""
        plan = make_plan(
            config,
            self.model,
            self.spec,
            self.backend,
            self.world_size,
            parts,
            machines=self.network.machines,
        )
        return replace(plan, gpus=self.gpus)

    def with_fewest_parts(self, config: TrainConfig) -> TrainConfig:
        """Return the config with the fewest parts of attention's backward that need no more memory.
        Parts make a workspace smaller. Often another phase of the step needs more memory in the
        same place; then fewer parts need no more memory, and are faster. Results stay the same."""

        def stack(parts: int) -> int:
            cut = replace(config, attn_bwd_chunks=parts)
            return self.plan(cut, ("micro_steps",)).usage.sizes["stack"]

        asked, heads = config.attn_bwd_chunks, config.local_heads(self.model.heads_of(0))[:2]
        most = stack(asked) if asked > 1 else 0
        fewer = (n for n in divisions(config.batch_size, *heads) if n < asked)
        return replace(config, attn_bwd_chunks=next((n for n in fewer if stack(n) <= most), asked))

    def exact(self, config: TrainConfig) -> Estimate:
        """Return the needs of a config, from its exact plan."""
        return self._estimate(config, self._values(config, self.plan(config)))

    def estimate(self, config: TrainConfig) -> Estimate:
        """Return the needs of a config, from plans of few layers if these are cheaper than the
        exact plan."""
        if config not in self._estimates:
            self._estimates[config] = self._estimate(config, self._extrapolate(config))
        return self._estimates[config]

    def _extrapolate(self, config: TrainConfig) -> np.ndarray:
        layers = self.model.num_layers
        recomputed = len(layer_set(config.recompute_layers, layers))
        if config.recompute_layers == "all":
            if layers <= 2 * FEW_LAYERS + 1:
                return self._measure(config, tuple(range(layers)))
            kinds = self.model.layer_kinds
            few = tuple(islice(cycle(kinds), FEW_LAYERS))
            small = values = self._measure(config, few)
            for kind, number in kinds.items():
                step = self._measure(config, (*few, kind)) - small
                values = values + (number - few.count(kind)) * step
            return values
        # All recomputing layers are alike, and all other layers are alike.
        everywhere = replace(config, recompute_layers="all")
        swiglu = None if config.recompute_swiglu is None else False  # None: the same in all layers
        without = dict.fromkeys(RECOMPUTE, False) | {"recompute_swiglu": swiglu}
        nowhere = replace(everywhere, **without)
        none, all_ = self._extrapolate(nowhere), self._extrapolate(everywhere)
        mixed = none + recomputed / layers * (all_ - none)
        mixed[1] = max(none[1], all_[1])  # the layers with the larger need decide the stack
        return mixed

    def _measure(self, config: TrainConfig, layers: tuple[int, ...]) -> np.ndarray:
        """Values as in `_values`, from a plan of the micro-steps and a plan of the update, with
        layers of these kinds."""
        update = self._part(replace(config, **WITHOUT_UPDATE), layers, "update")
        micro_steps = self._part(config, layers, "micro_steps")
        together = micro_steps + update
        together[:3] = micro_steps[:3]
        together[1] = max(micro_steps[1], update[1])
        return together

    def _part(self, config: TrainConfig, layers: tuple[int, ...], part: str) -> np.ndarray:
        key = (config, layers, part)
        if key not in self._measured:
            few = self.of(self.model.with_layers(layers))
            self._measured[key] = self._values(config, few.plan(config, (part,)))
        return self._measured[key]

    def _values(self, config: TrainConfig, plan: Plan) -> np.ndarray:
        """F64 (3 + n,): bytes of arena, stack and host memory, then the n values of `_times`."""
        stack = plan.usage.sizes["stack"]
        device = needed_bytes(plan, self.spec) - page_tables(plan.host_bytes, self.spec)
        memory = [device - stack, stack, plan.host_bytes]
        return np.array([*memory, *self._times(config, plan)])

    def _sharing(self, config: TrainConfig) -> tuple[Card, ...]:
        """Each rank's card if ranks have shares of the micro-batches; () if all ranks do the same
        work."""
        alike = () if config.share == EQUAL or self.gpus == 1 else (self.card,) * self.gpus
        return self.cards or alike

    def _times(self, config: TrainConfig, plan: Plan) -> Iterable[float]:
        """Seconds in the order in which `_time` reads them; each value is a sum over layers."""
        if cards := self._sharing(config):
            return times_of(plan, cards, self.visible_share).ravel()
        time = step_time(plan, self.card, self.visible_share, self.network)
        return (time.parts[name] for name in TIMES)

    def _time(self, config: TrainConfig, times: Sequence[float]) -> StepTime:
        if cards := self._sharing(config):
            return shared_time(config, np.reshape(times, (len(cards), ROWS, len(TIMES))))
        return StepTime(parts=dict(zip(TIMES, times, strict=True)))

    def time(self, config: TrainConfig, plan: Plan) -> StepTime:
        """Return the time of a step. plan: the plan of `config`."""
        return self._time(config, [*self._times(config, plan)])

    def shares(self, config: TrainConfig, plan: Plan) -> list[int] | None:
        """Return each rank's number of micro-batches in a step; None if all ranks have the same.
        plan: the plan of `config`."""
        cards = self._sharing(config)
        return shares_of(config, times_of(plan, cards, self.visible_share)) if cards else None

    def _estimate(self, config: TrainConfig, values: np.ndarray) -> Estimate:
        arena, stack, host, *seconds = values.tolist()
        mesh = mesh_of(config, self.world_size, self.network.machines)
        tokens = config.batch_size * config.seq_len * config.grad_accumulation * mesh.size(*DATA)
        return Estimate(
            device=round(arena + stack) + page_tables(round(host), self.spec),
            host=round(host),
            tokens=tokens,
            time=self._time(config, seconds),
        )
