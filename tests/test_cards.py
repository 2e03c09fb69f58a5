"""What is known of cards, and what is said of those that are not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llmq.base.errors import ConfigError
from llmq.config.cards import (
    _SCALED,
    _SHEETS,
    CARDS,
    GIB,
    MEASURED,
    PUBLISHED,
    card_of,
    card_with,
    find_card,
    spec_of,
)
from llmq.runtime.device import DeviceSpec

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("H100", "NVIDIA H100 80GB HBM3"),
        ("h100 pcie", "NVIDIA H100 PCIe"),
        ("4090", "NVIDIA GeForce RTX 4090"),
        ("4070", "NVIDIA GeForce RTX 4070"),
        ("4070 super", "NVIDIA GeForce RTX 4070 SUPER"),
        ("RTX 5060 Ti", "NVIDIA GeForce RTX 5060 Ti"),
        ("rtx5060ti", "NVIDIA GeForce RTX 5060 Ti"),
        ("Pro6000", "NVIDIA RTX PRO 6000 Blackwell Server Edition"),
        ("pro 6000", "NVIDIA RTX PRO 6000 Blackwell Server Edition"),
        ("6000 ada", "NVIDIA RTX 6000 Ada Generation"),
        ("A100", "NVIDIA A100-SXM4-80GB"),
        ("a100-sxm4-40gb", "NVIDIA A100-SXM4-40GB"),
        ("NVIDIA L40S", "NVIDIA L40S"),
    ],
)
def test_cards_by_some_words(words, name):
    assert find_card(words).name == name


@pytest.mark.parametrize("words", ["GTX 1080", "", "409", "4090 5090"])
def test_unknown_words(words):
    with pytest.raises(ConfigError, match=f"--card: no card is known as '{words}'; known are NVI"):
        find_card(words)


def test_every_card_is_sound():
    assert len(CARDS) == len(_SHEETS) + len(_SCALED)
    for name, card in CARDS.items():
        assert card.name == name
        assert 0 < card.tf32 < card.bf16 and card.fp8 in (0, pytest.approx(2 * card.bf16, rel=0.05))
        assert (card.fp8 > 0) == (card.capability >= 89)
        assert 4 < card.memory < 300 and 100 < card.bandwidth < 10000 and 10 < card.bus < 500
        assert all(0.3 < share < 1.3 for share in card.sustained), name
        assert 20 <= card.num_sms <= 200


def test_memory_is_what_cuda_says():
    machine = json.loads((BENCHMARKS / "h100.json").read_text())["machine"]["gpu"]
    card = CARDS[machine["name"]]
    assert card.memory * GIB == pytest.approx(machine["memory"], rel=0.002)
    assert card.num_sms == machine["sm_count"]
    assert card.capability == 10 * machine["major"] + machine["minor"]


def test_sources_are_told():
    assert find_card("H100").source == MEASURED
    assert find_card("4090").source == PUBLISHED
    assert find_card("GH200").source.endswith("reach as much as H100 80GB HBM3")
    assert find_card("GH200").sustained == find_card("H100").sustained
    assert find_card("3090").source.endswith("reach as much as GeForce RTX 4090")


def test_a_card_as_a_device():
    h100, old = spec_of(find_card("H100")), spec_of(find_card("4090"))
    assert (h100.capability, h100.num_sms, h100.library_workspace) == (90, 132, 32 << 20)
    assert old.library_workspace == 4 << 20
    assert card_of(h100) == find_card("H100")


def test_a_card_that_is_not_known():
    spec = DeviceSpec(
        name="NVIDIA GeForce RTX 4065", capability=89, num_sms=30, memory=9 * GIB,
        library_workspace=0,
    )  # fmt: skip
    card, near = card_of(spec), find_card("4060 ti")
    assert (card.name, card.num_sms, card.memory) == ("NVIDIA GeForce RTX 4065", 30, 9)
    assert card.bf16 == pytest.approx(near.bf16 * 30 / 34)
    assert card.source == "not known, taken as NVIDIA GeForce RTX 4060 Ti with 30 multiprocessors"


def test_a_card_by_its_memory():
    names = {16: "NVIDIA GeForce RTX 5060 Ti", 24: "NVIDIA GeForce RTX 4090", 48: "NVIDIA L40S"}
    assert {size: card_with(size * GIB).name for size in names} == names
