"""Texts that a model continues, and `llmq sample`, which prints such."""

import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
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
from llmq.checkpoint.exports.source import open_source
from llmq.checkpoint.states import checkpoint_at
from llmq.model.inference import Decoder
from llmq.options.presets import find_directory, is_preset
from llmq.plan.checks import check_sizes
from llmq.run.run_paths import model_places
from llmq.runtime.machine import Machine, choose_machine
from llmq.runtime.plan_device import PlanDevice
from llmq.runtime.world import World
from llmq.state.params import Param, weight_table
from llmq.state.placement import resident
from llmq.state.weights import Weights
from llmq.text.chat_template import ChatTemplate, Message, Stop, end_of_turn, load_chat_template
from llmq.text.guarded import guarded_tokenizer, process_of
from llmq.text.tokenizer import ByteTokenizer, Tokenizer, streamed
from llmq.text.tokenizer_id import check_recorded


def choose_token(
    logits: np.ndarray,
    rng: np.random.Generator,
    *,
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
) -> int:
    """The next id from logits (V,). temperature 0: the most likely one. top_k: of the k most
    likely, 0: all; then top_p: of the most likely that have together this probability. LlmqError if
    a logit is not a number."""
    logits = logits.astype(np.float64)
    if not np.isfinite(logits).all():
        raise LlmqError(
            "the model's predictions are not finite numbers: its weights are damaged, use an "
            "earlier checkpoint"
        )
    if temperature == 0:
        return int(logits.argmax())
    order = np.argsort(-logits, kind="stable")[: top_k or None]
    probabilities = np.exp((logits[order] - logits[order[0]]) / temperature)
    probabilities /= probabilities.sum()
    if top_p < 1:
        enough = int(np.searchsorted(np.cumsum(probabilities), top_p)) + 1
        probabilities = probabilities[:enough] / probabilities[:enough].sum()
    return int(order[rng.choice(len(probabilities), p=probabilities)])


class Predictor:
    """Continues texts of at most `positions` tokens by what next_logits predicts."""

    def __init__(
        self,
        next_logits: Callable[[list[list[int]]], Sequence[np.ndarray]],
        config: ModelConfig,
        positions: int,
        world: World = World(),
    ):
        """next_logits: of texts of at least one id, F32 (V,) behind each. world: whose processes
        all ask for the same texts. ConfigError for a model that predicts no tokens."""
        if config.num_labels:
            raise ConfigError("the model has a score head, which predicts no tokens")
        self.next_logits, self.config, self.positions = next_logits, config, positions
        self._world = world

    def texts(
        self,
        prompts: list[list[int]],
        count: int,
        choose: Callable[[int, np.ndarray], int],
        stop: Collection[int | None] = (),
    ) -> Iterator[dict[int, int]]:
        """The next id of each text that goes on, by its number, at most `count` times. choose(i,
        logits): the next id of the i-th text. stop: ids that end a text, and are left out, beside
        the config's."""
        texts = dict(enumerate(map(list, prompts)))
        for _ in range(count):
            texts = {i: ids for i, ids in texts.items() if len(ids) < self.positions}
            if not texts:
                return
            pairs = list(zip(texts, self.next_logits([*texts.values()]), strict=True))
            # All processes go on with the same ids, whatever they make of the logits.
            chosen = self._world.on_first(lambda pairs=pairs: {i: choose(i, x) for i, x in pairs})
            ends = {*stop, *self.config.eos_token_ids}
            texts = {i: [*texts[i], new] for i, new in chosen.items() if new not in ends}
            yield {i: ids[-1] for i, ids in texts.items()}


class Sampler(Predictor, Closing):
    """A model loaded for inference, with a cache of keys and values of one text."""

    def __init__(
        self,
        machine: Machine,
        config: ModelConfig,
        fill: Callable[[Weights], None],
        positions: int,
        dtype: DType = F32,
    ):
        """fill: loads or initializes the weights. dtype: of weights and activations.

        LlmqError where the memory is too small.
        """
        super().__init__(self._next_logits, config, positions)
        table = weight_table(config)
        placement = resident(table, dtype)
        plan = PlanDevice(machine.spec)
        Decoder(plan, config, Weights(plan, table, placement), positions).rehearse()
        self.dev = machine.open(plan.sizes())
        weights = Weights(self.dev, table, placement)
        self.decoder = Decoder(self.dev, config, weights, positions)
        fill(weights)
        self._cached: list[int] = []  # the text that the cache is of

    def _next_logits(self, texts: list[list[int]]) -> list[np.ndarray]:
        """The logits of one text; one that goes on with a single token is read from there."""
        (text,) = texts
        position = len(text) - 1 if text[:-1] == self._cached else 0
        self._cached = list(text)
        return [self.decoder.forward(np.array(text[position:]), position)]

    def close(self) -> None:
        self.dev.close()


