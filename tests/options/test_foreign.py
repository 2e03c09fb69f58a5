"""Names of other trainers are answered with the option here, all of a file or a command at once."""

import importlib
import json
import re
from pathlib import Path

import pytest
import yaml

from llmq.base.errors import ConfigError
from llmq.commands.cli import _run
from llmq.options.foreign import FOREIGN, NAMES, PEERS, answer
from llmq.options.option_types import parse_bool
from llmq.options.options import OPTIONS
from llmq.options.options_io import COMMAND_LINE_ONLY, FIELDS, make_config
from llmq.options.removed import REMOVED
from llmq.run.trainer import Trainer

OTHERS = {"chat-template", "dataset", "field", "out", "overwrite", "push", "tokenizer", "top-k"}
OTHERS |= {"train-on", "workers"}  # of llmq tokenize, export and score


def advised():
    """Every answer, with an example of the value."""
    for name, (_, answers) in FOREIGN.items():
        values = answers if isinstance(answers, dict) else [""]
        for value in values:
            text = answers if isinstance(answers, str) else answers[value]
            part = any(word in text for word in ("{percent}", "split:", "--beta-"))
            given = value or ("0.5" if part else "8")
            yield answer(name, given)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("per_device_train_batch_size", 2, "use --batch-size 2"),
        ("gradient_accumulation_steps", "8", "use --grad-accumulation 8"),
        ("num_train_epochs", 3.0, "use --epochs 3"),
        ("warmup_ratio", 0.03, "use --warmup 3%"),
        ("base_model", "Qwen/Qwen2.5-0.5B", "use --model Qwen/Qwen2.5-0.5B"),
        ("base_model", "my model", "use --model 'my model'"),
        ("output_dir", "out/talks/", "use --name talks, for the model output/talks"),
        ("lr_scheduler_type", "COSINE", "use --lr-schedule cosine"),
        ("lr_scheduler_type", "polynomial", "use --lr-schedule cosine, linear or wsd"),
        ("load_in_4bit", True, "use --base-dtype nf4"),
        ("load_in_4bit", False, "leave it out"),
        ("bf16", "auto", "leave it out"),
        ("lora_target_modules", ["q_proj", "v_proj"], "use --lora-targets q,v"),
        ("target_modules", "all-linear", "use --lora-targets all"),
        ("target_modules", "conv1d", "use --lora-targets …"),
        ("modules_to_save", ["embed_tokens", "lm_head"], "use --train embeddings,head"),
        ("optim", "paged_adamw_8bit", "use --opt-m-dtype e4m3 --opt-v-dtype e4m3 --offload-opt-m"),
        ("packing", True, "use --packing best-fit"),
        ("device-batch-size", "32", "nanochat: use --batch-size 32"),
        ("datasets", [{"path": "x"}], "use llmq tokenize FILE"),
        ("neftune_noise_alpha", 5, "leave it out, as nothing adds noise"),
        ("per_device_train_batch_size", None, "use --batch-size …"),
    ],
)
def test_the_answer_has_the_option_and_the_value(name, value, said):
    line = answer(name, value)
    assert line.startswith(f"{name} is a name of ") and said in line


def test_every_answer_names_options_that_there_are():
    for line in advised():
        for flag in re.findall(r"--(?:no-)?([a-z0-9-]+)", line.partition(": ")[2]):
            assert flag in {*FIELDS, *COMMAND_LINE_ONLY, *OTHERS}, line


def test_the_value_of_an_answer_is_one_of_the_option():
    checked = 0
    for line in advised():
        whole = re.fullmatch(r".*?: use ((?:--[a-z0-9-]+(?: [^\s,-]\S*)?(?: |$))+)", line)
        for flag, value in re.findall(r"--([a-z0-9-]+) ?([^\s,-]\S*)?", whole[1] if whole else ""):
            opt = OPTIONS.get(FIELDS.get(flag))
            if opt is None or opt.parse is parse_bool or value in ("", "…") or value.isupper():
                continue
            if opt.choices and value == "8":  # the example is none of a trainer's own words
                continue
            opt.check(opt.convert(value))
            checked += 1
    assert checked > 80


