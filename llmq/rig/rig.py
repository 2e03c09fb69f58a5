"""`llmq rig`: measures a machine in minutes, part by part (SHARES names the parts), names the
machine's faults, and writes the card file for plans."""

import json
import os
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from llmq import __version__
from llmq.base.errors import ConfigError, LlmqError
from llmq.base.files import prepare_report, write_file
from llmq.bench.child import ask
from llmq.options.card_file import CardFile, checked, record_of, this_host, write_card_file
from llmq.options.groups.precision import FP8_CAPABILITY
from llmq.rig import steps
from llmq.rig.exchanges import BACKENDS
from llmq.rig.findings import numbers_of, words_on
from llmq.rig.steps import in_time, merged
from llmq.run.restarts import in_words

MINUTES = 10.0
GRACE = 15.0  # seconds for start and end of a part's process, added to the part's share of time
PLEASE_SHARE = (
    "Others who plan for such cards have only a data sheet. Please share what was measured: "
    "attach this report's .json to an issue of the repository of llmq, or propose the card "
    "file as a new one in its llmq/cards. Neither names you or the machine."
)
LAST = 10.0  # seconds reserved for the report
SHORTEST = 5.0  # least seconds of a part, as long as time is left
# Largest share of the time for each part. `steps`, the part that plans need most, gets all
# remaining time.
SHARES = {"facts": 0.03, "disk": 0.07, "bus": 0.06, "exchanges": 0.13, "load": 0.2, "steps": 1.0}
LABELS = {
    "facts": "what the machine says of itself",
    "disk": "the disk of --offload-dir",
    "bus": "links to the host and between GPUs",
    "exchanges": "collectives",
    "load": "load, until clocks settle",
    "steps": "launches of real steps",
}

Measure = Callable[[str, float, dict[str, Any]], dict[str, Any]]
"""A function like run_part, which takes a part's name, seconds and options, and returns `result`
and `error`."""
Clock = Callable[[], float]


def run_part(
    part: str, seconds: float, options: dict[str, Any], *, grace: float = GRACE
) -> dict[str, Any]:
    """Run llmq.rig.PART.measure in a child process. Returns `result`, as far as measured, and
    `error`, None without an error."""
    task = f"llmq.rig.{part}:measure"
    found, ended = ask(task, options, seconds=seconds, timeout=seconds + grace)
    if ended.status is None:
        return found | {"error": f"it took more than {seconds + grace:.0f} s and was ended"}
    if ended.status and found["error"] is None:
        return found | {"error": f"its process {in_words(ended.status)}"}
    return found


class Rig:
    """Runs the parts of `llmq rig` in turn, each part within its share of the time and the time
    left."""

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
        """Return the seconds since the start."""
        return self._clock() - self._start

    @property
    def left(self) -> float:
        """Return the seconds for further measurements, without the time for the report and for a
        part's late end."""
        return self.seconds - self.elapsed - LAST - GRACE

    def part(
        self, name: str, options: dict[str, Any], share: float | None = None, label: str = ""
    ) -> dict[str, Any]:
        """Run a part and return its result; {} without a result, whose reason the report names."""
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
        for line in numbers_of(name, found["result"]):
            self.say(f"  {line}")
        return found["result"]

    def note(self, title: str, error: str | None, seconds: float) -> None:
        """Note a part's time and error in the report. The home directory becomes ~, so that the
        report names no user."""
        home = os.path.expanduser("~")
        if error and len(home) > 1:
            error = error.replace(home, "~")
        self.report["parts"][title] = {"seconds": seconds, "error": error}
        if error:
            self.say(f"  {title}: {error}")

    def say(self, line: str) -> None:
        """Print a line of progress."""
        print(f"[{self.elapsed:4.0f} s] {line}", flush=True)


