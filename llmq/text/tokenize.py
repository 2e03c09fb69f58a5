"""Tokenization of texts and conversations to token files, in constant memory, resumable.

One process reads and writes, and worker processes encode; results keep the order of the inputs.
Every few seconds files are forced to the disk, and the position in the input is saved. After an
interruption the same command resumes at the saved position, and writes files that are equal to the
byte.
"""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from llmq.base.errors import ConfigError, DataError
from llmq.base.locks import LOCK, locked
from llmq.base.records import MAX_RECORD
from llmq.base.worker import Bounds, in_worker
from llmq.data.tokens import MAX_TOKENS
from llmq.report.views import Progress
from llmq.text.chat_masks import TRAIN_ON, Chat, Completion
from llmq.text.chat_template import end_of_turn, lacking_tokens, load_chat_template
from llmq.text.conversations import CLASSES, LABELS, PAIRS, PLAIN, TEXT, RecordConversation
from llmq.text.encode import Encoder, Recipe, encode_in_workers
from llmq.text.inputs import (
    Block,
    DocumentPart,
    EvalSplit,
    HubDataset,
    InputSource,
    Portions,
    Position,
    find_sources,
    read_blocks,
    reading_standard_input,
    with_others,
)
from llmq.text.record_format import DEFAULT_FIELD, RecordText, choose_format
from llmq.text.token_shards import SPLITS, Manifest, ShardWriter, TokenizeSummary, open_manifest
from llmq.text.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer

SHARD_TOKENS = 100_000_000  # default of --shard-tokens
NO_TEMPLATE = "none"  # value of --chat-template that leaves out the tokenizer's template
_SMALL_INPUT = 4 << 20  # bytes; starting workers takes longer than encoding a smaller input


@reading_standard_input
def tokenize(
    inputs: Sequence[str],
    *,
    tokenizer: str,
    out: str | Path,
    field: str = DEFAULT_FIELD,
    template: str | None = None,
    dataset: HubDataset | None = None,
    eval_fraction: float = 0.01,
    shard_tokens: int = SHARD_TOKENS,
    seed: int = 0,
    workers: int | None = None,
    overwrite: bool = False,
    progress: bool = True,
    special_tokens: str = "auto",
    format: str = "auto",
    train_on: str = "assistant",
    chat_template: str | None = None,
    seq_len: int | None = None,
    weights: bool = False,
    max_record: int = MAX_RECORD,
    record_seconds: float = 10.0,
    portions: Portions = Portions(),
) -> TokenizeSummary:
    """Write token files of the documents of `inputs` (files, folders, globs, `-`) or of `dataset`
    to the folder `out`, or resume an interrupted call with the same arguments.

    tokenizer: see load_tokenizer. field, template: see RecordText. eval_fraction: fraction of the
    documents, or of a single text, for evaluation; 0 for none. shard_tokens: maximum tokens of a
    file. workers: number of processes; None: by the size of the inputs. format: one of FORMATS.
    special_tokens: "auto" adds the tokens that AutoTokenizer adds, and the end of a text; "none"
    adds the end only. chat_template: see load_chat_template. train_on: one of TRAIN_ON. seq_len:
    the summary counts longer documents. weights: True if messages may have weights. max_record:
    maximum bytes. record_seconds: see Bounds. DataError for inputs, ConfigError for arguments.
    """
    numbers = {"--max-record": max_record, "--record-seconds": record_seconds}
    numbers |= {"--workers": workers, "--seq-len": seq_len, "--shard-tokens": shard_tokens}
    _check_options(eval_fraction, special_tokens, train_on, numbers)
    sources = find_sources(inputs, dataset, exclude=(out := Path(out)))
    wanted, sources, warnings = choose_format(sources, format, RecordText(field, template))
    bounds = Bounds(record_seconds, flag="--record-seconds")
    encoding = _Encoding(special_tokens, train_on, chat_template, weights)
    recipe, of_template, stop = _prepared(tokenizer, wanted, encoding, bounds)
    loaded, warnings = load_tokenizer(tokenizer), warnings + of_template
    options = {"tokenizer": loaded.fingerprint, "eval_fraction": eval_fraction}
    shard_tokens = _one_file(shard_tokens, warnings) if wanted.in_pairs else shard_tokens
    options |= {"shard_tokens": shard_tokens, "seed": seed, **recipe.record()}
    with locked(out / LOCK, "--out", out):
        manifest = open_manifest(out, options, sources, loaded, overwrite)
        if recipe.is_chat:  # training reads a given template, and the end of a turn
            manifest.chat_template = chat_template and recipe.chat.template.source()
            manifest.data["end_of_turn"] = stop
        if not manifest.was_complete:
            workers, encoder = workers or _default_workers(sources, loaded), Encoder(loaded, recipe)
            try:
                _run(manifest, sources, encoder, portions, workers, max_record, bounds, progress)
            except BaseException:  # a run that fails before its first save leaves no files
                manifest.discard_if_empty()
                raise
        return manifest.summary(warnings, seq_len)


