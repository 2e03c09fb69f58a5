"""`llmq score`: a model's scores of token files, made as a run's validations are."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from llmq.arch.model_config import ModelConfig
from llmq.base.console import printable_console
from llmq.base.errors import ConfigError
from llmq.base.files import check_writable
from llmq.base.locks import LOCK, locked
from llmq.data.tokens import open_token_files
from llmq.data.top_k_file import LARGEST_ID
from llmq.options.options import TrainConfig
from llmq.run.score import score_files
from llmq.run.tokenizers import agreed_tokenizer
from llmq.run.trainer import Trainer

REPORT_SECONDS = 10.0  # between lines of progress where there is no terminal


def run_score(
    config: TrainConfig, model: ModelConfig, model_dir: Path | None, out: Path, top_k: int = 0
) -> None:
    """Write the scores of --train-file to `out`, and print where they are. top_k: of a teacher.

    LlmqError for options that mean another thing than a model and documents, data of another
    tokenizer, and scores of something else in `out`, unless with --overwrite.
    """
    if config.adapter is not None or config.continue_from is not None or config.splits_model:
        raise ConfigError(
            "--adapter, --continue, --lora-init: a model is scored, without adapters: `llmq merge` "
            "makes one of both"
        )
    if top_k and model.vocab_size > LARGEST_ID:
        raise ConfigError(f"--top-k: files have room for {LARGEST_ID} ids, not {model.vocab_size}")
    if not config.document_mask:
        raise ConfigError(
            "--no-document-mask: each document is scored alone, as losses that read scores have it"
        )
    check_writable("--out", out.absolute())
    with locked(out / LOCK, "--out", out):
        tokenizer = agreed_tokenizer(config, model_dir)
        files = open_token_files(config.train_patterns, model.vocab_size)
        with (
            Trainer.from_config(config, model, model_dir, tokenizer) as trainer,
            _Report() as shown,
        ):
            trainer.load_weights()
            how = {"separator": config.document_separator, "overwrite": config.overwrite}
            how["top_k"] = top_k
            identity = trainer.identity.record()
            paths = score_files(trainer.ranks, files, out, identity, report=shown.update, **how)
    for file, path in zip(files, paths, strict=True):
        print(f"{file.num_tokens} tokens of {file.path}: scores in {path}")


class _Report:
    """A bar on a terminal, else a line now and then; both on stderr."""

    def __init__(self) -> None:
        self._start = self._last = time.monotonic()
        self._first: int | None = None
        self._bar = None
        if sys.stderr.isatty():
            from rich.progress import Progress

            self._bar = Progress(console=printable_console(stderr=True), transient=True)
            self._task = self._bar.add_task("score", total=None)

    def update(self, done: int, total: int) -> None:
        """done, total: tokens, those of earlier runs included."""
        now = time.monotonic()
        self._first = done if self._first is None else self._first
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total)
        elif now - self._last >= REPORT_SECONDS:
            self._last, rate = now, (done - self._first) / (now - self._start)
            text = f"score {100 * done / max(total, 1):5.1f}% | {rate:.0f} tokens/s"
            print(text, file=sys.stderr, flush=True)

    def __enter__(self) -> _Report:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
