"""Options that llmq had once: answers of the command line, and files and checkpoints with them."""

import pytest
import typer

from llmq.base.errors import ConfigError
from llmq.commands.common import TrainCommand, train_options
from llmq.options.options import OPTIONS
from llmq.options.options_io import FIELDS, make_config
from llmq.options.removed import REMOVED, current_options


def of_command_line(*flags):
    """The options that flags of a command give."""
    found = []

    def given_to(given: dict) -> None:
        found.append(given)

    app = typer.Typer()
    app.command(cls=TrainCommand)(train_options(given_to))
    app(list(flags), standalone_mode=False)
    return found[0]


@pytest.mark.parametrize("name", REMOVED)
def test_a_removed_flag_goes_on_with_one_line(name, capsys):
    flag, old = "--" + name.replace("_", "-"), REMOVED[name]
    assert name not in OPTIONS and flag.removeprefix("--") not in FIELDS
    value = "true" if old.switch else {"muon_scale": "match-rms", "head": "lm"}.get(name, "1")
    given = of_command_line(f"{flag}={value}", "--loss", "ce")
    if name in ("attention_dtype", "qk_norm", "logit_softcap"):
        with pytest.raises(ConfigError, match=f"{flag}=.* is no option any more: "):
            make_config(given)
        return
    make_config(given)
    [line] = capsys.readouterr().err.splitlines()
    typed = {"true": True, "1": 1}.get(value, value)
    assert line.startswith(f"warning: {flag}={typed} is no option any more: ")
    assert old.now in line or ": taken as --lr-parts" in line


def test_removed_flags_set_options_of_today(capsys):
    given = of_command_line(
        "--loss=dpo", "--packing=best-fit", "--no-pref-normalize", "--pref-beta", "0.2"
    )
    assert make_config(given).loss_values["beta"] == 0.2
    config = make_config(
        {"loss": "kd", "kd_top_k": 4, "kd_divergence": "reverse", "kd_mixture": None}
    )
    assert config.loss_values == {
        **{"top-k": 4, "mixture": 0.0, "temperature": 1.0},
        "divergence": "reverse",
    }
    rates = make_config({"lr_embedding": 5e-3, "lr_head": 1e-3}).lr_parts
    assert rates == ("embedding=0.005", "head=0.001")
    muon = {"optimizer": "muon", "muon_lr": 0.02}
    assert (
        make_config(muon | {"muon_normalize_rows": 0.95, "muon_scale": "match-rms"}).optimizer
        == "normuon"
    )
    with pytest.raises(ConfigError, match="only an earlier version"):
        make_config(muon | {"muon_scale": "spectral"})


def test_two_names_of_an_option_beside_a_removed_one_are_refused():
    flags = next(option.flags for option in OPTIONS.values() if len(option.flags) > 1)
    with pytest.raises(ConfigError, match="is given twice, under two names"):
        make_config({flags[0]: 1, flags[1]: 1, "pref_beta": 0.1})


def test_old_values_become_those_of_today():
    old = {"loss": "kd", "kd_top_k": 8, "kd_mixture": 0.0, "pref_beta": None, "steps": 3}
    expected = {"loss": "kd", "steps": 3, "loss_params": ("top-k=8", "mixture=0")}
    assert current_options(old, "file") == expected
    assert current_options(old | {"loss": "ce"}, "file") == {"loss": "ce", "steps": 3}


def test_loss_params_of_layers_are_merged(tmp_path):
    file = tmp_path / "options.yaml"
    file.write_text("loss: simpo\npacking: best-fit\nloss-params: {gamma: 1.5, beta: 3}\n")
    values = make_config({"loss-params": ["beta=2.5"]}, file).loss_values
    assert (values["gamma"], values["beta"]) == (1.5, 2.5)
    values = make_config({"loss": "dpo"}, file).loss_values
    assert values["beta"] == 0.1
    with pytest.raises(ConfigError, match="smoothing, got gamma"):
        make_config({"loss": "dpo", "loss-params": "gamma=1"}, file)
    with pytest.raises(ConfigError, match="--loss-params: --loss ce has no parameters, got beta"):
        make_config({"loss-params": "beta=1"})


def test_values_that_made_other_numbers_are_refused():
    old = {"optimizer": "muon", "muon_scale": "spectral", "muon_lr": 0.02}
    with pytest.raises(ConfigError, match="--muon-scale=spectral is no option"):
        current_options(old, "ckpt: ")
    assert current_options(old | {"optimizer": "adamw"}, "ckpt: ")["optimizer"] == "adamw"
    rows = {"optimizer": "muon", "muon_normalize_rows": 0.95}
    assert current_options(rows, "ckpt: ") == {"optimizer": "normuon"}
    with pytest.raises(ConfigError, match=r"--muon-normalize-rows=0\.9 is no"):
        current_options(rows | {"muon_normalize_rows": 0.9}, "ckpt: ")


def test_other_values_go_on_with_one_line(capsys):
    old = {"guard_recovery": 5, "sample_tokens": 64, "head": "score", "eval_fraction": 0.1}
    old |= {"eval_file": "split", "lr_head": 1e-3, "lr_vectors": None}
    expected = {"eval_file": "split:0.1", "lr_parts": ("head=0.001",), "num_labels": 2}
    assert current_options(old, "ckpt: ") == expected
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: ckpt: --guard-recovery=5 is no option any more: ")
    assert make_config({}).eval_fraction is None


def test_rates_of_parts_are_checked():
    for text, error in (
        ("tables=1e-3", "--lr-parts: expected some of embedding, head, vectors, got tables"),
        ("head=-1", "--lr-parts: must be at least 0"),
        ("head=fast", "--lr-parts: expected a number"),
        ("head", "--lr-parts: expected NAME=VALUE"),
        ("head=1,head=2", "--lr-parts: head is given twice"),
    ):
        with pytest.raises(ConfigError, match=f"^{error}"):
            make_config({"lr-parts": text})


def test_parts_of_splits_become_eval_files():
    def eval_file(**old):
        return current_options({"eval_fraction": 0.1, **old}, "ckpt: ").get("eval_file")

    assert eval_file(eval_file="split") == eval_file(train_file=("a.bin",)) == "split:0.1"
    assert eval_file(eval_file=["split", "b=b.bin"]) == ["split:0.1", "b=b.bin"]
    assert eval_file(eval_file="e.bin") == "e.bin"
    assert eval_file() is None
