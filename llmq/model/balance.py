"""Load-balancing loss and z-loss of experts' routers, from sums over a micro-batch.

    forward    each router adds to the sums of its layer
    between    the sums become both losses, and the factors of the losses' gradients
    backward   each router adds both losses' gradients to the gradient of its logits

The tensor `totals` adds up the sums of all micro-steps of this rank since the start of the run.
"""

from llmq.arch.model_config import ModelConfig
from llmq.base.dtypes import F32, I64
from llmq.base.tensor import Tensor
from llmq.ops.experts import route
from llmq.options.options import StepOptions
from llmq.ref.experts.route import sums_size
from llmq.runtime.device import Device

ROUTER_STATS = ("router_aux", "router_z", "router_entropy", "router_busiest")
"""Statistics of a step that `route.balance` adds up, weighted by the number of targets."""
ROUTER_SHOWN = ("router_busiest",)
"""The router statistics that the live view shows."""


class Balance:
    """The sums of routers in training of a model with experts. factors: F32 (E+1,) for E experts,
    read by backward; None if both losses have the coefficient 0. totals: I64 (layers with experts,
    2E+4), with the columns of the sums in `route`."""

    def __init__(self, dev: Device, config: ModelConfig, options: StepOptions, targets: Tensor):
        """options: with defaults filled in. targets: I32 (B, T), the targets of each micro-batch,
        FILLER_TARGET at filler tokens."""
        self.dev, E = dev, config.experts.count
        self.targets = targets.view(targets.size)
        self._layers = [layer for layer in range(config.num_layers) if config.has_experts(layer)]
        shape = (len(self._layers), sums_size(E))
        self._sums = dev.alloc("router_sums", shape, I64, "Activations")
        self.totals = dev.alloc("router_totals", shape, I64, "Activations")
        self._factors = dev.alloc("router_factors", (E + 1,), F32, "Activations")
        self._coefficients = {"aux": aux_loss(config, options), "z": options.optim.router_z_loss}
        for tensor in (self._sums, self.totals):
            dev.zero(tensor)

    @property
    def factors(self) -> Tensor | None:
        return self._factors if any(self._coefficients.values()) else None

    def sums(self, layer: int) -> Tensor:
        """Return the sums of the router of a layer."""
        index = self._layers.index(layer)
        return self._sums.rows(index, index + 1).view(self._sums.shape[1])

    def finish(self, stats: Tensor, weights: Tensor | None) -> None:
        """Compute the losses, and the factors of their gradients, after the forward pass of a
        micro-batch. stats: F64 (4,), the sums of ROUTER_STATS. weights: F32 (B, T), the result of
        `Loss.divisor`."""
        by = None if weights is None else weights.view(weights.size)
        args = (self._factors, stats, self.totals, self._sums, self.targets, by)
        route.balance(self.dev, *args, **self._coefficients)


def aux_loss(config: ModelConfig, options: StepOptions) -> float:
    """Return the coefficient of the load-balancing loss: the option's value; without the option,
    config.json's value for new models and 0 for pretrained models, as in transformers."""
    if options.optim.router_aux_loss is None:
        is_new = options.model.from_scratch and options.optim.pairs is None
        return config.experts.aux_loss if is_new else 0.0
    return options.optim.router_aux_loss
