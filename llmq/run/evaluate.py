"""`llmq eval`: accuracy and perplexity on tasks in local files; `llmq score`: scores of token files
and of records.
"""

import json
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from llmq.arch.model_config import ModelConfig
from llmq.base.dtypes import DType, parse_dtype
from llmq.base.errors import NOT_FINITE, ConfigError, DataError, LlmqError, warn
from llmq.base.files import Closing, check_writable, write_file
from llmq.base.locks import LOCK, locked
from llmq.data.scores import LARGEST_ID
from llmq.data.tokens import open_token_files
from llmq.model.inference import Scorer, placed_to_read, scoring_options
from llmq.options.options import TrainConfig
from llmq.plan.checks import attention_backend, check_sizes
from llmq.report.tables import terminal_table
from llmq.report.views import Progress
from llmq.run.model_of_run import agreed_tokenizer, packing_of_data
from llmq.run.sampling import open_model
from llmq.run.score import score_files
from llmq.run.trainer import Trainer
from llmq.runtime.device import MemorySizes
from llmq.runtime.machine import Machine, choose_machine, open_apart
from llmq.runtime.plan_device import PlanDevice
from llmq.runtime.workers import RankPool
from llmq.state.params import Param, weight_table
from llmq.state.weights import Weights
from llmq.text.guarded import guarded_tokenizer
from llmq.text.record_format import prompt_of, score_form, scored_line
from llmq.text.scoring import Asked, Batch, Encoder, Request, Score, check_ids, judge, make_batches
from llmq.text.tasks import PAIRS, TEXT, Task, read_records, read_tasks

LEAST = 16  # least sequence length of a batch, in tokens


def run_eval(
    model: str, task: list[str], *, limit: int | None, out: Path | None, **how: Any
) -> None:
    """Print a table of the tasks' metrics, and write metrics and options to `out` as JSON. task:
    the tasks, each as [KIND=]FILE. limit: most records of each task. how: arguments of
    ask_model."""
    if out is not None:
        check_writable("--out", out.absolute().parent)
    start = time.perf_counter()
    asked, likelihoods = ask_model(model, read_tasks(task, limit), **how)
    scores = scores_of(asked, likelihoods)
    for line in table(scores):
        print(line)
    if out is not None:
        named = how.get("adapter")
        about = {"model": model, "limit": limit, "seconds": time.perf_counter() - start, **how}
        about |= {"adapter": named and str(named)}
        write_file(out, json.dumps(about | {"tasks": _by_task(asked, scores)}, indent=2) + "\n")


class Asker(NamedTuple):
    """A model that is ready to score requests. encoder: turns texts into requests. longest: most
    tokens of a sequence."""

    encoder: Encoder
    longest: int
    machine: Machine
    config: ModelConfig
    read: Callable[[Param], np.ndarray]
    dtype: DType
    base_dtype: str | None
    batch_tokens: int

    def likelihoods(self, requests: list[Request]) -> np.ndarray:
        """Return log-likelihoods of requests, F64 in nats; for a score head with one label, scores.
        Raises LlmqError if a value is not finite."""
        return self.scored(requests)[0]

    def scored(
        self, requests: list[Request], *, greedy: bool = False
    ) -> tuple[np.ndarray, dict[int, bool]]:
        """Return the `likelihoods`, and a dict that is filled only if `greedy`: by index of a
        request, True if every token of the request is the likeliest one."""
        batches = make_batches(requests, partial(batch_shape, self.batch_tokens, self.longest))
        total = sum(math.prod(batch.shape) for batch in batches)
        form = (self.machine, self.config, self.dtype, batches, self.read)
        how = {"base_dtype": self.base_dtype, "greedy": greedy}
        with Fleet(*form, **how) as fleet, Progress("eval", total) as progress:
            values = fleet.likelihoods(len(requests), progress.update)
        if not np.isfinite(values).all():
            raise LlmqError(NOT_FINITE)
        return values, fleet.greedy


@contextmanager
def asking(
    model: str,
    *,
    adapter: Path | None = None,
    seq_len: int | None,
    batch_tokens: int,
    device: str,
    gpus: int,
    model_dtype: str,
    base_dtype: str | None = None,
) -> Iterator[Asker]:
    """Open a model to score requests. adapter: see open_model. base_dtype: see scoring_options."""
    machine = choose_machine(device, gpus)
    if machine.note:
        print(machine.note, file=sys.stderr)
    with open_model(model, adapter) as (config, read, source):
        check_sizes(config, machine)
        if seq_len is not None and seq_len > config.max_positions:
            raise ConfigError(
                f"--seq-len: {seq_len} exceeds the model's {config.max_positions} positions"
            )
        longest = seq_len or config.max_positions
        encoder = Encoder(guarded_tokenizer(source), longest, config.num_labels)
        dtype = parse_dtype(model_dtype)
        yield Asker(encoder, longest, machine, config, read, dtype, base_dtype, batch_tokens)