@contextmanager
def open_model(
    model: str, adapter: Path | None = None
) -> Iterator[tuple[ModelConfig, Callable[[Param], np.ndarray], Path | str]]:
    """Config, weight reader and tokenizer source of a model: a directory, a cached repository, a
    checkpoint, or a directory of some, of which the newest is meant; or adapters, with the model
    that these name. adapter: a PEFT directory to be added. LlmqError."""
    is_checkpoint = checkpoint_at(Path(model)) is not None
    directory = find_directory(model)
    if adapter is None and directory is not None and (directory / ADAPTER_CONFIG).is_file():
        model, adapter, base = str(directory), directory, None  # which the adapters name
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
        # Nothing is known of other makers' models, and some have fewer embeddings.
        if made is not None and not is_checkpoint:
            check_recorded(tokenizer, made, source.model.vocab_size, f"the model in '{tokenizer}'")
        is_bytes = isinstance(tokenizer, ByteTokenizer)
        began_as = source.began_as
        model = source.model if began_as is None else source.model.ending_at(began_as.ends)
        yield model, source.read, "bytes" if is_bytes else tokenizer


def _check_model(model: str) -> None:
    """ConfigError, with what to give instead, unless there is a model of this name."""
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
    """How a text is continued: by at most max_new_tokens; the rest is that of `choose_token`.

    seed: of the choice of tokens; each further sample of one seed has another text.
    """

    max_new_tokens: int = 200
    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 42

    def ids(
        self, predictor: Predictor, prompt: list[int], sample: int, stop: Collection[int | None]
    ) -> Iterator[int]:
        """New ids behind those of a prompt, one after another. sample: its number. stop: ids that
        end a text."""
        rng = np.random.default_rng([self.seed, sample])
        how = {name: getattr(self, name) for name in ("temperature", "top_k", "top_p")}
        choose = partial(choose_token, rng=rng, **how)
        some = predictor.texts([prompt], self.max_new_tokens, lambda _, x: choose(x), stop)
        for new in some:
            yield from new.values()

    def texts(
        self,
        predictor: Predictor,
        tokenizer: Tokenizer,
        prompt: str,
        sample: int = 0,
        seq_len: int | None = None,
    ) -> Iterator[str]:
        """Pieces of a continuation, as they come. sample: its number. seq_len: as of prompt_ids."""
        ids = prompt_ids(tokenizer, predictor.config, prompt, seq_len=seq_len)
        new = self.ids(predictor, ids, sample, {tokenizer.eos_id})
        return streamed(tokenizer, ids if prompt else [], new)

    def idle(self, num_samples: int) -> list[str]:
        """One line for every option that has no effect beside the others."""
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
    """The ids that the model is given of a text, at least one. ConfigError if that does not go.

    flag: that gave the text. seq_len: of the run whose memory is used; None: no run.
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
    **how: Any,
) -> None:
    """Print samples that continue the prompt as they come, separated by lines of three dashes; with
    `chat` replies to it, or without one to each line of standard input.

    adapter: as of open_model. system, chat_template: of a chat. how: fields of `Sampling`.
    """
    for flag, value in (("--system", system), ("--chat-template", chat_template)):
        if value is not None and not chat:
            raise ConfigError(f"{flag}: needs --chat")
    if chat and num_samples > 1 and not prompt:
        raise ConfigError("--num-samples: with --chat it needs --prompt")
    choice, prompt = Sampling(**how), clean_text(prompt)
    warn(*choice.idle(num_samples))
    machine = choose_machine(device, 1)
    with open_model(model, adapter) as (config, read, source):
        check_sizes(config, machine)
        tokenizer: Tokenizer = guarded_tokenizer(source)
        talk = _begin(model, tokenizer, system, chat_template) if chat else None
        if talk is None:
            ids = prompt_ids(tokenizer, config, prompt)
        else:
            ids = talk.ask(prompt) if prompt else []
        positions = len(ids) + choice.max_new_tokens if ids else POSITIONS
        positions = min(positions, config.max_positions)
        if ids:
            check_prompt(ids, config)
        sampler = Sampler(
            machine, config, lambda w: w.load(read), positions, parse_dtype(model_dtype)
        )
    with sampler:
        if not ids:
            _converse(talk, positions, choice, sampler)
            return
        for number in range(num_samples):
            if talk is None:
                _show(prompt, choice.texts(sampler, tokenizer, prompt, number))
            else:
                _reply(talk, ids, choice.ids(sampler, ids, number, talk.stop.ids))
            if number + 1 < num_samples:
                print("---")


def _show(prompt: str, pieces: Iterator[str]) -> None:
    """Print a text while it is made; nothing of it if it cannot even be begun."""
    print_text(prompt + next(pieces, ""))
    try:
        for piece in pieces:
            print_text(piece)
    finally:
        print(flush=True)


def clean_text(text: str | None) -> str | None:
    """The text with U+FFFD in place of bytes that are no text, which a shell may hand on, and of
    half characters of JSON; a warning tells of both."""
    whole = text and mended(text)
    if whole != text:
        warn_once(f"bytes that are no text: U+FFFD stands for each in {whole!r}")
    return whole


def check_prompt(ids: list[int], config: ModelConfig, flag: str = "--prompt") -> None:
    """ConfigError for a prompt that is too long, or of another tokenizer than the model's."""
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


