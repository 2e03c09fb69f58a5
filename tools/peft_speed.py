#!/usr/bin/env python3
"""Compare training of adapters with peft: tokens per second and memory, on one card.

    PYTHONPATH=. tools/peft_speed.py [--model Qwen2.5-7B] [--batch-size 4] [--out h100_peft.md]

--lora-rank 0 trains all weights instead, and compares with transformers without peft, whose
optimizer then keeps its states in bf16 (--form sets the states of llmq). transformers computes
gated delta nets by flash-linear-attention and causal-conv1d if these are installed, else by its own
torch code; the page says which:

    PYTHONPATH=. tools/peft_speed.py --model Qwen3.5-4B --lora-rank 0 --batch-size 1 --seq-len 4096

Both sides train adapters of the same matrices of a preset with random weights, on random tokens,
one micro-batch a step, with clipped gradients and AdamW. Both sides are timed in the same way. A
few steps warm up; a GPU then runs steps for two seconds, until its clock settles. Each of --repeats
repeats times --steps steps (on a GPU, as many steps as fill a second) between two synchronisations.
llmq's rows are measured first, then peft's, then llmq's first row again, to show whether the card
has become slower; --once leaves the last measurement out.

peft's side is what a careful user writes (see PeftSide): transformers' model in bf16, SDPA,
torch.compile, fused AdamW. By default its adapters are in fp32, as peft makes them beside a model
in bf16 (autocast_adapter_dtype), under torch.autocast, so that their products are in bf16;
--adapter-dtype bf16 keeps the adapters in bf16, too. --compile layers compiles one layer, which all
layers share, the last norm and the loss, but no delta rule; model compiles all layers as one graph,
for which torch takes minutes. --mask --no-autocast measures peft as its first user writes it.
--num-layers measures a part of a model.

--form: options of llmq, once for each row; the default is FORMS. --limit: seconds for all
measurements; a measurement that exceeds it is ended. A side that fails gets one line, and the other
side's rows stay. --out is written after each row and at each phase, so that an interrupted
comparison leaves its results there; progress goes to stderr.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from llmq import __version__
from llmq.arch.model_config import ModelConfig
from llmq.base.dtypes import GIB
from llmq.base.errors import LlmqError
from llmq.bench.sweep_file import identity
from llmq.checkpoint.peft_export import target_modules
from llmq.options.adapters import adapters_of
from llmq.options.options import TrainConfig
from llmq.options.options_io import make_config
from llmq.options.presets import preset
from tools.faults.table import commit_of_tree
from tools.peft_side import GRACE, Peft, PeftJob

ROOT = Path(__file__).resolve().parents[1]
_DELAYED = "--base-dtype=e4m3 --fp8-recipe=delayed"
FORMS = (
    "",
    _DELAYED,
    f"{_DELAYED} --head-dtype=e4m3",
    f"{_DELAYED} --head-dtype=e4m3 --recompute-swiglu --no-keep-transposed",
)
"""Options of llmq: beside a model in bf16; in fp8; also the head; and with less memory."""
Options = dict[str, Any]


# -- llmq ----------------------------------------------------------------------------------------


def options_of(form: str) -> Options:
    """Keys and values for a file of `llmq bench`, from text such as `--base-dtype=e4m3
    --no-keep-transposed`."""
    found: Options = {}
    for word in form.split():
        name, given, value = word.removeprefix("--").partition("=")
        if not given:
            name, value = name.removeprefix("no-"), str(not name.startswith("no-"))
        found[name] = yaml.safe_load(value)
    return found


def status_of(command: list[str], environment: dict[str, str], limit: float) -> int | None:
    """Run a command; return its exit status, or None if the command took more than `limit` seconds.
    The command's process also ends if this program is ended."""
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        return None
    finally:
        process.terminate()  # llmq bench then ends its run, which uses the card
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
        process.kill()
        process.wait()


def llmq_row(shared: Options, form: str, how: list[str], limit: float) -> dict[str, Any]:
    """Return the row that `llmq bench` measures in at most `limit` seconds. how: options of `llmq
    bench`."""
    failed = {"form": form, "error": f"ended after {limit:.0f} s (--limit)"}
    with tempfile.TemporaryDirectory() as name:
        file, out = Path(name) / "runs.yaml", Path(name) / "report"
        file.write_text(yaml.safe_dump(shared | {"runs": [options_of(form)]}))
        command = [sys.executable, "-m", "llmq", "bench", "--config", str(file), "--out", str(out)]
        paths = filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
        status = status_of([*command, *how], environment, limit)
        if status is None:
            return failed
        report = out.with_name("report.json")
        if not report.exists():
            why = f"llmq bench ended with status {status} and without a report"
            return failed | {"error": why}
        found = json.loads(report.read_text())
    run = found["runs"][0]
    if run["status"] != "ok":
        return failed | {"error": f"{run['status']}: {run['message']}"}
    result = run["result"]
    row = {name: result[name] for name in ("step_seconds", "first_step_seconds")}
    memory = {"used": result["memory"]["used"], "allocated": result["memory"]["planned"]}
    return row | memory | {"name": found["machine"]["device"], "form": form, "error": None}


