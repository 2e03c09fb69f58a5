"""Option: flags, help and limits of an option, and parsers from text or YAML values."""

import dataclasses
import json
import math
import numbers
import operator
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmq.arch import ARCHITECTURES
from llmq.arch.mtp import MTP
from llmq.base.errors import ConfigError

DTYPE_ALIASES = {
    "fp32": ("f32", "fp32", "float", "float32", "single"),
    "fp16": ("f16", "fp16", "float16", "half"),
    "bf16": ("bf16", "bfloat16"),
    "e4m3": ("e4m3", "fp8_e4m3", "f8_e4m3", "float8_e4m3", "float8_e4m3fn"),
    "e5m2": ("e5m2", "fp8_e5m2", "f8_e5m2", "float8_e5m2"),
    "int8": ("int8", "i8"),
    "ternary": ("ternary", "bitnet"),
    "nf4": ("nf4",),
    "mxfp4": ("mxfp4",),
    "nvfp4": ("nvfp4",),
    "e4m3-blocks": ("e4m3-blocks", "fp8-blocks"),
}
"""All spellings of a number format, in lower case, by canonical name."""

_SIZE_UNITS = {"": 1, "b": 1}
_SIZE_UNITS |= {f"{unit}ib": 1024**power for power, unit in enumerate("kmgt", start=1)}
_SIZE_UNITS |= {f"{unit}b": 1000**power for power, unit in enumerate("kmgt", start=1)}
_SIZE_UNITS |= {unit: 1024**power for power, unit in enumerate("kmgt", start=1)}

_TOO_LARGE = 2**63  # bytes: other code holds sizes in int64; longer numbers give inf

NEWEST = "latest"
"""Value of --continue for the newest checkpoint of --checkpoint-dir."""

NONE = "none"
"""Value of --eval-file for no validation, and of --lora-targets for no adapters."""

AUTO = "auto"
"""Value of --vocab-size for the vocabulary of the training files."""

SPLIT, SPLIT_PART = "split", 0.02  # share of the files: little noise
"""Value of --eval-file for a share of the training files, and the default share."""

OF_TABLES = ("embedding", "head")
"""Entries of LORA_TARGETS with a row for each token."""

LORA_TARGETS = tuple(dict.fromkeys(t for arch in ARCHITECTURES.values() for t in arch.targets))
LORA_TARGETS += OF_TABLES
"""Matrices that may have adapters."""

OF_EXPERTS = ("experts", "fused_experts")
"""Entries of LORA_TARGETS for experts: one module each, or fused as in transformers."""

NEW_PARTS = ("new-rows", "new-embeddings")
LORA_PARTS = ("norms", "biases", "adapted-biases", "embeddings", "head", *NEW_PARTS, MTP)
"""Parts of a model that may be trained beside adapters."""

FP8_DTYPES = ("e4m3", "e5m2")
"""Formats that output gradients may have in fp8 products."""

QUANTIZED = ("e4m3", "e4m3-blocks", "int8", "nf4", "mxfp4", "nvfp4")
"""Formats of --base-dtype that store weights as codes with scales."""

SIZES_GROUP = "Own sizes of a new model, instead of those of --model"
POSITIONS_GROUP = "Positions, instead of those of --model"
ADAPTERS_GROUP = "Adapters (LoRA)"
LOSS_GROUP = "Loss"
RL_GROUP = "Samples and rewards"
MUONS = ("muon", "normuon")  # optimizers with a separate rate for matrices of blocks
PREFERENCES = ("dpo", "ipo", "simpo", "orpo", "reward")  # losses of pairs of answers
REFERENCED = ("dpo", "ipo", "kto")  # losses that read a reference's log-probabilities


def parse_bool(value: Any) -> bool:
    """Parse true/false, yes/no, on/off or 1/0 in any case. ValueError otherwise."""
    word = str(value).lower()
    if word in ("true", "yes", "on", "1"):
        return True
    if word in ("false", "no", "off", "0"):
        return False
    raise ValueError(f"expected true or false, got {value!r}")


