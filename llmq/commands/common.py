"""Functions that several commands share: TrainConfig's fields become options, and given options
become a run. --help is formatted in groups, with whole names at any width; rich's tables cut
names."""

import errno
import inspect
import re
import textwrap
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import cache
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from llmq.arch.model_config import ModelConfig
from llmq.base.errors import ConfigError, LlmqError, warn
from llmq.base.stopwatch import START
from llmq.options.foreign import answer
from llmq.options.option_types import (
    NEWEST,
    RL_GROUP,
    Option,
    parse_bool,
    parse_continue,
    parse_every,
    parse_size,
)
from llmq.options.options import OPTIONS, USUAL, TrainConfig
from llmq.options.options_io import config_of, fields_of, layers_of
from llmq.options.presets import model_warnings
from llmq.options.removed import REMOVED, flag_of
from llmq.options.rules import RULES
from llmq.runtime.cuda_libraries import load_ahead
from llmq.runtime.world import World

NAMES = 26  # width in characters of the column of names in --help

_PATHS = ("--out", "--out-dir", "--checkpoint-dir", "--config", "--save-config")

Record = tuple[str, str]
"""The spelling of an option or a command, and the help text."""


def _write(formatter: Any, title: str, records: list[Record]) -> None:
    """Write a section of --help. Lines do not break at hyphens, because help texts name options."""
    if not records:
        return
    column = min(max(len(names) for names, _ in records), NAMES) + 4
    with formatter.section(title):
        for names, text in records:
            first, *others = textwrap.wrap(
                text, formatter.width - column, break_on_hyphens=False, break_long_words=False
            ) or [""]
            if len(names) > formatter.width - 2:  # the option has two spellings, on and off
                names = names.replace(" / ", " /\n  ")
            begin = f"  {names}"
            if len(begin) > column - 2:
                formatter.write(f"{begin}\n")
                begin = ""
            lines = [f"{begin:{column}}{first}", *(" " * column + line for line in others)]
            formatter.write("".join(f"{line.rstrip()}\n" for line in lines))


def _foreign(args: Sequence[str], known: Collection[str]) -> list[str]:
    """Return a line for each option of a command line that is not in `known`, the command's
    options. Returns [] unless one of these options belongs to another trainer, or has _ in place of
    -."""
    lines, answered = [], False
    for index, arg in enumerate(args):
        flag, equals, text = arg.partition("=")
        if not flag.startswith("--") or flag in known or arg == "--":
            continue
        values = [text] if equals else [*takewhile(_is_value, args[index + 1 :])]
        line = answer(flag[2:], values or None)
        if (ours := flag.replace("_", "-")) in known:
            line = f"{flag} is {' '.join([ours, *values])} here"
        elif line is not None and not _offered(line, known):
            line = None
        answered |= line is not None
        lines.append(line or f"{flag} is no option")
    return lines if answered else []


def _is_value(word: str) -> bool:
    """Return True if a word of a command line is a value, not an option."""
    return not word.startswith("-") or re.fullmatch(r"-[\d.]+", word) is not None


def _offered(line: str, known: Collection[str]) -> bool:
    """Return True if the command has the option that a line about another trainer's option
    advises."""
    advised = re.search(r": use (--[a-z0-9-]+)", line)
    return advised is None or advised[1] in known


