"""Continues texts with a model, for `llmq sample` and for other callers."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from operator import index
from pathlib import Path
from typing import Any

import numpy as np

from llmq.arch.model_config import ModelConfig
from llmq.base.console import print_text
from llmq.base.dtypes import F32, DType, parse_dtype
from llmq.base.errors import ConfigError, LlmqError, warn, warn_once
from llmq.base.files import Closing
from llmq.base.records import mended
from llmq.checkpoint.export_files import ADAPTER_CONFIG
from llmq.checkpoint.exports.bitnet import multiplied
from llmq.checkpoint.exports.source import open_source
from llmq.checkpoint.states import checkpoint_at
from llmq.model.generator import Generator, NewToken, Request
from llmq.model.inference import placed_to_read, scoring_options
from llmq.options.presets import find_directory, is_preset
from llmq.plan.checks import check_sizes
from llmq.run.run_paths import model_places
from llmq.run.stages import Stages
from llmq.runtime.machine import Machine, choose_machine
from llmq.runtime.plan_device import PlanDevice
from llmq.state.params import Param, weight_table
from llmq.state.weights import Weights
from llmq.text.chat_template import ChatTemplate, Message, Stop, end_of_turn, load_chat_template
from llmq.text.guarded import guarded_tokenizer, process_of
from llmq.text.stop_strings import until
from llmq.text.tokenizer import ByteTokenizer, Tokenizer, streamed
from llmq.text.tokenizer_id import check_recorded


class Sampler(Closing):
    """A model loaded for inference, whose `generator` continues texts."""

    def __init__(
        self,
        machine: Machine,
        config: ModelConfig,
        fill: Callable[[Weights], None],
        positions: int,
        dtype: DType = F32,
        slots: int = 1,
        base_dtype: str | None = None,
        kv_dtype: str | None = None,
        exact: bool = False,
        mark: Callable[[str], None] = lambda part: None,
    ):
        """fill: function that loads or initializes the weights. positions: tokens of the longest
        text. dtype: format of weights and activations. slots: most texts at a time; the number is
        halved while memory is too small. base_dtype: format of the blocks' matrices, as in
        --base-dtype; None: dtype. kv_dtype: format of keys and values, "e4m3"; None: dtype.
        exact: True to make the bits of a text independent of other texts. mark: function called
        with the name of each part of the start when the part ends.

        Raises ConfigError for a model that predicts no tokens, and LlmqError if memory is too
        small.
        """
        if config.num_labels:
            raise ConfigError("the model has a score head, which predicts no tokens")
        self.config, table = config, weight_table(config)
        placement = placed_to_read(config, table, dtype, base_dtype)
        how = {"options": scoring_options(config, dtype, 1, 4, base_dtype).for_step}
        how |= {"kv_dtype": kv_dtype and parse_dtype(kv_dtype), "exact": exact}
        while True:
            blocks = slots * Generator.blocks_of(positions) + 1
            sizes = {"slots": slots, "positions": positions, "blocks": blocks, "rings": True}
            plan = PlanDevice(machine.spec)
            Generator(plan, config, Weights(plan, table, placement), **sizes, **how).rehearse()
            mark("plan")
            try:
                self.dev = machine.open(plan.sizes())
                break
            except LlmqError:  # too little memory: try again with fewer texts
                if slots == 1:
                    raise
                slots //= 2
        weights = Weights(self.dev, table, placement)
        self.generator = Generator(self.dev, config, weights, **sizes, **how)
        mark("memory")
        fill(weights)
        self.dev.synchronize()
        mark("weights")

    @contextmanager
    def texts(self, requests: Sequence[Request]) -> Iterator[list[Iterator[int]]]:
        """Return an iterator over the new ids of each text, without the id that ends the text.
        Reading one text generates the other texts, too. The iterators are valid within the
        context."""
        queues: list[deque[NewToken]] = [deque() for _ in requests]
        with closing(self.generator.stream(requests)) as tokens:

            def ids_of(queue: deque[NewToken]) -> Iterator[int]:
                finish = None
                while finish is None:
                    while not queue:
                        token = next(tokens)
                        queues[token.index].append(token)
                    token = queue.popleft()
                    finish = token.finish
                    if finish != "stop":
                        yield token.id

            yield [ids_of(queue) for queue in queues]

    def close(self) -> None:
        self.dev.close()


def requests_of(
    config: ModelConfig,
    prompts: list[list[int]],
    samples: int,
    *,
    seed: int = 0,
    stop: Collection[int | None] = (),
    **how: Any,
) -> list[Request]:
    """Return requests for `samples` samples of each prompt, ordered by prompt. seed: the seed from
    which each sample's own seed follows. stop: ids that end a text, besides the config's ids. how:
    other fields of `Request`."""
    ends = frozenset([*stop, *config.eos_token_ids]) - {None}
    return [
        Request(ids, **how, seed=seed_of(seed, place, sample), stop=ends)
        for place, ids in enumerate(prompts)
        for sample in range(samples)
    ]


def seed_of(seed: int, *places: int) -> int:
    """Return a request's own seed. seed: the common seed of many requests. places: indices that
    identify the request among these requests."""
    return int(np.random.SeedSequence([seed, *places]).generate_state(1, np.uint64)[0] >> 1)


@contextmanager
def open_model(
    model: str, adapter: Path | None = None
) -> Iterator[tuple[ModelConfig, Callable[[Param], np.ndarray], Path | str]]:
    """Yield config, weight reader and tokenizer source of a model: a directory, a cached
    repository, a checkpoint, the newest checkpoint of a directory, or adapters with their base
    model. adapter: PEFT directory of adapters to add to the model. Raises LlmqError if the model
    cannot be opened."""
    is_checkpoint = checkpoint_at(Path(model)) is not None
    directory = find_directory(model)
    if adapter is None and directory is not None and (directory / ADAPTER_CONFIG).is_file():
        model, adapter, base = str(directory), directory, None  # the adapters name their base
    else:
        base = model
    if is_checkpoint and adapter is not None:
        raise ConfigError(
            f"--adapter: needs a model, and '{model}' is a checkpoint: `llmq export` it first"
        )
    if not is_checkpoint and base is not None:
        _check_model(model)
    merged = {} if adapter is None else {"base": base, "merge": True}
    with open_source(adapter or model, force=True, **merged) as source:
        tokenizer, made = source.tokenizer or source.folder, source.origin["made"]
        if source.adapters is not None:
            raise LlmqError(
                f"checkpoint '{model}' holds adapters of '{source.origin['base'].name}' only: "
                "`llmq export` it, and give what it writes as --adapter"
            )
        if tokenizer is None:
            raise ConfigError(
                f"checkpoint '{model}' does not know its tokenizer: `llmq export` it, and copy the "
                "tokenizer's files into that directory"
            )
        # Only llmq's exports record their tokenizer. Other models may have fewer embeddings than
        # ids.
        if made is not None and not is_checkpoint:
            check_recorded(tokenizer, made, source.model.vocab_size, f"the model in '{tokenizer}'")
        is_bytes = isinstance(tokenizer, ByteTokenizer)
        began_as = source.began_as
        model = source.model if began_as is None else source.model.ending_at(began_as.ends)
        yield model, multiplied(source), "bytes" if is_bytes else tokenizer


def _check_model(model: str) -> None:
    """Raise ConfigError, with advice, unless a model of this name exists."""
    directory = find_directory(model)
    if directory is not None and (directory / "config.json").is_file():
        return
    if directory is not None and (directory / ADAPTER_CONFIG).is_file():
        raise ConfigError(
            f"MODEL: {model!r} holds adapters, and there are others as --adapter: give the model"
        )
    problem = "is neither a directory nor a repository in the Hugging Face cache"
    if Path(model).name == model:
        places = ", ".join(str(place) for place in model_places(model))
        problem += f", and none of {places} has a model"
    if directory is not None:
        problem = "holds neither a model nor a complete checkpoint"
    elif is_preset(model):
        problem = "is a preset, which has no weights"
    raise ConfigError(
        f"MODEL: {model!r} {problem}: give the directory of a model, such as the output/NAME of a "
        "run, or of its checkpoints, such as ckpt/NAME"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Options of sampling, see `Request`. seed: the seed from which each sample's own seed
    follows."""

    max_new_tokens: int = 200
    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 42

    def requests(
        self,
        config: ModelConfig,
        prompts: list[list[int]],
        samples: int,
        stop: Collection[int | None],
    ) -> list[Request]:
        """Call requests_of() with the options of this object."""
        return requests_of(config, prompts, samples, stop=stop, **asdict(self))

    def idle(self, num_samples: int) -> list[str]:
        """Return lines about options that have no effect together with the other options."""
        if self.temperature > 0:
            return []
        idle = {
            f"--top-k {self.top_k}": self.top_k > 0,
            f"--top-p {self.top_p}": self.top_p < 1,
            f"--num-samples {num_samples}": num_samples > 1,
        }
        reason = "has no effect with --temperature 0: the likeliest token is always taken"
        return [f"{flag} {reason}" for flag, given in idle.items() if given]


