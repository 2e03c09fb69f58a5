"""`llmq sample --prompts`: writes continuations of all prompts of a file, as JSON lines."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from llmq.arch.model_config import ModelConfig
from llmq.base.dtypes import parse_dtype
from llmq.base.errors import ConfigError, DataError, LlmqError, warn
from llmq.base.files import check_readable
from llmq.base.records import json_layout, json_record, mended, read_json
from llmq.model.generator import Completion
from llmq.plan.checks import check_sizes
from llmq.run.sampling import (
    SLOTS,
    Conversation,
    Sampler,
    Sampling,
    begin_chat,
    check_prompt,
    open_model,
    prompt_ids,
)
from llmq.runtime.machine import choose_machine
from llmq.text.chat_template import Message
from llmq.text.conversations import parse_conversation
from llmq.text.guarded import guarded_tokenizer
from llmq.text.tokenizer import Tokenizer, continuation

FLAG = "--prompts"


class Prompt(NamedTuple):
    """A prompt of a file. record: its record in the file. ids: the model's input. talk: the chat
    whose template made the ids; None for a text to continue."""

    record: dict[str, Any]
    ids: list[int]
    talk: Conversation | None


def run_prompts(
    model: str,
    *,
    adapter: Path | None,
    prompts: Path,
    num_samples: int,
    chat: bool,
    system: str | None,
    chat_template: str | None,
    device: str,
    model_dtype: str,
    base_dtype: str | None,
    kv_dtype: str | None,
    exact: bool = False,
    **how: Any,
) -> None:
    """Print a JSON line for each sample of each prompt of a file, in order. The line is the
    prompt's record with `text`, `finish` ("stop" or "length"), `tokens`, and `logprob`, a sum over
    tokens. Arguments: see `run_sample`; prompts: see `read_prompts`."""
    choice, machine = Sampling(**how), choose_machine(device, 1)
    warn(*choice.idle(num_samples))
    with open_model(model, adapter) as (config, read, source):
        check_sizes(config, machine)
        tokenizer = guarded_tokenizer(source)

        def begin() -> Conversation:
            return begin_chat(model, tokenizer, system, chat_template)

        given = read_prompts(prompts, tokenizer, config, chat=chat, begin=begin)
        for flag, value in (("--system", system), ("--chat-template", chat_template)):
            if value is not None and all(prompt.talk is None for prompt in given):
                raise ConfigError(f"{flag}: needs --chat, or a file of prompts with messages")
        positions = max(len(prompt.ids) for prompt in given) + choice.max_new_tokens
        sizes = (min(positions, config.max_positions), parse_dtype(model_dtype))
        slots = min(len(given) * num_samples, SLOTS)
        form = (*sizes, slots, base_dtype, kv_dtype, exact)
        sampler = Sampler(machine, config, lambda w: w.load(read), *form)
    ends = {tokenizer.eos_id}.union(*(p.talk.stop.ids for p in given if p.talk is not None))
    requests = choice.requests(config, [prompt.ids for prompt in given], num_samples, ends)
    with sampler:
        for index, made in in_order(sampler.generator.run(requests)):
            prompt = given[index // num_samples]
            text = continuation(tokenizer, prompt.ids, made.shown)
            if prompt.talk is not None and prompt.talk.stop.text is not None:
                text, *_ = text.split(prompt.talk.stop.text, 1)
            found = {"text": text, "finish": made.finish, "tokens": len(made.ids)}
            found["logprob"] = round(float(made.logprobs.sum(dtype=float)), 6)
            print(json.dumps(prompt.record | found, ensure_ascii=False), flush=True)


def read_prompts(
    path: Path,
    tokenizer: Tokenizer,
    config: ModelConfig,
    *,
    chat: bool,
    begin: Callable[[], Conversation],
) -> list[Prompt]:
    """Return the prompts of a file of records. A text `prompt` is continued, or with `chat`
    answered as a user's message; a list of messages (`messages` or `prompt`) is a conversation to
    answer. begin: function that makes a new chat. Raises ConfigError for a file without prompts,
    and LlmqError, which names the record, for a malformed or too long prompt."""
    try:
        check_readable(path)
        layout = json_layout(str(path))
    except OSError as error:
        raise ConfigError(f"{FLAG}: {error.strerror}: '{path}'") from error
    if layout is None:
        raise ConfigError(f"{FLAG}: '{path}' is no JSON: give a record on each line")
    found, talk = [], begin() if chat else None
    for item in read_json(str(path), layout, 0, 0):
        record = json_record(item.text, item.where)
        given = record.get("messages") or record.get("prompt")
        if not chat and isinstance(given, list):
            talk = talk or begin()
        try:
            of_chat = talk if chat or isinstance(given, list) else None
            ids = _ids(given, tokenizer, config, of_chat)
        except LlmqError as error:
            raise type(error)(f"{item.where}: {error}") from error
        found.append(Prompt(record, ids, of_chat))
    if not found:
        raise ConfigError(f"{FLAG}: '{path}' has no record")
    return found


def _ids(
    given: object, tokenizer: Tokenizer, config: ModelConfig, talk: Conversation | None
) -> list[int]:
    """Return the ids of a prompt. given: a text, or a list of messages. talk: the chat with the
    template for messages; None for a text to continue."""
    if isinstance(given, str) and talk is None:
        return prompt_ids(tokenizer, config, given, flag=FLAG)
    if isinstance(given, str):
        messages: list[Message] = [{"role": "user", "content": mended(given)}]
    elif isinstance(given, list):
        messages = parse_conversation({"messages": given}, "messages").messages
    else:
        raise DataError("neither 'prompt' is a text nor 'messages' is a list")
    ids = talk.prompt([*talk.messages, *messages])
    check_prompt(ids, config, FLAG)
    return ids


def in_order(found: Iterator[tuple[int, Completion]]) -> Iterator[tuple[int, Completion]]:
    """Sort completions (index, completion) by index; yield each completion as soon as all earlier
    completions have come."""
    held, following = {}, 0
    for index, made in found:
        held[index] = made
        while following in held:
            yield following, held.pop(following)
            following += 1
