"""Tokenizers: plain bytes, or the tokenizer files of a Hugging Face model.

Both tokenizers recognize special tokens that a text contains (`<|endoftext|>` …), as Hugging Face
tokenizers do. Neither tokenizer adds special tokens; `added` lists the ids that transformers would
add.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from llmq.base import files
from llmq.base.errors import DataError, LlmqError, warn
from llmq.base.files import check_readable, disk_errors, write_file
from llmq.options.presets import find_directory

if TYPE_CHECKING:
    import tokenizers


END_OF_TEXT = "<|endoftext|>"


def open_tokenizer(folder: Path) -> tokenizers.Tokenizer:
    """The library's tokenizer from tokenizer.json, else from vocab.json with merges.txt. DataError
    if a file is missing, damaged, or a link that leaves the folder."""
    from tokenizers import Tokenizer

    fast, vocab, merges = (folder / n for n in ("tokenizer.json", "vocab.json", "merges.txt"))
    with _library_errors(f"cannot read the tokenizer in '{folder}'", Exception):
        for path in (fast, vocab, merges):
            if path.exists():
                check_readable(path)
                if leaves_folder(path):
                    raise DataError(f"'{path}' is a link that leaves its folder: copy what it is")
        if fast.exists():
            return Tokenizer.from_file(str(fast))
        if vocab.exists() and merges.exists():
            return _from_vocab_and_merges(folder)
    raise DataError(
        f"'{folder}' has neither tokenizer.json nor vocab.json with merges.txt: write them there "
        "with transformers' AutoTokenizer.save_pretrained, or copy them from the model"
    )


@contextmanager
def _library_errors(what: str, kind: type[Exception] | None = None) -> Iterator[None]:
    """Turn errors of the library `tokenizers` into DataError. kind: class of the errors to turn;
    None: only plain Exception, which the library raises for unreadable files. A panic of the
    library's Rust code is a BaseException, and always becomes DataError."""
    try:
        yield
    except (LlmqError, MemoryError):
        raise
    except BaseException as error:
        known = type(error) is Exception if kind is None else isinstance(error, kind)
        if not known and type(error).__name__ != "PanicException":
            raise
        reason = " ".join(str(error).split())[:300]
        raise DataError(f"{what}: {reason}") from error


# Expression by which Qwen2's tokenizers cut a text into words. The library has only GPT-2's.
QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def new_byte_level_bpe(model: tokenizers.models.BPE | None = None) -> tokenizers.Tokenizer:
    """Byte-level BPE that cuts texts into words as Qwen2's tokenizer does. model: None for an empty
    vocabulary."""
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
    """Byte-level BPE of GPT-2 or Qwen2, from vocab.json, merges.txt and the added tokens."""
    from tokenizers import models, pre_tokenizers

    config = read_json(folder / CONFIG_FILE)
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
    """Add the tokens of tokenizer_config.json and added_tokens.json with the ids in these files.

    The library chooses the ids of added tokens, so tokens are added in the order of their ids.
    DataError if the library gives a token another id.
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
    """The object in a JSON file; {} without the file. DataError if the file holds no object."""
    if not path.exists():
        return {}
    try:
        content = files.read_json(path)
    except (ValueError, RecursionError) as error:
        raise DataError(f"cannot read '{path}': {error}") from error
    if not isinstance(content, dict):
        raise DataError(f"cannot read '{path}': it holds no JSON object")
    return content


# The only Python module that an export may have (see tokenizer_files.py), and its auto_map.
EXACT_MODULE = "tokenization_exact.py"
EXACT_CODE = """from transformers import PreTrainedTokenizerFast


class ExactTokenizer(PreTrainedTokenizerFast):
    \"\"\"The tokenizer in tokenizer.json as it is.\"\"\"