def prompt_ids(
    tokenizer: Tokenizer,
    config: ModelConfig,
    prompt: str,
    *,
    flag: str = "--prompt",
    seq_len: int | None = None,
) -> list[int]:
    """Return the ids of a prompt's text as input of the model, at least one id. Raises ConfigError
    for a prompt that does not fit.

    flag: the option that gave the text, for errors. seq_len: --seq-len of the run whose memory is
    used; None: no run.
    """
    ids = [*tokenizer.added[0], *tokenizer.encode(clean_text(prompt))] or [
        first_token(config, flag)
    ]
    if seq_len is not None and len(ids) >= seq_len:
        raise ConfigError(
            f"{flag}: {prompt[:20]!r} has {len(ids)} tokens, --seq-len is {seq_len}: use a shorter "
            "one"
        )
    check_prompt(ids, config, flag)
    return ids


def run_sample(
    model: str,
    *,
    adapter: Path | None = None,
    prompt: str,
    num_samples: int,
    chat: bool,
    system: str | None,
    chat_template: str | None,
    device: str,
    model_dtype: str,
    base_dtype: str | None,
    kv_dtype: str | None,
    exact: bool = False,
    verbose: bool,
    **how: Any,
) -> None:
    """Print continuations of the prompt as they are generated, separated by lines of three dashes.
    chat: True to print replies to the prompt, or to each line of standard input. adapter: see
    open_model. system: system message of the chat. chat_template: file of the chat's template.
    verbose: True to print the duration of each part of the start. how: fields of `Sampling`."""
    stages = Stages(printed=verbose)
    stages.mark("imports")
    for flag, value in (("--system", system), ("--chat-template", chat_template)):
        if value is not None and not chat:
            raise ConfigError(f"{flag}: needs --chat")
    for flag, given in (("--num-samples", num_samples > 1), ("--verbose", verbose)):
        if chat and given and not prompt:
            raise ConfigError(f"{flag}: with --chat it needs --prompt")
    choice, prompt = Sampling(**how), clean_text(prompt)
    warn(*choice.idle(num_samples))
    machine = choose_machine(device, 1)
    stages.mark("device")
    with open_model(model, adapter) as (config, read, source):
        check_sizes(config, machine)
        tokenizer: Tokenizer = guarded_tokenizer(source)
        talk = begin_chat(model, tokenizer, system, chat_template) if chat else None
        if talk is None:
            ids = prompt_ids(tokenizer, config, prompt)
        else:
            ids = talk.ask(prompt) if prompt else []
        longest = len(ids) + choice.max_new_tokens if ids else POSITIONS
        if ids:
            check_prompt(ids, config)
        positions, slots = min(longest, config.max_positions), min(num_samples, SLOTS)
        stages.mark("model and tokenizer")
        form = (positions, parse_dtype(model_dtype), slots, base_dtype, kv_dtype, exact)
        sampler = Sampler(machine, config, lambda w: w.load(read), *form, stages.mark)
    with sampler:
        if not ids:
            _converse(talk, positions, choice, sampler)
            return
        stop = [tokenizer.eos_id] if talk is None else talk.stop.ids
        requests = choice.requests(config, [ids], num_samples, stop)
        with sampler.texts(requests) as texts:
            for number, new in enumerate(map(stages.first, texts)):
                _say(talk, tokenizer, prompt, ids, new)
                if number + 1 < num_samples:
                    print("---")