class Command(TyperCommand):
    """A command whose help shows options in their declared groups.

    An empty path, for example from an unset shell variable, raises ConfigError: the path would mean
    the working directory.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        for arg, following in pairwise([*args, None]):
            name, equals, value = arg.partition("=")
            if name in _PATHS and (value if equals else following) == "":
                raise ConfigError(f"{name}: is empty: give a path")
        try:
            return super().parse_args(ctx, [*args])
        except UsageError as error:
            known = {flag for param in self.params for flag in (*param.opts, *param.secondary_opts)}
            lines = _foreign(args, known) if hasattr(error, "possibilities") else []
            if not lines:
                raise
            if len(lines) == 1:
                raise ConfigError(lines[0]) from None
            details = [f"  {line}" for line in lines]
            raise ConfigError(f"{len(lines)} options are not llmq's:", details) from None

    def shown(self, ctx: Any, parameter: Any) -> bool:
        """Return True if --help shows the option."""
        return True

    def format_options(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[Record]] = {"Arguments": [], "Options": []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is None or not self.shown(ctx, parameter):
                continue
            kind = "Arguments" if parameter.param_type_name == "argument" else "Options"
            title = getattr(parameter, "rich_help_panel", None) or kind
            groups.setdefault(title, []).append(record)
        for title, records in groups.items():
            _write(formatter, title, records)


class Group(TyperGroup):
    """Lists the commands in --help: panels in the order of use, a line of help for each command."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        found = (parameter.get_help_record(ctx) for parameter in self.get_params(ctx))
        _write(formatter, "Options", [record for record in found if record is not None])
        panels: dict[str, list[Record]] = {}
        for name, command in self.commands.items():
            does = (command.help or "").partition("\n\n")[0]
            panels.setdefault(command.rich_help_panel, []).append((name, does))
        for title, commands in panels.items():
            _write(formatter, title, commands)


# ------------------------------------------------------------------------------------------------


def option(kind: Any, text: str, *names: str, **how: Any) -> Any:
    """Return the annotation of a parameter that is an option. text: help text of the option. names,
    how: arguments of typer.Option."""
    return Annotated[kind, typer.Option(*names, help=text, **how)]


def argument(kind: Any, text: str, **how: Any) -> Any:
    """Return the annotation of a positional parameter. text, how: see `option`."""
    return Annotated[kind, typer.Argument(help=text, **how)]


ConfigFile = option(
    Path | None, "YAML, TOML or JSON with these options as keys.", "--config", metavar="FILE"
)

SaveConfig = option(
    Path | None,
    "Write the options as YAML, for --config, and go on.",
    "--save-config",
    metavar="FILE",
)

ALL = "--help-all"

_BY_PARSER = {
    parse: {f"--{flag}" for opt in OPTIONS.values() if opt.parse is parse for flag in opt.flags}
    for parse in (parse_bool, parse_continue, parse_every)
}
_BY_PARSER[parse_bool] |= {f"--{flag_of(name)}" for name, old in REMOVED.items() if old.switch}


def train_options(command: Callable[..., int | None]) -> Callable[..., int | None]:
    """Give a command function every option of TrainConfig.

    The function's first parameter receives the options that were given on the command line: flag
    without dashes -> text or bool. The function's other parameters stay options of the command. The
    function may return the exit status.
    """
    own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]

    def run(**values: Any) -> int | None:
        own_values = {parameter.name: values.pop(parameter.name) for parameter in own}
        given = {
            name if name in REMOVED else OPTIONS[name].flags[0]: value
            for name, value in values.items()
            if value is not None and value != []
        }
        return command(given, **own_values)

    parameters = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own]
    parameters += [p for p in _parameters() if p.name not in {each.name for each in own}]
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__signature__ = inspect.Signature(parameters)
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


@cache
def _parameters() -> list[inspect.Parameter]:
    """Return every option of TrainConfig, for all commands, and hidden parameters for removed
    options."""
    return [_parameter(name, opt) for name, opt in OPTIONS.items()] + [
        _removed_parameter(name, old.switch) for name, old in REMOVED.items()
    ]


def _removed_parameter(name: str, switch: bool) -> inspect.Parameter:
    flag = flag_of(name)
    info = typer.Option(f"--{flag}/--no-{flag}" if switch else f"--{flag}", hidden=True)
    kind = bool if switch else str
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, info]
    )


def _parameter(name: str, opt: Option) -> inspect.Parameter:
    """Return an option as a parameter, whose value is None if the user did not give the option."""
    default = getattr(TrainConfig(), name)
    is_bool, is_list = opt.parse is parse_bool, opt.repeats
    spellings = [f"--{flag}" for flag in opt.flags]
    if is_bool:
        spellings = [f"--{flag}/--no-{flag}" for flag in opt.flags]
        default = {True: "on", False: "off"}.get(default)
    if is_list:
        default = " ".join(default or ()) or None
    info = typer.Option(
        *spellings,
        help=opt.help if default is None else f"{opt.help} (default: {default})",
        rich_help_panel=opt.group,
        metavar=None if is_bool else opt.metavar,
        show_default=False,
        autocompletion=_completion(name, opt),
    )
    kind = bool if is_bool else list[str] if is_list else str
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, info]
    )