"""
EXACT_MAP = {"AutoTokenizer": [None, "tokenization_exact.ExactTokenizer"]}
TEMPLATE_FILE = "chat_template.jinja"
TEMPLATES = "additional_chat_templates"  # a folder of NAME.jinja
CONFIG_FILE = "tokenizer_config.json"

Added = tuple[list[int], list[int]]
"""Ids in front of each text, and ids behind each text."""

_BYTES_AS_FILES = "67d112c6d383d71fe45cedc46f6bb068d2663802be0b7e45858f02c97d1b1679"
"""Fingerprint of the files that ByteTokenizer.save writes."""


def load_tokenizer(spec: str | Path) -> Tokenizer:
    """Load a tokenizer. spec: `bytes`, a folder with tokenizer.json (or vocab.json and merges.txt),
    or the name of a repository in the Hugging Face cache. DataError for any other spec."""
    if str(spec) == "bytes":
        return ByteTokenizer()
    return HfTokenizer(find_directory(str(spec)) or Path(spec))


class ByteTokenizer:
    """Tokenizer whose ids 0..255 are the bytes of UTF-8; 256 is the end of a text,
    `<|endoftext|>`."""

    vocab_size = 257
    eos_id: int | None = 256
    bos_id: int | None = 256
    prefix_id: int | None = 256
    fingerprint = "bytes"
    added: Added = ([], [])

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text])[0].tolist()

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Token ids of each text, int32 (n,) each."""
        return [self._encode(text) for text in texts]

    def encode_with_offsets(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Ids of each text, int32 (n,), and the characters [start, end) of each token, int64
        (n, 2)."""
        return [(self._encode(text), self._offsets(text)) for text in texts]

    def _offsets(self, text: str) -> np.ndarray:
        codes = np.frombuffer(text.encode("utf-32-le"), "<u4")
        counts = 1 + (codes > 0x7F) + (codes > 0x7FF) + (codes > 0xFFFF)  # bytes of each character
        for match in re.finditer(re.escape(END_OF_TEXT), text):
            counts[slice(*match.span())] = [1, *[0] * (len(END_OF_TEXT) - 1)]
        starts = np.repeat(np.arange(len(counts)), counts)
        ends = starts + np.where(self._encode(text) == self.eos_id, len(END_OF_TEXT), 1)
        return np.stack([starts, ends], axis=1)

    def _encode(self, text: str) -> np.ndarray:
        parts: list[np.ndarray] = []
        for part in text.split(END_OF_TEXT):
            parts.append(np.full(min(len(parts), 1), self.eos_id, np.int32))  # between two parts
            parts.append(np.frombuffer(part.encode(), np.uint8).astype(np.int32))
        return np.concatenate(parts)

    def is_byte(self, token: int) -> bool:
        """False, as in any byte-level BPE: a later byte never changes earlier text. See
        HfTokenizer.is_byte."""
        return False

    def decode(self, ids: Iterable[int]) -> str:
        """Text of token ids; U+FFFD for bytes that are not UTF-8."""
        text = b"".join(
            END_OF_TEXT.encode() if token == self.eos_id else bytes([token]) for token in ids
        )
        return text.decode(errors="replace")

    def is_special(self, token: int) -> bool:
        """True for the end of a text, the only special token."""
        return token == self.eos_id

    @property
    def control_texts(self) -> list[str]:
        """Texts of control tokens, which a document may contain by accident."""
        return [END_OF_TEXT]

    def save(self, folder: Path) -> None:
        """Write the files of a byte-level BPE without merges, with which transformers'
        AutoTokenizer makes the same ids."""
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers

        vocab = {character: byte for byte, character in enumerate(_byte_level_alphabet())}
        model = Tokenizer(models.BPE(vocab, []))
        model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        model.decoder = decoders.ByteLevel()
        special = {"bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT}
        save_tokenizer(folder, model, special, [END_OF_TEXT])


def save_tokenizer(
    folder: Path, tokenizer: tokenizers.Tokenizer, named: dict[str, str], special: Sequence[str]
) -> None:
    """Write a tokenizer's files in a form that AutoTokenizer uses unchanged. named: texts of
    "eos_token" and other roles. special: all special tokens; their ids follow the vocabulary's."""
    from tokenizers import AddedToken

    added = [AddedToken(token, normalized=False, special=True) for token in special]
    tokenizer.add_special_tokens(added)
    others = [token for token in special if token not in named.values()]
    named = named | ({"additional_special_tokens": others} if others else {})
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 10**30,  # transformers' own value for "no limit"
        **named,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True) + "\n", "utf-8")
    for name, content in [("tokenizer_config", config), ("special_tokens_map", named)]:
        text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
        (folder / f"{name}.json").write_text(text, "utf-8")


