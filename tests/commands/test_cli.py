"""The command line: which flags there are, what reaches the implementation, how errors look."""

import errno
import importlib
import inspect
import os
import resource
import signal
import subprocess
import sys
import time
import tomllib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer

from llmq import __version__
from llmq.base.errors import LlmqError
from llmq.commands.cli import _run, app
from llmq.commands.common import load_run
from llmq.options.option_types import NEWEST
from llmq.options.options import OPTIONS
from llmq.options.options_io import COMMAND_LINE_ONLY, make_config
from llmq.options.presets import preset
from llmq.plan.target import MachineOptions
from llmq.runtime.world import World

GOLDEN = Path(__file__).parent / "golden" / "flags.txt"
TINY = ["--model", "tiny", "--from-scratch"]


class Recorder:
    """Stands in for an implementation function; keeps the arguments of its one call."""

    def __init__(self, result=None, error=None):
        self.result, self.error = result, error

    def __call__(self, *args, **kwargs):
        self.args, self.kwargs = args, kwargs
        if self.error is not None:
            raise self.error
        return self.result


@pytest.fixture
def stub(monkeypatch):
    """stub("run.training.run_training") replaces a function where the commands import it from."""

    def replace(name, **outcome):
        module, function = name.rsplit(".", 1)
        recorder = Recorder(**outcome)
        monkeypatch.setitem(sys.modules, f"llmq.{module}", SimpleNamespace(**{function: recorder}))
        return recorder

    return replace


def run_train(stub, *args):
    """The TrainConfig that `llmq train` with these arguments starts."""
    training = stub("run.training.run_training")
    assert _run(["train", *TINY, *args]) == 0
    return training.args[0]


def flag_list():
    """Options of runs with their defaults, then the options and arguments of each command."""
    spelled = {
        name: [
            " ".join([*parameter.opts, *parameter.secondary_opts])
            for parameter in command.params
            if not getattr(parameter, "hidden", False)
        ]
        for name, command in typer.main.get_command(app).commands.items()
    }
    fields = {f"--{option.flags[0]}": name for name, option in OPTIONS.items()}
    defaults = replace(make_config({}), log_file="logs/NAME-TIME.json")
    shared = [text for text in spelled["train"] if text.split()[0] in fields]
    lines = [f"runs {text} = {getattr(defaults, fields[text.split()[0]])}" for text in shared]
    for name, texts in spelled.items():
        if {*shared} <= {*texts}:
            lines.append(f"{name} [options of runs]")
            texts = [text for text in texts if text not in shared]
        lines += [f"{name} {text}" for text in texts]
    return lines


def test_flags_are_the_golden_ones():
    """A new or changed flag or default is a decision: edit the golden file by hand."""
    assert flag_list() == GOLDEN.read_text().splitlines()


def test_what_is_no_option_of_a_run():
    own = {line.split()[1][2:] for line in flag_list() if line.startswith("train --")}
    assert own == COMMAND_LINE_ONLY - {"help"}


