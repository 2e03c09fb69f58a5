"""Reinforcement learning: samples as training data, rewards, and runs that are resumed."""

from __future__ import annotations

import json
import re
import time

import numpy as np
import pytest

from llmq import Trainer
from llmq.base.errors import ConfigError, DataError
from llmq.commands.cli import _run
from llmq.report.live import Progress
from llmq.run.rewards import Group, RewardError, Rewards
from llmq.run.rollouts import Rollouts, Sample, _extremes, advantages, packed

TINY = {
    "model": "tiny-qwen3",
    "from_scratch": True,
    "vocab_size": 257,
    "num_layers": 1,
    "hidden_size": 64,
    "num_heads": 1,
    "num_kv_heads": 1,
    "head_dim": 64,
    "intermediate_size": 64,
    "model_dtype": "fp32",
    "device": "cpu",
    "gpus": 1,
    "seq_len": 32,
    "batch_size": 8,
    "grad_accumulation": 4,
    "learning_rate": 0.02,
    "weight_decay": 0.0,
    "steps": 18,
    "loss": "dapo",
    "document_mask": True,
    "eval_file": "none",
}
OPTIONS = {"prompts_per_step": 4, "num_samples": 8, "max_new_tokens": 12}
PROMPTS = [{"prompt": f"{n} "} for n in range(10)]


def ascii_part(texts, record):
    return [sum(c.isascii() for c in text) / max(len(text), 1) for text in texts]


def learner(reward=ascii_part, prompts=PROMPTS, **changed):
    """A trainer on its own samples, and these."""
    trainer = Trainer(**TINY | OPTIONS | changed)
    try:
        samples = Rollouts(trainer, prompts, reward)
    except BaseException:
        trainer.close()
        raise
    return trainer, samples


def test_a_reward_rises():
    """One prompt wants what the other one does not."""
    found = {}

    def wanted(texts, record):
        parts = [abs(record["least"] - part) for part in ascii_part(texts, record)]
        found[record["prompt"]] = np.mean(parts)
        return parts

    prompts = [{"prompt": "aaaa", "least": 0}, {"prompt": "zzzz", "least": 1}]
    trainer, _ = learner(wanted, prompts, prompts_per_step=2, num_samples=16, steps=24)
    with trainer:
        first = trainer.step()
        assert max(found.values()) < 0.6
        for _ in range(23):
            trainer.step()
        assert trainer.usage == trainer.plan.usage
    assert first.numbers["drift"] < 1e-5  # what samples computes as what trains
    assert min(found.values()) > 0.8, found


def test_a_run_goes_on_bit_for_bit(tmp_path):
    """Between two updates of one rollout, and into the next."""
    options, found, stop = {"updates": 2}, [], 3
    trainer, _ = learner(**options)
    with trainer:
        for step in range(5):
            if step == stop:
                trainer.save(tmp_path)
            found.append(trainer.step())
        whole = trainer.weights()
    trainer, samples = learner(**options)
    with trainer:
        trainer.load(tmp_path)
        again = [trainer.step() for _ in range(5 - stop)]
        assert [r.loss for r in again] == [r.loss for r in found[stop:]]
        for name, values in trainer.weights().items():
            np.testing.assert_array_equal(values, whole[name])
        assert samples.state()["update"] == 5
    trainer, _ = learner(prompts=PROMPTS[:9], **options)
    with trainer, pytest.raises(DataError, match=r"the prompts, .* changed since the checkpoint"):
        trainer.load(tmp_path)