def test_names_are_written_once_and_hide_no_option_here():
    names = [name for _, table in NAMES for name in table]
    assert len(names) == len(set(names)) > 150 and len(PEERS) == 7
    for name in names:
        answers = FOREIGN[name].answers
        assert name not in REMOVED
        if name.replace("_", "-") in FIELDS:  # only values that are none here are answered
            assert "" not in answers, name
            for value in answers:
                opt = OPTIONS[FIELDS[name.replace("_", "-")]]
                assert not opt.choices or value not in opt.choices


def test_all_wrong_keys_of_a_file_are_told_at_once(tmp_path):
    given = {"base_model": "gpt2", "micro_batch_size": 2, "sample_packing": True, "steps": "x"}
    given |= {"zzz": 1, "lr": 1e-4}
    for suffix, write in (("yaml", yaml.safe_dump), ("json", json.dumps)):
        file = tmp_path / f"a.{suffix}"
        file.write_text(write(given, sort_keys=False))
        with pytest.raises(ConfigError) as error:
            make_config({}, file)
        assert error.value.headline == f"{file}: 5 options are wrong:"
        assert error.value.details == (
            "  base_model is a name of Axolotl: use --model gpt2",
            "  micro_batch_size is a name of Axolotl: use --batch-size 2",
            "  sample_packing is a name of Axolotl: use --packing best-fit",
            "  unknown option zzz; llmq train --help lists them",
            "  --steps: expected an integer, got 'x'",
        )
    file.write_text(json.dumps({f"key{i}": 1 for i in range(60)}))
    with pytest.raises(ConfigError) as error:
        make_config({}, file)
    assert len(error.value.details) == 51 and error.value.details[-1] == "  and 10 more"


def test_values_of_others_of_an_option_here_are_answered(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="adapter is a name of Axolotl: use --lora-rank 16 --bas"):
        make_config({"adapter": "qlora"})
    with pytest.raises(ConfigError, match="optimizer is a name of Axolotl: use --opt-m-dtype e4m3"):
        make_config({"optimizer": "adamw_bnb_8bit"})
    assert make_config({"packing": "best-fit", "optimizer": "muon"}).packing == "best-fit"
    (tmp_path / "lora").mkdir()  # a directory of adapters, whatever it is called
    assert str(make_config({"adapter": "lora"}).adapter) == "lora"


def test_keyword_arguments_of_the_trainer_are_answered():
    with pytest.raises(ConfigError, match="is a name of Hugging Face: use --batch-size 2"):
        Trainer(per_device_train_batch_size=2)


def test_all_names_of_a_command_line_are_told_at_once(capsys):
    line = "train --model_name_or_path gpt2 --per_device_train_batch_size=2 --bf16 True --max_steps"
    line += " -1 --learning_rate 2e-5 --lora_target_modules q_proj v_proj --zzz --load_in_4bit"
    assert _run(line.split()) == 2
    assert capsys.readouterr().err.splitlines() == [
        "error: 8 options are not llmq's:",
        "  model_name_or_path is a name of Hugging Face: use --model gpt2",
        "  per_device_train_batch_size is a name of Hugging Face: use --batch-size 2",
        "  bf16 is a name of Hugging Face: leave it out, as bf16 is the default",
        "  max_steps is a name of Hugging Face: leave it out",
        "  --learning_rate is --learning-rate 2e-5 here",
        "  lora_target_modules is a name of TRL, Axolotl: use --lora-targets q,v",
        "  --zzz is no option",
        "  load_in_4bit is a name of TRL, Axolotl, Unsloth: use --base-dtype nf4, beside "
        "--lora-rank",
    ]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("train --micro_batch_size 2", "error: micro_batch_size is a name of Axolotl: use --batch"),
        ("plan --batch_size 2", "error: --batch_size is --batch-size 2 here"),
        ("eval x --max_grad_norm", "No such option: --max_grad_norm"),  # which eval has not
        ("train --zzz", "No such option: --zzz"),
    ],
)
def test_a_command_answers_what_it_has(line, said, capsys):
    assert _run(line.split()) == 2
    assert said in capsys.readouterr().err


def test_the_page_has_the_table(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "tools")
    page = importlib.import_module("coming_from")
    text = page.PAGE.read_text(encoding="utf-8")
    assert page.tables() in text, "PYTHONPATH=. tools/coming_from.py"
    assert text.count("| `micro_batch_size` | `--batch-size VALUE` |") == 1
