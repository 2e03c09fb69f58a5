"""Models of the hub: what of one is in the local cache, and --download, which fetches the rest of
what llmq reads: config.json, tokenizer, safetensors. After an interruption the same command goes
on."""

import glob
import os
import re
import sys
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from llmq.base.errors import ConfigError, warn
from llmq.base.files import read_json
from llmq.checkpoint.export_files import (
    CONFIG_FILE,
    GENERATION_FILE,
    INDEX_FILE,
    PROCESSOR_FILES,
    SINGLE_FILE,
)
from llmq.options.presets import find_directory, hub_cache
from llmq.text.tokenizer import HfTokenizer

MODEL, WEIGHTS, TOKENIZER = "model", "weights", "tokenizer"
"""Parts of a repository: config.json and what else describes the model, its weights, tokenizer."""

_DESCRIPTION = (CONFIG_FILE, GENERATION_FILE, *PROCESSOR_FILES)
BYTES = "bytes"
_ID = re.compile(r"[\w.-]+(/[\w.-]+)?(@[\w.-]+(/[\w.-]+)*)?", re.ASCII)
_ON = ("1", "on", "yes", "true")


def is_hub_id(name: str) -> bool:
    """Whether a name can be that of a repository, perhaps with @REVISION, and is no directory."""
    return _ID.fullmatch(name) is not None and not os.path.isdir(os.path.expanduser(name))


def lacking(name: str, parts: Sequence[str]) -> str | None:
    """The first of the parts that is not in the cache, as far as what is there tells."""
    directory = find_directory(name)
    return next((p for p in parts if directory is None or not _has(directory, p)), None)


def _has(directory: Path, part: str) -> bool:
    if part == MODEL:
        return (directory / _DESCRIPTION[0]).is_file()
    if part == TOKENIZER:
        return any((directory / name).is_file() for name in ("tokenizer.json", "vocab.json"))
    if (directory / SINGLE_FILE).is_file():
        return True
    index = directory / INDEX_FILE
    return index.is_file() and all((directory / f).is_file() for f in _indexed(index))


def _indexed(index: Path) -> list[str]:
    """The files that an index names; none where it is damaged, of which reading it will tell."""
    try:
        found = {*read_json(index)["weight_map"].values()}
        return sorted(found) if all(Path(name).name == name for name in found) else []
    except (OSError, ValueError, LookupError, AttributeError, TypeError, RecursionError):
        return []


def offer(flag: str, name: str, part: str) -> ConfigError:
    """The error of a part that is not in the cache, where nobody asked for a download."""
    what = "" if part == MODEL else f"the {part} of "
    return ConfigError(
        f"{flag}: {what}{name} is not on this machine (cache {hub_cache()}): add --download to "
        "fetch it from the hub, or give a directory"
    )


def download(flag: str, name: str, parts: Sequence[str]) -> None:
    """Fetch parts of a repository into the cache, after a line that says so: all of one commit.
    name: with @REVISION for another one than the newest. ConfigError, which names flag, where that
    cannot be."""
    hub = _library("--download")
    api = hub.HfApi(endpoint=os.environ.get("HF_ENDPOINT"))
    name, _, revision = name.partition("@")
    try:
        info = api.model_info(name, revision=revision or None, files_metadata=True)
        sizes = {file.rfilename: file.size or 0 for file in info.siblings}
        files = _files(flag, name, parts, [*sizes])
        size, first = sum(sizes[file] for file in files), files[0]
        said = f"Downloading {name}: {len(files)} files, {_mb(size)}, of commit {info.sha[:12]}"
        print(said, file=sys.stderr, flush=True)
        for file in files:
            folder = _fetch(hub, name, file, info.sha)
        if WEIGHTS in parts and SINGLE_FILE not in sizes:
            files = [f for f in _indexed(folder / INDEX_FILE) if f in sizes and f.isprintable()]
            size = sum(sizes[file] for file in files)
            print(f"  {len(files)} files of weights, {_mb(size)}", file=sys.stderr, flush=True)
            for file in files:
                _fetch(hub, name, file, info.sha)
        # Under the name of a branch or a tag only now: it is this commit, unless it has moved on.
        if _fetch(hub, name, first, revision or "main").name != info.sha:
            raise ConfigError(f"--download: {name} has just changed: give the same command again")
    except ConfigError:
        raise
    except Exception as error:  # of the library, of the network, of the disk
        raise ConfigError(f"--download: {_said(hub, name, error)}") from error


