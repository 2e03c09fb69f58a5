"""llmq.Trainer from Python: steps on given and on file data, evaluation, state, export."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

import llmq
from llmq.base.errors import ConfigError, DataError, LlmqError
from llmq.checkpoint.hf import HfWeights
from llmq.commands.cli import _run
from llmq.data.loader import DataLoader
from llmq.model.rings import named_inputs
from llmq.options.options_io import make_config
from llmq.options.presets import preset
from llmq.plan.checks import check_machine
from llmq.runtime.machine import Machine
from llmq.state.params import weight_table
from tests.harness import GPU_SPEC
from tests.runs import CONFIG, VOCAB, B, T, make_workplace, options


@pytest.fixture(autouse=True)
def workplace(tmp_path, monkeypatch):
    monkeypatch.chdir(make_workplace(tmp_path))


def trainer(**changes):
    given = options(**{"grad_accumulation": 1, "steps": 10, **changes})
    given = {name.replace("-", "_"): value for name, value in given.items() if value is not None}
    return llmq.Trainer(**given)


def batch(seed=0, rows=B):
    rng = np.random.default_rng(seed)
    return tuple(rng.integers(0, VOCAB, (rows, T)).astype(np.int32) for _ in range(2))


def same(one, other):
    return one.keys() == other.keys() and all(np.array_equal(one[n], other[n]) for n in one)


@pytest.mark.parametrize("loss", ["weighted", "kd"])
def test_given_batches_bring_the_numbers_of_the_loss(loss):
    """Own batches need no scores and masks of files."""
    own = {"train_file": None, "eval_file": None, "learning_rate": 0}
    params = ("top-k=2",) if loss == "kd" else ()
    with trainer(loss=loss, loss_params=params, **own) as one, trainer(**own) as plain:
        (declared,) = named_inputs(one.model, one.config)
        # Zeros give a teacher of kd two tokens of half the probability each.
        scores = declared.zeros(B, T) + np.float32(0.5 * (loss == "weighted"))
        result = one.step([(*batch(), None, 0, {"scores": scores})])
        assert result.loss > 0
        if loss == "weighted":
            assert result.loss == pytest.approx(plain.step([batch()]).loss / 2, rel=1e-6)
        with pytest.raises(ConfigError, match=f"--loss {loss}: needs --scores"):
            one.step()
    with pytest.raises(ConfigError, match=f"--loss {loss}: needs --scores"):
        trainer(loss=loss)
    scores = {"scores": "data", "document_mask": False}
    with pytest.raises(ConfigError, match="documents are scored one by one"):
        trainer(loss=loss, **scores)


def test_steps_take_the_batches_of_the_files_in_order():
    with trainer() as files, trainer() as given:
        loader = DataLoader(
            "data/train-*.bin",
            seq_len=T,
            micro_batch=B,
            seed=given.config.train_seed,
            vocab_size=VOCAB,
        )
        with loader:
            for step in range(3):
                assert files.step() == given.step([loader.next_batch()])
                assert files.steps_done == step + 1
        assert same(files.weights(), given.weights())


def test_a_batch_can_be_learned():
    with trainer(learning_rate=3e-3) as t:
        losses = [t.step([batch()]).loss for _ in range(10)]
    assert losses[0] == pytest.approx(math.log(VOCAB), rel=0.05)  # nothing is known yet
    assert losses[-1] < losses[0] - 0.5


def test_results_come_later():
    """Three further steps may be enqueued before a result is read."""
    with trainer() as t:
        tickets = [t.enqueue_step() for _ in range(4)]
        late = [t.result(ticket) for ticket in tickets]
        fifth = t.enqueue_step()
        with pytest.raises(ValueError, match="not among the last 4"):
            t.result(tickets[0])
        assert t.result(fifth) != late[0]
    with trainer() as t:
        assert late == [t.step() for _ in range(4)]


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ([batch(), batch()], "grad_accumulation is 1, got 2 batches"),
        ([batch(rows=B + 1)], r"inputs must be int32 \(2, 16\), got int32 \(3, 16\)"),
        ([(batch()[0].astype(np.int64), batch()[1])], "inputs must be int32"),
        ([(batch()[0], batch()[1][:, 1:])], "targets must be int32"),
        ([(batch()[0] + VOCAB, batch()[1])], r"inputs must be token ids in 0\.\.256"),
        ([(-batch()[0], batch()[1])], r"inputs must be token ids in 0\.\.256"),
        ([(np.full_like(batch()[0], -100), batch()[1])], "inputs must be .*, got -100$"),
        ([(batch()[0], batch()[1] + VOCAB)], r"targets must be token ids in 0\.\.256"),
        # Only -100 is masked, as in torch.
        ([(batch()[0], np.full_like(batch()[1], -1))], "targets also -100, got -1$"),
    ],
)
def test_wrong_batches_are_refused(batches, message):
    with trainer() as t:
        with pytest.raises(ValueError, match=message):
            t.step(batches)
        assert t.steps_done == 0


def test_validation_is_the_mean_over_the_files_and_changes_nothing():
    with trainer() as t:
        t.step()
        before = t.weights()
        whole, again, part = t.validate(), t.validate(), t.validate(2)
        assert whole == again
        assert whole.tokens == 7 * T  # 7 sequences: 3 batches and a half
        assert part.tokens == 2 * B * T
        assert part.loss != whole.loss
        assert same(before, t.weights())
        after = t.step()
    with trainer() as t:
        t.step()
        assert t.step() == after  # evaluations do not disturb training


def test_numbers_of_the_run():
    with trainer(grad_accumulation=2, steps=None, epochs=3, warmup=5, final_lr_fraction=0.1) as t:
        assert (t.steps_per_epoch, t.total_steps) == (5, 15)
        assert t.learning_rate(0) == 0
        # The interpolation between both ends rounds.
        assert t.learning_rate(5) == pytest.approx(t.config.learning_rate, rel=1e-15)
        assert t.learning_rate(14) == pytest.approx(0.1 * t.config.learning_rate, rel=1e-15)
        assert t.advance_epoch_if_needed() is False
        for _ in range(5):
            t.step()
        assert t.train_loader.epoch == 0
        t.step()
        assert t.train_loader.epoch == 1


def test_a_cooldown_longer_than_its_epochs():
    with trainer(steps=None, epochs=2, cooldown=20) as t:
        assert t.total_steps == 20
    with trainer(steps=None, epochs=2, cooldown=21) as t:
        with pytest.raises(ConfigError, match=r"--cooldown: 21 steps are more than the 20 of"):
            t.step()
        assert t.steps_done == 0


def test_less_data_than_a_step_needs():
    """Is one step, unless such steps are left out."""
    with trainer(grad_accumulation=11) as t:
        assert t.step().tokens == 20 * T
    less = "--drop-last: the 10 batches of an epoch are less"
    with trainer(grad_accumulation=11, drop_last=True) as t, pytest.raises(DataError, match=less):
        t.step()


def test_save_and_load():
    with trainer(model_dtype="bf16") as t:
        t.step()
        path = t.save("elsewhere")
        assert path == Path("elsewhere/step_00000001")
        saved = t.weights()
        after = t.step()
    with trainer(model_dtype="bf16") as t:
        t.load("elsewhere")
        assert t.steps_done == 1
        assert same(saved, t.weights())
        assert t.step() == after
    # Masters in F32 can go on from BF16, with the same values.
    with trainer(model_dtype="bf16", master_dtype="fp32") as t:
        t.load(path)
        assert same({n: w.astype(np.float32) for n, w in saved.items()}, t.weights())


def test_loading_what_was_saved_before_any_data_was_read():
    with trainer() as t:
        path = t.save("start")
        results = [t.step(), t.step()]
        t.load(path)
        assert [t.step(), t.step()] == results
        t.load(path, new_data=True)
        assert t.step() != results[0]


def test_checkpoints_that_do_not_fit():
    with trainer() as t:
        with pytest.raises(LlmqError, match="'nowhere' is not and does not contain"):
            t.load("nowhere")
        t.step()
        path = t.save("saved")
    config = CONFIG | {"num_hidden_layers": 1}
    Path("model/config.json").write_text(json.dumps(config))
    with trainer() as t:
        with pytest.raises(LlmqError, match="is of another model"):
            t.load(path)
        assert t.steps_done == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_theta": 1e6}, "rope_theta was 10000.0, now it is 1000000.0"),
        ({"rms_norm_eps": 1e-5}, "norm_eps was 1e-06, now it is 1e-05"),
        ({"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}, "num_heads was 2"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_scaling was None"),
    ],
)
def test_a_checkpoint_of_other_constants_with_the_same_shapes(changes, message):
    config = CONFIG | {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False}
    Path("model/config.json").write_text(json.dumps(config))
    with trainer() as t:
        path = t.save("saved")
    harmless = {"max_position_embeddings": 99, "bos_token_id": 3, "initializer_range": 0.5}
    Path("model/config.json").write_text(json.dumps(config | harmless))
    with trainer() as t:
        t.load(path)
    Path("model/config.json").write_text(json.dumps(config | changes))
    with trainer() as t, pytest.raises(LlmqError, match=f"is of another model: {message}"):
        t.load(path)


def test_a_checkpoint_that_is_refused_changes_nothing():
    with trainer(opt_m_dtype="e4m3") as t:
        t.step()
        path = t.save("saved")
    with trainer() as t, trainer() as untouched:
        results = [untouched.step() for _ in range(3)]
        assert [t.step(), t.step()] == results[:2]
        with pytest.raises(ConfigError, match=r"--opt-m-dtype: .* cannot be converted"):
            t.load(path)
        assert t.steps_done == 2
        assert t.step() == results[2]


def test_options_that_change_the_order_of_sums_are_said(capsys):
    with trainer(all_to_all_reduce=True) as t:
        path = t.save("saved")
    with trainer() as t:
        t.load(path)
    assert capsys.readouterr().err == "", "one rank sums alone"
    with trainer(gpus=2, grad_accumulation=1, batch_size=1, zero_level=2, lmhead_chunks=2) as t:
        t.load(path)
    *_, line = capsys.readouterr().err.splitlines()
    assert line == (
        "warning: numbers may be rounded otherwise than in the checkpoint's run: "
        "--lmhead-chunks=2 (was --lmhead-chunks=1), --shard-gradients (was --no-shard-gradients), "
        "--no-all-to-all-reduce (was --all-to-all-reduce)"
    )


def test_formats_that_changed_alike_have_one_line(capsys):
    with trainer() as t:
        path = t.save("saved")
    with trainer(model_dtype="bf16", opt_m_dtype="bf16", learning_rate=0.5) as t:
        t.load(path)
    was = "in the checkpoint's run"
    rate, formats = capsys.readouterr().err.splitlines()
    assert formats == (
        "warning: --opt-m-dtype, --model-dtype, --master-dtype, --grad-accum-dtype, "
        "--matmul-dtype, --gradient-dtype, --head-dtype, --mlp-dtype are bf16, "
        f"{was} they were fp32"
    )
    assert rate == f"warning: --learning-rate is 0.5, {was} it was 0.01"


def test_a_flipped_byte_is_found(tmp_path):
    with trainer() as t:
        t.step()
        path = t.save()
        names = [p.name for p in path.iterdir()]
        assert len(names) == 4
        for name in names:
            data = bytearray((path / name).read_bytes())
            data[len(data) // 2] ^= 1
            (path / name).write_bytes(data)
            before = t.weights()
            with pytest.raises(LlmqError, match=name):
                t.load(path)
            assert same(before, t.weights())
            data[len(data) // 2] ^= 1
            (path / name).write_bytes(data)
        t.load(path)


def test_export_is_what_transformers_loads():
    with trainer(out_dir="out", batch_size=6) as t:
        t.step()
        t.export()
        ours = t.validate()
        t.eval_loader.reset()
        batches = [t.eval_loader.next_batch() for _ in range(2)]  # the second one has 1 sequence
        pairs = zip(*(batch[:2] for batch in batches), strict=True)
        parts = [torch.from_numpy(np.concatenate(part)) for part in pairs]
        inputs, targets = (part.long() for part in parts)
    model = transformers.AutoModelForCausalLM.from_pretrained("out")
    with torch.no_grad():
        logits = model(inputs).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    np.testing.assert_allclose(ours.loss, loss.item(), rtol=1e-5)  # F32 sums in another order


def test_weights_depend_on_the_seed_only():
    with trainer() as a, trainer(model_dtype="bf16") as b, trainer(seed=1) as c:
        weights = [t.weights() for t in (a, b, c)]
    name = "model.layers.0.self_attn.qkv.weight"
    np.testing.assert_array_equal(weights[0][name].astype(weights[1][name].dtype), weights[1][name])
    assert not np.array_equal(weights[0][name], weights[2][name])


def test_zero_projections():
    with trainer(init_proj_to_zero=True) as t:
        weights = t.weights()
    for name, array in weights.items():
        is_projection = name.endswith(("o_proj.weight", "down_proj.weight"))
        assert (not array.any()) == is_projection, name


def test_weights_of_a_directory_are_taken(tmp_path):
    with trainer(out_dir="out") as t:
        t.step()
        t.export()
        trained = t.weights()
    with trainer(model="out", from_scratch=False) as t:
        assert same(trained, t.weights())
    with HfWeights(Path("out")) as weights:
        weights.check(weight_table(t.model))


@pytest.mark.parametrize(
    ("prepare", "expected"),
    [
        (lambda: None, "bytes"),
        (lambda: Path("data/tokenizer").mkdir(), "bytes"),
        (lambda: _touch("data/tokenizer/tokenizer.json"), "data/tokenizer"),
        (lambda: _touch("model/tokenizer.json"), "model"),
        (lambda: _change_vocabulary(300), None),
    ],
)
def test_where_the_tokenizer_is(prepare, expected):
    prepare()
    with trainer() as t:
        found = t.tokenizer
    if expected not in (None, "bytes"):
        expected = str(Path(expected).resolve())
    assert found == expected


def test_the_tokenizer_is_found_beside_files_of_a_pattern_with_folders():
    _touch("data/tokenizer/tokenizer.json")
    for pattern in ("*/train*.bin", "{data,more}/train*.bin"):
        with trainer(train_file=pattern) as t:
            assert t.tokenizer == str(Path("data/tokenizer").resolve())


def test_continue_is_not_ignored():
    with pytest.raises(ConfigError, match=r"--continue: .* load\(\)"):
        trainer(**{"continue": True})


def _touch(name):
    Path(name).parent.mkdir(exist_ok=True)
    Path(name).write_text("{}")


def _change_vocabulary(size):
    Path("model/config.json").write_text(json.dumps(CONFIG | {"vocab_size": size}))


def test_wrong_options_raise_before_anything_is_allocated(monkeypatch):
    monkeypatch.setattr("llmq.runtime.machine.HostDevice", None)
    for changes, message in (
        ({"stepz": 3}, "unknown option stepz, did you mean steps"),
        ({"seq_len": 128}, "exceeds the model's 64 positions"),
        ({"memory_limit": "100KiB"}, "out of memory"),
        ({"model": "nowhere", "from_scratch": False}, "is not a directory"),
        ({"train_file": "nothing*.bin"}, r"no token file matches 'nothing\*\.bin'"),
        ({"eval_file": "nothing*.bin"}, r"no token file matches 'nothing\*\.bin'"),
    ):
        with pytest.raises(LlmqError, match=message):
            trainer(**changes)


def test_files_by_default_are_opened_at_first_use_and_closed():
    with trainer(train_file=None, eval_file=None) as t:
        t.step([batch()])
        with pytest.raises(DataError, match=r"no token file matches 'data/tiny-shakespeare"):
            t.step()
    t = trainer()
    t.step()
    t.close()
    with pytest.raises(RuntimeError):
        t.train_loader.next_batch()


def test_given_batches_need_no_documents_of_files():
    """Files without a `.docs` file beside batches that say where documents start."""
    inputs, targets = batch()[:2]
    with trainer(document_mask=True) as t:
        t.step([(inputs, targets, np.zeros_like(inputs))])
        with pytest.raises(DataError, match="nothing says where the documents"):
            t.step()


@pytest.mark.parametrize(
    "capability, options, changes, message",
    [
        (80, {"matmul_dtype": "e4m3"}, {}, "--matmul-dtype: e4m3 needs compute capability 8.9"),
        (90, {}, {"hidden_size": 516}, "hidden_size is 516; on a GPU it must be a"),
        (90, {}, {"head_dim": 520}, "head_dim is 520; on a GPU it must be at most 512: use"),
    ],
)
def test_what_a_gpu_cannot_do_is_one_line(capability, options, changes, message):
    config = make_config({"model": "tiny", "from-scratch": True, **options})
    spec = replace(GPU_SPEC, capability=capability)
    machine = Machine(kind="cuda", spec=spec, note=None)
    with pytest.raises(ConfigError, match=message):
        check_machine(config, replace(preset("tiny"), **changes), machine)
    check_machine(config, preset("tiny"), replace(machine, spec=GPU_SPEC))


def test_half_precision_sums_are_for_cards_with_the_kernel():
    options = {"matmul_dtype": "e4m3", "fp8_accumulate": "fp16"}
    config = make_config({"model": "tiny", "from-scratch": True, **options})
    for capability in (89, 120, 90, 100):
        machine = Machine(kind="cuda", spec=replace(GPU_SPEC, capability=capability), note=None)
        if capability in (89, 120):
            check_machine(config, preset("tiny"), machine)
            continue
        with pytest.raises(ConfigError, match=r"fp16 needs compute capability 8\.9 or 12, GPU has"):
            check_machine(config, preset("tiny"), machine)


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"hidden_size": 8200},
            "hidden_size is 8200; on a GPU it must be a multiple of 8 and at most 8192",
        ),
        (
            {"hidden_size": 252},
            "hidden_size is 252; on a GPU it must be a multiple of 8 and at most 8192",
        ),
        (
            {"intermediate_size": 300},
            "intermediate_size is 300; on a GPU it must be a multiple of 8",
        ),
    ],
)
def test_sizes_that_only_the_cpu_computes_are_one_line(tmp_path, changes, message, capsys):
    """A plan has no machine, and knows them too."""
    fields = preset("tiny-qwen3").to_hf() | changes
    (tmp_path / "config.json").write_text(json.dumps(fields))
    options = ["--model", str(tmp_path), "--from-scratch", "--batch-size=1", "--seq-len=64"]
    assert _run(["plan", *options, "--card=H100"]) == 2
    line = message.format("on a GPU it must be a multiple of 8")
    assert capsys.readouterr().err == f"error: the model's {line}: use --device cpu\n"
    assert _run(["plan", *options, "--device=cpu"]) == 0