def parse_int(value: Any) -> int:
    """Parse an integer, also of NumPy, or text that may begin with 0x. ValueError otherwise."""
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        return operator.index(value)
    try:
        return int(value, 0)
    except (TypeError, ValueError):
        raise ValueError(f"expected an integer, got {value!r}") from None


def parse_float(value: Any) -> float:
    """Parse a finite number. ValueError otherwise."""
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"expected a number, got {value!r}")
    return number


def parse_str(value: Any) -> str:
    """Parse text that is not empty; numbers count as text. ValueError otherwise."""
    if value == "" or isinstance(value, bool | list | dict):
        raise ValueError(f"expected text, got {value!r}")
    return str(value)


def parse_texts(value: Any) -> tuple[str, ...]:
    """Parse one text or a list, each not empty. ValueError otherwise."""
    texts = value if isinstance(value, list | tuple) else [value]
    if not texts:
        raise ValueError(f"expected text, got {value!r}")
    return tuple(parse_str(text) for text in texts)


def parse_name(value: Any) -> str:
    """Parse text that can be a file's name. ValueError otherwise."""
    name = parse_str(value)
    if name in (".", "..") or re.search(r"[/\\]", name) or not name.isprintable() or name.isspace():
        raise ValueError(f"expected a name without / and \\ and control characters, got {value!r}")
    return name


def parse_path(value: Any) -> Path:
    """Parse a path, and expand ~. ValueError otherwise."""
    try:
        return Path(parse_str(value)).expanduser()
    except RuntimeError:  # else a directory called ~name would be made
        raise ValueError(f"~ names a user who has no home directory here, got {value!r}") from None


def parse_repeated(value: Any) -> tuple[str, ...]:
    """Parse like parse_texts, but also accept an empty list."""
    return () if value in ((), []) else parse_texts(value)


def parse_patterns(value: Any) -> str | tuple[str, ...]:
    """Parse one file pattern, which stays text, or several; NAME=PATTERN names a pattern.
    ValueError if two patterns have the same name, or no name."""
    patterns = parse_texts(value)
    names = [named_pattern(pattern)[0] for pattern in patterns]
    for name, pattern in map(named_pattern, patterns):
        if names.count(name) > 1:
            what = f"two patterns are called {name}" if name else "only one may be without a name"
            raise ValueError(f"{what}: write NAME=PATTERN with names that differ")
        part = split_part(pattern)
        if name and (pattern == NONE or part is not None):
            raise ValueError(f"{name} needs files of its own, got {pattern}")
    return patterns[0] if len(patterns) == 1 else patterns


def split_part(pattern: str) -> float | None:
    """Validation share of "split" or "split:PART", 0 to 1; None for other patterns. ValueError."""
    word, colon, number = pattern.partition(":")
    if word != SPLIT:
        return None
    part = parse_float(number) if colon else SPLIT_PART
    if not 0 < part < 1:
        raise ValueError(f"the part of split must be more than 0 and less than 1, got {number}")
    return part


def named_pattern(text: str) -> tuple[str, str]:
    """Name and pattern of NAME=PATTERN; the name is "" if there is none."""
    named = re.fullmatch(r"([\w.-]+)=(.+)", text, re.DOTALL)
    return (named[1], named[2]) if named else ("", text)


def split_weight(text: str) -> tuple[str, float | None]:
    """A pattern of --train-file and the weight after its last colon, `data/a.bin:0.7`, or None. The
    name of an existing file is taken literally. ConfigError for a weight that is not positive."""
    pattern, colon, number = text.rpartition(":")
    if not colon or not pattern or os.path.exists(os.path.expanduser(text)):
        return text, None
    try:
        weight = float(number)
    except ValueError:  # the name has a colon
        return text, None
    if not (math.isfinite(weight) and weight > 0):
        raise ConfigError(
            f"--train-file: the weight of {pattern} must be more than 0, got {number}"
        )
    return pattern, weight


