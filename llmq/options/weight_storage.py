"""Memory and number formats of the weights of a model's blocks, by the options of four groups."""

from __future__ import annotations

from typing import NamedTuple

from llmq.options.groups.memory import MemoryOptions
from llmq.options.groups.model import ModelOptions
from llmq.options.groups.parallel import ParallelOptions
from llmq.options.groups.precision import PrecisionOptions


class WeightStorage(NamedTuple):
    """Answers about the blocks' weights that follow from options of several groups."""

    model: ModelOptions
    precision: PrecisionOptions
    memory: MemoryOptions
    parallel: ParallelOptions

    @property
    def has_codes(self) -> bool:
        """True if fp8 codes are made of the weights after every update."""
        return self.precision.is_fp8 and not self.model.freezes_model

    @property
    def has_transposed(self) -> bool:
        """True if products read codes of weights in two layouts."""
        int8 = self.precision.matmul_dtype == self.model.base_dtype == "int8"
        return self.precision.is_fp8 or int8

    @property
    def gathered(self) -> tuple[str, str] | None:
        """Format of the tensors that streamed blocks are gathered from, and the option that puts
        these tensors beside the device; "": they lie on the device. None: codes are made from
        masters at each gather."""
        model, precision, memory = self.model, self.precision, self.memory
        of_master = "offload_master" if memory.offload_master else ""
        if model.freezes_model:  # a frozen block has no other tensors
            return model.base_dtype, of_master
        if precision.is_fp8:
            of_codes = "offload_quants" if memory.offload_quants else ""
            return ("e4m3", of_codes) if memory.persistent_quants else None
        return precision.model_dtype, "" if precision.own_master else of_master

    def streams(self, shards: int) -> bool:
        """True if blocks take turns in slots of work weights. shards: number of parts of the
        state."""
        return self.parallel.shard_weights and self.why_weights_stay(shards) is None

    def has_masters(self, shards: int) -> bool:
        """True if the optimizer updates tensors of the blocks that products do not read."""
        return self.has_codes or self.precision.own_master or self.streams(shards)

    def why_weights_stay(self, shards: int) -> str | None:
        """Why --shard-weights does nothing; None if this option does something. A single shard
        needs slots only for blocks whose work weights are not on the device anyway."""
        if shards > 1 or self.gathered is None or self.gathered[1]:
            return None
        if self.model.freezes_model:
            return "without --offload-master"
        if self.precision.is_fp8:
            return "with --persistent-quants and without --offload-quants"
        if self.precision.own_master:
            return f"with --master-dtype {self.precision.master_dtype}"
        return "without --offload-master"

    def why_gradients_stay(self, shards: int) -> str | None:
        """Why --shard-gradients does nothing; None if this option does something. A single shard
        saves no memory of the device alone."""
        if self.model.has_adapters:
            return "with --lora-rank: blocks have no gradients but those of their adapters"
        return (
            None if shards > 1 or self.memory.offload_gradients else "without --offload-gradients"
        )

    def why_no_mirrors(self) -> str | None:
        """Why --mirror-weights does nothing, also with several shards; None if this option does
        something."""
        if not self.parallel.memcpy_all_gather:
            return "without --memcpy-all-gather"
        if not self.parallel.shard_weights:
            return "without --shard-weights"
        if self.parallel.p2p == "on":
            return "with --p2p on"
        if self.gathered is None:
            return "without --persistent-quants"
        _, on_host = self.gathered
        coded = self.precision.is_fp8 and not self.model.freezes_model
        return ("with --offload-quants" if coded else "with --offload-master") if on_host else None
