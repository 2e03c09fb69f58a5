"""README.md of an export: the model card that hubs show, with model, training data and options."""

import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from llmq.base.console import printable
from llmq.base.errors import LlmqError, warn
from llmq.base.files import values_of, write_file
from llmq.checkpoint.exports.source import Source, saved_config
from llmq.checkpoint.hub import is_hub_id
from llmq.options.option_file import fewest_values
from llmq.options.options import ONCE, OPTIONS, TrainConfig
from llmq.options.presets import find_directory
from llmq.report.plot import read_log

CARD = "README.md"
_MARK = "Written by `llmq export`."
_LIBRARIES = {"hf": "transformers", "fp8": "transformers", "gguf": "gguf"}
_LIBRARIES |= {"bitnet": "transformers"}
# Options that the card leaves out: prompts, and paths, which are valid on one machine only and may
# name a user.
_PRIVATE = ("model", "adapter", "out_dir", "checkpoint_dir", "log_file", "train_file", "eval_file")
_PRIVATE += ("eval_task", "scores", "sample_prompt", "tensorboard", "wandb", "prompts", "reward")
_MARKUP = re.compile(r"([\\`*_\[\]<>|~$&:])")


def write_card(folder: Path, source: Source, to: str, dtype: str, licence: str | None) -> list[str]:
    """Write README.md into the folder of an export; return [its name]. A README.md that llmq has
    not written stays, with a warning, and [] is returned. to, dtype, licence: see `card`."""
    path = folder / CARD
    with suppress(FileNotFoundError, UnicodeDecodeError):
        if _MARK not in path.read_text("utf-8"):
            warn(f"'{path}' stays: llmq has not written it")
            return []
    write_file(path, card(source, to, dtype, licence))
    return [CARD]


def card(source: Source, to: str, dtype: str, licence: str | None) -> str:
    """Return the text of README.md. to: value of --format. dtype: name of the weights' dtype.
    licence: the hub's name of a licence, such as apache-2.0; None: the initial model's licence."""
    config = None if source.manifest is None else saved_config(source.manifest)
    base = _base(source, config)
    head = {"license": licence} if licence else _licence(base, source)
    if base and is_hub_id(base):
        head |= {"base_model": base}
    elif base:
        base = Path(base).name
    library = "peft" if source.adapters is not None and to == "hf" else _LIBRARIES[to]
    head |= {"library_name": library, "tags": ["llmq"]}
    parts = [f"---\n{yaml.safe_dump(head, sort_keys=False)}---\n\n# {_plain_text(source.name)}\n"]
    what = f"Adapters of {_plain_text(base)}" if source.adapters is not None else _sizes(source)
    parts.append(f"{what}; {to}, {dtype}.\n")
    if config is not None:
        parts.append(_training(source, config))
    return "\n".join([*parts, f"{_MARK}\n"])


def _base(source: Source, config: TrainConfig | None) -> str | None:
    """Return name or path of the initial model, or of the adapters' base model; None if unknown."""
    hub, of_adapters = source.origin.get("hub"), source.origin.get("base")
    if hub is not None:
        return hub.name
    if of_adapters is not None:
        return of_adapters.name
    if source.settings is not None:
        return source.settings.base
    return None if config is None or config.from_scratch else config.model


def _licence(base: str | None, source: Source) -> dict[str, Any]:
    """Return the licence fields of README.md in the source's folder or in its base model's; {} if
    both lack them."""
    folders = [source.folder, find_directory(base) if base else None]
    for folder in (folder for folder in folders if folder is not None):
        with suppress(OSError, ValueError, yaml.YAMLError):
            _, head, _ = (folder / CARD).read_text("utf-8").split("---", 2)
            fields = yaml.safe_load(head)
            fields = fields if isinstance(fields, dict) else {}
            licence = {n: v for n, v in fields.items() if str(n).startswith("license")}
            if licence:
                return licence
    return {}


def _sizes(source: Source) -> str:
    model = source.model
    count = sum(param.count for slab in source.table for param in slab.params)
    return (
        f"{model.arch.label} of {count:,} parameters: {model.num_layers} layers, "
        f"{model.hidden_size} channels, {model.num_heads} heads ({model.num_kv_heads} of keys and "
        f"values), a vocabulary of {model.vocab_size}, {model.max_positions} positions"
    )


def _training(source: Source, config: TrainConfig) -> str:
    """Return Markdown with data, losses and options of the training, and the commands that repeat
    the training."""
    rows = {"run": source.origin.get("run"), "step": source.step}
    rows["training data"] = ", ".join(Path(p).name for p in config.train_patterns)
    rows["tokenizer"] = source.origin.get("made")
    rows |= _losses(config, source.step) | _best(source)
    table = "\n".join(f"| {_plain_text(n)} | {_plain_text(v)} |" for n, v in rows.items() if v)
    values = {n: v for n, v in fewest_values(config).items() if n not in (*_PRIVATE, *ONCE)}
    options = {OPTIONS[n].flags[0]: _plain(value) for n, value in values.items()}
    text = yaml.safe_dump(options, sort_keys=False) if options else "# all as by default\n"
    fence = "`" * max([3, *(len(run) + 1 for run in re.findall("`+", text))])
    return (
        f"## Training\n\n| | |\n| --- | --- |\n{table}\n\nThe options that are not as by default. "
        "With them in a file, `llmq plan --config FILE --model …` says what memory and time the "
        f"training takes, and `llmq train` repeats it:\n\n{fence}yaml\n{text}{fence}\n"
    )


def _plain_text(value: Any) -> str:
    """Return a text from outside as one line of Markdown, with its markup escaped."""
    return _MARKUP.sub(r"\\\1", printable(" ".join(str(value).split())))


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value, default=str))


def _losses(config: TrainConfig, step: int) -> dict[str, Any]:
    """Return the last training loss, and the last loss of each validation, up to this step; {}
    without the run's log."""
    try:
        records = [r for r in read_log(Path(config.log_file)) if r["step"] <= step]
    except LlmqError:
        return {}
    names = {"step": "training loss", "eval": "validation loss"}
    known = [r for r in records if r["log"] in names and r.get("loss") is not None]
    labels = [f"{names[r['log']]} {r.get('name', '')}".rstrip() for r in known]
    return {label: f"{r['loss']:.4f}" for label, r in zip(labels, known, strict=True)}


def _best(source: Source) -> dict[str, Any]:
    """Return a table row with metric and value if the source is the run's best checkpoint, else
    {}."""
    best = source.manifest.state.get("history", {}).get("best")
    fields = values_of(best, metric=str, step=int, value=float) if best else None
    if fields is None or fields[1] != source.step:
        return {}
    metric, _, value = fields
    return {f"best {metric} up to this step": f"{value:.6g}"}