def test_ranks_divide_the_samples():
    losses = []
    for gpus in (1, 2):
        trainer, _ = learner(gpus=gpus, learning_rate=0.0)
        with trainer:
            losses.append(trainer.step().loss)
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.parametrize("adapters", [False, True])
def test_the_reference_is_the_model_of_the_beginning(adapters, tmp_path):
    """Adapters are compared with the model without; checkpoints keep the reference."""
    given = {"loss_params": "beta=0.1", "keep_reference": True}
    with Trainer(**TINY) as trainer:
        trainer.export(tmp_path / "model")
    given |= {"model": str(tmp_path / "model"), "from_scratch": False}
    given |= {name: None for name in TINY if name.startswith(("num_", "head_", "hidden", "interm"))}
    given |= {"vocab_size": None, **({"lora_rank": 4} if adapters else {})}
    trainer, samples = learner(**given)
    with trainer:
        first = trainer.step()
        assert abs(first.numbers["kl"]) < 1e-6
        trainer.save(tmp_path)
        assert trainer.step().numbers["kl"] > 1e-4 and trainer.usage == trainer.plan.usage
        batch, losses = samples._batches[0], trainer._step.loss
        assert losses.form.beta == pytest.approx(0.1)
    with Trainer(**TINY | given) as other:
        want = np.where(batch.targets >= 0, -other._step.score(batch), 0)
    np.testing.assert_allclose(batch.named["scores"], want, atol=1e-5)
    trainer, again = learner(**given)
    with trainer:
        trainer.load(tmp_path)
        trainer.step()
        np.testing.assert_array_equal(again._batches[0].named["scores"], batch.named["scores"])


def test_advantages_are_trls():
    """(r - mean) / (std + 1e-4), with torch's std; Dr. GRPO leaves out the division."""
    rewards = np.array([1.0, 0.0, 0.0, 3.0])
    np.testing.assert_allclose(advantages(rewards, scale=False), rewards - 1)
    np.testing.assert_allclose(advantages(rewards, scale=True), (rewards - 1) / (2**0.5 + 1e-4))


def test_rows_hold_every_sample_once(rng):
    prompts = [[1] * int(n) for n in rng.integers(1, 6, 7)]
    samples = [
        Sample(i % 7, rng.integers(2, 99, int(n)).tolist(), (-rng.random(int(n))).tolist(), i - 9.5)
        for i, n in enumerate(rng.integers(1, 20, 20))
    ]
    batches = packed(samples, prompts, (2, 24), ranks=2)
    assert len(batches) % 2 == 0
    found = []
    for batch in batches:
        for row in range(2):
            starts, targets = batch.starts[row], batch.targets[row]
            assert (starts[batch.lengths[row] :] == np.arange(batch.lengths[row], 24)).all()
            for first in np.unique(starts[targets >= 0]):
                at = np.flatnonzero((starts == first) & (targets >= 0))
                (advantage,) = {*batch.named["advantages"][row, at].tolist()}
                ids, sample = targets[at].tolist(), samples[int(advantage + 9.5)]
                assert ids == sample.ids and at[0] - first == len(prompts[sample.prompt]) - 1
                assert batch.inputs[row, first] == 1
                assert batch.inputs[row, at[1:]].tolist() == ids[:-1]
                np.testing.assert_allclose(batch.named["sampled"][row, at], sample.logprobs, 1e-6)
                found.append(advantage)
        assert batch.padding == 48 - batch.lengths.sum()
    assert sorted(found) == [i - 9.5 for i in range(20)]


def test_the_view_shows_the_best_and_the_worst_text():
    rows = [{"text": f"{n}\n  a", "rewards": {"reward": n}} for n in (1, 0.25, 3)]
    found = _extremes([*rows, {"text": "b", "error": "none"}])
    assert found == {"best 3": "3 a", "worst 0.25": "0.25 a"} and _extremes([]) == {}
    progress = Progress(0, 4)
    progress.update(texts=found)
    assert [str(line) for line in progress.render().lines] == ["best 3: 3 a", "worst 0.25: 0.25 a"]


def test_groups_without_a_gradient_change_nothing():
    trainer, samples = learner(lambda texts, record: [1.0] * len(texts))
    with trainer:
        before = trainer.weights()
        assert trainer.step().tokens == 0 and samples.last["equal"] == 1
        for name, values in trainer.weights().items():
            np.testing.assert_array_equal(values, before[name])


