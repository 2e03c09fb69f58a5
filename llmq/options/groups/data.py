"""Data options: training and validation files and the order of sequences, with their rules."""

from __future__ import annotations

import glob
from dataclasses import dataclass
from pathlib import Path

from llmq.options.conditions import error
from llmq.options.option_types import (
    NONE,
    SPLIT,
    named_pattern,
    option,
    parse_patterns,
    split_part,
    split_weights,
    switch,
)
from llmq.options.rule import REFUSE, Options, default, each, idle, refused

SHAKESPEARE = "data/tiny-shakespeare-qwen"


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """Options of training and validation files, and the order of sequences."""

    train_file: tuple[str, ...] = option(
        (f"{SHAKESPEARE}/train*.bin",),
        "Training token files, a glob pattern or a folder of `llmq tokenize`; may be given several "
        "times, also with weights: a.bin:0.7 b.bin:0.3",
        group="Data",
    )
    eval_file: str | tuple[str, ...] | None = option(
        None,
        "Validation token files, a pattern or folder; none: no validation; split: 0.02 of the "
        "training files, split:0.1 another part; {rule}; NAME=PATTERN, repeated: validations of "
        "their own",
        parse=parse_patterns,
    )
    packing: str = option(
        "concat",
        "What a sequence is; concat: a window of the files, best-fit: whole documents, as many as "
        "fit, none: one document; if not given best-fit for conversations of `llmq tokenize`",
        choices=("concat", "best-fit", "none"),
    )
    long: str | None = option(
        None,
        "Packed documents that are longer than --seq-len; cut: into parts, truncate: only their "
        "beginning, drop: not at all; if not given they are cut, and of conversations what has no "
        "question is left out",
        choices=("cut", "truncate", "drop"),
    )
    document_separator: int | None = option(
        None, "Id of the token that ends a document, for token files that have no .docs file", min=0
    )
    data_order: str = option(
        "shuffle",
        "Order of the sequences; shuffle: those of all files together, llmq: of --packing concat "
        "file after file, each shuffled, as llm.q does",
        choices=("shuffle", "llmq"),
    )
    train_seed: int = option(
        0x83B45442, "Seed of the order of the training data", min=0, max=2**64 - 1
    )
    eval_seed: int = option(
        0x384B4524, "Seed of the order of the validation data", min=0, max=2**64 - 1
    )
    drop_last: bool = switch(
        "Leave out the sequences at the end of an epoch that fill no step, as llm.q does"
    )
    allow_other_tokenizer: bool = option(
        False, "Train on the ids of another tokenizer than the model's or the checkpoint's"
    )
    new_data: bool = switch("Start the data anew, not where the checkpoint was")

    @property
    def splits(self) -> bool:
        """True if validation data are a part of the training files."""
        return self.eval_fraction is not None

    @property
    def eval_fraction(self) -> float | None:
        """Validation share of the training files, 0 to 1; None for separate files."""
        return split_part(self.eval_pattern)

    @property
    def eval_pattern(self) -> str:
        """The unnamed pattern of --eval-file; NONE if all patterns have names."""
        return self._eval_patterns.get("", NONE)

    @property
    def eval_sets(self) -> dict[str, str]:
        """Named patterns of --eval-file, by name."""
        return {name: pattern for name, pattern in self._eval_patterns.items() if name}

    @property
    def _eval_patterns(self) -> dict[str, str]:
        given = self.eval_file if isinstance(self.eval_file, tuple) else (self.eval_file,)
        named = map(named_pattern, given)
        return {name: held_out(pattern) or pattern for name, pattern in named}

    @property
    def validates(self) -> bool:
        """True if there are validation files without a name."""
        return self.eval_pattern != NONE

    @property
    def train_patterns(self) -> list[str]:
        """Glob patterns of --train-file, without weights."""
        return split_weights(self.train_file)[0]

    @property
    def all_patterns(self) -> list[str]:
        """Patterns of all token files, for training and validation."""
        unnamed = [self.eval_pattern] if self.validates and not self.splits else []
        return [*self.train_patterns, *unnamed, *self.eval_sets.values()]

    @property
    def train_weights(self) -> tuple[float, ...] | None:
        """Weights of the training patterns; None without weights or for a single pattern."""
        return split_weights(self.train_file)[1]


def held_out(folder: str) -> str | None:
    """Pattern of the validation files that `llmq tokenize` has written into a folder; None for a
    folder without such files, and for any other name."""
    path = Path(folder).expanduser()
    files = path.is_dir() and any(path.glob("eval*.bin"))
    return f"{glob.escape(str(path))}/eval*.bin" if files else None


def _tokenized(o: Options) -> str | None:
    """Pattern of the validation files in the folders of --train-file; None unless each folder has
    some."""
    found = [held_out(pattern) for pattern in o.train_patterns]
    if not found or None in found:
        return None
    return found[0] if len(found) == 1 else f"{{{','.join(found)}}}"


DATA_RULES = (
    # Default validation files belong to the default training data.
    default(
        "eval_file",
        lambda o: f"{SHAKESPEARE}/eval*.bin",
        lambda v, o: o.train_file == (f"{SHAKESPEARE}/train*.bin",),
        help="if not given: what `llmq tokenize` kept in the folders of --train-file, split with "
        "others",
    ),
    default("eval_file", _tokenized, lambda v, o: not error(split_weights, o.train_file)),
    default("eval_file", lambda o: SPLIT),
    default("long", lambda o: "drop", lambda v, o: o.head == "score" and not o.pairs),
    *each(
        "long",
        REFUSE,
        lambda v, o: o.head == "score" and not o.pairs and v != "drop",
        "--long {value}: a score head reads whole documents, whose labels stand behind them: give "
        "drop",
    ),
    *each(
        "packing",
        REFUSE,
        lambda v, o: o.head == "score" and (v == "concat" or not o.document_mask),
        "--num-labels: windows of the files would cut documents, which have one label each: give "
        "--packing best-fit or none, without --no-document-mask",
    ),
    *each(
        "packing",
        REFUSE,
        lambda v, o: o.pairs and (v == "concat" or not o.document_mask),
        "--loss {loss}: windows of the files would cut pairs, and an answer would see the other "
        "one: give --packing best-fit or none, without --no-document-mask",
    ),
    *idle(
        "long",
        lambda v, o: o.pairs,
        "--long {value} has no effect with --loss {loss}: pairs are never cut",
        last_word=True,
    ),
    *each("train_file", REFUSE, lambda v, o: error(split_weights, v), "{found}"),
    *refused(
        "data_order",
        lambda v, o: v == "llmq" and o.packing != "concat",
        "llmq orders windows of files, and --packing {packing} makes sequences of documents: use "
        "shuffle",
    ),
    *refused(
        "data_order",
        lambda v, o: v == "llmq" and o.train_weights is not None,
        "llmq takes file after file, and --train-file has weights, by which files take turns: use "
        "shuffle",
    ),
    *refused(
        "new_data",
        lambda v, o: v and o.continue_from is None,
        "needs --continue",
        help="With --continue:",
    ),
    *idle(
        "long",
        lambda v, o: o.packing == "concat",
        "--long {value} has no effect with --packing concat, whose windows cut whatever they meet",
    ),
    *idle(
        "document_separator",
        lambda v, o: not o.document_mask and o.packing == "concat",
        "--document-separator {value} has no effect without --document-mask or --packing best-fit "
        "or none",
    ),
    *idle(
        "train_file",
        lambda v, o: len(v) == 1 and o.train_patterns != [*v],
        "the weight in {given} has no effect on one file",
    ),
)