def encode_records(
    tokenizer: Tokenizer, form: str, records: Sequence[tuple[bytes, str]]
) -> list[list[np.ndarray]]:
    """Token ids, int32 (n,) each, of the documents that `tokenize` makes of each record: two
    documents of a pair, else one. form: one of FORMATS except "auto"; documents of "classes" come
    without the label. records: records in JSON, each with its place for messages. DataError for a
    record that is not of this format."""
    wanted = RecordText() if form == TEXT else RecordConversation(form)
    recipe = _recipe(tokenizer, "of the model", wanted, _Encoding("auto", "all", None, False))
    encoder, found = Encoder(tokenizer, recipe), []
    for text, where in records:
        ids, _ = encoder.encode([DocumentPart(text, False, True, where)])
        parts = np.split(ids.tokens, ids.ends[:-1])
        found.append([part[: len(part) - (form == CLASSES)] for part in parts])
        if not all(map(len, found[-1])):
            raise DataError(f"{where}: the text has no tokens")
    return found


class _Encoding(NamedTuple):
    """Options of `tokenize` that decide the tokens of a record."""

    special_tokens: str
    train_on: str
    chat_template: str | None
    weights: bool


def _prepared(
    spec: str, wanted: RecordText | RecordConversation, encoding: _Encoding, bounds: Bounds
) -> tuple[Recipe, list[str], int | None]:
    """Recipe, warnings, and the id that ends a turn of conversations. A worker process computes
    these, because foreign files can do no harm there. DataError for a tokenizer or a template that
    cannot be loaded, or exceeds the bounds."""
    prepare = partial(_prepare, spec, wanted, encoding)
    if spec == ByteTokenizer.fingerprint and isinstance(wanted, RecordText):
        return prepare()
    given = f" or the chat template '{encoding.chat_template}'" if encoding.chat_template else ""
    return in_worker(prepare, f"the tokenizer '{spec}'{given}", bounds)


def _prepare(
    spec: str, wanted: RecordText | RecordConversation, encoding: _Encoding
) -> tuple[Recipe, list[str], int | None]:
    tokenizer = load_tokenizer(spec)
    recipe = _recipe(tokenizer, spec, wanted, encoding)
    recipe = recipe.weighted() if encoding.weights else recipe
    stop = end_of_turn(recipe.chat.template, tokenizer) if recipe.is_chat else None
    if stop is not None and stop.text and tokenizer.fingerprint != ByteTokenizer.fingerprint:
        missing = lacking_tokens(recipe.chat.template, tokenizer)
        if stop.text in missing:
            raise DataError(
                f"the end of a turn, {stop.text}, is no token of the tokenizer '{spec}', so that "
                "the model would hardly learn to stop: give --add-tokens "
                f"'{','.join(missing)}' here and to llmq train, or --chat-template with the name "
                "of a format whose tokens it has"
            )
    ends = None if stop is None or stop.text is not None else next(iter(stop.ids), None)
    return recipe, _warnings(recipe, encoding), ends


def _recipe(
    tokenizer: Tokenizer, spec: str, wanted: RecordText | RecordConversation, encoding: _Encoding
) -> Recipe:
    chat = None if isinstance(wanted, RecordText) else _chat(tokenizer, spec, wanted, encoding)
    if chat is not None and wanted.in_pairs and encoding.train_on == "each":
        raise ConfigError(
            "--train-on each: makes several documents of an answer, where a pair has two: give "
            "assistant or last"
        )
    if isinstance(chat, Chat) and wanted.form != CLASSES:  # records of classes may be texts
        return Recipe(spec, wanted, ([], []), chat)
    if tokenizer.eos_id is None:
        raise DataError(
            f"the tokenizer '{spec}' names no end-of-text token: set eos_token in its "
            "tokenizer_config.json"
        )
    added = tokenizer.added if encoding.special_tokens == "auto" else ([], [])  # besides EOS
    return Recipe(spec, wanted, added, chat)


def _chat(
    tokenizer: Tokenizer, spec: str, wanted: RecordConversation, encoding: _Encoding
) -> Chat | Completion:
    given = encoding.chat_template
    template = None if given == NO_TEMPLATE else load_chat_template(tokenizer, given)
    if template is not None:
        return Chat(template, encoding.train_on)
    if wanted.form in (PLAIN, PAIRS, LABELS, CLASSES):  # formats that need no template
        return Completion(encoding.train_on)
    raise DataError(
        f"the tokenizer '{spec}' has no chat template, which the conversations need: give "
        "--chat-template FILE, or the tokenizer of a model that has one"
    )


