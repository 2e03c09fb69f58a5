"""`--attention auto`: cuDNN, and our own backward where windows make it the faster one."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial

import pytest

from llmq.base.dtypes import BF16, F32
from llmq.model.halves.attention import directions
from llmq.ops.attention import attention, attention_backward
from llmq.options.cards import CARDS, Card, spec_of
from llmq.options.options_io import make_config
from llmq.options.presets import preset
from llmq.plan.cost import Rates
from llmq.plan.plan import Plan, make_plan
from llmq.plan.replay import replay
from llmq.ref.attention.attention import CASES
from llmq.runtime.plan_device import PlanDevice, Work
from tests.plan.test_cost import measured_attention

H100 = CARDS["NVIDIA H100 80GB HBM3"]


def test_what_is_asked_for_is_taken():
    for backend in attention.BACKENDS:
        for capability in (80, 90, 120):
            assert directions(backend, 128, 1024, 1, capability) == ((backend,), (backend,))


def test_windows_that_hide_enough():
    for head_dim, window in ((64, 700), (80, 264), (128, 264)):
        assert directions("auto", head_dim, 1024, window, 90) == (("cudnn",), ("native",))
    for head_dim, window in ((64, 701), (96, None), (128, 265), (96, 5000), (256, 1)):
        assert directions("auto", head_dim, 1024, window, 90) == (("cudnn",), ("cudnn",))


def test_whole_sequences_on_hopper():
    for head_dim, seq_len, window in ((64, 1024, None), (128, 64, None), (128, 1024, 1024)):
        assert directions("auto", head_dim, seq_len, window, 90) == (("cudnn",), ("native",))
    for head_dim, seq_len, window in ((64, 1000, None), (256, 1024, None), (128, 1024, 1023)):
        assert directions("auto", head_dim, seq_len, window, 90) == (("cudnn",), ("cudnn",))


@pytest.mark.parametrize("capability", [80, 86, 89, 100, 120])
def test_what_was_not_measured_is_timed(capability):
    both, sizes = ("cudnn", "native"), (64, 1024)
    assert directions("auto", *sizes, None, capability) == (both, both)
    assert directions("auto", *sizes, 700, capability) == (both, ("native",))


@pytest.mark.parametrize("case", ["qwen05b", "qwen15b", "qwen7b"])
def test_the_choice_is_the_faster_one_where_it_was_measured(case):
    _, T, _, _, head_dim = CASES[case]
    measured = measured_attention()
    for name, window in (("", None), (" window", T // 8)):
        for number, direction in enumerate(("forward", "backward")):
            took = {b: measured[f"{direction} {b}{name}", case] for b in attention.BACKENDS}
            if window is None and direction == "backward":
                took["native"] = measured["backward", case]  # Hopper's own
            chosen = took[directions("auto", head_dim, T, window, 90)[number][0]]
            assert chosen == min(took.values())


@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_choice_is_the_faster_one_by_prediction(head_dim):
    """Sequences and windows here were not measured."""
    for T in (1024, 2048, 4096, 8192, 32768):
        for eighths in range(1, 9):
            window, took = T * eighths // 8, {}
            for backend in attention.BACKENDS:
                dev = PlanDevice(spec_of(H100))
                qkv = dev.alloc("qkv", (8, T, 20, head_dim), BF16, "Activations")
                out = dev.alloc("out", (8, T, 16, head_dim), BF16, "Activations")
                lse = dev.alloc("lse", (8, 16, T), F32, "Activations")
                mask = attention.AttentionMask(window=window)
                own = attention_backward.chosen(dev, qkv, mask)
                options = {"mask": mask, "backend": backend, "kernel": own}
                tensors = (qkv, out, out, lse, qkv)
                run = partial(attention.backward, dev, *tensors, 16, 2, **options)
                dev.graph(("backward",), run)
                took[backend] = replay(dev.graphs[-1][1], Rates(H100)).wall
            chosen = took[directions("auto", head_dim, T, window, 90)[1][0]]
            # One share for all lengths: near it the two are about as fast.
            assert chosen <= 1.12 * min(took.values()), (T, window)


def plan_of(backend: str, card: Card = H100) -> Plan:
    """The plan of a model whose every other layer has a window."""
    model = replace(preset("tiny"), sliding_window=16, windowed_layers=(True, False) * 3)
    options = {"model": "tiny", "from-scratch": True, "device": "cuda", "seq-len": 64}
    return make_plan(make_config(options), model, spec_of(card), backend)


def launches(backend: str, card: Card = H100) -> Counter[tuple[str, str]]:
    """The launches of attention in a micro-step."""
    found = (item for item in plan_of(backend, card).micro_steps[0][0] if isinstance(item, Work))
    of_attention = (w for w in found if w.cost.part == "attention" and w.cost.flops)
    return Counter((w.file, w.entry) for w in of_attention)


def test_a_step_follows_it_layer_by_layer():
    library = [("attention/attention", f"attention_{way}") for way in ("forward", "backward")]
    ours = [("attention/attention.cu", f"attention_{way}") for way in ("forward", "backward_tiles")]
    assert launches("cudnn") == dict.fromkeys(library, 6)
    on_hopper = ("attention/attention_backward.cu", "attention_gradient")  # without a window
    assert launches("native") == {ours[0]: 6, ours[1]: 3, on_hopper: 3}
    assert launches("native", CARDS["NVIDIA GeForce RTX 4090"]) == dict.fromkeys(ours, 6)
    assert launches("auto") == {library[0]: 6, ours[1]: 3, on_hopper: 3}
    # A choice that is timed is planned as the first.
    measured_nowhere = CARDS["NVIDIA GeForce RTX 4090"]
    assert launches("auto", measured_nowhere) == {library[0]: 6, library[1]: 3, ours[1]: 3}


def test_a_choice_needs_no_more_memory_than_the_library():
    """So that plans of cards that time it are those of cards that do not."""
    for B, T, Hq, Hkv, Hd in ((32, 1024, 14, 2, 64), (4, 512, 64, 8, 128), (1, 8192, 12, 2, 128)):
        for chunks in (1, B, B * Hkv, B * Hq):
            stacks = []
            for backend in ("cudnn", ("cudnn", "native"), ("native", "cudnn")):
                dev = PlanDevice(spec_of(H100))
                qkv = dev.alloc("qkv", (B, T, Hq + 2 * Hkv, Hd), BF16, "Activations")
                out = dev.alloc("out", (B, T, Hq, Hd), BF16, "Activations")
                lse = dev.alloc("lse", (B, Hq, T), F32, "Activations")
                attention.forward(dev, out, lse, qkv, Hq, Hkv, backend=backend)
                tensors = (qkv, out, out, lse, qkv)
                attention.backward(dev, *tensors, Hq, Hkv, chunks, backend=backend)
                stacks.append(dev.sizes()["stack"])
            assert len(set(stacks)) == 1


def test_a_plan_has_the_code_of_both():
    plans = [plan_of("auto", card) for card in (H100, CARDS["NVIDIA GeForce RTX 4090"])]
    assert plans[0].usage.sizes["device"] == plans[1].usage.sizes["device"]
    library, both = ({source.entry for source in plan.sources} for plan in plans)
    assert "attention_forward" not in library and "attention_forward" in both
