"""Matrix products through cuBLASLt: with stand-ins for the libraries."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from llmq.base.dtypes import BF16, E4M3, E5M2, F32, U8
from llmq.ref.product.matmul import CASES, FP8_CASES, matmul, matmul_fp8
from llmq.runtime import tuning as files
from llmq.runtime.cublaslt import CublasLt
from llmq.runtime.product import COMPUTE_32F, CUDA_TYPES
from llmq.runtime.tuning import (
    ALGORITHM_BYTES,
    AlgorithmFile,
    _entry,
    algorithm_file,
)
from tests.harness import dtype_of, host_device
from tests.runtime.fake_cublaslt import RESULT, STREAM, WORKSPACE, FakeCublasLt, FakeCuda

SMALL = {name: case for name, case in CASES.items() if not name.startswith("qwen")}


def make(costs=(1.0,), *, tune=False, path=None, version=130100, name="GPU"):
    """A CublasLt over a new stand-in, and the stand-in."""
    library = FakeCublasLt(costs, version)
    cuda = FakeCuda(library)
    return CublasLt(name, tune=tune, cache_path=path, library=library, cuda=cuda), library


class Arguments:
    """The tensors and sizes of one call, in host memory."""

    def __init__(
        self,
        M,
        N,
        K,
        trans_a,
        trans_b,
        *,
        dtypes=(F32, F32),
        bias=False,
        addend=False,
        accumulate=0,
        factors=(),
    ):
        self.dev, self.factors = host_device(), factors
        rng = np.random.default_rng(M + N + K)

        def put(name, shape, dtype):
            tensor = self.dev.alloc(name, shape, dtype, "Activations")
            tensor.numpy()[...] = rng.normal(size=shape)
            return tensor

        operand, out = dtypes
        self.tensors = (
            put("out", (M, N), out),
            put("a", (K, M) if trans_a else (M, K), operand),
            put("b", (N, K) if trans_b else (K, N), operand),
            put("bias", (N,), out) if bias else None,
            put("addend", (M, N), out) if addend else None,
            self.dev.alloc("workspace", (WORKSPACE,), U8, "Activations"),
        )
        self.sizes = (M, N, K, int(trans_a), int(trans_b), accumulate)
        self.start = self.out.copy()

    @property
    def out(self):
        return self.tensors[0].numpy()

    def __iter__(self):
        return iter((STREAM, *self.tensors, *self.sizes, *self.factors))

    def reference(self):
        arrays = [self.start.copy(), *(t and t.numpy() for t in self.tensors[1:])]
        matmul(*arrays, *self.sizes, *self.factors)
        return arrays[0]


class Fp8Arguments(Arguments):
    """Arguments like `Arguments`, of an FP8 product."""

    def __init__(
        self, M, N, K, *, dtypes=(E4M3, E4M3, BF16), bias=False, fast=0, scale=0.5, **added
    ):
        super().__init__(M, N, K, False, True, dtypes=(F32, dtypes[2]), **added)
        out, a, b, _, addend, workspace = self.tensors
        a, b = (
            self.put(f"{x.name} codes", x.numpy(), dtype)
            for x, dtype in zip((a, b), dtypes, strict=False)
        )
        scales = (self.put("scale", np.array([s]), F32) for s in (scale, 0.75))
        bias = self.put("bias", np.linspace(-1, 1, N), BF16) if bias else None
        codes = (None, None)
        if dtypes[2] in (E4M3, E5M2):
            codes = (self.put("factor", np.array([40.0]), F32), self.put("seen", np.zeros(1), F32))
        self.tensors = (out, a, b, *scales, bias, *codes, addend, workspace)
        self.sizes = (M, N, K, self.sizes[-1], fast)

    def put(self, name, values, dtype):
        tensor = self.dev.alloc(name, values.shape, dtype, "Activations")
        tensor.numpy()[...] = values
        return tensor

    def reference(self):
        arrays = [self.start.copy(), *(t and t.numpy().copy() for t in self.tensors[1:])]
        matmul_fp8(*arrays, *self.sizes)
        self.largest = arrays[-3]
        return arrays[0]


def compare(args):
    got, want = (x.astype(np.float32) for x in (args.out, args.reference()))
    # F32 sums in another order (K <= 64 products of about 1); BF16 is rounded once more, and before
    # an addend of about 1 is added, which the stand-in does not do.
    rtol = 2.0**-7 if dtype_of(args.out) == BF16 else 0
    atol = 1e-4 if args.tensors[-2] is None else 1e-4 + rtol / 2 * (np.abs(want).max() + 4)
    np.testing.assert_allclose(got, want, rtol=rtol, atol=atol)


SHAPE = SMALL["trans_b"]
FP8_SHAPE = FP8_CASES["wide"]


@pytest.fixture(autouse=True)
def no_shared_files(monkeypatch):
    monkeypatch.setattr(files, "_files", {})


@pytest.mark.parametrize("case", SMALL)
@pytest.mark.parametrize(
    "dtypes", [(F32, F32), (BF16, BF16), (BF16, F32)], ids=["f32", "bf16", "bf16_to_f32"]
)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    "more",
    [{}, {"accumulate": 1}, {"addend": True}, {"addend": True, "factors": (-0.75, 0.5)}],
    ids=str,
)
def test_row_major_product_is_asked_for_by_columns(case, dtypes, bias, more):
    args = Arguments(*SMALL[case], dtypes=dtypes, bias=bias, **more)
    make()[0].matmul(*args)
    compare(args)


@pytest.mark.parametrize("batch", [2, 3])
def test_several_products_are_one_call(batch):
    """Each is the product of its own matrices, and has its own addend."""
    one = Arguments(*SHAPE, dtypes=(BF16, BF16), addend=True, factors=(-0.75, 0.5))
    dev, rng, several = host_device(), np.random.default_rng(batch), []
    for tensor in one.tensors:
        if tensor is None or tensor.name == "workspace":
            several.append(tensor)
            continue
        several.append(dev.alloc(tensor.name, (batch, *tensor.shape), BF16, "Activations"))
        several[-1].numpy()[...] = rng.normal(size=several[-1].shape)
    lt, library = make()
    lt.matmul(STREAM, *several, *one.sizes, *one.factors, batch)
    lt.matmul(*one)
    assert len({str(product) for product in lt.plans}) == 2
    out, *others = (t and t.numpy() for t in several)
    want = np.full_like(out, np.nan)
    matmul(want, *others, *one.sizes, *one.factors, batch)
    # BF16 sums of 64 products of about 1, of which the order may differ.
    np.testing.assert_allclose(out.astype(float), want.astype(float), rtol=2.0**-7, atol=1e-2)
    lt.close()
    assert not library.alive


def test_one_plan_for_equal_products_and_one_more_for_each_difference():
    lt, library = make()
    calls = [Arguments(*SHAPE), Arguments(*SHAPE), Arguments(*SHAPE, bias=True)]
    calls += [Arguments(*SHAPE, accumulate=1), Arguments(*SHAPE, dtypes=(BF16, F32))]
    calls += [Arguments(*SHAPE, dtypes=(BF16, BF16)), Arguments(*SHAPE[:3], False, False)]
    calls += [Arguments(*SHAPE, addend=True)]
    for args in calls:
        lt.matmul(*args)
    assert len(library.asked) == len(calls) - 1
    assert len({str(product) for product in lt.plans}) == len(calls) - 1
    assert len(library.asked) == len(calls) - 1
    lt.close()
    assert not library.alive


FP8_DTYPES = [(E4M3, E4M3, BF16), (E5M2, E4M3, BF16), (E4M3, E5M2, F32), (E4M3, E4M3, F32)]


@pytest.mark.parametrize("dtypes", FP8_DTYPES, ids=lambda dtypes: "_".join(d.name for d in dtypes))
@pytest.mark.parametrize(
    "more",
    [{}, {"bias": True}, {"accumulate": 1}, {"addend": True}, {"addend": True, "bias": True}],
    ids=str,
)
@pytest.mark.parametrize("fast", [0, 1])
def test_fp8(dtypes, more, fast):
    lt, library = make()
    args = Fp8Arguments(*FP8_SHAPE, dtypes=dtypes, fast=fast, **more)
    lt.fp8(*args)
    compare(args)
    assert library.fast == [fast]


@pytest.mark.parametrize("dtypes", [(E4M3, E4M3, E4M3), (E5M2, E4M3, E5M2), (E5M2, E4M3, E4M3)])
@pytest.mark.parametrize("bias", [False, True])
def test_fp8_results_are_codes(dtypes, bias):
    lt, library = make()
    args = Fp8Arguments(*FP8_SHAPE, dtypes=dtypes, bias=bias, fast=1)
    for _ in range(2):
        lt.fp8(*args)
    want = args.reference().astype(np.float32)
    # F32 sums in another order may move a rounding: by one code, of three or two bits.
    step = 2.0**-3 if dtypes[2] == E4M3 else 2.0**-2
    np.testing.assert_allclose(args.out.astype(np.float32), want, rtol=step, atol=1e-3)
    assert (args.out == want).mean() > 0.99
    np.testing.assert_allclose(args.tensors[-3].numpy(), args.largest, rtol=1e-6)
    assert args.largest * 40 > np.abs(want).max() / 1.1 > 100
    assert len(library.asked) == 1
    assert str(next(iter(lt.plans))).split()[2].endswith(f"->{dtypes[2].name}")
    lt.close()
    assert not library.alive


def test_fp8_plans():
    lt, library = make()
    calls = [Fp8Arguments(*FP8_SHAPE), Fp8Arguments(*FP8_SHAPE, scale=2)]
    calls += [Fp8Arguments(*FP8_SHAPE, dtypes=dtypes) for dtypes in FP8_DTYPES[1:]]
    calls += [Fp8Arguments(*FP8_SHAPE, bias=True), Fp8Arguments(*FP8_SHAPE, accumulate=1)]
    calls += [Fp8Arguments(*FP8_SHAPE, addend=True), Fp8Arguments(*FP8_SHAPE, fast=1)]
    for args in calls:
        lt.fp8(*args)
    assert len(library.asked) == len(calls) - 1
    names = [str(product) for product in lt.plans]
    assert len(set(names)) == len(calls) - 1
    assert names[0] == "48x144x64 nt e4m3->bf16, 4096 bytes of workspace"
    assert names[1] == "48x144x64 nt e5m2*e4m3->bf16, 4096 bytes of workspace"
    assert names[-2] == "48x144x64 nt e4m3->bf16 addend, 4096 bytes of workspace"
    assert names[-1] == "48x144x64 nt e4m3->bf16 fast, 4096 bytes of workspace"
    lt.close()
    assert not library.alive


def test_each_fp8_call_uses_its_own_scales():
    lt, library = make()
    first, second = (Fp8Arguments(*FP8_SHAPE, bias=True, scale=scale) for scale in (0.5, 3))
    for args in (first, second, first):
        lt.fp8(*args)
        want = args.reference().astype(np.float32)
        # Order of F32 sums, then BF16's rounding.
        np.testing.assert_allclose(args.out.astype(np.float32), want, rtol=2.0**-7, atol=1e-4)
    assert len(library.asked) == 1


@pytest.mark.parametrize(
    "allowed, costs, fast_costs, fast, best",
    [
        (1, (3, 2), (2.5, 1), 1, 1),
        (1, (3, 1), (2, 1.5), 0, 1),
        (1, (3, 2), (2, 1.99), 0, 1),  # a gain too small to give up bits for
        (0, (3, 2), (1, 1), 0, 1),
    ],
)
def test_the_faster_accumulation_is_taken_where_both_are_permitted(
    tmp_path, allowed, costs, fast_costs, fast, best
):
    def runs(costs, fast_costs):
        """How a new process accumulates, and by which algorithms."""
        files._files.clear()
        library = FakeCublasLt(costs, fast_costs=fast_costs)
        lt = CublasLt(
            "GPU",
            tune=True,
            cache_path=tmp_path / "m.json",
            library=library,
            cuda=FakeCuda(library),
        )
        args = Fp8Arguments(*FP8_SHAPE, fast=allowed)
        lt.fp8(*args)
        lt.fp8(*args)
        return library.fast, library.runs

    tried, algorithms = runs(costs, fast_costs)
    assert set(tried) == {0, allowed}
    assert tried[-2:] == [fast, fast] and algorithms[-2:] == [best, best]
    # The file remembers both parts of the choice, though now the other would be faster.
    assert runs(fast_costs, costs) == ([fast, fast], [best, best])


def test_preferences():
    lt, library = make()
    lt.matmul(*Arguments(*SHAPE))
    # The workspace there is, split sums in F32 only, the alignment that launches check.
    assert library.asked == [{1: WORKSPACE, 3: 2, 5: 16, 6: 16, 7: 16, 8: 16}]


def test_each_call_uses_its_own_bias():
    lt, _ = make()
    first, second = Arguments(*SHAPE, bias=True), Arguments(*SHAPE, bias=True)
    second.tensors[3].numpy()[...] += 1
    for args in (first, second, first):
        lt.matmul(*args)
        np.testing.assert_allclose(args.out, args.reference(), atol=1e-4)  # order of F32 sums


def test_each_call_uses_its_own_addend():
    lt, library = make((2, 1), tune=True)
    first, second = Arguments(*SHAPE, addend=True), Arguments(*SHAPE, addend=True)
    second.tensors[4].numpy()[...] += 1
    for args in (first, second, first):
        lt.matmul(*args)
        np.testing.assert_allclose(args.out, args.reference(), atol=1e-4)  # order of F32 sums
    assert len(library.asked) == 1


def test_without_tuning_the_first_candidate_runs_and_nothing_is_kept(tmp_path):
    lt, library = make((5.0, 1.0), path=tmp_path / "m.json")
    lt.matmul(*Arguments(*SHAPE))
    assert library.runs == [0]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("costs, best", [((5, 3, 1, 4), 2), ((5, None, 2), 2), ((1, 0.995), 0)])
def test_tuning_takes_the_fastest(costs, best):
    lt, library = make(costs, tune=True)
    args = Arguments(*SHAPE)
    lt.matmul(*args)
    lt.matmul(*args)
    assert library.runs[-2:] == [best, best]
    assert set(library.runs[:-2]) == {i for i, cost in enumerate(costs) if cost}
    np.testing.assert_allclose(args.out, args.reference(), atol=1e-4)  # order of F32 sums


def test_a_first_look_at_long_products_is_one_run():
    lt, library = make((2.0, 0.5), tune=True)  # milliseconds
    lt.matmul(*Arguments(*SHAPE))
    # To be loaded, looked at, in four turns of 8 ms; and then as the product that was asked for.
    assert [library.runs.count(i) for i in (0, 1)] == [1 + 1 + 4 * 4, 1 + 1 + 3 + 4 * 16 + 1]


def test_tuning_accumulates_once():
    lt, _ = make((2, 1), tune=True)
    args = Arguments(*SHAPE, accumulate=1)
    lt.matmul(*args)
    np.testing.assert_allclose(args.out, args.reference(), atol=1e-4)  # order of F32 sums


def test_no_tuning_inside_a_capture():
    lt, library = make((2, 1), tune=True)
    args = Arguments(*SHAPE)
    lt._cuda.capturing = True
    with pytest.raises(RuntimeError, match=r"8x136x64 nt f32->f32.* outside of the graph"):
        lt.matmul(*args)
    assert not library.runs
    lt._cuda.capturing = False
    lt.matmul(*args)
    lt._cuda.capturing = True
    lt.matmul(*args)
    assert library.runs[-1] == 1


@pytest.mark.parametrize("costs", [(), (None, None)])
def test_no_algorithm(costs):
    lt, _ = make(costs, tune=True)
    with pytest.raises(RuntimeError, match="matmul: GPU, cuBLASLt 130100 has no algorithm for 8x"):
        lt.matmul(*Arguments(*SHAPE))
    with pytest.raises(
        RuntimeError, match="e4m3->e4m3, 4096 bytes of workspace; use --mlp-dtype b"
    ):
        lt.fp8(*Fp8Arguments(*FP8_SHAPE, dtypes=(E4M3, E4M3, E4M3)))


def tuned(path, costs, **kwargs):
    """Algorithms that a new process runs for one product."""
    files._files.clear()
    lt, library = make(costs, tune=True, path=path, **kwargs)
    lt.matmul(*Arguments(*SHAPE))
    return library.runs


def test_the_file_replaces_tuning(tmp_path):
    path = tmp_path / "deep" / "m.json"
    assert tuned(path, (3, 1))[-1] == 1
    assert tuned(path, (1, 3)) == [1]  # no second tuning, though it would choose otherwise
    assert [p.name for p in path.parent.iterdir()] == ["m.json"]
    assert tuned(path, (1, 3), version=120900)[-1] == 0
    assert tuned(path, (1, 3), name="other GPU")[-1] == 0
    assert tuned(path, (1, 3)) == [1]  # the others were added


def test_a_remembered_algorithm_that_is_refused_is_replaced(tmp_path):
    path = tmp_path / "m.json"
    assert tuned(path, (3, 2, 1))[-1] == 2
    assert tuned(path, (3, 2))[-1] == 1
    assert tuned(path, (1, 2)) == [1]
    # Algorithm 9 of the stand-in asks for more workspace than there is when it is checked.
    content = json.loads(path.read_text())
    (key,) = content["algorithms"]
    content["algorithms"][key] = _entry(key, b"\x09" * 64 + b"\0").hex()
    path.write_text(json.dumps(content))
    assert tuned(path, (3, 2, *[5] * 8))[-1] == 1


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"{", b"[]", b"\xff\xfe", b'{"format": 3}', b'{"format": 3, "algorithms": []}'),
        *(b'{"format": 3, "algorithms": {"k": 5}}', b'{"format": 1, "algorithms": {"k": "00"}}'),
    ],
)
def test_a_broken_file_is_empty_and_is_mended(tmp_path, content):
    path = tmp_path / "m.json"
    path.write_bytes(content)
    assert tuned(path, (3, 1))[-1] == 1
    assert len(json.loads(path.read_text())["algorithms"]) == 1


def test_algorithms_of_the_wrong_size_are_ignored(tmp_path):
    path = tmp_path / "m.json"
    assert tuned(path, (3, 1))[-1] == 1
    content = json.loads(path.read_text())
    (key,) = content["algorithms"]
    content["algorithms"][key] = _entry(key, bytes(64)).hex()  # sound, but no Choice
    path.write_text(json.dumps(content))
    assert len(tuned(path, (1, 3))) > 1
    assert tuned(path, (3, 1)) == [0]


def test_a_damaged_algorithm_is_not_run(tmp_path):
    """Any character of the file is another one: what is read is what was written, or nothing."""
    path = tmp_path / "m.json"
    AlgorithmFile(path).publish("key", bytes(range(65)), instead_of=None)
    content = path.read_bytes()
    for at in range(len(content)):
        path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        assert AlgorithmFile(path)._known in ({}, {"key": bytes(range(65))})


def test_a_file_that_cannot_be_written_is_one_warning(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert tuned(tmp_path / "file" / "m.json", (3, 1))[-1] == 1
    folder = tmp_path / "file"
    assert capsys.readouterr().err == (
        f"warning: what was tuned is not kept in {folder} (File exists); set "
        "LLMQ_CACHE_DIR to a folder that can be written\n"
    )
    file = algorithm_file(tmp_path / "file" / "m.json")
    assert file.publish("k", bytes(65), instead_of=None) == bytes(65) == file.get("k")
    assert capsys.readouterr().err == ""


def test_ranks_agree_on_the_first_published(tmp_path):
    path = tmp_path / "m.json"
    file = algorithm_file(path)
    assert algorithm_file(Path(str(path))) is file
    first, second, third = (bytes([i]) * 65 for i in range(3))
    assert file.publish("k", first, instead_of=None) == first
    assert file.publish("k", second, instead_of=None) == first  # was tuning at the same time
    assert file.publish("k", third, instead_of=first) == third  # first was refused
    assert file.publish("k", second, instead_of=first) == third
    assert AlgorithmFile(path).get("k") == third


def test_processes_keep_what_others_have_published(tmp_path):
    path = tmp_path / "m.json"
    first, second, third = (bytes([i]) * 65 for i in range(3))
    AlgorithmFile(path).publish("old", first, instead_of=None)
    one, other = AlgorithmFile(path), AlgorithmFile(path)
    assert one.publish("k", first, instead_of=None) == first
    assert other.publish("k", second, instead_of=None) == first  # was tuning at the same time
    assert other.get("k") == first
    assert one.publish("old", third, instead_of=first) == third
    other.publish("last", second, instead_of=None)
    assert other.get("old") == first  # it may be in use
    found = AlgorithmFile(path)
    assert [found.get(key) for key in ("old", "k", "last")] == [third, first, second]


PUBLISH = """
import sys
from pathlib import Path
from llmq.runtime.tuning import AlgorithmFile
file = AlgorithmFile(Path(sys.argv[1]))
print("ready", flush=True)
input()
for number in range(30):
    file.publish(f"{sys.argv[2]} {number}", bytes(65), instead_of=None)