def test_other_prompts_replace_those_without_a_gradient():
    """Only prompts with an even number have a gradient, and others are replaced."""
    asked = []

    def of_even(texts, record):
        asked.append(record["number"])
        return [i * (record["number"] % 2 == 0) for i in range(len(texts))]

    prompts = [{"prompt": f"{n} ", "number": n} for n in range(10)]
    for redraws, drawn in ((9, None), (1, None), (0, 4)):
        asked.clear()
        trainer, samples = learner(of_even, prompts, redraws=redraws)
        with trainer:
            samples.step_batches(8)
            even = [n for n in asked if n % 2 == 0]
            assert len(asked) == len({*asked}) == samples.last["drawn"]
            if redraws == 9:
                assert len(even) == 4 and asked[-1] % 2 == 0
            else:
                assert len(asked) == (drawn or 4 + sum(n % 2 for n in asked[:4]))
            assert samples.last["equal"] == (len(asked) - len(even)) / len(asked)
            assert {sample.prompt for sample in samples._samples} == {*even}
            first = list(asked)
            samples.reset()
            samples.step_batches(8)  # the same again
            assert asked == 2 * first


def test_long_samples_cost_reward():
    trainer, samples = learner(lambda texts, record: [2] * len(texts), overlong_buffer=8)
    with trainer:
        samples.step_batches(4)
        lengths = [len(sample.ids) for sample in samples._samples]
        (drawn,) = samples._drawn(0, 0, [3])
    assert min(lengths) < 12 == max(lengths)
    for made, score in zip(drawn.made, drawn.scores, strict=True):
        cost = {12: 1.0, 4: 0.0, 8: 0.5}.get(len(made.ids), max(len(made.ids) - 4, 0) / 8)
        assert score == {"reward": 2 - cost, "overlong": -cost}
    assert samples.last["reward"] == pytest.approx(2 + samples.last["reward/overlong"])


# ------------------------------------------------------------------------------------------------
# Rewards

FUNCTIONS = """
import os, time
import numpy as np

def good(texts, record):
    return [{"length": len(text), "bonus": record["bonus"]} for text in texts]

def score(texts, record):
    what = record["what"]
    if what == "raises":
        raise KeyError("answer")
    if what == "hangs":
        time.sleep(60)
    if what == "ends":
        os._exit(3)
    if what == "number":
        return 1.0
    if what == "numpy":
        return np.ones(len(texts), bool)
    made = {"nan": float("nan"), "text": "1", "true": True}.get(what, 2.0)
    return [made] * (len(texts) - (what == "few"))
"""
PROBLEMS = {
    "raises": r"raised KeyError: 'answer' \(rewards.py:11\)",
    "hangs": "took more than 3 s",
    "ends": "has ended its process",
    "nan": "returned nan as 'reward', which is no finite number",
    "text": "returned '1' as 'reward', which is no finite number",
    "number": "returned 1.0 in place of a list with a reward of each text",
    "few": "returned 1 rewards of 2 texts",
}


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("rewards") / "rewards.py"
    path.write_text(FUNCTIONS)
    return path


def test_what_is_wrong_with_a_reward_is_said(file):
    """Each group has a problem of its own; the last one has its rewards."""
    groups = [Group(["a", "bc"], {"what": what}, "") for what in [*PROBLEMS, "true", "numpy"]]
    with Rewards(f"{file}:score", seconds=3, workers=2) as rewards:
        start = time.monotonic()
        *wrong, right, array = rewards(groups)
        assert time.monotonic() - start < 30
    assert right == array == [{"reward": 1.0}] * 2
    for found, problem in zip(wrong, PROBLEMS.values(), strict=True):
        assert re.search(problem, found), found


def test_components_are_added(file):
    with Rewards(f"{file}:good") as rewards:
        (found,) = rewards([Group(["a", "bcd"], {"bonus": 0.5}, "")])
    assert found == [
        {"reward": 1.5, "length": 1.0, "bonus": 0.5},
        {"reward": 3.5, "length": 3.0, "bonus": 0.5},
    ]


