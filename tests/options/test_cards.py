"""Known cards, and messages about those that are not known."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from llmq.base.errors import ConfigError
from llmq.options.cards import (
    _SCALED,
    _SHEETS,
    CARDS,
    GIB,
    MEASURED,
    NEAREST,
    PUBLISHED,
    card_of,
    card_with,
    find_card,
    is_data_center,
    spec_of,
)
from llmq.runtime.device import DeviceSpec
from tests.kept import kept


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
        ("5060 ti 16gb", "NVIDIA GeForce RTX 5060 Ti"),
        ("5060 ti 8gb", "NVIDIA GeForce RTX 5060 Ti 8GB"),
        ("rtx5060ti 8 GiB", "NVIDIA GeForce RTX 5060 Ti 8GB"),
        ("RTX5060Ti8GB", "NVIDIA GeForce RTX 5060 Ti 8GB"),
        ("3080 10g", "NVIDIA GeForce RTX 3080"),
        ("3080 12gb", "NVIDIA GeForce RTX 3080 12GB"),
        ("a100 40gb", "NVIDIA A100-SXM4-40GB"),
        ("l40s 48gb", "NVIDIA L40S"),
        ("4090 laptop", "NVIDIA GeForce RTX 4090 Laptop GPU"),
        ("4090 16gb", "NVIDIA GeForce RTX 4090 Laptop GPU"),
        ("3080 laptop 8gb", "NVIDIA GeForce RTX 3080 Laptop GPU 8GB"),
    ],
)
def test_cards_by_some_words(words, name):
    assert find_card(words).name == name


@pytest.mark.parametrize(
    ("words", "near"),
    [
        ("GTX 1080", {"NVIDIA GeForce RTX 3080", "NVIDIA GeForce RTX 4080"}),
        ("409", {"NVIDIA GeForce RTX 4090"}),
        ("4090 5090", {"NVIDIA GeForce RTX 4090", "NVIDIA GeForce RTX 5090"}),
        ("5060 ti 12gb", {"NVIDIA GeForce RTX 5060 Ti", "NVIDIA GeForce RTX 5060 Ti 8GB"}),
        ("4070 ti suepr", {"NVIDIA GeForce RTX 4070 Ti SUPER"}),
        ("H10", {"NVIDIA H100 PCIe"}),
    ],
)
def test_unknown_words_are_answered_with_the_nearest_cards(words, near):
    with pytest.raises(ConfigError, match=f"--card: no card is known as '{words}'; the nea") as err:
        find_card(words)
    named = re.findall(r"(NVIDIA [^,(]+) \((\d+) GB\)", str(err.value))
    assert len(named) == NEAREST and near <= {name for name, _ in named}
    for name, size in named:  # what is named, is found
        assert find_card(f"{name} {size}gb").name == name


@pytest.mark.parametrize("words", ["", " - "])
def test_no_words(words):
    with pytest.raises(ConfigError, match="--card: expected words of a card's name"):
        find_card(words)


def test_cards_of_one_name_are_told_apart_by_their_memory():
    for name, card in CARDS.items():
        spec = replace(spec_of(card), name=card.driver_name)
        assert card_of(spec) == card_of(spec_of(card)) == card, name
    small = find_card("5060 ti 8gb")
    assert small.driver_name == "NVIDIA GeForce RTX 5060 Ti" and small.source == PUBLISHED
    assert (small.memory, small.size, find_card("GH200 480GB").size) == (7.6, 8, 96)


@pytest.mark.parametrize("name", ["A10", "H20", "B300 SXM6 AC", "Tesla T4", "A30", "PG506-232"])
def test_what_serves_in_data_centres(name):
    assert is_data_center(f"NVIDIA {name}") and is_data_center(name)


def test_which_known_cards_serve_in_data_centres():
    names = {name.removeprefix("NVIDIA ") for name in CARDS if is_data_center(name)}
    geforce = {name for name in names if re.match("GeForce|RTX (?!PRO 6000 B.* Server)|GB10", name)}
    assert not geforce and len(names) == 16
    for name in ("GeForce GTX 1660", "TITAN RTX", "Quadro RTX 6000", "GB10", "", "Thor"):
        assert not is_data_center(f"NVIDIA {name}")


def test_every_card_is_sound():
    assert len(CARDS) == len(_SHEETS) + len(_SCALED)
    for name, card in CARDS.items():
        assert card.name == name
        assert 0 < card.tf32 < card.bf16 and card.fp8 in (0, pytest.approx(2 * card.bf16, rel=0.05))
        assert (card.fp8 > 0) == (card.capability >= 89)
        assert 3 < card.memory <= card.size < 1.1 * card.memory + 0.5, name
        assert 100 < card.bandwidth < 10000 and 10 < card.bus < 500
        assert all(0.3 < share < 1.3 for share in card.sustained), name
        assert 16 <= card.num_sms <= 200


def test_memory_is_what_cuda_says():
    machine = json.loads(kept("h100_bf16.json").read_text())["machine"]["gpu"]
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