# -- the table -----------------------------------------------------------------------------------


def speed(row: dict[str, Any], tokens: int) -> float:
    """Tokens per second of a row. tokens: tokens of a step."""
    return tokens / statistics.median(row["step_seconds"])


def gib(size: int | None) -> str:
    return "-" if size is None else f"{size / GIB:.2f}"


def table(peft: dict[str, Any] | None, rows: list[dict[str, Any]], tokens: int) -> list[str]:
    """The table's lines in Markdown. peft: the row of peft, None if not measured. rows: rows of
    llmq. tokens: tokens of a step."""
    base = peft if peft is not None and "step_seconds" in peft else None
    names = "| | options | tok/s | ± | tok/s of peft's | allocated, GiB | reserved, GiB "
    lines = [names + "| in use, GiB | of peft's memory | start, s |", "| --- " * 10 + "|"]
    sides = [("peft", peft)] * (peft is not None) + [("llmq", row) for row in rows]
    failures = []
    for name, row in sides:
        if row["error"] is not None:
            failures += ["", f"{name}{row['form'] and ' ' + row['form']}: {row['error']}"]
        if "step_seconds" not in row:
            continue
        seconds = row["step_seconds"]
        spread = (max(seconds) - min(seconds)) / statistics.median(seconds)
        faster = "-" if base is None else f"{speed(row, tokens) / speed(base, tokens):.2f}"
        less, used = "-", row.get("used")
        if name == "llmq" and base is not None and used and base.get("allocated"):
            less = f"{used / base['allocated']:.2f}"
        sizes = " | ".join(gib(row.get(key)) for key in ("allocated", "reserved", "used"))
        cells = (name, row["form"], f"{speed(row, tokens):,.0f}", f"{spread:.1%}", faster, sizes)
        lines.append(f"| {' | '.join(cells)} | {less} | {row['first_step_seconds']:.1f} |")
    return lines + failures


NOTE = """
tok/s: of the median repeat, which on a GPU lasts a second at least; ±: the repeats' range over it.
allocated: peft's peak of torch.cuda.max_memory_allocated, and what `llmq plan` says; reserved:
torch's peak of that; in use: on the whole GPU, as the driver says. Of peft's memory: what llmq has
in use over what peft has allocated, the least that peft could run in. start: from the start of the
process, or of the command of a run, to the end of the first step, compilation included."""


@dataclass(kw_only=True)
class Page:
    """The page as far as it is known. again: llmq's first row, measured after peft. now: name of
    the current measurement. start: time.monotonic() at the start."""

    out: Path | None
    shared: Options
    job: PeftJob
    commit: str
    date: str
    peft: Peft | None = None
    rows: list[dict[str, Any]] = field(default_factory=list)
    again: dict[str, Any] | None = None
    now: str | None = None
    start: float = field(default_factory=time.monotonic)

    def lines(self) -> list[str]:
        """The page as lines of Markdown."""
        peft = None if self.peft is None else self.peft.row()
        told = (self.peft and self.peft.found) or {}
        names = [row["name"] for row in (told, *self.rows) if "name" in row]
        rank = self.job.rank
        title = self.shared["model"] + (" with adapters beside peft" if rank else " beside torch")
        versions = {"llmq": self.commit, "Python": platform.python_version()}
        versions |= told.get("versions", {})
        tokens = self.job.batch_size * self.job.seq_len
        size = f"{self.job.batch_size} x {self.job.seq_len:,} tokens a step"
        if "num-layers" in self.shared:
            size = f"the first {self.shared['num-layers']} layers; {size}"
        trained = f"Rank {rank}, targets {self.shared['lora-targets']}" if rank else "All weights"
        times = f"{self.job.repeats} x {self.job.steps} steps"
        lines = [f"# {title}, {names[0] if names else self.job.device}", ""]
        lines += [f"`{shlex.join(sys.argv)}`, {self.date}", ""]
        lines += ["; ".join(f"{name} {version}" for name, version in versions.items()), ""]
        lines.append(f"{trained}; {size}; random weights and tokens;")
        lines += [f"{times}.", ""]
        if peft is not None:
            lines += [peft_settings(self.job, told), ""]
        lines += table(peft, self.rows, tokens)
        if self.peft is not None:
            lines += ["", f"Seconds of peft's phases: {self.peft.seconds() or 'none has ended'}."]
        if self.again is not None:
            after = self.again["error"] or f"{speed(self.again, tokens):,.0f} tok/s"
            lines += ["", f"llmq's first row, measured again after peft: {after}."]
        if self.now is not None:
            lines += ["", f"Not the end: this page was written during {self.now}."]
        return lines + NOTE.splitlines()

    @property
    def failed(self) -> bool:
        """True if a measurement failed."""
        others = [] if self.peft is None else [self.peft.row()]
        others += [] if self.again is None else [self.again]
        return any(row["error"] is not None for row in (*self.rows, *others))

    def tell(self, name: str, row: dict[str, Any]) -> None:
        """Print a row, and write the page with it."""
        said = row["error"]
        if said is None:
            said = f"{speed(row, self.job.batch_size * self.job.seq_len):,.0f} tok/s"
        self.progress(f"{name} {row['form']}".rstrip() + f": {said}", now=None)

    def progress(self, text: str, now: str | None) -> None:
        """Print a line with the seconds since the start, and write the page."""
        print(f"[{time.monotonic() - self.start:5.1f} s] {text}", file=sys.stderr, flush=True)
        self.now = now
        self.write()

    def write(self) -> None:
        """Write the page to the file, if there is one."""
        if self.out is not None:
            self.out.write_text("\n".join(self.lines()) + "\n")


