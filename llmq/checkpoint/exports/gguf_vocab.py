"""The tokenizer in a GGUF file: tokens and their types, merges or scores, special ids, template.

Byte-level BPE has merges, and the name of a pre-tokenizer, which cuts texts into words. BPE over
characters, as SentencePiece makes it, has tokens for single bytes, and joins the neighbours whose
token has the highest score. llmq computes merges, scores and the name from tokenizer.json.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from llmq.arch.model_config import ModelConfig
from llmq.base.errors import LlmqError
from llmq.checkpoint.export_files import CONFIG_FILE, save_tokenizer, write_json
from llmq.checkpoint.exports.gguf_halves import kind_of
from llmq.text.guarded import look_into
from llmq.text.tokenizer import (
    QWEN2_WORDS,
    Added,
    HfTokenizer,
    Tokenizer,
    open_tokenizer,
    read_json,
)

_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SHORT, _BEFORE = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)", r"[^\r\n\p{L}\p{N}]?"
_BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3_WORDS = QWEN2_WORDS.replace(r"\p{N}|", r"\p{N}{1,3}|")
_QWEN35_WORDS = QWEN2_WORDS.replace(r"\p{L}+|", r"[\p{L}\p{M}]+|").replace(
    r"\s\p{L}\p{N}", r"\s\p{L}\p{M}\p{N}"
)
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|"


def _cased(short: str, digits: str) -> str:
    """The expression that begins a new word at upper-case letters. short: expression of endings
    such as 's. digits: repetition that bounds the digits of a word."""
    words = rf"{_BEFORE}{_UPPER}*{_LOWER}+{short}|{_BEFORE}{_UPPER}+{_LOWER}*{short}"
    return rf"{words}|\p{{N}}{digits}{_REST}{_BLANKS}"


_GPT2, _DIGITS = "words of GPT-2", "digits"
_EXPRESSIONS = (
    (_GPT2,),
    (_DIGITS, _GPT2),
    (QWEN2_WORDS,),
    (_QWEN35_WORDS,),
    (_LLAMA3_WORDS,),  # "dbrx" unless the tokenizer has ignore_merges
    (_cased("", ""),),
    (_cased(f"{_SHORT}?", "{1,3}"),),
)
_NAMES = "gpt-2 smollm qwen2 qwen35 llama-bpe tekken gpt-4o"  # each named after a tokenizer
WORDS: dict[tuple[str, ...], str] = dict(zip(_EXPRESSIONS, _NAMES.split(), strict=True))
"""llama.cpp's name of each way to cut a text into words, by the expressions of tokenizer.json."""

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # of GGUF
_SPACE = "▁"
# Added tokens that are control tokens even if the tokenizer's files do not mark them as special.
_CONTROL = re.compile(r"<pad>|<mask>|<\|.*\|>|<\uff5c.*\uff5c>|<unused.*>", re.DOTALL)
# Special tokens of Gemma 4 that llama.cpp prints, for readers of answers.
_SHOWN = re.compile(r"<\|(channel|tool_call|tool_response)>|<(channel|tool_call|tool_response)\|>")
_NEVER = "never joined"
"""A merge that no text contains, because readers of GGUF refuse a tokenizer without merges."""


def add_vocabulary(
    gguf: Any, writer: Any, model: ModelConfig, tokenizer: Tokenizer | Path | None
) -> None:
    """Add the tokenizer of a model to a GGUFWriter. gguf: the library's module. LlmqError for a
    tokenizer that is not BPE, and for one without a name in llama.cpp."""
    if tokenizer is None:
        writer.add_tokenizer_model("none")
        return
    if isinstance(tokenizer, Path):
        look_into(tokenizer, _content)  # its error names the folder
        for name in HfTokenizer.OBJECTS:
            read_json(tokenizer / name)
    with TemporaryDirectory() as folder:
        # The library finds special tokens and templates in the files of a model directory.
        write_json(Path(folder) / CONFIG_FILE, model.to_hf())
        save_tokenizer(Path(folder), model, tokenizer)
        content, added = look_into(Path(folder), _content)
        kind = content["model"]["type"]
        if kind != "BPE":
            raise LlmqError(f"the tokenizer is a {kind}: llmq writes BPE into GGUF files only")
        write_json(Path(folder) / "tokenizer.json", content)  # missing if the files are vocab.json
        by_bytes, named = not content["model"].get("byte_fallback"), kind_of(model).vocabulary
        merges = by_bytes or named is not None
        try:
            special = gguf.SpecialVocab(folder, load_merges=merges, n_vocab=model.vocab_size)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise LlmqError(f"gguf cannot read the tokenizer's files: {error!r}") from error
        tokens, types = _tokens(content, model.vocab_size)
        kind = gguf.BpeVocab if by_bytes else gguf.SentencePieceVocab
        writer.add_tokenizer_model(named or kind.tokenizer_model)
        if named is None:
            writer.add_tokenizer_pre(_words(content) if by_bytes else "default")
        writer.add_token_list(tokens)
        writer.add_token_types(types)
        if merges:
            special.merges = special.merges or [_NEVER]
        if not by_bytes:
            writer.add_token_scores(_scores(content, tokens))
            writer.add_add_space_prefix(_begins_with_space(content))
        # Without these fields llama.cpp decides by the kind of tokenizer.
        for name, ids in zip(("bos", "eos"), added, strict=True):
            special.add_special_token[name] = bool(ids)
        ids = special.special_token_ids
        for end in model.eos_token_ids:
            if ids.setdefault("eos", end) != end:
                ids.setdefault("eot", end)
        special.add_to_gguf(writer, quiet=True)


