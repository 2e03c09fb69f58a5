"""`llmq sample`: text from an exported model or a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from llmq.checkpoint import CheckpointReader
from llmq.checkpoint_store import find_checkpoint
from llmq.config import ModelConfig
from llmq.decode import Decoder
from llmq.dtypes import F32, DType, parse_dtype
from llmq.errors import ConfigError
from llmq.hf import HfWeights
from llmq.machine import Machine, choose_machine
from llmq.params import Param, weight_table
from llmq.presets import resolve_model
from llmq.runtime.device import HOST_SPEC
from llmq.runtime.host_device import HostDevice
from llmq.runtime.plan_device import PlanDevice
from llmq.tokenizer import Tokenizer, load_tokenizer
from llmq.weights import Weights


def choose_token(
    logits: np.ndarray,
    rng: np.random.Generator,
    *,
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
) -> int:
    """The next id from logits (V,). temperature 0: the most likely one.

    top_k: only the k most likely ids, 0: all. top_p: only the most likely ids that together have
    at least this probability. top_k is applied first, both after the temperature.
    """
    logits = logits.astype(np.float64)
    if temperature == 0:
        return int(logits.argmax())
    order = np.argsort(-logits, kind="stable")[: top_k or None]
    probabilities = np.exp((logits[order] - logits[order[0]]) / temperature)
    probabilities /= probabilities.sum()
    enough = int(np.searchsorted(np.cumsum(probabilities), top_p)) + 1
    probabilities = probabilities[:enough] / probabilities[:enough].sum()
    return int(order[rng.choice(len(probabilities), p=probabilities)])


class Sampler:
    """A model loaded for inference, for sequences of at most `positions` tokens."""

    def __init__(
        self,
        machine: Machine,
        config: ModelConfig,
        read: Callable[[Param], np.ndarray],
        positions: int,
        dtype: DType = F32,
    ):
        """read: host array of a parameter, in its shape."""
        self.config, self.positions = config, positions
        table = weight_table(config)
        plan = PlanDevice(machine.spec)
        decoder = Decoder(plan, config, Weights(plan, table, dtype, dtype), positions)
        decoder.forward(np.zeros(positions, np.int32), 0)
        self.dev = machine.open(plan.sizes())
        weights = Weights(self.dev, table, dtype, dtype)
        self.decoder = Decoder(self.dev, config, weights, positions)
        weights.load(read)

    def generate(
        self,
        prompt: list[int],
        max_new_tokens: int,
        rng: np.random.Generator,
        *,
        temperature: float,
        top_k: int = 0,
        top_p: float = 1.0,
    ) -> Iterator[int]:
        """New ids one after another, until an end-of-text id or the limit of positions."""
        tokens = np.array(prompt, np.int32)
        position = 0
        for _ in range(min(max_new_tokens, self.positions - len(prompt))):
            self.decoder.forward(tokens, position)
            position += len(tokens)
            logits = self.dev.download(self.decoder.logits)[0, : self.config.vocab_size]
            token = choose_token(logits, rng, temperature=temperature, top_k=top_k, top_p=top_p)
            if token in self.config.eos_token_ids:
                return
            yield token
            tokens = np.array([token], np.int32)


@contextmanager
def open_model(
    model: str,
) -> Iterator[tuple[ModelConfig, Callable[[Param], np.ndarray], Path | str]]:
    """Config, weight reader and tokenizer source of an exported model or a checkpoint."""
    step = find_checkpoint(Path(model), model) if Path(model).is_dir() else None
    if step is None:
        config, directory = resolve_model(model, from_scratch=False)
        with HfWeights(directory) as weights:
            weights.check(weight_table(config))
            yield config, weights.read, directory
        return
    with CheckpointReader(step) as reader:
        config, tokenizer = reader.manifest.model, reader.manifest.tokenizer
        reader.check(weight_table(config))
        if tokenizer is None:
            raise ConfigError(f"checkpoint '{step}' does not know its tokenizer: export it first")
        yield config, lambda p: reader.read("weights", p).reshape(p.shape), tokenizer


def fresh_weights(config: ModelConfig, seed: int) -> Callable[[Param], np.ndarray]:
    """A weight reader for a model that has not been trained."""
    table = weight_table(config)
    plan = PlanDevice(HOST_SPEC)
    Weights(plan, table, F32, F32)
    weights = Weights(HostDevice(plan.sizes()), table, F32, F32)
    weights.init(config, seed)
    return weights.read


def run_sample(
    model: str,
    *,
    prompt: str,
    max_new_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    seed: int,
    num_samples: int,
    device: str,
    model_dtype: str,
) -> None:
    """Print samples that continue the prompt."""
    machine = choose_machine(device, 1)
    with open_model(model) as (config, read, source):
        tokenizer: Tokenizer = load_tokenizer(source)
        ids = tokenizer.encode(prompt) or [first_token(config)]
        positions = min(len(ids) + max_new_tokens, config.max_positions)
        if len(ids) >= positions:
            raise ConfigError(
                f"the prompt has {len(ids)} tokens, but the model has {config.max_positions} "
                "positions: use a shorter prompt"
            )
        sampler = Sampler(machine, config, read, positions, parse_dtype(model_dtype))
    for sample in range(num_samples):
        rng = np.random.default_rng([seed, sample])
        new = sampler.generate(
            ids, max_new_tokens, rng, temperature=temperature, top_k=top_k, top_p=top_p
        )
        print(prompt + tokenizer.decode(list(new)), flush=True)
        if sample + 1 < num_samples:
            print("---")


def first_token(config: ModelConfig) -> int:
    """What an empty prompt begins with: the token between documents."""
    for token in (config.bos_token_id, config.eos_token_id):
        if token is not None:
            return token
    raise ConfigError("this model has neither a first nor an end-of-text token: give a prompt")