def _say(
    talk: Conversation | None,
    tokenizer: Tokenizer,
    prompt: str,
    ids: list[int],
    new: Iterator[int],
) -> None:
    """Print the reply in a conversation, or the continued text if there is no conversation. ids:
    ids of the prompt. new: the generated ids."""
    if talk is None:
        _show(prompt, streamed(tokenizer, ids if prompt else [], new))
    else:
        _reply(talk, ids, new)


def _show(prompt: str, pieces: Iterator[str]) -> None:
    """Print a text while it is generated; print nothing if generating the first piece fails."""
    print_text(prompt + next(pieces, ""))
    try:
        for piece in pieces:
            print_text(piece)
    finally:
        print(flush=True)


def clean_text(text: str | None) -> str | None:
    """Return the text with U+FFFD in place of invalid bytes (from a shell) and of lone surrogates
    (from JSON). Warns if anything was replaced."""
    whole = text and mended(text)
    if whole != text:
        warn_once(f"bytes that are no text: U+FFFD stands for each in {whole!r}")
    return whole


def check_prompt(ids: list[int], config: ModelConfig, flag: str = "--prompt") -> None:
    """Raise ConfigError for a prompt that is too long, or has ids outside the model's
    vocabulary."""
    if len(ids) >= config.max_positions:
        raise ConfigError(
            f"{flag}: it has {len(ids)} tokens, but the model has {config.max_positions} "
            "positions: use a shorter one"
        )
    if max(ids) >= config.vocab_size:
        raise ConfigError(
            f"{flag}: its token {max(ids)} is outside the model's vocabulary of "
            f"{config.vocab_size}: the tokenizer does not belong to the model"
        )


