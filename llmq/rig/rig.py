"""`llmq rig`: measure a machine in minutes, say what is wrong with it, and keep what plans need."""

import json
import os
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from llmq import __version__
from llmq.base.errors import ConfigError, LlmqError
from llmq.base.files import prepare_report, write_file
from llmq.bench.child import run_child
from llmq.options.card_file import CardFile, checked, record_of, this_host, write_card_file
from llmq.options.option_file import command_line
from llmq.options.options import TrainConfig
from llmq.options.options_io import make_config
from llmq.options.presets import preset
from llmq.options.rules import FP8_CAPABILITY
from llmq.plan.fit import Candidate, Fit
from llmq.plan.memory import OutOfMemory
from llmq.plan.target import MachineOptions, target
from llmq.rig import steps
from llmq.rig.child import GRACE, run_part
from llmq.rig.exchanges import BACKENDS
from llmq.rig.findings import NO_ROOM, words_on
from llmq.rig.markdown import draw, markdown, please_share
from llmq.rig.steps import in_time, merged
from llmq.runtime.host_usage import available_host_memory

MODELS = ("1.5B", "0.5B", "7B", "3B", "14B")  # of Qwen2.5, the most telling first
SEQUENCES = 512  # of a step of all GPUs, as in llm.q's table, at T = 1024
SECONDS = 30.0
ROW_STEP = 1.5  # seconds of a timed step, about: fewer micro-steps than a real one has
REPEATS = 3
START = 25.0  # seconds until the first step, and for what is timed beside the steps
SHORTEST_ROW = START + REPEATS * ROW_STEP  # seconds that a row takes at least
WHOLE_ROW = START + SECONDS  # and one that is not cut short, about


