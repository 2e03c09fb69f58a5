"""Option files, and the command line of a configuration. Import this module only when needed:
--help does not wait for YAML."""

import json
import os
import re
import textwrap
import tomllib
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import yaml

from llmq.base.errors import ConfigError
from llmq.base.files import check_readable, disk_errors, write_file
from llmq.options.options import ONCE, OPTIONS, TrainConfig


def flag(name: str, value: Any) -> str:
    """One option of TrainConfig with a value, as on the command line."""
    return " ".join(OPTIONS[name].spelled(value))


def fewest_values(config: TrainConfig) -> dict[str, Any]:
    """Return the smallest set of values, by field, that gives this configuration: no defaults, no
    implied values, no log file named by the start time. config: normalized."""
    names = [*OPTIONS]
    if re.fullmatch(rf"logs/{re.escape(config.name)}-[-\dT_]{{19}}\.json", str(config.log_file)):
        names.remove("log_file")

    def values(chosen: dict[str, Any]) -> list[Any]:
        made = TrainConfig(**chosen, only_scores=config.only_scores).normalized()
        return [getattr(made, name) for name in names]

    wanted = [getattr(config, name) for name in names]
    defaults = TrainConfig()  # giving a default changes nothing
    given = {n: v for n, v in zip(names, wanted, strict=True) if v != getattr(defaults, n)}
    for name in reversed(given):
        fewer = {other: value for other, value in given.items() if other != name}
        if values(fewer) == wanted:
            given = fewer
    return given


def command_line(config: TrainConfig) -> list[str]:
    """Return `llmq train`, `rl` or `score` with the flags of fewest_values. config: normalized."""
    given, command = fewest_values(config), ["rl" if config.samples else "train"]
    if config.only_scores:  # `score` has --out, which is no option of a run
        command = ["score", str(given.pop("model")), *given.pop("train_file"), "--out=OUT"]
    flags = (OPTIONS[name].spelled(value) for name, value in given.items())
    return ["llmq", *command, *chain(*flags)]


# ------------------------------------------------------------------------------------------------


YAML_SUFFIXES = (".yaml", ".yml")
MOST_YAML = 1 << 17  # characters of a file: YAML takes up to 50 µs a character
MOST_JSON = 1 << 24
_WIDTH = 98  # columns of a comment
_HEAD = """\
# Options of `llmq train`, as --save-config writes them: `--config FILE` reads them, and what the
# command line gives wins. Lines behind a # are not set; they say what each option is, and what it
# is if nobody gives it.
"""