def python(code, *args):
    return subprocess.run(
        [sys.executable, "-c", code, *args], capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize("args", [["--help"], ["train", "-h"], []])
def test_help_is_quick_and_loads_nothing_heavy(args):
    code = (
        "import sys, atexit\n"
        "heavy = {'numpy', 'ml_dtypes', 'cupy', 'cuda.bindings', 'yaml', 'torch', 'matplotlib'}\n"
        "atexit.register(lambda: print(sorted(heavy & set(sys.modules)), file=sys.stderr))\n"
        "from llmq.commands.cli import main\n"
        "main()\n"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = python(code, *args)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0
    assert "Usage: llmq" in done.stdout
    assert done.stderr == "[]\n"
    # Takes 0.3 s where 0.5 s is the aim. Processor time, as other tests may keep the machine busy.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.5


def test_version(capsys):
    assert _run(["--version"]) == 0
    assert capsys.readouterr().out == f"llmq {__version__}\n"


def test_train_passes_config_model_and_arguments(stub, monkeypatch):
    training = stub("run.training.run_training")
    monkeypatch.setattr(sys, "argv", ["llmq", "train", "..."])
    assert _run(["train", *TINY, "--batch=2", "--lr", "1e-3", "--name", "x"]) == 0
    config, model, model_dir, argv, world = training.args
    assert (config.batch_size, config.learning_rate) == (2, 1e-3)
    assert config.out_dir == Path("output/x")
    assert (model, model_dir) == (preset("tiny"), None)
    assert (argv, world) == (["llmq", "train", "..."], World())


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ([], True),
        (["--use-cuda-graphs"], True),
        (["--no-use-cuda-graphs"], False),
        (["--use-cuda-graphs=false"], False),
        (["--use-cuda-graphs=TRUE"], True),
        (["--no-use-cuda-graphs", "--use-cuda-graphs"], True),  # the last one counts
    ],
)
def test_spellings_of_flags(stub, args, expected):
    assert run_train(stub, *args).use_cuda_graphs is expected


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ([], None),
        (["--continue"], NEWEST),
        (["--continue", "--new-data"], NEWEST),
        (["--continue", "300"], "300"),
        (["--continue=ckpt/a/step_00000300"], "ckpt/a/step_00000300"),
    ],
)
def test_continue_with_and_without_value(stub, args, expected):
    config = run_train(stub, *args, "--steps", "3")
    assert config.continue_from == expected
    assert config.new_data is ("--new-data" in args)


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ([], -1),
        (["--debug-log-abs-max"], 1),
        (["--debug-log-abs-max", "--recompute-norm"], 1),
        (["--debug-log-abs-max=5"], 5),
        (["--debug-log-abs-max", "5"], 5),
        (["--debug-log-abs-max=-1"], -1),
        (["--debug-log-abs-max", "-1", "--recompute-norm"], -1),
    ],
)
def test_steps_with_and_without_value(stub, args, expected):
    config = run_train(stub, *args, "--steps", "3")
    assert config.debug_log_abs_max == expected
    assert config.recompute_norm is ("--recompute-norm" in args)


def test_dry_run_plans(stub):
    planning = stub("plan.report.run_plan")
    assert _run(["train", *TINY, "--dry-run", "--gpus", "2"]) == 0
    config, model = planning.args
    assert (config.gpus, model) == (2, preset("tiny"))
    assert planning.kwargs == {}


def test_plan(stub, capsys):
    planning = stub("plan.report.run_plan")
    assert _run(["plan", *TINY, "--gpu-memory", "16GiB", "--json"]) == 0
    assert planning.args[2] == MachineOptions(gpu_memory=2**34)
    assert planning.kwargs == {"teacher": None, "fit": None, "placement": False, "json": True}
    for flag in ("--gpu-memory", "--host-memory"):
        assert _run(["plan", *TINY, flag, "big"]) == 2
        assert capsys.readouterr().err.startswith(f"error: {flag}: expected a size")


def test_what_a_search_leaves_alone(stub, tmp_path):
    (tmp_path / "run.yaml").write_text("lmhead-chunks: 2\nbatch: 2\n")
    planning, args = stub("plan.report.run_plan"), ["--no-recompute-att", "--card=4090"]
    assert _run(["plan", *TINY, "--fit", "--config", str(tmp_path / "run.yaml"), *args]) == 0
    given = {"model", "from_scratch", "lmhead_chunks", "batch_size", "recompute_att"}
    assert (planning.args[2].card, planning.kwargs["fit"]) == ("4090", given)


def test_reserve(stub, capsys):
    choosing = stub("plan.fit.choose", result=make_config({"model": "tiny"}))
    stub("run.training.run_training")
    for size, expected in (("0", 0), ("1GiB", 1 << 30)):
        assert _run(["train", *TINY, "--auto", "--reserve", size]) == 0
        assert choosing.args[3] == expected
    for args, message in (
        (["train", *TINY, "--reserve", "1GiB"], "--reserve: needs --auto; use --memory-limit"),
        (["train", *TINY, "--auto", "--reserve", "some"], "--reserve: expected a size"),
    ):
        assert _run(args) == 2
        assert capsys.readouterr().err.startswith(f"error: {message}")


