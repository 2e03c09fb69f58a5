"""Model and tokenizer of a run: the model is --model with changed sizes; the tokenizer must be the
same for data, model and checkpoint."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmq.arch.model_config import ModelConfig
from llmq.base.errors import ConfigError, DataError, warn
from llmq.checkpoint import hub, peft
from llmq.checkpoint.store import recorded_tokenizer
from llmq.data.checksums import find_token_files
from llmq.data.document_file import documents_path
from llmq.data.identity import TokenizerId, read_manifest, tokenizers_of_files
from llmq.data.tokens import TokenFile, open_token_files
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
from llmq.text.guarded import guarded_tokenizer
from llmq.text.tokenizer import ByteTokenizer, HfTokenizer
from llmq.text.tokenizer_files import difference, new_tokens, parse_tokens
from llmq.text.tokenizer_id import tokenizer_of_folder

MUCH_LARGER = 2  # factor between vocabularies of model and data; padding stays far below it


def model_of_run(config: TrainConfig, *, weights: bool = True) -> tuple[ModelConfig, Path | None]:
    """Return the configuration and the directory of --model; a preset has no directory. weights:
    False if no weights will be read, so that --download skips weights. Raises ConfigError or
    DataError."""
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
    """Return the model with the run's head: a score head (--num-labels), or the LM head.

    Raises ConfigError if the model has a score head of another size.
    """
    wanted = config.num_labels or 0
    if model.num_labels in (0, wanted):
        return replace(model, num_labels=wanted, tied_embeddings=False) if wanted else model
    count = model.num_labels
    asked = f"--num-labels {wanted}" if wanted else "--model"
    raise ConfigError(
        f"{asked}: '{config.model}' has a score head of {count} label{'s' * (count > 1)}: give "
        f"--num-labels {count}"
    )


def at_commit(config: TrainConfig, model_dir: Path | None) -> TrainConfig:
    """Return the options with --revision set to the commit of the model's repository. A continued
    run and its exports then know the exact model."""
    return replace(config, revision=revision_of(model_dir) or config.revision)


def with_new_tokens(config: TrainConfig, model: ModelConfig, model_dir: Path | None) -> ModelConfig:
    """Return the model with a vocabulary that has room for --add-tokens; some models have spare
    rows."""
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
    """Return options, model and model directory for a plan. Without --from-scratch a preset's name
    means the released model of this name. Other models are found as by model_of_run, without
    weights."""
    unread = config.from_scratch or config.download
    unread = unread or find_directory(pinned(config.model, config.revision)) is not None
    trained = None if unread else released(config.model)
    if trained is not None:
        repository, model = trained
        if config.add_tokens is not None:
            model = with_new_tokens(config, model, None)
        model = with_head(config, resized(model, given_sizes(config)))
        return replace(config, model=repository, download=True), model, None
    if not unread and is_preset(config.model):  # no trained model has these sizes
        config = replace(config, from_scratch=True)
    return config, *model_of_run(config, weights=False)


def packing_of_data(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return options that the training files need, by field: best-fit packing for conversations,
    token_weights for files with weights, {} for other files. values: given options, by field."""
    patterns = values.get("train_file")
    if not patterns:
        return {}
    try:
        files = open_token_files(split_weights(patterns)[0])
    except (ConfigError, DataError):  # reading the files will raise the same error
        return {}
    loss = "score head" if values.get("num_labels") else f"--loss {values.get('loss', 'ce')}"
    found = {}
    if any(file.has_weights for file in files):
        if loss == "--loss ce":
            found = {"token_weights": True}
        else:
            warn(f"{loss}: weights of messages in the token files do not count, only which are 0")
    if "packing" in values or values.get("document_mask") is False:
        return found
    known = "document_separator" in values or all(documents_path(f.path).exists() for f in files)
    conversations = known and any(file.has_masks for file in files)
    return found | ({"packing": "best-fit"} if conversations else {})


