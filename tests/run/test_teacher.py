"""On-policy distillation: samples of a model that learns the distribution of a teacher."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import transformers

from llmq import Trainer
from llmq.base.batch import Batch
from llmq.base.errors import ConfigError
from llmq.commands.cli import _run
from llmq.plan.memory import needed_bytes
from llmq.run.rollouts import Rollouts
from llmq.run.teacher import UNLIKELY, _of_vocabulary
from tests.models import LOSS_RTOL, pieces, same_gradients
from tests.run.test_rollouts import OPTIONS, PROMPTS, TINY, ascii_part

K = 32
KD = {"loss": "kd", "loss_params": f"divergence=reverse,top-k={K}"}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A student and a teacher of other sizes, as files; each has a distribution of its own."""
    folder = tmp_path_factory.mktemp("models")
    for name, how in (("student", {"seed": 1}), ("teacher", {"seed": 2, "num_layers": 2})):
        given = TINY | how | {"loss": "ce", "learning_rate": 0.1, "steps": 4}
        with Trainer(**given) as trainer:
            rng, shape = np.random.default_rng(how["seed"]), (8, 32)
            for _ in range(4):
                ids = rng.integers(0, 64 * how["seed"], (4, *shape), np.int32)
                trainer.step([trainer_batch(each) for each in ids])
            trainer.export(folder / name)
    return folder


def trainer_batch(ids):
    starts = np.zeros_like(ids)
    return Batch(ids, np.roll(ids, -1, 1), starts)


def distilling(models, reward=None, **changed):
    given = {name: value for name, value in TINY.items() if not is_size(name)}
    given |= OPTIONS | KD | {"model": models / "student", "teacher": str(models / "teacher")}
    trainer = Trainer(**given | {"from_scratch": False} | changed)
    try:
        return trainer, Rollouts(trainer, PROMPTS, reward)
    except BaseException:
        trainer.close()
        raise


def is_size(name):
    return name.startswith(("num_l", "num_h", "num_kv", "head_", "hidden", "interm", "vocab"))


def reverse_kl(student, teacher, batch):
    """The sum over sampled tokens of the divergence of the student from the teacher, whose tokens
    behind the K likeliest ones count as one."""
    total = 0
    for row, (ids, starts) in enumerate(zip(batch.inputs, batch.starts, strict=True)):
        for first in np.unique(starts[: batch.lengths[row]]):
            (at,) = np.nonzero(starts == first)
            at = at[at < batch.lengths[row]]
            part = torch.from_numpy(ids[at]).long()[None]
            x, y = (model(part).logits[0].double().log_softmax(-1) for model in (student, teacher))
            y, columns = y.detach().topk(K)
            x = x.gather(1, columns)
            x, y = (torch.cat([z, torch.log1p(-z.exp().sum(1, keepdim=True))], 1) for z in (x, y))
            kl = (x.exp() * (x - y)).sum(1)
            total = total + kl[torch.from_numpy(batch.targets[row, at] >= 0)].sum()
    return total


def test_loss_and_gradients_are_those_of_torch(models):
    trainer, samples = distilling(models, learning_rate=0.0)
    with trainer:
        trainer.step()
        batches, found = samples._batches, trainer.last_step.result
        assert samples.last.keys() == {"length", "cut", "sample_ms", "reward_ms"}
        ours = pieces(trainer, trainer.gradients())
    load = transformers.AutoModelForCausalLM.from_pretrained
    student, teacher = (load(models / name).float() for name in ("student", "teacher"))
    total = sum(reverse_kl(student, teacher, batch) for batch in batches)
    count = sum(int((batch.targets >= 0).sum()) for batch in batches)
    assert found.loss == pytest.approx(total.item() / count, rel=LOSS_RTOL)
    assert found.numbers["kl"] == pytest.approx(found.loss, rel=1e-6) and found.tokens == count
    total.backward()
    whole = np.linalg.norm([p.grad.norm().item() for p in student.parameters()])
    same_gradients(ours, student, whole)


def test_the_student_becomes_the_teacher(models):
    trainer, samples = distilling(models, ascii_part, steps=16, learning_rate=0.02)
    with trainer:
        found = [trainer.step() for _ in range(16)]
        assert trainer.usage == trainer.plan.usage and 0 <= samples.last["reward"] <= 1
    assert found[-1].numbers["kl"] < found[0].numbers["kl"] / 2


def test_what_is_no_teacher(models, monkeypatch):
    with pytest.raises(ConfigError, match=r"--teacher: .*none"):
        distilling(models, teacher="none")
    with pytest.raises(ConfigError, match="--teacher: needs --loss kd, got dapo"):
        distilling(models, loss="dapo", loss_params=None)
    with pytest.raises(ConfigError, match="neither a reward function nor a --teacher"):
        distilling(models, teacher=None, loss="dapo", loss_params=None)
    names = iter(("one", "other"))
    monkeypatch.setattr("llmq.run.teacher._fingerprint", lambda source: next(names))
    with pytest.raises(ConfigError, match="has another tokenizer than the model"):
        distilling(models)


def test_the_command_and_its_plan(models, tmp_path, capsys):
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, PROMPTS)))
    given = {name: value for name, value in (TINY | OPTIONS).items() if not is_size(name)}
    for name in ("from_scratch", "grad_accumulation", "loss", "document_mask"):
        del given[name]
    given |= {"model": models / "student", "teacher": models / "teacher", "steps": 2}
    given |= {"loss_params": f"top-k={K}"}
    words = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
    assert _run(["plan", "--rl", "--json", *words]) == 0
    found = json.loads(capsys.readouterr().out)
    trainer, samples = distilling(models)
    with trainer:
        trainer.step()
        assert found["memory"] == trainer.usage.categories
        teacher = samples._teacher._trainer
        assert teacher.usage == teacher.plan.usage
        assert found["teacher_bytes"] == needed_bytes(teacher.plan, teacher.dev.spec)
    places = ("out-dir", "checkpoint-dir", "log-file")
    words += [f"--{name}={tmp_path / name}" for name in places]
    words += [f"--prompts={tmp_path / 'prompts.jsonl'}"]
    assert _run(["rl", *words]) == 0
    steps = [r for r in json.loads((tmp_path / "log-file").read_text()) if r["log"] == "step"]
    assert len(steps) == 2 and all(0 < r["kl"] < 9 for r in steps)
    assert "[R] step     1" in capsys.readouterr().out


def test_tokens_that_a_vocabulary_lacks_become_unlikely():
    ids = np.array([[1, 7, 3], [0, 1, 2]], np.int32).view(np.float32)
    scores = np.concatenate([ids, np.log(np.full((2, 3), 0.25, np.float32))], 1)[None]
    found = _of_vocabulary(scores, 6)
    np.testing.assert_array_equal(found[0, :, :3].view(np.int32), [[1, 0, 3], [0, 1, 2]])
    assert found[0, 0, 4] == UNLIKELY and found[0, 1, 4] == scores[0, 0, 3]