@pytest.mark.parametrize(
    ("spec", "error"),
    [
        ("score", "expected FILE.py:FUNCTION, got 'score'"),
        ("none.py:score", "there is no file 'none.py'"),
        ("{}:none", "has no function 'none'"),
    ],
)
def test_functions_that_are_not_there(file, spec, error):
    with pytest.raises(ConfigError, match=error):
        Rewards(spec.format(file))


# ------------------------------------------------------------------------------------------------
# The command


def command(folder, file, function, *words, **more):
    options = {name.replace("_", "-"): value for name, value in (TINY | OPTIONS).items()}
    del options["from-scratch"], options["document-mask"], options["grad-accumulation"]
    options |= {"prompts": folder / "prompts.jsonl", "reward": f"{file}:{function}", "steps": 2}
    options |= {"log-file": folder / "log.json", "out-dir": folder / "out"}
    options |= {"checkpoint-dir": folder / "ckpt", "num-samples": 2, **more}
    flags = [f"--{name}={value}" for name, value in options.items()]
    return _run(["rl", "--from-scratch", *flags, *words])


def write_prompts(folder, whats):
    lines = ({"prompt": f"{n} ", "what": what, "bonus": 1} for n, what in enumerate(whats))
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)))


def test_a_run_of_the_command(tmp_path, file, capsys):
    """The log has rewards, all samples are in a file beside, and --continue goes on."""
    write_prompts(tmp_path, [""] * 6)
    assert command(tmp_path, file, "good", "--save-training-state") == 0
    out = capsys.readouterr().out
    assert "6 prompts of at most 2 tokens" in out and "[R] step     1" in out
    records = [r for r in json.loads((tmp_path / "log.json").read_text()) if r["log"] == "rollout"]
    assert [r["step"] for r in records] == [0, 1]
    assert records[0]["reward"] == pytest.approx(records[0]["reward/length"] + 1)
    rows = [json.loads(line) for line in (tmp_path / "log.samples.jsonl").read_text().splitlines()]
    assert len(rows) == 16 and rows[0].keys() >= {"prompt", "text", "rewards", "advantage"}
    own = [f"--checkpoint-dir={tmp_path / 'ckpt'}", "--continue", "--steps=3"]
    assert _run(["rl", *own, "--num-samples=3"]) == 0  # its other options are the run's
    assert "--num-samples is 3, in the checkpoint's run it was 2" in capsys.readouterr().err
    records = [r for r in json.loads((tmp_path / "log.json").read_text()) if r["log"] == "rollout"]
    assert [r["step"] for r in records] == [0, 1, 2]
    samples = tmp_path / "log.samples.jsonl"
    rows = samples.read_text().splitlines()
    assert len(rows) == 16 + 12
    capsys.readouterr()
    for words, step, count in ([], 2, 12), (["--step=1", "--limit=2"], 1, 8):
        assert _run(["show", str(samples), *words]) == 0
        shown = capsys.readouterr().out
        found = [float(n) for n in re.findall(r"--- (?:best|worst): reward (\S+) \(len", shown)]
        assert found == sorted(found, reverse=True) and len(found) == (4 if words else 6)
        of_step = [json.loads(row) for row in rows if json.loads(row)["step"] == step]
        assert found[0] == max(row["rewards"]["reward"] for row in of_step)
        assert shown.splitlines()[-1].startswith(f"step {step}: {count} samples, mean reward ")
    assert _run(["show", str(samples), "--step=7"]) == 2
    assert "has no samples of step 7" in capsys.readouterr().err
    assert _run(["train", *own]) == 2 and "--prompts: is of `llmq rl`" in capsys.readouterr().err