def test_auto_trains_what_it_has_chosen(stub):
    chosen = make_config({"model": "tiny", "from-scratch": True, "recompute-att": True})
    choosing, training = (
        stub("plan.fit.choose", result=chosen),
        stub("run.training.run_training"),
    )
    assert _run(["train", *TINY, "--auto", "--batch-size=8"]) == 0
    config, model, given, reserve = choosing.args
    assert (config.batch_size, model, reserve) == (8, preset("tiny"), None)
    assert given == {"model", "from_scratch", "batch_size"}
    argv = ["llmq", "train", "--model=tiny", "--from-scratch", "--recompute-att"]
    assert training.args == (chosen, preset("tiny"), None, argv, World())


# A command line, the function that it calls, and what this is given beside its own defaults; None:
# another test looks at that.
COMMANDS = [
    ("train --model tiny --from-scratch", "run.training.run_training", None),
    ("rl --model tiny --from-scratch --prompts p.jsonl --reward r.py:score", "run.rl.run_rl", None),
    ("plan --model tiny --from-scratch", "plan.report.run_plan", None),
    ("verify --model tiny --from-scratch", "bench.verify.run_verify", None),
    ("score tiny a.bin --from-scratch --out s", "run.evaluate.run_score", None),
    ("recipe --hours 1 --card h100 --host-memory 9GiB", "plan.recipe_report.run_recipe", None),
    (
        "rig --out x/rig --minutes 3 --offload-dir a --offload-dir b",
        "rig.rig.run_rig",
        {"out": Path("x/rig"), "minutes": 3.0, "folders": ["a", "b"]},
    ),
    (
        "tokenize a.txt b.txt --tokenizer bytes --out data --workers 2 --overwrite",
        "text.tokenize.tokenize",
        {
            "inputs": ["a.txt", "b.txt"],
            "tokenizer": "bytes",
            "out": Path("data"),
            "workers": 2,
            "overwrite": True,
        },
    ),
    (
        "show data a.bin --document 3 --ids",
        "text.show.run_show",
        {"patterns": ["data", "a.bin"], "document": 3, "ids": True},
    ),
    (
        "train-tokenizer a.txt --vocab-size 300 --out t --special-token <a> --special-token <b>",
        "text.train_tokenizer.train_tokenizer",
        {
            "inputs": ["a.txt"],
            "vocab_size": 300,
            "out": Path("t"),
            "special_tokens": ["<a>", "<b>"],
        },
    ),
    ("demo", "run.demo.run_demo", {"out": Path("demo"), "device": "auto"}),
    (
        "demo --out d --device CPU --steps 9 --continue",
        "run.demo.run_demo",
        {"out": Path("d"), "device": "cpu", "steps": 9, "resume": True},
    ),
    (
        "sample model --prompt Hi --top-k 5 --model-dtype float32",
        "run.sampling.run_sample",
        {
            "model": "model",
            "prompt": "Hi",
            "max_new_tokens": 200,
            "temperature": 0.8,
            "top_k": 5,
            "top_p": 1.0,
            "seed": 42,
            "num_samples": 1,
            "chat": False,
            "device": "auto",
            "model_dtype": "fp32",
            "verbose": False,
        },
    ),
    (
        "export --out-dir o --checkpoint-dir c",
        "checkpoint.exports.export",
        {"where": Path("c"), "out": Path("o")},
    ),
    (
        "merge base adapter --out o",
        "checkpoint.merge.merge_adapter",
        {"base": "base", "adapter": Path("adapter"), "out_dir": Path("o")},
    ),
    (
        "plot pyproject.toml README.md --x hours --html",
        "report.plot.run_plot",
        {"logs": [Path("pyproject.toml"), Path("README.md")], "x": "hours", "html": True},
    ),
    (
        "sweep-lr --data d --depth 3 --rates 4 --out o.json --lr 0.1",
        "bench.losses.run_sweep_lr",
        {
            "given": {
                "train-file": ("d/train*.bin",),
                "eval-file": "split",
                "learning-rate": "0.1",
            },
            "depth": 3,
            "rates": 4,
            "out": Path("o.json"),
        },
    ),
    ("top README.md --once", "run.top.run_top", {"log": Path("README.md"), "once": True}),
    (
        "watch README.md --tensorboard t --wandb p --interval 0",
        "report.sinks.run_watch",
        {"log": Path("README.md"), "tensorboard": Path("t"), "wandb": "p", "interval": 0},
    ),
]


