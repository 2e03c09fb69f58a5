"""How --help looks: every option's whole name, at any width, in a terminal and in a pipe.

Tables of rich cut names off where columns are narrow. Here names have lines of their own where they
are long, and options stand in groups, as they are declared.
"""

import textwrap
from itertools import pairwise
from typing import Any

from typer.core import TyperCommand, TyperGroup

from llmq.base.errors import ConfigError

NAMES = 26  # characters beside which help begins in the same line

_PATHS = ("--out", "--out-dir", "--checkpoint-dir", "--config", "--save-config", "--peers")

Record = tuple[str, str]
"""An option or a command as it is written, and its help."""


def _write(formatter: Any, title: str, records: list[Record]) -> None:
    """A section. Its help is not broken at hyphens, which are in names of other options."""
    if not records:
        return
    column = min(max(len(names) for names, _ in records), NAMES) + 4
    with formatter.section(title):
        for names, text in records:
            first, *others = textwrap.wrap(
                text, formatter.width - column, break_on_hyphens=False, break_long_words=False
            ) or [""]
            if len(names) > formatter.width - 2:  # of an option with two spellings, on and off
                names = names.replace(" / ", " /\n  ")
            begin = f"  {names}"
            if len(begin) > column - 2:
                formatter.write(f"{begin}\n")
                begin = ""
            lines = [f"{begin:{column}}{first}", *(" " * column + line for line in others)]
            formatter.write("".join(f"{line.rstrip()}\n" for line in lines))


class Command(TyperCommand):
    """A command whose help shows its options in the groups that they are declared in.

    A path that is empty, as of a variable of the shell that is not set, would be the directory that
    the command runs in: ConfigError.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        for arg, following in pairwise([*args, None]):
            name, equals, value = arg.partition("=")
            if name in _PATHS and (value if equals else following) == "":
                raise ConfigError(f"{name}: is empty: give a path")
        return super().parse_args(ctx, args)

    def shown(self, ctx: Any, parameter: Any) -> bool:
        """Whether --help has an option."""
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
    """The commands, each with its whole first sentence."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        found = (parameter.get_help_record(ctx) for parameter in self.get_params(ctx))
        _write(formatter, "Options", [record for record in found if record is not None])
        commands = [(name, command.help or "") for name, command in self.commands.items()]
        _write(formatter, "Commands", commands)