def ask_model(model: str, tasks: list[Task], **how: Any) -> tuple[list[Asked], np.ndarray]:
    """Return requests of each task, and log-likelihoods of all requests, F64 in nats. how:
    arguments of `asking`."""
    with asking(model, **how) as asker:
        asked = [asker.encoder.ask(task) for task in tasks]
        requests = [request for a in asked for request in a.requests]
        check_ids(requests, asker.config.vocab_size)
        lengths = f"the model's {asker.longest} positions"
        warn(*[line for a in asked for line in a.cut_lines(lengths)])
        return asked, asker.likelihoods(requests)


def _by_task(asked: list[Asked], scores: list[Score]) -> dict[str, dict[str, Any]]:
    """Return the record of each task for --out, by task name."""
    found: dict[str, dict[str, Any]] = {
        a.task.name: {"kind": a.task.kind, "file": str(a.task.path)} for a in asked
    }
    for s in scores:
        found[s.task] |= {"count": s.count, s.metric: s.value}
        found[s.task] |= {} if s.stderr is None else {f"{s.metric}_stderr": s.stderr}
    return found


def scores_of(asked: list[Asked], likelihoods: np.ndarray) -> list[Score]:
    """Return metrics of all tasks. likelihoods: log-likelihoods of all requests in order, F64 in
    nats."""
    scores, first = [], 0
    for a in asked:
        scores += judge(a, likelihoods[first : first + len(a.requests)])
        first += len(a.requests)
    return scores


def table(scores: list[Score]) -> list[str]:
    """Return the lines of a table of scores for the console."""
    head, rows = ("task", "metric", "value", "stderr", "count"), []
    for s in scores:
        error = "-" if s.stderr is None else f"{s.stderr:.4f}"
        value = f"{s.value:.4f}" if s.value < 1e6 else f"{s.value:.4g}"
        rows.append((s.task, s.metric, value, error, s.count))
    return terminal_table(head, rows, right=(2, 3, 4)).splitlines()


