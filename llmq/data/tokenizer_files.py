"""The files of a Hugging Face tokenizer, as an object of the tokenizers library."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmq.base.errors import DataError
from llmq.base.files import check_readable

if TYPE_CHECKING:
    import tokenizers

END_OF_TEXT = "<|endoftext|>"


def open_tokenizer(folder: Path) -> tokenizers.Tokenizer:
    """Of tokenizer.json, else of vocab.json and merges.txt. DataError if it cannot be read."""
    from tokenizers import Tokenizer

    fast, vocab, merges = (folder / n for n in ("tokenizer.json", "vocab.json", "merges.txt"))
    try:
        for path in (fast, vocab, merges):
            if path.exists():
                check_readable(path)
        if fast.exists():
            return Tokenizer.from_file(str(fast))
        if vocab.exists() and merges.exists():
            return _from_vocab_and_merges(folder)
    except DataError:
        raise
    except BaseException as error:
        # The library raises plain Exception for whatever it cannot read, and what its Rust did not
        # expect is not even that.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise DataError(f"cannot read the tokenizer in '{folder}': {error}") from error
    raise DataError(
        f"'{folder}' has neither tokenizer.json nor vocab.json with merges.txt: write them there "
        "with transformers' AutoTokenizer.save_pretrained, or copy them from the model"
    )


# How the tokenizers that are saved as vocab.json and merges.txt cut a text into words. For GPT-2
# the library knows the expression.
QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def new_byte_level_bpe(model: tokenizers.models.BPE | None = None) -> tokenizers.Tokenizer:
    """A BPE over bytes, of texts that are cut as Qwen2's are. model: None: without vocabulary."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    tokenizer = Tokenizer(models.BPE() if model is None else model)
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN2_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _from_vocab_and_merges(folder: Path) -> tokenizers.Tokenizer:
    """The byte-level BPE of GPT-2 or Qwen2, from its two old files and its added tokens."""
    from tokenizers import models, pre_tokenizers

    config = read_json(folder / "tokenizer_config.json")
    name = config.get("tokenizer_class", "GPT2Tokenizer").removesuffix("Fast")
    model = models.BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt"))
    tokenizer = new_byte_level_bpe(model)
    if name == "GPT2Tokenizer":
        tokenizer.normalizer = None
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    elif name != "Qwen2Tokenizer":
        raise DataError(
            f"'{folder}' has no tokenizer.json, and vocab.json of a {name} cannot be used: write "
            "tokenizer.json there with transformers' AutoTokenizer.save_pretrained"
        )
    _add_tokens(tokenizer, folder, config)
    return tokenizer


def _add_tokens(tokenizer: tokenizers.Tokenizer, folder: Path, config: dict[str, Any]) -> None:
    """Add the tokens of tokenizer_config.json and added_tokens.json under the ids they have there.

    The library numbers them itself, so they are added in the order of their ids and checked.
    """
    from tokenizers import AddedToken

    ids: dict[str, int] = read_json(folder / "added_tokens.json")
    added: dict[str, dict[str, Any]] = {text: {"special": True} for text in ids}
    if tokenizer.token_to_id(END_OF_TEXT) is not None:
        added[END_OF_TEXT] = {"special": True}
    for token_id, token in config.get("added_tokens_decoder", {}).items():
        text = token["content"]
        ids[text] = int(token_id)
        flags = ("special", "lstrip", "rstrip", "single_word", "normalized")
        added[text] = {flag: token[flag] for flag in flags if flag in token}
    for text in sorted(added, key=lambda text: ids.get(text, -1)):
        token = AddedToken(text, **{"normalized": False, **added[text]})
        add = tokenizer.add_special_tokens if token.special else tokenizer.add_tokens
        add([token])
        if text in ids and tokenizer.token_to_id(text) != ids[text]:
            raise DataError(
                f"'{folder}': added token {text!r} should have id {ids[text]} but gets "
                f"{tokenizer.token_to_id(text)}: use a folder with tokenizer.json"
            )


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object, or {} if there is no such file."""
    if not path.exists():
        return {}
    check_readable(path)
    try:
        content = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"cannot read '{path}': {error}") from error
    if not isinstance(content, dict):
        raise DataError(f"cannot read '{path}': it holds no JSON object")
    return content
