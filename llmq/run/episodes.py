"""Episodes of `llmq rl`: conversations of the model with environments, which replace plain samples
of prompts.

An environment answers each text of the model. The answer is appended to the text in the form of the
chat template, and is not trained. All episodes of a step take their turns together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from llmq.model.generator import Completion
from llmq.run.rewards import Rewards, Scores, Turn
from llmq.run.sampling import Conversation
from llmq.text.chat_template import Message
from llmq.text.chat_turns import CallForm, behind_reply, call_form
from llmq.text.tokenizer import Tokenizer

Generate = Callable[[int, Sequence[list[int]]], list[Completion]]
"""Function (turn, texts) that continues each text, given as ids. turn: number of the turn, from
0."""


@dataclass(slots=True, eq=False)
class Episode:
    """A conversation between model and environment. prompt: ids of the prompt. ids: all later ids.
    logprobs: log-probability of each later id, None for ids of the environment. finish: see
    `Completion`. messages: all messages, beginning with the record's. talk: the chat with the
    template; None: the prompt is a text, and answers are appended unchanged. scores: components of
    the reward, summed over turns."""

    prompt: list[int]
    messages: list[Message]
    talk: Conversation | None
    ids: list[int] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    finish: str | None = None
    scores: dict[str, float] = field(default_factory=dict)

    @property
    def text(self) -> list[int]:
        return self.prompt + self.ids

    def add(self, ids: Sequence[int], logprobs: Sequence[float | None]) -> None:
        """Append new ids of the model or of the environment."""
        self.ids += ids
        self.logprobs += logprobs


class Episodes:
    """Plays all episodes of a step; the episodes of a prompt form a group."""

    def __init__(
        self,
        environments: Rewards,
        tokenizer: Tokenizer,
        talk: Conversation | None,
        *,
        turns: int,
        positions: int,
    ):
        """talk: the chat for prompts that are messages, or None. turns: most turns of the model.
        positions: most tokens of an episode."""
        self._environments, self._tokenizer, self._talk = environments, tokenizer, talk
        self._turns, self._positions = turns, positions

    def play(
        self,
        prompts: Sequence[list[int]],
        count: int,
        records: Sequence[dict[str, Any]],
        generate: Generate,
    ) -> tuple[list[list[Episode]], list[Scores | str]]:
        """Play `count` episodes of each prompt. Returns the episodes, and for each prompt the
        components of the rewards, or the error of its environments in words."""
        begun = self._environments.begin(records, count)
        groups = [
            [self._begin(prompt, record["prompt"]) for _ in range(count)]
            for prompt, record in zip(prompts, records, strict=True)
        ]
        problems: dict[int, str] = {i: why for i, why in enumerate(begun) if why is not None}
        for turn in range(self._turns):
            active = self._active(groups, problems)
            if not active:
                break
            made = generate(turn, [episode.text for _, _, episode in active])
            said: dict[int, list[tuple[int, str, list[Any]]]] = {}
            for (number, key, episode), each in zip(active, made, strict=True):
                said.setdefault(number, []).append((key, *self._reply(episode, each)))
            answers = self._environments.step(said)
            problems |= {n: answer for n, answer in answers.items() if isinstance(answer, str)}
            last = turn == self._turns - 1
            for number, key, episode in active:
                if number not in problems:
                    place = [each[0] for each in said[number]].index(key)
                    self._answer(episode, answers[number][place], said[number][place][2], last)
        scores = [[each.scores for each in group] for group in groups]
        return groups, [problems.get(i, of_group) for i, of_group in enumerate(scores)]

    def _begin(self, ids: list[int], prompt: str | list[Message]) -> Episode:
        if isinstance(prompt, str):
            return Episode(ids, [{"role": "user", "content": prompt}], None)
        return Episode(ids, [*prompt], self._talk)

    def _active(
        self, groups: Sequence[Sequence[Episode]], problems: dict[int, str]
    ) -> list[tuple[int, int, Episode]]:
        """Return (number of the prompt, key of the episode, episode) for each unfinished
        episode."""
        return [
            (number, number * len(group) + i, episode)
            for number, group in enumerate(groups)
            for i, episode in enumerate(group)
            if number not in problems and episode.finish is None
        ]

    def _reply(self, episode: Episode, made: Completion) -> tuple[str, list[Any]]:
        """Add the model's turn to an episode; return its text and the tool calls in this text."""
        episode.add(made.ids, made.logprobs.tolist())
        text = self._tokenizer.decode(made.shown)
        episode.messages.append({"role": "assistant", "content": text})
        if made.finish == "length":
            episode.finish = "length"
        has_calls = episode.talk is not None and self._environments.tools is not None
        return text, self._form.calls(text) if has_calls else []

    @cached_property
    def _form(self) -> CallForm:
        return self._talk.process.call(_call_form, self._talk.template)

    def _answer(self, episode: Episode, turn: Turn, calls: Sequence[Any], last: bool) -> None:
        """Add an environment's answer to an episode. calls: the tool calls that the environment
        answers. last: True if no turn may follow."""
        for name, value in turn.scores.items():
            episode.scores[name] = episode.scores.get(name, 0.0) + value
        episode.messages += _answers(turn.messages, "tool" if calls else "user")
        if episode.finish is None and (turn.done or not turn.messages):
            episode.finish = "stop"
        if episode.finish is not None:
            return
        ids = self._behind(episode)
        if last or len(episode.text) + len(ids) >= self._positions:
            episode.finish = "length"
            return
        episode.add(ids, [None] * len(ids))

    def _behind(self, episode: Episode) -> list[int]:
        """Return the ids of the environment's last answer, up to the beginning of the next
        reply."""
        if episode.talk is None:
            text = "".join(m["content"] for m in _since_reply(episode.messages))
            return self._tokenizer.encode(text)
        end = self._tokenizer.decode(episode.ids[-1:])
        return episode.talk.process.call(_behind, episode.talk.template, episode.messages, end)


def _answers(said: str | list[Any], role: str) -> list[Message]:
    """Return an environment's answer as messages; texts become messages with this role."""
    several = [said] if isinstance(said, str) else said
    return [{"role": role, "content": m} if isinstance(m, str) else dict(m) for m in several if m]


def _since_reply(messages: Sequence[Message]) -> Sequence[Message]:
    """Return the messages after the model's last message."""
    last = max(i for i, message in enumerate(messages) if message["role"] == "assistant")
    return messages[last + 1 :]


def _call_form(_: Tokenizer, template: Any) -> CallForm:
    return call_form(template)


def _behind(
    tokenizer: Tokenizer, template: Any, messages: Sequence[Message], end: str
) -> list[int]:
    return tokenizer.encode(behind_reply(template, messages, end))