def _content(folder: Path) -> tuple[dict[str, Any], Added]:
    """A folder's tokenizer as parsed JSON, and the ids that the tokenizer adds to each text."""
    return json.loads(open_tokenizer(folder).to_str()), HfTokenizer(folder).added


def _tokens(content: dict[str, Any], count: int) -> tuple[list[str], list[int]]:
    """Texts and types of `count` tokens; ids that the tokenizer lacks are unused."""
    tokens, types = [f"[PAD{i}]" for i in range(count)], [UNUSED] * count
    unknown, by_bytes = content["model"].get("unk_token"), not content["model"]["byte_fallback"]
    for text, i in content["model"]["vocab"].items():
        if i < count:
            is_byte = not by_bytes and re.fullmatch(r"<0x[0-9A-F]{2}>", text)
            tokens[i] = text
            types[i] = UNKNOWN if text == unknown else BYTE if is_byte else NORMAL
    for token in content["added_tokens"]:
        i, text = token["id"], token["content"]
        if i >= count or text == unknown:
            continue
        control = (token["special"] and not _SHOWN.fullmatch(text)) or _CONTROL.fullmatch(text)
        tokens[i] = text if control else text.replace(_SPACE, " ")
        types[i] = CONTROL if control else USER_DEFINED
    return tokens, types


def _steps(part: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """The steps of a normalizer or a pre-tokenizer, which may be a sequence of them."""
    for inner in ("pretokenizers", "normalizers"):
        if part is not None and inner in part:
            for step in part[inner]:
                yield from _steps(step)
            return
    if part is not None:
        yield part


def _words(content: dict[str, Any]) -> str:
    """llama.cpp's name for the tokenizer's pre-tokenizer, which cuts texts into words. LlmqError if
    unknown."""
    expressions = []
    for step in _steps(content["pre_tokenizer"]):
        pattern = step.get("pattern") or {}
        if step["type"] == "ByteLevel":
            expressions += [_GPT2] if step.get("use_regex", True) else []
        elif step["type"] == "Digits" and step.get("individual_digits"):
            expressions.append(_DIGITS)
        else:
            expressions.append(pattern.get("Regex") or pattern.get("String") or step["type"])
    bpe = content["model"]
    if not expressions and not bpe["merges"]:
        return "gpt-2"  # each byte is a token, so words do not matter
    name = WORDS.get(tuple(expressions))
    if name is None:
        raise LlmqError(
            f"the tokenizer cuts texts in a way that llmq knows no name of in GGUF: {expressions}; "
            f"known are {', '.join(WORDS.values())}"
        )
    return "dbrx" if name == "llama-bpe" and not bpe.get("ignore_merges") else name


def _scores(content: dict[str, Any], tokens: list[str]) -> list[float]:
    """A score for each token: the earlier its merge, the higher its score."""
    order: dict[str, int] = {}
    for number, pair in enumerate(content["model"]["merges"]):
        left, right = pair.split(" ") if isinstance(pair, str) else pair
        order.setdefault(left + right, number)
    return [-float(order.get(token, len(order))) for token in tokens]


def _begins_with_space(content: dict[str, Any]) -> bool:
    """True if the tokenizer puts a space before each text."""
    steps = [*_steps(content["normalizer"]), *_steps(content["pre_tokenizer"])]
    return any(
        step["type"] == "Prepend" or step.get("prepend_scheme", "never") != "never"
        for step in steps
    )