def split_weights(texts: Sequence[str]) -> tuple[list[str], tuple[float, ...] | None]:
    """Return all patterns, and their weights; None without weights or for a single pattern.
    ConfigError if only some patterns have a weight."""
    pairs = [split_weight(text) for text in texts]
    lacking = [pattern for pattern, weight in pairs if weight is None]
    if 0 < len(lacking) < len(pairs):
        raise ConfigError(
            f"--train-file: {lacking[0]} has no weight, others have one: give all of them one, or "
            "none"
        )
    weights = tuple(weight for _, weight in pairs if weight is not None)
    return [pattern for pattern, _ in pairs], weights if len(weights) > 1 else None


def parse_word(value: Any) -> str:
    """Parse one word; case does not matter. ValueError otherwise."""
    return parse_str(value).lower()


def parse_switch(value: Any) -> str:
    """Parse a word; true and false of YAML become on and off. ValueError otherwise."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return parse_word(value)


class UnknownDtype(ValueError):
    """Raised for a word that names no number format."""


def parse_dtype_name(value: Any) -> str:
    """Canonical name ('fp32', 'bf16', ...) of a number format in any spelling, or ValueError."""
    word = parse_word(value)
    if word == "fp8":
        raise ValueError("FP8 alone is ambiguous, give e4m3 or e5m2")
    for name, aliases in DTYPE_ALIASES.items():
        if word in aliases:
            return name
    raise UnknownDtype(f"unknown dtype {value!r}, expected one of {', '.join(DTYPE_ALIASES)}")


def parse_size(value: Any) -> int:
    """Parse bytes: 512MiB and 16G are binary, 16GB is decimal, numbers are bytes. Or ValueError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", str(value).strip().lower())
    if isinstance(value, bool) or not match or match[2] not in _SIZE_UNITS:
        raise ValueError(f"expected a size such as 512MiB or 16GiB, got {value!r}")
    size = float(match[1]) * _SIZE_UNITS[match[2]]
    if size >= _TOO_LARGE:
        raise ValueError(f"expected a size of less than 8192 PiB, got {value!r}")
    return int(size)


def parse_continue(value: Any) -> str | None:
    """Parse --continue: NEWEST (also true), a step number, a path; false becomes None."""
    if isinstance(value, bool):
        return NEWEST if value else None
    return parse_str(value)


def parse_vocab_size(value: Any) -> int | str:
    """Parse a number of tokens, or AUTO. ValueError otherwise."""
    if isinstance(value, str) and value.lower() == AUTO:
        return AUTO
    try:
        number = parse_int(value)
    except ValueError:
        raise ValueError(f"expected a number of tokens or {AUTO}, got {value!r}") from None
    if number < 1:
        raise ValueError(f"must be at least 1, got {number}")
    return number


def parse_every(value: Any) -> int:
    """Parse a number of steps; true: 1 (every step), false: -1 (never). ValueError otherwise."""
    if isinstance(value, bool):
        return 1 if value else -1
    return parse_int(value)


def parse_steps(value: Any) -> float:
    """Parse a number of steps, or a share of the run: 20% and 0.2 are a fifth. Or ValueError."""
    text = str(value).strip()
    share = float(text[:-1]) / 100 if re.fullmatch(r"[\d.]+%", text) else None
    if share is None and isinstance(value, float | str) and re.fullmatch(r"0?\.\d+", text):
        share = float(text)
    if share is None:
        return parse_int(value)
    if not 0 < share < 1:
        raise ValueError(f"expected steps, or a part of the run below 100%, got {value!r}")
    return share


def parse_layers(value: Any) -> str:
    """Parse 'all', or numbers and ranges in the form 0-11,20. ValueError otherwise."""
    text = "".join(str(value).lower().split())
    known = text == "all" or re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", text)
    ranges = (pair.split("-") for pair in re.findall(r"\d+-\d+", text))
    if not known or any(int(first) > int(last) for first, last in ranges):
        raise ValueError(f"expected all or layers such as 0-11,20, got {value!r}")
    return text


