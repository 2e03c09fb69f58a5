"""Card files: what plans make of them, and of those that are damaged or of other machines."""

from __future__ import annotations

import json
import math
import re
from functools import partial

import pytest

from llmq.base.dtypes import BF16, E4M3, F32, I32
from llmq.base.errors import ConfigError, warn_once
from llmq.base.operand import Fp8Out
from llmq.base.tensor import Accumulator
from llmq.bench.child import Job
from llmq.commands.cli import _run
from llmq.ops.attention import attention
from llmq.ops.product import matmul, matmul_fused
from llmq.options import cards
from llmq.options.card_file import path_of, read_card_file, record_of, write_card_file
from llmq.options.cards import card_of_file, find_card, rig_card, spec_of
from llmq.options.options_io import make_config
from llmq.options.presets import preset
from llmq.plan.cost import Rates, exposed_seconds, step_time
from llmq.plan.estimate import Planner
from llmq.plan.measured import EXPOSED, Measured, More, half_wave
from llmq.plan.plan import make_plan
from llmq.plan.replay import replay
from llmq.plan.target import MachineOptions, target
from llmq.rig import steps
from llmq.runtime.cost import MOVES, Kind
from llmq.runtime.device import Event
from llmq.runtime.machine import choose_machine
from llmq.runtime.plan_device import Mark, PlanDevice, Work
from tests.rigs import H100, card_file

CARD = find_card("h100")


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("LLMQ_CACHE_DIR", str(tmp_path))
    warn_once.cache_clear()
    return tmp_path / "cards"


@pytest.fixture
def warnings(monkeypatch):
    lines = []
    monkeypatch.setattr("llmq.base.errors.warn", lambda *told: lines.extend(told))
    return lines


# -- files ---------------------------------------------------------------------------------------


def test_what_is_written_is_read():
    file = card_file()
    path = write_card_file(file)
    assert path == path_of(H100, 2) and path.name.startswith("H100-80GB-HBM3_x2_")
    again = read_card_file(path)
    assert record_of(again) == record_of(file)
    card = rig_card(CARD, 1)
    assert record_of(card.measured) == record_of(file)
    assert card.source.endswith("by `llmq rig`, 2026-11-22")
    assert card_of_file(again).name == H100 and card_of_file(again).source.startswith("rates meas")
    assert rig_card(find_card("4090"), 1).measured is None


def test_the_smallest_measured_set_of_gpus_that_is_enough():
    for gpus in (1, 4):
        write_card_file(card_file(gpus=gpus))
    assert [rig_card(CARD, n).measured.gpus for n in (1, 2, 4, 8)] == [1, 4, 4, 4]


