"""The lines of a run before its first step: options, machine, data, memory."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from llmq.base.dtypes import MIB
from llmq.base.errors import warn
from llmq.base.tier import TIERS
from llmq.checkpoint.store import checkpoint_step
from llmq.comm.links import LinkTable
from llmq.data.identity import read_manifest
from llmq.data.loader import DataLoader
from llmq.data.token_shards import duplicates_line, gaps
from llmq.options.conditions import why_no_mirrors
from llmq.options.options import TrainConfig
from llmq.options.options_io import MODEL_ROWS, option_rows
from llmq.plan.memory import allocator_rows, allocator_table, needed_bytes
from llmq.plan.sol import peaks
from llmq.run.metrics import Reporter
from llmq.run.model_of_run import lost_tokenizer, unknown_tokenizer
from llmq.run.monitor import SpeedOfLight, measured_peak, system_lines, system_record
from llmq.run.trainer import Trainer
from llmq.runtime.gpu_info import gpu_info
from llmq.runtime.host_usage import host_memory
from llmq.runtime.mesh import World
from llmq.runtime.nvml import NvmlGpu
from llmq.runtime.processes import processes

Gpus = Sequence[NvmlGpu | None]
"""By rank; None where there is nothing to read."""
_FEW_STEPS = 20  # of a run whose epochs say how many
_LITTLE = 0.05  # of an epoch's sequences, which may be left out without a word


def check_data(trainer: Trainer) -> None:
    """Open the token files, which checks them, and see that there is enough for the run."""
    loader, _ = trainer.train_loader, trainer.eval_loaders
    if trainer.steps_per_epoch == 0:
        trainer.advance_epoch_if_needed()
    _ = trainer.total_steps  # compared with --cooldown
    separator, layout = trainer.config.document_separator, loader.data.layout
    loaders = [loader, *trainer.eval_loaders]
    if layout.needs_documents and separator and not any(one.data.scanned for one in loaders):
        warn([f"--document-separator {separator} has no effect: all files have a .docs file"])
    if loader.unused_files:
        ranks = trainer.world_size
        packs = loader.data.layout.packs or loader.data.layout.weights is not None
        each = f"{ranks} sequences, one for each GPU" if ranks > 1 and not packs else "one sequence"
        warn(
            [
                f"--train-file: {loader.unused_files} of {len(loader.files)} files are never used: "
                f"they have less than {each}"
            ]
        )


def announce_options(
    trainer: Trainer, reporter: Reporter, argv: list[str], checkpoint: Path | None
) -> None:
    """[Options], and their records. checkpoint: that the run goes on from."""
    resumed_at = 0 if checkpoint is None else checkpoint_step(checkpoint)
    run, world = trainer.run.record(), trainer.machine.world
    several = len(world.counts) > 1
    where = {"machines": [world.machines[p] for p in world.processes]} if several else {}
    reporter.log.write("cmd", 0, run=run, cmd=argv, resumed_at=resumed_at, **where)
    config = trainer.config
    if config.has_adapters:
        reporter.message(
            f"Adapters of rank {config.lora_rank}, alpha {config.lora_alpha:g}, scaling "
            f"{config.lora_scale:g}; learning rate {config.learning_rate:g}"
        )
    rows = option_rows(
        trainer.config,
        trainer.model,
        world_size=trainer.world_size,
        steps_per_epoch=trainer.steps_per_epoch,
        total_steps=trainer.total_steps,
    )
    usual = dict(option_rows(TrainConfig().normalized(), trainer.model))
    reporter.options(rows, {n: v for n, v in usual.items() if n not in MODEL_ROWS})


def announce_machine(
    trainer: Trainer, reporter: Reporter, gpus: Gpus, light: SpeedOfLight | None
) -> None:
    """[System r], [Links], [Speed of Light], and their records."""
    if trainer.dev.kind == "cuda":
        for rank, record in enumerate(_system_records(trainer, gpus)):
            reporter.block(f"System {rank}", system_lines(record))
            reporter.log.write("gpu-model", 0, rank=rank, **record)
    else:
        available, total = (size // MIB for size in host_memory())
        lines = [f"  Device 0: {trainer.dev.spec.name}"]
        if trainer.world_size > 1:
            lines.append(f"  Ranks: {_ranks_line(trainer.machine.world)}")
        reporter.block("System 0", [*lines, f"  Memory: {total - available} MiB / {total} MiB"])
    if trainer.machine.note:
        reporter.message(trainer.machine.note)
    if trainer.ranks.links is not None:
        reporter.links(trainer.ranks.links)
        advice = about_mirrors(trainer.config, trainer.ranks.links)
        if advice is not None:
            reporter.message(advice)
    if light is not None:
        peak = trainer.ranks.run_first("timing a product", lambda rank: measured_peak(rank.dev))
        reporter.block("Speed of Light", light.lines(peak))
        reporter.log.write("sol", 0, rank=0, **light.record())
    elif trainer.dev.kind == "cuda" and peaks(trainer.dev.spec.name) is None:
        reporter.message(
            f"No speed of light: of {trainer.dev.spec.name} the peak is not known "
            "(llmq/options/cards.py)"
        )


def _ranks_line(world: World) -> str:
    if not world.several:
        return f"{world.size} threads"
    return f"{world.size}, in {len(world.counts)} processes on {world.num_machines} machines"


def about_mirrors(config: TrainConfig, links: LinkTable) -> str | None:
    """The advice of the links for or against --mirror-weights; None where it is as it should be."""
    if why_no_mirrors(config) is not None or config.mirror_weights == links.has_staged:
        return None
    if links.has_staged:
        return "Weights pass through host memory: faster with --mirror-weights, if there is enough."
    return "--mirror-weights takes host memory for nothing: every GPU can copy to every other one."


def _system_records(trainer: Trainer, gpus: Gpus) -> list[dict]:
    """The system records of every rank's GPU."""
    infos = trainer.ranks.run("looking at the GPU", lambda rank: gpu_info(rank.dev.index))
    pairs = list(zip(infos, gpus, strict=True))
    if processes().count == 1:
        return [system_record(rank, *pair) for rank, pair in enumerate(pairs)]
    machine = {"machine": processes().machines[processes().index]}
    first = trainer.machine.world.base
    own = [system_record(first + i, *pair) | machine for i, pair in enumerate(pairs)]
    return [record for of_process in processes().gather(own) for record in of_process]