def peft_settings(job: PeftJob, told: dict[str, Any]) -> str:
    """A sentence about peft's side."""
    compiled = "not compiled"
    if job.compiled != "none":
        parts = {"model": "model and loss as one", "layers": "each layer, the last norm, the loss"}
        compiled = f"torch.compile of {parts[job.compiled]} (mode {job.mode}, dynamic=False"
        if "graphs" in told:
            compiled += f"; graphs: {told['graphs']}, breaks: {told['breaks']}"
        if job.compiled == "layers" and "linear_conv_kernel_dim" in job.document:
            compiled += "; the delta rule by itself, in no graph"
        compiled += ")"
    autocast = " under torch.autocast in bf16" * job.autocast
    said = [
        "base in bf16" if job.rank else "all in bf16, without adapters",
        *[f"adapters in {job.adapter_dtype}{autocast}"] * (job.rank > 0),
        "SDPA with transformers' mask" if job.masked else "SDPA with is_causal and no mask",
        compiled,
        "gradient checkpointing (not reentrant)" if job.checkpointing else "no checkpointing",
        f"fused AdamW, gradients clipped at {job.clip:g}" if job.clip else "fused AdamW",
        "TF32 allowed",
    ]
    return f"peft: {'; '.join(said)}."


# -- the command ---------------------------------------------------------------------------------


def checked(shared: Options, forms: list[str]) -> tuple[ModelConfig, TrainConfig]:
    """Return the model, and the config that all runs share. LlmqError if a run is impossible or
    differs in shared options."""
    model = preset(shared["model"])
    model = model.with_layers(range(shared.get("num-layers", model.num_layers)))
    base = make_config(shared).validate_with(model)
    if len({identity(shared | options_of(form)) for form in forms}) < len(forms):
        raise LlmqError("--form: two of them are the same")
    for form in forms:
        config = make_config(shared | options_of(form)).validate_with(model)
        for flag in shared:
            name = flag.replace("-", "_")
            if getattr(config, name) != getattr(base, name):
                raise LlmqError(f"--form: --{flag} has to be the same on both sides")
    return model, base


def peft_job(model: ModelConfig, config: TrainConfig, masked: bool, **given: Any) -> PeftJob:
    """The job of both sides, in the words of peft and transformers."""
    return PeftJob(
        document=model.to_hf(),
        modules=target_modules(model, adapters_of(config)) if config.lora_rank else [],
        transposed=model.arch.transposed,
        masked=masked or model.windows != {None},
        rank=config.lora_rank,
        alpha=config.lora_alpha,
        batch_size=config.batch_size,
        seq_len=config.seq_len,
        clip=config.grad_clip,
        device=config.device,
        **given,
    )