DAMAGES = {
    "is cut off": lambda text: text[:200],
    "has other digits": lambda text: text.replace("0.0015", "0.0025"),
    "is of a later format": lambda text: text.replace('"format": 1', '"format": 99'),
    "is empty": lambda text: "",
    "is something else": lambda text: "[1, 2]",
    "is nested for ever": lambda text: "[" * 100_000,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_file_is_one_warning_and_is_left_alone(damage, warnings, capsys):
    path = write_card_file(card_file())
    path.write_text(damage(path.read_text()))
    assert rig_card(CARD, 1) is CARD and rig_card(CARD, 2) is CARD
    (line,) = warnings
    assert str(path) in line and "it is ignored" in line
    args = ["plan", "--model", "tiny", "--from-scratch", "--card-file", str(path)]
    assert _run(args) == 2
    assert capsys.readouterr().err.startswith("error: --card-file: ")


@pytest.mark.parametrize(
    "changes",
    [
        {"slowest": -1.0},
        {"slowest": float("nan")},
        {"memory": 0},
        {"launches": {"copy/": []}},
        {"launches": {"copy/": [[[1], 1.0], [[1, 2], 1.0]]}},
        {"bus": {"1": [1.0, 2.0]}},
        {"bus": {"one": [1.0, 2.0, 3.0]}},
        {"beside": {"1": {"nccl": True}}},
        {"driver": None},
    ],
    ids=str,
)
def test_rates_that_are_none_are_refused(changes):
    path = path_of(H100, 2)
    path.parent.mkdir()
    path.write_text(json.dumps(record_of(card_file(**changes))))
    with pytest.raises(ConfigError, match="no card file of llmq rig, or damaged"):
        read_card_file(path)


def test_a_file_of_another_rig_is_one_warning(warnings):
    path = write_card_file(card_file())
    path.write_text(json.dumps(record_of(card_file(gpus=4))))
    assert rig_card(CARD, 1).measured is None
    assert len(warnings) == 1 and "holds another rig (4 NVIDIA H100" in warnings[0]


def test_another_machine_that_shares_the_folder_is_not_asked(warnings):
    write_card_file(card_file(host="another"))
    assert rig_card(CARD, 1) is CARD and not warnings


# -- files that were shared ----------------------------------------------------------------------

SHARED_FILES = sorted(cards.SHARED.glob("*.json"))


@pytest.mark.parametrize("path", SHARED_FILES, ids=lambda path: path.stem)
def test_a_shared_file_is_whole_and_of_use(path):
    """`llmq/cards/README.md` asks for this."""
    file = read_card_file(path)
    assert path_of(file.device, file.gpus, file.host).name == path.name
    assert path.stat().st_size < 1 << 20
    known = Measured(file)
    dev = PlanDevice(file.spec())
    config = make_config({"model": "Qwen2.5-0.5B", "from-scratch": True, "device": "cuda"})
    plan = make_plan(config, preset(config.model), dev.spec, "cudnn")
    works = [w for trace, _ in plan.micro_steps for w in trace if isinstance(w, Work)]
    kinds = {work.kind for work in works if work.cost.part != "attention"}
    assert all(known.nearest(kind) for kind in kinds if kind.is_product)
    assert known.bandwidth and len(file.launches) > 50


def test_there_is_a_shared_file_and_plans_take_it(capsys):
    assert SHARED_FILES
    card = rig_card(find_card("h200"), 1)
    assert card.source == "rates measured on a rig of 1 by `llmq rig`, 2026-11-23"
    assert (card.error, card.plus_minus(1), card.plus_minus(2)) == (0.08, " ± 8 %", " ± 11 %")
    assert _run(["plan", *RUN, "--card", "h200"]) == 0
    out = capsys.readouterr().out
    assert " tokens/s ± 8 %, a step in " in out and card.source in out
    said = re.search(r"([\d,]+) tokens/s.*\n.* ([\d,.]+) tokens/J, at 700 W\n", out).groups()
    speed, energy = (float(number.replace(",", "")) for number in said)
    assert energy == pytest.approx(speed / 700, rel=0.01)
    assert _run(["plan", *RUN, "--card", "4090"]) == 0
    assert " tokens/s ± 11 %, a step in " in capsys.readouterr().out


def test_this_machines_own_file_comes_before_a_shared_one(monkeypatch, tmp_path, warnings):
    shared = tmp_path / "shared"
    shared.mkdir()
    monkeypatch.setattr(cards, "SHARED", shared)
    for day in ("2026-11-20", "2026-11-21"):  # of two machines; the newest counts
        file = card_file(gpus=1, host=f"host{day[-2:]}", date=f"{day} 12:00 UTC")
        text = json.dumps(record_of(file))
        (shared / path_of(H100, 1, file.host).name).write_text(text)
    (shared / path_of(H100, 2, "else").name).write_text(text)  # not what its name says
    card = rig_card(CARD, 1)
    assert card.measured.day == "2026-11-21" and card.error == cards.OTHER_RIG
    assert len(warnings) == 1 and "holds another rig" in warnings[0]
    write_card_file(card_file())
    card = rig_card(CARD, 1)
    assert card.measured.gpus == 2 and card.plus_minus(1) == ""
    assert rig_card(find_card("4090"), 1).measured is None


# -- predictions ---------------------------------------------------------------------------------


def traced(call):
    """The only launch of a call on a plan device."""
    dev = PlanDevice(spec_of(CARD))

    def alloc(name, shape, dtype=BF16):
        return dev.alloc(name, shape, dtype, "Activations")

    dev.graph(("call",), call(dev, alloc))
    return [item for item in dev.graphs[-1][1] if not isinstance(item, Mark)][-1]


def product(M, N, K):
    """dX = dY @ W^T in the layout that the made-up file has."""

    def call(dev, alloc):
        out, a, b = alloc("out", (M, N)), alloc("a", (M, K)), alloc("b", (K, N))
        return lambda: matmul.matmul(dev, out, a, b, trans_b=False)

    return traced(call)


def moved(nbytes, stream="main", **carried):
    return Work(stream, "", "", "copy", Kind.moving("copy", nbytes), MOVES, nbytes, **carried)


def unknown(nbytes):
    """A launch of a kernel that no card file has."""
    return Work("main", "", "x.cu", "x", Kind.moving("x", nbytes), MOVES, nbytes)


FILE = card_file(
    launches={
        "matmul/bf16/0/0/0/bf16": [[[32768, 1024, 1024], 1e-4], [[32768, 4096, 4096], 1.6e-3]],
        "copy/": [[[1 << 20], 4e-6], [[1 << 30], 4e-4]],
        "swiglu_forward/bf16,bf16,-": [[[1 << 28], 1e-4]],
    }
)


def test_products_take_what_was_measured_and_between_sizes_their_rate():
    rates = Rates(card_of_file(FILE))
    assert rates.compute(product(32768, 1024, 1024)) == 1e-4
    assert rates.compute(product(32768, 4096, 4096)) == 1.6e-3

    def flops(M, N, K):  # with the half of the last wave that is idle
        return 2 * M * N * K + 128 * 256 * min(K, 2048) * 132

    per_flop = (1e-4 / flops(32768, 1024, 1024), 1.6e-3 / flops(32768, 4096, 4096))
    between = (32768, 2048, 2048)  # where both are as far
    assert rates.compute(product(*between)) == pytest.approx(flops(*between) * sum(per_flop) / 2)
    # Nearer to one is more like it.
    near = (32768, 1536, 1024)
    assert rates.compute(product(*near)) == pytest.approx(flops(*near) * per_flop[0], rel=0.02)


def test_a_product_with_adapters_is_like_one_without():
    def call(dev, alloc):
        out, a = alloc("out", (32768, 1024)), alloc("a", (32768, 4096))
        b, h, tail = alloc("b", (4096, 1024)), alloc("h", (32768, 8)), alloc("tail", (8, 1024))
        return lambda: matmul_fused.adapted(dev, out, a, b, h, tail, transposed=True)

    work, other = traced(call), product(32768, 1024, 4096)
    assert work.kind.name == "matmul/bf16/0/0/0/bf16/adapted"
    rates = Rates(card_of_file(FILE))
    assert rates.compute(other) < rates.compute(work) < 1.01 * rates.compute(other)


@pytest.mark.parametrize("fast", [False, True], ids=["exact", "fast"])
def test_a_gradient_that_is_added_is_like_its_product(fast):
    """The gradient that it is added to is read while it is computed."""
    M, N, K = 2048, 1024, 32768

    def call(added, dev, alloc):
        d, one, scalars = alloc("d", (M, N)), alloc("one", (1,), F32), alloc("s", (16,), I32)
        operands = *(alloc("x", (rows, K), E4M3) for rows in (M, N)), one, one
        target, function = d, matmul.matmul_fp8
        if added:
            target, function = Accumulator(d, True, scalars, 1), matmul_fused.gradient
        return lambda: function(dev, target, *operands, fast_accumulation=fast)

    work, other = (traced(partial(call, added)) for added in (True, False))
    assert work.kind.name == f"{other.kind.name}/gradient"
    assert work.kind.sizes == other.kind.sizes == (M, N, K)
    for rates in (Rates(CARD), Rates(card_of_file(FILE))):
        assert rates.compute(work) == pytest.approx(rates.compute(other), rel=1e-6)


def test_a_product_with_the_activation_takes_what_it_moves_besides():
    def call(again, dev, alloc):
        a, b, up = alloc("a", (32768, 4096)), alloc("b", (4096, 1024)), alloc("up", (32768, 2048))
        out = alloc("out", (32768, 1024)) if again else None
        return lambda: matmul_fused.swiglu_backward(dev, up, a, b, up, out=out)

    work, more = (traced(partial(call, again)) for again in (False, True))
    other = product(32768, 1024, 4096)
    assert work.kind.name == "matmul/bf16/0/0/0/bf16/swiglu_backward/bf16,bf16,-,-,-,-,-,-"
    assert work.kind.sizes == (32768, 1024, 4096)
    rates, bandwidth = Rates(card_of_file(FILE)), Measured(FILE).bandwidth
    besides = 6 * 32768 * 1024  # up, gate, their gradients, but not that of the activation
    alone = rates.compute(other)
    assert rates.compute(work) == pytest.approx(alone + EXPOSED * besides / bandwidth)
    itself = {work.kind.name: [[[32768, 1024, 4096], 1.1e-4]]}
    rates = Rates(card_of_file(card_file(launches=FILE.launches | itself)))
    assert rates.compute(work) == 1.1e-4
    assert rates.compute(other) == alone  # and not what the activation takes besides
    besides = 8 * 32768 * 1024  # nor what is like it, but writes the activation once more
    assert rates.compute(more) == pytest.approx(alone + EXPOSED * besides / bandwidth)


def test_what_a_product_does_besides_is_by_its_result():
    """Further work of a fused product takes time by the size of its result, not by K."""

    def call(depth, dev, alloc):
        a, b, up = alloc("a", (32768, depth)), alloc("b", (depth, 1024)), alloc("up", (32768, 2048))
        return lambda: matmul_fused.swiglu_backward(dev, up, a, b, up)

    deep, deeper = (traced(partial(call, depth)) for depth in (4096, 8192))
    besides = EXPOSED * 6 * 32768 * 1024 / Measured(FILE).bandwidth
    itself = {deep.kind.name: [[[32768, 1024, 4096], 1e-3 + besides]]}
    file = card_file(launches=FILE.launches | itself)
    wave = half_wave(8192, file.num_sms)  # of both: longer sums are split
    expected = 1e-3 * (deeper.cost.flops + wave) / (deep.cost.flops + wave) + besides
    assert Rates(card_of_file(file)).compute(deeper) == pytest.approx(expected)


def test_a_product_with_the_activation_lies_between_depths():
    """Times per element of the result are interpolated between the nearest measured depths."""
    words = "matmul/bf16/0/1/0/bf16/swiglu/bf16,bf16,-"
    points = [[[4096, 1024, 512], 4e-4], [[8192, 2048, 512], 8e-4], [[4096, 2048, 1536], 2e-3]]
    known = Measured(card_file(launches=FILE.launches | {words: points}))

    def seconds(depth):
        return known.seconds(Kind(words, (8192, 4096, depth)), 2 * 8192 * 4096 * depth, 1 << 20)

    assert seconds(512) == pytest.approx(2 * 8e-4)
    assert seconds(1024) == pytest.approx((2 * 8e-4 + 4 * 2e-3) / 2)
    assert seconds(1536) == pytest.approx(4 * 2e-3)
    assert seconds(2048) != pytest.approx(4 * 2e-3 + 6.4e-3 / 2)  # deeper than all: by the rate


def test_a_product_with_its_activation():
    """Only the activation's codes are written besides what the library writes."""

    def call(dev, alloc):
        a, b = alloc("a", (32768, 1024), E4M3), alloc("b", (2048, 1024), E4M3)
        one = alloc("scale", (1,), F32)
        up = alloc("up", (32768, 2048), BF16)
        both = alloc("q", (32768, 1024), E4M3), alloc("q_t", (1024, 32768), E4M3)
        fp8 = Fp8Out(*both, one, alloc("saturated", (1,), I32))
        return lambda: matmul_fused.swiglu(dev, up, None, a, b, scale_a=one, scale_b=one, fp8=fp8)

    work = traced(call)
    kind = work.kind
    assert kind.name.startswith("matmul_fp8/1/e4m3/0/bf16/swiglu/bf16,-,-,e4m3,e4m3,")
    assert kind.sizes == (32768, 2048, 1024)
    more = More.of(work.cost, work.device_bytes)
    assert more.transposes and 0 <= more.nbytes - 2 * 32768 * 1024 < 100  # scales


def test_kernels_are_on_lines_between_sizes():
    rates = Rates(card_of_file(FILE))
    assert rates.compute(moved(1 << 20)) == 4e-6
    middle = ((1 << 20) + (1 << 30)) // 2
    assert rates.compute(moved(middle)) == pytest.approx((4e-6 + 4e-4) / 2, rel=1e-6)
    assert rates.compute(moved(1 << 31)) == pytest.approx(8e-4)
    assert rates.compute(moved(0)) == 4e-6  # the least that was measured
    # A launch that was not measured is like one that was: here the middle one of two rates of large
    # launches.
    other = unknown(1 << 28)
    rate = ((1 << 30) / 4e-4 + (1 << 28) / 1e-4) / 2
    assert rates.compute(other) == pytest.approx(4e-6 + (1 << 28) / rate)


def test_what_has_no_like_is_left_to_the_data_sheet():
    file = card_file(launches={"copy/": [[[64], 4e-6]]})
    sheet, rig = Rates(CARD), Rates(card_of_file(file))
    for work in (product(64, 64, 64), unknown(1 << 28)):
        assert rig.compute(work) == sheet.compute(work)


def attended(seq_len, dtype=BF16, window=None):
    def call(dev, alloc):
        qkv, out = (
            alloc("qkv", (16, seq_len, 18, 64), dtype),
            alloc("out", (16, seq_len, 14, 64), dtype),
        )
        lse = alloc("lse", (16, 14, seq_len), F32)
        mask, backend = (
            attention.AttentionMask(window=window),
            "cudnn" if dtype == BF16 else "native",
        )
        return lambda: attention.forward(dev, out, lse, qkv, 14, 2, mask, backend=backend)

    return traced(call)


def test_attention_is_the_models_times_what_was_measured():
    work = attended(1024)
    sheet = Rates(CARD)
    kind = work.kind
    twice = 2 * sheet._attention(work.cost)
    file = card_file(launches={kind.name: [[list(kind.sizes), twice]]})
    rig = Rates(card_of_file(file))
    assert rig.compute(work) == pytest.approx(twice)
    for other in (attended(4096), attended(1024, window=128)):
        assert rig.compute(other) == pytest.approx(2 * sheet._attention(other.cost))
    assert rig.compute(attended(64, F32)) == sheet.compute(attended(64, F32))
    # More heads are more of the same; another head size is another kernel, however near.
    flops, seq_len, head_dim, window = kind.sizes
    points = [[[8 * flops, seq_len, head_dim, window], 8 * twice]]
    points += [[[flops, seq_len, 2 * head_dim, window], 3 * twice]]
    rig = Rates(card_of_file(card_file(launches={kind.name: points})))
    assert rig.compute(work) == pytest.approx(twice)


def test_the_rigs_own_bus_and_what_gpus_share():
    load = moved(0, "copy", loaded=10**9)
    both = [load, moved(0, "store", stored=10**9)]
    for gpus, (into, out, each) in (("1", FILE.bus["1"]), ("2", FILE.bus["2"])):
        rates = Rates(card_of_file(FILE), int(gpus))
        assert replay([load], rates).wall == pytest.approx(1 / into)
        assert replay([moved(0, "store", stored=10**9)], rates).wall == pytest.approx(1 / out)
        assert replay(both, rates).wall == pytest.approx(1 / each)
    # More of them than there are: of what they share only the sheet is known.
    assert replay([load], Rates(card_of_file(FILE), 4)).wall == replay([load], Rates(CARD, 4)).wall


def exchanged(received):
    return Work(
        *("comm", "", "", "all_gather", Kind.moving("all_gather", 0), MOVES, 0),
        received=received,
        sent=received,
    )


def test_exchanges_take_what_was_measured():
    card = card_of_file(FILE)
    nccl = Rates(card, 2, nccl=True)
    assert replay([exchanged(1 << 28)], nccl).wall == pytest.approx(2e-3)
    assert replay([exchanged(1 << 29)], nccl).wall == pytest.approx(4e-3)
    assert replay([exchanged(1 << 10)], nccl).wall == pytest.approx(2e-5)
    without = Rates(card, 2, nccl=True, peer_access=False)
    assert replay([exchanged(1 << 28)], without).wall == pytest.approx(2e-2)
    # Beside the bus, but not through the host.
    load = moved(0, "copy", loaded=10**7)
    assert replay([exchanged(1 << 28), load], nccl).wall == pytest.approx(2e-3)
    assert replay([exchanged(1 << 28), load], without).wall > 2e-2 + 1e-4
    # Nothing was measured of copies.
    sheet = Rates(CARD, 2)
    assert (
        replay([exchanged(1 << 28)], Rates(card, 2)).wall
        == replay([exchanged(1 << 28)], sheet).wall
    )


def test_a_load_beside_an_exchange_through_the_host_takes_what_it_adds_to_that():
    staged = {"all_gather": [[[1 << 24], 2e-3], [[1 << 28], 2e-2]]}
    into, _, each = FILE.bus["2"]
    load, alone = moved(0, "copy", loaded=10**8), 0.1 / into
    event = Event()
    after = [Mark("comm", event, False), Mark("copy", event, True), load]

    def wall(trace, **operations):
        file = card_file(exchange={"2": {"staged": staged | operations}})
        return replay(trace, Rates(card_of_file(file), 2, peer_access=False)).wall

    assert wall([exchanged(1 << 28)]) == pytest.approx(2e-2)
    # Not measured: as beside copies the other way, which the exchange has; in either order.
    for both in ([exchanged(1 << 28), load], [load, exchanged(1 << 28)]):
        assert wall(both) == pytest.approx(2e-2 + 0.1 / each)
    assert wall([exchanged(1 << 28), *after]) == pytest.approx(2e-2 + alone)
    # No longer than the exchange does.
    for both in ([exchanged(1 << 24), load], [load, exchanged(1 << 24)]):
        assert wall(both) == pytest.approx(2e-3 + alone + 2e-3 * (1 - each / into))
    for added in (2 * alone, alone / 2):
        measured = {"load": [[[10**8], added]]}
        assert wall([exchanged(1 << 28), load], **measured) == pytest.approx(2e-2 + added)
        assert wall([exchanged(1 << 28), *after], **measured) == pytest.approx(2e-2 + alone)


@pytest.mark.parametrize("missing", ["bus", "exchange"])
def test_a_load_beside_an_exchange_of_the_data_sheet_takes_what_it_takes(missing):
    """The sheet's share of the bus is of runs that load beside exchanges."""
    staged = {"all_gather": [[[1 << 24], 2e-3]], "load": [[[10**8], 1e-2]]}
    measured = {"bus": FILE.bus, "exchange": {"2": {"staged": staged}}}
    file = card_file(**measured | {missing: {}})
    rates = Rates(card_of_file(file), 2, peer_access=False)
    exchange, load = exchanged(1 << 28), moved(0, "copy", loaded=10**8)
    alone = max(rates.transfers(load).carriers.values())
    assert rates.beside_exchanges == (1.0, 1.0)
    assert replay([exchange, load], rates).wall == (
        pytest.approx(replay([exchange], rates).wall + alone)
    )


def test_kernels_beside_exchanges_take_longer_and_gpus_wait_for_the_slowest():
    card = card_of_file(FILE)
    rates, kernel = Rates(card, 2, nccl=True), moved(1 << 30)
    one = 4e-4 / 0.9
    assert replay([kernel], rates).wall == pytest.approx(one)
    assert replay([kernel], Rates(card, 1)).wall == pytest.approx(4e-4)
    beside = replay([exchanged(1 << 28), kernel], rates)
    assert beside.busy["memory_bound"] == pytest.approx(1.1 * one)
    short = replay([exchanged(1 << 20), kernel], rates)
    assert short.busy["memory_bound"] == pytest.approx(one + 0.1 * 2e-5)


def test_a_step_of_measured_launches_is_their_sum(device):
    """The launches of a run on the CPU are found again, by name and size, in the plan of the
    run."""
    options = {"model": "tiny", "from-scratch": True, "seq-len": 32, "device": device, "gpus": 1}
    options |= {"model-dtype": "bf16", "batch-size": 2, "grad-accumulation": 2, "num-layers": 2}
    options |= {"attention": "native"}
    notes = []
    steps.measure(Job(0.0, notes.append), runs=[options], settle=0.0)
    launches = notes[-1]["steps"][0]["launches"]
    file = card_file(launches=launches)
    config = make_config(options)
    model = preset("tiny").with_layers((0, 1))
    spec = choose_machine(device, 1).spec
    plan = make_plan(config, model, spec, "native")
    works = [w for trace, _ in plan.micro_steps for w in trace if not isinstance(w, Mark)]
    kinds = {work.kind for work in works + [w for w in plan.update if isinstance(w, Work)]}
    known = {(name, tuple(sizes)) for name, points in launches.items() for sizes, _ in points}
    # On a GPU, what takes less time than its events take is left out.
    least = 0 if device == "cpu" else 1 << 20
    missing = {tuple(kind) for kind in kinds if math.prod(kind.sizes) > least} - known
    assert not missing
    times = {(n, tuple(s)): t for n, points in launches.items() for s, t in points}
    rates = Rates(card_of_file(file))
    for work in works:
        kind = work.kind
        if work.cost.part != "attention" and (kind.name, kind.sizes) in times:
            assert rates.compute(work) == pytest.approx(times[kind.name, kind.sizes])


# -- plan and --fit ------------------------------------------------------------------------------

RUN = ["--model", "Qwen2.5-0.5B", "--from-scratch", "--batch-size", "8"]


def test_plan_says_whose_rates_it_takes(capsys, tmp_path):
    assert _run(["plan", *RUN, "--card", "h100"]) == 0
    assert "Card's speed:    measured on this card" in capsys.readouterr().out
    path = write_card_file(card_file())
    assert _run(["plan", *RUN, "--card", "h100"]) == 0
    here = capsys.readouterr().out
    assert "rates measured on this rig by `llmq rig`, 2026-11-22" in here
    report = tmp_path / "rig.json"
    report.write_text(json.dumps({"card_file": json.loads(path.read_text())}))
    path.unlink()
    assert _run(["plan", *RUN, "--card-file", str(report)]) == 0
    assert capsys.readouterr().out == here
    assert _run(["plan", *RUN, "--card-file", str(report), "--card", "4090"]) == 2
    assert "is of NVIDIA H100 80GB HBM3, and --card means" in capsys.readouterr().err
    for args in (["--device", "cpu", "--card-file", str(report)], ["--card-file", "none.json"]):
        assert _run(["plan", *RUN, *args]) == 2
        assert "--card-file" in capsys.readouterr().err
    report.write_text(json.dumps({"gpus": []}))  # of a machine without a GPU
    assert _run(["plan", *RUN, "--card-file", str(report)]) == 2
    assert "it has no measurements of GPUs" in capsys.readouterr().err


def test_more_gpus_than_were_measured_is_a_warning(monkeypatch, tmp_path):
    lines = []
    monkeypatch.setattr("llmq.plan.target.warn", lines.append)
    path = tmp_path / "rig.json"
    path.write_text(json.dumps(record_of(card_file())))
    config = make_config({"model": "tiny", "gpus": 4})
    where = target(config, preset("tiny"), MachineOptions(card_file=path), search=False)
    assert where.card.measured.gpus == 2 and where.spec.memory == 84_929_347_584
    assert len(lines) == 1 and "is of 2 GPUs: for 4 of them" in lines[0]


def test_a_search_takes_them(tmp_path, capsys):
    """If products are slow and the bus is fast, what does not fit is sent to the host."""
    speeds = []
    for seconds in (1e-3, 2e-3):
        launches = {"matmul/bf16/0/0/0/bf16": [[[32768, 1024, 1024], seconds]]}
        path = tmp_path / f"{seconds}.json"
        path.write_text(json.dumps(record_of(card_file(launches=launches))))
        args = ["--fit", "--json", "--gpu-memory", "24GiB", "--card-file", str(path)]
        assert _run(["plan", *RUN, "--grad-accumulation", "1", *args]) == 0
        found = json.loads(capsys.readouterr().out)
        assert "rates measured" in found["source"]
        speeds.append(found["found"][0]["predicted"]["tokens_per_second"])
    assert 1.5 < speeds[0] / speeds[1] < 2


def test_exposed_communication_by_measured_links():
    card = card_of_file(card_file(launches={"copy/": [[[1 << 30], 4e-4]]}))
    planner = Planner(preset("Qwen2.5-0.5B"), spec_of(CARD), "cudnn", card, 2)
    plan = planner.plan(make_config({"gpus": 2, "zero_level": 3, "batch_size": 1}))
    assert 0 < exposed_seconds(plan, card) < step_time(plan, card).total


def test_a_run_on_this_machine_is_planned_with_them(monkeypatch):
    """Advice and --auto ask for the machine's own rates."""
    from llmq.plan import checks
    from llmq.runtime.machine import Machine

    write_card_file(card_file())
    asked = []
    monkeypatch.setattr(checks, "Planner", lambda *args, **rest: asked.append(args[3]) or 1 / 0)
    monkeypatch.setattr(checks, "attention_backend", lambda *args: "cudnn")
    machine = Machine(kind="cuda", spec=spec_of(CARD), note=None)
    with pytest.raises(ZeroDivisionError):
        checks.plan_run(make_config({"model": "tiny"}), preset("tiny"), machine)
    assert asked[0].measured.gpus == 2