def plan(capsys, *words):
    assert _run(["plan", "--rl", "--json", *words]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_plan_counts_the_memory_of_samples_to_the_byte(capsys):
    given = TINY | OPTIONS | {"loss_params": "beta=0.1"}
    words = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
    found = plan(capsys, *words)
    trainer, _ = learner(loss_params="beta=0.1", keep_reference=True)
    with trainer:
        trainer.step()
        assert found["memory"] == trainer.usage.categories
    rollout = found["rollout"]
    assert (rollout["samples"], rollout["prompt_tokens"], rollout["new_tokens"]) == (32, 20, 12)
    assert rollout["seconds"] is None and rollout["texts_at_a_time"] >= 1
    assert rollout["blocks_bytes"] <= found["memory"]["device"]["Activations"]


def test_the_plan_times_the_parts_of_a_step(capsys):
    """Sampling reads all weights, and the keys and values so far, for each token."""
    words = ["--model=Qwen2.5-0.5B", "--batch-size=4", "--seq-len=1024", "--max-new-tokens=512"]
    words += ["--card=4090", "--loss-params=beta=0.1"]
    found = plan(capsys, *words)
    seconds, rate = found["rollout"]["seconds"], 1008e9
    assert found["rollout"]["texts_at_a_time"] == 64
    assert seconds["train"] == pytest.approx(found["predicted"]["step_seconds"])
    assert 0.2 < seconds["score"] / seconds["train"] < 0.4
    weights, kept = 2 * 494032768, 2 * 24 * 128 * 2 * 64 * (512 + 256)
    floor = 512 * (weights + kept) / rate
    assert floor < seconds["sample"] < 3 * floor
    coded = plan(capsys, *words, "--lora-rank=8", "--base-dtype=nf4")["rollout"]["seconds"]
    codes = (494032768 - 151936 * 896) * 33 / 64  # which a 4090's 128 multiprocessors decode
    assert coded["sample"] > 512 * codes / (128 * 3.8e9) > 512 * codes / rate
    again = plan(capsys, *words, "--updates=3", "--num-samples=16")["rollout"]["seconds"]
    assert again["train"] > 5.9 * seconds["train"]
    assert 1.8 * seconds["sample"] < again["sample"] < 2 * seconds["sample"]


@pytest.mark.parametrize(
    ("given", "length"), [([], "length=6"), (["--loss-params=length=9"], "length=9")]
)
def test_dr_grpo_divides_by_the_longest_sample(tmp_path, file, given, length):
    write_prompts(tmp_path, [""] * 4)
    saved = tmp_path / "saved.yaml"
    words = ["--loss=dr-grpo", f"--save-config={saved}", *given]
    assert command(tmp_path, file, "good", *words, steps=1, **{"max-new-tokens": 6}) == 0
    assert length in saved.read_text()


def test_a_reward_error_stops_or_is_left_out(tmp_path, file, capsys):
    write_prompts(tmp_path, ["fine", "raises", "fine", "fine"])
    assert command(tmp_path, file, "score") == 2
    error = capsys.readouterr().err
    assert "prompts.jsonl:2: the reward function raised KeyError" in error
    assert command(tmp_path, file, "score", "--on-reward-error=skip", "--overwrite") == 0
    records = json.loads((tmp_path / "log.json").read_text())
    assert [r["failed"] for r in records if r["log"] == "rollout"] == [1, 1]


@pytest.mark.parametrize(
    ("more", "error"),
    [
        ({"max-new-tokens": 31}, "prompts.jsonl:1: the prompt has 2 tokens, and with"),
        ({"loss": "ce"}, "--loss ce: does not learn from samples"),
        ({"grad-accumulation": 1, "batch-size": 4}, "--grad-accumulation: 8 samples of a step"),
        ({"on-reward-error": "go"}, "--on-reward-error: expected stop or skip, got 'go'"),
    ],
)
def test_what_does_not_go_is_refused_before_the_start(tmp_path, file, more, error, capsys):
    write_prompts(tmp_path, ["fine"] * 4)
    assert command(tmp_path, file, "score", **more) == 2
    assert error in capsys.readouterr().err and not (tmp_path / "log.json").exists()


def test_errors_of_python(file):
    def wrong(texts, record):
        raise ValueError("no answer")

    trainer, _ = learner(wrong)
    with trainer, pytest.raises(RewardError, match=r"prompt \d: the reward .* ValueError: no ans"):
        trainer.step()
