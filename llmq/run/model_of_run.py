"""The model that a run's options describe: that of --model, with own sizes where they are given."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmq.arch.model_config import ModelConfig
from llmq.base.errors import ConfigError, DataError, warn
from llmq.checkpoint import hub, peft
from llmq.data.document_file import documents_path
from llmq.data.new_tokens import new_tokens, parse_tokens
from llmq.data.tokens import open_token_files
from llmq.options.option_types import AUTO, split_weights
from llmq.options.options import TrainConfig
from llmq.options.presets import (
    find_directory,
    is_preset,
    pinned,
    released,
    resolve_model,
    revision_of,
)
from llmq.options.sizes import given_sizes, resized

MUCH_LARGER = 2  # times the data's vocabulary: more than any tokenizer is padded


def model_of_run(config: TrainConfig, *, weights: bool = True) -> tuple[ModelConfig, Path | None]:
    """The configuration, and the directory of --model, None for a preset.

    weights: they will be read too, unless the run is from scratch; --download fetches what is
    needed. --vocab-size auto reads the headers of the token files. Raises ConfigError or DataError.
    """
    _download(config, weights and not config.from_scratch)
    name = pinned(config.model, config.revision)
    model, model_dir = resolve_model(name, config.from_scratch)
    given = given_sizes(config)
    if given.get("vocab_size") == AUTO:
        given["vocab_size"] = _vocab_size_of_data(config)
    if config.add_tokens is not None:
        model = with_new_tokens(config, model, model_dir)
    if config.adapter is not None:
        model = peft.with_additions(model, config.adapter)
    return with_head(config, resized(model, given)), model_dir


def with_head(config: TrainConfig, model: ModelConfig) -> ModelConfig:
    """With the head that a run has: a score head, if it is new, begins with random numbers.

    ConfigError where the model's own head is another one.
    """
    wanted = config.num_labels if config.head == "score" else 0
    if model.num_labels in (0, wanted):
        return replace(model, num_labels=wanted, tied_embeddings=False) if wanted else model
    count = model.num_labels
    asked = f"--num-labels {wanted}" if wanted else "--head lm"
    raise ConfigError(
        f"{asked}: '{config.model}' has a score head of {count} label{'s' * (count > 1)}: give "
        f"--head score --num-labels {count}"
    )


def at_commit(config: TrainConfig, model_dir: Path | None) -> TrainConfig:
    """The options with the commit of the repository that the model is of, by which a run that goes
    on and its exports know it."""
    return replace(config, revision=revision_of(model_dir) or config.revision)


def with_new_tokens(config: TrainConfig, model: ModelConfig, model_dir: Path | None) -> ModelConfig:
    """With a vocabulary that --add-tokens fits into; some models have rows to spare."""
    if model_dir is None:
        raise ConfigError("--add-tokens: needs a model with a tokenizer, a directory as --model")
    first, count, _ = new_tokens(model_dir, parse_tokens(config.add_tokens))
    if first > model.vocab_size:
        raise ConfigError(
            f"--add-tokens: the tokenizer in '{model_dir}' has {first} ids, more than the "
            f"{model.vocab_size} rows of the model: they do not belong together"
        )
    rows = max(model.vocab_size, first + count)
    return replace(model, vocab_size=rows, new_tokens=(first, first + count))


def planned_model(config: TrainConfig) -> tuple[TrainConfig, ModelConfig, Path | None]:
    """Choose as model_of_run does, for a plan, where a preset's name means the trained model of its
    sizes.

    Returns the options of the run that it is a plan of, too: their --model can be trained.
    """
    unread = config.from_scratch or config.download
    unread = unread or find_directory(pinned(config.model, config.revision)) is not None
    trained = None if unread else released(config.model)
    if trained is not None:
        repository, model = trained
        if config.add_tokens is not None:
            model = with_new_tokens(config, model, None)
        model = with_head(config, resized(model, given_sizes(config)))
        return replace(config, model=repository, download=True), model, None
    if not unread and is_preset(config.model):  # nobody has trained it
        config = replace(config, from_scratch=True)
    return config, *model_of_run(config, weights=False)


def packing_of_data(values: Mapping[str, Any]) -> dict[str, Any]:
    """Whole conversations in sequences where the training files hold some, and their weights; {}:
    as for any data.

    values: what is given, by field name. Windows of the files would cut questions off answers.
    """
    patterns = values.get("train_file")
    if not patterns:
        return {}
    try:
        files = open_token_files(split_weights(patterns)[0])
    except (ConfigError, DataError):  # whoever reads them will say it
        return {}
    unweighted = "token_weights" in values or not any(file.has_weights for file in files)
    found = {} if unweighted else {"token_weights": True}
    if "packing" in values or values.get("document_mask") is False:
        return found
    known = "document_separator" in values or all(documents_path(f.path).exists() for f in files)
    conversations = known and any(file.has_masks for file in files)
    return found | ({"packing": "best-fit"} if conversations else {})


def _download(config: TrainConfig, weights: bool) -> None:
    """See that what of the hub is needed is in the cache. ConfigError if it is not."""
    name = pinned(config.model, config.revision)
    from_hub = hub.is_hub_id(name) and not (config.from_scratch and is_preset(config.model))
    if config.revision is not None and not from_hub:
        raise ConfigError(f"--revision: --model {config.model} is no repository of the hub")
    known = find_directory(name) is not None or config.download
    if not from_hub or not known:  # resolve_model says what else could be meant
        if config.download:
            what = "a preset" if is_preset(config.model) else "no name of the hub"
            warn([f"--download has no effect: --model {name} is {what}"])
        return
    parts = [hub.MODEL, *([hub.WEIGHTS] if weights else [])]
    missing = hub.lacking(name, parts)
    if missing is None and config.download:
        warn([f"--download has no effect: {name} is in the cache"])
    elif missing is not None:
        if not config.download:
            raise hub.offer("--model", name, missing)
        hub.download("--model", name, [*parts, hub.TOKENIZER])


def _vocab_size_of_data(config: TrainConfig) -> int:
    """The number in the headers of the training and validation files, which is that of the ids."""
    try:
        sizes = _known_sizes(config)
    except DataError as error:
        raise DataError(f"--vocab-size: auto reads --train-file: {error}") from None
    if not sizes:
        raise ConfigError(
            f"--vocab-size: auto: '{config.train_patterns[0]}' does not say how large its "
            "vocabulary is (version 1): give the number"
        )
    return max(sizes)


def _known_sizes(config: TrainConfig) -> set[int]:
    """Vocabularies of a run's token files; DataError for one that is missing or damaged."""
    own = [config.eval_pattern] if config.validates and not config.splits else []
    own += config.eval_sets.values()
    files = open_token_files([*config.train_patterns, *own])
    return {file.vocab_size for file in files} - {0}


