"""--help at 80 columns and in a pipe, and the completion of shells, of both console scripts."""

from __future__ import annotations

import os
import pty
import re
import shlex
import subprocess
import sys

import pytest
import typer

from llmq.commands.cli import TRAIN, _command, _run, app
from llmq.options.option_types import RL_GROUP
from llmq.options.options import OPTIONS, USUAL

DIVIDER = "\n\n"  # before the example of a command
COMMANDS = typer.main.get_command(app).commands
OF_RUNS = ("finetune", "train", "rl", "plan", "verify", "score", "bench", "recipe", "sweep-lr")


def spellings(command) -> set[str]:
    return {name for p in command.params for name in (*p.opts, *p.secondary_opts)
            if name.startswith("--") and not getattr(p, "hidden", False)}  # fmt: skip


def check(text: str, command, columns: int = 80) -> None:
    lines = text.splitlines()
    assert all(len(line) <= columns for line in lines)
    assert not any(re.search(r"\w-$", line) for line in lines), "a flag is broken at its hyphen"
    assert "…" not in text
    begun = {word for line in lines if line.startswith("  -") for word in re.split(r"[ ,/]+", line)}
    assert spellings(command) <= begun
    helps = [p.help for p in command.params if getattr(p, "help", None)]
    words = " ".join(text.split())
    for help_ in helps:
        assert " ".join(help_.split()) in words


@pytest.mark.parametrize("columns", [None, "200"])
@pytest.mark.parametrize("name", [*COMMANDS, TRAIN])
def test_help_shows_all_of_every_option(name, columns, capsys, monkeypatch):
    """Help has 80 columns in a pipe and a terminal's full width; commands of runs by --help-all."""
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns:
        monkeypatch.setenv("COLUMNS", columns)
    flag = "--help-all" if name in (*OF_RUNS, TRAIN) else "--help"
    args = ([flag], TRAIN) if name == TRAIN else ([name, flag],)
    assert _run(*args) == 0
    out = capsys.readouterr().out
    check(out, _command(TRAIN) if name == TRAIN else COMMANDS[name], int(columns or 80))
    assert columns is None or flag == "--help" or any(len(line) > 80 for line in out.splitlines())
    if name in ("train", TRAIN):
        titles = re.findall(r"^(\w.*):$", out, re.MULTILINE)
        assert titles[:3] == ["Options", "Model", "Data"]
        last = ("hidden_size", "max_positions", "lora_rank")
        assert titles[-3:] == [OPTIONS[name].group for name in last]


@pytest.mark.parametrize("name", [*OF_RUNS, TRAIN])
def test_help_has_the_twenty_options_that_most_runs_have(name, capsys):
    args = (["-h"], TRAIN) if name == TRAIN else ([name, "-h"],)
    assert _run(*args) == 0
    out = capsys.readouterr().out
    begun = set(re.findall(r"^  (--[\w-]+)", out, re.MULTILINE))
    flags = {opt.flag: field for field, opt in OPTIONS.items()}
    own = {field for field, opt in OPTIONS.items() if name == "rl" and opt.group == RL_GROUP}
    assert {flags[flag] for flag in begun & flags.keys()} == {*USUAL} | own and len(USUAL) == 20
    assert out.rstrip().endswith("--help-all")


def test_help_names_all_commands_with_what_they_do(capsys):
    assert _run(["--help"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    for name, command in COMMANDS.items():
        assert f"{name} {' '.join(command.help.partition(DIVIDER)[0].split())}" in out
    assert "--install-completion" in out and "--show-completion" in out


def test_commands_are_in_panels_in_the_order_of_use(capsys):
    assert _run(["--help"]) == 0
    titles = re.findall(r"^(\w.*):$", capsys.readouterr().out, re.MULTILINE)
    assert titles == ["Options", "Begin", "Data", "Before a run", "Runs", "Models", "Machines"]
    assert [*COMMANDS][:3] == ["demo", "finetune", "tokenize"]


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_an_example_that_the_command_takes(name, capsys):
    assert _run([name, "--help"]) == 0
    (line,) = re.findall(rf"^  (llmq {name}\b.*)$", capsys.readouterr().out, re.MULTILINE)
    assert COMMANDS[name].help.partition(DIVIDER)[2].split() == line.split()
    COMMANDS[name].make_context(name, shlex.split(line)[2:])


def test_help_in_a_terminal_of_80_columns():
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "llmq", "plan", "--help-all"]
    env = os.environ | {"COLUMNS": "80", "TERM": "xterm-256color"}
    with subprocess.Popen(command, stdout=theirs, stderr=theirs, env=env) as process:
        os.close(theirs)
        text = b""
        while True:
            try:
                part = os.read(ours, 65536)
            except OSError:  # the other end is closed
                break
            if not part:
                break
            text += part
    os.close(ours)
    assert process.returncode == 0
    check(text.decode().replace("\r\n", "\n"), COMMANDS["plan"])


MAIN = {"llmq": "main", TRAIN: "train_main"}


def script(name: str, *args: str, **env: str) -> subprocess.CompletedProcess:
    """Run a console script, as its file would."""
    code = f"import sys; sys.argv[0] = {name!r}; import llmq.__main__ as m; m.{MAIN[name]}()"
    return subprocess.run(
        [sys.executable, "-c", code, *args],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | env,
    )


@pytest.mark.parametrize(
    ("name", "line", "offered"),
    [
        ("llmq", "pl", {"plan", "plot"}),
        ("llmq", "train --offload-opt", {"--offload-opt-m", "--offload-opt-v"}),
        ("llmq", "plan --attention ", {"auto", "cudnn", "native"}),
        (TRAIN, "--recompute-s", {"--recompute-swiglu"}),
        (TRAIN, "--from-scratch=x --lr-schedule=c --p2p o", {"on", "off"}),
        ("llmq", "train --p2p = o", {"on", "off"}),  # as bash divides it
        ("llmq", "train --p2p =", {"auto", "on", "off"}),
        ("llmq", "plan --card 409", {"4090"}),
        ("llmq", "train --model Qwen2.5-1", {"Qwen2.5-1.5B", "Qwen2.5-14B"}),
        ("llmq", "plot m", {"mine", "more"}),
    ],
)
def test_shells_complete(name, line, offered, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ckpt" / "more" / "step_00000001").mkdir(parents=True)
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "mine-2026-11-26T00_00_00.json").touch()
    words = f"{name} {line}"
    at = str(len(words.split()) - 1 + words.endswith(" "))
    variable = f"_{name.upper().replace('-', '_')}_COMPLETE"
    done = script(name, COMP_WORDS=words, COMP_CWORD=at, **{variable: "complete_bash"})
    assert (done.stderr, set(done.stdout.split())) == ("", offered)


@pytest.mark.parametrize("name", MAIN)
def test_completion_is_installed_for_the_script(name, tmp_path):
    """The kind of shell is not looked for here: a test has none of its own."""
    home = {"HOME": str(tmp_path), "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    done = script(name, "--show-completion", "bash", **home)
    assert done.returncode == 0 and f" {name}" in done.stdout.splitlines()[-1]
    shown = done.stdout
    done = script(name, "--install-completion", "bash", **home)
    assert done.returncode == 0 and "bash completion installed" in done.stdout
    (written,) = (tmp_path / ".bash_completions").iterdir()
    assert written.name == f"{name}.sh" and written.read_text().strip() == shown.strip()
    assert str(written) in (tmp_path / ".bashrc").read_text()
