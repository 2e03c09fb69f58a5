"""`llmq train`: makes or plans a run, also in several processes that an MPI launcher has started.
Two more commands train by themselves: `llmq verify` and `llmq demo`."""

import contextlib
import os
import shlex
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from llmq.base.errors import ConfigError, LlmqError, keep_warnings, status_of, taken_warnings
from llmq.base.signals import Interrupted, OutOfTime
from llmq.base.stopwatch import START
from llmq.commands.common import (
    ConfigFile,
    Device,
    Json,
    Reserve,
    SaveConfig,
    load_run,
    one_line,
    option,
    save_config,
    size_of,
    train_options,
)
from llmq.options.options_io import config_of, fields_of, layers_of
from llmq.runtime.world import World, launched, refuse_several


@contextlib.contextmanager
def joined() -> Iterator[World]:
    """Yield the world of the processes that a launcher has started together with this process.

    Only the first process writes to standard output. An error that ends one process ends all
    processes, with the error's status. The first process prints an error that all processes have; a
    single process prints its own error.
    """
    if launched() == 1:
        yield World()
        return
    from llmq.runtime.mpi import join

    world = join()
    with contextlib.ExitStack() as stack:
        if not world.first:
            keep_warnings()
            null = stack.enter_context(open(os.devnull, "w"))
            stack.enter_context(contextlib.redirect_stdout(null))
        try:
            yield world
            world.gather(None)  # wait until all processes have done their work
        except (Interrupted, OutOfTime):
            world.gather(None)
            raise
        except SystemExit:
            raise
        except BaseException as error:
            if not getattr(error, "agreed", False):
                _tell(world, error)
                world.mpi.abort(status_of(error))
            if not world.first:  # MPI waits at the end for the first process's message
                raise SystemExit(status_of(error)) from None
            raise
        finally:
            world.mpi.close()


def _tell(world: World, error: BaseException) -> None:
    """Print an error that other processes may not have, after this process's warnings."""
    for line in taken_warnings() if not world.first else []:
        print(f"warning: {line}", file=sys.stderr)
    if status_of(error) == 1:
        traceback.print_exception(error)
    text = one_line(error)
    where = "" if world.machine in text else f"{world.process_name(world.index)}: "
    details = error.details if isinstance(error, LlmqError) else ()
    print("\n".join([f"error: {where}{text}", *details]), file=sys.stderr, flush=True)


@train_options
def train(
    given: dict[str, Any],
    config_file: ConfigFile = None,
    save: SaveConfig = None,
    dry_run: option(bool, "Plan the memory, print it and exit.", "--dry-run") = False,
    auto: option(
        bool,
        "Choose micro-batch, recomputation, offloading and sharding for this machine; "
        "what is given stays, micro-batch times accumulation too.",
        "--auto",
    ) = False,
    reserve: Reserve = None,
    restarts: option(
        int,
        "Start the run again from its newest good checkpoint, up to so many times, when a "
        "GPU, the driver or the process has crashed.",
        metavar="N",
        min=0,
    ) = 0,
) -> None:
    """Train a model, or continue a run.

    llmq train --model Qwen/Qwen2.5-0.5B --train-file data/talks --name talks
    """
    if restarts > 0:
        raise typer.Exit(_restarted(given, config_file, dry_run, restarts))
    if auto:
        refuse_several("--auto", "let `llmq plan --fit` choose the options beforehand")
    if dry_run:
        refuse_several("--dry-run", "use `llmq plan`")
    with joined() as world:
        _train(world, given, config_file, save, dry_run, auto, reserve)


def _restarted(
    given: dict[str, Any], config_file: Path | None, dry_run: bool, restarts: int
) -> int:
    """Run with --restarts; return the exit status of the last attempt."""
    from llmq.run.restarts import supervise

    refuse_several("--restarts", "let the job's script start it again, with --continue")
    if dry_run:
        raise ConfigError("--restarts: a plan is not started again: leave out --dry-run")
    if config_file is not None and config_file.exists() and not config_file.is_file():
        raise ConfigError(f"--restarts: '{config_file}' cannot be read again: give a file")
    layers = layers_of(given, config_file)
    values, inherited = layers[0] | layers[1], {}
    if values.get("continue_from") is not None:
        from llmq.run.resume import inherited_options

        inherited = inherited_options(values)
    config = config_of(layers, inherited)
    arguments = sys.argv[1:] if sys.argv[1:2] == ["train"] else ["train", *sys.argv[1:]]
    return supervise([sys.executable, "-m", "llmq", *arguments], config, restarts)


def _train(
    world: World,
    given: dict[str, Any],
    config_file: Path | None,
    save: Path | None,
    dry_run: bool,
    auto: bool,
    reserve: str | None,
) -> None:
    if reserve is not None and not auto:
        raise ConfigError("--reserve: needs --auto; use --memory-limit to bound a run without it")
    config, model, model_dir, fields = load_run(
        given, config_file, trains=True, weights=not dry_run, world=world
    )
    if config.has_adapters and config.from_scratch and not dry_run:
        raise ConfigError(
            "--lora-rank: adapters need a trained model, and --from-scratch has random weights: "
            "give the directory or the repository of one as --model"
        )
    if world.several:
        world.mpi.start_heartbeat(config.watchdog)
    argv = sys.argv
    if auto:
        from llmq.options.option_file import command_line
        from llmq.plan.fit import choose

        config = choose(config, model, fields, size_of("--reserve", reserve, least=0))
        argv = command_line(config)
    world.on_first(lambda: save_config(save, config))
    if dry_run:
        from llmq.plan.report import run_plan

        run_plan(config, model)
        return
    with START.part("loading modules"):
        from llmq.run.summary import next_commands
        from llmq.run.training import run_training

    run_training(config, model, model_dir, argv, world)
    plot = f"  llmq plot {shlex.quote(config.name)}"
    print("\n".join(["Next:", *next_commands(config, base=config.model), plot]))


@train_options
def verify(
    given: dict[str, Any],
    config_file: ConfigFile = None,
    save: SaveConfig = None,
    verify_steps: option(int, "Optimizer steps of each run.", min=1) = 10,
    synthetic: option(bool, "Random tokens instead of token files.", "--synthetic") = False,
    json: Json = False,
) -> int:
    """Check that recomputation and offloading change no bit: two runs, exit status 0 if equal.

    llmq verify --model tiny --from-scratch --synthetic --recompute-block
    """
    config, model, model_dir, _ = load_run(given, config_file, trains=not synthetic)
    save_config(save, config)
    from llmq.bench.verify import run_verify

    options = {"steps": verify_steps, "synthetic": synthetic, "json": json}
    options["given"] = fields_of(layers_of(given))  # the file may belong to a run
    return 0 if run_verify(config, model, model_dir, **options) else 1


def demo(
    out: option(Path, "Directory of everything it writes.") = Path("demo"),
    device: Device = "auto",
    steps: option(int | None, "Optimizer steps.", min=1) = None,
    resume: option(bool, "Go on where the last demo was stopped.", "--continue") = False,
) -> None:
    """Tokenize a small text, train a tiny model on it, plot the loss and sample from it.

    llmq demo
    """
    from llmq.run.demo import run_demo

    run_demo(out, device, steps, resume)
