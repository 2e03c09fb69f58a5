"""The emulator itself, on small kernels written for it."""

import faulthandler
import os
import signal

import numpy as np
import pytest

from llmq.base.dtypes import BF16, F32, I32
from llmq.runtime import compile
from llmq.runtime.kernel import Kernel
from tests.emulator import device as emulator
from tests.harness import SIZES

pytestmark = pytest.mark.skipif(emulator.missing() is not None, reason=str(emulator.missing()))

SOURCE = r"""
#include "common.cuh"
#include "ptx.cuh"

extern "C" __global__ void __launch_bounds__(256)
row_sums(float* __restrict__ out, const T* __restrict__ x, i64 C) {
    __shared__ float partial[32];
    float sum = 0.0f;
    for (i64 i = threadIdx.x * Vec<T>::N; i < C; i += blockDim.x * Vec<T>::N) {
        const Vec<T> v = load_vec(x + blockIdx.x * C + i);
        for (int k = 0; k < Vec<T>::N; ++k) { sum += to_f32(v[k]); }
    }
    sum = block_sum(sum, partial);
    if (threadIdx.x == 0) { out[blockIdx.x] = sum; }
}

// out[0] stays NaN unless the barrier is there.
extern "C" __global__ void neighbour(float* out, i32 with_barrier) {
    __shared__ float value[64];
    value[threadIdx.x] = (float)threadIdx.x;
    if (with_barrier) { __syncthreads(); }
    out[blockIdx.x * blockDim.x + threadIdx.x] = value[(threadIdx.x + 63) % 64];
}

extern "C" __global__ void dynamic_reverse(float* out, const float* x, i32 overrun) {
    extern __shared__ __align__(16) float buffer[];
    buffer[threadIdx.x] = x[threadIdx.x];
    if (overrun) { buffer[blockDim.x] = 0.0f; }
    __syncthreads();
    out[threadIdx.x] = buffer[blockDim.x - 1 - threadIdx.x];
}

extern "C" __global__ void diverge(float* out) {
    if (threadIdx.x != 3) { __syncthreads(); } else { __syncwarp(); }
    out[threadIdx.x] = 1.0f;
}

extern "C" __global__ void half_shuffle(float* out) {
    if (threadIdx.x < 16) { out[threadIdx.x] = __shfl_xor_sync(0xFFFFFFFFu, 1.0f, 1); }
}

extern "C" __global__ void votes(i32* out) {
    const int t = threadIdx.x, odd = t & 1;
    out[t * 8 + 0] = __ballot_sync(0xFFFFFFFFu, odd);
    out[t * 8 + 1] = __any_sync(0xFFFFFFFFu, t == 5);
    out[t * 8 + 2] = __all_sync(0xFFFFFFFFu, t < 32);
    out[t * 8 + 3] = __syncthreads_count(odd);
    out[t * 8 + 4] = __syncthreads_and(t >= 0);
    out[t * 8 + 5] = __syncthreads_or(t == 40);
    out[t * 8 + 6] = __shfl_down_sync(0xFFFFFFFFu, t, 1, 8);
    out[t * 8 + 7] = odd ? __shfl_sync(0xAAAAAAAAu, t, 31) : __shfl_sync(0x55555555u, t, 2);
}

extern "C" __global__ void geometry(i32* out, i32* count) {
    const int block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
    const int thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    out[block * blockDim.x * blockDim.y * blockDim.z + thread] = atomicAdd(count, 1);
}

extern "C" __global__ void shifted(float* out, const float* x, i32 by) {
    out[threadIdx.x] = x[threadIdx.x + by];
}

// Each block of a pair adds the other's value.
extern "C" __global__ void __cluster_dims__(2) pair_sum(float* out, const float* x) {
    __shared__ float mine;
    if (threadIdx.x == 0) { mine = x[blockIdx.x]; }
    emulator::cluster_sync();
    if (threadIdx.x == 1) {
        out[blockIdx.x] = mine + *emulator::map_shared(&mine, emulator::block_rank() ^ 1);
    }
    emulator::cluster_sync();
}

enum { NOTHING, NO_FENCE, NO_WAIT, PART_GIVES, ALL_TAKE, NO_PRODUCT_FENCE, NO_COMMIT };

// Eight lines of 64 ones through shared memory, as Hopper's copies have it, with something wrong.
extern "C" __global__ void __launch_bounds__(128)
box_of_ones(const __grid_constant__ TensorMap out, i32 wrong) {
    extern __shared__ __align__(1024) char box[];
    const u32 ones = 0x3F803F80;
    if (threadIdx.x < 64) {
        store_shared(shared_address(box) + 16 * threadIdx.x, make_uint4(ones, ones, ones, ones));
    }
    if (wrong != NO_FENCE) { stores_begin(); }
    if (wrong == PART_GIVES && threadIdx.x < 32) { give_registers<24>(); }
    if (wrong == ALL_TAKE) { take_registers<256>(); }
    float d[32] = {};
    if (wrong != NO_PRODUCT_FENCE) { wgmma_begin(); }
    const Descriptor all = k_inside(shared_address(box));
    if (wrong >= NO_PRODUCT_FENCE) { wgmma<64, bf16, bf16, false>(d, all, all, 0); }
    __syncthreads();
    if (threadIdx.x == 0) {
        store_box(&out, 0, 0, shared_address(box));
        if (wrong != NO_WAIT) { stores_are_done(); }
    }
}
"""
MESSAGES = (  # of what is wrong in box_of_ones, in order
    "without a fence between",
    "a store of a box that its thread has not waited for",
    "not by all threads of a warpgroup",
    "more registers than at launch",
    "a product without wgmma.fence",
    "a product in no group",
)
FILE = "emulated.cu"
ROW_SUMS = Kernel(FILE, "row_sums", args="out f32[*out] out, T[*x] x, i64 C")
NEIGHBOUR = Kernel(FILE, "neighbour", args="out f32[*out] out, i32 with_barrier")
REVERSE = Kernel(FILE, "dynamic_reverse", args="out f32[*out] out, f32[*x] x, i32 overrun")
DIVERGE = Kernel(FILE, "diverge", args="out f32[*out] out")
HALF_SHUFFLE = Kernel(FILE, "half_shuffle", args="out f32[*out] out")
VOTES = Kernel(FILE, "votes", args="out i32[*out] out")
GEOMETRY = Kernel(FILE, "geometry", args="out i32[*out] out, inout i32[*count] count")
SHIFTED = Kernel(FILE, "shifted", args="out f32[*out] out, f32[*x] x, i32 by")
PAIR_SUM = Kernel(FILE, "pair_sum", args="out f32[*out] out, f32[*x] x")
BOX_OF_ONES = Kernel(FILE, "box_of_ones", args="box8 out bf16[rows_out,columns_out] out, i32 wrong")


