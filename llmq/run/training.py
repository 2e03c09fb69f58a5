"""`llmq train`: sets up a run around its Trainer, and prints lines about options, machine, data and
memory before the first step."""

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path

from llmq.arch.model_config import ModelConfig
from llmq.base.callback import Callback
from llmq.base.dtypes import MIB
from llmq.base.errors import DataError, warn
from llmq.base.files import check_writable
from llmq.base.run_id import RunId
from llmq.base.stopwatch import START
from llmq.base.tensor import TIERS
from llmq.checkpoint.best import Best, EarlyStopping
from llmq.checkpoint.folder import check_shared
from llmq.checkpoint.store import checkpoint_step
from llmq.comm.links import LinkTable
from llmq.data.checksums import find_token_files
from llmq.data.identity import read_manifest
from llmq.data.loader import DataLoader
from llmq.model.losses import loss_class
from llmq.options.cards import Card
from llmq.options.conditions import Length, Ranks
from llmq.options.groups.data import held_out
from llmq.options.options import TrainConfig
from llmq.options.options_io import MODEL_ROWS, option_rows
from llmq.options.rules import RULES
from llmq.plan.checks import planner_of
from llmq.plan.memory import (
    SsdUse,
    allocator_rows,
    allocator_table,
    checkpoint_bytes,
    memory_limit,
    needed_bytes,
)
from llmq.plan.sol import peaks
from llmq.report.json_log import JsonLog
from llmq.report.live import view_of_run
from llmq.report.sinks import check_libraries, sinks_of_run
from llmq.report.views import PlainView
from llmq.run.agreement import check_token_files
from llmq.run.diagnose import AbsMaxes
from llmq.run.evaluations import EvaluationInputs, Evaluations, read_evaluation_inputs
from llmq.run.guard import Guard
from llmq.run.health import HealthMonitor
from llmq.run.lifecycle import Lifecycle
from llmq.run.loop import Loop
from llmq.run.metrics import Reporter
from llmq.run.model_of_run import agreed_tokenizer, lost_tokenizer, unknown_tokenizer
from llmq.run.monitor import (
    IdleExperts,
    SpeedOfLight,
    StepReports,
    TimeBreakdown,
    measured_peak,
    speed_of_light,
    system_lines,
    system_record,
)
from llmq.run.requests import Requests
from llmq.run.resume import Stage, fork_lines, left_stages
from llmq.run.rollouts import Rollouts
from llmq.run.run_paths import (
    ExistingOutput,
    clear_places,
    locked_places,
    outputs_of_others,
    run_id,
)
from llmq.run.sensors import Sensing
from llmq.run.summary import five_lines
from llmq.run.trainer import Trainer
from llmq.runtime.gpu_info import gpu_info
from llmq.runtime.host_usage import available_host_memory, host_memory
from llmq.runtime.nvml import NvmlGpu
from llmq.runtime.world import World
from llmq.text.token_shards import duplicates_line, gaps

Gpus = Sequence[NvmlGpu | None]
"""The GPU of each rank; None for a rank without readable sensors."""
_FEW_STEPS = 20  # a run of --epochs with fewer steps gets a warning
_LITTLE = 0.05  # fraction of an epoch's sequences that may be left out without a warning


def check_data(trainer: Trainer) -> None:
    """Open and check the token files; raise DataError if an epoch has no step."""
    loader, _ = trainer.train_loader, trainer.eval_loaders
    if trainer.steps_per_epoch == 0:
        trainer.advance_epoch_if_needed()
    _ = trainer.total_steps  # checks --cooldown
    separator, layout = trainer.config.document_separator, loader.data.layout
    loaders = [loader, *trainer.eval_loaders]
    if layout.needs_documents and separator and not any(one.data.scanned for one in loaders):
        warn(f"--document-separator {separator} has no effect: all files have a .docs file")
    if loader.unused_files:
        ranks = trainer.world_size
        in_turn = layout.data_order == "llmq"
        each = f"{ranks} sequences, one for each GPU" if ranks > 1 and in_turn else "one sequence"
        warn(
            f"--train-file: {loader.unused_files} of {len(loader.files)} files are never used: "
            f"they have less than {each}"
        )