def _byte_level_alphabet() -> list[str]:
    """The printable character of each byte in byte-level BPE, by byte. A printable Latin-1 byte is
    its own character; the other bytes have U+0100, U+0101, … in their order."""
    from tokenizers import pre_tokenizers

    alphabet = pre_tokenizers.ByteLevel.alphabet()
    others = iter(sorted(character for character in alphabet if ord(character) > 0xFF))
    return [chr(byte) if chr(byte) in alphabet else next(others) for byte in range(256)]


class HfTokenizer:
    """Tokenizer of a model folder. Ids are from 0 to vocab_size - 1; eos_id and bos_id may be None.
    added: ids that AutoTokenizer adds in front of a text, and behind a text. prefix_id: the token
    in front of a text's first token in scoring, BOS or else EOS."""

    # Names of tokenizer files that transformers reads, without Python files.
    FILES = (
        *("tokenizer.json", CONFIG_FILE, "special_tokens_map.json", "vocab.json"),
        *("merges.txt", "added_tokens.json", TEMPLATE_FILE, "tokenizer.model"),
        *("chat_template.json", f"{TEMPLATES}/*.jinja"),
    )
    WRITTEN = (*FILES, EXACT_MODULE)
    # Files that hold one JSON object each.
    OBJECTS = (CONFIG_FILE, "special_tokens_map.json", "added_tokens.json")
    # Files that decide the ids of a text.
    DECIDING = (
        *("tokenizer.json", CONFIG_FILE, "special_tokens_map.json", "vocab.json"),
        *("merges.txt", "added_tokens.json"),
    )

    def __init__(self, folder: Path) -> None:
        """DataError if the folder or its tokenizer files are missing or damaged."""
        self.folder = folder
        if not folder.is_dir():
            raise DataError(
                f"no tokenizer folder '{folder}': give 'bytes' or a folder with tokenizer.json"
            )
        self._tokenizer = open_tokenizer(folder)
        self._tokenizer.no_truncation()  # some files carry a maximum length
        self._tokenizer.no_padding()
        ids = self._tokenizer.get_vocab(with_added_tokens=True).values()
        self.vocab_size = max(ids) + 1  # there may be gaps in the ids
        self.eos_id = self._special_id("eos")
        self.bos_id = self._special_id("bos")
        named = self._named_id("bos"), self._named_id("eos"), self.bos_id, self.eos_id
        self.prefix_id = next((i for i in named if i is not None), None)
        self.added = self._added_ids()

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 in hex of everything that decides the ids of a text, independent of the layout of
        files; "bytes" for a ByteTokenizer's files."""
        content = json.loads(self._tokenizer.to_str())
        parts = ("added_tokens", "normalizer", "pre_tokenizer", "model")
        identity = _without_absent([self.added, *(content[part] for part in parts)])
        digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
        return ByteTokenizer.fingerprint if digest == _BYTES_AS_FILES else digest

    @property
    def is_qwen2(self) -> bool:
        """True if the tokenizer cuts texts into words as transformers' Qwen2Tokenizer does."""
        content = json.loads(self._tokenizer.to_str())
        parts = (content["pre_tokenizer"] or {}).get("pretokenizers", [{}])
        words = parts[0].get("pattern") == {"Regex": QWEN2_WORDS}
        return words and content["normalizer"] == {"type": "NFC"}

    def _added_ids(self) -> Added:
        """Ids of `added`: from the post-processor, or without tokenizer.json from
        tokenizer_config.json."""
        if not (self.folder / "tokenizer.json").exists():
            config = read_json(self.folder / CONFIG_FILE)
            bos, eos = (
                [self._named_id(name)] if config.get(f"add_{name}_token") else []
                for name in ("bos", "eos")
            )
            return [i for i in bos if i is not None], [i for i in eos if i is not None]
        with self._errors():
            encoding = self._tokenizer.encode("a", add_special_tokens=True)
            own = len(self._tokenizer.encode("a", add_special_tokens=False).ids)
        first = next((i for i, x in enumerate(encoding.special_tokens_mask) if not x), 0)
        return encoding.ids[:first], encoding.ids[first + own :]

    def _named_id(self, name: str) -> int | None:
        """Id of the eos or bos token whose text the tokenizer's files give; None without a text."""
        for file in (CONFIG_FILE, "special_tokens_map.json"):
            token = read_json(self.folder / file).get(f"{name}_token")
            if token is None:
                continue
            text = token.get("content") if isinstance(token, dict) else token
            if not isinstance(text, str):
                raise DataError(f"'{self.folder / file}': {name}_token {token!r} is no token")
            with suppress(UnicodeEncodeError):  # no token has a lone surrogate in its text
                if self._tokenizer.token_to_id(text) is not None:
                    return self._tokenizer.token_to_id(text)
        return None

    def _special_id(self, name: str) -> int | None:
        """Id of the eos or bos token: by its text, else by the model's config, else the id of
        END_OF_TEXT; None without any of these. DataError for a bad id."""
        named = self._named_id(name)
        if named is not None:
            return named
        for file in ("generation_config.json", "config.json"):
            token_id = read_json(self.folder / file).get(f"{name}_token_id")
            if token_id is None:
                continue
            first = token_id[0] if isinstance(token_id, list) and token_id else token_id
            if type(first) is not int or first < 0:
                raise DataError(f"'{self.folder / file}': {name}_token_id {token_id!r} is no id")
            if first < self.vocab_size:  # larger: a default value, such as GPT-2's 50256
                return first
        return self._tokenizer.token_to_id(END_OF_TEXT)

    def encode(self, text: str) -> list[int]:
        with self._errors():
            return self._tokenizer.encode(text, add_special_tokens=False).ids

    def _errors(self) -> AbstractContextManager[None]:
        return _library_errors(f"the tokenizer in '{self.folder}' fails")

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Token ids of each text, int32 (n,) each. DataError if the library fails."""
        with self._errors():
            encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, np.int32) for encoding in encodings]

    def encode_with_offsets(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Ids of each text, int32 (n,), and the characters [start, end) of each token, int64
        (n, 2)."""
        with self._errors():
            encodings = self._with_offsets.encode_batch(texts, add_special_tokens=False)
        return [
            (np.array(encoding.ids, np.int32), np.array(encoding.offsets, np.int64).reshape(-1, 2))
            for encoding in encodings
        ]

    @cached_property
    def _with_offsets(self) -> tokenizers.Tokenizer:
        """Copy of the tokenizer without its post-processor, which may remove blanks from a token's
        offsets."""
        from tokenizers import Tokenizer

        copy = Tokenizer.from_str(self._tokenizer.to_str())
        copy.post_processor = None
        return copy

    def is_special(self, token: int) -> bool:
        """True for the id of an added token, which the tokenizer never cuts."""
        return token in self._tokenizer.get_added_tokens_decoder()

    @property
    def control_texts(self) -> list[str]:
        """Texts of control tokens, which a document may contain by accident."""
        added = self._tokenizer.get_added_tokens_decoder().values()
        return [token.content for token in added if token.special and token.content]

    def is_byte(self, token: int) -> bool:
        """True if the token stands for a single byte of a character that is not in the
        vocabulary."""
        return bool(re.fullmatch(r"<0x[0-9A-Fa-f]{2}>", self._tokenizer.id_to_token(token) or ""))

    def decode(self, ids: Iterable[int]) -> str:
        """Text of token ids, with special tokens written out."""
        with self._errors():
            return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def save(self, folder: Path) -> None:
        with disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
        copy_tokenizer_files(self.folder, folder)


