"""`llmq score`: a model's scores of token files, made as a run's validations are."""

from __future__ import annotations

from pathlib import Path

from llmq.arch.model_config import ModelConfig
from llmq.base.errors import ConfigError
from llmq.base.files import check_writable
from llmq.base.locks import LOCK, locked
from llmq.data.tokens import open_token_files
from llmq.data.top_k_file import LARGEST_ID
from llmq.options.options import TrainConfig
from llmq.report.progress import Progress
from llmq.run.score import score_files
from llmq.run.tokenizers import agreed_tokenizer
from llmq.run.trainer import Trainer


def run_score(
    config: TrainConfig, model: ModelConfig, model_dir: Path | None, out: Path, top_k: int = 0
) -> None:
    """Write the scores of --train-file to `out`, and print where they are. top_k: of a teacher.

    LlmqError for options that mean another thing than a model and documents, data of another
    tokenizer, and scores of something else in `out`, unless with --overwrite.
    """
    if config.adapter is not None or config.continue_from is not None:
        raise ConfigError(
            "--adapter, --continue: a model is scored, without adapters: `llmq merge` makes one of "
            "both"
        )
    if model.num_labels:
        raise ConfigError("MODEL: has a score head, which says nothing of tokens")
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
        total = sum(file.num_tokens for file in files)
        with (
            Trainer.from_config(config, model, model_dir, tokenizer) as trainer,
            Progress("score", total) as progress,
        ):
            trainer.load_weights()
            how = {"separator": config.document_separator, "overwrite": config.overwrite}
            identity = trainer.identity.record()
            how |= {"top_k": top_k, "report": progress.update}
            paths = score_files(trainer.ranks, files, out, identity, **how)
    for file, path in zip(files, paths, strict=True):
        print(f"{file.num_tokens} tokens of {file.path}: scores in {path}")
