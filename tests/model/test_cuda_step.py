"""The whole step on a GPU: against references, with and without graphs, twice, and in flight."""

from __future__ import annotations

import numpy as np
import pytest

from llmq.base.dtypes import BF16
from llmq.checkpoint.hf import HfWeights
from llmq.model.generator import Request
from llmq.model.halves import attention
from llmq.ops.common import CAPABILITY
from llmq.ops.product import matmul
from llmq.options.options_io import make_config
from llmq.options.presets import resolve_model
from llmq.run.model_of_run import model_of_run
from llmq.run.sampling import Sampler
from llmq.run.trainer import Trainer
from llmq.runtime import cuda_device, tuning
from llmq.runtime.cuda_api import device_spec
from llmq.runtime.machine import choose_machine
from tests.bases import block_weights
from tests.conftest import gpu_problem
from tests.models import CONFIGS, VOCAB, WITH_EXPERTS, hf_model, random_batch, trainer_for
from tests.runs import make_workplace, records, train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(gpu_problem() is not None, reason=str(gpu_problem())),
]

T = 64  # the longest sequence of the test models


def batch_of(rng, **options):
    """Random; with documents that are masked also where they start, others in every batch."""
    batch = random_batch(rng, T=T)
    if not options.get("document_mask"):
        return batch
    first = np.where(rng.random((2, T)) < 0.1, np.arange(T), 0)
    return *batch, np.maximum.accumulate(first, axis=1).astype(np.int32)


def run(path, steps=4, **options):
    """Results and weights after some steps on random batches of 2 micro-steps."""
    options = {
        "device": "cuda",
        "seq_len": T,
        "grad_accumulation": 2,
        "model_dtype": "bf16",
    } | options
    rng = np.random.default_rng(0)
    with trainer_for(path, **options) as trainer:
        batches = [[batch_of(rng, **options) for _ in range(2)] for _ in range(steps)]
        results = [trainer.step(batch) for batch in batches]
        assert trainer.usage == trainer.plan.usage
        return results, trainer.weights()


def same(one, other):
    return one[0] == other[0] and all(np.array_equal(one[1][n], other[1][n]) for n in one[1])


@pytest.fixture(params=CONFIGS)
def path(request, tmp_path):
    # Rounding would choose other experts, were not all of them active.
    field = "top_k_experts" if request.param == "gemma4_a4b" else "num_experts_per_tok"
    all_active = {field: {"mixtral": 4, "gpt_oss": 8}.get(request.param, 5)}
    changed = all_active if request.param in WITH_EXPERTS else {}
    hf_model(request.param, **changed).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("path", ["qwen2_untied"], indirect=True)  # with a window
