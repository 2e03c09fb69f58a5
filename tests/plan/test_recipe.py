"""`llmq recipe`: what it chooses for the hours, what it promises, and where it does not."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from llmq.base.errors import ConfigError, LlmqError
from llmq.commands.cli import _run
from llmq.commands.common import load_run
from llmq.commands.plan import _tried
from llmq.options.cards import CARDS, card_of, find_card, is_laptop
from llmq.options.options_io import make_config
from llmq.options.presets import preset
from llmq.options.sizes import given_sizes, resized
from llmq.plan import recipe_report
from llmq.plan.law import ADAMW, law_of
from llmq.plan.recipe import (
    BASE,
    DEPTHS,
    START,
    Rates,
    Search,
    Tried,
    Wanted,
    batch_tokens,
    most_tokens,
    published_rate,
    read_rates,
    sizes_of,
)
from llmq.plan.target import MachineOptions, target
from llmq.runtime.device import DeviceSpec
from llmq.state.params import parameter_count
from llmq.text.tokenize import tokenize

HOURS = 0.05
PLAIN = {"matmul_dtype", "optimizer"}  # fixed, so that only sizes are searched
STEP = {"batch-size": 8, "grad-accumulation": 1}  # given, so that few micro-batches are planned


def search(hours=HOURS, *, depths=(3, 4, 5, 6), given=None, fixed=PLAIN, **wanted):
    own = {"model": BASE, "from-scratch": True, "seq-len": 512, "gpus": 1, "vocab-size": 8192}
    config = make_config(own | (given or {}))
    model = resized(preset(BASE), given_sizes(config))

    def where(config, model):
        return target(config, model, MachineOptions(card="h100"), search=True)

    wish = Wanted(hours=hours, **wanted)
    made = Search(config, model, frozenset(fixed), where, wish)
    if len(made.shapes) > 1:
        made.shapes = [sizes_of(depth) for depth in depths]
    return made


@pytest.fixture(scope="module")
def found():
    made = search(train_tokens=1 << 40, eval_tokens=500_000)
    return made, made.best()


def test_the_best_size_has_the_lowest_loss_of_its_neighbours(found):
    made, best = found
    by_size = {recipe.parameters: recipe.loss for recipe in made.tried}
    assert best.loss == min(by_size.values())
    sizes = [parameter_count(resized(made.model, shape)) for shape in made.shapes]
    place = sizes.index(best.parameters)
    assert {*sizes[max(place - 1, 0) : place + 2]} <= by_size.keys()
    assert best.loss == ADAMW.loss(best.parameters, best.tokens)
    assert len(by_size) > 1


def test_the_hours_are_filled_and_not_exceeded(found):
    _, best = found
    left = 3600 * HOURS - best.time
    assert 0 <= left < 2 * best.need.time.total
    assert best.seconds["steps"] == best.config.steps * best.need.time.total
    assert best.seconds["validation"] < 0.04 * best.time
    error = best.time_error
    assert 0.04 < error < 0.1  # the card's 5 %, and seconds of the start
    assert best.config.max_hours > HOURS * (1 + error)


def test_the_rest_follows_from_the_tokens(found):
    _, best = found
    config = best.config
    assert 0.7 < best.need.tokens / batch_tokens(best.tokens) < 1.5
    inner = best.parameters - 8192 * best.model.hidden_size
    assert math.isclose(config.learning_rate, published_rate(inner, best.tokens), rel_tol=0.01)
    assert (config.lr_schedule, config.final_lr_fraction) == ("linear", 0)
    assert config.warmup == round(0.03 * config.steps)
    assert config.steps / 21 <= config.eval_every_n_steps <= config.steps


def test_no_loss_is_promised_without_ground(found):
    """A loss that is worse than that of a guess is none of a trained model."""
    made, best = found

    def said(**changes):
        changed = replace(best, **changes)
        record = recipe_report.recipe_record(changed, made, None, None)
        return record, "\n".join(recipe_report.recipe_report(changed, record))

    guess = math.log(8192)
    record, text = said(loss=guess + 0.01)
    assert record["loss"] is None and f"is above {guess:.3f}, which a guess among 8,192 ids" in text
    record, text = said(unique=best.tokens / 3)
    assert "more passes are worth little" not in text
    assert record["loss"] == best.loss and f"{best.loss:.3f} ± 25.0 %" in text


def test_what_is_given_stays():
    given = {"hidden-size": 256, "num-layers": 2, "head-dim": 64, "num-heads": 4}
    given |= {"num-kv-heads": 4, "intermediate-size": 512, "learning-rate": 0.5, "warmup": 7}
    given |= {"batch-size": 6, "grad-accumulation": 2}
    fixed = PLAIN | {name.replace("-", "_") for name in given}
    best = search(given=given, fixed=fixed).best()
    assert (best.model.num_layers, best.model.hidden_size) == (2, 256)
    assert (best.config.learning_rate, best.config.warmup) == (0.5, 7)
    assert best.config.batch_size * best.config.grad_accumulation == 12


def test_fp8_has_the_loss_that_it_costs():
    """And Muon, which one GPU takes, a rate of its own."""
    made = search(0.03, depths=(10,), given=STEP, fixed={"batch_size"})
    best = made.best().config
    assert best.optimizer == "muon"
    fewer = math.sqrt(min(best.batch_size * best.seq_len / 16384, 1))
    assert best.muon_lr == pytest.approx(fewer * 0.08 / best.hidden_size**0.5, 1e-2)
    assert best.muon_lr < best.learning_rate < 4 * best.muon_lr  # of more tokens than the ladders'
    tried = {r.config.is_fp8: r for r in made.tried}
    assert tried.keys() == {False, True}
    fp8 = tried[True]
    assert fp8.loss == 1.002 * law_of("muon").loss(fp8.parameters, fp8.tokens)


def test_a_step_that_was_tried_counts_instead_of_the_plan():
    made = search(depths=(3,), given=STEP, fixed=PLAIN | {"batch_size"})
    planned = made.best()
    faster = made.tried_at(planned, Tried(0.8 * planned.need.time.total, START))
    assert 1.2 < faster.config.steps / planned.config.steps < 1.3
    assert 0 <= 3600 * HOURS - faster.time < planned.need.time.total
    assert faster.time_error < planned.time_error
    late = made.tried_at(planned, Tried(planned.need.time.total, START + 60))
    assert 55 < planned.seconds["steps"] - late.seconds["steps"] < 65
    assert faster.loss < planned.loss and faster.config.batch_size == planned.config.batch_size
    with pytest.raises(ConfigError, match="too few for one step"):
        made.tried_at(planned, Tried(1e6, 10.0))


def chosen(made):
    made.best()
    return made.refined()


def test_no_recipe_passes_over_the_data_more_than_four_times():
    data = {"train_tokens": 1 << 20, "eval_tokens": 1000}
    made = search(depths=(2, 3), given={"seq-len": 256}, **data)
    best = chosen(made)
    assert most_tokens(1e6, 8e6) == 2e6  # large models bear fewer
    carried = most_tokens(1 << 20, best.parameters) / (1 << 20)
    assert 0.95 * carried < best.passes <= carried <= 4
    assert best.loss == min(recipe.loss for recipe in made.tried)
    assert best.time < 0.9 * 3600 * HOURS
    record = recipe_report.recipe_record(best, made, None, None)
    left = 3600 * HOURS - best.time
    assert f"more data would use {recipe_report._time(left)} more" in "\n".join(
        recipe_report.recipe_report(best, record)
    )


def test_muon_takes_more_tokens_a_step_as_long_as_they_are_faster():
    """A small model's steps are too short to keep a card busy. AdamW's are what its paper says."""
    tokens = {}
    for optimizer in ("adamw", "muon"):
        given = {"seq-len": 1024, "optimizer": optimizer}
        made = search(0.0048, depths=(3,), given=given)
        best = made.best()
        nearest = 1024 * made._sequences(best.config, best.tokens, 1)
        tokens[optimizer] = best.need.tokens / nearest
        if optimizer == "muon":  # its rate is 0.004 with 16,384 tokens, and rises as their root
            rate = 0.004 * math.sqrt(best.need.tokens / 16384)
            assert best.config.muon_lr == pytest.approx(rate, rel=0.01)
        assert best.need.tokens <= 4 * batch_tokens(best.tokens)
    assert tokens["adamw"] == 1 and tokens["muon"] in (2, 4)


def test_formats_that_do_not_go_with_what_is_given_are_not_tried():
    made = search(depths=(3,), given=STEP | {"model-dtype": "fp32"}, fixed={"batch_size"})
    assert made.best().config.matmul_dtype == "fp32"
    assert {recipe.config.matmul_dtype for recipe in made.tried} == {"fp32"}


def test_one_gpu_takes_muon():
    """Several take AdamW, and measured rates are those of one optimizer."""
    rates = Rates(0.008, 256, 16384, "adamw", "")
    for gpus, more, name in ((1, {}, "muon"), (2, {}, "adamw"), (1, {"rates": rates}, "adamw")):
        own = {"depths": (2,), "given": STEP | {"gpus": gpus}, "fixed": {"batch_size"}}
        made = search(0.03, **own, **more)
        made.best()
        assert {recipe.config.optimizer for recipe in made.tried} == {name}


def test_a_measured_rate_goes_by_width(tmp_path):
    rates = Rates(0.008, 256, 16384, "adamw", "")
    assert rates.at(1024, 16384) == 0.002 and rates.at(1024, 65536) == 0.004
    assert rates._replace(optimizer="galore").at(1024, 16384) == 0.002
    assert rates._replace(optimizer="muon").at(1024, 16384) == 0.004
    found = {"rate": 0.008, "width": 256, "optimizer": "adamw", "tokens_per_step": 4096}
    (tmp_path / "r.json").write_text(json.dumps(found))
    best = search(
        depths=(4,), given=STEP, fixed=PLAIN | {"batch_size"}, rates=read_rates(tmp_path / "r.json")
    ).best()
    assert best.config.learning_rate == 0.008 and "r.json" in best.notes["learning_rate"]
    (tmp_path / "r.json").write_text("{}")
    with pytest.raises(ConfigError, match="is not of llmq sweep-lr"):
        read_rates(tmp_path / "r.json")


def test_sizes_rise_and_are_what_products_like():
    counts = [parameter_count(resized(preset(BASE), sizes_of(depth))) for depth in DEPTHS]
    assert counts == sorted(counts)
    for depth in DEPTHS:
        sizes = sizes_of(depth)
        assert sizes["num_heads"] * sizes["head_dim"] == sizes["hidden_size"] == 64 * depth
        assert sizes["intermediate_size"] % 64 == 0


def test_published_constants_have_the_values_of_their_paper():
    """Li et al., arXiv:2503.04715: 1.79 N^-0.713 D^0.307, and 0.58 D^0.571."""
    assert math.isclose(batch_tokens(1e10), 0.58 * 10**5.71)
    assert math.isclose(published_rate(1e9, 1e11), 1.79 * 10 ** (11 * 0.307 - 9 * 0.713))
    assert published_rate(1e6, 1e12) == 0.004


def test_cards_have_the_power_that_they_are_sold_with():
    assert find_card("h100").power == 700 and find_card("4060 ti 8gb").power == 165
    assert {card.name for card in CARDS.values() if not card.power} == {
        card.name for card in CARDS.values() if is_laptop(card.name)
    }


# -- the command ---------------------------------------------------------------------------------

SIZES = "--hidden-size 128 --num-layers 2 --num-heads 2 --num-kv-heads 2 --head-dim 64"
SIZES += " --intermediate-size 384 --matmul-dtype bf16 --seq-len 512"
SIZES += " --batch-size 8 --grad-accumulation 1"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("\n".join(f"{n} and {n * n}" for n in range(3000)))
    tokenize(["a.txt"], tokenizer="bytes", out="data", eval_fraction=0.1)
    return tmp_path


def test_the_file_is_the_run_that_was_promised(folder, capsys):
    """The file is read without a warning, and gives the options that were printed."""
    args = f"recipe --hours 0.03 --card h100 --data data --price 3 --kwh-price 0.5 {SIZES} --json"
    assert _run([*args.split(), "--out", "r.yaml"]) == 0
    record = json.loads(capsys.readouterr().out)
    config, model, _, fields = load_run({}, Path("r.yaml"), trains=True)
    assert capsys.readouterr().err == ""
    assert parameter_count(model) == record["parameters"]
    assert config.steps == record["steps"] and config.learning_rate == record["learning_rate"]
    assert config.steps * record["tokens_per_step"] == record["tokens"]
    assert config.max_hours == record["max_hours"] > 0.03
    assert config.eval_file == "data/eval*.bin" and "hidden_size" in fields
    assert record["law"].startswith(ADAMW.source) and record["loss_error"] is None
    assert config.optimizer == "muon" and 1 < record["passes"] <= 4
    assert [tried["loss"] for tried in record["tried"]] == [record["loss"]]
    hours, kwh = record["seconds"] / 3600, record["kwh"]
    assert math.isclose(kwh, 0.7 * hours) and math.isclose(record["cost"], 3 * hours + 0.5 * kwh)
    text = Path("r.yaml").read_text()
    assert text.count("# To zero in a line") == 1 and "none is promised" in text
    assert _run([*args.replace("0.03", "0.04").split(), "--out", "r.yaml"]) == 2
    assert "--out: 'r.yaml' is there: delete it" in capsys.readouterr().err


def test_a_file_in_the_way_is_refused_before_the_search(folder, capsys, monkeypatch):
    monkeypatch.setattr(recipe_report, "Search", lambda *args: pytest.fail("a search"))
    Path("r.yaml").write_text("name: mine\n")
    for out, message in (("r.yaml", "'r.yaml' is there"), ("r.json", "must end in .yaml or .yml")):
        assert _run(["recipe", "--hours=1", "--card=h100", f"--out={out}"]) == 2
        assert message in capsys.readouterr().err
    assert Path("r.yaml").read_text() == "name: mine\n"


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ("--card h100 --steps 5", "--steps: follows from --hours"),
        ("--card 9999", "no card is known as"),
        ("--device cpu", "nothing is known of the speed of a CPU"),
        ("--card h100 --run", "--run: trains on this machine"),
        ("--run", "--run: on which data?"),
        ("--card h100 --lora-rank 8", "--lora-rank: adapters need a trained model"),
        ("--card h100 --loss dpo --packing none", "--loss: a scaling law says nothing of dpo"),
        ("--card h100 --seq-len 6", "--seq-len: must be a multiple of 4"),
        ("--card h100 --measure", "--measure: tries a step on this machine"),
        ("--card h100 --data data --train-file x", "--data: says which files, leave out"),
        (
            "--card h100 --model x --no-from-scratch",
            "--from-scratch: a recipe begins with random weights",
        ),
    ],
)
def test_what_it_refuses(folder, capsys, args, said):
    assert _run(["recipe", "--hours", "0.1", *args.split()]) == 2
    assert said in capsys.readouterr().err


def test_there_is_no_promise_for_a_card_that_nobody_knows(monkeypatch):
    """A card in neither the table nor a card file has no promise."""
    spec = DeviceSpec(name="NVIDIA RTX 9999", capability=120, num_sms=100, memory=16 << 30)
    config = make_config({"model": BASE, "from-scratch": True})
    here = target(
        config, preset(BASE), MachineOptions(gpu_memory=16 << 30, card="4090"), search=True
    )
    unknown = replace(here, card=card_of(spec))
    with pytest.raises(ConfigError, match=r"no promise for a NVIDIA RTX 9999.*llmq rig"):
        recipe_report._known(unknown)
    measured = replace(unknown, card=replace(unknown.card, measured=object()))
    assert recipe_report._known(measured) is measured
    assert recipe_report._known(here) is here


def test_run_trains_what_was_written(folder, monkeypatch):
    """--run, on a machine that says it is an H100: the plan is one, the run is left to train's
    tests."""
    where = lambda config, model, reserve: target(  # noqa: E731
        config, model, MachineOptions(card="h100", reserve=reserve), search=True
    )
    monkeypatch.setattr(recipe_report, "target_here", where)
    started = []
    monkeypatch.setattr("llmq.run.training.run_training", lambda *args: started.append(args))
    monkeypatch.setattr("llmq.commands.plan._tried", lambda recipe: Tried(0.75, 5.0))
    one = SIZES.replace("--batch-size 8", "--batch-size 1")  # else four passes take fewer steps
    assert _run(f"recipe --hours 0.03 --data data {one} --run --out a.yaml".split()) == 0
    ((config, model, _, _),) = started
    # Five of 108 seconds are lost, and what validates and saves.
    assert 94 < config.steps * 0.75 < 103.1 and config.hidden_size == 128
    assert config.max_hours > 0.03 and model.hidden_size == 128


def test_steps_on_random_tokens_are_timed(monkeypatch):
    seconds = {"status": "ok", "result": {"step_seconds": [0.02, 0.01, 0.015]}}
    seconds["result"]["first_step_seconds"] = 20.0
    tried = []
    monkeypatch.setattr("llmq.bench.child.run_child", lambda o, *_: tried.append(o) or seconds)
    best = search(depths=(2,), given=STEP, fixed=PLAIN | {"batch_size"}).best()
    assert _tried(best) == (0.015, 20.0)
    json.dumps(tried)  # it goes to another process
    monkeypatch.setattr("llmq.bench.child.run_child", lambda *_: {"status": "hung", "message": "x"})
    with pytest.raises(LlmqError, match="the recipe's step: x; --no-measure"):
        _tried(best)
