"""The paths to which a run writes: locks, files of other runs at these paths, and logs found by a
run's name.

A run owns the files that carry the run's id. Files of another run are refused, or moved aside with
--overwrite; such files are never deleted. Damaged files are renamed.
"""

import glob
import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from llmq.base.errors import ConfigError, DataError, LlmqError, warn
from llmq.base.files import disk_errors, free_name, make_directory
from llmq.base.locks import LOCK, holder, lock_beside, locked
from llmq.base.run_id import RunId
from llmq.checkpoint.best import NOTE, best_owner, note_is_damaged
from llmq.checkpoint.export_files import ADAPTER_CONFIG, CONFIG_FILE, export_owner, exported_files
from llmq.checkpoint.folder import delete, leftovers, move
from llmq.checkpoint.manifest import MANIFEST, manifest_damage, read_manifest
from llmq.checkpoint.states import checkpoint_at
from llmq.checkpoint.store import (
    checkpoint_owner,
    checkpoints_by_name,
    damaged_checkpoints,
    saved_log,
)
from llmq.options.options import TrainConfig
from llmq.options.presets import find_directory
from llmq.report.json_log import has_records, is_damaged_log, log_owner


@contextmanager
def locked_places(config: TrainConfig) -> Iterator[None]:
    """Lock the run's checkpoints, model and log against other runs within the context."""
    # The folder may be a mount point that several machines share; the lock therefore lies inside.
    locks = [(config.checkpoint_dir / LOCK, "--checkpoint-dir", config.checkpoint_dir)]
    for flag, path in (("--out-dir", config.out_dir), ("--log-file", config.log_file)):
        if path.is_file() or path.is_dir() or not path.exists():  # excludes devices like /dev/null
            whole = Path(os.path.realpath(path))  # unlike resolve(), no error for a link to itself
            locks.append((lock_beside(whole), flag, path))
    with ExitStack() as stack:
        for lock in locks:
            stack.enter_context(locked(*lock))
        yield


def run_id(config: TrainConfig, checkpoint: Path | None) -> RunId:
    """Return the id of the run that `config` begins or continues. A continued run under another
    name is a fork, with a new id. A run without a checkpoint is found by its log. Raises LlmqError
    for a checkpoint of another version."""
    new = RunId.new(config.name)
    if config.continue_from is None:
        return new
    before = log_owner(config.log_file) if has_records(config.log_file) else None
    same_name = before is not None and before.name == config.name
    if checkpoint is None:
        return before if same_name else new
    made = read_manifest(checkpoint / MANIFEST)["run"]
    run = new.continuing(RunId.of(made), made["step"])
    if run.parent is not None and run.id == new.id and same_name and before.parent == run.parent:
        return before
    return run


class ExistingOutput(NamedTuple):
    """Existing files at a path to which a run writes. flag: the option that names the path. what:
    the files in words. owner: the run that wrote the files."""

    flag: str
    paths: list[Path]
    what: str
    owner: RunId | None


def existing_outputs(config: TrainConfig) -> list[ExistingOutput]:
    """Return the files at the paths of a run, whoever owns the files. Damaged checkpoints, and a
    damaged note of the best checkpoint, are left out: the owner is unknown."""
    directory, out, log = config.checkpoint_dir, config.out_dir, config.log_file
    damaged, best = damaged_checkpoints(directory), directory / NOTE
    whole = [p for p in checkpoints_by_name(directory).values() if p not in damaged]
    found = [("--checkpoint-dir", [p], f"checkpoint '{p}'", checkpoint_owner(p)) for p in whole]
    if best.is_file() and not note_is_damaged(directory):
        found.append(("--checkpoint-dir", [best], f"note '{best}'", best_owner(directory)))
    if files := exported_files(out):
        found.append(("--out-dir", files, f"model '{out}'", export_owner(out)))
    if has_records(log):
        found.append(("--log-file", [log], f"log '{log}'", log_owner(log)))
    return [ExistingOutput(*each) for each in found]


def outputs_of_others(
    config: TrainConfig, run: RunId, model_dir: Path | None, checkpoint: Path | None = None
) -> list[ExistingOutput]:
    """Return the files of other runs at this run's paths, which will be moved aside. Raises
    ConfigError for files of other runs without --overwrite, and if this run begins from a file of
    another run. Raises LlmqError if this run's checkpoint is damaged."""
    if checkpoint is not None and (damage := manifest_damage(checkpoint / MANIFEST)) is not None:
        raise LlmqError(damage)
    there = existing_outputs(config)
    strangers = [found for found in there if not run.owns(found.owner)]
    if _has_damaged_log(config, checkpoint):
        strangers = [found for found in strangers if found.flag != "--log-file"]
    if strangers and not config.overwrite:
        flag, _, what, owner = strangers[0]
        whose = "a run without an id" if owner is None else owner
        instead = "another step" if config.continue_from is not None else "--continue"
        if run.parent is not None and owner is not None and owner.id == run.parent.id:
            raise ConfigError(
                f"{flag}: {what} is of {owner}, from which this {run} forks: give another "
                f"{flag}, or leave --name out to go on with that run"
            )
        raise ConfigError(
            f"{flag}: {what} is of {whose}, not of this {run}: give another --name, go on with "
            f"{instead}, or move it aside with --overwrite"
        )
    for flag, paths, what, _ in strangers:
        if model_dir is not None and paths[0].parent.resolve() == model_dir.resolve():
            raise ConfigError(f"{flag}: {what} is the one of --model: choose another directory")
        if checkpoint is not None and any(p.resolve() == checkpoint.resolve() for p in paths):
            raise ConfigError(f"{flag}: {what} is the one of --continue: choose another directory")
    return strangers


