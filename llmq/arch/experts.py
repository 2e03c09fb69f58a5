"""Mixtures of experts: sizes, layers, matrices, and names of weights.

    logits = router @ x        a token's `active` experts are those with the largest logits
    out    = sum of weight * down @ (silu(gate @ x) * up @ x) over the active experts
             [+ sigmoid(shared_gate @ x) * the same of the shared expert, which may have no gate]

The score of an expert is a softmax of the logits, or a sigmoid. With sigmoids, a constant of each
expert is added to the score for the choice of experts, but not for the weights. If experts have
groups, a token first chooses groups: by the largest score in each group, or with sigmoids by the
sum of the two largest scores.

or with paired experts: experts and router have biases, and gate_up has the rows g0 u0 g1 u1 ...

    out    = sum of weight * (down @ ((u + 1) * g * sigmoid(alpha * g)) + bias)
             g, u = gate_up @ x + bias, g cut off above a limit, u on both sides

or experts without gates, with the activation of the model's MLPs.

The class of an architecture with experts inherits from `WithExperts` and from a dense family. C:
hidden size, F: width of an expert, E: number of experts.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import chain
from math import inf
from typing import Any

from llmq.arch.common import Architecture, get, size
from llmq.arch.halves import inner_norm, mlp
from llmq.arch.matrix import HalfSpec, Matrix, Module, Part
from llmq.base.errors import ConfigError

_MOST, _MOST_ACTIVE, _MOST_GROUPS = 512, 32, 32  # limits in `ops/experts/route.py`
_FUSED = {("experts_up", 2): "gate_up_proj", ("experts_up", 1): "up_proj"}
_FUSED[("experts_down", 1)] = "down_proj"
"""Names in transformers of parameters that hold all experts of a layer, by our name and number of
modules."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """The sizes of a model's experts."""

    count: int
    """E: number of experts in each layer with experts."""
    active: int
    """Number of experts that a token is sent to."""
    size: int | None = None
    """F: width of each expert; None: intermediate_size of the model."""
    shared_size: int | None = None
    """Width of the shared expert, which computes every token; None if there is no shared expert."""
    renormalize: bool = False
    """True if a token's weights are divided by their sum over the active experts. False if the
    weights are the scores."""
    scale: float = 1.0
    """Factor that multiplies the weights of the active experts."""
    groups: int = 1
    """Number of groups of adjacent experts."""
    active_groups: int = 1
    """Number of groups from which a token chooses its experts."""
    layers: tuple[bool, ...] | None = None
    """True for each layer with experts, False for each layer with an MLP; None if all layers have
    experts."""
    aux_loss: float = 0.0
    """Coefficient of the load-balancing loss in config.json."""
    alpha: float | None = None
    """Factor of the gates inside the sigmoid of paired experts; None if experts are not paired."""
    limit: float | None = None
    """Bound at which the inputs of paired experts' activation are clamped."""

    def validate(self, num_layers: int) -> None:
        """Raise ConfigError if sizes contradict each other."""
        if not 0 < self.active <= min(self.count, _MOST_ACTIVE) or self.count > _MOST:
            raise ConfigError(
                f"model experts: a token must meet 1 to {_MOST_ACTIVE} of at most {_MOST} experts, "
                f"got {self.active} of {self.count}"
            )
        for width in (self.size, self.shared_size):
            if width is not None and width <= 0:
                raise ConfigError(f"model experts: their width must be positive, got {width}")
        if self.layers is not None and len(self.layers) != num_layers:
            raise ConfigError(
                f"model experts: layers must be {num_layers} values, got {len(self.layers)}"
            )
        each, left = divmod(self.count, self.groups) if 0 < self.groups <= _MOST_GROUPS else (0, 1)
        most = self.active_groups * each
        if left or (self.groups > 1 and each < 2) or not self.active <= most <= self.count:
            raise ConfigError(
                f"model experts: {self.active} of {self.count} cannot be in {self.active_groups} "
                f"of {self.groups} groups"
            )
        if not 0 < self.scale < inf:
            raise ConfigError(f"model experts: scale must be positive, got {self.scale}")
        if not 0 <= self.aux_loss < inf:
            raise ConfigError(f"model experts: aux_loss must be at least 0, got {self.aux_loss}")
        for name, value in (("alpha", self.alpha), ("limit", self.limit)):
            if value is not None and not 0 < value < inf:
                raise ConfigError(f"model experts: {name} must be positive, got {value}")