def known_tokenizer(source: str | None) -> Tokenizer:
    """Return the tokenizer of a run. Raises LlmqError if the tokenizer is unknown."""
    if source is None:
        raise LlmqError(
            "it is not known which tokenizer made the training data, so there is no text of "
            "its ids: `llmq tokenize` notes it beside the token files"
        )
    return guarded_tokenizer(source)


def ids_of(
    prompt: str | Sequence[int], tokenizer: Tokenizer | None, config: ModelConfig, seq_len: int
) -> list[int]:
    """Return the ids of a caller's prompt (a text, or ids) in a run with this --seq-len. Raises
    ConfigError for a prompt that does not fit."""
    if isinstance(prompt, str):
        return prompt_ids(tokenizer, config, prompt, seq_len=seq_len)
    ids = [index(id_) for id_ in prompt]
    if not 0 < len(ids) < seq_len:
        raise ConfigError(
            f"prompts: one has {len(ids)} tokens, there have to be from 1 to {seq_len - 1}, less "
            "than --seq-len"
        )
    if min(ids) < 0:
        raise ConfigError(f"prompts: {min(ids)} is no token")
    check_prompt(ids, config, "prompts")
    return ids


def first_token(config: ModelConfig, flag: str = "--prompt") -> int:
    """Return the token that stands for an empty prompt. Raises ConfigError if the model has
    none."""
    config = config.without_foreign_tokens()
    for token in (config.bos_token_id, config.eos_token_id):
        if token is not None:
            return token
    raise ConfigError(f"{flag}: this model has no token that begins a text, give a prompt")


SLOTS = 64  # texts that are continued at the same time
POSITIONS = 4096  # most tokens of a typed conversation; fewer if the model has fewer positions