def clear_places(
    config: TrainConfig, checkpoint: Path | None, strangers: list[ExistingOutput]
) -> list[str]:
    """Clear a run's paths: rename damaged files, move other runs' files aside, and delete
    unfinished checkpoints of a killed run. Returns the lines of move_aside. Raises LlmqError for
    disk errors."""
    # Rename first: the kept copy of a damaged checkpoint would be deleted as a leftover.
    _set_damaged_aside(config, checkpoint)
    lines = move_aside(strangers)
    delete(leftovers(config.checkpoint_dir))
    return lines


def _set_damaged_aside(config: TrainConfig, checkpoint: Path | None) -> None:
    """Rename damaged files at the paths of a run, with a warning. A damaged log is renamed only if
    the run of `checkpoint` wrote the log; any other --log-file may be a typing error. Raises
    LlmqError for disk errors."""
    found = damaged_checkpoints(config.checkpoint_dir)
    if note_is_damaged(config.checkpoint_dir):
        note = config.checkpoint_dir / NOTE
        found[note] = "it is no note of the best checkpoint"
    if _has_damaged_log(config, checkpoint):
        found[config.log_file] = "it is no log"
    for path, why in found.items():
        target = free_name(path, "damaged")
        with disk_errors(target):
            move(path, target)
        warn(f"'{path}' is damaged and was set aside as '{target.name}': {why}")


def _has_damaged_log(config: TrainConfig, checkpoint: Path | None) -> bool:
    """Return True if --log-file is the log of the checkpoint's run, and damaged."""
    if checkpoint is None:
        return False
    log = saved_log(checkpoint)
    same = log is not None and log.absolute() == config.log_file.absolute()
    return same and is_damaged_log(config.log_file)


def undone_checkpoints(config: TrainConfig, run: RunId, step: int) -> list[ExistingOutput]:
    """Return the run's own checkpoints after `step`, for move_aside. The run will repeat the steps
    after `step`; --continue must not take a checkpoint of the old steps."""
    later = {s: p for s, p in checkpoints_by_name(config.checkpoint_dir).items() if s > step}
    paths = [path for path in later.values() if run.owns(checkpoint_owner(path))]
    what = f"the checkpoints after step {step}, which the run makes again"
    return [ExistingOutput("--checkpoint-dir", paths, what, run)]


def move_aside(strangers: list[ExistingOutput]) -> list[str]:
    """Move files aside; all files of a folder go into one new folder. Returns a line for each new
    folder or log. Raises LlmqError for disk errors."""
    targets: dict[Path, Path] = {}
    lines: dict[Path, str] = {}
    for flag, paths, what, _ in strangers:
        for path in paths:
            whole = path.absolute()
            if flag == "--log-file":
                target = free_name(whole.resolve(), "old")
            else:  # the folder stays, as a mount point or the place of our lock
                folder = whole.parent.resolve()
                if folder not in targets:
                    targets[folder] = free_name(folder, "old")
                target = targets[folder] / path.name
            with disk_errors(target):
                make_directory(target.parent)
                move(whole, target)
            place = target if flag == "--log-file" else target.parent
            lines.setdefault(place, f"Moved aside: {what}, to '{place}'")
    return list(lines.values())


RECENT = 600.0  # seconds after a write during which a run on another machine counts as alive
SAMPLES = ".samples.jsonl"


def log_of_run(run: RunId, last: Path) -> Path | None:
    """Return the log of a run that goes on. last: the file that the run wrote last. The result is
    `last`, unless another run's file has replaced `last`. The result is then the run's newest log
    in the same folder, or None."""
    there, damaged = os.path.lexists(last), is_damaged_log(last)
    if there and not damaged and (not has_records(last) or run.owns(log_owner(last))):
        return last
    beside = [p for p in _logs_in(last.parent) if p != last and run.owns(log_owner(p))]
    return max(beside, key=_modified, default=last if damaged or not there else None)