Tokenizer = ByteTokenizer | HfTokenizer


def tokenizer_names(folder: Path) -> list[str]:
    """Paths of the tokenizer files in a folder, relative to the folder."""
    paths = (path for name in HfTokenizer.FILES for path in sorted(folder.glob(name)))
    return [path.relative_to(folder).as_posix() for path in paths if path.is_file()]


def is_tokenizer_file(name: str) -> bool:
    """True if a path relative to a model folder is a tokenizer file."""
    parts = name.split("/")
    fits = any(fnmatchcase(name, p) and p.count("/") == len(parts) - 1 for p in HfTokenizer.FILES)
    return fits and not {"", ".", ".."} & {*parts}


def copy_tokenizer_files(source: Path, target: Path) -> list[str]:
    """Copy all tokenizer files of a folder; return their names. Code, and links that leave the
    folder, are not copied, with a warning. DiskError if the disk is full or fails."""
    names = []
    for name in tokenizer_names(source):
        if leaves_folder(source / name):
            warn(f"'{source / name}' is a link that leaves its folder: it is not copied")
            continue
        names.append(name)
        with disk_errors(target / name):
            (target / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(source / name, target / name)
    if CONFIG_FILE in names:
        _drop_code(source, target)
    return names


def _drop_code(source: Path, target: Path) -> None:
    """Remove auto_map, which names Python modules, from the copied tokenizer_config.json."""
    try:
        config = read_json(target / CONFIG_FILE)
    except DataError:  # transformers cannot load a damaged file either
        return
    if (named := config.pop("auto_map", None)) is None:
        return
    module = source / EXACT_MODULE
    own = not module.is_file() or module.read_bytes() == EXACT_CODE.encode()
    if named != EXACT_MAP or not own:
        warn(f"the code that '{source / CONFIG_FILE}' names is left behind: {named}")
    write_file(target / CONFIG_FILE, json.dumps(config, indent=2, ensure_ascii=False) + "\n")


def leaves_folder(path: Path) -> bool:
    """True if a path is a link to a file outside of its folder. In the hub's cache, where files are
    links to blobs, True only for a link out of the repository's folder."""
    folder = path.parent.resolve()
    if folder.parent.name == "snapshots":
        folder = folder.parents[1]
    return not path.resolve().is_relative_to(folder)


def _without_absent(value: Any) -> Any:
    """JSON value without fields that are null or false."""
    if isinstance(value, dict):
        return {k: _without_absent(v) for k, v in value.items() if v is not None and v is not False}
    return [_without_absent(v) for v in value] if isinstance(value, list | tuple) else value


INCOMPLETE = "\ufffd"  # stands for a character while some of its bytes are missing
CONTEXT = 16  # ids in front of new ids that are decoded together with the new ids
WINDOW = 64  # maximum ids, about, that are decoded again with each new id


def continuation(tokenizer: Tokenizer, prompt: list[int], new: list[int]) -> str:
    """Text of new ids behind a prompt's ids. Prompt and new ids are decoded together, because some
    decoders (Llama 2's) strip a leading space."""
    before = tokenizer.decode(prompt) if prompt else ""
    text = tokenizer.decode([*prompt, *new])
    return text[len(before) :] if text.startswith(before) else tokenizer.decode(new)


def streamed(tokenizer: Tokenizer, prompt: list[int], new: Iterable[int]) -> Iterator[str]:
    """Pieces of `continuation`, never empty: whole characters, as soon as no later id can change
    these characters. U+FFFD at the end and tokens of single bytes are held back, because some
    decoders join several tokens to one character."""
    ids: list[int] = []
    sent = ""  # the pieces so far
    # context: ids in front of the window. start: index of the window's first id. before: number of
    # characters of `sent` that come before the window.
    context, start, before = prompt, 0, 0
    for token in new:
        ids.append(token)
        if tokenizer.is_byte(token):
            continue
        text = continuation(tokenizer, context, ids[start:])
        settled = text.rstrip(INCOMPLETE)
        if piece := settled[len(sent) - before :]:
            sent += piece
            yield piece
        if len(ids) - start > WINDOW and settled == text:
            context, start, before = ids[-CONTEXT:], len(ids), len(sent)
    if rest := continuation(tokenizer, prompt, ids)[len(sent) :]:
        yield rest
