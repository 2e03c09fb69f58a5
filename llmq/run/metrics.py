"""The reports of a run: console lines in the format of llm.q, and records in the JSON log."""

import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import index
from typing import Any

from llmq.base.callback import StepDone
from llmq.base.result import Result
from llmq.comm.links import LinkTable
from llmq.data.loader import DataLoader
from llmq.report.json_log import JsonLog
from llmq.report.views import PlainView

RULE = "!" * 80
SHOWN_FILES = 10  # most files of a split that [Dataset] lists
SHOWN_SECONDS = 0.1  # least duration in seconds of a part of the start that is printed


_COUNTS = (  # exclusive upper limit of a count, its unit, the unit's letter, decimals
    (1e6, 10**3, "k", 0),
    (2e7, 10**6, "M", 1),
    (1e9, 10**6, "M", 0),
    (2e10, 10**9, "B", 1),
    (1e12, 10**9, "B", 0),
    (2e13, 10**12, "T", 1),
    (math.inf, 10**12, "T", 0),
)


def count_tokens(n: int) -> str:
    """Return a token count as a number four characters wide, with its unit."""
    unit, letter, digits = next(row for limit, *row in _COUNTS if n < limit)
    return f"{n / unit:4.1f}{letter}" if digits else f"{n // unit:4d}{letter}"


def tokens_per_second(tokens: int, milliseconds: float) -> str:
    """Return tokens per second as text, from 100 thousand on in thousands; "-" below 1 ms."""
    if milliseconds < 1:
        return "-"
    rate = int(tokens * 1000 / milliseconds)
    return f"{rate:5d}" if rate < 100_000 else f"{rate // 1000:4d}k"


def duration(milliseconds: float) -> str:
    """Return a duration as text of fixed width: in ms, from 100 seconds on in s."""
    if milliseconds < 100_000:
        return f"{int(milliseconds):5d} ms"
    return f"{int(milliseconds / 1000):5d}  s"


def _parts(ranges: Sequence[tuple[str, float]]) -> list[dict[str, float]]:
    """Return milliseconds of the parts of each micro-step, then of the optimizer. ranges: name and
    milliseconds of each timed range; ranges of a calibration are left out."""
    parts: list[dict[str, float]] = []
    for name, ms in ranges:
        part = name.split()[0]
        if name == "forward 0":
            parts.append({"step": len(parts), "fwd": 0.0, "head": 0.0, "bwd": 0.0})
        if part == "calibration":
            parts.clear()
        elif part == "optimizer":
            parts.append({"opt": ms})
        elif part == "forward":
            parts[-1]["fwd"] += ms
        else:
            parts[-1]["bwd"] += ms  # the LM head is part of bwd
            parts[-1]["head"] += ms if part == "head" else 0.0
    return parts


