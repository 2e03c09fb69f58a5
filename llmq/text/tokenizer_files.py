"""Changes of tokenizer files: for transformers' AutoTokenizer, and for new tokens.

The AutoTokenizer of an export must make the ids of the training. Some classes of transformers 5,
such as Qwen2Tokenizer, replace the normalizer and pre-tokenizer of tokenizer.json by their own;
PreTrainedTokenizerFast does not. For models of the type qwen2, AutoTokenizer ignores the class in
the file unless there is an auto_map. Such an export gets an auto_map and its Python module, which
transformers loads only with trust_remote_code.

New special tokens (`--add-tokens`) have the ids behind the last one, in a copy of the tokenizer's
files. `llmq/checkpoint/hf.py` adds rows of embedding and LM head for new tokens.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from llmq.base.errors import ConfigError, DataError
from llmq.base.worker import Bounds, in_worker
from llmq.data.identity import TokenizerId
from llmq.text.guarded import look_into
from llmq.text.tokenizer import (
    CONFIG_FILE,
    END_OF_TEXT,
    EXACT_CODE,
    EXACT_MAP,
    EXACT_MODULE,
    HfTokenizer,
    load_tokenizer,
    open_tokenizer,
    read_json,
)
from llmq.text.tokenizer_id import ids_of, tokenizer_of_folder

AS_IT_IS = "PreTrainedTokenizerFast"
_SAFE = {AS_IT_IS, "TokenizersBackend"}

# Program that encodes standard input with a folder's AutoTokenizer and prints the ids; without
# transformers it prints nothing. PyTorch is blocked: its import takes most of the time, and
# tokenizers do not need it.
_TRIAL = """
import json, sys
sys.modules["torch"] = None
try:
    from transformers import AutoTokenizer
except ImportError:
    sys.exit()
try:
    theirs = AutoTokenizer.from_pretrained(
        sys.argv[1], local_files_only=True, trust_remote_code=False
    )
    text = sys.stdin.buffer.read().decode()
    made = {"ids": theirs(text, add_special_tokens=False, verbose=False)["input_ids"]}
except Exception as error:  # the files may make the library raise anything
    made = {"error": " ".join(str(error).split())[:200]}
