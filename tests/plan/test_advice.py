"""Messages on a run that does not fit say what takes most, and what makes it fit."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from functools import cache

import pytest

from llmq.arch.model_config import ModelConfig
from llmq.base.dtypes import MIB
from llmq.options.cards import card_of, find_card, spec_of
from llmq.options.options import TrainConfig
from llmq.options.options_io import make_config
from llmq.options.presets import preset
from llmq.plan.advice import CAREFUL, check_fits, savings
from llmq.plan.estimate import Planner
from llmq.plan.memory import Limits, OutOfMemory, memory_limit, needed_bytes
from llmq.plan.plan import make_plan
from llmq.plan.shrink import Shrinker, savers
from llmq.runtime.device import HOST_SPEC, DeviceSpec
from llmq.runtime.machine import choose_machine
from tests.models import hf_model, trainer_for
from tests.published import rows

GIB = 1 << 30
CARD = find_card("4090")
SPEC = spec_of(CARD)
FULL = {"device": "cpu", "from-scratch": True, "model": "Qwen2.5-0.5B", "batch-size": 4}
FULL |= {"grad-accumulation": 1}  # one kind of micro-step, so that plans take half as long


def options(**changes):
    return make_config(FULL | {name.replace("_", "-"): v for name, v in changes.items()})


@cache
def planner(model: ModelConfig, spec: DeviceSpec, world_size: int = 1) -> Planner:
    """The same one for all advice, which keeps its estimates."""
    return Planner(model, spec, "native", card_of(spec), world_size)


def refused(
    config: TrainConfig, model: ModelConfig, limits: Limits, spec=SPEC, world_size=1
) -> str:
    plan = make_plan(config, model, spec, "native", world_size)
    with pytest.raises(OutOfMemory) as error:
        check_fits(config, planner(model, spec, world_size), plan, limits)
    assert "\n" not in error.value.headline
    message = str(error.value)
    assert message.splitlines() == [error.value.headline, *error.value.details]
    return message


def commands(message: str) -> list[list[str]]:
    """The arguments of the command lines in a message."""
    lines = [line.strip() for line in message.splitlines()]
    return [shlex.split(line)[2:] for line in lines if line.startswith("llmq train ")]


@pytest.mark.parametrize(
    ("wanted", "added"),
    [("1.5B e4m3", "--offload-residual"), ("7B e4m3", "--offload-gradients")],
)
def test_what_llmq_publishes_for_four_cards_fits_with_the_command_that_the_message_has(
    wanted, added
):
    (row,) = [
        row
        for row in rows()
        if (row.card, row.gpus, f"{row.model} {row.dtype}") == ("4090", 4, wanted)
    ]
    given = ["--from-scratch", "--opt-m-dtype=bf16", "--opt-v-dtype=bf16", "--device=cuda"]
    given += [f"--model=Qwen2.5-{row.model}", f"--matmul-dtype={row.dtype}", *row.options()]

    def config_of(words: list[str]) -> TrainConfig:
        pairs = [word.removeprefix("--").partition("=") for word in words]
        return make_config({name: value or True for name, _, value in pairs})

    model, limits = preset(f"Qwen2.5-{row.model}"), Limits(device=SPEC.memory)
    message = refused(config_of(given), model, limits, world_size=4)
    (command,) = commands(message)
    plan = make_plan(config_of([*command, "--device=cuda"]), model, SPEC, "native", 4)
    assert needed_bytes(plan, SPEC) <= SPEC.memory
    assert added in {*command} - {*given}


@cache
def needed(config: TrainConfig, model: ModelConfig) -> int:
    """The bytes that must fit into a GPU."""
    return needed_bytes(make_plan(config, model, SPEC), SPEC)


def entries(message: str) -> list[tuple[list[str], int, int]]:
    """Flags, MiB saved and MiB left, of each entry of an advice."""
    found = []
    for entry in message.splitlines():
        flags, saves, sizes = entry.partition(" saves ")
        if not saves:
            continue
        words = sizes.split()
        found.append((flags.split(), int(words[0]), int(words[3])))
    return found


def followed(config: dict, flags: list[str]) -> dict:
    """Options by flag after adding flags, as a user would."""
    added = {}
    for flag in flags:
        name, _, value = flag.removeprefix("--").partition("=")
        added[name] = value or True
    return config | added


def test_message_names_categories_and_flags_that_make_it_fit():
    limit = 3
    model, given = preset("Qwen2.5-0.5B"), FULL | {"model-dtype": "bf16", "batch-size": 16}
    message = refused(make_config(given), model, Limits(device=limit * GIB))
    before = needed(make_config(given), model)
    assert message.startswith(
        f"out of memory: {-(-before // MIB)} MiB are needed, {limit * 1024} MiB are available "
        "(largest: Activations "
    )
    for flags, saved, left in entries(message):
        given = followed(given, flags)
        after = needed(make_config(given), model)
        # Sizes are those of estimates, of what is left rounded up and of what is saved down.
        assert left == pytest.approx(-(-after // MIB), abs=1)
        assert saved == pytest.approx((before - after) // MIB, abs=1)
        before = after
    assert before <= limit * GIB
    # The command has all of it.
    (args,) = commands(message)
    copied = followed({}, args)
    assert needed(make_config(copied), model) == before
    assert make_config(copied | {"log-file": "x"}) == make_config(
        given | {"log-file": "x", "gpus": 1}
    )
    assert make_plan(make_config(given), model, SPEC).tokens == 16 * 1024


def test_cheap_ones_come_first_and_superfluous_ones_not_at_all():
    model, config = preset("Qwen2.5-0.5B"), options(model_dtype="bf16", batch_size=16)
    plans = planner(model, SPEC)
    before = plans.exact(config).device
    for limit in (0.9, 0.5, 0.25):
        limits = Limits(device=int(limit * before))
        changes = Shrinker(plans, limits).shrink(config, CAREFUL)
        found = savings(config, plans, changes)
        left = [saving.device[1] for saving in found]
        assert left[-1] <= limits.device < (left[-2] if len(found) > 1 else before)
        flags = " ".join(saving.flags for saving in found)
        assert not {"--recompute-ffn", "--recompute-swiglu"} <= set(flags.split())
        # Seconds lost for each byte grow, but for those that only helped after others.
        assert found[0].slower <= 0.02
    assert found[-1].slower > found[0].slower


def test_time_is_told_on_a_gpu():
    model, config = preset("Qwen2.5-0.5B"), options(model_dtype="bf16", batch_size=16)
    message = refused(config, model, Limits(device=12 * GIB))
    assert "% slower)" in message
    on_cpu = refused(config, model, Limits(device=12 * GIB), HOST_SPEC)
    assert "makes it fit:\n" in on_cpu and "slower" not in on_cpu


def test_coarser_numbers_only_where_they_are_needed_or_said_so():
    model = preset("Qwen2.5-1.5B")
    config = options(batch_size=1)  # F32 moments: 2 x 5.9 GiB
    message = refused(config, model, Limits(device=12 * GIB))
    careful, _, coarse = message.partition("\nfaster, with coarser numbers: ")
    assert "-dtype" not in careful
    assert "--opt-m-dtype=" in coarse and "--opt-v-dtype=" in coarse
    # Without host memory they are needed.
    message = refused(config, model, Limits(device=12 * GIB, host=GIB))
    assert "makes it fit, with coarser numbers:\n" in message and "-dtype" in message


@pytest.mark.parametrize(
    ("batch", "chunks", "then", "parts"),
    [(97, 1, 1, 1), (16, 16, 8, 8), (15, 5, 5, 5), (9, 9, 3, 3), (4, 24, 2, 12), (3, 18, 1, 6)],
)
def test_micro_batches_of_any_size_get_smaller(batch, chunks, then, parts):
    config = options(batch_size=batch, grad_accumulation=2, attn_bwd_chunks=chunks, seq_len=64)
    config = replace(config, lmhead_chunks=batch)
    (smaller_batch,) = savers("batch")
    less = replace(config, **smaller_batch(config)).validate()
    assert less.batch_size == then and less.batch_size * less.grad_accumulation == 2 * batch
    assert less.attn_bwd_chunks == parts
    assert smaller_batch(replace(config, batch_size=1)) == {}


def test_message_when_nothing_helps():
    model = preset("gpt2-355m")
    limits = Limits(device=GIB, host=GIB // 2)
    message = refused(options(model="gpt2-355m"), model, limits)
    assert "no options make it fit, use a smaller model or --seq-len; the best are:\n" in message
    assert entries(message) and not commands(message)
    tiny = preset("tiny")
    config = options(model="tiny", batch_size=1, seq_len=4, grad_accumulation=1)
    message = refused(config, tiny, Limits(device=MIB), HOST_SPEC)
    assert "use a smaller model or --seq-len" in message


def test_too_little_host_memory():
    model = preset("Qwen2.5-0.5B")
    config = options(batch_size=1, offload_opt_m=True, offload_opt_v=True)
    # 494e6 weights: 1.84 GiB of each moment in F32.
    message = refused(config, model, Limits(device=20 * GIB, host=2 * GIB))
    assert message.startswith("out of host memory: 3770 MiB are needed, 2048 MiB are available")
    assert "(largest: Adam M 1885 MiB, Adam V 1885 MiB, " in message
    (flags, saved, left) = entries(message)[0]
    assert flags in (["--no-offload-opt-m"], ["--no-offload-opt-v"])
    assert (saved, left) == (pytest.approx(1884, abs=1), pytest.approx(1884, abs=1))
    # Both at once.
    message = refused(config, model, Limits(device=2 * GIB, host=2 * GIB))
    assert message.startswith("out of memory: ") and "; out of host memory: " in message


def test_too_little_host_memory_for_saves_in_the_background():
    """Checkpoints written as before make room without costing a step anything."""
    model = preset("Qwen2.5-0.5B")
    config = options(batch_size=1, offload_opt_m=True, ckpt_background=True)
    message = refused(config, model, Limits(device=20 * GIB, host=4 * GIB))
    assert message.startswith("out of host memory: ") and "(largest: Checkpoint " in message
    assert entries(message)[0][0] == ["--no-ckpt-background"]


def test_host_memory_is_that_of_all_ranks():
    model, config = preset("Qwen2.5-0.5B"), options(batch_size=1, offload_opt_m=True, gpus=4)
    plan = make_plan(config, model, SPEC, "native", 4)
    assert plan.host_bytes == 4 * plan.usage.sizes.host
    assert 1884 * MIB < plan.host_bytes < 1950 * MIB  # each rank keeps its shard of the moments
    message = refused(config, model, Limits(host=GIB), world_size=4)
    assert f"{-(-plan.host_bytes // MIB)} MiB are needed by all ranks, 1024 MiB" in message
    assert "(largest of each: Adam M 472 MiB, " in message
    check_fits(config, planner(model, SPEC, 4), plan, Limits(host=2 * GIB))


@pytest.mark.parametrize("short", [1, MIB // 2, MIB, 3 * MIB])
def test_what_is_needed_is_more_than_what_is_there(short):
    """In whole MiB too, however little is missing; and what helps, fits."""
    model, config = preset("Qwen2.5-0.5B"), options(batch_size=1, offload_opt_m=True)
    host = make_plan(config, model, SPEC).host_bytes
    for limits in (
        Limits(device=needed(config, model) - short),
        Limits(host=host - short),
    ):
        message = refused(config, model, limits)
        more, less = (int(word) for word in re.findall(r"(\d+) MiB are", message))
        assert more > less >= min(filter(None, (limits.device, limits.host))) // MIB
        assert entries(message)[-1][2] <= less


def test_limits_of_a_run(monkeypatch):
    monkeypatch.setattr("llmq.plan.memory.available_host_memory", lambda: 6 * GIB)
    machine = choose_machine("cpu", 1)
    assert memory_limit(options(), machine) == Limits(device=6 * GIB)
    assert memory_limit(options(memory_limit="1GiB"), machine) == Limits(device=GIB)
    assert memory_limit(options(memory_limit="9GiB"), machine) == Limits(device=6 * GIB)
    assert memory_limit(options(), choose_machine("cpu", 3)) == Limits(device=2 * GIB)
    gpu = replace(machine, kind="cuda", spec=SPEC)
    host = 6 * GIB - (5 * GIB // 2)  # beside the run's own needs
    assert memory_limit(options(), gpu) == Limits(device=SPEC.memory, host=host)
    assert memory_limit(options(memory_limit="1GiB"), gpu) == Limits(device=GIB, host=host)


def test_host_memory_holds_the_pinned_part_too():
    model, config = preset("tiny"), options()
    plan = make_plan(config, model, HOST_SPEC)
    device, pinned = plan.usage.device_bytes, plan.usage.sizes["pinned"]
    assert pinned > 0
    with pytest.raises(OutOfMemory):
        check_fits(config, planner(model, HOST_SPEC), plan, Limits(device=device + pinned - 1))
    check_fits(config, planner(model, HOST_SPEC), plan, Limits(device=device + pinned))


def test_a_run_is_refused_before_it_allocates(tmp_path, monkeypatch):
    hf_model("qwen2").save_pretrained(tmp_path)
    monkeypatch.setattr(
        "llmq.runtime.machine.HostDevice", lambda *_: pytest.fail("something was allocated")
    )
    with pytest.raises(
        OutOfMemory, match=r"out of memory: \d+ MiB are needed, 0 MiB are available"
    ):
        trainer_for(tmp_path, memory_limit="100KiB")