class _Loader(yaml.SafeLoader):
    """A YAML loader that refuses duplicate keys, of which YAML silently takes the last, and
    aliases, which let a few lines stand for more values than fit into memory."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()
            line = event.start_mark.line + 1
            raise yaml.YAMLError(f"line {line}: write the values instead of *{event.anchor}")
        return super().compose_node(parent, index)

    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                line = key.start_mark.line + 1
                if key.value in lines:
                    first = lines[key.value]
                    raise yaml.YAMLError(f"line {line}: {key.value} is given in line {first} too")
                lines[key.value] = line
        return node


def _json_object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"{key} is given twice")
        found[key] = value
    return found


def read_option_file(file: Path) -> dict[str, Any]:
    """Return the mapping in a file: JSON or TOML by suffix, else YAML; {} if it is empty.

    ${NAME} in a value stands for an environment variable. Raises ConfigError, also for duplicate
    keys.
    """
    try:
        check_readable(file)
        with open(file, encoding="utf-8") as opened:
            text = opened.read(MOST_JSON + 1)
        if len(text) > (MOST_JSON if file.suffix in (".json", ".toml") else MOST_YAML):
            raise ConfigError(f"--config: {file} is too large: no options take so much")
        if file.suffix == ".json":
            content = json.loads(text, object_pairs_hook=_json_object)
        elif file.suffix == ".toml":
            content = tomllib.loads(text)
        else:
            content = yaml.load(text, _Loader)
    except OSError as error:
        raise ConfigError(f"--config: cannot read {file}: {error.strerror}") from None
    except (ValueError, yaml.YAMLError) as error:
        message = " ".join(str(error).split())
        raise ConfigError(f"--config: {file} is not valid: {message}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"--config: {file} must hold one mapping of options")
    return {key: _expanded(value, f"--config: {file}: {key}") for key, value in content.items()}


def _expanded(value: Any, where: str) -> Any:
    """The value with environment variables in place of ${NAME}, and ${ in place of $${. where:
    prefix of messages. ConfigError for a variable that is not set."""
    if isinstance(value, list):
        return [_expanded(each, where) for each in value]
    if isinstance(value, dict):
        return {key: _expanded(each, where) for key, each in value.items()}
    if not isinstance(value, str):
        return value

    def variable(found: re.Match[str]) -> str:
        if found[0] == "$${":
            return "${"
        if found["name"] is None:
            raise ConfigError(f"{where}: expected ${{NAME}} in {value!r}, or $${{ for a plain ${{")
        if found["name"] not in os.environ:
            raise ConfigError(f"{where}: the environment variable {found['name']} is not set")
        return os.environ[found["name"]]

    return re.sub(r"\$\$\{|\$\{(?P<name>\w+)\}|\$\{", variable, value)


def check_new(file: Path, flag: str) -> None:
    """Raise ConfigError if the file exists or is no YAML. Commands whose options are known only
    after their work call this first."""
    _check_yaml(file, flag)
    if os.path.lexists(file):
        raise ConfigError(f"{flag}: '{file}' is there: delete it, or choose another name")


def _check_yaml(file: Path, flag: str) -> None:
    if file.suffix not in YAML_SUFFIXES:
        raise ConfigError(f"{flag}: writes YAML, so '{file}' must end in .yaml or .yml")


def save_options(
    file: Path,
    config: TrainConfig,
    *,
    flag: str = "--save-config",
    head: Sequence[str] = (),
    notes: Mapping[str, str] | None = None,
) -> None:
    """Write a configuration as YAML: fewest_values as set, the other options as comments.

    flag: the flag that named the file. head: first lines. notes: texts by field that replace help
    texts; with notes only set values are written. Options that hold for a single command (ONCE) are
    left out. Raises ConfigError for another suffix, and for an existing file with other content.
    """
    _check_yaml(file, flag)
    content = _as_yaml(config, head, notes)
    if file.exists():
        with disk_errors(file):
            check_readable(file)
            same = file.read_bytes() == content.encode()
        if same:
            return
        raise ConfigError(
            f"{flag}: '{file}' holds other options: delete it, or choose another name"
        )
    with disk_errors(file):
        file.parent.mkdir(parents=True, exist_ok=True)
    write_file(file, content)


def _as_yaml(config: TrainConfig, head: Sequence[str], notes: Mapping[str, str] | None) -> str:
    given, defaults = fewest_values(config), TrainConfig()
    lines, group = ["".join(f"# {line}".rstrip() + "\n" for line in head) or _HEAD], None
    for name, option in OPTIONS.items():
        if name in ONCE or (notes is not None and name not in given):
            continue
        if option.group != group:
            group = option.group
            lines.append(f"# {f' {group} ':-^{_WIDTH - 2}}\n")
        choices = f" ({', '.join(option.choices)})" if option.choices else ""
        text = (notes or {}).get(name) or option.help + choices
        lines += [f"# {line}" for line in textwrap.wrap(text, _WIDTH - 2)]
        value, mark = (given[name], "") if name in given else (getattr(defaults, name), "#")
        lines.append(f"{mark}{option.flags[0]}:{_scalar(value)}\n")
    return "\n".join(lines)


def _escaped(value: Any) -> Any:
    """The value with $${ in place of ${, which _expanded reverts."""
    return value.replace("${", "$${") if isinstance(value, str) else value


def _scalar(value: Any) -> str:
    """The YAML of a value after its key; "" for None."""
    if value is None:
        return ""
    plain = str(value) if isinstance(value, Path) else value
    plain = [*map(_escaped, plain)] if isinstance(plain, tuple) else _escaped(plain)
    text = yaml.safe_dump(plain, default_flow_style=True, allow_unicode=True, width=10**9)
    return f" {text.removesuffix('...' + chr(10)).strip()}"