def first_token(config: ModelConfig, flag: str = "--prompt") -> int:
    """The token with which an empty prompt begins."""
    config = config.without_foreign_tokens()
    for token in (config.bos_token_id, config.eos_token_id):
        if token is not None:
            return token
    raise ConfigError(f"{flag}: this model has no token that begins a text, give a prompt")


POSITIONS = 4096  # tokens of a conversation that is typed, if the model has as many


class Conversation:
    """Messages so far, and how they become a prompt for the next reply."""

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer, system: str | None) -> None:
        self.template, self.tokenizer = template, tokenizer
        self.process = process_of(tokenizer)
        self.stop = self.process.call(_stop, template)
        self.messages: list[Message] = []
        if system is not None:
            self.messages.append({"role": "system", "content": system})

    def ask(self, text: str) -> list[int]:
        """Add what the user says; the prompt for the reply. LlmqError if the template refuses."""
        messages = [*self.messages, {"role": "user", "content": text}]
        prompt = self.process.call(_prompt, self.template, messages)
        self.messages = messages
        return prompt

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


def _stop(tokenizer: Tokenizer, template: ChatTemplate) -> Stop:
    return end_of_turn(template, tokenizer)


def _prompt(tokenizer: Tokenizer, template: ChatTemplate, messages: list[Message]) -> list[int]:
    return tokenizer.encode(template.render(messages, add_generation_prompt=True).text)


def _begin(model: str, tokenizer: Tokenizer, system: str | None, given: str | None) -> Conversation:
    template = process_of(tokenizer).call(load_chat_template, given)
    if template is None:
        raise ConfigError(
            f"--chat: the tokenizer of '{model}' has no chat template: give --chat-template FILE, "
            "or leave --chat away"
        )
    return Conversation(template, tokenizer, clean_text(system))


def _reply(talk: Conversation, ids: list[int], new: Iterator[int]) -> None:
    talk.reply(ids, new, print_text)
    print(flush=True)


def _converse(talk: Conversation, positions: int, choice: Sampling, sampler: Sampler) -> None:
    """Replies to lines of standard input, until it ends."""
    lines = filter(str.strip, _typed() if sys.stdin.isatty() else sys.stdin)
    for number, line in enumerate(lines):
        ids = talk.ask(clean_text(line.rstrip("\r\n")))
        if len(ids) >= positions:
            raise ConfigError(
                f"the conversation has {len(ids)} tokens, and there is room for {positions}: begin "
                "another one"
            )
        _reply(talk, ids, _until_interrupted(choice.ids(sampler, ids, number, talk.stop.ids)))


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