def _download(config: TrainConfig, weights: bool) -> None:
    """Download the files of --model that the cache lacks. Raises ConfigError without --download."""
    name = pinned(config.model, config.revision)
    from_hub = hub.is_hub_id(name) and not (config.from_scratch and is_preset(config.model))
    if config.revision is not None and not from_hub:
        raise ConfigError(f"--revision: --model {config.model} is no repository of the hub")
    known = find_directory(name) is not None or config.download
    if not from_hub or not known:  # resolve_model raises an error with suggestions
        if config.download:
            what = "a preset" if is_preset(config.model) else "no name of the hub"
            warn(f"--download has no effect: --model {name} is {what}")
        return
    parts = [hub.MODEL, *([hub.WEIGHTS] if weights else [])]
    missing = hub.lacking(name, parts)
    if missing is None and config.download:
        warn(f"--download has no effect: {name} is in the cache")
    elif missing is not None:
        if not config.download:
            raise hub.offer("--model", name, missing)
        hub.download("--model", name, [*parts, hub.TOKENIZER])


def _vocab_size_of_data(config: TrainConfig) -> int:
    """Return the largest vocabulary size in the headers of the training and validation files."""
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
    """Return the vocabulary sizes in a run's token files. Raises DataError for a missing or damaged
    file."""
    own = [config.eval_pattern] if config.validates and not config.splits else []
    own += config.eval_sets.values()
    files = open_token_files([*config.train_patterns, *own])
    return {file.vocab_size for file in files} - {0}


def vocabulary_line(config: TrainConfig, model: ModelConfig, *, trains: bool) -> str | None:
    """Return a line about a new model whose vocabulary is too small or much too large for the data;
    None if sizes agree or no file exists yet. trains: True if the data train the model; too small a
    vocabulary then raises ConfigError."""
    if not config.from_scratch or config.vocab_size == AUTO:
        return None
    try:
        data = max(_known_sizes(config), default=None)
    except DataError:  # reading the files will raise the same error
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


# ------------------------------------------------------------------------------------------------
# The tokenizer of a run


SAMPLE_TOKENS = 20_000  # tokens of training text with which an exported tokenizer is tested


def agreed_tokenizer(
    config: TrainConfig, model_dir: Path | None, checkpoint: Path | None = None
) -> TokenizerId | None:
    """Return the identity of the training data's tokenizer, from token files, model or checkpoint.
    Raises DataError if two recorded identities differ, unless --allow-other-tokenizer is given."""
    found = [(what, made) for what, made in _of_files(config) if made is not None]
    data = found[0][1] if found else None
    if model_dir is not None and not config.from_scratch:
        made = tokenizer_of_folder(model_dir)
        if config.add_tokens is not None:
            made = new_tokens(model_dir, parse_tokens(config.add_tokens)).made
        found.append((f"the model in '{model_dir}'", made))
    if checkpoint is not None:
        found.append((f"the checkpoint '{checkpoint}'", recorded_tokenizer(checkpoint)))
    known = [(what, made) for what, made in found if made is not None]
    if config.allow_other_tokenizer:
        if len({made.fingerprint for _, made in known}) < 2:
            warn("--allow-other-tokenizer has no effect: no other tokenizer is known of")
    else:
        for what, made in known[1:]:
            check_same(*known[0], what, made)
    return data or (known[0][1] if known else None)


def unknown_tokenizer(config: TrainConfig) -> str | None:
    """Return the warning about token files that do not name their tokenizer; None if all files
    do."""
    silent = [what for what, made in _of_files(config) if made is None]
    if not silent:
        return None
    files = f"{silent[0]} and {len(silent) - 1} more do" if len(silent) > 1 else f"{silent[0]} does"
    return f"{files} not say which tokenizer made the ids: not compared with the model's"


def lost_tokenizer(config: TrainConfig, made: TokenizerId | None, source: str | None) -> str | None:
    """Return a warning if the data's tokenizer is known but its files were not found; else None."""
    if made is None or source is not None:
        return None
    folder = find_token_files(config.train_patterns[0])[0].parent / "tokenizer"
    return (
        f"WARNING: the data are of the tokenizer {made}, whose files are not in '{folder}': the "
        "model will have no tokenizer unless they are put there"
    )