def announce_data(
    trainer: Trainer, reporter: Reporter, named: Mapping[str, Sequence[DataLoader]]
) -> None:
    """[Dataset], and its records. named: validations with a name, by rank."""
    validation = {"eval": trainer.eval_loader} if trainer.config.validates else {}
    loaders = {"train": trainer.train_loader} | validation
    loaders |= {f"eval-{name}": of_ranks[0] for name, of_ranks in named.items()}
    reporter.dataset(loaders)
    for line in gaps(file.path for loader in loaders.values() for file in loader.files):
        reporter.message(line)
    for name, loader in loaders.items():
        for line in loader.data.lines(name):
            reporter.message(line)
    for name, loader in loaders.items():
        if name != "train" and not (name == "eval" and trainer.config.splits):
            for line in _trained_on(trainer.train_loader, loader):
                reporter.message(f"WARNING: --eval-file: {line}")
    if (line := _left_over(trainer)) is not None:
        reporter.message(line)
    if trainer.config.splits:
        loader = trainer.eval_loader
        held = f"{loader.sequences(loader.batches_per_epoch)} sequences"
        if loader.data.layout.packs:
            held = f"{loader.data.documents} documents"
        reporter.message(f"Validation: {held} at the ends of the training files, never trained on")


def _trained_on(train: DataLoader, held_out: DataLoader) -> list[str]:
    """The validation files that are trained on: files themselves, and documents that are the
    same."""
    trained = [file.path.resolve() for file in train.files]
    paths = [file.path.resolve() for file in held_out.files]
    lines = [f"'{path}' is trained on, too" for path in paths if path in trained]
    folders = dict.fromkeys(path.parent for path in paths)
    both = [folder for folder in folders if any(folder == path.parent for path in trained)]
    return lines or [line for folder in both for line in duplicates_line(read_manifest(folder))]


def _left_over(trainer: Trainer) -> str | None:
    """The part of an epoch that is not trained on, because it fills no step; None for little, or no
    epoch."""
    loader, config = trainer.train_loader, trainer.config
    total = loader.data.sequences
    used = loader.sequences(trainer.steps_per_epoch * config.grad_accumulation)
    if total - used <= total * _LITTLE or trainer.total_steps < trainer.steps_per_epoch:
        return None
    each = config.batch_size * trainer.micro_batches
    return (
        f"WARNING: each epoch leaves out {total - used} of {total} sequences, which do not fill a "
        f"step of {each}: a smaller --grad-accumulation or --batch-size leaves out less"
    )


