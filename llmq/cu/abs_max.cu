// abs_max.cu -- the largest magnitude of a tensor, from which its FP8 scale follows.
//
//   abs_max = max(abs_max, max_i |x_i|)        NaN is larger than everything
//   combine: out[i] = max over ranks of gathered[rank, i]
//   scales:  scales[i] = max(abs_maxes[i], 1e-10) / largest, NaN where abs_maxes[i] is not finite
//
// Data     x: n elements of T, 16-byte aligned. abs_max: F32 (1), not negative. out: F32 (n).
//          gathered: F32 (world_size, n), none negative. scales, abs_maxes: F32 (n).
// Launch   256 threads; abs_max: any grid, others: ceil(n / 256) blocks.
// Cost     x read once, and left in the L2 cache for whoever quantizes it; four 16-byte loads in
//          flight per thread, one atomic per block.
// Needs    nothing. Deterministic: the maximum of integers does not depend on their order.
#include "common.cuh"

constexpr int N = Vec<T>::N, UNROLL = 4;

extern "C" __global__ void __launch_bounds__(256)
abs_max(f32* __restrict__ abs_max, const T* __restrict__ x, i64 n) {
    const i64 vectors = n / N, chunk = (i64)UNROLL * blockDim.x;
    u32 largest = 0;
    for (i64 start = blockIdx.x * chunk; start < vectors; start += gridDim.x * chunk) {
        uint4 loaded[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            const i64 i = start + u * blockDim.x + threadIdx.x;
            loaded[u] = make_uint4(0, 0, 0, 0);
            if (i < vectors) { loaded[u] = __ldg(reinterpret_cast<const uint4*>(x) + i); }
        }
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            largest = max(largest, abs_max_bits(unpack<T>(loaded[u])));
        }
    }
    if (blockIdx.x == 0 && threadIdx.x < n - vectors * N) {
        largest = max(largest, abs_bits(to_f32(x[vectors * N + threadIdx.x])));
    }
    finish_abs_max<true>(abs_max, largest);
}

extern "C" __global__ void __launch_bounds__(256)
abs_max_combine(f32* __restrict__ out, const f32* __restrict__ gathered, i32 world_size, i64 n) {
    const i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) { return; }
    u32 largest = 0;
    for (int rank = 0; rank < world_size; ++rank) {
        largest = max(largest, abs_bits(gathered[rank * n + i]));
    }
    out[i] = __uint_as_float(largest);
}

// As scale_factor in quantize.cu, for many tensors.
extern "C" __global__ void __launch_bounds__(256)
abs_max_scales(f32* __restrict__ scales, const f32* __restrict__ abs_maxes, f32 largest, i64 n) {
    constexpr float LEAST_ABS_MAX = 1e-10f;
    const i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) { return; }
    const float m = abs_maxes[i];
    scales[i] = isfinite(m) ? fmaxf(m, LEAST_ABS_MAX) / largest : m - m;  // or NaN
}