@pytest.mark.parametrize(("line", "target", "expected"), COMMANDS)
def test_commands_call_their_implementation(stub, line, target, expected):
    """The real function takes these arguments, and the others are its defaults."""
    module, function = target.rsplit(".", 1)
    real = inspect.signature(getattr(importlib.import_module(f"llmq.{module}"), function))
    described = function in ("tokenize", "train_tokenizer")
    result = SimpleNamespace(describe=lambda: "") if described else ["config.json"]
    call = stub(target, result=result)
    assert _run(line.split()) == 0
    given = dict(real.bind(*call.args, **call.kwargs).arguments)
    for name, parameter in real.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            given |= {n: v for n, v in given.pop(name, {}).items() if v is not None}
        default = None if parameter.default is inspect.Parameter.empty else parameter.default
        if given.get(name) == default:
            given.pop(name, None)
    assert expected is None or given == expected


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ("train", "--model: is missing: give the directory of a Hugging Face model, a repository"),
        ("train --model gpt2", "add --from-scratch, or give openai-community/gpt2 with --download"),
        ("train --eval-every 10", "eval-every is a name of nanochat: use --eval-every-n-steps 10"),
        ("train --step=10", "--step, did you mean --steps?"),
        ("eval x --task hellaswag", "a kind, and no file: `llmq data hellaswag` fetches data/hell"),
        ("eval x --task arc_easy", "data set allenai/ai2_arc of the hub, and give it as --task"),
        ("tokenize a.txt --out x", "--tokenizer: is missing: give the directory of the model that"),
    ],
)
def test_what_is_missing_or_meant_is_said(args, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert _run(args.split()) == 2
    out, err = capsys.readouterr()
    assert said in err and (out, err.count("\n")) == ("", 1)


def test_results_are_printed(stub, capsys):
    stub("text.tokenize.tokenize", result=SimpleNamespace(describe=lambda: "7 documents"))
    assert _run("tokenize a --tokenizer bytes --out d".split()) == 0
    stub(
        "checkpoint.exports.export",
        result=["config.json", "model.safetensors"],
    )
    assert _run("export --out-dir o".split()) == 0
    assert capsys.readouterr().out == "7 documents\nwrote config.json, model.safetensors to o\n"
    stub("checkpoint.exports.export", result=["g.gguf"])
    assert _run("export m --format gguf --out there/g.gguf".split()) == 0
    assert capsys.readouterr().out == "wrote there/g.gguf\n"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["train", *TINY, "--stepz", "3"], "--stepz"),
        (["train", *TINY, "--steps"], "--steps"),
        (["train", *TINY, "--from-scratch=maybe"], "--from-scratch: expected true or false"),
        (["train", *TINY, "--lr", "x"], "--learning-rate: expected a number, got 'x'"),
        (["train", *TINY, "--seq-len", "2048"], "--seq-len: 2048 exceeds"),
        (["train", *TINY, "extra"], "unexpected extra argument"),
        (["train", "--train-file", "a.bin", "b.bin"], "(b.bin) Put a pattern such as"),
        (["plan", *TINY, "--gpu-memory", "0"], "--gpu-memory: must be at least 1, got 0"),
        (["plan", *TINY, "--host-memory", "x"], "--host-memory: expected a size"),
        (["train", "--model", "tinny", "--from-scratch"], "did you mean tiny"),
        (["sample", "m", "--device", "tpu"], "--device: expected auto or cpu or cuda, got 'tpu'"),
        (["sample", "m", "--top-p", "2"], "top-p"),
        (["export"], "--out"),
        (["trian"], "trian"),
    ],
)
def test_user_errors_are_one_line_and_exit_2(stub, capsys, args, message):
    stub("run.training.run_training")
    stub("run.sampling.run_sample")
    assert _run(args) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert message in err


