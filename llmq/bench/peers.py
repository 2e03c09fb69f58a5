"""The facts of --peers: what other programs reach, and what nothing but products could."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llmq.base.errors import ConfigError
from llmq.base.json_file import read_json

# Every entry of --peers has these fields, beside speeds whose names begin with "tps".
_FACTS = {
    "runs": ("device", "system", "gpus", "model", "dtype", "batch", "accumulation", "tps"),
    "floors": ("device", "model", "seq_len"),
}
_PEERS_SEQ_LEN = 1024  # of runs that do not say


def read_facts(path: Path) -> dict[str, Any]:
    """The runs and floors of a --peers file; ConfigError if it is none."""
    try:
        content = read_json(path)
        facts = {kind: [dict(fact) for fact in content[kind]] for kind in _FACTS}
        for kind, names in _FACTS.items():
            for fact in facts[kind]:
                missing = [name for name in names if name not in fact]
                wrong = [n for n, v in fact.items() if n.startswith("tps") and not v > 0]
                wrong += [] if isinstance(fact.get("system", ""), str) else ["system"]
                if missing or wrong:
                    raise ValueError(f"wrong or missing in {fact}: {', '.join(missing + wrong)}")
        return facts
    except OSError as error:
        raise ConfigError(f"--peers: cannot read {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"--peers: {path} is not a list of runs and floors ({error!r})") from None


def peers_of(facts: dict[str, Any], device: str | None, run: dict[str, Any]) -> dict[str, float]:
    """Tokens per second of other programs on the same machine with the same batch, by name; the
    most of each. They had all memory."""
    if "memory-limit" in run["flags"]:
        return {}
    keys = ("gpus", "model", "dtype", "batch", "accumulation", "seq_len")
    found: dict[str, float] = {}
    for peer in facts["runs"]:
        if peer["device"] == device and _same({"seq_len": _PEERS_SEQ_LEN} | peer, run, keys):
            found[peer["system"]] = max(peer["tps"], found.get(peer["system"], 0))
    return found


def floor_of(facts: dict[str, Any], device: str | None, run: dict[str, Any]) -> float | None:
    """Tokens per second of nothing but products and attention, the products tuned if known."""
    for floor in facts["floors"]:
        same = _same(floor, run, ("model", "seq_len"))
        if same and floor["device"] == device and run["gpus"] == 1:
            name = f"tps_{run['dtype']}"
            best = floor.get(f"{name}_tuned", floor.get(name))
            # With an fp8 head none was made of tuned products.
            return max(best, floor.get(f"{name}_head_fp8", best)) if run["fp8_head"] else best
    return None


def _same(fact: dict[str, Any], run: dict[str, Any], keys: tuple[str, ...]) -> bool:
    return all(str(fact[key]).lower() == str(run[key]).lower() for key in keys)