def _warnings(recipe: Recipe, encoding: _Encoding) -> list[str]:
    """Warnings of the template, and a warning for each option without effect on the records."""
    warnings = recipe.chat.warnings() if recipe.is_chat else []
    if recipe.chat is not None and not recipe.is_chat:
        if encoding.chat_template is None:
            warnings.append(
                "the tokenizer has no chat template: prompt and completion follow each other as "
                f"they are; --chat-template {NO_TEMPLATE} says that this is meant"
            )
        return warnings
    if recipe.is_chat:
        special = encoding.special_tokens
        idle = [f"--special-tokens {special}"] * (special != "auto")
        reason = "the chat template says which special tokens a conversation has"
    else:
        train_on, template = encoding.train_on, encoding.chat_template
        idle = [f"--train-on {train_on}"] * (train_on != "assistant")
        idle += [f"--chat-template {template}"] * (template is not None)
        reason = "the inputs are texts, not conversations"
    return warnings + [f"{flag} has no effect: {reason}" for flag in idle]


def _one_file(shard_tokens: int, warnings: list[str]) -> int:
    """The maximum number of tokens of a file with pairs: all pairs are in one file, so that no pair
    is cut."""
    if shard_tokens != SHARD_TOKENS:
        warnings.append("--shard-tokens has no effect: all pairs are in one file, so none is cut")
    return MAX_TOKENS


def _check_options(
    eval_fraction: float, special_tokens: str, train_on: str, numbers: Mapping[str, float | None]
) -> None:
    """Raise ConfigError for a bad option. numbers: values by flag that must be positive; None: flag
    not given."""
    if not 0 <= eval_fraction < 1:
        raise ConfigError(f"--eval-fraction is {eval_fraction}: give at least 0 and less than 1")
    for flag, number in numbers.items():
        if (
            number is not None
            and not (1 if isinstance(number, int) else 1e-3) <= number <= MAX_TOKENS
        ):
            raise ConfigError(f"{flag} is {number}: give 1 to {MAX_TOKENS}")
    if special_tokens not in ("auto", "none"):
        raise ConfigError(f"--special-tokens is {special_tokens}: give auto or none")
    if train_on not in TRAIN_ON:
        raise ConfigError(f"--train-on is {train_on}: give {', '.join(TRAIN_ON)}")


def _default_workers(sources: Sequence[InputSource], tokenizer: Tokenizer) -> int:
    """Number of worker processes for inputs of this size: 1 for small inputs, and for bytes,
    because bytes are encoded faster than sent to another process."""
    small = sum(source.size for source in sources) < _SMALL_INPUT
    if small or isinstance(tokenizer, ByteTokenizer):
        return 1
    cpus = getattr(os, "process_cpu_count", os.cpu_count)() or 1  # since Python 3.13
    return min(cpus, 16)


def _run(
    manifest: Manifest,
    sources: Sequence[InputSource],
    encoder: Encoder,
    portions: Portions,
    workers: int,
    max_record: int,
    bounds: Bounds,
    progress: bool,
) -> None:
    """Encode from the manifest's position to the end of the inputs, and save the state every
    portions.seconds."""
    options, state = manifest.data["options"], manifest.data
    recipe = encoder.recipe
    shards = {
        split: ShardWriter(
            *(manifest.out, split, state["vocab_size"], options["shard_tokens"], done),
            with_masks=recipe.with_masks,
            with_weights=recipe.with_weights,
            in_pairs=recipe.wanted.in_pairs,
        )
        for split, done in state["splits"].items()
    }
    split = EvalSplit(options["eval_fraction"], options["seed"], sources)
    start = Position(**state["position"])

    def read(at: Position) -> Iterator[Block]:
        return read_blocks(sources, recipe.wanted, split, at, max_record, portions)

    blocks = with_others(read, start) if recipe.wanted.form == LABELS else read(start)
    if workers > 1 or recipe.chat is not None or not isinstance(encoder.tokenizer, ByteTokenizer):
        encoded = encode_in_workers(blocks, encoder, workers, bounds)
    else:
        encoded = ((block.end, encoder.encode(block.pieces)) for block in blocks)
    report = Progress("tokenize", sum(source.size for source in sources), enabled=progress)
    saved = time.monotonic()
    try:
        with report, closing(encoded):
            for end, tokens in encoded:
                for name, ids in zip(SPLITS, tokens, strict=True):
                    shards[name].write(ids)
                    manifest.note(ids)
                report.update(end.bytes_read, sum(writer.tokens for writer in shards.values()))
                if time.monotonic() - saved >= portions.seconds:
                    manifest.save(end, shards)
                    saved = time.monotonic()
        if not any(writer.tokens for writer in shards.values()):
            raise DataError(f"there is no text in the {len(sources)} input files")
        for writer in shards.values():
            writer.finish()
        manifest.note_duplicates()
        manifest.save(end, shards, complete=True)
    finally:
        for writer in shards.values():
            writer.suspend()