def _of_rank(error):
    error.add_note("raised by rank 1 of 3")
    return error


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (LlmqError("rank 1: no memory"), "error: rank 1: no memory\n"),
        (LlmqError("two\nlines"), "error: two lines\n"),
        (MemoryError("Unable to allocate 3 GiB"), "error: out of host memory, lower --batch-size"),
        (
            OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "ckpt/a"),
            "error: No space left on device: ckpt/a; free some space",
        ),
        (FileNotFoundError(errno.ENOENT, "No such file", "x.bin"), "error: No such file: x.bin\n"),
        (OSError("odd"), "error: odd\n"),
        (
            _of_rank(OSError(errno.EIO, "I/O error", "a.bin")),
            "error: I/O error: a.bin (raised by rank 1 of 3)\n",
        ),
        (
            _of_rank(MemoryError()),
            "error: out of host memory, lower --batch-size or --seq-len (raised by rank",
        ),
    ],
)
def test_errors_of_a_run(stub, capsys, monkeypatch, error, message):
    monkeypatch.delenv("LLMQ_DEBUG", raising=False)
    stub("run.training.run_training", error=error)
    assert _run(["train", *TINY]) == 2
    assert capsys.readouterr().err.startswith(message)
    monkeypatch.setenv("LLMQ_DEBUG", "1")
    with pytest.raises(type(error)):
        _run(["train", *TINY])


@pytest.mark.parametrize("name", ["run.json", "run.yaml", "run.toml"])
def test_a_file_that_is_nested_too_deeply(tmp_path, capsys, name):
    start = "model = " if name == "run.toml" else '{"model": '
    (tmp_path / name).write_text(start + "[" * 100_000)
    assert _run(["train", "--config", str(tmp_path / name)]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "nested too deeply" in err


def test_consoles_that_are_not_utf8(monkeypatch):
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    code = (
        "import sys; from types import SimpleNamespace\n"
        "show = lambda *args, **kwargs: print(kwargs['prompt'])\n"
        "sys.modules['llmq.run.sampling'] = SimpleNamespace(run_sample=show)\n"
        "from llmq.commands.cli import main\n"
        "main()\n"
    )
    done = python(code, "sample", "model", "--prompt=日本")
    assert (done.returncode, done.stdout, done.stderr) == (0, "\\u65e5\\u672c\n", "")


def test_bugs_keep_their_traceback(stub):
    stub("run.training.run_training", error=ValueError("a bug"))
    with pytest.raises(ValueError, match="a bug"):
        _run(["train", *TINY])


def test_interrupt_exits_130(stub, capsys):
    stub("run.training.run_training", error=KeyboardInterrupt())
    assert _run(["train", *TINY]) == 130
    assert "error" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "target"),
    [
        (["bench"], "bench.bench.run_bench"),
        ("tokenize x --tokenizer bytes --out o".split(), "text.tokenize.tokenize"),
        ("watch README.md --wandb p".split(), "report.sinks.run_watch"),
    ],
)
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP])
def test_what_has_child_processes_cleans_up_after_a_signal(monkeypatch, args, target, signum):
    cleaned_up = []

    def terminated(*args, **kwargs):
        try:
            os.kill(os.getpid(), signum)
            time.sleep(10)  # Python acts on a signal at the next opportunity
        finally:
            cleaned_up.append(True)

    module, function = target.rsplit(".", 1)
    stand_in = SimpleNamespace(**{function: terminated})
    monkeypatch.setitem(sys.modules, f"llmq.{module}", stand_in)

    def unhandled(*_):
        pass

    before = signal.signal(signum, unhandled)
    try:
        assert _run(args) == 128 + signum
        assert cleaned_up == [True]
        assert signal.getsignal(signum) == unhandled
    finally:
        signal.signal(signum, before)