def announce_memory(
    trainer: Trainer, reporter: Reporter, gpus: Gpus, host_memory_before: int
) -> None:
    """[Allocator State] of rank 0, and its record.

    host_memory_before: bytes that were available before the trainer took its own.
    """
    usage = trainer.plan.usage
    others = _other_memory(trainer, gpus, host_memory_before)
    reporter.block("Allocator State", allocator_table(usage, others))
    reporter.log.write("allocator", 0, stats=allocator_rows(usage, others))
    if trainer.config.debug_log_allocations >= 0:
        reporter.block("Allocations", _allocations(trainer))


def _other_memory(trainer: Trainer, gpus: Gpus, host_memory_before: int) -> dict[str, int]:
    """The bytes of the device's memory that are not ours."""
    if trainer.dev.kind == "host":
        needed = needed_bytes(trainer.plan, trainer.dev.spec)
        available = host_memory_before // trainer.machine.world.ranks_here
        return {"Free": min(available, trainer.config.memory_limit or available) - needed}
    record = _system_records(trainer, gpus)[0]
    free, reserved = record["free"], record["reserved"]
    others = {"Free": free} | ({"Reserved": reserved} if reserved else {})
    # The driver's total leaves out what it has reserved.
    return others | {"Other": record["memory"] - free - trainer.plan.usage.device_bytes}


def _allocations(trainer: Trainer) -> list[str]:
    """Every allocation of at least --debug-log-allocations MiB."""
    least = trainer.config.debug_log_allocations * MIB
    labels = {name: "HOST" if tier.on_host else "GPU " for name, tier in TIERS.items()}
    return [
        f"{label}  {category:>15} - {tensor.name:>15}: {tensor.nbytes // MIB:4d} MiB"
        for place, label in labels.items()
        for category, tensor in trainer.dev.arenas[place].tensors
        if tensor.nbytes >= least
    ]


def announce_start(trainer: Trainer, reporter: Reporter, setup_seconds: float) -> None:
    """Announce the run that begins now."""
    steps, done = trainer.total_steps, trainer.steps_done
    epochs = trainer.config.epochs or steps / trainer.steps_per_epoch
    lost = lost_tokenizer(trainer.config, trainer.tokenizer_id, trainer.tokenizer)
    for note in (unknown_tokenizer(trainer.config), lost):
        if note is not None:
            reporter.message(note, done)
    if done < steps:
        reporter.message(f"Starting training for {steps} steps ({epochs:.2f} epochs in total)")
        if steps < _FEW_STEPS and trainer.config.steps < 0:
            reporter.message(
                f"WARNING: {steps} steps teach little: give more --epochs or data, or a smaller "
                "--grad-accumulation"
            )
        if done > 0:
            reporter.message(f"{done} of these steps are done already", done)
    else:
        reporter.message(
            f"Nothing left to train: the run has {steps} steps, {done} are done; raise --steps or "
            "--epochs to go on",
            done,
        )
    reporter.message(f"Setup took {setup_seconds:.0f} seconds", done)


def load_state(trainer: Trainer, reporter: Reporter, checkpoint: Path | None) -> None:
    """Load a checkpoint; without one the weights of --model, or new ones."""
    if checkpoint is not None:
        name = checkpoint.name.removeprefix("step_").removesuffix(".old")
        name = name.lstrip("0") or "0"  # of a step; it may also have been renamed
        with reporter.section(f"Loading checkpoint {name} from `{checkpoint.parent}`"):
            changed = trainer.load(checkpoint, new_data=trainer.config.new_data)
        for line in changed:
            reporter.message(line, trainer.steps_done)
    elif trainer.config.from_scratch:
        with reporter.section("Initializing model from scratch"):
            trainer.load_weights()
    else:
        with reporter.section(f"Loading model from `{trainer.model_dir}`"):
            trainer.load_weights()
    if trainer.config.scores_folder is not None:
        with reporter.section(f"Scores in `{trainer.config.scores_folder}`"):
            trainer.score_reference()
