"""The report of `llmq rig` for people, as Markdown and as a picture."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from llmq.base.dtypes import GIB, MIB
from llmq.base.files import replacing
from llmq.report.tables import markdown_table
from llmq.rig.exchanges import LOAD
from llmq.rig.findings import Report, part_of
from llmq.rig.steps import in_time

BESIDE = " (products as beside other GPUs)"


def markdown(report: Report) -> str:
    """All of it: what is wrong first, then a table for each part that has one."""
    blocks = [_heading(report), _words(report)]
    for title, part in (
        ("Machine", _machine),
        ("GPUs", _gpus),
        ("To and from host memory, GB/s of each GPU", _bus),
        ("Between GPUs, GB/s", _pairs),
        ("Collectives, GB/s that each GPU receives", _exchanges),
        ("Under load", _load),
        ("By size", _ladder),
        ("Steps of a quarter of models", _steps),
        ("Rows of llm.q's table, with what --fit finds", _rows),
        ("Time", _time),
    ):
        rows = list(part(report))
        if rows:
            table = markdown_table([*map(str.strip, rows[0])], (row.values() for row in rows))
            notes = _notes_on_exchanges(report) if part is _exchanges else []
            blocks += [f"## {title}\n\n{table}", *notes]
    blocks += [f"## Please share it\n\n{line}" for line in please_share(report)]
    return "\n\n".join(block for block in blocks if block) + "\n"


def please_share(report: Report) -> list[str]:
    """The request that ends a report with a card file: plans of others get better by it."""
    line = (
        "Others who plan for such cards have only a data sheet. Please share what was measured: "
        "attach this report's .json to an issue of the repository of llmq, or propose the card "
        "file as a new one in its llmq/cards. Neither names you or the machine."
    )
    return [line] if "card_file" in report else []


def _number(value: Any, form: str = "{:.1f}") -> str:
    return "" if value is None else form.format(value)


def _heading(report: Report) -> str:
    gpus = report["gpus"]
    name = report["spec"]["device"] if gpus else "A machine without a GPU"
    title = f"# {name}" + (f" x {len(gpus)}" if len(gpus) > 1 else "")
    driver = f", driver {report['driver']}" if report.get("driver") else ""
    versions = "; ".join(f"{k} {v}" for k, v in report.get("versions", {}).items())
    line = f"`{report['command']}`, {report['date']}, {report['seconds']:.0f} s{driver}"
    return "\n\n".join(filter(None, (title, line, versions or f"llmq {report['llmq']}")))


def _words(report: Report) -> str:
    lines = [f"- {line}" for line in report["words"]] or ["Nothing is wrong."]
    return "## What is wrong\n\n" + "\n".join(lines)


Rows = Iterator[dict[str, Any]]
"""Rows of a table: cells by the columns, which all of them have."""


def _machine(report: Report) -> Rows:
    host, found = report["host"], part_of(report, "host")
    if not host:
        return
    disk, options = found.get("disk", {}), " ".join(host.get("iommu_options", []))
    facts = {
        "CPU": f"{host.get('cpu')}, {host.get('cores_allowed')} of {host.get('cores')} logical",
        "memory": f"{host.get('memory', 0) / GIB:.0f} GiB, {host.get('numa_nodes')} NUMA node(s)",
        "system": f"{host.get('system')}{', virtual' if host.get('virtual') else ''}",
        "IOMMU": f"{'on' if host.get('iommu') else 'off'} {options}".strip(),
        "memory copies": _number(found.get("memory"), "{:.1f} GB/s"),
        "products of NumPy, F32": _number(found.get("product"), "{:.0f} GFLOP/s"),
        "disk": "{write:.2f} GB/s written, {read:.2f} read".format(**disk) if disk else "",
    }
    yield from ({"": name, " ": fact} for name, fact in facts.items() if fact)


def _of(value: float | None, most: float | None, form: str = "{:.0f}", unit: str = "") -> str:
    """The value, and the best that it could be; ? for what nobody tells."""
    now, best = (_number(number or None, form) or "?" for number in (value, most))
    return "?" if now == best == "?" else f"{now} of {best}{unit}"


def _gpus(report: Report) -> Rows:
    loaded = {r["gpu"]: r["settled"] for r in part_of(report, "load").get("gpus", [])}
    for gpu in report["gpus"]:
        now = gpu | loaded.get(gpu["index"], {})
        most = max((gpu.get("pcie_width_most") or 0, gpu.get("pcie_width_slot") or 0))
        unknown = "none" if "name" in gpu else "?"  # NVML refuses to speak of ECC, or of all
        yield {
            "GPU": gpu["index"],
            "name": gpu.get("name", ""),
            "PCIe": _of(now.get("pcie_generation"), gpu.get("pcie_generation_most")),
            "lanes": _of(now.get("pcie_width"), most, "x{:.0f}"),
            "ECC": {True: "on", False: "off"}.get(gpu.get("ecc"), unknown),
            "persistence": {True: "on", False: "off"}.get(gpu.get("persistence"), "?"),
            "power limit": _of(gpu.get("power_limit"), gpu.get("power_default"), unit=" W"),
            "NUMA": gpu.get("numa", ""),
        }


def _bus(report: Report) -> Rows:
    found = part_of(report, "bus")
    rates = {f"GPU {n} alone": r for n, r in enumerate(found.get("alone", []))}
    at_once = {n: r for n, r in found.get("at_once", {}).items() if n != "1"}
    rates |= {f"{n} at once, the slowest": r for n, r in at_once.items()}
    for name, ways in rates.items():
        yield {
            "": name,
            "to the GPU": _number(min(ways["in"])),
            "from it": _number(min(ways["out"])),
            "each way, both at once": _number(min(ways["both"])),
            "not pinned: to, from": ", ".join(map(_number, ways.get("pageable", []))),
        }


def _pairs(report: Report) -> Rows:
    found = part_of(report, "bus")
    staged = {(r["source"], r["reader"]): r["gb_per_s"] for r in found.get("staged", [])}
    for pair in found.get("pairs", []):
        ends = (pair["source"], pair["reader"])
        direct = pair["gb_per_s"] if pair["kind"] == "peer" else None
        together = found.get("both_ways", {}).get(",".join(map(str, sorted(ends))))
        yield {
            "": f"{ends[0]} to {ends[1]}",
            "peer access": _number(direct) or pair["reason"],
            "each way, both at once": _number(together),
            "through host memory, one half": _number(staged.get(ends)),
        }


def _exchanges(report: Report) -> Rows:
    for backend, found in report["measured"].get("exchanges", {}).items():
        for operation, points in found.get("operations", {}).items():
            for received, *seconds in points:
                alone, beside = (_number(received / each / 1e9) for each in seconds)
                yield {
                    "backend": backend,
                    "operation": operation,
                    "MiB received": f"{received / MIB:.1f}",
                    "alone": alone,
                    "beside kernels": beside,
                }


def _notes_on_exchanges(report: Report) -> list[str]:
    every = report["measured"]["exchanges"]
    slow = [
        f"{name} {found['slowdown']:.2f}" for name, found in every.items() if found.get("slowdown")
    ]
    notes = [f"Kernels take so many times as long meanwhile: {', '.join(slow)}."] if slow else []
    if any(LOAD in found.get("operations", {}) for found in every.values()):
        notes.append(
            f"{LOAD}: from host memory, alone, and by how much longer an all_to_all takes that "
            "goes through it, too."
        )
    return notes


def _load(report: Report) -> Rows:
    for record in part_of(report, "load").get("gpus", []):
        s = record["settled"]
        reasons = (f"{word} {share:.0%}" for word, share in s.get("reasons", {}).items())
        yield {
            "GPU": record["gpu"],
            "bf16 TFLOP/s": _number(s.get("tflops"), "{:.0f}"),
            "copy GB/s": _number(s.get("gb_per_s"), "{:,.0f}"),
            "W": _number(s.get("power"), "{:.0f}"),
            "°C at most": _number(s.get("hottest"), "{:.0f}"),
            "MHz": _number(s.get("clock"), "{:.0f}"),
            "held down by": ", ".join(reasons),
        }


def _ladder(report: Report) -> Rows:
    sizes: dict[str, list[str]] = {}
    for row in part_of(report, "ladder").get("rows", []):
        rate = f"{row['tflops']:.0f}" if "tflops" in row else f"{row['gb_per_s']:,.0f} GB/s"
        sizes.setdefault(row["what"], []).append(f"{row['size']}: {rate}")
    yield from ({"": k, "TFLOP/s by size": ", ".join(v)} for k, v in sizes.items())


def _steps(report: Report) -> Rows:
    for found in report["measured"].get("steps", []):
        options, idle = found["options"], found["idle"]
        late = "" if idle is None or in_time(idle) else ", left out: the host was too slow"
        yield {
            "model": options["model"],
            "micro-batch": f"{options['batch-size']} x {options['seq-len']}",
            "flags": _flags(options) + BESIDE * bool(found.get("beside")),
            "tokens/s": _number(found["tokens_per_second"], "{:,.0f}"),
            "idle": _number(idle, "{:.1%}") + late,
            "took": _number(found["seconds"], "{:.0f} s"),
        }


def _rows(report: Report) -> Rows:
    for row in report["measured"].get("rows", []):
        options, off = row["options"], row["predicted"] / row["measured"] - 1
        batch = (options.get(name, 4) for name in ("batch-size", "grad-accumulation"))
        yield {
            "model": options["model"],
            "batch": " x ".join(map(str, batch)),
            "flags": _flags(options),
            "tokens/s": f"{row['measured']:,.0f}",
            "predicted": f"{row['predicted']:,.0f}",
            "difference": f"{100 * off:+.1f} %",
            "mJ/token": _number(1000 * (row["joules_per_token"] or 0), "{:.2f}"),
        }


def _flags(options: dict[str, Any]) -> str:
    hidden = {"model", "batch-size", "grad-accumulation", "from-scratch", "seq-len", "num-layers"}
    hidden |= {"vocab-size", "watchdog", "model-dtype", "opt-m-dtype", "opt-v-dtype", "gpus"}
    shown = ((k, v) for k, v in options.items() if k not in hidden and v is not False)
    return " ".join(f"--{k}" if v is True else f"--{k}={v}" for k, v in shown)


def _time(report: Report) -> Rows:
    for name, part in report["parts"].items():
        yield {"part": name, "took": f"{part['seconds']:.0f} s", "": part["error"] or ""}


def draw(report: Report, path: Path) -> None:
    """Write it as PNG: products by size, clocks and power under load, buses, predictions."""
    from matplotlib.figure import Figure

    panels = [panel for panel, has in PANELS if has(report)] or [_draw_host]
    rows = -(-len(panels) // 2)
    figure = Figure(figsize=(11, 4 * rows), dpi=100, layout="constrained")
    for number, panel in enumerate(panels, 1):
        panel(figure.add_subplot(rows, min(len(panels), 2), number), report)
    name = report["spec"]["device"] if report["gpus"] else "No GPU"
    count = f" x {len(report['gpus'])}" if len(report["gpus"]) > 1 else ""
    figure.suptitle(f"{name}{count}, {report['date'][:10]}, llmq {report['llmq']}")
    with replacing(path) as file:
        figure.savefig(file, format="png")


def _draw_products(axes: Any, report: Report) -> None:
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


def _draw_load(name: str, title: str, unit: str) -> Callable[[Any, Report], None]:
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
    records = part_of(report, "load").get("gpus", [])
    found = [(record["gpu"], record["series"]) for record in records]
    return [(n, s) for n, s in found if 0 < len(s.get(name, [])) == len(s["seconds"])]


def _draw_bus(axes: Any, report: Report) -> None:
    at_once = report["measured"]["bus"]["at_once"]
    width = 0.25
    for place, way in enumerate(("in", "out", "both")):
        rates = [min(found[way]) for found in at_once.values()]
        positions = [n + (place - 1) * width for n in range(len(rates))]
        axes.bar(positions, rates, width, label=way)
    axes.set_xticks(range(len(at_once)), [f"{n} GPU(s)" for n in at_once])
    axes.set(title="to and from host memory, each GPU", ylabel="GB/s")
    axes.legend(fontsize="small")


def _draw_rows(axes: Any, report: Report) -> None:
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


def _draw_host(axes: Any, report: Report) -> None:
    """All that a machine without a GPU has."""
    found = part_of(report, "host")
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
    return lambda report: bool(part_of(report, part).get(name))


def _told(name: str) -> Callable[[Report], bool]:
    return lambda report: bool(_series(report, name))


PANELS: tuple[tuple[Callable[[Any, Report], None], Callable[[Report], bool]], ...] = (
    (_draw_products, _has("ladder", "rows")),
    (_draw_load("clock", "clock", "MHz"), _told("clock")),
    (_draw_load("power", "power", "W"), _told("power")),
    (_draw_load("temperature", "temperature", "°C"), _told("temperature")),
    (_draw_bus, _has("bus", "at_once")),
    (_draw_rows, lambda report: bool(report["measured"].get("rows"))),
)