def _completion(name: str, opt: Option) -> Callable[[str], list[str]] | None:
    """Return the function that completes an option's values in a shell; None for unknown values."""
    if name == "model":
        return starting_with(_presets)
    if name == "name":
        return starting_with(run_names)
    return starting_with(lambda: opt.choices) if opt.choices else None


def starting_with(values: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """Return a completion function that offers the values with the typed beginning. values: called
    at each completion."""

    def offered(incomplete: str) -> list[str]:
        found = incomplete.lower()
        return [value for value in values() if value.lower().startswith(found)]

    return offered


def _presets() -> Iterable[str]:
    from llmq.options.presets import PRESETS  # imported here, so that --help does not wait

    return PRESETS


def run_names() -> Iterable[str]:
    """Return the names of runs with checkpoints in ckpt/ or a log in logs/ of the working
    directory."""
    logs = (re.sub(r"-\d{4}-\d\d-\d\dT[\d_]+$", "", p.stem) for p in Path("logs").glob("*.json"))
    return sorted({*logs, *(path.parent.name for path in Path("ckpt").glob("*/step_*"))})


class TrainCommand(Command):
    """A command that also reads --flag=false, and some flags without a value, like llm.q."""

    def get_help_option_names(self, ctx: Any) -> list[str]:
        return [*super().get_help_option_names(ctx), ALL]

    def shown(self, ctx: Any, parameter: Any) -> bool:
        """Return True for the usual options of a run, and with --help-all for all options."""
        if ctx.meta.get(ALL) or parameter.name not in OPTIONS or parameter.name in USUAL:
            return True
        return ctx.info_name == "rl" and OPTIONS[parameter.name].group == RL_GROUP

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        if not ctx.meta.get(ALL):
            formatter.write(f"\nThe other options of a run: {ctx.command_path} {ALL}\n")

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.meta[ALL] = ALL in args
        if not ctx.resilient_parsing:  # True while a shell completes an unfinished line
            if sum(arg.partition("=")[0] == "--config" for arg in args) > 1:
                raise ConfigError("--config: is given twice: put all options into one file")
            args = [_spelled_out(args, i) for i in range(len(args))]
        return super().parse_args(ctx, args)


def _spelled_out(args: list[str], index: int) -> str:
    """Return args[index] in a form that typer parses: a switch without =, a bare flag with a
    value."""
    name, equals, value = args[index].partition("=")
    if name in _BY_PARSER[parse_bool] and equals:
        try:
            return name if parse_bool(value) else f"--no-{name.removeprefix('--')}"
        except ValueError as error:
            raise ConfigError(f"{name}: {error}") from None
    for parse, bare in ((parse_continue, NEWEST), (parse_every, "1")):
        if name in _BY_PARSER[parse] and not equals:
            following = args[index + 1] if index + 1 < len(args) else "-"
            number = parse is parse_every and re.fullmatch(r"-\d+", following)
            return f"{name}={bare}" if following.startswith("-") and not number else name
    return args[index]


def checks(name: str) -> Callable[[str | None], str | None]:
    """Return a callback that converts and checks a value like TrainConfig's option `name`."""

    def checked(value: str | None) -> str | None:
        if value is not None:
            value = OPTIONS[name].convert(value)
            OPTIONS[name].check(value)
        return value

    return checked


Device = option(str, "auto, cpu or cuda.", callback=checks("device"))
Json = option(bool, "Print JSON.", "--json")
Reserve = option(
    str | None,
    "Memory of each GPU that the search leaves free; if not given 512MiB, but 0 on cards "
    "made for servers that drive no display.",
    metavar="SIZE",
)


def size_of(flag: str, value: str | None, least: int = 1) -> int | None:
    """Return the bytes for which the value of an option outside TrainConfig stands. least: the
    smallest allowed size."""
    try:
        size = None if value is None else parse_size(value)
    except ValueError as error:
        raise ConfigError(f"{flag}: {error}") from None
    if size is not None and size < least:
        raise ConfigError(f"{flag}: must be at least {least}, got {value}")
    return size


def save_config(file: Path | None, config: TrainConfig) -> None:
    """Write the options to the file of --save-config, if given."""
    if file is not None:
        from llmq.options.option_file import save_options  # imported late, as YAML is slow

        save_options(file, config)


@START.part("reading options")
def load_run(
    given: dict[str, Any],
    file: Path | None,
    *,
    trains: bool = False,
    weights: bool = True,
    plans: bool = False,
    defaults: dict[str, Any] | Callable[[dict[str, Any]], dict[str, Any]] | None = None,
    world: World = World(),
) -> tuple[TrainConfig, ModelConfig, Path | None, frozenset[str]]:
    """Return the checked options of a run, its model and model directory, and the fields that the
    user has set. Prints warnings. With --continue, options that are not given come from the
    checkpoint.

    given: options of the command line. file: the file of --config. trains: True if the run trains
    on the token files, whose ids must be in the vocabulary. weights: True if the run reads the
    weights of --model. plans: True if the run is only planned; a preset's name then means the
    trained model. defaults: other defaults by field, or a function from the given options to such
    defaults. world: the processes, which all call this function.
    """
    layers = world.each(lambda: layers_of(given, file))  # read once, as a pipe allows
    values = layers[0] | layers[1]
    if trains and weights and values.get("device") != "cpu":
        load_ahead(alone=not world.several)
    with START.part("loading modules"):  # imported here, because --help needs no NumPy
        from llmq.run import model_of_run as of_run
        from llmq.run.initial_weights import with_adapter

    inherited = defaults(values) if callable(defaults) else defaults or {}
    if any(world.gather(values.get("continue_from") is not None)):
        from llmq.run.resume import inherited_options

        inherited = inherited | world.each(lambda: inherited_options(values, world))
    inherited = world.each(lambda: of_run.packing_of_data(inherited | values)) | inherited

    def load() -> tuple[TrainConfig, ModelConfig, Path | None, frozenset[str]]:
        config = config_of(layers, inherited)
        if plans:
            config, model, model_dir = of_run.planned_model(config)
        else:
            model, model_dir = of_run.model_of_run(config, weights=weights)
        config = with_adapter(of_run.at_commit(config, model_dir), model).validate_with(model)
        if trains:
            RULES.check(config, files=True)
        idle = RULES.idle(config) + RULES.idle(config, model=model)
        line = of_run.vocabulary_line(config, model, trains=trains)
        warn(*(idle + model_warnings(model_dir) + ([] if line is None else [line])))
        return config, model, model_dir, fields_of(layers)

    return world.each(load)


# UsageError is the base class of the parser's errors; the class's own module is not public.
LONGEST = 2000  # most characters of an error line, because a quoted value may have millions
UsageError = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")


def _meant(error: Any) -> str | None:
    """Return an error that suggests all options that begin with the unknown option's name, or None.
    The parser's own guess compares only letters, and suggests --eval-seed for --eval-every."""
    name = getattr(error, "option_name", None)
    if name is None or not hasattr(error, "possibilities"):
        return None
    known = {flag for parameter in error.ctx.command.params for flag in parameter.opts}
    begun = sorted(flag for flag in known if flag.startswith(name))
    return begun and f"No such option: {name}, did you mean {' or '.join(begun)}?"


def one_line(error: BaseException) -> str:
    """Return the error as a line for the user, of at most LONGEST characters."""
    if isinstance(error, UsageError):
        text = _meant(error) or error.format_message()
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
        text = error.headline if isinstance(error, LlmqError) else str(error)
        text = text or type(error).__name__
    notes = ", ".join(getattr(error, "__notes__", ()))  # such as the rank that raised the error
    text = " ".join([*text.split(), *([f"({notes})"] if notes else [])])
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} …"
