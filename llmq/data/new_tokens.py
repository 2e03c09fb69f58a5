"""Special tokens that a tokenizer does not have yet, behind its last ids: `--add-tokens`.

A copy of its files gets them, and everything else works with the copy. A model gets rows of
embedding and LM head for them (`llmq/checkpoint/hf.py`).
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

from llmq.base.errors import ConfigError
from llmq.base.worker import Bounds, in_worker
from llmq.data.identity import TokenizerId, tokenizer_of_folder
from llmq.data.tokenizer import CONFIG_FILE, HfTokenizer, load_tokenizer, open_tokenizer, read_json

_OLD_FILE = "added_tokens.json"  # ids by text


class NewTokens(NamedTuple):
    """The ids [first, first + count) of new tokens, and the tokenizer that has them."""

    first: int
    count: int
    made: TokenizerId


def parse_tokens(text: str | None) -> tuple[str, ...]:
    """The tokens of --add-tokens, divided by commas. ConfigError for an empty or repeated one."""
    tokens = tuple(text.split(",")) if text else ()
    for token in tokens:
        if not token.strip() or tokens.count(token) > 1:
            raise ConfigError(f"--add-tokens: {token!r} is empty or given twice")
    return tokens


@contextmanager
def grown_tokenizer(spec: str | Path, tokens: Sequence[str]) -> Iterator[str]:
    """The tokenizer `spec` with these tokens, as a folder for load_tokenizer; it without any.

    ConfigError for a token that it has, DataError for one that cannot be loaded.
    """
    if not tokens:
        yield str(spec)
        return
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / f"{Path(spec).resolve().name}+{len(tokens)}"
        write = partial(_write, spec, tuple(tokens), folder)
        if problem := in_worker(write, f"the tokenizer '{spec}'", Bounds()):
            raise ConfigError(f"--add-tokens: {problem}")
        yield str(folder)


def first_new_id(folder: Path) -> int:
    """The id of the first token that a model directory's tokenizer gets behind its own."""
    return load_tokenizer(folder).vocab_size


def new_tokens(folder: Path, tokens: Sequence[str]) -> NewTokens:
    """The ids that grown_tokenizer gives to tokens of a model directory's tokenizer."""
    with grown_tokenizer(folder, tokens) as grown:
        made = tokenizer_of_folder(Path(grown))
    return NewTokens(first_new_id(folder), len(tokens), made)


def _write(spec: str | Path, tokens: Sequence[str], folder: Path) -> str | None:
    """Write the copy; what is wrong with the tokens, if something is."""
    tokenizer = load_tokenizer(spec)
    if not isinstance(tokenizer, HfTokenizer):
        return f"the tokenizer '{spec}' has no files: make one with `llmq train-tokenizer`"
    from tokenizers import AddedToken

    inner = open_tokenizer(tokenizer.folder)
    for token in tokens:
        if inner.token_to_id(token) is not None:
            return f"{token} is a token of '{spec}' already: leave it out"
    tokenizer.save(folder)
    inner.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in tokens])
    ids = {token: inner.token_to_id(token) for token in tokens}
    if [*ids.values()] != list(range(tokenizer.vocab_size, tokenizer.vocab_size + len(tokens))):
        return f"the ids of '{spec}' have gaps, and new ones would not lie behind them"
    (folder / "tokenizer.json").write_text(inner.to_str(pretty=True) + "\n", "utf-8")
    for name in (CONFIG_FILE, "special_tokens_map.json", _OLD_FILE):
        if name != CONFIG_FILE and not (folder / name).is_file():
            continue
        content = read_json(folder / name)
        if name == _OLD_FILE:
            content |= ids
        else:
            names = content.get("additional_special_tokens") or []
            content["additional_special_tokens"] = [*names, *tokens]
        if "added_tokens_decoder" in content:
            flags = {"normalized": False, "special": True}
            flags |= dict.fromkeys(("lstrip", "rstrip", "single_word"), False)
            content["added_tokens_decoder"] |= {
                str(i): {"content": token, **flags} for token, i in ids.items()
            }
        text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
        (folder / name).write_text(text, "utf-8")
    return None