def parse_targets(value: Any) -> str:
    """Parse 'all', 'none', some of LORA_TARGETS, or a regular expression. Targets are returned in
    the order of LORA_TARGETS, separated by commas. ValueError otherwise."""
    if isinstance(value, str) and re.search(r"[.*+?|()\[\]\\]", value):
        return _regular(value)
    return value if value in ("all", NONE) else ",".join(_some_of(LORA_TARGETS, value)) or "all"


def parse_numbers(value: Any) -> tuple[str, ...]:
    """Parse PATTERN=NUMBER; several stand between commas or in a mapping. ValueError otherwise."""
    if isinstance(value, Mapping):
        value = [f"{pattern}={number}" for pattern, number in value.items()]
    texts, found = value if isinstance(value, list | tuple) else [value], []
    for text in map(parse_str, texts):
        pairs = re.findall(r"(.+?)=(\d+(?:\.\d+)?)(?:,|$)", text)
        if ",".join(f"{pattern}={number}" for pattern, number in pairs) != text:
            raise ValueError(f"expected PATTERN=NUMBER, with commas between several, got {text!r}")
        found += [f"{_regular(pattern)}={number}" for pattern, number in pairs]
    return tuple(found)


def numbers_of(texts: Iterable[str], kind: type) -> tuple[tuple[str, Any], ...]:
    """Return patterns and their numbers, from the texts of parse_numbers."""
    pairs = (text.rpartition("=") for text in texts)
    return tuple((pattern, kind(number)) for pattern, _, number in pairs)


def parse_lengths(value: Any) -> int | str:
    """Parse a length, or lengths with shares of the steps, 1024:0.8,8192:0.2. Or ValueError."""
    if not isinstance(value, str) or ":" not in value:
        return parse_int(value)
    lengths_of(value)
    return value


def lengths_of(text: str) -> list[tuple[int, float]]:
    """Return lengths and their shares of a run's steps (one length: 1). ValueError otherwise."""
    pairs = [each.partition(":") for each in text.split(",")]
    try:
        found = [(parse_int(length), parse_float(part or 1)) for length, _, part in pairs]
    except ValueError:
        found = []
    if (
        not found
        or min(part for _, part in found) <= 0
        or not math.isclose(sum(part for _, part in found), 1, abs_tol=1e-6)
    ):
        raise ValueError(
            f"expected LENGTH:PART,LENGTH:PART, with parts that are 1 in all, got {text!r}"
        )
    return found


def parse_stages(value: Any) -> str:
    """Parse lengths with shares of the steps, as lengths_of reads them. ValueError otherwise."""
    text = parse_str(value)
    lengths_of(text)
    return text


def parse_rope(value: Any) -> str:
    """Parse KIND:FACTOR,NAME=NUMBER,..., "none", JSON, or a mapping like rope_parameters of
    config.json; return JSON. ValueError otherwise."""
    if isinstance(value, Mapping):
        return json.dumps(dict(value))
    text = parse_str(value)
    if text.startswith("{"):
        return json.dumps(json.loads(text))
    first, *more = text.split(",")
    kind, colon, factor = first.partition(":")
    pairs = [each.partition("=") for each in more]
    if not all(name and number for name, _, number in pairs):
        raise ValueError(f"expected KIND:FACTOR,NAME=NUMBER,..., JSON or none, got {text!r}")
    found = {"rope_type": "default" if kind == "none" else kind}
    numbers = ([("factor", factor)] if colon else []) + [(n, number) for n, _, number in pairs]
    return json.dumps(found | {name: json.loads(number) for name, number in numbers})


def texts_of(numbers: Iterable[tuple[str, Any]]) -> tuple[str, ...]:
    """Texts of patterns and numbers, in the form of parse_numbers."""
    return tuple(f"{pattern}={number:g}" for pattern, number in numbers)


def _regular(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"{text!r} is no regular expression: {error}") from None
    return text