class WithExperts(Architecture):
    """An architecture in which some layers have experts in place of the MLP."""

    targets = (*Architecture.targets, "experts", "fused_experts")
    count_names: tuple[str, ...] = ("num_experts",)
    """Names of E in config.json. Reading accepts any of these names; writing writes all names."""
    own_size = True
    """True if experts have another width than the MLPs of other layers."""
    renormalized = False
    """True if experts' weights are always renormalized, without a field in config.json."""
    shares = False
    """True if layers have a shared expert."""
    shared_gated = True
    """True if the shared expert's output is multiplied by a gate."""
    dense_first = False
    """True if the first layers have MLPs, and the shared expert is as wide as several experts."""
    sigmoid = False
    """True if routers compute sigmoids, and add a constant per expert, which is loaded and never
    trained."""
    grouped = False
    """True if config.json has groups of experts and a factor of the experts' weights."""
    paired = False
    """True if experts are paired, as the module's docstring explains, and stored transposed."""
    fused = False
    """True if files store each matrix of all experts of a layer as one parameter."""
    stacked = False
    """True if files store each matrix of all experts of a layer as one tensor, named in
    expert_modules."""
    experts_at = "model.layers.{}.mlp.experts"
    """Name of the module that holds a layer's experts."""
    beside_mlp = False
    """True if a layer has experts beside its MLP, each with norms of input and output. The router
    then also has a norm, and each expert a trained factor."""
    aux_loss = 0.001
    """Default of the load-balancing loss's coefficient."""
    expert_modules: Mapping[str, tuple[str, ...]] = {
        "router": ("model.layers.{}.mlp.gate",),
        "router_correction": ("model.layers.{}.mlp.gate",),
        "experts_up": (
            "model.layers.{}.mlp.experts.{}.up_proj",
            "model.layers.{}.mlp.experts.{}.gate_proj",
        ),
        "experts_down": ("model.layers.{}.mlp.experts.{}.down_proj",),
        "shared_gate": ("model.layers.{}.mlp.shared_expert_gate",),
        "shared_up": tuple(f"model.layers.{{}}.mlp.shared_expert.{x}_proj" for x in ("up", "gate")),
        "shared_down": ("model.layers.{}.mlp.shared_expert.down_proj",),
    }
    """By parameter, the Hugging Face modules in a layer or in an expert."""

    def layers(self, model: Any, layer: int) -> tuple[HalfSpec, ...]:
        first, second = super().layers(model, layer)
        if not model.has_experts(layer):
            return first, second
        both = _beside(model, layer, second) if self.beside_mlp else experts(model, layer)
        return first, both

    def fixed(self, model: Any) -> dict[str, Any]:
        """Return fields that a model must have; sizes of experts are free, except for sizes that
        the architecture fixes."""
        its = model.experts
        if its is None or (its.shared_size is not None) != self.shares:
            shared = "with" if self.shares else "without"
            raise ConfigError(f"model experts: {self.name} needs some, {shared} a shared one")
        if {its.alpha is not None, its.limit is not None} != {self.paired}:
            takes = "alpha and limit" if self.paired else "neither alpha nor limit"
            raise ConfigError(f"model experts: {self.name} takes {takes}")
        return super().fixed(model) | {"experts": its}

    def read_sizes(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        given = [name for name in self.count_names if name in hf] or self.count_names[:1]
        counts = [size(hf, name) for name in given]
        if len({*counts}) > 1:
            raise ConfigError(f"config.json: {' and '.join(given)} differ: {counts}")
        layers = self._read_layers(hf) if self.own_size else ()
        of_experts = Experts(
            count=counts[0],
            active=size(hf, "num_experts_per_tok"),
            size=size(hf, "moe_intermediate_size") if self.own_size else None,
            shared_size=size(hf, "shared_expert_intermediate_size") if self.shares else None,
            renormalize=self.renormalized or get(hf, "norm_topk_prob", bool, False),
            layers=None if all(layers) else layers,
            aux_loss=get(hf, "router_aux_loss_coef", float, self.aux_loss),
            **self._read_groups(hf),
        )
        return super().read_sizes(hf) | {"experts": of_experts}

    def _read_groups(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of Experts about groups of experts. If a token chooses all groups, the
        model is read as one without groups."""
        if not self.grouped:
            return {}
        scale = get(hf, "routed_scaling_factor", float, 1.0)
        groups, active = (get(hf, name, int, None) or 1 for name in ("n_group", "topk_group"))
        groups, active = (1, 1) if groups == active else (groups, active)
        return {"scale": scale, "groups": groups, "active_groups": active}

    def _read_layers(self, hf: Mapping[str, Any]) -> tuple[bool, ...]:
        dense, num_layers = get(hf, "mlp_only_layers", list, None), size(hf, "num_hidden_layers")
        step = get(hf, "decoder_sparse_step", int, 1)
        if step < 1:
            raise ConfigError(f"config.json: decoder_sparse_step: must be positive, got {step}")
        return tuple(
            layer not in (dense or ()) and (layer + 1) % step == 0 for layer in range(num_layers)
        )

    def write_sizes(self, model: Any) -> dict[str, Any]:
        its = model.experts
        fields = dict.fromkeys(self.count_names, its.count) | {
            "num_experts_per_tok": its.active,
            "router_aux_loss_coef": its.aux_loss,
            "output_router_logits": False,
        }
        if self.shares:
            fields["shared_expert_intermediate_size"] = its.shared_size
        if self.grouped:
            fields |= {"n_group": its.groups, "topk_group": its.active_groups}
            fields["routed_scaling_factor"] = its.scale
        if not self.renormalized:
            fields["norm_topk_prob"] = its.renormalize
        if self.own_size:
            dense = [i for i in range(model.num_layers) if not model.has_experts(i)]
            fields |= {"moe_intermediate_size": model.expert_size}
            fields |= {"decoder_sparse_step": 1, "mlp_only_layers": dense}
        return super().write_sizes(model) | fields


def experts(config: Any, layer: int) -> HalfSpec:
    """Return the declaration of a layer's experts, and of the shared expert of width Fs. router:
    (E, C). router_correction: (E,), added to sigmoids for the choice of experts. shared_gate: (1,
    C). shared_up: (2Fs, C), or (Fs, C) without gates. shared_down: (C, Fs). experts_up: (E, 2F, C),
    or (E, F, C) without gates. experts_down: (E, C, F). Rows are ordered up, then gate; in paired
    experts g0 u0 g1 u1 ..."""
    its, F = config.experts, config.expert_size
    routers, shared = [_router(config, layer, "router", its.count)], ()
    if config.arch.beside_mlp:
        routers.append(_of_router(config, layer, "router_norm", "scale", config.hidden_size))
        routers.append(_of_router(config, layer, "expert_scale", "per_expert_scale", its.count))
    activations = ("router_logits", "expert_up", "expert_act")
    if config.arch.sigmoid:
        routers.append(_correction(config, layer))
    if its.shared_size is not None:
        if config.arch.shared_gated:
            routers.append(_router(config, layer, "shared_gate", 1))
        targets = (("up",), ("gate",), ("down",))
        shared = _matrices(config, layer, "shared", its.shared_size, targets=targets)
        activations += ("shared_up", "shared_act")
    return HalfSpec(
        kind="experts",
        name="moe",
        norm="ln2",
        norms=mlp(config, layer).norms,
        modules=(*routers, *shared, *_matrices(config, layer, "experts", F, its.count, its.active)),
        output=None,
        activations=activations,
        made_again=("expert_act",) if config.gated and not config.arch.paired else (),
        sizes={
            "active": its.active,
            "shared": its.shared_size is not None,
            "paired": config.arch.paired,
        },
    )


def _beside(config: Any, layer: int, mlp: HalfSpec) -> HalfSpec:
    """Return the declaration of an MLP with experts beside the MLP: both outputs are normed and
    added. ln2_mlp_post, ln2_experts, ln2_experts_post, router_norm: (C,). expert_scale: (E,)."""
    own = experts(config, layer)
    up = replace(own["experts_up"], input="ln2_experts")
    modules = tuple(up if m.key == up.key else m for m in own.modules)
    first = inner_norm(config, layer, "ln2_experts")
    own = replace(own, norm=first.key, norms=(first,), modules=modules)
    posts = [inner_norm(config, layer, f"{key}_post") for key in ("ln2_mlp", "ln2_experts")]
    return HalfSpec(
        kind="mlp_and_experts",
        name="ffn",
        norm=mlp.norm,
        norms=mlp.norms,
        modules=(*mlp.modules, posts[0], first, *modules, posts[1]),
        output=None,
        activations=(*mlp.activations, *own.activations),
        parts=(mlp, own),
    )


def _matrices(
    config: Any,
    layer: int,
    kind: str,
    size: int,
    count: int | None = None,
    active: int = 1,
    targets: tuple[tuple[str, ...], ...] = (("experts",),) * 3,
) -> tuple[Matrix, Matrix]:
    """Return the matrices KIND_up and KIND_down of `count` experts of width `size`; count None: of
    one MLP. targets: names in --lora-targets of the modules up, gate and down."""
    C, name, paired = config.hidden_size, kind.removesuffix("s"), config.arch.paired
    alone = paired or config.arch.fused
    outer, experts_ = () if count is None else (count,), range(count or 1)

    def module(key: str, rows: int, its_targets: tuple) -> dict[str, Any]:
        parts, fused, stacked = (), None, count is not None and config.arch.stacked
        if not stacked and (count is None or not alone):
            parts = _parts(config, layer, key, rows, its_targets, experts_)
        if count is not None:
            both = len(its_targets) > 1
            fused = Part(
                module=f"{config.arch.experts_at.format(layer)}.{_FUSED[key, len(its_targets)]}",
                rows=count * len(its_targets) * rows,
                targets=("experts" if alone else "fused_experts",),
                transposed=paired,
                order=((rows, 2 * rows), (0, rows)) if both and not paired else (),
                experts=count,
            )
            if stacked:
                (stored,) = config.arch.expert_modules[key]
                parts = (replace(fused, module=stored.format(layer), targets=()),)
            parts = parts or (fused,)
        names = {"key": key, "name": f"model.layers.{layer}.{key}", "active": active}
        return names | {"parts": parts, "fused": fused, "bias": paired}

    ups = 2 if config.gated else 1
    return (
        Matrix(
            shape=(*outer, ups * size, C), input="ln2", gradient=f"d_{name}_up",
            **module(f"{kind}_up", size, targets[:ups]),
        ),
        Matrix(
            shape=(*outer, C, size), input=f"{name}_act", gradient="d_moe", initial="residual",
            **module(f"{kind}_down", C, targets[2:]),
        ),
    )  # fmt: skip


def _router(config: Any, layer: int, key: str, rows: int) -> Module:
    return Module(
        key=key,
        name=f"model.layers.{layer}.{key}",
        shape=(rows, config.hidden_size),
        parts=_parts(config, layer, key, rows, ((),), range(1)),
        kind="router",
        bias=config.arch.paired,
    )


def _of_router(config: Any, layer: int, key: str, tensor: str, rows: int) -> Module:
    """Return a router's vector (rows,)."""
    module = config.arch.expert_modules["router"][0].rpartition(".")[0].format(layer)
    part = Part(module=module, rows=rows)
    return Module(
        key=key, name=module, tensor=tensor, shape=(rows,), parts=(part,), kind="vector",
        initial="one",
    )  # fmt: skip


def _correction(config: Any, layer: int) -> Module:
    (module,) = config.arch.expert_modules["router_correction"]
    part = Part(module=module.format(layer), rows=config.experts.count)
    return Module(
        key="router_correction", name=part.module, tensor="e_score_correction_bias",
        shape=(part.rows,), parts=(part,), kind="constant", initial="zero",
    )  # fmt: skip


def _parts(
    config: Any,
    layer: int,
    key: str,
    rows: int,
    targets: tuple[tuple[str, ...], ...],
    experts_: range,
) -> tuple[Part, ...]:
    """Return the parts of a weight: for each expert one module per item of `targets`, or a single
    module with the gate's rows before up's rows."""
    names = config.arch.expert_modules[key]
    if len(names) < len(targets):
        order = ((rows, 2 * rows), (0, rows))
        module, every = names[0].format(layer), tuple(chain(*targets))
        return (Part(module=module, rows=2 * rows, targets=every, order=order),)
    return tuple(
        Part(module=name.format(layer, expert), rows=rows, targets=of_module)
        for expert in experts_
        for name, of_module in zip(names, targets, strict=True)
    )
