"""The commands of `llmq`: options -> config -> call.

Each command imports its implementation when it runs, so that --help answers at once.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from llmq import __version__
from llmq.base.errors import ConfigError, LlmqError, discard, warn
from llmq.base.signals import Interrupted, ending_children
from llmq.commands.cli_options import TrainCommand, train_options
from llmq.config.command_line import command_line
from llmq.config.model import ModelConfig
from llmq.config.option_types import parse_size
from llmq.config.options import OPTIONS, TrainConfig
from llmq.config.options_io import given_fields, make_config
from llmq.config.presets import model_warnings, resolve_model

app = typer.Typer(
    name="llmq",
    help="Train Qwen-, Llama- and GPT-2-class language models on one machine.",
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help="YAML or JSON with these options as keys."),
]


def _print_version(value: bool) -> None:
    if value:
        typer.echo(f"llmq {__version__}")
        raise typer.Exit()


@app.callback()
def _common(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print and exit."),
    ] = False,
) -> None:
    pass


def _checked(name: str, value: str) -> str:
    """A value for the option of TrainConfig of this name, as the other commands have it too."""
    converted = OPTIONS[name].convert(value)
    OPTIONS[name].check(converted)
    return converted


def _size(flag: str, value: str | None) -> int | None:
    """Bytes of an option that is not one of TrainConfig's."""
    try:
        size = None if value is None else parse_size(value)
    except ValueError as error:
        raise ConfigError(f"{flag}: {error}") from None
    if size == 0:
        raise ConfigError(f"{flag}: must be at least 1, got {value}")
    return size


def _load(given: dict[str, Any], file: Path | None) -> tuple[TrainConfig, ModelConfig, Path | None]:
    """Options and model of a run, checked; prints warnings."""
    config = make_config(given, file)
    model, model_dir = resolve_model(config.model, config.from_scratch)
    config.validate_with(model)
    warn(config.warnings() + config.model_warnings(model) + model_warnings(model_dir))
    return config, model, model_dir


@app.command(cls=TrainCommand)
@train_options
def train(
    given: dict[str, Any],
    config_file: ConfigFile = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Plan the memory, print it and exit.")
    ] = False,
    auto: Annotated[
        bool,
        typer.Option(
            "--auto",
            help="Choose micro-batch, recomputation, offloading and sharding for this machine; "
            "what is given stays, micro-batch times accumulation too.",
        ),
    ] = False,
) -> None:
    """Train a model, or continue to."""
    config, model, model_dir = _load(given, config_file)
    argv = sys.argv
    if auto:
        from llmq.commands.plan import choose

        fields = given_fields(given, config_file)
        config = choose(config, model, fields)
        argv = command_line(config, log_file="log_file" in fields)
    if dry_run:
        from llmq.commands.plan import run_plan

        run_plan(config, model)
        return
    from llmq.train.loop import run_training

    run_training(config, model, model_dir, argv)


