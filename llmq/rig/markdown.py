"""The report of `llmq rig` for people, as Markdown and as a picture."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from llmq.base.dtypes import GIB
from llmq.base.files import replacing
from llmq.report.tables import markdown_table
from llmq.rig.exchanges import LOAD
from llmq.rig.steps import in_time

Report = dict[str, Any]
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
        table = part(report)
        if table:
            blocks.append(f"## {title}\n\n{table}")
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


def _machine(report: Report) -> str:
    host, found = report["host"], report["measured"].get("host") or {}
    disk = found.get("disk", {})
    options = " ".join(host.get("iommu_options", []))
    rows = [
        ("CPU", f"{host.get('cpu')}, {host.get('cores_allowed')} of {host.get('cores')} logical"),
        ("memory", f"{host.get('memory', 0) / GIB:.0f} GiB, {host.get('numa_nodes')} NUMA node(s)"),
        ("system", f"{host.get('system')}{', virtual' if host.get('virtual') else ''}"),
        ("IOMMU", f"{'on' if host.get('iommu') else 'off'} {options}".strip()),
        ("memory copies", _number(found.get("memory"), "{:.1f} GB/s")),
        ("products of NumPy, F32", _number(found.get("product"), "{:.0f} GFLOP/s")),
        ("disk", "{write:.2f} GB/s written, {read:.2f} read".format(**disk) if disk else ""),
    ]
    return markdown_table(("", ""), [row for row in rows if row[1]]) if host else ""


def _of(value: float | None, most: float | None, form: str = "{:.0f}", unit: str = "") -> str:
    """The value, and the best that it could be; ? for what nobody tells."""
    now, best = (_number(number or None, form) or "?" for number in (value, most))
    return "?" if now == best == "?" else f"{now} of {best}{unit}"


def _gpus(report: Report) -> str:
    loaded = {r["gpu"]: r["settled"] for r in _part(report, "load").get("gpus", [])}
    rows = []
    for gpu in report["gpus"]:
        now = gpu | loaded.get(gpu["index"], {})
        most = max((gpu.get("pcie_width_most") or 0, gpu.get("pcie_width_slot") or 0))
        unknown = "none" if "name" in gpu else "?"  # NVML refuses to speak of ECC, or of all
        rows.append(
            (
                gpu["index"],
                gpu.get("name", ""),
                _of(now.get("pcie_generation"), gpu.get("pcie_generation_most")),
                _of(now.get("pcie_width"), most, "x{:.0f}"),
                {True: "on", False: "off"}.get(gpu.get("ecc"), unknown),
                {True: "on", False: "off"}.get(gpu.get("persistence"), "?"),
                _of(gpu.get("power_limit"), gpu.get("power_default"), unit=" W"),
                gpu.get("numa", ""),
            )
        )
    head = ("GPU", "name", "PCIe", "lanes", "ECC", "persistence", "power limit", "NUMA")
    return markdown_table(head, rows)


def _bus(report: Report) -> str:
    found = _part(report, "bus")
    rows = [
        (f"GPU {n} alone", *(_number(r[way][0]) for way in ("in", "out", "both")),
         ", ".join(map(_number, r.get("pageable", []))))
        for n, r in enumerate(found.get("alone", []))
    ]  # fmt: skip
    rows += [
        (f"{n} at once, the slowest", *(_number(min(r[w])) for w in ("in", "out", "both")), "")
        for n, r in found.get("at_once", {}).items()
        if n != "1"
    ]
    head = ("", "to the GPU", "from it", "each way, both at once", "not pinned: to, from")
    return markdown_table(head, rows)


def _pairs(report: Report) -> str:
    found = _part(report, "bus")
    staged = {(r["source"], r["reader"]): r["gb_per_s"] for r in found.get("staged", [])}
    both = found.get("both_ways", {})
    rows = []
    for pair in found.get("pairs", []):
        ends = (pair["source"], pair["reader"])
        direct = pair["gb_per_s"] if pair["kind"] == "peer" else None
        together = both.get(",".join(map(str, sorted(ends))))
        rows.append(
            (
                f"{ends[0]} to {ends[1]}",
                _number(direct) or pair["reason"],
                _number(together),
                _number(staged.get(ends)),
            )
        )
    head = ("", "peer access", "each way, both at once", "through host memory, one half")
    return markdown_table(head, rows)


def _exchanges(report: Report) -> str:
    rows = []
    for backend, found in report["measured"].get("exchanges", {}).items():
        for operation, points in found.get("operations", {}).items():
            for received, alone, beside in points:
                rates = (_number(received / seconds / 1e9) for seconds in (alone, beside))
                rows.append((backend, operation, f"{received / (1 << 20):.1f}", *rates))
    head = ("backend", "operation", "MiB received", "alone", "beside kernels")
    table = markdown_table(head, rows)
    slow = [
        f"{backend} {found['slowdown']:.2f}"
        for backend, found in report["measured"].get("exchanges", {}).items()
        if found.get("slowdown")
    ]
    if slow:
        table += f"\n\nKernels take so many times as long meanwhile: {', '.join(slow)}."
    if any(operation == LOAD for _, operation, *_ in rows):
        table += (
            f"\n\n{LOAD}: from host memory, alone, and by how much longer an all_to_all takes that "
            "goes through it, too."
        )
    return table


def _load(report: Report) -> str:
    rows = []
    for record in _part(report, "load").get("gpus", []):
        s = record["settled"]
        reasons = ", ".join(f"{word} {share:.0%}" for word, share in s.get("reasons", {}).items())
        rows.append(
            (
                record["gpu"],
                _number(s.get("tflops"), "{:.0f}"),
                _number(s.get("gb_per_s"), "{:,.0f}"),
                _number(s.get("power"), "{:.0f}"),
                _number(s.get("hottest"), "{:.0f}"),
                _number(s.get("clock"), "{:.0f}"),
                reasons,
            )
        )
    head = ("GPU", "bf16 TFLOP/s", "copy GB/s", "W", "°C at most", "MHz", "held down by")
    return markdown_table(head, rows)


def _ladder(report: Report) -> str:
    rows = _part(report, "ladder").get("rows", [])
    sizes: dict[str, list[str]] = {}
    for row in rows:
        rate = f"{row['tflops']:.0f}" if "tflops" in row else f"{row['gb_per_s']:,.0f} GB/s"
        sizes.setdefault(row["what"], []).append(f"{row['size']}: {rate}")
    return markdown_table(("", "TFLOP/s by size"), ((k, ", ".join(v)) for k, v in sizes.items()))


def _steps(report: Report) -> str:
    rows = [
        (
            found["options"]["model"],
            f"{found['options']['batch-size']} x {found['options']['seq-len']}",
            _flags(found["options"]) + BESIDE * bool(found.get("beside")),
            _number(found["tokens_per_second"], "{:,.0f}"),
            _idle(found["idle"]),
            _number(found["seconds"], "{:.0f} s"),
        )
        for found in report["measured"].get("steps", [])
    ]
    return markdown_table(("model", "micro-batch", "flags", "tokens/s", "idle", "took"), rows)


def _idle(share: float | None) -> str:
    left_out = share is not None and not in_time(share)
    return _number(share, "{:.1%}") + ", left out: the host was too slow" * left_out


def _rows(report: Report) -> str:
    rows = [
        (
            row["options"]["model"],
            f"{row['options'].get('batch-size', 4)} x {row['options'].get('grad-accumulation', 4)}",
            _flags(row["options"]),
            f"{row['measured']:,.0f}",
            f"{row['predicted']:,.0f}",
            f"{100 * (row['predicted'] / row['measured'] - 1):+.1f} %",
            _number(1000 * (row["joules_per_token"] or 0), "{:.2f}"),
        )
        for row in report["measured"].get("rows", [])
    ]
    head = ("model", "batch", "flags", "tokens/s", "predicted", "difference", "mJ/token")
    return markdown_table(head, rows)


def _flags(options: dict[str, Any]) -> str:
    hidden = {"model", "batch-size", "grad-accumulation", "from-scratch", "seq-len", "num-layers"}
    hidden |= {"vocab-size", "watchdog", "model-dtype", "opt-m-dtype", "opt-v-dtype", "gpus"}
    shown = ((k, v) for k, v in options.items() if k not in hidden and v is not False)
    return " ".join(f"--{k}" if v is True else f"--{k}={v}" for k, v in shown)


def _time(report: Report) -> str:
    rows = ((k, f"{p['seconds']:.0f} s", p["error"] or "") for k, p in report["parts"].items())
    return markdown_table(("part", "took", ""), rows)


def _part(report: Report, name: str) -> dict[str, Any]:
    return report["measured"].get(name) or {}


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
    records = (report["measured"].get("load") or {}).get("gpus", [])
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
    (_draw_products, _has("ladder", "rows")),
    (_draw_load("clock", "clock", "MHz"), _told("clock")),
    (_draw_load("power", "power", "W"), _told("power")),
    (_draw_load("temperature", "temperature", "°C"), _told("temperature")),
    (_draw_bus, _has("bus", "at_once")),
    (_draw_rows, lambda report: bool(report["measured"].get("rows"))),
)