"""


def test_processes_that_publish_at_the_same_time_lose_nothing(tmp_path):
    path = tmp_path / "m.json"
    command = [sys.executable, "-c", PUBLISH, str(path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    processes = [subprocess.Popen([*command, name], **pipes) for name in "abc"]
    for process in processes:
        assert process.stdout.readline() == b"ready\n"
    for process in processes:
        process.stdin.write(b"\n")
        process.stdin.flush()
    assert [process.wait(timeout=60) for process in processes] == [0] * 3
    assert len(json.loads(path.read_text())["algorithms"]) == 90


def test_constants_and_names_are_those_of_the_binding():
    library = pytest.importorskip("nvmath.bindings.cublasLt")
    cublas = pytest.importorskip("nvmath.bindings.cublas")
    nvmath = pytest.importorskip("nvmath")
    assert int(cublas.ComputeType.COMPUTE_32F) == COMPUTE_32F
    assert int(nvmath.CudaDataType.CUDA_R_32F) == CUDA_TYPES[F32]
    assert int(nvmath.CudaDataType.CUDA_R_16BF) == CUDA_TYPES[BF16]
    assert int(nvmath.CudaDataType.CUDA_R_8F_E4M3) == CUDA_TYPES[E4M3]
    assert int(nvmath.CudaDataType.CUDA_R_8F_E5M2) == CUDA_TYPES[E5M2]
    result = np.dtype(library.matmul_heuristic_result_dtype)
    assert result.itemsize == RESULT.itemsize
    for name in ("algo", "workspace_size", "state"):
        assert result.fields[name][1] == RESULT.fields[name][1]
    assert result["algo"].itemsize == ALGORITHM_BYTES
    enums = ("MatmulDescAttribute", "MatmulPreferenceAttribute", "MatmulMatrixScale")
    for enum in (*enums, "Epilogue", "PointerMode", "ReductionScheme"):
        for name, value in vars(getattr(FakeCublasLt, enum)).items():
            assert int(getattr(getattr(library, enum), name)) == value, name
    fake = FakeCublasLt()
    for name in vars(fake.MatmulDescAttribute).values():
        want = fake.get_matmul_desc_attribute_dtype(name)
        assert library.get_matmul_desc_attribute_dtype(name) == want
    for name in vars(fake.MatmulPreferenceAttribute).values():
        want = fake.get_matmul_preference_attribute_dtype(name)
        assert library.get_matmul_preference_attribute_dtype(name) == want