def table_rows(fp8: bool, gpus: int) -> Iterator[dict[str, Any]]:
    """The options of every row, by flag; its products are in fp8 first, where there is fp8."""
    for dtype in ("e4m3", "bf16") if fp8 else ("bf16",):
        for model in MODELS:
            options = {
                "model": f"Qwen2.5-{model}",
                "from-scratch": True,
                "model-dtype": "bf16",
                "matmul-dtype": dtype,
                "opt-m-dtype": "bf16",
                "opt-v-dtype": "bf16",
                "seq-len": 1024,
                "batch-size": 16,
                "grad-accumulation": max(SEQUENCES // gpus // 16, 1),
                "gpus": gpus,
            }
            yield options | ({"fp8-recipe": "delayed"} if dtype == "e4m3" else {})


def fastest(options: dict[str, Any], card_file: Path) -> Candidate | None:
    """The options that --fit finds for a row on this rig; None where nothing fits."""
    config = make_config(options)
    model = preset(config.model)
    config = config.validate_with(model)
    asked = MachineOptions(host_memory=available_host_memory(), card_file=card_file)
    where = target(config, model, asked, search=True)
    try:
        return Fit(config, where.planner(model), where.limits, frozenset({"gpus"})).search()[0]
    except OutOfMemory:
        return None


def shortened(found: Candidate) -> tuple[TrainConfig, float]:
    """With fewer micro-steps, so that a step takes ROW_STEP, and what that one should take."""
    config, seconds = found.config, found.need.time.total
    count = min(
        max(round(ROW_STEP * config.grad_accumulation / seconds), 1), config.grad_accumulation
    )
    share = count / config.grad_accumulation
    return replace(config, grad_accumulation=count), share * seconds


def flags_of(config: TrainConfig) -> dict[str, Any]:
    """Its options by flag, as configuration files have them."""
    found: dict[str, Any] = {}
    for word in command_line(config)[2:]:
        name, equals, value = word.removeprefix("--").partition("=")
        found[name.removeprefix("no-")] = value if equals else not name.startswith("no-")
    return found


def trained(found: Candidate, card_file: Path, limit: float) -> dict[str, Any]:
    """A row's record: `options`, tokens per second `predicted` and, with `status` ok, `measured`.
    limit: seconds after which the run is ended."""
    config, step = shortened(found)
    steps = max(1, round(min(SECONDS, limit - START) / REPEATS / step))
    options = flags_of(config)
    record = {"options": options, "predicted": speed_of(config, card_file)}
    outcome = run_child(options, steps, REPEATS, limit)
    if outcome["status"] == "hung":  # its message names options that a rig does not have
        return record | {"status": "failed", "message": "it took too long"}
    if outcome["status"] != "ok":
        return record | {"status": outcome["status"], "message": outcome["message"]}
    result = outcome["result"]
    memory = result["memory"]
    return record | {
        "status": "ok",
        "measured": result["tokens_per_second"],
        "spread": result["spread"],
        "joules_per_token": result["joules_per_token"],
        "memory": memory["used"] or memory["planned"],
    }


def speed_of(config: TrainConfig, card_file: Path) -> float:
    """Tokens per second that the plan predicts for exactly this."""
    model = preset(config.model)
    where = target(config, model, MachineOptions(card_file=card_file), search=False)
    return where.planner(model).exact(config).speed


MINUTES = 10.0
LAST = 10.0  # seconds that the report takes
SHORTEST = 5.0  # seconds that every part gets while there is time
# The time that each part takes at most; rows of llm.q's table have what is left. Steps have that,
# too, where it is not enough for a row: plans need them more.
SHARES = {
    "facts": 0.03,
    "host": 0.03,
    "bus": 0.06,
    "exchanges": 0.13,
    "load": 0.2,
    "ladder": 0.1,
    "steps": 0.3,
}
LABELS = {
    "facts": "what the machine says of itself",
    "host": "host memory, CPU, disk",
    "bus": "links to the host and between GPUs",
    "exchanges": "collectives",
    "load": "load, until clocks settle",
    "ladder": "products, attention and copies by size",
    "steps": "launches of real steps",
    "rows": "rows of llm.q's table",
}

Measure = Callable[[str, float, dict[str, Any]], dict[str, Any]]
"""A function like run_part: it takes a part's name, seconds and options, and returns `result` and
`error`."""
Clock = Callable[[], float]


class Rig:
    """One run of the command: the parts take turns, each as long as its share, and no longer than
    what is left."""

    def __init__(self, seconds: float, measure: Measure, clock: Clock):
        self.seconds, self._measure, self._clock = seconds, measure, clock
        self._start = clock()
        self.report: dict[str, Any] = {
            "llmq": __version__,
            "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
            "host": {},
            "gpus": [],
            "problem": None,
            "parts": {},
            "measured": {},
        }

    @property
    def elapsed(self) -> float:
        """Seconds."""
        return self._clock() - self._start

    @property
    def left(self) -> float:
        """Seconds of measurements: the report, and a part that does not end in time, need some."""
        return self.seconds - self.elapsed - LAST - GRACE

    def part(
        self, name: str, options: dict[str, Any], share: float | None = None, label: str = ""
    ) -> dict[str, Any]:
        """The result of a measurement, {} if there is none; why not is in the report."""
        share = SHARES[name] if share is None else share
        seconds = min(max(share * self.seconds, SHORTEST), self.left)
        title = f"{name} {label}".strip()
        if seconds < SHORTEST:
            self.note(title, "there was no time left", 0.0)
            return {}
        self.say(f"{LABELS[name]}{label and f': {label}'}")
        start = self._clock()
        try:
            found = self._measure(name, seconds, options)
        except (LlmqError, OSError, ValueError) as error:
            found = {"result": {}, "error": str(error)}
        self.note(title, found["error"], self._clock() - start)
        return found["result"]

    def note(self, title: str, error: str | None, seconds: float) -> None:
        """The note of a part for the report, which names no user: nor do paths in it."""
        home = os.path.expanduser("~")
        if error and len(home) > 1:
            error = error.replace(home, "~")
        self.report["parts"][title] = {"seconds": seconds, "error": error}
        if error:
            self.say(f"  {title}: {error}")

    def say(self, line: str) -> None:
        """Progress."""
        print(f"[{self.elapsed:4.0f} s] {line}", flush=True)


def run_rig(
    out: Path = Path("rig"),
    minutes: float = MINUTES,
    measure: Measure = run_part,
    clock: Clock = time.monotonic,
) -> dict[str, Any]:
    """Measure, print what is wrong, write out.md, out.json, out.png and the card file. minutes:
    what it takes at most. Without a GPU the host is measured, and there is no card file."""
    prepare_report("--out", out, ".json", ".md", ".png")
    rig = Rig(60 * minutes, measure, clock)
    report = rig.report
    # The path that it is written to says nothing of the measurements, and may name the user.
    report["command"] = "llmq rig" + (f" --minutes {minutes:g}" if minutes != MINUTES else "")
    report |= rig.part("facts", {})
    gpus = len(report["gpus"])
    measured = report["measured"]
    measured["host"] = rig.part("host", {"disk": str(out.parent.resolve())})
    if gpus:
        _measure_gpus(rig, gpus)
        _keep(rig, out)
    report["seconds"] = rig.elapsed
    try:
        _write_json(report, out)  # whatever becomes of the rest
    finally:  # what minutes have shown is told, also where the disk is full
        report["words"] = words_on(report)
        print("\n".join(["", *(f"- {line}" for line in report["words"] or ["Nothing is wrong."])]))
    _write(report, out)
    print(f"\nwrote {out}.md, {out}.json and {out}.png after {rig.elapsed:.0f} s")
    for line in please_share(report):
        print(f"\n{line}")
    return report


def _measure_gpus(rig: Rig, gpus: int) -> None:
    """All that is measured of GPUs, but for whole models. GPUs that are hot from the start make
    clocks settle."""
    measured, spec = rig.report["measured"], rig.report["spec"]
    fp8 = spec["capability"] >= FP8_CAPABILITY
    measured["bus"] = rig.part("bus", {"gpus": gpus})
    measured["exchanges"] = {}
    share = SHARES["exchanges"] / len(BACKENDS)
    for backend in BACKENDS if gpus > 1 else ():
        options = {"backend": backend, "gpus": gpus}
        measured["exchanges"][backend] = rig.part("exchanges", options, share, backend)
    measured["load"] = rig.part("load", {"gpus": gpus})
    measured["ladder"] = rig.part("ladder", {})
    measured["steps"] = []
    share = SHARES["steps"] + (SHARES["exchanges"] if gpus == 1 else 0)
    seconds = share * rig.seconds
    if rig.left - seconds < WHOLE_ROW:
        seconds = rig.left
    _measure_steps(rig, steps.runs(fp8, gpus), rig.elapsed + seconds)


def _measure_steps(rig: Rig, left: list[dict[str, Any]], end: float) -> None:
    """Measure as many runs as there is time for until `end`, in one process after another: a run
    that crashes or hangs ends its own, and is left out."""
    while left:
        title = steps.title_of(left[0])
        found = rig.part("steps", {"runs": left}, (end - rig.elapsed) / rig.seconds, title)
        done, refused = found.get("steps", []), found.get("refused", {})
        rig.report["measured"]["steps"] += done
        for index, why in refused.items():
            rig.note(f"steps of {steps.title_of(left[int(index)])}", why, 0.0)
        whole = rig.report["parts"][f"steps {title}"]["error"] is None
        if whole or min(end - rig.elapsed, rig.left) < SHORTEST:
            break
        left = left[len(done) + len(refused) + 1 :]


def card_file_of(report: dict[str, Any]) -> CardFile:
    """The card file that plans need, from a report. Raises ConfigError where too little was
    measured."""
    measured = report["measured"]
    good = [step for step in measured["steps"] if in_time(step["idle"])]
    tables = (measured["ladder"], *good)
    launches = merged(table.get("launches", {}) for table in tables)
    spec = report["spec"]
    bus = measured["bus"].get("at_once", {})
    exchange, beside, beside_bus = {}, {}, False
    for backend, found in measured["exchanges"].items():
        if found:
            operations = found["operations"].items()
            exchange[backend] = {
                name: [[[received], seconds] for received, _, seconds in points]
                for name, points in operations
            }
            beside[backend] = found["slowdown"]
            beside_bus |= found["beside_bus"]
    gpus = len(report["gpus"])
    if not launches:
        raise ConfigError("no launch was measured, so there is no card file")
    return checked(
        CardFile(
            **spec,
            gpus=gpus,
            host=this_host(),
            date=report["date"],
            version=report["llmq"],
            driver=report.get("driver", ""),
            launches=launches,
            bus={n: [min(rates[way]) for way in ("in", "out", "both")] for n, rates in bus.items()},
            exchange={str(gpus): exchange} if exchange else {},
            beside={str(gpus): beside} if beside else {},
            beside_bus=beside_bus,
            slowest=measured["load"].get("slowest") or 1.0,
        )
    )


def _keep(rig: Rig, out: Path) -> None:
    """Write the card file, and train rows of llm.q's table with what plans find by it."""
    report = rig.report
    report["measured"]["rows"] = []
    try:
        file = card_file_of(report)
        report["card_file"] = record_of(file)
        rig.say(f"card file: {write_card_file(file)}")
        _write_json(report, out)  # which the rows are planned by
    except (LlmqError, OSError, KeyError) as error:
        rig.note("card file", " ".join(str(error).split()), 0.0)
        return
    fp8 = file.capability >= FP8_CAPABILITY
    for options in table_rows(fp8, file.gpus):
        start = rig.elapsed
        row = steps.title_of({name: options[name] for name in ("model", "matmul-dtype")})
        title = f"rows {row}"
        if rig.left < SHORTEST_ROW:
            break
        rig.say(f"{LABELS['rows']}: {row}")
        try:
            found = fastest(options, Path(f"{out}.json"))
            if found is None:
                rig.note(title, NO_ROOM, rig.elapsed - start)
                continue
            limit = min(START + 2 * SECONDS, rig.left)
            if limit < SHORTEST_ROW:
                break
            record = trained(found, Path(f"{out}.json"), limit)
        except Exception as error:  # the report is worth more than this row
            if not isinstance(error, LlmqError):
                traceback.print_exc()
            record = {"status": "failed", "message": " ".join(str(error).split())}
        failed = record["status"] != "ok"
        rig.note(title, record["message"] if failed else None, rig.elapsed - start)
        report["measured"]["rows"] += [] if failed else [record]
        if not failed:
            rates = (record["measured"], record["predicted"])
            rig.say("  {:,.0f} tokens/s, predicted {:,.0f}".format(*rates))


def _write_json(report: dict[str, Any], out: Path) -> None:
    write_file(Path(f"{out}.json"), json.dumps(report, indent=1) + "\n")


def _write(report: dict[str, Any], out: Path) -> None:
    _write_json(report, out)
    write_file(Path(f"{out}.md"), markdown(report))
    draw(report, Path(f"{out}.png"))