def test_what_is_timed_is_kept(path, monkeypatch, tmp_path_factory):
    """Cards on which attention was not measured do so, and those that may have block scales."""
    monkeypatch.setattr(attention, "MEASURED", 0)
    monkeypatch.setattr(matmul, "BLOCK_SCALED_GENERATION", device_spec(0).capability // 10)
    monkeypatch.setattr(cuda_device, "TUNED", str(tmp_path_factory.mktemp("tuned") / "m.json"))
    fp8 = {"matmul_dtype": "e4m3", "fp8_recipe": "delayed"}
    options = {"attention": "auto", **fp8, "attn_bwd_chunks": 2}
    results = []
    for more in ({}, {}, {"attn_bwd_chunks": 1}, {"use_cuda_graphs": False}):
        tuning._files.clear()  # a new process
        results.append(run(path, **options | more))
    assert all(same(results[0], other) for other in results[1:])


@pytest.mark.parametrize("attention", ["native", "cudnn", "auto"])
def test_bf16_gradients_are_close_to_f32(path, attention):
    batches = [random_batch(np.random.default_rng(1), T=T)]
    gradients = []
    for options in (
        {"device": "cpu"},
        {"device": "cuda", "model_dtype": "bf16", "attention": attention},
    ):
        with trainer_for(path, seq_len=T, **options) as trainer:
            result = trainer.step(batches)
            gradients.append((result, trainer.gradients()))
    (want, reference), (got, ours) = gradients
    # BF16 keeps 8 bits: the bounds are the project's definition of a correct bf16 step.
    assert abs(got.loss - want.loss) < 0.01 * want.loss
    largest = max(np.linalg.norm(g) for g in reference.values())
    for name, expected in reference.items():
        gradient = ours[name].astype(np.float32)
        size = np.linalg.norm(expected)
        if size < 1e-3 * largest:
            continue  # a bias of keys: zero but for rounding
        cosine = np.vdot(gradient, expected) / (np.linalg.norm(gradient) * size)
        assert cosine >= 0.99, (name, cosine)
        assert abs(np.linalg.norm(gradient) / size - 1) <= 0.02, name


def test_texts_are_continued_as_on_the_cpu(path):
    """Greedy continuations in F32 of prompts of several lengths."""
    config, _ = resolve_model(str(path), from_scratch=False)
    rng, found = np.random.default_rng(2), []
    requests = [Request(rng.integers(3, VOCAB, n).tolist(), 12, 0.0) for n in (1, 9, 5)]
    for kind in ("cpu", "cuda"):
        machine = choose_machine(kind, 1)
        with (
            HfWeights(path) as weights,
            Sampler(machine, config, lambda w, read=weights.read: w.load(read), 24, slots=2) as one,
        ):
            found.append(dict(one.generator.run(requests)))
    for index in range(3):
        on_cpu, on_gpu = (each[index] for each in found)
        assert on_cpu.ids == on_gpu.ids
        np.testing.assert_allclose(on_cpu.logprobs, on_gpu.logprobs, atol=5e-5)


@pytest.mark.parametrize("formats", [(None, None), ("int8", "e4m3")], ids=str)
def test_passes_ahead_of_the_host_change_no_bit(path, formats):
    """Also with codes of a byte, and where texts stop and enter."""
    config, _ = resolve_model(str(path), from_scratch=False)
    rng, found, machine = np.random.default_rng(2), [], choose_machine("cuda", 1)
    requests = [
        Request(rng.integers(3, VOCAB, n).tolist(), 20, seed=n, stop=range(20))
        for n in (1, 9, 5, 17, 3)
    ]
    with HfWeights(path) as weights:
        form = (lambda w: w.load(weights.read), 40, BF16, 2, *formats)
        for ahead in (True, False):
            with Sampler(machine, config, *form) as one:
                assert one.generator.goes_ahead
                one.generator.goes_ahead = ahead
                found.append(dict(one.generator.run(requests)))
    for index in range(len(requests)):
        one, other = (each[index] for each in found)
        assert one.ids == other.ids and np.array_equal(one.logprobs, other.logprobs)


def test_a_step_that_is_not_full_has_graphs_of_its_own(tmp_path, monkeypatch):
    """The last one of 9 sequences ends each epoch alone."""
    monkeypatch.chdir(make_workplace(tmp_path))
    losses = []
    for graphs in (True, False):
        more = {"use_cuda_graphs": graphs, "device": "cuda", "epochs": 3, "grad_accumulation": 4}
        assert train(**more, train_file="data/train-0.bin", model_dtype="bf16") == 0
        found = [(r["loss"], r["norm"], r["step_tokens"]) for r in records("step")]
        assert [tokens for *_, tokens in found] == [8 * 16, 16] * 3
        losses.append(found)
    assert losses[0] == losses[1]


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_graphs_equal_eager_and_runs_repeat(path, dtype):
    graphs = run(path, model_dtype=dtype)
    assert same(graphs, run(path, model_dtype=dtype))
    assert same(graphs, run(path, model_dtype=dtype, use_cuda_graphs=False))


@pytest.mark.parametrize("name", ["gpt2", "qwen3"])
def test_muon(tmp_path, name):
    """With graphs and without, wherever state lies, and as on the CPU; also with numbers of rows
    and an average of weights, which a step must not notice."""
    hf_model(name).save_pretrained(tmp_path)
    muon = {"optimizer": "muon", "learning_rate": 1e-2}
    if name == "qwen3":
        muon |= {"optimizer": "normuon", "ema": 0.9}
    graphs = run(tmp_path, **muon)
    host = {"offload_master": True, "offload_opt_m": True}
    for more in ({"use_cuda_graphs": False}, host):
        assert same(graphs, run(tmp_path, **muon, **more))
    exact = {"steps": 1, "model_dtype": "fp32", "weight_decay": 0.0}
    (_, before), (_, one), (_, other) = (
        run(tmp_path, device=device, **exact, **more)
        for device, more in (("cpu", {"learning_rate": 0.0}), ("cpu", muon), ("cuda", muon))
    )
    for param in [p for p in before if ".layers." in p and before[p].ndim == 2]:
        moved, want = (w[param].astype(np.float64) - before[param] for w in (other, one))
        # BF16 moves a change by 1.5 % from that of exact iterations, and another order of sums
        # moves other roundings.
        assert np.linalg.norm(moved - want) < 0.05 * np.linalg.norm(want), param


@pytest.mark.parametrize("name", ["gpt2", "qwen3", "phi3", "qwen3_5"])
def test_adapters(tmp_path, name):
    """Results are as on the CPU, and the same bits with and without graphs and what saves
    memory."""
    hf_model(name).save_pretrained(tmp_path)
    options = {"lora_rank": 4, "lora_dropout": 0.2, "train": "norms"}
    graphs = run(tmp_path, **options, model_dtype="fp32")
    on_cpu = run(tmp_path, **options, model_dtype="fp32", device="cpu")
    for got, want in zip(graphs[0], on_cpu[0], strict=True):
        np.testing.assert_allclose(got.loss, want.loss, rtol=1e-4)  # as TEN_STEPS_RTOL
    plain = run(tmp_path, **options)
    for more in (
        {"use_cuda_graphs": False},
        {"recompute_block": True},
        {"recompute_swiglu": True, "recompute_norm": True},
        {"shard_weights": True, "offload_master": True, "offload_between": True},
    ):
        assert same(plain, run(tmp_path, **options, **more)), more


ADAPTERS = {"lora_rank": 4, "learning_rate": 1e-2}
FAST = {"matmul_dtype": "e4m3", "fp8_fast_accumulation": "all"}
WITHIN = {
    "bf16": {},
    "jit": FAST,
    "delayed": FAST | {"fp8_recipe": "delayed", "gradient_dtype": "e5m2"},
    "codes": FAST | {"fp8_recipe": "delayed", "mlp_dtype": "e4m3", "gradient_dtype": "e5m2"},
    "head": FAST | {"fp8_recipe": "delayed", "head_dtype": "e4m3"},
    "adapters": ADAPTERS,
    "adapters, fp8": ADAPTERS | FAST | {"base_dtype": "e4m3"},
    "adapters, delayed": ADAPTERS | FAST | {"base_dtype": "e4m3", "fp8_recipe": "delayed"},
}
RECOMPUTED = ("swiglu", "ffn", "block")


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
@pytest.mark.parametrize("formats", WITHIN.values(), ids=WITHIN)
def test_more_within_products(tmp_path, formats, name, monkeypatch):
    """At any size, as Hopper computes large ones: adapters, the activation, sums of gradients."""
    if device_spec(0).capability != CAPABILITY:
        pytest.skip("needs compute capability 9.0")
    hf_model(name, intermediate_size=192).save_pretrained(tmp_path)
    beside = run(tmp_path, **formats)
    monkeypatch.setenv("LLMQ_FUSED", "all")
    within = run(tmp_path, **formats)
    for got, want in zip(within[0], beside[0], strict=True):
        np.testing.assert_allclose(got.loss, want.loss, rtol=2e-3)  # BF16 keeps 8 bits
    for more in ({"use_cuda_graphs": False}, *({f"recompute_{x}": True} for x in RECOMPUTED)):
        assert same(within, run(tmp_path, **formats, **more)), more


@pytest.mark.parametrize("name", ["gpt2", "qwen3", "olmo2"])
@pytest.mark.parametrize("base", ["e4m3", "int8", "nf4"])
def test_models_kept_as_codes(tmp_path, name, base):
    """The codes of the CPU, and the same bits with and without graphs and what saves memory."""
    hf_model(name).save_pretrained(tmp_path)
    options = {"lora_rank": 4, "lora_dropout": 0.2, "base_dtype": base}
    exact = options | {"model_dtype": "fp32"}
    weights = []
    for device in ("cuda", "cpu"):
        with trainer_for(tmp_path, **exact, seq_len=T, device=device) as trainer:
            weights.append(block_weights(trainer))
    for param, values in weights[0].items():
        np.testing.assert_array_equal(values, weights[1][param], err_msg=param.name)
    graphs, on_cpu = (run(tmp_path, **exact, device=device) for device in ("cuda", "cpu"))
    for got, want in zip(graphs[0], on_cpu[0], strict=True):
        np.testing.assert_allclose(got.loss, want.loss, rtol=1e-4)  # as TEN_STEPS_RTOL
    fp8 = {"matmul_dtype": "e4m3"}
    kinds = [{"matmul_dtype": "bf16"}, fp8, fp8 | {"fp8_recipe": "delayed"}]
    for products in ({}, {"matmul_dtype": "bf16"}) if base == "int8" else kinds:
        plain = run(tmp_path, **options, **products)
        for more in (
            {"use_cuda_graphs": False},
            {"recompute_block": True},
            {"recompute_ffn": True, "recompute_qkv": True, "recompute_norm": True},
            {"shard_weights": True, "offload_master": True, "offload_residual": True},
        ):
            assert same(plain, run(tmp_path, **options, **products, **more)), more


@pytest.mark.parametrize("name", ["gpt2", "mistral", "qwen2_untied", "gemma3", "qwen3_5"])
def test_documents_are_data_of_graphs(tmp_path, name):
    """Graphs are captured once and see each batch's documents; on the CPU the same comes out."""
    hf_model(name).save_pretrained(tmp_path)
    options = {"model_dtype": "fp32", "document_mask": True}
    graphs = run(tmp_path, **options)
    assert same(graphs, run(tmp_path, **options, use_cuda_graphs=False))
    for got, want in zip(graphs[0], run(tmp_path, **options, device="cpu")[0], strict=True):
        np.testing.assert_allclose(got.loss, want.loss, rtol=1e-4)  # as TEN_STEPS_RTOL
    for formats in ({}, {"matmul_dtype": "e4m3", "fp8_recipe": "delayed"}):
        plain = run(tmp_path, **formats, document_mask=True)
        assert same(plain, run(tmp_path, **formats, document_mask=True, use_cuda_graphs=False))
        assert same(plain, run(tmp_path, **formats, document_mask=True, recompute_block=True))


FP8 = {"model_dtype": "bf16", "matmul_dtype": "e4m3"}
DELAYED = FP8 | {"fp8_recipe": "delayed"}
HEAD = {"head_dtype": "e4m3"}
FORMATS = {"bf16": {}, "jit": FP8, "delayed": DELAYED, "jit, head": FP8 | HEAD}
INT8 = {"model_dtype": "bf16", "matmul_dtype": "int8"}
FORMATS |= {"delayed, head": DELAYED | HEAD, "int8": INT8}
TERNARY = INT8 | {"matmul_dtype": "ternary"}
FORMATS |= {"int8, adapters": INT8 | {"lora_rank": 4}, "ternary": TERNARY}


@pytest.mark.parametrize("model", ["qwen3", "qwen2", "gpt2"])
@pytest.mark.parametrize("formats", FORMATS.values(), ids=FORMATS)
def test_recompute_is_bitwise_equal(tmp_path, formats, model):
    hf_model(model).save_pretrained(tmp_path)
    plain = run(tmp_path, **formats)
    assert same(plain, run(tmp_path, **formats, use_cuda_graphs=False))
    for flag in ("swiglu", "norm", "ffn", "qkv", "att", "block"):
        assert same(plain, run(tmp_path, **formats, **{f"recompute_{flag}": True})), flag
    for layer in ("0", "1"):
        options = {"recompute_block": True, "recompute_layers": layer}
        assert same(plain, run(tmp_path, **formats, **options)), layer
    for chunks in (2, 4, 8):  # sequences, key/value heads, query heads
        assert same(plain, run(tmp_path, **formats, attn_bwd_chunks=chunks)), chunks


@pytest.mark.parametrize("recipe", ["jit", "delayed"])
@pytest.mark.parametrize("head", ["bf16", "e4m3"])
@pytest.mark.parametrize("gradient", ["e4m3", "e5m2"])
def test_fp8_gradients_equal_those_of_the_cpu(path, gradient, head, recipe):
    """The same operands on both devices; sums differ, and now and then a code with them.

    A code that differs is a rounding error of the format. So the devices differ by no more than the
    format's own error, which is small, but where norms stand behind the halves of a block: nearly
    all of a gradient goes through the products there, and hardly any beside them.
    """
    options = FP8 | {"gradient_dtype": gradient, "head_dtype": head, "fp8_recipe": recipe}
    batches = [random_batch(np.random.default_rng(1), T=T)]
    found = []
    for device in ({"device": "cpu", "model_dtype": "bf16"}, {"device": "cpu"}, {"device": "cuda"}):
        formats = options if len(device) == 1 else {}
        with trainer_for(path, seq_len=T, **formats, **device) as trainer:
            found.append((trainer.step(batches), trainer.gradients()))
    check_devices_agree(found, 0.01)


@pytest.mark.parametrize(
    "name, gradient", [("qwen3", "e4m3"), ("qwen2", "e5m2"), ("llama_biases", "e4m3")]
)
def test_codes_of_products_in_mlps(tmp_path, name, gradient):
    """cuBLASLt's codes and largest values are the reference's, but for sums in another order."""
    hf_model(name).save_pretrained(tmp_path)
    options = DELAYED | {"mlp_dtype": "e4m3", "gradient_dtype": gradient}
    batches = [random_batch(np.random.default_rng(1), T=T)]
    found, histories = [], []
    for device in ({"device": "cpu", "model_dtype": "bf16"}, {"device": "cpu"}, {"device": "cuda"}):
        formats = options if len(device) == 1 else {}
        with trainer_for(tmp_path, seq_len=T, **formats, **device) as trainer:
            found.append((trainer.step(batches), trainer.gradients()))
            state = trainer._step.extra_state()
        histories.append({key: values[-1] for key, values in state.items()})
    check_devices_agree(found, 0.01)
    # Bounds are those of test_delayed_scales_on_a_gpu; what products write is among them.
    assert histories[2] == pytest.approx(histories[1], rel=0.15)
    assert "fp8_abs_max.layers.1.d_mlp_act" in histories[2]
    plain = run(tmp_path, **options)
    for more in (
        {"use_cuda_graphs": False},
        {"recompute_ffn": True},
        {"recompute_block": True, "attn_bwd_chunks": 2},
        {"shard_weights": True, "offload_residual": True, "offload_between": True},
    ):
        assert same(plain, run(tmp_path, **options, **more)), more


def check_devices_agree(found, least):
    """found: losses and gradients without codes, with them on the CPU, and with them on the GPU,
    which differ by no more than codes cost, or by least: by twice that, as both have that error,
    of other roundings."""
    (_, exact), (want, reference), (got, ours) = found
    assert abs(got.loss - want.loss) < 0.002 * want.loss
    largest = max(np.linalg.norm(g.astype(np.float32)) for g in reference.values())
    names = [
        n for n, g in reference.items() if np.linalg.norm(g.astype(np.float32)) > 0.02 * largest
    ]
    error = max(1 - cosine(reference[name], exact[name]) for name in names)
    for name in names:
        assert cosine(ours[name], reference[name]) > 1 - max(least, 2 * error), name


def cosine(a, b):
    a, b = a.astype(np.float32), b.astype(np.float32)
    return np.vdot(a, b) / (np.linalg.norm(a) * np.linalg.norm(b))


@pytest.mark.parametrize("path", [n for n in CONFIGS if n not in WITH_EXPERTS], indirect=True)
@pytest.mark.parametrize(
    "more",
    [{}, {"lora_rank": 4, "lora_dropout": 0.2}, TERNARY],
    ids=["", "adapters", "ternary"],
)
def test_int8_gradients_equal_those_of_the_cpu(path, more):
    """Sums of codes are exact on both devices. Kernels between products differ in their last bits
    now and then, and a code with it: by no more than all of the format's error."""
    batches = [random_batch(np.random.default_rng(1), T=T)]
    found = []
    for formats in ({"matmul_dtype": "bf16"}, {}, {"device": "cuda"}):
        options = INT8 | more | {"device": "cpu"} | formats
        with trainer_for(path, seq_len=T, **options) as trainer:
            found.append((trainer.step(batches), trainer.gradients()))
    check_devices_agree(found, 0.001)


@pytest.mark.parametrize("mlp", ["bf16", "e4m3"])
@pytest.mark.parametrize("fast", ["none", "all"])
def test_delayed_scales_on_a_gpu(tmp_path, fast, mlp):
    """The history is that of the CPU but for sums in another order; what saturates is counted."""
    hf_model("qwen2").save_pretrained(tmp_path)
    batches = [random_batch(np.random.default_rng(1), T=T)]
    options = DELAYED | HEAD | {"seq_len": T, "fp8_fast_accumulation": fast, "mlp_dtype": mlp}
    found = []
    for device in ("cpu", "cuda"):
        with trainer_for(tmp_path, device=device, **options) as trainer:
            assert trainer.step(batches).saturated == 0
            state = trainer._step.extra_state()
            found.append({name: values[-1] for name, values in state.items()})
            small = {name: [v / 100 for v in values] for name, values in state.items()}
            trainer._step.load_extra_state(small)
            assert trainer.step(batches).saturated > 1000
    # A code that rounds the other way is 6 % or 12 % of an element; some element is the largest.
    assert found[1] == pytest.approx(found[0], rel=0.15)


def test_checkpoint_resumes_bit_for_bit(tmp_path):
    hf_model("qwen2").save_pretrained(tmp_path)
    options = {
        "device": "cuda",
        "model_dtype": "bf16",
        "opt_m_dtype": "bf16",
        "opt_v_dtype": "bf16",
    }
    rng = np.random.default_rng(2)
    batches = [[random_batch(rng)] for _ in range(6)]
    with trainer_for(tmp_path, **options) as trainer:
        for batch in batches[:3]:
            trainer.step(batch)
        saved = trainer.save(tmp_path / "ckpt")
        losses = [trainer.step(batch).loss for batch in batches[3:]]
    with trainer_for(tmp_path, **options) as trainer:
        trainer.load(saved)
        assert [trainer.step(batch).loss for batch in batches[3:]] == losses


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("host", ["nothing", "pinned", "write-combined"])
def test_a_copy_beside_a_step_is_of_its_beginning(tmp_path, host, graphs):
    """Two steps are enqueued before anybody waits; the second one finds its graphs."""
    hf_model("qwen2").save_pretrained(tmp_path)
    given = {"model": tmp_path, "device": "cuda", "model-dtype": "bf16", "opt-v-dtype": "e4m3"}
    given |= {"ckpt-background": True, "use-cuda-graphs": graphs, "seq-len": T, "batch-size": 2}
    given |= {"grad-accumulation": 2, "eval-file": "none", "learning-rate": 1e-2, "steps": 9}
    if host != "nothing":
        given |= dict.fromkeys(("offload-opt-m", "offload-opt-v", "offload-master"), True)
        given |= {"master-dtype": "fp32", "write-combined": host == "write-combined"}
    config = make_config(given)
    rng = np.random.default_rng(2)
    with Trainer.from_config(config, *model_of_run(config)) as trainer:
        trainer.load_weights()
        batches = [random_batch(rng, T=T) for _ in range(2)]
        for _ in range(3):
            trainer.step(batches)
        rank = trainer.ranks.first
        state = rank.step.stored_state()
        expected = [trainer.dev.download(piece.tensor) for of in state.values() for piece in of]
        rank.step.snapshot.take()
        tickets = [trainer.enqueue_step(batches) for _ in range(2)]
        copies = [piece.tensor for of in rank.step.snapshot.copy.values() for piece in of]
        trainer.result(tickets[-1])
        assert rank.step.snapshot.is_done(), "the first update has waited for it"
        for found, want in zip(copies, expected, strict=True):
            assert np.array_equal(found.numpy().view(np.uint8), want.view(np.uint8)), found
        now = [trainer.dev.download(piece.tensor) for of in state.values() for piece in of]
        changed = [np.array_equal(a, b) for a, b in zip(now, expected, strict=True)]
        assert not all(changed)
        assert trainer.usage == trainer.plan.usage


def test_the_host_never_waits_inside_a_step(tmp_path):
    hf_model("qwen2").save_pretrained(tmp_path)
    batches = [random_batch(np.random.default_rng(3)) for _ in range(2)]
    with trainer_for(tmp_path, device="cuda", grad_accumulation=2) as trainer:
        for _ in range(3):
            ticket = trainer.enqueue_step(batches)
        trainer.result(ticket)
        for _ in range(5):
            before = trainer.dev.sync_calls
            following = trainer.enqueue_step(batches)
            assert trainer.dev.sync_calls == before
            trainer.result(ticket)  # one step late
            ticket = following