class Conversation:
    """Holds the messages so far, and the chat template that turns messages into a prompt."""

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer, system: str | None) -> None:
        self.template, self.tokenizer = template, tokenizer
        self.process = process_of(tokenizer)
        self.stop = self.process.call(_stop, template)
        self.messages: list[Message] = []
        if system is not None:
            self.messages.append({"role": "system", "content": system})

    def prompt(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> list[int]:
        """Return the ids of messages, up to the beginning of the next reply. Raises LlmqError if
        the template refuses the messages."""
        return self.process.call(_prompt, self.template, messages, tools)

    def text(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        """Return the text into which the template turns messages. Raises the errors of `prompt`."""
        return self.process.call(_text, self.template, messages, add_generation_prompt)

    def ask(self, text: str) -> list[int]:
        """Add a user's message; return the prompt of the reply. Raises the errors of `prompt`."""
        messages = [*self.messages, {"role": "user", "content": text}]
        prompt = self.prompt(messages)
        self.messages = messages
        return prompt

    def reply(self, prompt: list[int], new: Iterator[int], say: Callable[[str], None]) -> None:
        """Pass the reply's text to `say` in pieces, up to the end of the turn, and add the reply to
        the messages. prompt: ids of the prompt. new: ids of the reply."""
        text = ""
        stops = [] if self.stop.text is None else [self.stop.text]
        for piece in until(streamed(self.tokenizer, prompt, new), stops):
            say(piece)
            text += piece
        self.messages.append({"role": "assistant", "content": text})


def _stop(tokenizer: Tokenizer, template: ChatTemplate) -> Stop:
    return end_of_turn(template, tokenizer)


def _prompt(
    tokenizer: Tokenizer,
    template: ChatTemplate,
    messages: Sequence[Message],
    tools: Sequence[Any] | None,
) -> list[int]:
    text = template.render(messages, tools=tools, add_generation_prompt=True).text
    return tokenizer.encode(text)


def _text(
    _: Tokenizer, template: ChatTemplate, messages: Sequence[Message], add_generation_prompt: bool
) -> str:
    return template.render(messages, add_generation_prompt=add_generation_prompt).text


def conversation(
    tokenizer: Tokenizer, given: str | None, system: str | None = None
) -> Conversation | None:
    """Return a conversation with the chat template of the file `given`, or with the tokenizer's
    template if `given` is None. Returns None without any template."""
    template = process_of(tokenizer).call(load_chat_template, given)
    return template and Conversation(template, tokenizer, clean_text(system))


def begin_chat(
    model: str, tokenizer: Tokenizer, system: str | None, given: str | None
) -> Conversation:
    """Return a conversation with the model of this name. given: file of a chat template; None: the
    tokenizer's template. Raises ConfigError if there is no template."""
    talk = conversation(tokenizer, given, system)
    if talk is None:
        raise ConfigError(
            f"--chat: the tokenizer of '{model}' has no chat template: give --chat-template FILE, "
            "or leave --chat away"
        )
    return talk


def _reply(talk: Conversation, ids: list[int], new: Iterator[int]) -> None:
    talk.reply(ids, new, print_text)
    print(flush=True)


def _converse(talk: Conversation, positions: int, choice: Sampling, sampler: Sampler) -> None:
    """Print a reply to each line of standard input, until the input ends."""
    lines = filter(str.strip, _typed() if sys.stdin.isatty() else sys.stdin)
    for number, line in enumerate(lines):
        ids = talk.ask(clean_text(line.rstrip("\r\n")))
        if len(ids) >= positions:
            raise ConfigError(
                f"the conversation has {len(ids)} tokens, and there is room for {positions}: begin "
                "another one"
            )
        how = replace(choice, seed=seed_of(choice.seed, number))
        requests = how.requests(sampler.config, [ids], 1, talk.stop.ids)
        with sampler.texts(requests) as (new,):
            _reply(talk, ids, _until_interrupted(new))


def _typed() -> Iterator[str]:
    """Yield the lines that the user types at a terminal, with line editing if Python has it."""
    with suppress(ImportError):
        import readline  # noqa: F401 (input uses it)
    print("A line is a message. Ctrl-C ends a reply, Ctrl-D the conversation.")
    with suppress(EOFError):
        while True:
            yield input("> ")


def _until_interrupted(new: Iterator[int]) -> Iterator[int]:
    with suppress(KeyboardInterrupt):
        yield from new
