"""`llmq plan`: memory and speed of a run before it starts."""

from pathlib import Path
from typing import Any

from llmq.base.errors import ConfigError
from llmq.commands.common import (
    ConfigFile,
    Json,
    Reserve,
    SaveConfig,
    load_run,
    option,
    save_config,
    size_of,
    starting_with,
    train_options,
)
from llmq.options.presets import PRESETS


def _card_names() -> list[str]:
    from llmq.options.cards import CARDS  # here: --help does not wait for it

    words = (name.split("RTX ")[-1].removeprefix("NVIDIA ").split() for name in CARDS)
    return sorted({first for first, *_ in words})  # a shell would divide what has blanks


CardName = option(
    str | None,
    "Card to plan for, such as 4090 or '5060 ti 8gb': predicts the speed.",
    metavar="NAME",
    autocompletion=starting_with(_card_names),
)
CardFile = option(
    Path | None,
    "Plan for the rig of this rig.json (llmq rig), with the rates measured there.",
    metavar="FILE",
)
Search = option(
    bool,
    "Search micro-batch, recomputation, offloading and sharding, beside adapters also "
    "--base-dtype, for what fits and is fastest; what is given stays, micro-batch times "
    "accumulation too.",
    "--fit",
)
Largest = option(
    bool,
    "Search, as --fit, for the preset with most parameters that fits; without --host-memory for "
    "one that fits on the card alone.",
    "--largest",
)


@train_options
def plan(
    given: dict[str, Any],
    config_file: ConfigFile = None,
    save: SaveConfig = None,
    gpu_memory: option(
        str | None, "Memory of one GPU to compare with, such as 16GiB.", metavar="SIZE"
    ) = None,
    host_memory: option(
        str | None, "Host memory of a machine to compare with.", metavar="SIZE"
    ) = None,
    card: CardName = None,
    card_file: CardFile = None,
    reserve: Reserve = None,
    machines: option(int, "Machines with --gpus GPUs each.", min=1) = 1,
    network: option(
        str | None,
        "Bytes per second that a machine sends, and receives at once, such as 25GB/s.",
        metavar="SIZE",
    ) = None,
    fit: Search = False,
    largest: Largest = False,
    placement: option(
        bool,
        "Show where weights, gradients and moments are, in which format, and what is "
        "divided among GPUs.",
        "--placement",
    ) = False,
    json: Json = False,
) -> None:
    """Show the memory, the FLOPs and the time that `llmq train` with these options would need."""
    any_model = {"model": next(iter(PRESETS)), "from_scratch": True} if largest else None
    config, model, _, fields = load_run(given, config_file, plans=True, defaults=any_model)
    from llmq.plan.target import MachineOptions

    asked = MachineOptions(
        gpu_memory=size_of("--gpu-memory", gpu_memory),
        host_memory=size_of("--host-memory", host_memory),
        card=card,
        card_file=card_file,
        reserve=size_of("--reserve", reserve, least=0),
        machines=machines,
        network=size_of("--network", network and network.removesuffix("/s")),
    )
    if largest:
        from llmq.plan.largest import run_largest

        if placement:
            raise ConfigError("--placement: has no meaning with --largest")
        save_config(save, run_largest(config, fields, asked, json=json))
        return
    from llmq.plan.report import run_plan

    how = {"fit": fields if fit else None, "placement": placement, "json": json}
    save_config(save, run_plan(config, model, asked, **how))