def find_model(text: str) -> str:
    """Find a model by its path, by its run's folder, or by its run's name; an exported model comes
    before checkpoints. If no model is found, the text is returned unchanged, because the text may
    name a repository. A path or a cached repository of this name comes before a run."""
    path = Path(os.path.expanduser(text))  # Path.expanduser raises for an unknown user
    if _has_model(path) or (not path.is_dir() and find_directory(text) is not None):
        return text
    inside = [path / "model", path / "ckpt"]
    named = model_places(text) if path.name == text else []
    return next((str(place) for place in [*inside, *named] if _has_model(place)), text)


def model_places(name: str) -> list[Path]:
    """Return the folders in which runs named `name` leave models and checkpoints."""
    run = Path("finetune", name)
    return [Path("output", name), run / "model", Path("ckpt", name), run / "ckpt"]


def _has_model(path: Path) -> bool:
    if any((path / file).is_file() for file in (CONFIG_FILE, ADAPTER_CONFIG, MANIFEST)):
        return True
    return path.is_dir() and bool(checkpoints_by_name(path))


def find_log(text: str) -> Path:
    """Find a log by its path, by its run's folder, or by its run's name: the newest log of this
    name in logs/, or the log of the newest checkpoint in ckpt/NAME. Raises DataError if there is no
    log."""
    path = Path(os.path.expanduser(text))  # Path.expanduser raises for an unknown user
    if os.path.lexists(path) and not path.is_dir():
        return path
    for folder in (path, Path("finetune", text)):
        if (folder / "log.json").is_file():
            return folder / "log.json"
    defaults = TrainConfig().normalized()
    if path.name == text and path.suffix != ".json":
        logs = ((path, log_owner(path)) for path in _logs_in(defaults.log_file.parent))
        found = {path for path, owner in logs if owner is not None and owner.name == text}
        found |= set(_log_of_checkpoint(text))
        if found:
            return max(found, key=_modified)
        problem = (
            f"no log in '{defaults.log_file.parent}' is of a run of this name, and neither "
            f"'ckpt/{text}' nor 'finetune/{text}' has one"
        )
    else:
        problem = "it is a directory" if path.is_dir() else "No such file or directory"
    raise DataError(f"cannot read the log '{text}': {problem}")


def samples_path(log: Path) -> Path:
    """Return the path of the file beside the log of an `llmq rl` run that holds all samples."""
    return log.with_suffix(SAMPLES)


def find_samples(text: str) -> Path | None:
    """Find a file of samples by its path or by its run's name; None for any other text."""
    if text.endswith(SAMPLES):
        return Path(text)
    if os.path.lexists(text) or Path("data", text).is_dir():  # the text names token files
        return None
    with suppress(DataError):
        path = samples_path(find_log(text))
        return path if path.is_file() else None
    return None


def running_log() -> Path | None:
    """Return the newest log in logs/ that a run is writing now; None if there is none."""
    logs = _logs_in(TrainConfig().normalized().log_file.parent)
    return next((p for p in sorted(logs, key=_modified, reverse=True) if has_writer(p)), None)


def has_writer(path: Path) -> bool | None:
    """Return True if the run that holds the log's lock is alive; None without a lock. A run on
    another machine counts as alive if it wrote to the log less than RECENT seconds ago."""
    found = holder(lock_beside(path.resolve()))
    if found is None:
        return None
    process, machine = found
    if machine != socket.gethostname():
        return silence(path) < RECENT
    try:
        os.kill(process, 0)
    except ProcessLookupError:  # the run was killed
        return False
    except PermissionError:  # a process of another user
        pass
    return True


def is_written_here(path: Path) -> bool:
    """Return True if a run on this machine is writing this log."""
    found = holder(lock_beside(path.resolve()))
    return found is not None and found[1] == socket.gethostname() and bool(has_writer(path))


def silence(path: Path) -> float:
    """Return the seconds since the last write to a log."""
    return time.time() - _modified(path)[0]


def _log_of_checkpoint(name: str) -> Iterator[Path]:
    with suppress(LlmqError):  # the checkpoint may be damaged
        checkpoint = checkpoint_at(TrainConfig(name=name).normalized().checkpoint_dir)
        if checkpoint is not None:
            log, owner = saved_log(checkpoint), checkpoint_owner(checkpoint)
            if None not in (log, owner) and has_records(log) and owner.owns(log_owner(log)):
                yield log


def _logs_in(folder: Path) -> list[Path]:
    """Return the logs in a folder, including logs that a run began beside a replaced log (see
    JsonLog)."""
    names = (f"{glob.escape(str(folder))}/{pattern}" for pattern in ("*.json", "*.json.new-*"))
    paths = (Path(path) for name in names for path in glob.glob(name))
    return [path for path in paths if has_records(path)]


def _modified(path: Path) -> tuple[float, str]:
    try:
        return path.stat().st_mtime, path.name
    except OSError:
        return 0.0, path.name