def check_upload(name: str) -> None:
    """ConfigError unless --push names a repository of the hub and its library is there."""
    if _ID.fullmatch(name) is None or "/" not in name or "@" in name:
        raise ConfigError(f"--push: {name!r} is no repository of the hub: give OWNER/NAME")
    _library("--push")


def upload(name: str, path: Path, files: Sequence[str]) -> None:
    """Send files of a folder, or one file, to a repository of the hub, after a line that says so;
    a new one is private. ConfigError where that is not possible."""
    hub = _library("--push")
    print(f"Uploading {len(files)} files to {name}", file=sys.stderr, flush=True)
    try:
        api = hub.HfApi(endpoint=os.environ.get("HF_ENDPOINT"))
        api.create_repo(name, private=True, exist_ok=True)
        folder = path if path.is_dir() else path.parent
        exact = [glob.escape(file) for file in files]  # the library takes names as patterns
        api.upload_folder(repo_id=name, folder_path=folder, allow_patterns=exact)
    except Exception as error:  # of the library, of the network
        raise ConfigError(f"--push: {_said(hub, name, error)}") from error


def _library(flag: str) -> Any:
    """huggingface_hub. ConfigError if it is missing, or the network is switched off."""
    if os.environ.get("CI", "").lower() in _ON:
        raise ConfigError(
            f"{flag}: not in CI (the variable CI is set), where a run must not depend on the "
            "network: put the files into the cache before"
        )
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in _ON:
        raise ConfigError(f"{flag}: HF_HUB_OFFLINE is set: unset it, or leave {flag} out")
    try:
        import huggingface_hub
    except ImportError as error:
        raise ConfigError(f"{flag} needs huggingface_hub: pip install huggingface_hub") from error
    return huggingface_hub


def _files(flag: str, name: str, parts: Sequence[str], there: Sequence[str]) -> list[str]:
    """The files to fetch first, of those that are there; ConfigError if a part is not among
    them."""
    wanted: list[str] = []
    for part in parts:
        names = {MODEL: _DESCRIPTION, TOKENIZER: HfTokenizer.FILES}.get(part)
        if names is None:
            names = (SINGLE_FILE,) if SINGLE_FILE in there else (INDEX_FILE,)
        found = [file for name in names for file in there if fnmatchcase(file, name)]
        if part == TOKENIZER and MODEL in parts:  # of a model it is welcome, not required
            wanted += found
            continue
        if not found or (part == MODEL and _DESCRIPTION[0] not in found):
            lacks = {MODEL: "config.json", TOKENIZER: "tokenizer", WEIGHTS: "safetensors weights"}
            raise ConfigError(f"{flag}: {name} has no {lacks[part]} on the hub: use another model")
        wanted += found
    return wanted


def _fetch(hub: Any, name: str, file: str, revision: str) -> Path:
    where = {"cache_dir": hub_cache(), "endpoint": os.environ.get("HF_ENDPOINT")}
    path = hub.hf_hub_download(name, file, revision=revision, **where)
    return Path(path).parents[file.count("/")]


def _mb(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"


def find_tokenizer(name: str, fetch: bool) -> str:
    """The folder that --tokenizer names, of a repository too; `bytes`, a folder and other names
    stay as they are. fetch: with --download. ConfigError."""
    if name == BYTES or not is_hub_id(name):
        if fetch:
            warn(f"--download has no effect: --tokenizer {name} is no name of the hub")
        return name
    missing = lacking(name, [TOKENIZER])
    if missing is None and fetch:
        warn(f"--download has no effect: {name} is in the cache")
    elif missing is not None and fetch:
        download("--tokenizer", name, [TOKENIZER])
    elif missing is not None and "/" in name:
        raise offer("--tokenizer", name, MODEL if find_directory(name) is None else missing)
    directory = find_directory(name)
    return name if directory is None else str(directory)


def _said(hub: Any, name: str, error: Exception) -> str:
    if isinstance(error, hub.errors.GatedRepoError):
        return f"{name} is gated: accept its terms on its page, then log in with `hf auth login`"
    if isinstance(error, hub.errors.RepositoryNotFoundError):
        return f"the hub has no model {name}, or only for those who log in (`hf auth login`)"
    text = " ".join(str(error).split()) or type(error).__name__
    return f"{name}: {text[:300]}; what is complete stays, so give the same command again"