def _of_files(config: TrainConfig) -> Iterator[tuple[str, TokenizerId | None]]:
    patterns = [("--train-file", pattern) for pattern in config.train_patterns]
    if config.validates and not config.splits:
        patterns.append(("--eval-file", config.eval_pattern))
    patterns += [("--eval-file", pattern) for pattern in config.eval_sets.values()]
    for flag, pattern in patterns:
        for path, made in tokenizers_of_files(pattern):
            yield f"{flag}: '{path}'", made


def check_same(one: str, its: TokenizerId, other: str, others: TokenizerId) -> None:
    """Raise DataError if the tokenizers of two files or folders differ. one, other: names of the
    files in messages. its, others: identities of the tokenizers of `one` and `other`."""
    if its.fingerprint != others.fingerprint:
        raise DataError(
            f"{one} is of the tokenizer {its}, but {other.split(': ')[-1]} of {others}: tokenize "
            "the data with the same one, give --add-tokens if this was given there, or "
            "--allow-other-tokenizer if you know that their ids agree"
        )


def with_tokens_of(
    config: TrainConfig, model: ModelConfig, model_dir: Path | None, made: TokenizerId | None
) -> ModelConfig:
    """Return a new model's configuration with the special tokens of the data's tokenizer, unless
    this tokenizer is model_dir's or is unknown. If the data are conversations, the id that ends a
    turn also ends texts."""
    if config.from_scratch:
        model = _with_tokens(model, model_dir, made)
    for pattern in config.train_patterns:
        for folder in {path.parent for path in find_token_files(pattern)}:
            model = model.ending_at([read_manifest(folder).get("end_of_turn")])
    return model


def _with_tokens(
    model: ModelConfig, model_dir: Path | None, made: TokenizerId | None
) -> ModelConfig:
    own = model_dir and tokenizer_of_folder(model_dir)
    if made is None or (own is not None and own.fingerprint == made.fingerprint):
        return model
    return replace(
        model,
        eos_token_id=made.eos_id,
        bos_token_id=made.bos_id,
        other_eos_token_ids=(),
        pad_token_id=None,
    )


def tokenizer_source(
    config: TrainConfig, model: ModelConfig, model_dir: Path | None, made: TokenizerId | None
) -> str | None:
    """Return where a run's tokenizer is: "bytes", a directory, or None if unknown. The model's
    directory comes first; for conversations the copy beside the token files comes first, because
    this copy has the chat template."""
    first = config.train_patterns[0]
    files = find_token_files(first) or [Path(first)]
    if made is None and config.vocab_size is not None:
        model_dir = None  # the model's own tokenizer has another vocabulary
    folders = [model_dir, files[0].parent / "tokenizer"]
    if "end_of_turn" in read_manifest(files[0].parent):
        folders.reverse()
    for folder in folders:
        if folder is not None and any((folder / f).is_file() for f in HfTokenizer.FILES):
            its = made and tokenizer_of_folder(folder)
            if its is None or its.fingerprint == made.fingerprint:
                return str(folder.resolve())
    is_bytes = made is None or made.fingerprint == ByteTokenizer.fingerprint
    return "bytes" if is_bytes and model.vocab_size == ByteTokenizer.vocab_size else None


def exported_otherwise(directory: Path, source: Path, train_file: str) -> list[str]:
    """Return a warning if transformers' tokenizer, loaded from an exported model, encodes a sample
    of the training text differently; else []. directory: the exported model. source: folder of the
    training data's tokenizer."""
    try:
        file = TokenFile(find_token_files(train_file)[0])
        ids = file.read_tokens(0, min(file.num_tokens, SAMPLE_TOKENS))
        tokenizer = guarded_tokenizer(source)
        text = tokenizer.decode(ids.tolist())
    except (DataError, IndexError, OverflowError):
        return []
    found = difference(directory, tokenizer, text)
    return [] if found is None else [f"AutoTokenizer of '{directory}' {found}"]
