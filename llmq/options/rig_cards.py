"""Choose the measurements that stand in place of a card's data sheet: of this machine, or of a
report."""

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


def card_of_file(file: CardFile) -> Card:
    """A rig's GPU as a card whose rates are measured."""
    where = "this rig" if file.host == this_host() else f"a rig of {file.gpus}"
    return replace(card_of(file.spec()), measured=file, source=_source(file, where))


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
    """With the rates that were measured on this machine, where there are any.

    A file that is damaged, or of other GPUs than its name says, is a warning and left alone. gpus:
    where several sets of GPUs were measured, the smallest one with as many, else the largest.
    """
    found = {}
    pattern = path_of(card.driver_name, 0).name.replace("_x0_", "_x*_")
    for path in sorted(folder().glob(pattern)):
        try:
            file = read_card_file(path)
        except ConfigError as error:
            _warn_once(f"{error}: it is ignored; `llmq rig` writes it anew")
            continue
        if path_of(file.device, file.gpus, file.host) != path:
            _warn_once(f"'{path}' holds another rig ({file.gpus} {file.device}): it is ignored")
        elif abs(file.memory - card.memory * GIB) < SIBLING * file.memory:
            found[file.gpus] = file
    if not found:
        return card
    enough = [count for count in found if count >= gpus]
    file = found[min(enough) if enough else max(found)]
    return replace(card, measured=file, source=_source(file, "this rig"))


def _source(file: CardFile, where: str) -> str:
    return f"rates measured on {where} by `llmq rig`, {file.day}"


@functools.cache
def _warn_once(line: str) -> None:
    warn([line])
