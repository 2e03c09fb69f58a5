"""Environments: turns of the model and answers, which are not trained, and what goes wrong."""

from __future__ import annotations

import re

import numpy as np
import pytest

from llmq.model.generator import Completion
from llmq.run.episodes import Episodes
from llmq.run.rewards import Rewards
from llmq.run.sampling import conversation
from llmq.text.guarded import guarded_tokenizer
from tests.chat_templates import QWEN25, user, write_chat_tokenizer
from tests.run.test_rollouts import learner


class Counting:
    """Says how many characters it was told, three times."""

    def reset(self, record):
        self.left, self.word = 3, record["word"]

    def step(self, text):
        self.left -= 1
        return f" {self.word} {len(text)} ", {"told": 1, "left": self.left}, not self.left


PROMPTS = [{"prompt": f"{n} ", "word": f"<{n}>"} for n in range(4)]


def test_answers_are_read_and_not_trained():
    trainer, samples = learner(Counting, PROMPTS, seq_len=64, keep_equal=True, max_turns=9)
    samples._stop |= {*range(128)}  # a turn ends with the first character of ASCII
    with trainer:
        first = trainer.step()
        assert first.numbers["drift"] < 1e-5 and first.tokens > 0
        whole = [sample for sample in samples._samples if None in sample.logprobs]
        assert len(whole) > 16 and samples.last["reward/told"] > 1.5
        assert samples.last["reward"] == pytest.approx(
            samples.last["reward/told"] + samples.last["reward/left"]
        )
        count = 0
        for sample in whole:
            answers = re.findall(rb" <(\d)> (\d+) ", bytes(i for i in sample.ids if i < 256))
            assert answers and {int(n) for n, _ in answers} == {sample.prompt}
            given = [i for i, p in zip(sample.ids, sample.logprobs, strict=True) if p is None]
            assert bytes(given) == b"".join(b" <%s> %s " % answer for answer in answers)
            count += sum(p is not None for p in sample.logprobs)
        trained = sum(int((batch.targets >= 0).sum()) for batch in samples._batches)
        alone = [len(s.ids) for s in samples._samples if None not in s.logprobs]
        assert trained == count + sum(alone) == first.tokens


def test_turns_and_room_end_episodes():
    trainer, samples = learner(Counting, PROMPTS, seq_len=32, max_turns=2, keep_equal=True)
    samples._stop |= {*range(128)}
    with trainer:
        samples.step_batches(4)
        assert max(len(s.ids) for s in samples._samples) < 32
        assert {s.logprobs[-1] is None for s in samples._samples} == {False}
        assert samples.last["reward/told"] <= 2 and samples.last["cut"] > 0.5


# ------------------------------------------------------------------------------------------------
# Chats with tools

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


class Adding:
    tools = (TOOL,)

    def reset(self, record):
        self.right = record["right"]

    def step(self, text, calls):
        if calls:
            return [str(sum(call["arguments"]["of"])) for call in calls], 0, False
        return None, float(str(self.right) in text), True


def test_a_chat_with_tools(tmp_path):
    """Calls are parsed in the template's form; the ids of a conversation are the template's."""
    tokenizer = guarded_tokenizer(write_chat_tokenizer(tmp_path, QWEN25))
    talk = conversation(tokenizer, None)
    replies = ['<tool_call>\n{"name": "add", "arguments": {"of": [1, 2]}}\n</tool_call>', "the 3"]
    record, tools = {"prompt": [user("1 + 2?")], "right": 3}, Adding.tools

    def generate(turn, texts):
        ids = [*tokenizer.encode(replies[turn]), talk.stop.ids[0]]
        return [Completion(ids, np.full(len(ids), -0.5, np.float32), "stop") for _ in texts]

    player = Episodes(Rewards(Adding), tokenizer, talk, turns=4, positions=400)
    prompt = talk.prompt(record["prompt"], tools)
    ((episode, _),), scores = player.play([prompt], 2, [record], generate)
    assert scores == [[{"reward": 1.0}] * 2] and episode.finish == "stop"
    assert [m["role"] for m in episode.messages] == ["user", "assistant", "tool", "assistant"]
    answer = "\n<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>\n"
    answer += "<|im_start|>assistant\n"
    whole = tokenizer.decode(episode.text)
    assert whole.endswith(f"{replies[0]}<|im_end|>{answer}the 3<|im_end|>")
    told = [i for i, p in zip(episode.ids, episode.logprobs, strict=True) if p is None]
    assert tokenizer.decode(told) == answer


# ------------------------------------------------------------------------------------------------
# In processes

FILE = """
import time

class World:
    def reset(self, record):
        self.what = record["what"]
        if self.what == "reset":
            raise ValueError("no world")

    def step(self, text):
        if self.what == "raises":
            return {}["key"]
        if self.what == "hangs":
            time.sleep(60)
        return {"two": (1, 2), "nan": ("", float("nan"), 0), "said": (3, 1, 0)}.get(
            self.what, (text + self.what, 1, False)
        )
"""
PROBLEMS = {
    "reset": r"raised ValueError: no world \(world.py:8\)",
    "raises": r"raised KeyError: 'key' \(world.py:12\)",
    "two": r"returned \(1, 2\) in place of \(text or messages, reward, done\)",
    "nan": "returned nan as 'reward', which is no finite number",
    "said": "returned 3 in place of a text or messages",
}


def test_what_is_wrong_with_an_environment_is_said(tmp_path):
    (tmp_path / "world.py").write_text(FILE)
    names = [*PROBLEMS, "fine", "hangs", "also fine"]
    with Rewards(f"{tmp_path / 'world.py'}:World", seconds=3, workers=2) as worlds:
        assert worlds.has_turns and worlds.tools is None
        begun = worlds.begin([{"what": name} for name in names], 2)
        for name, why in zip(names, begun, strict=True):
            assert bool(why) == (name == "reset")
        said = {i: [(2 * i, "a", []), (2 * i + 1, "b", [])] for i in range(1, len(names))}
        found = worlds.step(said)
        problems = begun[:1] + [found[i] for i in range(1, 5)]
        for why, expected in zip(problems, PROBLEMS.values(), strict=True):
            assert re.search(expected, why), why
        assert [turn.messages for turn in found[5]] == ["afine", "bfine"]
        assert found[5][0].scores == {"reward": 1.0} and not found[5][0].done
        assert found[6] == "took more than 3 s"
        again = worlds.step({5: said[5], 7: said[7]})
        assert again[5][0].messages == "afine"  # of the other process
        assert found[7][0].messages == "aalso fine"
