"""The report of `llmq rig` as one picture."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from llmq.base.files import replacing

Report = dict[str, Any]


def draw(report: Report, path: Path) -> None:
    """Write it as PNG: products by size, clocks and power under load, buses, predictions."""
    from matplotlib.figure import Figure

    panels = [panel for panel, has in PANELS if has(report)] or [_host]
    rows = -(-len(panels) // 2)
    figure = Figure(figsize=(11, 4 * rows), dpi=100, layout="constrained")
    for number, panel in enumerate(panels, 1):
        panel(figure.add_subplot(rows, min(len(panels), 2), number), report)
    name = report["spec"]["device"] if report["gpus"] else "No GPU"
    count = f" x {len(report['gpus'])}" if len(report["gpus"]) > 1 else ""
    figure.suptitle(f"{name}{count}, {report['date'][:10]}, llmq {report['llmq']}")
    with replacing(path) as file:
        figure.savefig(file, format="png")


def _products(axes: Any, report: Report) -> None:
    lines: dict[str, list[tuple[int, float]]] = {}
    for row in report["measured"]["ladder"]["rows"]:
        if "product" in row["what"]:
            lines.setdefault(row["what"], []).append((int(row["size"]), row["tflops"]))
    for name, points in lines.items():
        axes.plot(*zip(*sorted(points), strict=True), "o-", label=name)
    axes.set_xscale("log", base=2)
    axes.set(title="products", xlabel="rows and columns", ylabel="TFLOP/s")
    axes.legend(fontsize="small")
    axes.grid(alpha=0.3)


def _load(name: str, title: str, unit: str) -> Callable[[Any, Report], None]:
    def panel(axes: Any, report: Report) -> None:
        for gpu, series in _series(report, name):
            axes.plot(series["seconds"], series[name], label=f"GPU {gpu}")
        axes.set(title=f"{title} under load", xlabel="seconds", ylabel=unit)
        axes.legend(fontsize="small")
        axes.grid(alpha=0.3)

    return panel


def _series(report: Report, name: str) -> list[tuple[int, dict[str, Any]]]:
    """The series of the GPUs that told this at all times: one whose load failed at its start told
    nothing."""
    records = (report["measured"].get("load") or {}).get("gpus", [])
    found = [(record["gpu"], record["series"]) for record in records]
    return [(n, s) for n, s in found if 0 < len(s.get(name, [])) == len(s["seconds"])]


def _bus(axes: Any, report: Report) -> None:
    at_once = report["measured"]["bus"]["at_once"]
    width = 0.25
    for place, way in enumerate(("in", "out", "both")):
        rates = [min(found[way]) for found in at_once.values()]
        positions = [n + (place - 1) * width for n in range(len(rates))]
        axes.bar(positions, rates, width, label=way)
    axes.set_xticks(range(len(at_once)), [f"{n} GPU(s)" for n in at_once])
    axes.set(title="to and from host memory, each GPU", ylabel="GB/s")
    axes.legend(fontsize="small")


def _rows(axes: Any, report: Report) -> None:
    rows = report["measured"]["rows"]
    names = [
        f"{row['options']['model'].rpartition('-')[2]} {row['options'].get('matmul-dtype', 'bf16')}"
        for row in rows
    ]
    for place, kind in enumerate(("measured", "predicted")):
        positions = [n + (place - 0.5) * 0.4 for n in range(len(rows))]
        axes.bar(positions, [row[kind] for row in rows], 0.4, label=kind)
    axes.set_xticks(range(len(rows)), names, fontsize="small", rotation=20)
    axes.set(title="training", ylabel="tokens/s")
    axes.legend(fontsize="small")


def _host(axes: Any, report: Report) -> None:
    """All that a machine without a GPU has."""
    found = report["measured"].get("host") or {}
    disk = found.get("disk", {})
    values = {
        "memory": found.get("memory"),
        "disk, written": disk.get("write"),
        "disk, read": disk.get("read"),
    }
    known = {name: value for name, value in values.items() if value}
    axes.barh(list(known), list(known.values()))
    axes.set_xscale("log")
    axes.set(title="host", xlabel="GB/s")


def _has(part: str, name: str) -> Callable[[Report], bool]:
    return lambda report: bool((report["measured"].get(part) or {}).get(name))


def _told(name: str) -> Callable[[Report], bool]:
    return lambda report: bool(_series(report, name))


PANELS: tuple[tuple[Callable[[Any, Report], None], Callable[[Report], bool]], ...] = (
    (_products, _has("ladder", "rows")),
    (_load("clock", "clock", "MHz"), _told("clock")),
    (_load("power", "power", "W"), _told("power")),
    (_load("temperature", "temperature", "°C"), _told("temperature")),
    (_bus, _has("bus", "at_once")),
    (_rows, lambda report: bool(report["measured"].get("rows"))),
)
