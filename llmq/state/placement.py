"""The dtype and memory of all tensors of a slab, decided here and read by all other code.

The function `place` makes a `Placement` from a run's options and weight table, for weights,
gradients, moments, checkpoints, plans and warnings about options. The rules of options
(`options/rules.py`) say which options about memory have an effect.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from llmq.arch.model_config import ModelConfig
from llmq.base.dtypes import E4M3, F32, DType, parse_dtype
from llmq.base.errors import ConfigError
from llmq.base.tensor import TIERS
from llmq.formats import codes_of
from llmq.options.adapters import adapters_of
from llmq.options.groups.memory import MemoryOptions
from llmq.options.groups.model import ModelOptions
from llmq.options.groups.optim import OptimOptions
from llmq.options.options import StepOptions, TrainConfig
from llmq.options.weight_storage import WeightStorage
from llmq.runtime.mesh import Mesh
from llmq.state.params import CONSTANTS, LOOKED_UP, MAGNITUDES, Slab, trained_slabs, weight_table
from llmq.state.rules import kept, rule_class
from llmq.state.turns import still_blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class Store:
    """The dtype and memory of one kind of tensor of a slab. memory: name of a memory tier in TIERS.
    sharded: True if a rank keeps one of W shards, False if a rank keeps all elements. streamed:
    True if a slot on the device holds the whole slab only during its use; False if the whole slab
    stays there."""

    dtype: DType
    memory: str = "device"
    sharded: bool = False
    streamed: bool = False

    @property
    def on_host(self) -> bool:
        """Return True if the tensor is in host memory."""
        return TIERS[self.memory].on_host

    @property
    def is_scaled(self) -> bool:
        """Return True if moments of this dtype have scales."""
        return self.dtype == E4M3


@dataclass(frozen=True, slots=True, kw_only=True)
class SlabPlacement:
    """The stores of one slab, by kind of tensor; None for a kind that the slab does not have.

    trainable: True if the optimizer updates the slab. group: name of a set of slabs with the same
    optimizer settings. work: the weights that products read. base: the codes that store a frozen
    block (state/frozen.py); ranks gather sharded codes at each use. master: the shard that updates
    change, if the work weights do not contain this shard. part: a shard of streamed work weights in
    their dtype, if the master has another dtype. Without a part, each gather encodes the master in
    fp8. transposed: transposed codes; if streamed, all blocks share one set. mirror: a second copy
    of the gathered shard, which peers read. gradient: the sums of gradients. moments: the moments
    of the update rule, by name. by_matrix: True if the update rule works on whole matrices.
    """

    trainable: bool
    group: str
    work: Store
    base: Store | None = None
    master: Store | None = None
    part: Store | None = None
    transposed: Store | None = None
    mirror: Store | None = None
    gradient: Store | None = None
    moments: Mapping[str, Store] = field(default_factory=dict)
    by_matrix: bool = False

    @property
    def is_coded(self) -> bool:
        """Return True if products read codes that are made after every update."""
        return self.base is None and self.transposed is not None

    @property
    def decodes(self) -> bool:
        """Return True if work weights are decoded from the base's codes at each use."""
        return self.base is not None and self.base.dtype != self.work.dtype

    @property
    def decodes_in_place(self) -> bool:
        """Return True if work weights are decoded from codes that are whole on the device."""
        return self.decodes and not self.base.sharded and not self.base.on_host

    @property
    def source(self) -> Store | None:
        """Return the store of the shard from which ranks gather streamed work weights; None if no
        shard is kept."""
        if self.base is not None:
            return self.base if self.base.sharded else None
        return self.part or (None if self.is_coded else self.master)

    @property
    def keeps_codes(self) -> bool:
        """Return True if a rank keeps the codes of its shard from update to update."""
        return self.is_coded and (self.part is not None or not self.work.streamed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The placement of all slabs. slabs: the placement of a slab, by name. head: the store of fp8
    codes of the LM head's matrix, plain and transposed; None if the matrix has no codes."""

    slabs: Mapping[str, SlabPlacement]
    head: Store | None = None

    def __getitem__(self, name: str) -> SlabPlacement:
        return self.slabs[name]

    @property
    def gathers_from_host(self) -> bool:
        """Return True if ranks read the weights of other ranks in host memory."""
        streamed = [slab for slab in self.slabs.values() if slab.work.streamed]
        sources = [store for slab in streamed for store in (slab.source, slab.mirror) if store]
        return any(store.on_host for store in sources)

    def stays_whole(self, name: str) -> bool:
        """Return True if an update copies a slab's whole master from host memory to the device.
        This copy needs codes that are made from the master, and a slot of gradients with the
        master's dtype."""
        slab = self.slabs[name]
        sums = [other.gradient for other in self.slabs.values() if other.gradient]
        slots = {gradient.dtype for gradient in sums if gradient.streamed}
        return slab.keeps_codes and slab.master.on_host and slab.master.dtype in slots


# ------------------------------------------------------------------------------------------------
# Rules


def _memory(memory: MemoryOptions, option: str) -> str:
    """Return the memory tier of tensors that `option` offloads; option "": of tensors that no
    option offloads."""
    if not option or not getattr(memory, option):
        return "device"
    if option in memory.on_ssd:
        return "ssd"
    return "write_combined" if memory.write_combined else "pinned"


def _shard(memory: MemoryOptions, dtype: str, option: str) -> Store:
    return Store(dtype=parse_dtype(dtype), memory=_memory(memory, option), sharded=True)


def _source(storage: WeightStorage) -> Store | None:
    """Return the store from which ranks gather streamed blocks: SlabPlacement.source."""
    if storage.gathered is None:
        return None
    return _shard(storage.memory, *storage.gathered)


def mesh_of(options: TrainConfig, world_size: int, machines: int = 1, rank: int = 0) -> Mesh:
    """Return the mesh of a run's ranks, which are divided equally among machines. Raise ConfigError
    if ranks that share a sequence would be on several machines."""
    shards, context = options.shards(world_size, machines), options.context_parallel
    if world_size // machines % context:
        raise ConfigError(
            f"--context-parallel {context}: does not divide the {world_size // machines} GPUs of a "
            "machine, see --gpus"
        )
    return Mesh.of(world_size, rank, shards, context)


def table_of(options: ModelOptions, model: ModelConfig, shards: int = 1) -> tuple[Slab, ...]:
    """Return the weight table of a run, with its adapters. options: with defaults filled in."""
    return weight_table(model, shards, adapters_of(options))


def trains(options: ModelOptions, slab: Slab) -> bool:
    """Return True if a run updates this slab. A run with adapters updates only the slabs of
    adapters, and the slabs that --train names."""
    adapters = adapters_of(options)
    if options.only_scores or adapters is None:
        return not options.only_scores
    return slab.name in trained_slabs(adapters)


def trained_count(options: ModelOptions, model: ModelConfig) -> int:
    table = [slab for slab in table_of(options, model) if trains(options, slab)]
    return sum(p.count for slab in table for p in slab.params)


# ------------------------------------------------------------------------------------------------
# Placements


def place(
    options: StepOptions,
    table: tuple[Slab, ...],
    shards: int = 1,
    frozen: Collection[str] = (),
    step: int = 0,
) -> Placement:
    """Return the placement of all slabs in a step of a run. options: with defaults filled in.
    table: the weight table for this number of shards. frozen: names of slabs that are not trained,
    besides those that options freeze. A frozen slab has no gradient and no moments. A frozen slab
    has a master, in the model's dtype, only if fp8 codes are made from the master."""
    frozen = {*frozen, *still_blocks(options.optim, table, step)}
    storage = WeightStorage(options.model, options.precision, options.memory, options.parallel)
    slabs = {}
    for slab in table:
        if slab.is_block and storage.model.is_quantized:
            slabs[slab.name] = _place_base(storage, slab, shards)
            continue
        trainable = slab.name not in frozen and trains(storage.model, slab)
        slabs[slab.name] = _place_slab(storage, slab, shards, trainable=trainable)
        if trainable:
            slabs[slab.name] = _trained(storage, options.optim, slab, shards, slabs[slab.name])
    codes = codes_of(storage.precision, storage.precision.head_dtype)
    return Placement(slabs=slabs, head=None if codes is None else Store(dtype=codes))


def _place_slab(
    storage: WeightStorage, slab: Slab, shards: int, *, trainable: bool
) -> SlabPlacement:
    _, precision, memory, _ = storage
    dtype, differs = parse_dtype(precision.model_dtype), precision.own_master
    if slab.name in (MAGNITUDES, CONSTANTS):
        dtype, differs = F32, False
    coded = codes_of(precision, precision.matmul_dtype) if slab.is_block else None
    streams = slab.is_block and storage.streams(shards)
    updates_another = storage.has_masters(shards) if slab.is_block else differs
    gathers_master = trainable and not coded and not differs
    source = _source(storage) if streams else None
    if coded and source is not None and source.dtype is E4M3:
        source = replace(source, dtype=coded)
    master_dtype = precision.master_dtype if trainable else precision.model_dtype
    master = _shard(memory, master_dtype, "offload_master")
    rows_alone = slab.name == LOOKED_UP and not trainable and shards == 1
    memory_of_work = "pinned" if rows_alone else "device"
    return SlabPlacement(
        trainable=trainable,
        group=_group(slab),
        work=Store(dtype=coded or dtype, memory=memory_of_work, streamed=streams),
        master=master if coded or (trainable and updates_another) else None,
        part=None if gathers_master else source,
        transposed=coded and Store(dtype=coded, streamed=streams or not memory.keep_transposed),
        mirror=_mirror(storage, source, shards),
    )


def _mirror(storage: WeightStorage, source: Store | None, shards: int) -> Store | None:
    wanted = storage.parallel.mirror_weights and storage.why_no_mirrors() is None
    if source is None or shards == 1 or not wanted:
        return None
    return Store(dtype=source.dtype, memory="pinned", sharded=True)


def _place_base(storage: WeightStorage, slab: Slab, shards: int) -> SlabPlacement:
    """Return the placement of a frozen block whose matrices are stored as codes."""
    model, precision, memory, _ = storage
    streams, source = storage.streams(shards), _source(storage)
    base = source if streams else Store(dtype=source.dtype)
    codes = codes_of(precision, precision.matmul_dtype)
    if precision.matmul_dtype == model.base_dtype:
        codes = parse_dtype(model.base_dtype)
    dtype = codes or parse_dtype(precision.model_dtype)
    work = Store(dtype=dtype, streamed=streams or dtype != base.dtype)
    shared = work.streamed or not memory.keep_transposed
    return SlabPlacement(
        trainable=False,
        group=_group(slab),
        work=work,
        base=base,
        transposed=codes and Store(dtype=codes, streamed=shared),
        mirror=_mirror(storage, source if streams else None, shards),
    )


def _trained(
    storage: WeightStorage,
    optim: OptimOptions,
    slab: Slab,
    shards: int,
    placement: SlabPlacement,
) -> SlabPlacement:
    """Return `placement` with stores for gradients and moments."""
    memory = storage.memory
    divides = storage.parallel.shard_gradients and storage.why_gradients_stay(shards) is None
    streams, rule = slab.is_block and divides, rule_class(optim.optimizer)
    return replace(
        placement,
        gradient=Store(
            dtype=parse_dtype(storage.precision.grad_accum_dtype),
            memory=_memory(memory, "offload_gradients" if streams else ""),
            sharded=streams,
            streamed=streams,
        ),
        moments={
            m.name: Store(
                dtype=m.format(optim),
                memory=_memory(memory, m.offload),
                sharded=True,
            )
            for m in kept(optim, slab)
        },
        by_matrix=rule.by_matrix(slab),
    )


def _group(slab: Slab) -> str:
    """Return the name of the slab's set of optimizer settings. Only "matrices" have weight decay;
    --lora-plus changes the rate of "lora_b" alone."""
    if slab.name in ("lora_a", "lora_b"):
        return slab.name
    return "matrices" if any(param.decay for param in slab.params) else "vectors"


def resident(table: tuple[Slab, ...], dtype: DType) -> Placement:
    """Return the placement of weights that are only read, for sampling: all on the device, in
    `dtype` except for the constants."""
    return Placement(
        slabs={
            slab.name: SlabPlacement(
                trainable=False,
                group=_group(slab),
                work=Store(dtype=F32 if slab.name == CONSTANTS else dtype),
            )
            for slab in table
        }
    )