def batch_shape(tokens: int, longest: int, length: int, left: int) -> tuple[int, int]:
    """Return the shape (B, T) of the next batch, of B sequences of T tokens, if `left` sequences of
    at most `length` tokens remain. T is `length` rounded up to 16, 20, 24, 28, 32, 40, 48, …, at
    most `longest`; B T is about `tokens`."""
    step = max(LEAST, 1 << (max(length, LEAST) - 1).bit_length() - 1) // 4
    T = min(max(-(-length // step) * step, LEAST), -(-longest // 4) * 4)
    return max(1, min(tokens // T, left)), T


class Fleet(Closing):
    """Scores batches with a model on every device; a free device takes the next batch.

    greedy: by index of a request, True if every token of the request is the likeliest one.
    `likelihoods` fills this dict only with greedy=True.
    """

    def __init__(
        self,
        machine: Machine,
        config: ModelConfig,
        dtype: DType,
        batches: list[Batch],
        read: Callable[[Param], np.ndarray],
        *,
        base_dtype: str | None = None,
        greedy: bool = False,
    ):
        """read: function that returns a whole parameter; all threads call this function.
        base_dtype: see scoring_options. greedy: True to fill the dict `greedy`. Raises LlmqError if
        memory is too small."""
        self.batches, self._greedy = batches, greedy
        shapes = sorted({batch.shape for batch in batches}, key=lambda shape: -shape[1])
        largest = scoring_options(config, dtype, *shapes[0], base_dtype)
        backend = attention_backend(largest, config, machine)
        table, plan = weight_table(config), PlanDevice(machine.spec)
        placement = placed_to_read(config, table, dtype, base_dtype)
        how = {"base_dtype": base_dtype, "greedy": greedy}
        planned = Scorer(plan, config, Weights(plan, table, placement), backend, **how)
        for shape in shapes:
            planned.rehearse(*shape)
        self._sizes: MemorySizes = plan.sizes()
        machine.compile_ahead(plan.sources)
        self.pool = RankPool(machine.world_size)
        self._scorers: dict[int, Scorer] = {}
        self.greedy: dict[int, bool] = {}

        def open_rank(rank: int) -> None:
            dev = open_apart(machine, rank, self._sizes)
            weights = Weights(dev, table, placement)
            self._scorers[rank] = Scorer(dev, config, weights, backend, **how)
            weights.load(read)

        try:
            self.pool.run("loading the model", open_rank)
        except BaseException:
            self.close()
            raise

    def likelihoods(self, count: int, report: Callable[[int], None]) -> np.ndarray:
        """Return log-likelihoods of all `count` requests, F64 in nats. report: function called with
        the number of tokens computed so far."""
        out = np.full(count, np.nan)
        left, lock, done = iter(self.batches), threading.Lock(), 0

        def work(rank: int) -> None:
            nonlocal done
            while not self.pool.workers.stopped.is_set():
                with lock:
                    batch = next(left, None)
                if batch is None:
                    return
                rounds = [batch.targets(number) for number in range(batch.count)]
                scorer = self._scorers[rank]
                for number, losses in enumerate(scorer.score(batch.inputs(), rounds)):
                    for index, value in batch.likelihoods(number, losses).items():
                        out[index] = value
                    if self._greedy:
                        self.greedy |= batch.are_greedy(number, scorer.likeliest())
                with lock:
                    done += math.prod(batch.shape)
                    report(done)
                self.pool.beat()

        self.pool.run("evaluation", work)
        return out

    def close(self) -> None:
        self.pool.close(lambda rank: rank in self._scorers and self._scorers[rank].dev.close())


# ------------------------------------------------------------------------------------------------
# `llmq score`


def run_rewards(
    model: str, files: list[Path], out: Path, *, best: bool, overwrite: bool, **how: Any
) -> None:
    """Write records with a score head's results to `out`, as lines of JSON. New fields are `score`;
    for classes `scores`, which are probabilities; for pairs `score_chosen` and `score_rejected`.
    best: True to keep only the record with the highest score of each prompt. how: arguments of
    `asking`. Raises LlmqError for records that cannot be scored, and for an existing `out` without
    `overwrite`."""
    check_writable("--out", out.absolute().parent)
    if out.exists() and not overwrite:
        raise ConfigError(f"--out: '{out}' is there: give another file, or --overwrite")
    records = [each for file in files for each in read_records(file)]
    if not records:
        raise DataError(f"'{files[0]}' has no records")
    with asking(model, **how) as asker:
        labels, encoder = asker.config.num_labels, asker.encoder
        if not labels:
            raise ConfigError(
                f"MODEL: '{model}' has no score head, which texts are scored by: of a language "
                "model give token files, as `llmq tokenize` writes them"
            )
        form = score_form(records[0][0], labels)
        if best and (labels > 1 or form in (PAIRS, TEXT)):
            raise ConfigError("--best-of: is for answers to prompts, which a reward model scores")
        found = list(encoder.of_records(form, [scored_line(*each, labels) for each in records]))
        requests = [request for of_record in found for request in of_record]
        check_ids(requests, asker.config.vocab_size)
        if encoder.cut:
            warn(
                f"{encoder.cut} texts are longer than {asker.longest} tokens, and lose their "
                "beginning"
            )
        values = asker.likelihoods(requests)
    of_records = np.split(values, np.cumsum([len(each) for each in found])[:-1])
    scored = [
        {**record, **_numbers(own, labels)}
        for (record, _), own in zip(records, of_records, strict=True)
    ]
    kept = best_of(scored, form) if best else scored
    write_file(out, "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in kept))
    print(_summary(kept, len(scored), out))


def _numbers(values: np.ndarray, labels: int) -> dict[str, Any]:
    """Return a score head's results for a record, as new fields of the record. labels: number of
    labels."""
    if labels > 1:
        return {"scores": [float(f"{math.exp(value):.6g}") for value in values]}
    names = ("score",) if len(values) == 1 else ("score_chosen", "score_rejected")
    return {name: float(f"{value:.6g}") for name, value in zip(names, values, strict=True)}


def best_of(records: list[dict[str, Any]], form: str) -> list[dict[str, Any]]:
    """Return the record with the highest `score` for each prompt, in order of the prompts. form:
    format of the records."""
    found: dict[str, dict[str, Any]] = {}
    for record in records:
        prompt = prompt_of(record, form)
        if prompt not in found or record["score"] > found[prompt]["score"]:
            found[prompt] = record
    return [*found.values()]


def _summary(kept: list[dict[str, Any]], count: int, out: Path) -> str:
    of_all = f" of {count}" if len(kept) < count else ""
    line = f"{len(kept)}{of_all} records with scores in {out}"
    if "score_chosen" in kept[0]:
        right = sum(record["score_chosen"] > record["score_rejected"] for record in kept)
        line += f", the chosen answer scores higher in {right / len(kept):.1%}"
    elif "score" in kept[0]:
        line += f", mean {np.mean([record['score'] for record in kept]):.4f}"
    return line


def run_score(
    config: TrainConfig, model: ModelConfig, model_dir: Path | None, out: Path, top_k: int = 0
) -> None:
    """Write the scores of --train-file to `out`, and print the files' names. top_k: see
    score_files. Raises LlmqError for unsupported options, another tokenizer, and other scores in
    `out` without --overwrite."""
    if config.continue_from is not None:
        raise ConfigError("--continue: a model is scored: `llmq export` makes one of a checkpoint")
    if model.num_labels:
        raise ConfigError(
            "MODEL: has a score head, which says nothing of tokens: give files of records, and a "
            "file as --out"
        )
    if top_k and model.vocab_size > LARGEST_ID:
        raise ConfigError(f"--top-k: files have room for {LARGEST_ID} ids, not {model.vocab_size}")
    if not config.document_mask:
        raise ConfigError(
            "--no-document-mask: each document is scored alone, as losses that read scores have it"
        )
    if top_k and not packing_of_data({"train_file": config.train_patterns}):
        warn(
            "--top-k: `llmq train` reads these files by windows (--packing concat), as --loss kd "
            "does not: give --packing best-fit there"
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
            paths = score_files(
                trainer.ranks, files, out, trainer.identity.record(), top_k=top_k,
                separator=config.document_separator, overwrite=config.overwrite,
                report=progress.update,
            )  # fmt: skip
    for file, path in zip(files, paths, strict=True):
        print(f"{file.num_tokens} tokens of {file.path}: scores in {path}")