@pytest.fixture
def emulated(tmp_path, monkeypatch):
    """An emulator device whose kernel folder also holds SOURCE."""
    for header in compile.KERNEL_DIR.glob("*.cuh"):
        (tmp_path / header.name).write_text(header.read_text())
    (tmp_path / FILE).write_text(SOURCE)
    monkeypatch.setattr(compile, "KERNEL_DIR", tmp_path)
    return emulator.EmulatorDevice(SIZES)


def put(dev, array, dtype):
    tensor = dev.alloc("x", array.shape, dtype, "Activations")
    dev.upload(tensor, array.astype(dtype.numpy))
    return tensor


def empty(dev, shape, dtype):
    return dev.alloc("out", shape, dtype, "Activations")


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_reduction_over_a_block(emulated, dtype):
    x = np.arange(3 * 2048).reshape(3, 2048) % 7
    out = empty(emulated, (3,), F32)
    emulated.launch(ROW_SUMS, 3, 256, (out, put(emulated, x, dtype), 2048))
    np.testing.assert_array_equal(out.numpy(), x.sum(1))


@pytest.mark.parametrize("by", [4, -4])  # elements: what is read is 16 bytes outside
def test_what_is_outside_of_a_tensor_may_not_be_read(emulated, by):
    x, out = put(emulated, np.arange(64.0), F32), empty(emulated, (64,), F32)
    for _ in range(2):  # the forbidden page is before x, then behind it
        emulated.launch(SHIFTED, 1, 64, (out, x, 0))
        assert np.array_equal(out.numpy(), x.numpy())
    child = os.fork()
    if child == 0:
        faulthandler.disable()
        for _ in range(2):
            emulated.launch(SHIFTED, 1, 64, (out, x, by))
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) in (signal.SIGSEGV, signal.SIGBUS)


