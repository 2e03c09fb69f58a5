"""Attention through cuDNN: with a stand-in for the library, and the sizes measured on a GPU."""

import subprocess
import sys
from functools import partial
from importlib.util import find_spec

import numpy as np
import pytest

from llmq.base.dtypes import BF16, F32
from llmq.base.errors import LlmqError
from llmq.ops.attention import attention
from llmq.runtime.attention_parts import divisions
from llmq.runtime.cudnn import (
    FORWARD_WORKSPACE_BYTES,
    CudnnAttention,
    CudnnError,
    _Scores,
    backward_workspace_bytes,
    unsupported,
)
from llmq.runtime.host_device import HostDevice
from tests.harness import SIZES, host_device, run
from tests.runtime.fake_cudnn import FakeCudnn, fake_cupy

STREAM = 5
CASE = (2, 11, 4, 2, 32)  # B, T, Hq, Hkv, Hd
# B, T, Hq, Hkv, Hd; MiB that cuDNN 9.19 asked for on an H100, without and with determinism
MEASURED = [
    ((32, 1024, 14, 2, 64), 225, 1009),
    ((32, 1024, 12, 2, 128), 385, 961),
    ((16, 1024, 28, 4, 128), 449, 1121),
    ((4, 8192, 12, 2, 128), 385, 6337),
]


class LibraryDevice(HostDevice):
    """A host device that hands attention to the library, as CudaDevice does."""

    def __init__(self, library):
        super().__init__(SIZES, poison=True)
        self.library = library

    def launch(self, kernel, grid, block, args, **options):
        if kernel.file != "attention/attention":
            super().launch(kernel, grid, block, args, **options)
            return
        kernel.bind(args)
        getattr(self.library, kernel.entry.removeprefix("attention_"))(STREAM, *args)


@pytest.fixture
def fake(monkeypatch):
    library = FakeCudnn()
    monkeypatch.setitem(sys.modules, "cudnn", library)
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy())
    return library


@pytest.mark.parametrize("shape, any_order, deterministic", MEASURED)
def test_workspace_estimate(shape, any_order, deterministic):
    for mib, estimate in (
        (any_order, backward_workspace_bytes(*shape, deterministic=False)),
        (deterministic, backward_workspace_bytes(*shape, deterministic=True)),
    ):
        assert mib * 2**20 <= estimate <= (mib + 2) * 2**20