def compare(page: Page, forms: list[str], sides: tuple[str, ...], once: bool, limit: float) -> None:
    """Measure the sides, and fill the page. limit: seconds in all."""
    how = ["--timed-steps", str(page.job.steps), "--repeats", str(page.job.repeats)]

    def left() -> float:
        return max(0.0, page.start + limit - time.monotonic())

    def measured(form: str) -> dict[str, Any]:
        name = f"llmq {form}".rstrip()
        page.progress(f"{name} ...", now=name)
        return llmq_row(page.shared, form, how, left())

    for form in forms if "llmq" in sides else []:
        page.rows.append(measured(form))
        page.tell("llmq", page.rows[-1])
    if "peft" not in sides:
        return
    page.peft = Peft(page.job)
    try:
        page.progress("peft: start", now="peft's phase: start")
        page.peft.receive(
            left(), lambda name: page.progress(f"peft: {name}", now=f"peft's phase: {name}")
        )
    finally:
        page.peft.end()
        page.write()
    page.tell("peft", page.peft.row())
    if page.rows and page.rows[0]["error"] is None and page.peft.error is None and not once:
        page.again = measured(page.rows[0]["form"])
        page.tell("llmq, again", page.again)


def main(
    model: Annotated[str, typer.Option(help="preset")] = "Qwen2.5-7B",
    lora_rank: Annotated[int, typer.Option(min=0, help="0: all weights")] = 16,
    lora_alpha: Annotated[float | None, typer.Option(help="as the rank, if not given")] = None,
    lora_targets: Annotated[str, typer.Option(help="as llmq's")] = "all",
    batch_size: Annotated[int, typer.Option(min=1)] = 4,
    seq_len: Annotated[int, typer.Option(min=2)] = 1024,
    steps: Annotated[int, typer.Option(min=1, help="of a repeat")] = 5,
    repeats: Annotated[int, typer.Option(min=1)] = 3,
    adapter_dtype: Annotated[str, typer.Option(help="peft's: fp32 or bf16")] = "fp32",
    autocast: Annotated[bool, typer.Option(help="peft's adapters in fp32: bf16 products")] = True,
    compile_: Annotated[str, typer.Option("--compile", help="layers, model or none")] = "layers",
    compile_mode: Annotated[str, typer.Option(help="of torch.compile")] = "default",
    mask: Annotated[bool, typer.Option(help="peft's SDPA gets transformers' mask")] = False,
    gradient_checkpointing: Annotated[bool, typer.Option(help="peft's")] = False,
    grad_clip: Annotated[float, typer.Option(min=0, help="of both sides; 0: none")] = 1.0,
    num_layers: Annotated[int | None, typer.Option(min=1, help="the model's first ones")] = None,
    form: Annotated[list[str] | None, typer.Option(help="options of llmq, for a row")] = None,
    only: Annotated[str | None, typer.Option(help="peft or llmq")] = None,
    once: Annotated[bool, typer.Option(help="llmq only before peft")] = False,
    limit: Annotated[float, typer.Option(min=1, help="seconds for everything")] = 900.0,
    device: Annotated[str, typer.Option(help="cuda or cpu")] = "cuda",
    commit: Annotated[str | None, typer.Option(help="of llmq, where git does not know")] = None,
    out: Annotated[Path | None, typer.Option(help="file for the page")] = None,
) -> None:
    """Measure both sides and print a page of Markdown; exits with 1 if one has failed."""
    for flag, value, known in (
        ("--adapter-dtype", adapter_dtype, ("fp32", "bf16")),
        ("--compile", compile_, ("layers", "model", "none")),
        ("--only", only, (None, "peft", "llmq")),
        ("--device", device, ("cuda", "cpu")),
    ):
        if value not in known:
            raise SystemExit(f"error: {flag}: {value} is not {' or '.join(filter(None, known))}")
    forms = list(FORMS if lora_rank else ("",)) if form is None else form
    shared: Options = {
        "device": device, "gpus": 1, "from-scratch": True, "model": model,
        "batch-size": batch_size, "seq-len": seq_len, "grad-accumulation": 1,
        "grad-clip": grad_clip,
    }  # fmt: skip
    shared |= {"num-layers": num_layers} if num_layers else {}
    if lora_rank:
        alpha = lora_rank if lora_alpha is None else lora_alpha
        shared |= {"lora-rank": lora_rank, "lora-alpha": alpha, "lora-targets": lora_targets}
    try:
        job = peft_job(
            *checked(shared, forms),
            adapter_dtype=adapter_dtype,
            autocast=autocast and adapter_dtype == "fp32" and lora_rank > 0,
            steps=steps,
            repeats=repeats,
            compiled=compile_,
            mode=compile_mode,
            checkpointing=gradient_checkpointing,
            masked=mask,
        )
        page = Page(
            out=out,
            shared=shared,
            job=job,
            commit=commit or commit_of_tree() or __version__,
            date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        )
        page.write()
    except (LlmqError, OSError) as error:
        raise SystemExit(f"error: {error}") from error
    sides = ("peft", "llmq") if only is None else (only,)
    compare(page, forms, sides, once, limit)
    print("\n".join(page.lines()))
    if page.failed:
        raise SystemExit(1)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that children are ended
    typer.run(main)
