"""Choose the measurements that stand in place of a card's data sheet: of this machine, of a report,
or of a rig whose owner has shared them."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

from llmq.base.dtypes import GIB
from llmq.base.errors import ConfigError, warn
from llmq.options.card_file import CardFile, folder, path_of, read_card_file, this_host
from llmq.options.cards import Card, card_of
from llmq.runtime.device import DeviceSpec

SIBLING = 0.1  # cards of one name whose memory differs by more are different cards
# Predictions by another rig's rates: two H100 ran llm.q's steps 0 to 7 % apart
# (benchmarks/published.txt).
OTHER_RIG = 0.08
SHARED = Path(__file__).parents[1] / "cards"
"""The files that owners of rigs have shared."""


def card_of_file(file: CardFile) -> Card:
    """A rig's GPU as a card whose rates are measured."""
    return _measured(card_of(file.spec()), file, own=file.host == this_host())


def _measured(card: Card, file: CardFile, *, own: bool) -> Card:
    where = "this rig" if own else f"a rig of {file.gpus}"
    source = f"rates measured on {where} by `llmq rig`, {file.day}"
    return replace(card, measured=file, source=source, error=None if own else OTHER_RIG)


def card_from(path: Path) -> Card:
    """The card of --card-file. Raises ConfigError."""
    try:
        return card_of_file(read_card_file(path))
    except ConfigError as error:
        raise ConfigError(f"--card-file: {error}") from None


def card_here(spec: DeviceSpec, gpus: int, *, cuda: bool) -> Card:
    """The card of this machine's devices, with its own rates where they are GPUs that were
    measured."""
    card = card_of(spec)
    return rig_card(card, gpus) if cuda else card


def rig_card(card: Card, gpus: int) -> Card:
    """With the rates that were measured on this machine, else on one whose owner has shared them,
    where there are any.

    A file that is damaged, or of other GPUs than its name says, is a warning and left alone. gpus:
    where several sets of GPUs were measured, the smallest one with as many, else the largest.
    """
    own = _files(card, folder(), this_host())
    found = own or _files(card, SHARED, "*")
    if not found:
        return card
    enough = [count for count in found if count >= gpus]
    return _measured(card, found[min(enough) if enough else max(found)], own=bool(own))


def _files(card: Card, place: Path, host: str) -> dict[int, CardFile]:
    """The newest file of each number of this card's GPUs. host: of which machine, * of any."""
    pattern = path_of(card.driver_name, 0, "HOST").name.replace("_x0_HOST", f"_x*_{host}")
    found: dict[int, CardFile] = {}
    for path in sorted(place.glob(pattern)):
        try:
            file = read_card_file(path)
        except ConfigError as error:
            _warn_once(f"{error}: it is ignored; `llmq rig` writes it anew")
            continue
        if path_of(file.device, file.gpus, file.host).name != path.name:
            _warn_once(f"'{path}' holds another rig ({file.gpus} {file.device}): it is ignored")
        elif abs(file.memory - card.memory * GIB) < SIBLING * file.memory:
            found[file.gpus] = max(file, found.get(file.gpus, file), key=lambda file: file.date)
    return found


@functools.cache
def _warn_once(line: str) -> None:
    warn([line])
