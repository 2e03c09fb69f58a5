"""The report card of a fine-tuning run, as text and as a page with the loss curve: losses, time,
energy, and answers to held-out questions before and after training."""

import base64
import html
import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from llmq.base.console import printable
from llmq.base.files import disk_errors, write_file
from llmq.options.options import TrainConfig
from llmq.report.plot import figure_of, read_log, read_runs
from llmq.text.show import first_documents

WIDTH = 100  # most characters of a question or an answer in card.txt
PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>{title}</title>
<style>body{{font:16px/1.5 system-ui;max-width:60rem;margin:2rem auto;padding:0 1rem}}
pre{{white-space:pre-wrap;background:#8881;padding:.7rem}}img{{max-width:100%}}
table{{border-collapse:collapse}}td,th{{padding:.2rem .8rem .2rem 0;text-align:left}}
.two{{display:grid;grid-template-columns:1fr 1fr;gap:1rem}}</style>
<h1>{title}</h1>
<table>{rows}</table>
<img alt="Loss by step" src="data:image/png;base64,{curve}">
{answers}
</html>
"""


def held_out_prompts(patterns: Sequence[str], count: int, seq_len: int) -> list[str]:
    """Return the questions of the first `count` held-out documents, as text with special tokens. A
    question is the tokens before a document's first trained token. Documents without a question,
    and questions that fill a sequence, are skipped."""
    found: list[str] = []
    for ids, mask, decoder in first_documents(patterns) if patterns else ():
        begin = int(np.argmax(mask)) if mask.any() else 0
        if 0 < begin < seq_len - 1:
            added, question = list(decoder.added[0]), ids[:begin].tolist()
            if question[: len(added)] == added:  # encoding a prompt adds the tokens again
                question = question[len(added) :]
            text = decoder.decode(question)
            if text.strip() and text not in found:
                found.append(text)
        if len(found) == count:
            break
    return found


def write_card(out: Path, config: TrainConfig, about: Iterable[str]) -> None:
    """Print the card of a run that has ended, and write card.txt and card.html into `out`. about:
    first lines of the card, about data, model and steps."""
    records = read_log(Path(config.log_file))
    rows = [*(line.split(":", 1) for line in about), *_results(records)]
    rows = [(name.strip(), value.strip()) for name, value in rows]
    answers = _answers(records)
    lines = [f"{name + ':':<12} {value}" for name, value in rows]
    for prompt, before, after in answers:
        lines += ["", f"Question: {_short(prompt)}", f"  before: {_short(before)}"]
        lines += [f"  after:  {_short(after)}"]
    text = "\n".join(lines)
    print(f"\n{text}\n")
    page = PAGE.format(
        title=html.escape(f"{config.name}: fine-tuning of {config.model}"),
        rows="".join(
            f"<tr><th>{html.escape(name)}<td>{html.escape(value)}" for name, value in rows
        ),
        curve=_curve(Path(config.log_file)),
        answers="".join(_page_of(*answer) for answer in answers),
    )
    with disk_errors(out):
        write_file(out / "card.txt", f"{text}\n")
        write_file(out / "card.html", page)


def _results(records: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Return rows (name, value) of losses, time and energy, from the log's records."""
    losses = [
        r for r in records if r["log"] == "eval" and "name" not in r and r["loss"] is not None
    ]
    steps = [r for r in records if r["log"] == "step"]
    rows = []
    if losses:
        best = min(losses, key=lambda r: r["loss"])
        rows.append(
            (
                "Held-out loss",
                f"{losses[0]['loss']:.4f} before, {best['loss']:.4f} at step {best['step']}, "
                f"{losses[-1]['loss']:.4f} at the end",
            )
        )
    seconds = sum(r["duration_ms"] for r in steps) / 1000
    tokens = sum(r["step_tokens"] for r in steps)
    rows.append(
        ("Trained", f"{len(steps)} steps, {tokens:,} tokens, {_duration(seconds)} of steps")
    )
    watts = [r["power"] / 1000 for r in records if r["log"] == "gpu" and r.get("power")]
    if watts:
        gpus = len({r["rank"] for r in records if r["log"] == "gpu"})
        energy = fmean(watts) * gpus * seconds / 3600
        rows.append(("Energy", f"{energy:.1f} Wh, {tokens / (3600 * energy):.1f} tokens a joule"))
    return rows


def _answers(records: list[dict[str, Any]]) -> list[tuple[str, str, str]]:
    """Return each sampled prompt of the log with its first and its last answer."""
    by_prompt: dict[str, list[str]] = {}
    for record in records:
        if record["log"] == "sample":
            by_prompt.setdefault(record["prompt"], []).append(record["text"])
    return [(p, texts[0], texts[-1]) for p, texts in by_prompt.items() if len(texts) > 1]


def _curve(log: Path) -> str:
    """Return the run's loss curve as a PNG picture in base 64."""
    picture = io.BytesIO()
    figure_of(read_runs([log], "step"), "step").savefig(picture, format="png")
    return base64.b64encode(picture.getvalue()).decode()


def _page_of(prompt: str, before: str, after: str) -> str:
    before, after, prompt = (html.escape(printable(text)) for text in (before, after, prompt))
    return (
        f"<h2>A held-out question</h2><pre>{prompt}</pre><div class=two>"
        f"<div><h3>before</h3><pre>{before}</pre></div><div><h3>after</h3><pre>{after}</pre></div>"
        "</div>"
    )


def _short(text: str) -> str:
    line = " ".join(printable(text).split())
    return line if len(line) <= WIDTH else f"{line[: WIDTH - 1]}…"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