class Reporter:
    """Writes the console lines and the log of one run."""

    def __init__(self, log: JsonLog, view: PlainView, total_steps: int):
        self.log, self.view, self.total_steps = log, view, total_steps
        self._loss_sum, self._loss_count = 0.0, 0  # training losses since the last evaluation
        self.without_targets = 0  # number of the run's steps without targets
        self._scores: dict[str, float] = {}
        self.epoch = (0, 0.0)  # number of the epoch, and its fraction after the last step

    def block(self, title: str, lines: list[str]) -> None:
        """Print a titled block and an empty line."""
        self.view.line(f"[{title}]")
        for line in [*lines, ""]:
            self.view.line(line)

    def message(self, text: str, step: int = 0) -> None:
        """Print a line, and write it to the log."""
        self.view.line(text)
        self.log.write("info", step, type="message", message=text)

    def alarm(self, text: str | None, step: int = 0) -> None:
        """Report a problem that the user must not overlook: in bold between two rules, in the log,
        and in the live view until a call with None."""
        self.view.progress(alarm=text)
        if text is not None:
            for line in (RULE, f"ALARM: {text}", RULE):
                self.view.line(line, bold=True)
            self.log.write("info", step, type="alarm", message=text)

    @contextmanager
    def section(self, text: str, step: int = 0) -> Iterator[None]:
        """Print the name of a long action before the action begins, and its duration afterwards."""
        self.view.line(f"{text} ...")
        start = time.perf_counter()
        yield
        ms = int((time.perf_counter() - start) * 1000)
        self.view.line(f"  done in {ms} ms" if ms < 2000 else f"  done in {ms // 1000} s")
        self.view.line("")
        self.log.write("info", step, type="message", message=text, duration_ms=ms)

    def options(
        self, rows: list[tuple[str, bool | int | float | str]], usual: Mapping[str, Any]
    ) -> None:
        """Log all options, and print the options that differ from `usual` in the block [Options].
        rows: (name, value) of each option."""
        width = max(len(name) for name, value in rows if usual.get(name) != value)
        lines = []
        for name, value in rows:
            shown = str(value).lower() if isinstance(value, bool) else str(value)
            shown = shown.replace("\n", "\\n")
            lines += [f"  {name:<{width}}: {shown}"] * (usual.get(name) != value)
            self.log.write("option", 0, name=name, value=value)
        self.block("Options", lines)

    def dataset(self, loaders: dict[str, DataLoader]) -> None:
        """Report [Dataset]: the files of each split, and the loader's position in these files."""
        lines = []
        for split, loader in loaders.items():
            lines.append(f" {split}: {count_tokens(loader.total_tokens)} tokens")
            for file in loader.files[:SHOWN_FILES]:
                lines.append(f"   {file.path} : {file.num_tokens:10d}")
            if len(loader.files) > SHOWN_FILES:
                lines.append(f"   ... and {len(loader.files) - SHOWN_FILES} more files")
            state = loader.state()
            self.log.write(
                "dataset",
                0,
                split=split,
                files=[file.path for file in loader.files],
                tokens=loader.total_tokens,
                file_index=state["file_index"],
                chunk_index=state["chunk_index"],
                seed=loader.seed,
                **loader.data.record(),
            )
        self.block("Dataset", lines)

    @property
    def history(self) -> dict[str, Any]:
        """Return the values on which later reports depend, as JSON values, for a checkpoint."""
        loss_sum = self._loss_sum if math.isfinite(self._loss_sum) else None
        return {
            "losses_since_evaluation": [loss_sum, self._loss_count],
            "steps_without_targets": self.without_targets,
        }

    @history.setter
    def history(self, history: Mapping[str, Any]) -> None:
        """Restore a history; {} is the history before the first step. A malformed history raises
        errors that `Loop.resume` catches."""
        total, count = history.get("losses_since_evaluation", (0.0, 0))
        self._loss_sum = math.nan if total is None else float(total)
        self._loss_count = index(count)
        self.without_targets = index(history.get("steps_without_targets", 0))

    @property
    def _percent(self) -> float:
        """Return the percentage of the epoch that is done, for console lines."""
        return 100.0 * self.epoch[1]

    def _of_run(self, steps_done: int) -> str:
        return f"run {min(100.0 * steps_done / max(self.total_steps, 1), 100.0):.1f}%"

    def train_step(self, done: StepDone, tokens: int, sol: float | None) -> None:
        """Report a step, with a [T] line. tokens: the step's tokens, including masked tokens,
        without padding. sol: speed in percent of the speed of light, or None. A step without
        targets has no loss."""
        step, result, ms, self.epoch = done.step, done.result, done.ms, done.epoch
        has_loss = result.tokens > 0
        shown = result.told if has_loss else {}
        self.view.line(self._step_line(step, result, ms, tokens_per_second(tokens, ms), sol))
        if has_loss:
            self._loss_sum += result.loss
        self._loss_count += has_loss
        self.without_targets += not has_loss
        if result.saturated:
            self.message(f"Elements beyond their delayed fp8 scales: {result.saturated}", step)
        waited = result.communication
        self.log.write(
            "step",
            step,
            step_tokens=tokens,
            trained_tokens=result.tokens,
            epoch=round(sum(done.epoch), 6),
            duration_ms=int(ms),
            norm=result.norm,
            loss=result.loss,
            lr=done.lr,
            **result.numbers,
            saturated=result.saturated,
            **({} if waited is None else {"communication": waited}),
        )
        found = {"loss": result.loss, "norm": result.norm} if has_loss else {}
        found |= {"numbers": shown} if shown else {}
        self.view.progress(step=step + 1, lr=done.lr, ms=ms, tokens=tokens, **found)

    def _step_line(self, step: int, result: Result, ms: float, rate: str, sol: float | None) -> str:
        """Return a step's line in llm.q's form, or in 80 columns for a brief view. rate: tokens per
        second."""
        has_loss = result.tokens > 0
        if self.view.brief:
            loss = f"{result.loss:8.4f}" if has_loss else f"{'none':>8}"
            numbers = f"loss {loss} | norm {result.norm:9.4g}"
            return f"[T] step {step:5d} | {numbers} | {duration(ms)} | {rate} tok/s"
        loss = f"{result.loss:10f}" if has_loss else f"{'none':>10}"
        if has_loss:
            loss += "".join(f" | {name} {value:.4f}" for name, value in result.told.items())
        tail = "" if sol is None else f" | sol {sol:.1f}%"
        return (
            f"[T] step {step:5d} [{self._percent:4.1f}%] | time: {duration(ms)} | norm "
            f"{result.norm:10f} | loss {loss} | tps {rate}{tail} | {self._of_run(step + 1)}"
        )

    def time_breakdown(
        self, step: int, timings: Sequence[Sequence[tuple[str, float]]], communication: float | None
    ) -> None:
        """Log all ranks' times of the parts of a step (--debug-time-breakdown), and print the times
        of rank 0. timings: name and ms of each part, by rank. communication: see Result."""
        parts = [_parts(ranges) for ranges in timings]
        self.view.line("")
        self.view.line("Timing breakdown:")
        for p in parts[0]:
            if "opt" in p:
                self.view.line(f"  opt {p['opt']:7.2f}ms")
            else:
                bwd = p["bwd"] - p["head"]
                self.view.line(
                    f"  fwd {p['fwd']:7.2f}ms, head {p['head']:7.2f}ms, bwd {bwd:7.2f}ms"
                )
        if communication is not None:
            self.view.line(f"  waits for other ranks {communication:7.2f}ms")
        self.view.line("")
        for rank, breakdown in enumerate(parts):
            fields = {"type": "time-breakdown", "gpu": rank, "breakdown": breakdown}
            self.log.write("info", step, **fields)

    def abs_maxes(self, step: int, values: dict[str, float]) -> None:
        """Report largest absolute values by name, for --debug-log-abs-max; NaN counts as the
        largest."""

        def largest(kind: str) -> str:
            of_kind = {name: value for name, value in values.items() if name.startswith(kind)}
            name = max(of_kind, key=lambda name: (math.isnan(of_kind[name]), of_kind[name]))
            return f"{name} {of_kind[name]:.4g}"

        self.view.line(f"[A] step {step:5d} | largest: {largest('act.')}, {largest('grad.')}")
        named = [{"name": name, "value": value} for name, value in values.items()]
        self.log.write("abs-maxes", step, abs_maxes=named)

    def evaluation(self, step: int, result: Result, ms: float, tokens: int, name: str = "") -> None:
        """Report an evaluation before step `step`, with a [V] line. tokens: number of evaluated
        tokens. name: name of the validation set; "" for the unnamed set, whose line also has the
        mean training loss since the last evaluation."""
        count = self._loss_count
        train = f"train {self._loss_sum / count:9f} | " if count else ""
        if name:
            train = f"{name} | "
        else:
            self._loss_sum, self._loss_count = 0.0, 0
        if self.view.brief:
            line = f"[V] step {step:5d} | eval {result.loss:8.4f} | {train}{duration(ms)}"
        else:
            shown = "".join(f"{name} {value:.4f} | " for name, value in result.told.items())
            line = (
                f"[V] step {step:5d} [{self._percent:4.1f}%] | time: {duration(ms)} | eval "
                f"{result.loss:10f} | {shown}{train}tps {tokens_per_second(tokens, ms)} | "
                f"{self._of_run(step)}"
            )
        self.view.line(line, bold=True)
        self.log.write(
            "eval",
            step,
            eval_tokens=tokens,
            duration_ms=int(ms),
            loss=result.loss,
            **{key: result.numbers[key] for key in result.validated},
            **({"name": name} if name else {}),
        )
        self.score(f"{name}/loss" if name else "eval", result.loss)
        for number, value in result.told.items():
            self.score(f"{name or 'eval'}/{number}", value)

    def score(self, name: str, value: float) -> None:
        """Show a number in the live view until a newer number of the same name."""
        self._scores[name] = value
        self.view.progress(scores=dict(self._scores))

    def line(self, tag: str, step: int, text: str, *, bold: bool = False) -> None:
        """Print a line about the state before step `step`. tag: one letter for the kind of line."""
        self.view.line(f"[{tag}] step {step:5d} [{self._percent:4.1f}%] | {text}", bold=bold)

    def sensors(
        self, kind: str, step: int, rank: int, fields: dict[str, Any], label: str, line: str
    ) -> None:
        """Write a `gpu` or `cpu` record, and print a [G] line unless the view already shows
        sensors."""
        self.log.write(kind, step, rank=rank, **fields)
        if not self.view.shows_sensors:
            self.view.line(f"[G] step {step:5d} [{label}] | {line}")

    def links(self, table: LinkTable) -> None:
        """Report [Links]: the paths between GPUs, and the measured speed of each path."""
        for line in [*table.lines(), ""]:
            self.view.line(line)
        self.log.write("links", 0, links=table.records())

    def guard(self, step: int, action: str, text: str, *, shown: bool = True, **more: Any) -> None:
        """Report the guard's decision about a step, counted from 0. action: the decision as one
        word."""
        if shown:
            self.view.line(text)
        self.log.write("guard", step, action=action, message=text, **more)

    def choices(self, step: int, fast: dict[str, bool], chosen: dict[str, str]) -> None:
        """Report which implementations tuning has chosen. fast: by fp8 product, True if it sums
        with fewer bits. chosen: by operation and shape, the chosen implementation (see
        Device.choose). fp8 products whose choice is not "per-tensor" ran only to be timed, and are
        left out of `fast`."""
        others = {work for work, way in chosen.items() if way != "per-tensor"}
        fast = {name: how for name, how in fast.items() if f"matmul_fp8 {name}" not in others}
        if fast:
            summed = f"{sum(fast.values())} of {len(fast)} fp8 products that may"
            self.view.line(f"  fast accumulation: {summed}")
            self.log.write("fast-products", step, fast_products=fast)
        if chosen:
            counts: dict[str, Counter[str]] = {}
            for work, way in chosen.items():
                counts.setdefault(work.split()[0], Counter())[way] += 1
            for operation, ways in counts.items():
                found = [f"{count} {way}" for way, count in ways.most_common()]
                line = ", ".join(found if ways.total() > 1 else ways)
                self.view.line(f"  {operation}: {line}")
            self.log.write("choices", step, choices=chosen)

    def seconds(self, what: str, parts: Mapping[str, float], step: int) -> None:
        """Log how many seconds each part of the start took; print parts of SHOWN_SECONDS or more.
        what: name of the timed phase. parts: seconds by the part's name."""
        if not parts:
            return
        shown = [f"{s:.1f} {name}" for name, s in parts.items() if s >= SHOWN_SECONDS]
        if shown:
            self.view.line(f"  {what}, in seconds: {', '.join(shown)}")
        self.log.write("seconds", step, what=what, seconds=dict(parts))

    def warn_of_steps_without_targets(self, step: int) -> None:
        """Warn, at the end of a run after `step` steps, of steps without targets."""
        if empty := self.without_targets:
            text = f"{empty} of {step} steps had no target to train on, and changed nothing"
            self.message(f"WARNING: {text}: look at the loss masks of the data", step)

    def close(self) -> None:
        self.view.close()
        self.log.close()
