"""Memory and time of a configuration in a few milliseconds, from plans of a few layers.

Every layer from the third one on adds the same as the third, if that is of its kind: two small
plans give any number, and one more where layers with and without a window take turns.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import cycle, islice

import numpy as np

from llmq.arch.model_config import ModelConfig
from llmq.model.activations import Recompute
from llmq.options.cards import Card
from llmq.options.option_types import layer_set
from llmq.options.options import TrainConfig
from llmq.plan.cost import ONE_MACHINE, Network, StepTime, step_time
from llmq.plan.cost import PARTS as TIMES
from llmq.plan.memory import needed_bytes, page_tables
from llmq.plan.plan import PARTS, Plan, make_plan
from llmq.runtime.attention_parts import divisions
from llmq.runtime.device import DeviceSpec
from llmq.runtime.mesh import DATA
from llmq.state.placement import mesh_of

FEW_LAYERS = 2  # at least as many as the buffers that layers take turns in
RECOMPUTE = tuple(f"recompute_{name}" for name in Recompute._fields)

# Options that do not matter to the update, whose plan is therefore shared.
WITHOUT_UPDATE = dict.fromkeys((*RECOMPUTE, "offload_residual", "offload_between"), False)
WITHOUT_UPDATE |= dict.fromkeys(
    ("batch_size", "grad_accumulation", "lmhead_chunks", "attn_bwd_chunks"), 1
)
WITHOUT_UPDATE["seq_len"] = 16  # what fp8 needs


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """The needs of one configuration. device: bytes that must fit into each rank's device memory.
    host: bytes of host memory of all ranks together. tokens: of a step."""

    device: int
    host: int
    tokens: int
    time: StepTime

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return self.tokens / self.time.total


class Planner:
    """Plans of one model for one kind of machine; remembers what it has planned. gpus: of one
    machine."""

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
    ):
        """world_size: GPUs of all machines that the network joins. visible_share: as step_time
        takes it. gpus: of the machine that is looked at, None if all have as many."""
        self.network = network
        self.model, self.spec, self.backend = model, spec, backend
        self.card, self.world_size, self.visible_share = card, world_size, visible_share
        self.gpus = gpus or world_size // network.machines
        self._estimates: dict[TrainConfig, Estimate] = {}
        self._known: dict[tuple[TrainConfig, tuple[int, ...], str], np.ndarray] = {}

    def of(self, model: ModelConfig) -> Planner:
        """For the same machine."""
        shared = (self.spec, self.backend, self.card, self.world_size, self.visible_share)
        return Planner(model, *shared, self.network, self.gpus)

    def plan(self, config: TrainConfig, parts: tuple[str, ...] = PARTS) -> Plan:
        """The exact plan. parts: as make_plan's."""
        how = (self.backend, self.world_size, parts)
        machines = self.network.machines
        made = make_plan(config, self.model, self.spec, *how, machines=machines)
        return replace(made, gpus=self.gpus)

    def with_fewest_parts(self, config: TrainConfig) -> TrainConfig:
        """With as few parts of attention's backward as take no more memory, and its results. They
        are there to bound a workspace that often lies where another part of the step needs more:
        then one part is as small, and faster."""

        def stack(parts: int) -> int:
            cut = replace(config, attn_bwd_chunks=parts)
            return self.plan(cut, ("micro_steps",)).usage.sizes["stack"]

        asked, heads = config.attn_bwd_chunks, (self.model.num_heads, self.model.num_kv_heads)
        most = stack(asked) if asked > 1 else 0
        fewer = (n for n in divisions(config.batch_size, *heads) if n < asked)
        return replace(config, attn_bwd_chunks=next((n for n in fewer if stack(n) <= most), asked))

    def exact(self, config: TrainConfig) -> Estimate:
        """From the exact plan."""
        return self._estimate(config, self._values(self.plan(config)))

    def estimate(self, config: TrainConfig) -> Estimate:
        """From plans of few layers, where these are cheaper."""
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
        # Those that recompute and those that do not are each like their likes.
        everywhere = replace(config, recompute_layers="all")
        swiglu = None if config.recompute_swiglu is None else False  # None: in all layers alike
        without = dict.fromkeys(RECOMPUTE, False) | {"recompute_swiglu": swiglu}
        nowhere = replace(everywhere, **without)
        none, all_ = self._extrapolate(nowhere), self._extrapolate(everywhere)
        mixed = none + recomputed / layers * (all_ - none)
        mixed[1] = max(none[1], all_[1])  # the stack is that of the layer that needs most
        return mixed

    def _measure(self, config: TrainConfig, layers: tuple[int, ...]) -> np.ndarray:
        """From plans of layers like these: of the micro-steps, and of the update."""
        update = self._part(replace(config, **WITHOUT_UPDATE), layers, "update")
        micro_steps = self._part(config, layers, "micro_steps")
        together = micro_steps + update
        together[:3] = micro_steps[:3]
        together[1] = max(micro_steps[1], update[1])
        return together

    def _part(self, config: TrainConfig, layers: tuple[int, ...], part: str) -> np.ndarray:
        key = (config, layers, part)
        if key not in self._known:
            few = self.of(self.model.with_layers(layers))
            self._known[key] = self._values(few.plan(config, (part,)))
        return self._known[key]

    def _values(self, plan: Plan) -> np.ndarray:
        """float64: bytes of the arena, of the stack, and of host memory; seconds of each part."""
        stack = plan.usage.sizes["stack"]
        device = needed_bytes(plan, self.spec) - page_tables(plan.host_bytes, self.spec)
        memory = [device - stack, stack, plan.host_bytes]
        time = step_time(plan, self.card, self.visible_share, self.network)
        return np.array([*memory, *(time.parts[name] for name in TIMES)])

    def _estimate(self, config: TrainConfig, values: np.ndarray) -> Estimate:
        arena, stack, host, *seconds = values.tolist()
        mesh = mesh_of(config, self.world_size, self.network.machines)
        tokens = config.batch_size * config.seq_len * config.grad_accumulation * mesh.size(*DATA)
        parts = dict(zip(TIMES, seconds, strict=True))
        return Estimate(
            device=round(arena + stack) + page_tables(round(host), self.spec),
            host=round(host),
            tokens=tokens,
            time=StepTime(parts=parts),
        )