@pytest.mark.parametrize("dev", [pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True)
@pytest.mark.parametrize("shape", [*(m[0] for m in MEASURED), (3, 100, 6, 2, 80)])
def test_workspace_estimate_on_this_gpu(dev, shape):
    library = CudnnAttention(0)
    for window in (shape[1], shape[1] // 3):
        scores = _Scores(window, shape[4] ** -0.5)
        forward = library._plan("forward", shape, False, scores)
        assert forward.workspace <= FORWARD_WORKSPACE_BYTES
        for deterministic in (False, True):
            needed = library._plan("backward", shape, deterministic, scores).workspace
            assert needed <= backward_workspace_bytes(*shape, deterministic)
        one, heads, kv_heads = (1, *shape[1:]), *shape[2:4]
        for chunks in divisions(1, heads, kv_heads):
            library.check(*one, chunks=chunks, window=window)  # raises where more is asked for
    library.close()


def _arrays(rng):
    batch, seq_len, heads, kv_heads, head_dim = CASE
    qkv = rng.normal(size=(batch, seq_len, heads + 2 * kv_heads, head_dim))
    d_out = rng.normal(size=(batch, seq_len, heads, head_dim))
    nan = np.array(np.nan, BF16.numpy)
    return {
        "d_qkv": np.full_like(qkv, nan, BF16.numpy),
        "d_out": d_out.astype(BF16.numpy),
        "out": np.full_like(d_out, nan, BF16.numpy),
        "lse": np.full((batch, heads, seq_len), np.nan, np.float32),
        "qkv": qkv.astype(BF16.numpy),
    }


def _forward_backward(
    dev,
    d_qkv,
    d_out,
    out,
    lse,
    qkv,
    deterministic=True,
    backend="cudnn",
    window=None,
    chunks=1,
    scale=None,
):
    mask = attention.AttentionMask(window=window)
    attention.forward(dev, out, lse, qkv, 4, 2, mask, backend=backend, scale=scale)
    options = {"mask": mask, "backend": backend, "deterministic": deterministic, "scale": scale}
    attention.backward(dev, d_qkv, d_out, out, lse, qkv, 4, 2, chunks, **options)


def test_addresses_and_layouts(rng, fake):
    """The stand-in reads and writes what the graph describes; exactly the reference's result."""
    arrays = _arrays(rng)
    got = run(LibraryDevice(CudnnAttention(0)), _forward_backward, arrays)
    want = run(host_device(), _forward_backward, arrays)
    for name in arrays:
        np.testing.assert_array_equal(got[name], want[name])
    assert [stream for stream, _ in fake.executed] == [STREAM, STREAM]
    for _, options in fake.executed:
        assert options["attn_scale"] == 32**-0.5
        assert options["diagonal_band_right_bound"] == 0
        assert "diagonal_band_left_bound" not in options


@pytest.mark.parametrize("chunks", [4, 6, 8])
@pytest.mark.parametrize("window", [None, 4])
def test_addresses_and_layouts_of_parts(rng, fake, chunks, window):
    """Parts are a key/value head with its query heads, and single query heads."""
    arrays = _arrays(rng)
    call = partial(_forward_backward, window=window, chunks=chunks)
    got = run(LibraryDevice(CudnnAttention(0)), call, arrays)
    want = run(host_device(), call, arrays)
    for name in arrays:
        np.testing.assert_array_equal(got[name], want[name])
    assert len(fake.executed) == 1 + 2 * (2 if chunks == 4 else 4)
    whole = run(host_device(), partial(_forward_backward, window=window), arrays)["d_qkv"]
    # Two query heads' parts are rounded to BF16, by up to 2^-9 each, their sum is, and the whole.
    error = got["d_qkv"].astype(np.float64) - whole.astype(np.float64)
    assert np.abs(error).max() <= 4 * 2**-9 * np.abs(whole.astype(np.float64)).max()


def test_windows_are_the_left_bound_of_a_graph(rng, fake):
    library, arrays = CudnnAttention(0), _arrays(rng)
    for window in (4, 11, 12):
        call = partial(_forward_backward, window=window)
        got = run(LibraryDevice(library), call, arrays)
        want = run(host_device(), call, arrays)
        for name in arrays:
            np.testing.assert_array_equal(got[name], want[name])
    bounds = [options.get("diagonal_band_left_bound") for _, options in fake.executed]
    assert bounds == [4, 4, None, None, None, None]
    assert fake.built == 4


def test_an_own_scale_is_a_graph_of_its_own(rng, fake):
    library, arrays = CudnnAttention(0), _arrays(rng)
    for scale in (None, 0.3):
        call = partial(_forward_backward, scale=scale)
        got = run(LibraryDevice(library), call, arrays)
        want = run(host_device(), call, arrays)
        for name in arrays:
            np.testing.assert_array_equal(got[name], want[name])
    assert [options["attn_scale"] for _, options in fake.executed] == [32**-0.5] * 2 + [0.3] * 2
    assert fake.built == 4


def test_our_backward_takes_the_librarys_statistics(rng, fake):
    def mixed(dev, d_qkv, d_out, out, lse, qkv):
        mask, library = attention.AttentionMask(window=4), LibraryDevice(CudnnAttention(0))
        library.scratch = dev.scratch
        attention.forward(library, out, lse, qkv, 4, 2, mask, backend="cudnn")
        attention.backward(dev, d_qkv, d_out, out, lse, qkv, 4, 2, mask=mask)

    arrays = _arrays(rng)
    got = run(host_device(), mixed, arrays)
    want = run(host_device(), partial(_forward_backward, window=4, backend="native"), arrays)
    for name in arrays:
        np.testing.assert_array_equal(got[name], want[name])
    assert fake.built == 1


class Choosing(LibraryDevice):
    """Takes these ways of what it may choose, by the first word of the work."""

    def __init__(self, library, **taken):
        super().__init__(library)
        self.taken, self.works = taken, []

    def choose(self, work, ways, kept=()):
        assert tuple(ways) == ("cudnn", "native") and kept == ()
        self.works.append(work)
        ways[self.taken[work.split()[0].removeprefix("attention.")]]()


@pytest.mark.parametrize("forward", attention.BACKENDS)
@pytest.mark.parametrize("backward", attention.BACKENDS)
def test_each_direction_may_have_its_own_backend(rng, fake, forward, backward):
    dev = Choosing(CudnnAttention(0), forward=forward, backward=backward)
    call = partial(_forward_backward, backend=("cudnn", "native"), window=4, chunks=2)
    arrays = _arrays(rng)
    got = run(dev, call, arrays)
    want = run(host_device(), call, arrays)
    for name in arrays:
        np.testing.assert_array_equal(got[name], want[name])
    executed = (forward == "cudnn") + 2 * (backward == "cudnn")  # chunks cut cuDNN's work alone
    assert len(fake.executed) == executed
    assert dev.works == [
        f"attention.{way} 2x11 4/2 heads of 32 bf16 window 4" for way in ("forward", "backward")
    ]


def test_graphs_are_built_once(rng, fake):
    library = CudnnAttention(0)
    dev = LibraryDevice(library)
    for _ in range(2):
        run(dev, _forward_backward, _arrays(rng))
    assert fake.built == 2

    def any_order(dev, **tensors):
        _forward_backward(dev, **tensors, deterministic=False)

    run(dev, any_order, _arrays(rng))
    assert fake.built == 3
    chosen = [options.get("use_deterministic_algorithm") for _, options in fake.executed]
    assert chosen == [None, True, None, True, None, False]
    library.close()
    assert fake.open == 0


def test_workspace_larger_than_planned(rng, fake):
    fake.workspace = 1 << 30
    with pytest.raises(LlmqError, match="asks for a workspace of 1073741824 bytes"):
        run(LibraryDevice(CudnnAttention(0)), _forward_backward, _arrays(rng))


def test_sizes_that_the_library_refuses(rng, fake):
    fake.refuses = NotImplementedError
    message = r"\(2, 11, 4, 2, 32\) \(no engine\); use --attention native"
    with pytest.raises(LlmqError, match=message):
        run(LibraryDevice(CudnnAttention(0)), _forward_backward, _arrays(rng))
    with pytest.raises(LlmqError, match=message):
        CudnnAttention(0).check(*CASE)


@pytest.mark.parametrize("error", [NotImplementedError, RuntimeError, ValueError])
def test_errors_of_the_library_while_it_plans_and_runs(rng, fake, error):
    """Front end 1.26 answers with a RuntimeError to a backward that cuDNN 9.19 does not know."""
    fake.refuses = error
    with pytest.raises(LlmqError, match=r"cuDNN 91900 cannot compute attention .* \(no engine\)"):
        CudnnAttention(0).check(*CASE)
    fake.refuses, fake.fails = None, error
    library = CudnnAttention(0)
    with pytest.raises(CudnnError, match=r"^cuDNN 91900: execution failed$"):
        run(LibraryDevice(library), _forward_backward, _arrays(rng))
    assert library.errors == (CudnnError,)  # for CudaDevice, which names the launch


def test_check_builds_what_a_step_runs(rng, fake):
    library = CudnnAttention(0)
    library.check(4, *CASE[1:], chunks=2)
    heads, scale = CASE[2:4], CASE[4] ** -0.5
    built = {("forward", (4, *CASE[1:]), heads, False, None, scale)}
    built |= {("backward", CASE, heads, True, None, scale)}
    assert set(library._plans) == built
    library.check(4, *CASE[1:], chunks=2, window=4)
    windowed = {(*key[:4], 4, scale) for key in built}
    assert set(library._plans) == built | windowed
    assert len(library._plans) == 4
    library.check(1, *CASE[1:], chunks=2)
    library.check(1, *CASE[1:], chunks=4)
    one = ("backward", (1, *CASE[1:]))
    assert {key for key in library._plans if key[:2] == one} == {
        (*one, (2, 1), True, None, scale), (*one, (1, 1), True, None, scale),
    }  # fmt: skip
    fake.workspace = backward_workspace_bytes(*CASE) + 1
    with pytest.raises(LlmqError, match=r"a workspace of \d+ bytes, 1048576 were planned; use"):
        CudnnAttention(0).check(*CASE)


def test_unsupported():
    assert unsupported(90, BF16, 128) is None
    assert "compute capability 7.5" in unsupported(75, BF16, 128)
    assert "needs BF16, not F32" in unsupported(90, F32, 128)
    assert "head size 256" in unsupported(90, BF16, 256)


def test_missing_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "cudnn", None)
    with pytest.raises(LlmqError, match="install nvidia-cudnn-cu12 and nvidia-cudnn-frontend"):
        CudnnAttention(0)


def test_old_library(fake):
    fake.version = 8900
    with pytest.raises(LlmqError, match=r"not available \(cuDNN 8900 is older than 90100\); inst"):
        CudnnAttention(0)
    assert fake.open == 0


def test_workspace_is_taken_from_the_stack(rng, fake):
    dev = LibraryDevice(CudnnAttention(0))
    run(dev, _forward_backward, _arrays(rng))
    assert dev.stack.high_water_mark == backward_workspace_bytes(*CASE)
    assert dev.stack.high_water_tensors[0][0] == "cudnn_workspace"


def test_a_kept_library_goes_to_one_device_with_its_plans(fake):
    library = CudnnAttention.of(0)
    library.check(*CASE)
    library.keep()
    assert CudnnAttention.of(1) is not library and CudnnAttention.of(0) is library
    assert library._plans and CudnnAttention.of(0) is not library


@pytest.mark.skipif(find_spec("cudnn") is None, reason="cuDNN's front end is not installed")
def test_the_front_end_comes_without_pytorch():
    code = "import sys; from llmq.runtime.cudnn import _front_end as load; print(load().__name__)"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; print('torch' in sys.modules)"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.split() == ["cudnn", "False"]
