"""Models of the Hugging Face hub: look into the local cache, download (--download) the files that
llmq reads (config.json, tokenizer, safetensors), and upload exports (--push). After an interruption
the same command continues a download."""

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
    MODELOPT_FILE,
    PROCESSOR_FILES,
    SINGLE_FILE,
)
from llmq.options.presets import find_directory, hub_cache
from llmq.text.tokenizer import HfTokenizer

MODEL, WEIGHTS, TOKENIZER = "model", "weights", "tokenizer"
"""Parts of a repository: MODEL is config.json and other files about the model."""

_DESCRIPTION = (CONFIG_FILE, GENERATION_FILE, MODELOPT_FILE, *PROCESSOR_FILES)
BYTES = "bytes"
_ID = re.compile(r"[\w.-]+(/[\w.-]+)?(@[\w.-]+(/[\w.-]+)*)?", re.ASCII)
_ON = ("1", "on", "yes", "true")


def is_hub_id(name: str) -> bool:
    """True if a name can be the name of a repository, with or without @REVISION, and is no
    directory."""
    return _ID.fullmatch(name) is not None and not os.path.isdir(os.path.expanduser(name))


def lacking(name: str, parts: Sequence[str]) -> str | None:
    """Return the first of `parts` that the cache lacks for a repository; None if it lacks none."""
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
    """Return the file names in a weight index; [] for a damaged index, which HfWeights reports
    later."""
    try:
        names = {*read_json(index)["weight_map"].values()}
        return sorted(names) if all(Path(name).name == name for name in names) else []
    except (OSError, ValueError, LookupError, AttributeError, TypeError, RecursionError):
        return []


def offer(flag: str, name: str, part: str) -> ConfigError:
    """Return the error for a part that the cache lacks, in a run without --download."""
    of_part = "" if part == MODEL else f"the {part} of "
    return ConfigError(
        f"{flag}: {of_part}{name} is not on this machine (cache {hub_cache()}): add --download to "
        "fetch it from the hub, or give a directory"
    )


def download(flag: str, name: str, parts: Sequence[str]) -> None:
    """Download parts of a repository into the cache, all files of one commit; prints one line on
    standard error before. name: OWNER/NAME, or OWNER/NAME@REVISION instead of the newest commit.
    flag: the option that needs the parts, for messages. ConfigError if the repository lacks a part,
    or if library, network or disk fail."""
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
        # The branch or tag is cached last, so that its name stands for a complete download. The
        # commit differs if the branch has moved meanwhile.
        if _fetch(hub, name, first, revision or "main").name != info.sha:
            raise ConfigError(f"--download: {name} has just changed: give the same command again")
    except ConfigError:
        raise
    except Exception as error:  # of the library, of the network, of the disk
        raise ConfigError(f"--download: {_said(hub, name, error)}") from error


def check_upload(name: str) -> None:
    """ConfigError unless --push names a repository of the hub and huggingface_hub is installed."""
    if _ID.fullmatch(name) is None or "/" not in name or "@" in name:
        raise ConfigError(f"--push: {name!r} is no repository of the hub: give OWNER/NAME")
    _library("--push")


def upload(name: str, path: Path, files: Sequence[str]) -> None:
    """Upload files of a folder, or one file, to a repository of the hub; prints one line on
    standard error before. A new repository is private. ConfigError if the upload fails."""
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
    """Return the module huggingface_hub. ConfigError if the package is missing, in CI, or offline.
    flag: the option that needs the module, for messages."""
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


def _files(flag: str, name: str, parts: Sequence[str], files: Sequence[str]) -> list[str]:
    """Return the files to download first, of all `files` of the repository; of sharded weights only
    the index. ConfigError if the repository lacks a part."""
    wanted: list[str] = []
    for part in parts:
        patterns = {MODEL: _DESCRIPTION, TOKENIZER: HfTokenizer.FILES}.get(part)
        if patterns is None:
            patterns = (SINGLE_FILE,) if SINGLE_FILE in files else (INDEX_FILE,)
        of_part = [file for pattern in patterns for file in files if fnmatchcase(file, pattern)]
        if part == TOKENIZER and MODEL in parts:  # a model without a tokenizer is usable
            wanted += of_part
            continue
        if not of_part or (part == MODEL and _DESCRIPTION[0] not in of_part):
            lacks = {MODEL: "config.json", TOKENIZER: "tokenizer", WEIGHTS: "safetensors weights"}
            raise ConfigError(f"{flag}: {name} has no {lacks[part]} on the hub: use another model")
        wanted += of_part
    return wanted


def _fetch(hub: Any, name: str, file: str, revision: str) -> Path:
    """Download one file into the cache; return the folder of its commit there."""
    path = hub.hf_hub_download(
        name,
        file,
        revision=revision,
        cache_dir=hub_cache(),
        endpoint=os.environ.get("HF_ENDPOINT"),
    )
    return Path(path).parents[file.count("/")]


def _mb(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"


def find_tokenizer(name: str, fetch: bool) -> str:
    """Return the folder of --tokenizer NAME: for a repository its folder in the cache, else `name`
    itself (`bytes`, a folder, an unknown name). fetch: True if --download is given. ConfigError if
    the tokenizer is missing or the download fails."""
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
    """Return an exception of huggingface_hub as one line for the user."""
    if isinstance(error, hub.errors.GatedRepoError):
        return f"{name} is gated: accept its terms on its page, then log in with `hf auth login`"
    if isinstance(error, hub.errors.RepositoryNotFoundError):
        return f"the hub has no model {name}, or only for those who log in (`hf auth login`)"
    text = " ".join(str(error).split()) or type(error).__name__
    return f"{name}: {text[:300]}; what is complete stays, so give the same command again"