def test_a_missing_barrier_shows_up(emulated):
    out = empty(emulated, (2, 64), F32)
    want = np.tile(np.roll(np.arange(64.0), 1), (2, 1))
    emulated.launch(NEIGHBOUR, 2, 64, (out, 1))
    np.testing.assert_array_equal(out.numpy(), want)
    emulated.launch(NEIGHBOUR, 2, 64, (out, 0))
    assert np.isnan(out.numpy()).sum(1).tolist() == [1, 63]  # both orders of threads


def test_dynamic_shared_memory(emulated):
    x = np.arange(48.0)
    out, x_dev = empty(emulated, (48,), F32), put(emulated, x, F32)
    emulated.launch(REVERSE, 1, 48, (out, x_dev, 0), smem=48 * 4)
    np.testing.assert_array_equal(out.numpy(), x[::-1])
    with pytest.raises(RuntimeError, match="behind its dynamic shared memory"):
        emulated.launch(REVERSE, 1, 48, (out, x_dev, 1), smem=48 * 4)


def test_a_barrier_that_not_all_reach_is_an_error(emulated):
    with pytest.raises(RuntimeError, match=r"31 threads wait at __syncthreads .* 1 threads wait"):
        emulated.launch(DIVERGE, 1, 32, (empty(emulated, (32,), F32),))


def test_a_shuffle_with_returned_lanes_is_an_error(emulated):
    with pytest.raises(RuntimeError, match=r"deadlock|has returned"):
        emulated.launch(HALF_SHUFFLE, 1, 32, (empty(emulated, (32,), F32),))


def test_votes_and_shuffles(emulated):
    out = empty(emulated, (64, 8), I32)
    emulated.launch(VOTES, 1, 64, (out,))
    t = np.arange(64)
    lane, warp = t % 32, t // 32
    want = np.stack(
        [
            np.full(64, np.uint32(0xAAAAAAAA).astype(np.int32)),
            warp == 0,
            warp == 0,
            np.full(64, 32),
            np.full(64, 1),
            np.full(64, 1),
            np.where(lane % 8 == 7, t, t + 1),
            warp * 32 + np.where(lane % 2, 31, 2),
        ],
        axis=1,
    )
    np.testing.assert_array_equal(out.numpy(), want)


def test_three_dimensional_grids_and_blocks(emulated):
    out, count = empty(emulated, (24, 60), I32), put(emulated, np.zeros(1), I32)
    emulated.launch(GEOMETRY, (2, 3, 4), (3, 4, 5), (out, count))
    assert sorted(out.numpy().ravel()) == list(range(24 * 60))


def test_clusters_read_each_others_shared_memory(emulated):
    x = np.array([1.0, 2.0, 30.0, 40.0])
    out = empty(emulated, (4,), F32)
    emulated.launch(PAIR_SUM, 4, 64, (out, put(emulated, x, F32)))
    assert out.numpy().tolist() == [3.0, 3.0, 70.0, 70.0]


def test_a_declaration_that_the_source_contradicts_is_an_error(emulated):
    wrong = Kernel(FILE, "dynamic_reverse", args="out f32[*out] out, out f32[*x] x, i32 overrun")
    out = empty(emulated, (32,), F32)
    with pytest.raises(TypeError, match=r"declared .* takes \(float32\*, const float32\*, int32\)"):
        emulated.launch(wrong, 1, 32, (out, out, 0))
    absent = Kernel(FILE, "absent", args="out f32[*out] out")
    with pytest.raises(RuntimeError, match="absent"):
        emulated.launch(absent, 1, 32, (out,))


def test_what_a_gpu_refuses_is_refused(emulated):
    out = empty(emulated, (32,), F32)
    for grid, block in ((0, 32), (1, 2048), ((1, 1 << 16), 32)):
        with pytest.raises(ValueError, match="diverge: grid"):
            emulated.launch(DIVERGE, grid, block, (out,))
    with pytest.raises(ValueError, match="shared memory"):
        emulated.launch(DIVERGE, 1, 32, (out,), smem=1 << 20)


def test_what_hopper_needs_around_copies_and_products(emulated):
    out = empty(emulated, (8, 64), BF16)
    for wrong, message in enumerate(MESSAGES, start=1):
        with pytest.raises(RuntimeError, match=message):
            emulated.launch(BOX_OF_ONES, 1, 128, (out, wrong), smem=1024)
    emulated.launch(BOX_OF_ONES, 1, 128, (out, 0), smem=1024)
    assert (out.numpy() == 1).all()