def parse_params(value: Any) -> tuple[str, ...]:
    """Parse NAME=VALUE; several stand in a mapping or between commas. Names are unique, in lower
    case, with - for _. ValueError otherwise."""
    if isinstance(value, Mapping):
        value = [f"{name}={each}" for name, each in value.items()]
    texts = value if isinstance(value, list | tuple) else [value]
    found: dict[str, str] = {}
    for text in (each.strip() for one in texts for each in parse_str(one).split(",")):
        name, _, word = text.partition("=")
        name, word = name.strip().lower().replace("_", "-"), word.strip().lower()
        if not name or not word:
            raise ValueError(f"expected NAME=VALUE, with commas between several, got {text!r}")
        if name in found:
            raise ValueError(f"{name} is given twice")
        found[name] = _plain_number(word)
    return tuple(f"{name}={word}" for name, word in found.items())


def _plain_number(word: str) -> str:
    """The number's shortest text, such as 2 for 2.0; another word unchanged."""
    try:
        number = float(word)
    except ValueError:
        return word
    return f"{int(number)}" if number.is_integer() else f"{number}"


def parse_parts(value: Any) -> tuple[str, ...]:
    """Parse some of LORA_PARTS, or none, from a list or text with commas. ValueError otherwise."""
    return _some_of(LORA_PARTS, value)


def _some_of(known: tuple[str, ...], value: Any) -> tuple[str, ...]:
    texts = value if isinstance(value, list | tuple) else [value]
    words = [word.strip().lower() for text in texts for word in parse_str(text).split(",")]
    unknown = [word for word in words if word not in known]
    if unknown:
        raise ValueError(f"expected some of {', '.join(known)}, got {unknown[0]!r}")
    return tuple(word for word in known if word in words)


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """Command-line and file form of one field of TrainConfig."""

    flags: tuple[str, ...]
    """Spellings on the command line, without dashes; the first is the one that messages use."""
    help: str
    """One line for --help."""
    group: str
    """Panel of --help."""
    parse: Callable[[Any], Any]
    """Function from text or a YAML value to the field's value; its ValueError says what was
    expected."""
    choices: Collection[str] = ()
    """All permitted values; empty: any."""
    min: float | None = None
    max: float | None = None
    above: float | None = None
    below: float | None = None

    @property
    def repeats(self) -> bool:
        """True if the command line may give the option several times."""
        several = (
            parse_texts,
            parse_repeated,
            parse_patterns,
            parse_parts,
            parse_numbers,
            parse_params,
        )
        return self.parse in several

    @property
    def flag(self) -> str:
        """The name in messages, with dashes."""
        return f"--{self.flags[0]}"

    @property
    def metavar(self) -> str:
        """Placeholder of the value in --help: its choices, if they fit into a line."""
        return w if 0 < len(w := "|".join(self.choices)) < 67 else _METAVARS.get(self.parse, "WORD")

    def spelled(self, value: Any) -> list[str]:
        """Words of the command line that give this value: one word, or one for each of several
        values."""
        if self.parse is parse_bool:
            return [self.flag if value else f"--no-{self.flags[0]}"]
        values = value if isinstance(value, tuple) else (value,)
        return [f"{self.flag}={each}" for each in values]

    def convert(self, value: Any) -> Any:
        """Return the field's value. Raises ConfigError that names the flag."""
        try:
            return self.parse(value)
        except UnknownDtype:
            known = ", ".join(self.choices)
            raise ConfigError(
                f"{self.flag}: unknown dtype {value!r}, expected one of {known}"
            ) from None
        except ValueError as error:
            raise ConfigError(f"{self.flag}: {error}") from None

    def check(self, value: Any) -> None:
        """Raise ConfigError unless the value is within choices and limits."""
        if value is None:
            raise ConfigError(f"{self.flag}: has no value")
        if self.choices and value not in self.choices:
            raise ConfigError(f"{self.flag}: expected {' or '.join(self.choices)}, got {value!r}")
        counts, unit = self.parse in (parse_int, parse_steps), " bytes" * (self.parse is parse_size)
        if self.min is not None and value < self.min:
            raise ConfigError(f"{self.flag}: must be at least {self.min}{unit}, got {value}{unit}")
        largest = _LARGEST if self.max is None and counts else self.max
        if largest is not None and value > largest:
            raise ConfigError(f"{self.flag}: must be at most {largest}, got {value}")
        if self.above is not None and value <= self.above:
            raise ConfigError(f"{self.flag}: must be more than {self.above}, got {value}")
        if self.below is not None and value >= self.below:
            raise ConfigError(f"{self.flag}: must be less than {self.below}, got {value}")