@pytest.mark.parametrize("function", ["main", "train_main"])
def test_ctrl_c_while_modules_are_loaded(function):
    code = (
        "import sys\n"
        "class Interrupting:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'typer':\n"
        "            raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupting())\n"
        "import llmq.__main__\n"
        f"llmq.__main__.{function}()\n"
    )
    done = python(code, "--help")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_the_installed_commands_begin_there():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert project["project"]["scripts"] == {
        "llmq": "llmq.__main__:main",
        "llmq-train": "llmq.__main__:train_main",
    }


def test_warnings_go_to_stderr(stub, capsys):
    run_train(stub, "--ckpt-major", "5", "--ckpt-keep-n", "0")
    out, err = capsys.readouterr()
    assert out.startswith("Next:\n  llmq sample output/") and "warning" not in out
    assert err.startswith("warning: --ckpt-major has no effect")


@pytest.mark.parametrize("args", [["train", "--help"], ["--version"]])
def test_a_reader_that_leaves_is_no_error(args):
    command = [sys.executable, "-m", "llmq", *args]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 1


def test_llmq_train_is_llmq_train():
    code = "from llmq.__main__ import train_main; train_main()"
    done = python(code, "--help")
    assert done.returncode == 0
    assert "Usage: llmq-train" in done.stdout
    done = python(code, "--batch", "0")
    assert (done.returncode, done.stderr) == (2, "error: --batch-size: must be at least 1, got 0\n")


def test_a_config_that_is_a_pipe_is_read_once():
    """The shell makes such a pipe of <(…): a second reader finds it empty."""
    end, other = os.pipe()
    os.write(other, b"{model: tiny, from-scratch: true, batch-size: 7}")
    os.close(other)
    config, _, _, fields = load_run({}, Path(f"/dev/fd/{end}"))
    os.close(end)
    assert (config.batch_size, fields) == (7, {"model", "from_scratch", "batch_size"})


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        (["tokenize", "x.txt", "--tokenizer", "bytes", "--out", ""], "--out: is empty: give a"),
        (["export", "--checkpoint-dir=x", "--out-dir="], "--out-dir: is empty: give a path"),
        (["train", "--config", "a.yaml", "--config=b.yaml"], "--config: is given twice: put all"),
        (["bench", "--model=tiny", "--out=new/"], "--out: 'new/' is a folder: give the name of"),
        (["bench", "--model=tiny", "--out", "."], "--out: '.' is a folder: give the name of a"),
        (["rig", "--out", "new/"], "--out: 'new/' is a folder: give the name of a report in it"),
    ],
)
def test_what_would_be_overlooked(args, problem, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert _run(args) == 2
    assert capsys.readouterr().err.startswith(f"error: {problem}")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("args", [["--version"], ["train", "--help"], ["plan", *TINY]])
def test_a_full_standard_output_ends_a_command_in_one_line(args):
    command = [sys.executable, "-m", "llmq", *args]
    environment = {n: v for n, v in os.environ.items() if n != "PYTHONUNBUFFERED"}
    with open("/dev/full", "w") as full:
        how = {"stdout": full, "stderr": subprocess.PIPE, "text": True, "env": environment}
        done = subprocess.run(command, **how)
    line = "error: cannot write standard output: No space left on device\n"
    assert (done.returncode, done.stderr) == (2, line)


@pytest.mark.parametrize(("model", "status"), [(["--model", "nowhere"], 2), (TINY, 0)])
def test_a_full_standard_error_changes_no_status(model, status):
    command = [sys.executable, "-m", "llmq", "plan", *model, "--steps=9", "--warmup=9"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=full)
    assert done.returncode == status
