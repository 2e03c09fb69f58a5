"""The tokenizers of a run's data, its model and its checkpoint: it must be the same one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from llmq.arch.model_config import ModelConfig
from llmq.base.errors import DataError, warn
from llmq.checkpoint.store import recorded_tokenizer
from llmq.data.identity import (
    TokenizerId,
    read_manifest,
    tokenizer_of_folder,
    tokenizers_of_files,
)
from llmq.data.new_tokens import new_tokens, parse_tokens
from llmq.data.patterns import find_token_files
from llmq.data.tokenizer import ByteTokenizer, HfTokenizer
from llmq.data.tokenizer_config import difference
from llmq.data.tokens import TokenFile
from llmq.options.options import TrainConfig

SAMPLE_TOKENS = 20_000  # of the training text, on which an exported tokenizer is tried


def agreed_tokenizer(
    config: TrainConfig, model_dir: Path | None, checkpoint: Path | None = None
) -> TokenizerId | None:
    """The tokenizer that made the training data, as far as something says so.

    model_dir: its tokenizer counts unless the run is from scratch. checkpoint: to go on from.
    DataError if one of those that are known is another one, without --allow-other-tokenizer.
    """
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
            warn(["--allow-other-tokenizer has no effect: no other tokenizer is known of"])
    else:
        for what, made in known[1:]:
            check_same(*known[0], what, made)
    return data or (known[0][1] if known else None)


def unknown_tokenizer(config: TrainConfig) -> str | None:
    """The warning about token files that do not name their tokenizer; None if all do."""
    silent = [what for what, made in _of_files(config) if made is None]
    if not silent:
        return None
    files = f"{silent[0]} and {len(silent) - 1} more do" if len(silent) > 1 else f"{silent[0]} does"
    return f"{files} not say which tokenizer made the ids: not compared with the model's"


def lost_tokenizer(config: TrainConfig, made: TokenizerId | None, source: str | None) -> str | None:
    """The warning if the tokenizer of the data is known, but its files are nowhere."""
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
    """DataError if two things, which `one` and `other` name, are of different tokenizers."""
    if its.fingerprint != others.fingerprint:
        raise DataError(
            f"{one} is of the tokenizer {its}, but {other.split(': ')[-1]} of {others}: tokenize "
            "the data with the same one, give --add-tokens if this was given there, or "
            "--allow-other-tokenizer if you know that their ids agree"
        )


def with_tokens_of(
    config: TrainConfig, model: ModelConfig, model_dir: Path | None, made: TokenizerId | None
) -> ModelConfig:
    """A model's configuration with the special tokens of its data's tokenizer, if it is a new one.

    model_dir: where the configuration comes from; if that is a model of this tokenizer, or what
    made the data is unknown, they stay as they are. Every model that is trained on conversations
    also stops at the end of a turn.
    """
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
    """The place of a run's tokenizer: "bytes", a directory, or None if there is no trace of it.

    A model directory has its own; `llmq tokenize` leaves a copy beside the token files, which wins
    if it made conversations: it has their chat template. One that is known not to have made the
    data is left out.
    """
    first = config.train_patterns[0]
    files = find_token_files(first) or [Path(first)]
    if made is None and config.vocab_size is not None:
        model_dir = None  # its tokenizer is of its own vocabulary
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
    """A line to warn of if transformers' tokenizer of an exported model makes other ids.

    source: where the training's tokenizer is. A sample of the training text decides; without
    transformers, and without a text, nothing is known.
    """
    try:
        file = TokenFile(find_token_files(train_file)[0])
        ids = file.read_tokens(0, min(file.num_tokens, SAMPLE_TOKENS))
        tokenizer = HfTokenizer(source)
        text = tokenizer.decode(ids.tolist())
    except (DataError, IndexError, OverflowError):
        return []
    found = difference(directory, tokenizer, text)
    return [] if found is None else [f"AutoTokenizer of '{directory}' {found}"]