def announce_run(
    trainer: Trainer, reporter: Reporter, argv: list[str], checkpoint: Path | None, *, told: bool
) -> None:
    """Print a run's five summary lines, and log the record of its command. checkpoint: the
    checkpoint from which the run continues, or None. told: True if the lines were printed
    before."""
    resumed_at = 0 if checkpoint is None else checkpoint_step(checkpoint)
    run, world, where = trainer.run.record(), trainer.world, {}
    if world.several:
        where = {"machines": [world.machines[process] for process in world.processes]}
    reporter.log.write("cmd", 0, run=run, cmd=argv, resumed_at=resumed_at, **where)
    if told:
        return
    config, spec = trainer.config, trainer.dev.spec
    card, step = _prediction(trainer)
    data = "samples of the model"
    if trainer.samples is None:
        loader = trainer.train_loader
        count = f"{len(loader.files)} file{'s' * (len(loader.files) > 1)}"
        data = f"{loader.total_tokens:,} tokens of {count}"
    if config.validates and not config.splits:
        data += f", {trainer.eval_loader.total_tokens:,} held out"
    for line in five_lines(
        config,
        trainer.model,
        spec,
        data=data,
        steps=trainer.total_steps,
        world_size=trainer.world_size,
        device_bytes=needed_bytes(trainer.plan, spec),
        limit=memory_limit(config, trainer.machine).device,
        host_bytes=0 if trainer.dev.kind == "host" else trainer.plan.host_bytes,
        seconds=step and step * (trainer.total_steps - resumed_at),
        error=card and card.error_of(trainer.world_size),
        ssd=(use := SsdUse.of(trainer.plan)) and use.words(step),
    ):
        reporter.message(line)
    reporter.view.line("")


def _prediction(trainer: Trainer) -> tuple[Card | None, float | None]:
    """Return the performance card of this run's GPUs and the predicted seconds of a step. Returns
    (None, None) on the CPU and in `llmq rl`."""
    if trainer.dev.kind != "cuda" or trainer.samples is not None:
        return None, None
    planner = planner_of(trainer.model, trainer.machine, trainer.ranks.backend)
    return planner.card, planner.estimate(trainer.config).time.total


def announce_options(trainer: Trainer, reporter: Reporter) -> None:
    """Print [Options], and log all options. The console shows only options that differ from their
    defaults, and the model's sizes only with --log-format llmq."""
    rows = option_rows(
        trainer.config,
        trainer.model,
        world_size=trainer.world_size,
        steps_per_epoch=trainer.steps_per_epoch,
        total_steps=trainer.total_steps,
    )
    usual = dict(option_rows(TrainConfig().normalized(), trainer.model))
    if trainer.config.log_format == "llmq":
        usual = {name: value for name, value in usual.items() if name not in MODEL_ROWS}
    reporter.options(rows, usual)