def vocabulary_line(config: TrainConfig, model: ModelConfig, *, trains: bool) -> str | None:
    """The line on a new model's vocabulary beside that of its data; None: it fits, or there is no
    such file yet.

    model: of `model_of_run`. trains: on these data, so ConfigError where the model has fewer ids.
    """
    if not config.from_scratch or config.vocab_size == AUTO:
        return None
    try:
        data = max(_known_sizes(config), default=None)
    except DataError:  # whoever reads them will say it
        return None
    given = config.vocab_size is not None
    if data is None or data <= model.vocab_size < (MUCH_LARGER * data if not given else math.inf):
        return None
    whose = f"--vocab-size: {model.vocab_size} is" if given else f"--model: {config.model} has"
    them = f"the {data} tokens of the tokenizer of '{config.train_patterns[0]}'"
    if data > model.vocab_size:
        said = "less than" if given else f"a vocabulary of {model.vocab_size}, less than"
        line = f"{whose} {said} {them}: give --vocab-size auto, or {data}"
        if trains:
            raise ConfigError(line)
        return line
    saved = (model.vocab_size - data) * model.hidden_size * (1 if model.tied_embeddings else 2)
    return (
        f"{whose} a vocabulary of {model.vocab_size}, far more than {them}: --vocab-size auto "
        f"saves {saved / 1e6:.1f}M parameters that nothing trains"
    )