@app.command(cls=TrainCommand)
@train_options
def plan(
    given: dict[str, Any],
    config_file: ConfigFile = None,
    gpu_memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Memory of one GPU to compare with, such as 16GiB."),
    ] = None,
    host_memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Host memory to compare with, for all GPUs together."),
    ] = None,
    card: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Card to plan for, such as 4090: predicts the speed."),
    ] = None,
    fit: Annotated[
        bool,
        typer.Option(
            "--fit",
            help="Search micro-batch, recomputation, offloading and sharding for what fits and is "
            "fastest; what is given stays, micro-batch times accumulation too.",
        ),
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show the memory, the FLOPs and the time that `llmq train` with these options would need."""
    config, model, _ = _load(given, config_file)
    sizes = {
        "gpu_memory": _size("--gpu-memory", gpu_memory),
        "host_memory": _size("--host-memory", host_memory),
    }
    from llmq.commands.plan import run_plan

    fields = given_fields(given, config_file) if fit else None
    run_plan(config, model, **sizes, card=card, fit=fields, json=json)


@app.command(cls=TrainCommand)
@train_options
def verify(
    given: dict[str, Any],
    config_file: ConfigFile = None,
    verify_steps: Annotated[int, typer.Option(min=1, help="Optimizer steps of each run.")] = 10,
    synthetic: Annotated[
        bool, typer.Option("--synthetic", help="Random tokens instead of token files.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """Check that recomputation and offloading change no bit: two runs, exit status 0 if equal."""
    config, model, model_dir = _load(given, config_file)
    from llmq.bench.verify import run_verify

    options = {"steps": verify_steps, "synthetic": synthetic, "json": json}
    options["given"] = given_fields(given)  # a file may be that of a run
    return 0 if run_verify(config, model, model_dir, **options) else 1


@app.command()
def tokenize(
    inputs: Annotated[list[str], typer.Argument(help="Text, JSON lines, JSON or Parquet; globs.")],
    tokenizer: Annotated[str, typer.Option(help="bytes, or a folder with tokenizer.json.")],
    out: Annotated[Path, typer.Option(help="Directory of the token files.")],
    field: Annotated[str, typer.Option(help="Field that holds the text.")] = "text",
    eval_fraction: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Part of the documents kept for validation.")
    ] = 0.01,
    shard_tokens: Annotated[int, typer.Option(min=1, help="Tokens per file.")] = 100_000_000,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes; all cores.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace token files.")] = False,
) -> None:
    """Turn text into token files."""
    from llmq.data.tokenize import tokenize

    with ending_children():
        summary = tokenize(
            inputs,
            tokenizer=tokenizer,
            out=out,
            field=field,
            eval_fraction=eval_fraction,
            shard_tokens=shard_tokens,
            workers=workers,
            overwrite=overwrite,
        )
    print(summary.describe())


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Directory of everything it writes.")] = Path("demo"),
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    steps: Annotated[int | None, typer.Option(min=1, help="Optimizer steps.")] = None,
) -> None:
    """Tokenize a small text, train a tiny model on it, plot the loss and sample from it."""
    from llmq.commands.demo import run_demo

    run_demo(out, _checked("device", device), steps)


@app.command()
def sample(
    model: Annotated[str, typer.Argument(help="Model directory or cached repository.")],
    prompt: Annotated[str, typer.Option(help="Text to continue.")] = "",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest continuation.")] = 200,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: always the likeliest.")] = 0.8,
    top_k: Annotated[int, typer.Option(min=0, help="Only the k likeliest tokens; 0: all.")] = 0,
    top_p: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Only the likeliest tokens of this mass.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the choice of tokens.")] = 42,
    num_samples: Annotated[int, typer.Option(min=1, help="Number of continuations.")] = 1,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    model_dtype: Annotated[str, typer.Option(help="bf16 or fp32.")] = "bf16",
) -> None:
    """Continue a text with a trained model."""
    from llmq.commands.sample import run_sample

    run_sample(
        model,
        prompt=prompt,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        num_samples=num_samples,
        device=_checked("device", device),
        model_dtype=_checked("model_dtype", model_dtype),
    )


@app.command()
def export(
    out_dir: Annotated[Path, typer.Option(help="Directory of the model.")],
    checkpoint_dir: Annotated[
        Path, typer.Option(help="A checkpoint, or a directory whose newest one is taken.")
    ] = Path("ckpt/llmq"),
    model_dtype: Annotated[str, typer.Option(help="bf16 or fp32.")] = "bf16",
) -> None:
    """Write a checkpoint as a model directory that transformers loads."""
    from llmq.checkpoint.store import export_checkpoint

    files = export_checkpoint(checkpoint_dir, out_dir, _checked("model_dtype", model_dtype))
    print(f"wrote {', '.join(files)} to {out_dir}")


@app.command()
def plot(
    logs: Annotated[list[Path], typer.Argument(help="JSON logs of training runs.")],
    out: Annotated[Path, typer.Option(help="Picture to write.")] = Path("loss.png"),
) -> None:
    """Draw the losses of training runs."""
    from llmq.commands.plot import run_plot

    run_plot(logs, out)


@app.command()
def watch(
    log: Annotated[Path, typer.Argument(help="JSON log of a training run.")],
    tensorboard: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write event files into DIR/NAME.")
    ] = None,
    wandb: Annotated[
        str | None, typer.Option(metavar="PROJECT", help="Send to a run of this W&B project.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name there; that of the log.")] = None,
    interval: Annotated[
        int, typer.Option(min=0, max=86400, help="Seconds between looks at the log; 0: one look.")
    ] = 10,
) -> None:
    """Send the log of a run to TensorBoard or W&B, while it is written or afterwards."""
    from llmq.commands.watch import run_watch

    with ending_children():
        run_watch(log, tensorboard=tensorboard, wandb=wandb, name=name, interval=interval)


@app.command(cls=TrainCommand)
@train_options
def bench(
    given: dict[str, Any],
    config_file: Annotated[
        Path | None,
        typer.Option(
            "--config",
            metavar="FILE",
            help="YAML or JSON with these options as keys, lists of values, and a list `runs`.",
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="Report to write, without .md and .json.")] = Path(
        "bench"
    ),
    peers: Annotated[Path | None, typer.Option(help="JSON with other programs' speeds.")] = None,
    timed_steps: Annotated[int, typer.Option(min=1, help="Steps of one repeat.")] = 5,
    repeats: Annotated[int, typer.Option(min=1, help="Repeats of the timed steps.")] = 3,
    add: Annotated[
        bool, typer.Option("--add", help="To what the report holds; equal runs are replaced.")
    ] = False,
) -> None:
    """Measure the speed of one or many configurations on random tokens."""
    from llmq.bench.bench import run_bench

    with ending_children():
        run_bench(
            given,
            config_file,
            out=out,
            peers=peers,
            steps=timed_steps,
            repeats=repeats,
            add=add,
            argv=sys.argv,
        )


# The base of all errors of the command-line parser, whose own module is not public.
_UsageError = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")


def _run(args: list[str]) -> int:
    """Run a command and return the exit status: 2 after an error that the user can fix."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # else a console without UTF-8 is an error
            stream.reconfigure(errors="backslashreplace")
    try:
        command = typer.main.get_command(app)
        status = command.main(args=args or ["--help"], prog_name="llmq", standalone_mode=False)
        sys.stdout.flush()
    except Interrupted as stop:
        return 128 + stop.signum
    except (typer.Abort, KeyboardInterrupt):
        return 128 + signal.SIGINT
    except BrokenPipeError:
        discard(sys.stdout)  # whoever read our output has gone
        return 1
    except (_UsageError, LlmqError, OSError, MemoryError, RecursionError) as error:
        if os.environ.get("LLMQ_DEBUG", "0") != "0":
            raise
        print(f"error: {_one_line(error)}", file=sys.stderr)
        return 2
    return status if isinstance(status, int) else 0


def _one_line(error: BaseException) -> str:
    """What the user needs to know of an error."""
    if isinstance(error, _UsageError):
        text = error.format_message()
        if "extra argument" in text and isinstance(error.ctx.command, TrainCommand):
            text += " Put a pattern such as 'data/train*.bin' in quotes."
    elif isinstance(error, MemoryError):
        text = "out of host memory, lower --batch-size or --seq-len"
        text += f": {error}" if str(error) else ""
    elif isinstance(error, RecursionError):
        text = "a JSON or YAML file is nested too deeply, mend it (LLMQ_DEBUG=1 shows where)"
    elif isinstance(error, OSError) and error.strerror:
        text = ": ".join(str(part) for part in (error.strerror, error.filename) if part)
        if error.errno == errno.ENOSPC:
            text += "; free some space or write to another disk"
    else:
        text = str(error) or type(error).__name__
    notes = ", ".join(getattr(error, "__notes__", ()))  # such as the rank it comes from
    return " ".join([*text.split(), *([f"({notes})"] if notes else [])])


def main() -> None:
    """Entry point of `llmq`."""
    sys.exit(_run(sys.argv[1:]))


def train_main() -> None:
    """Entry point of `llmq-train`, the same as `llmq train`."""
    sys.exit(_run(["train", *sys.argv[1:]]))