_LARGEST = 2**31 - 1  # default limit of numbers
_METAVARS: dict[Callable[[Any], Any], str] = {
    parse_bool: "",
    parse_int: "INT",
    parse_float: "FLOAT",
    parse_str: "TEXT",
    parse_texts: "TEXT",
    parse_name: "TEXT",
    parse_path: "PATH",
    parse_repeated: "TEXT",
    parse_patterns: "[NAME=]TEXT",
    parse_size: "SIZE",
    parse_lengths: "INT|INT:PART,...",
    parse_stages: "INT:PART,...",
    parse_continue: "[STEP|PATH]",
    parse_every: "[INT]",
    parse_steps: "INT|PERCENT",
    parse_layers: "LAYERS",
    parse_targets: "all|q,k,...",
    parse_parts: "PART,...",
    parse_numbers: "PATTERN=N",
    parse_params: "NAME=VALUE,...",
    parse_rope: "KIND:FACTOR",
    parse_vocab_size: "N|auto",
}


_PARSERS: dict[str, Callable[[Any], Any]] = {
    "bool": parse_bool,
    "int": parse_int,
    "float": parse_float,
    "str": parse_str,
    "Path": parse_path,
    "tuple[str, ...]": parse_texts,
}
"""Parsers by the text of the field's type."""


def option(default: Any, help: str, **more: Any) -> Any:
    """Return a dataclass field that is an option, which options_of reads back.

    more: group, the panel of --help (default: the panel of the option before); flag, the spelling
    without dashes (default: the field's name); alias, a second spelling; parse (default: by the
    field's type, or as a word if there are choices); choices and limits as in Option.
    """
    return dataclasses.field(default=default, metadata={"help": help, **more})


def switch(help: str, **more: Any) -> Any:
    """An option that is off unless given."""
    return option(False, help, **more)


def dtype_option(default: str | None, help: str, *others: str, **more: Any) -> Any:
    """An option for a number format: bf16, fp32, or one of `others`. more: as in `option`."""
    more |= {"choices": ("bf16", "fp32", *others)}
    return option(default, help, parse=parse_dtype_name, **more)


def options_of(config_class: type) -> dict[str, Option]:
    """Return the options of a dataclass by field name, in order: the fields made with option()."""
    options, group = {}, ""
    for field in dataclasses.fields(config_class):
        if not (meta := dict(field.metadata)):
            continue
        group = meta.pop("group", group)
        flags = [meta.pop("flag", field.name.replace("_", "-"))]
        flags += [meta.pop("alias")] if "alias" in meta else []
        if "parse" not in meta:
            by_type = _PARSERS[field.type.removesuffix(" | None")]
            meta["parse"] = parse_word if "choices" in meta else by_type
        options[field.name] = Option(flags=tuple(flags), group=group, **meta)
    return options


def layer_set(text: str, num_layers: int) -> frozenset[int]:
    """Return the layers of "all", or of numbers and ranges such as 0-11,20. ValueError for a layer
    beyond num_layers."""
    if text == "all":
        return frozenset(range(num_layers))
    layers: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        if int(last or first) >= num_layers:  # before a huge set is made
            raise ValueError(f"{text} names layers that a model of {num_layers} does not have")
        layers.update(range(int(first), int(last or first) + 1))
    return frozenset(layers)