def announce_machine(
    trainer: Trainer, reporter: Reporter, gpus: Gpus, light: SpeedOfLight | None
) -> None:
    """Print [System r], [Links] and [Speed of Light], and log their records."""
    if trainer.dev.kind == "cuda":
        for rank, record in enumerate(_system_records(trainer, gpus)):
            reporter.block(f"System {rank}", system_lines(record))
            reporter.log.write("gpu-model", 0, rank=rank, **record)
    else:
        available, total = (size // MIB for size in host_memory())
        lines = [f"  Device 0: {trainer.dev.spec.name}"]
        if trainer.world_size > 1:
            world = trainer.world
            processes = f", in {len(world.counts)} processes on {world.num_machines} machines"
            lines.append(f"  Ranks: {world.size}{processes if world.several else ' threads'}")
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


def about_mirrors(config: TrainConfig, links: LinkTable) -> str | None:
    """Return advice for or against --mirror-weights on `links`; None if the option fits."""
    if (
        config.weight_storage.why_no_mirrors() is not None
        or config.mirror_weights == links.has_staged
    ):
        return None
    if links.has_staged:
        return "Weights pass through host memory: faster with --mirror-weights, if there is enough."
    return "--mirror-weights takes host memory for nothing: every GPU can copy to every other one."


def _system_records(trainer: Trainer, gpus: Gpus) -> list[dict]:
    """Return the fields of the `gpu-model` log record of every rank's GPU, over all processes."""
    infos = trainer.ranks.run("looking at the GPU", lambda rank: gpu_info(rank.dev.index))
    world = trainer.world
    machine = {"machine": world.machine} if world.several else {}
    pairs = enumerate(zip(infos, gpus, strict=True), world.base)
    own = [system_record(rank, *pair) | machine for rank, pair in pairs]
    return [record for of_process in world.gather(own) for record in of_process]


def announce_data(
    trainer: Trainer, reporter: Reporter, named: Mapping[str, Sequence[DataLoader]]
) -> None:
    """Print [Dataset], and log its records. named: loaders of each named validation, one loader for
    each rank of this process."""
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
        for line in _not_validated_on(trainer.train_loader):
            reporter.message(line)


def _not_validated_on(train: DataLoader) -> list[str]:
    """Return warnings about training folders with validation files from `llmq tokenize` that this
    run does not read."""
    paths = [file.path for file in train.files]
    folders = dict.fromkeys(path.parent for path in paths if read_manifest(path.parent))
    return [
        f"WARNING: --train-file: '{folder}' has a validation part of its own, which is not read: "
        f"give --train-file {folder}, or --eval-file {pattern}"
        for folder in folders
        if (pattern := held_out(str(folder))) and {*find_token_files(pattern)}.isdisjoint(paths)
    ]


def _trained_on(train: DataLoader, held_out: DataLoader) -> list[str]:
    """Return lines about validation files that are also training files. If no validation file is a
    training file, return lines about documents that training and validation files of a folder
    share."""
    trained = [file.path.resolve() for file in train.files]
    paths = [file.path.resolve() for file in held_out.files]
    lines = [f"'{path}' is trained on, too" for path in paths if path in trained]
    folders = dict.fromkeys(path.parent for path in paths)
    both = [folder for folder in folders if any(folder == path.parent for path in trained)]
    return lines or [line for folder in both for line in duplicates_line(read_manifest(folder))]


def _left_over(trainer: Trainer) -> str | None:
    """Return a warning about an epoch's last sequences, which fill no step. Returns None if few
    sequences are left, or if the run is shorter than an epoch."""
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
    """Print and log rank 0's [Allocator State]. host_memory_before: bytes that were available on
    the host before the trainer allocated."""
    usage = trainer.plan.usage
    others = _other_memory(trainer, gpus, host_memory_before)
    reporter.block("Allocator State", allocator_table(usage, others))
    reporter.log.write("allocator", 0, stats=allocator_rows(usage, others))
    if trainer.config.debug_log_allocations >= 0:
        reporter.block("Allocations", _allocations(trainer))


def _other_memory(trainer: Trainer, gpus: Gpus, host_memory_before: int) -> dict[str, int]:
    """Return bytes of device memory outside this run's arenas, by name: Free, Reserved, Other."""
    if trainer.dev.kind == "host":
        needed = needed_bytes(trainer.plan, trainer.dev.spec)
        available = host_memory_before // trainer.world.ranks_here
        return {"Free": min(available, trainer.config.memory_limit or available) - needed}
    record = _system_records(trainer, gpus)[0]
    free, reserved = record["free"], record["reserved"]
    others = {"Free": free} | ({"Reserved": reserved} if reserved else {})
    # Reserved memory is no part of the driver's total.
    return others | {"Other": record["memory"] - free - trainer.plan.usage.device_bytes}


def _allocations(trainer: Trainer) -> list[str]:
    """Return a line for every allocation of at least --debug-log-allocations MiB."""
    least = trainer.config.debug_log_allocations * MIB
    labels = {name: {"device": "GPU ", "ssd": "SSD "}.get(name, "HOST") for name in TIERS}
    return [
        f"{label}  {category:>15} - {tensor.name:>15}: {tensor.nbytes // MIB:4d} MiB"
        for place, label in labels.items()
        for category, tensor in trainer.dev.arenas[place].tensors
        if tensor.nbytes >= least
    ]


def announce_start(
    trainer: Trainer, reporter: Reporter, setup_seconds: float, stop: str | None
) -> None:
    """Print the lines directly before the first step. setup_seconds: duration of the setup. stop:
    why the run makes no steps (see Loop.stopped), or None."""
    steps, done = trainer.total_steps, trainer.steps_done
    epochs = trainer.config.epochs or steps / trainer.steps_per_epoch
    lost = lost_tokenizer(trainer.config, trainer.tokenizer_id, trainer.tokenizer)
    for note in (unknown_tokenizer(trainer.config), lost):
        if note is not None:
            reporter.message(note, done)
    if stop is not None:
        line = f"Stopped early before: {stop}; a larger --stop-after, or 0, goes on"
        reporter.message(line, done)
    elif done < steps:
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
    trainer.shares.announce(lambda line: reporter.message(line, trainer.steps_done))
    reporter.message(f"Setup took {setup_seconds:.0f} seconds", done)
    reporter.seconds("to here", START.take(), done)


def load_state(trainer: Trainer, reporter: Reporter, checkpoint: Path | None) -> None:
    """Load the checkpoint; if None, load the weights of --model, or make random weights."""
    if checkpoint is not None:
        name = checkpoint.name.removeprefix("step_").removesuffix(".old")
        name = name.lstrip("0") or "0"  # a step's number, unless the user has renamed the folder
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


def score_data(trainer: Trainer, reporter: Reporter) -> None:
    """Score the data with the reference model, if the loss reads scores."""
    if trainer.config.scores_folder is not None and trainer.samples is None:
        with reporter.section(f"Scores in `{trainer.config.scores_folder}`"):
            trainer.score_reference()


# ------------------------------------------------------------------------------------------------


def run_training(
    config: TrainConfig,
    model: ModelConfig,
    model_dir: Path | None,
    argv: list[str],
    world: World = World(),
    callbacks: Sequence[Callback] = (),
    samples: Callable[[Trainer], Rollouts] | None = None,
    *,
    told: bool = False,
) -> None:
    """Train; raise Interrupted, after saving a checkpoint, if a signal ended the run. world: the
    run's processes, which all call this function. callbacks: the user's, called after the run's
    own; `on_end` is called only if the run has begun. samples: function that makes the source of
    training data that replaces token files. told: see begun. Raises LlmqError before the first step
    for paths that cannot be written or belong to another run, a missing checkpoint, unsuitable data
    or too little memory."""
    world.on_first(lambda: check_libraries(config))
    world.on_first(lambda: check_writable("--out-dir", config.out_dir))
    world.each(lambda: check_writable("--checkpoint-dir", config.checkpoint_dir))
    with ExitStack() as stack:
        check_shared(config.checkpoint_dir, world)
        world.on_first(lambda: stack.enter_context(locked_places(config)))
        checkpoint = world.each(lambda: Lifecycle.resume_from(config, world))
        run = world.on_first(lambda: run_id(config, checkpoint))
        start = time.monotonic()
        stage, *others = world.each(lambda: left_stages(config, model, checkpoint, world))
        parts = (callbacks, samples, told)
        call = partial(_run_locked, model, model_dir, argv, run, start, world, *parts)
        over = call(stage, checkpoint)
        for stage in (other.following() for other in others):
            if over:  # an early stop has ended the run
                break
            checkpoint = world.each(partial(Lifecycle.resume_from, stage.config, world))
            over = call(stage, checkpoint)


def _run_locked(
    model: ModelConfig,
    model_dir: Path | None,
    argv: list[str],
    identity: RunId,
    start: float,
    world: World,
    callbacks: Sequence[Callback],
    samples: Callable[[Trainer], Rollouts] | None,
    told: bool,
    stage: Stage,
    checkpoint: Path | None,
) -> bool:
    """Run one stage of run_training, with the output folders locked. Returns True if this stage
    ends the run. start: time.monotonic() at the run's start. Other arguments: see run_training."""
    config = stage.config
    strangers = world.on_first(lambda: outputs_of_others(config, identity, model_dir, checkpoint))
    before = available_host_memory()
    tokenizer = world.each(lambda: agreed_tokenizer(config, model_dir, checkpoint))
    with Trainer.from_config(config, model, model_dir, tokenizer, world) as trainer:
        trainer.run = identity
        if samples is not None:
            samples(trainer)
        told = told or stage.first > 0
        with begun(
            trainer, argv, stage, checkpoint, strangers, callbacks, start, before, told=told
        ) as loop:
            loop.run()
        if not loop.is_last:  # the user's callbacks stay for the next stage
            trainer.callbacks = [c for c in trainer.callbacks if c not in callbacks]
    return loop.is_last


@contextmanager
def begun(
    trainer: Trainer,
    argv: list[str],
    stage: Stage,
    checkpoint: Path | None,
    strangers: list[ExistingOutput],
    callbacks: Sequence[Callback],
    start: float,
    host_memory_before: int,
    *,
    loads: bool = True,
    told: bool = False,
) -> Iterator[Loop]:
    """Begin a run: open its log, print its first lines, load first weights. Yields the run's loop.
    checkpoint: the checkpoint from which the run continues. strangers: result of
    `outputs_of_others`. callbacks: the user's, called after the run's own. start: time.monotonic()
    at the run's start. host_memory_before: see announce_memory. loads: False if the trainer has its
    weights already. told: True if the five lines of summary were printed before."""
    config, world = trainer.config, trainer.world
    if trainer.samples is None:
        world.each(lambda: check_data(trainer))
    loaders = trainer.train_loaders if trainer.samples is None else []
    with closing(world.each(lambda: read_evaluation_inputs(trainer))) as material:
        check_token_files([*loaders, *trainer.eval_loaders, *material.loaders], world)
        best = world.each(
            lambda: Best(
                config.keep_best, config.checkpoint_dir, material.metrics, config.stop_after, world
            )
        )
        on_cpu, machines = trainer.dev.kind == "host", trainer.world.num_machines
        warn(*RULES.idle(config, ranks=Ranks(trainer.world_size, machines, on_cpu)))
        length = Length(trainer.world_size, trainer.total_steps, trainer.steps_per_epoch)
        warn(*RULES.idle(config, length=length))
        moved = world.on_first(lambda: clear_places(config, checkpoint, strangers))
        path = config.log_file if world.first else Path(os.devnull)
        goes_on = config.continue_from is not None or checkpoint is not None
        log = world.each(lambda: JsonLog(path, append=goes_on))
        reporter = Reporter(log, PlainView(), trainer.total_steps)
        sinks = sinks_of_run(config, log, reporter.message) if world.first else []
        log.listeners, trainer.callbacks = [*sinks, *callbacks], []
        run = _Run(trainer, reporter, material, best, start, stage)
        try:
            notes = moved + fork_lines(trainer.run, checkpoint)
            run.begin(argv, checkpoint, notes, host_memory_before, loads=loads, told=told)
            steps = (trainer.steps_done, trainer.total_steps)
            if not world.several:  # an MPI launcher may give the first process a false terminal
                brief = config.log_format != "llmq"
                reporter.view = view_of_run(*steps, run.sensing.panel, path, brief)
            try:
                yield run.loop
            except DataError:  # in the middle of the data: save the present weights
                if trainer.steps_done > run.loop.first:
                    run.loop.save_last(required=False)
                raise
        finally:
            run.loop.lifecycle.close(give_up=isinstance(sys.exception(), KeyboardInterrupt))


class _Run:
    """Builds the objects of a run: guard, checkpoints, evaluations, sensors and the loop."""

    def __init__(
        self,
        trainer: Trainer,
        reporter: Reporter,
        material: EvaluationInputs,
        best: Best,
        start: float,
        stage: Stage,
    ):
        """start: time.monotonic() at the run's start. stage: gives the loop's first and last step.
        material: inputs of evaluations."""
        self.trainer, self.reporter, self.config = trainer, reporter, trainer.config
        self.material, self.best, self.start = material, best, start
        config, world = self.config, trainer.world
        size = checkpoint_bytes(config, trainer.model, trainer.plan.placement)
        requests = Requests(config, size, start, world)
        evaluations = Evaluations(trainer, reporter, material, requests.seen_here)
        guard = Guard(config, loss_class(config).guessing(config, trainer.model.outputs))
        lifecycle = Lifecycle(trainer, reporter, best, guard, stage.first)
        health = HealthMonitor(trainer, reporter, guard, lifecycle)
        self.sensing = Sensing(trainer.ranks.devices, world, reporter, config.log_gpu_util)
        self.loop = Loop(trainer, reporter, evaluations, health, lifecycle, requests, stage.stop)

    def begin(
        self,
        argv: list[str],
        checkpoint: Path | None,
        notes: list[str],
        host_memory_before: int,
        *,
        loads: bool,
        told: bool,
    ) -> None:
        """Print the lines about the run and its machine; load weights from the checkpoint, from the
        model's directory, or from scratch. notes: lines about the run's output folders.
        host_memory_before, loads, told: see begun."""
        config, trainer, reporter = self.config, self.trainer, self.reporter
        every = config.debug_log_abs_max
        sol = speed_of_light(config, trainer.model, trainer.dev.spec.name, trainer.world_size)
        trainer.callbacks += [
            StepReports(trainer, reporter, sol),
            self.sensing,
            self.loop.requests,
            self.loop.health,
            EarlyStopping(self.best),
            IdleExperts(trainer, reporter),
            *([TimeBreakdown(trainer, reporter)] if config.debug_time_breakdown else []),
            *([AbsMaxes(trainer.ranks, reporter, every)] if every > 0 and config.is_fp8 else []),
            *reporter.log.listeners,
        ]
        announce_run(trainer, reporter, argv, checkpoint, told=told)
        for line in notes:
            reporter.message(line)
        announce_machine(trainer, reporter, self.sensing.sensors.sources, sol)
        if loads:
            load_state(trainer, reporter, checkpoint)
        score_data(trainer, reporter)
        if checkpoint is not None:
            self.loop.resume(checkpoint)
        if trainer.samples is None:
            announce_data(trainer, reporter, self.material.sets)
        else:
            trainer.samples.announce(reporter)
        announce_options(trainer, reporter)
        announce_memory(trainer, reporter, self.sensing.sensors.sources, host_memory_before)
        announce_start(trainer, reporter, time.monotonic() - self.start, self.loop.stopped)