print(json.dumps(made))
"""
_TRIAL_SECONDS = 120  # long enough for a cold start from a slow disk

# Default special tokens of transformers' classes. An export writes these tokens into its config,
# because its class may have other defaults.
OWN_TOKENS = {
    "Qwen2Tokenizer": dict.fromkeys(("eos", "pad", "unk"), END_OF_TEXT),
    "GPT2Tokenizer": dict.fromkeys(("bos", "eos", "unk"), END_OF_TEXT),
    "GemmaTokenizer": {"bos": "<bos>", "eos": "<eos>", "pad": "<pad>", "unk": "<unk>"},
    "LlamaTokenizer": {"bos": "<s>", "eos": "</s>", "unk": "<unk>"},
}


def take_as_it_is(folder: Path, *, own: str | None = None, theirs: Path | None = None) -> None:
    """Change a model directory so that AutoTokenizer uses tokenizer.json unchanged, and so that
    tokenizer_config.json names EOS and BOS.

    own: class that transformers uses for this type of model, even if the file names another one.
    theirs: folder of a copied foreign tokenizer, which a process with bounds loads (DataError if it
    exceeds them); None for a tokenizer of llmq.
    """
    if not (folder / "tokenizer.json").is_file():
        return
    if theirs is None:
        _take_as_it_is(folder, own)
    else:
        look_into(folder, partial(_take_as_it_is, own=own), theirs)


def _take_as_it_is(folder: Path, own: str | None) -> None:
    try:
        config = read_json(folder / CONFIG_FILE)
        tokenizer = HfTokenizer(folder)
    except DataError:  # damaged files, which transformers cannot load either, stay unchanged
        return
    named = config.get("tokenizer_class")
    changed = dict(config)
    if tokenizer.is_qwen2 and (own or str(named)).startswith("Qwen2Tokenizer"):
        return
    if own is not None and "auto_map" not in config:
        (folder / EXACT_MODULE).write_text(EXACT_CODE)
        changed["auto_map"] = EXACT_MAP
    if named not in _SAFE:
        changed["tokenizer_class"] = AS_IT_IS
        tokens = OWN_TOKENS.get(str(named).removesuffix("Fast"), {})
        _name_tokens(changed, tokenizer, tokens)
    if named is None:
        ids = {"bos": tokenizer.bos_id, "eos": tokenizer.eos_id}
        tokens = {name: tokenizer.decode([i]) for name, i in ids.items() if i is not None}
        _name_tokens(changed, tokenizer, tokens)
    if changed != config:
        (folder / CONFIG_FILE).write_text(json.dumps(changed, indent=2, ensure_ascii=False) + "\n")


def _name_tokens(config: dict[str, Any], tokenizer: HfTokenizer, own: dict[str, str]) -> None:
    """Add special tokens to the config: tokens of `own` that the tokenizer has and that no file
    names."""
    named = read_json(tokenizer.folder / "special_tokens_map.json")
    for name, text in own.items():
        key = f"{name}_token"
        if key not in config and key not in named and len(tokenizer.encode(text)) == 1:
            config[key] = text


def difference(folder: Path, tokenizer: HfTokenizer, text: str) -> str | None:
    """Compare a model directory's AutoTokenizer with the tokenizer of the training on a text.
    Returns the difference as the end of a sentence; None if the ids are equal, or if transformers
    is not installed. AutoTokenizer runs in another process, without PyTorch."""
    expected = tokenizer.encode(text)  # encode first, because nothing bounds the trial
    made = _trial(folder, text)
    if made is None:
        return None
    if "error" in made:
        return f"cannot be loaded ({made['error']})"
    got = made["ids"]
    if got == expected:
        return None
    pairs = enumerate(zip(got, expected, strict=False))
    first = next((i for i, (a, b) in pairs if a != b), min(len(got), len(expected)))
    near = tokenizer.decode(expected[max(first - 3, 0) : first + 4])
    return (
        f"makes {len(got)} tokens of a text that has {len(expected)} in training, the first other "
        f"one near {near!r}"
    )


def _trial(folder: Path, text: str) -> dict[str, Any] | None:
    """The object that the program _TRIAL prints; None if its process fails."""
    command = [sys.executable, "-P", "-c", _TRIAL, str(folder)]
    try:
        done = subprocess.run(
            command, input=text.encode(), capture_output=True, timeout=_TRIAL_SECONDS
        )
        return json.loads(done.stdout.splitlines()[-1])
    except (OSError, ValueError, IndexError, subprocess.TimeoutExpired):
        return None


# ------------------------------------------------------------------------------------------------
# New tokens


_OLD_FILE = "added_tokens.json"  # ids by text


class NewTokens(NamedTuple):
    """New tokens, with the ids [first, first + count). made: identity of the tokenizer that has
    these tokens."""

    first: int
    count: int
    made: TokenizerId


def parse_tokens(text: str | None) -> tuple[str, ...]:
    """Tokens of --add-tokens, divided by commas. ConfigError for an empty or repeated token."""
    tokens = tuple(text.split(",")) if text else ()
    for token in tokens:
        if not token.strip() or tokens.count(token) > 1:
            raise ConfigError(f"--add-tokens: {token!r} is empty or given twice")
    return tokens


@contextmanager
def grown_tokenizer(spec: str | Path, tokens: Sequence[str]) -> Iterator[str]:
    """Path of a temporary copy of the tokenizer `spec` with `tokens` added; `spec` itself if there
    are no tokens. ConfigError for a token that the tokenizer has already, DataError for a tokenizer
    that cannot be loaded."""
    if not tokens:
        yield str(spec)
        return
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / f"{Path(spec).resolve().name}+{len(tokens)}"
        write = partial(_write_grown, spec, tuple(tokens), folder)
        if problem := in_worker(write, f"the tokenizer '{spec}'", Bounds()):
            raise ConfigError(f"--add-tokens: {problem}")
        yield str(folder)


def first_new_id(folder: Path) -> int:
    """Id that the first new token of a model directory gets: the number of its tokenizer's ids."""
    return look_into(folder, ids_of)


def new_tokens(folder: Path, tokens: Sequence[str]) -> NewTokens:
    """Ids that grown_tokenizer gives to new tokens of a model directory's tokenizer."""
    with grown_tokenizer(folder, tokens) as grown:
        made = tokenizer_of_folder(Path(grown))
    return NewTokens(first_new_id(folder), len(tokens), made)


def _write_grown(spec: str | Path, tokens: Sequence[str], folder: Path) -> str | None:
    """Write a copy of the tokenizer with new tokens into `folder`. Returns the problem with a
    token, or None."""
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
