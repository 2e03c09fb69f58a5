"""Small public data sets for `llmq data`, each a file of one commit of a repository.

git's hash of each file is recorded here, and a download with another content is refused.
"""

import hashlib
import os
import sys
import urllib.request
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from llmq.base.errors import ConfigError
from llmq.base.files import disk_errors, make_directory, replacing

ENDPOINT = "https://raw.githubusercontent.com"  # LLMQ_DATA_ENDPOINT names another server
FOLDER = Path("data")


@dataclass(frozen=True, slots=True)
class PublicSet:
    """Public data set. file: REPOSITORY/COMMIT/PATH. blob: git's hash of the content. about:
    description and license. task: True for a task of `llmq eval`, False for text or conversations
    to tokenize."""

    file: str
    blob: str
    about: str
    task: bool = False


SETS = {
    "tiny-shakespeare": PublicSet(
        "karpathy/char-rnn/6f9487a6fe5b420b7ca9afb0d7c078e37c1d1b4e/data/tinyshakespeare/input.txt",
        "7dcb3a2d4cc3b48b6283dd46870bfeb78f88aac9",
        "1.1 MB of plays in verse; in the public domain",
    ),
    "alpaca": PublicSet(
        "tatsu-lab/stanford_alpaca/761dc5bfbdeeffa89b8bff5d038781a4055f796a/alpaca_data.json",
        "3779ddbc040543ab1834ef216c983d6fcc06cc9a",
        "23 MB, 52,002 instructions with answers of GPT-3; CC BY-NC 4.0",
    ),
    "hellaswag": PublicSet(
        "rowanz/hellaswag/a29ff8e9a04bba4bd6588223785ce105328adc57/data/hellaswag_val.jsonl",
        "0f5ee25d72216f12317d5d8a7b92deafa423d81e",
        "12 MB, 10,042 questions for `llmq eval`; MIT",
        task=True,
    ),
}
"""Data sets by the name that `llmq data` takes."""


def public_set(name: str) -> PublicSet:
    """Data set of this name. ConfigError, which lists all data sets, for an unknown name."""
    if name not in SETS:
        known = [f"  {each}: {public.about}" for each, public in SETS.items()]
        raise ConfigError(f"no public data are called '{name}'; there are", known)
    return SETS[name]


def maker(pattern: str) -> str | None:
    """Command that makes the token files of a pattern; None if the pattern's folder is not one of a
    public data set."""
    within = PurePosixPath(pattern).parent.name
    return next((f"llmq data {name}" for name in SETS if within == f"{name}-qwen"), None)


def file_of(name: str) -> Path:
    """Path at which the file of a data set is kept."""
    return FOLDER / f"{name}{PurePosixPath(SETS[name].file).suffix}"


def fetch(name: str) -> Path:
    """Download the file of a data set unless it exists; return its path. ConfigError if the
    download fails, or if the content is not the published content."""
    wanted, file = SETS[name], file_of(name)
    if file.is_file() and blob_hash(file.read_bytes()) == wanted.blob:
        return file
    endpoint = os.environ.get("LLMQ_DATA_ENDPOINT", ENDPOINT).rstrip("/")
    url = f"{endpoint}/{wanted.file}"
    print(f"Downloading {url}", file=sys.stderr, flush=True)
    try:
        with urllib.request.urlopen(url, timeout=60) as source:
            content = source.read()
    except OSError as error:
        raise ConfigError(
            f"cannot fetch {url}: {getattr(error, 'reason', error)}; without a network, put the "
            f"file to '{file}'"
        ) from error
    if blob_hash(content) != wanted.blob:
        raise ConfigError(f"{url} is not the file that was published: it is not kept")
    with disk_errors(file):
        make_directory(file.parent)
    with replacing(file) as opened:
        opened.write(content)
    return file


def blob_hash(content: bytes) -> str:
    """git's hash of a file's content, in hex."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