def run_rig(
    out: Path = Path("rig"),
    minutes: float = MINUTES,
    measure: Measure = run_part,
    clock: Clock = time.monotonic,
    folders: Sequence[str] = (),
) -> dict[str, Any]:
    """Measure, print numbers and faults, write out.json and the card file, and return the report.
    minutes: the time limit. folders: directories of --offload-dir. Without a GPU the report has
    facts and disk only, and no card file is written."""
    prepare_report("--out", out, ".json")
    rig = Rig(60 * minutes, measure, clock)
    report = rig.report
    # The report's path may name the user, and is left out of the command.
    report["command"] = "llmq rig" + (f" --minutes {minutes:g}" if minutes != MINUTES else "")
    report |= rig.part("facts", {})
    if folders:
        report["measured"]["disk"] = rig.part("disk", {"folders": list(folders)})
    if report["gpus"]:
        _measure_gpus(rig, len(report["gpus"]))
        _keep_card_file(rig)
    report["seconds"] = rig.elapsed
    report["words"] = words_on(report)
    # Print before writing: if the disk is full, minutes of findings would be lost.
    print("\n".join(["", *(f"- {line}" for line in report["words"] or ["Nothing is wrong."])]))
    write_file(Path(f"{out}.json"), json.dumps(report, indent=1) + "\n")
    print(f"\nwrote {out}.json after {rig.elapsed:.0f} s")
    if "card_file" in report:
        print(f"\n{PLEASE_SHARE}")
    return report


def _measure_gpus(rig: Rig, gpus: int) -> None:
    """Measure bus, exchanges, load and steps, and store the results in the report's `measured`.
    Load comes before steps, because clocks settle sooner on hot GPUs."""
    measured = rig.report["measured"]
    fp8 = rig.report["spec"]["capability"] >= FP8_CAPABILITY
    measured["bus"] = rig.part("bus", {"gpus": gpus})
    measured["exchanges"] = {}
    share = SHARES["exchanges"] / len(BACKENDS)
    for backend in BACKENDS if gpus > 1 else ():
        options = {"backend": backend, "gpus": gpus}
        measured["exchanges"][backend] = rig.part("exchanges", options, share, backend)
    measured["load"] = rig.part("load", {"gpus": gpus})
    measured["steps"] = []
    _measure_steps(rig, steps.runs(fp8, gpus))


def _measure_steps(rig: Rig, left: list[dict[str, Any]]) -> None:
    """Measure as many runs as time allows, in one process. After a crash or hang another process
    measures the runs after the failed run."""
    while left:
        title = steps.title_of(left[0])
        found = rig.part("steps", {"runs": left}, label=title)
        done, refused = found.get("steps", []), found.get("refused", {})
        rig.report["measured"]["steps"] += done
        for index, why in refused.items():
            rig.note(f"steps of {steps.title_of(left[int(index)])}", why, 0.0)
        whole = rig.report["parts"][f"steps {title}"]["error"] is None
        if whole or rig.left < SHORTEST:
            break
        left = left[len(done) + len(refused) + 1 :]


def card_file_of(report: dict[str, Any]) -> CardFile:
    """Return the card file made from a report. Raises ConfigError if no launch was measured."""
    measured = report["measured"]
    good = [step for step in measured["steps"] if in_time(step["idle"])]
    launches = merged(step["launches"] for step in good)
    spec = report["spec"]
    bus, disk = measured["bus"].get("at_once", {}), measured.get("disk")
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
            disk=[disk["read"], disk["write"]] if disk else [],
            slowest=measured["load"].get("slowest") or 1.0,
        )
    )


def _keep_card_file(rig: Rig) -> None:
    """Write the card file, and copy its record into the report. A failure is noted in the
    report."""
    try:
        file = card_file_of(rig.report)
        rig.report["card_file"] = record_of(file)
        rig.say(f"card file: {write_card_file(file)}")
    except (LlmqError, OSError, KeyError) as error:
        rig.note("card file", " ".join(str(error).split()), 0.0)
