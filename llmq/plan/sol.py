"""Speed of light: tokens per second at a card's peak arithmetic."""

from dataclasses import dataclass

from llmq.arch.model_config import ModelConfig
from llmq.arch.mtp import block_config
from llmq.options.adapters import Adapters, all_adapted
from llmq.options.cards import CARDS


@dataclass(frozen=True, slots=True, kw_only=True)
class FlopsPerToken:
    """FLOPs per trained token, by part; recomputation does not count."""

    blocks: int
    lm_head: int
    attention: int


def flops_per_token(
    config: ModelConfig, seq_len: int, adapters: Adapters | None = None, mtp_part: float = 0.0
) -> FlopsPerToken:
    """FLOPs by llm.q's formula: forward and two backward products; attention counts its causal
    half. Windows leave their share of this half; documents within a sequence count as one; the
    state updates of gated delta nets count as attention. With adapters a frozen matrix has one
    backward product; so has the LM head that multi-token prediction shares. If no matrix has
    adapters, only the head for multi-token prediction has a backward pass. mtp_part: part of the
    sequences that train this head."""
    L = config.num_layers
    used = sum(matrix.used for layer in range(L) for matrix in config.matrices(layer))
    halves = [half for layer in range(L) for half in config.halves(layer)]
    attentions = [half.sizes for half in halves if "window" in half.sizes]
    pairs = 0  # query channels times twice the mean number of visible keys
    for its in attentions:
        window, heads = min(its["window"] or seq_len, seq_len), its["heads"]
        pairs += heads.query * heads.channels * window * (2 * seq_len - window) // seq_len
    products = 6 if adapters is None else 4 if adapters.targets else 2
    head = 6 if adapters is None or _trains_head(config, adapters) else products
    passes = 3 if products > 2 else 1
    found = FlopsPerToken(
        blocks=products * used + 6 * _adapter_weights(config, adapters),
        lm_head=head * config.outputs * config.hidden_size,
        attention=passes * (2 * pairs + sum(half.flops for half in halves)),
    )
    if not mtp_part:
        return found
    ahead = flops_per_token(block_config(config), seq_len)
    own = ahead.blocks + 6 * 2 * config.hidden_size**2
    return FlopsPerToken(
        blocks=found.blocks + int(mtp_part * own),
        lm_head=found.lm_head + int(mtp_part * 4 * config.outputs * config.hidden_size),
        attention=found.attention + int(mtp_part * ahead.attention),
    )


def _trains_head(config: ModelConfig, adapters: Adapters) -> bool:
    return ("embeddings" if config.tied_embeddings else "head") in adapters.train


def _adapter_weights(config: ModelConfig, adapters: Adapters | None) -> int:
    if adapters is None:
        return 0
    total = 0
    for block, matrix in all_adapted(config, adapters):
        chosen = block == "embed"  # an embedding selects rows instead of multiplying
        rows = (0 if chosen else p.stop - p.start for p in matrix.parts)
        sizes = (p.rank * (n + matrix.shape[1]) for p, n in zip(matrix.parts, rows, strict=True))
        total += sum(sizes) * matrix.active // matrix.groups
    return total


def peaks(name: str) -> tuple[float, float, float, float] | None:
    """TF32, BF16, FP8 and INT8 peaks of a card in TFLOP/s, by driver name; None if unknown."""
    card = CARDS.get(name)
    return None if card is None else (card.tf32, card.bf16, card.fp8, card.int8)


def nanoseconds_per_token(
    flops: FlopsPerToken,
    blocks_peak: float,
    head_peak: float,
    attention_peak: float,
    world_size: int = 1,
) -> int:
    """Time per token by llm.q's integer arithmetic: each part in whole nanoseconds; peaks in
    TFLOP/s."""
    parts = (
        (flops.blocks, blocks_peak),
        (flops.lm_head, head_peak),
        (flops.attention, attention_peak),
    )
    return sum(int((f / 1000) / peak) for f, peak in parts) // world_size
