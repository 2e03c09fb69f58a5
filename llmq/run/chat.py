"""`llmq sample --chat`: talks with a model, in the words of its chat template."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from llmq.base.console import print_text
from llmq.base.dtypes import parse_dtype
from llmq.base.errors import ConfigError, warn
from llmq.data.chat_template import ChatTemplate, Message, end_of_turn, load_chat_template
from llmq.data.detokenize import streamed
from llmq.data.tokenizer import Tokenizer, load_tokenizer
from llmq.plan.checks import check_sizes
from llmq.run.sampling import Sampler, Sampling, check_prompt, clean_text, open_model
from llmq.runtime.machine import choose_machine

POSITIONS = 4096  # tokens of a conversation that is typed, if the model has as many

Generate = Callable[[list[int], int], Iterator[int]]
"""Prompt and number of the reply to new ids, one after the other."""


class Conversation:
    """Messages so far, and how they become a prompt for the next reply."""

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer, system: str | None) -> None:
        self.template, self.tokenizer = template, tokenizer
        self.stop = end_of_turn(template, tokenizer)
        self.messages: list[Message] = []
        if system is not None:
            self.messages.append({"role": "system", "content": system})

    def ask(self, text: str) -> list[int]:
        """Add what the user says; the prompt for the reply. LlmqError if the template refuses."""
        messages = [*self.messages, {"role": "user", "content": text}]
        prompt = self.template.render(messages, add_generation_prompt=True).text
        self.messages = messages
        return self.tokenizer.encode(prompt)

    def reply(self, prompt: list[int], new: Iterator[int], say: Callable[[str], None]) -> None:
        """Say the reply as it comes, up to the end of the turn, and add it to the messages.

        A piece that may be the beginning of the end is held back.
        """
        text, said = "", 0
        for piece in streamed(self.tokenizer, prompt, new):
            text += piece
            if self._end(text) is not None:
                break
            ready = len(text) - self._held_back(text)
            if ready > said:
                say(text[said:ready])
                said = ready
        text = text[: self._end(text)]
        say(text[said:])
        self.messages.append({"role": "assistant", "content": text})

    def _end(self, text: str) -> int | None:
        at = -1 if self.stop.text is None else text.find(self.stop.text)
        return at if at >= 0 else None

    def _held_back(self, text: str) -> int:
        """Characters at the end of a text with which the end of the turn may begin."""
        stop = self.stop.text or ""
        lengths = range(min(len(stop), len(text)), 0, -1)
        return next((n for n in lengths if text.endswith(stop[:n])), 0)


def run_chat(
    model: str,
    *,
    adapter: Path | None = None,
    prompt: str,
    system: str | None,
    chat_template: str | None,
    num_samples: int,
    device: str,
    model_dtype: str,
    **how: Any,
) -> None:
    """Print replies to the prompt, separated by lines of three dashes.

    Without a prompt each line of standard input is a message of one conversation. adapter: as of
    open_model. how: fields of `Sampling`.
    """
    choice = Sampling(**how)
    if num_samples > 1 and not prompt:
        raise ConfigError("--num-samples: with --chat it needs --prompt")
    warn(choice.idle(num_samples))
    machine = choose_machine(device, 1)
    with open_model(model, adapter) as (config, read, source):
        check_sizes(config, machine)
        talk = _begin(model, load_tokenizer(source), system, chat_template)
        ids = talk.ask(clean_text(prompt)) if prompt else []
        positions = len(ids) + choice.max_new_tokens if ids else POSITIONS
        positions = min(positions, config.max_positions)
        if ids:
            check_prompt(ids, config)
        dtype = parse_dtype(model_dtype)
        sampler = Sampler(machine, config, lambda w: w.load(read), positions, dtype)

    def generate(ids: list[int], number: int) -> Iterator[int]:
        return choice.ids(sampler, ids, number, talk.stop.ids)

    with sampler:
        if prompt:
            _answer(talk, ids, num_samples, generate)
        else:
            _converse(talk, positions, generate)


def _begin(model: str, tokenizer: Tokenizer, system: str | None, given: str | None) -> Conversation:
    template = load_chat_template(tokenizer, given)
    if template is None:
        raise ConfigError(
            f"--chat: the tokenizer of '{model}' has no chat template: give --chat-template FILE, "
            "or leave --chat away"
        )
    return Conversation(template, tokenizer, clean_text(system))


def _answer(talk: Conversation, ids: list[int], count: int, generate: Generate) -> None:
    """Several replies to one question."""
    for number in range(count):
        talk.reply(ids, generate(ids, number), print_text)
        print(flush=True)
        if number + 1 < count:
            print("---")


def _converse(talk: Conversation, positions: int, generate: Generate) -> None:
    """Replies to lines of standard input, until it ends."""
    lines = filter(str.strip, _typed() if sys.stdin.isatty() else sys.stdin)
    for number, line in enumerate(lines):
        ids = talk.ask(clean_text(line.rstrip("\r\n")))
        if len(ids) >= positions:
            raise ConfigError(
                f"the conversation has {len(ids)} tokens, and there is room for {positions}: begin "
                "another one"
            )
        talk.reply(ids, _until_interrupted(generate(ids, number)), print_text)
        print(flush=True)


def _typed() -> Iterator[str]:
    """Lines of a terminal, which can be edited where Python has readline."""
    with suppress(ImportError):
        import readline  # noqa: F401 (input uses it)
    print("A line is a message. Ctrl-C ends a reply, Ctrl-D the conversation.")
    with suppress(EOFError):
        while True:
            yield input("> ")


def _until_interrupted(new: Iterator[int]) -> Iterator[int]:
    with suppress(KeyboardInterrupt):
        yield from new
