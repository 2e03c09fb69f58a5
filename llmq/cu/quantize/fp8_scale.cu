// fp8_scale.cu -- scales of FP8 tensors from the largest |x| of the last optimizer steps.
//
//   update   history[h] = history[h + 1]; the last entry = abs_max, or 0 if abs_max is not finite
//            m = largest of history      scale = max(m, 1e-10) / limit, 1 if m is 0
//            factor = 1 / scale
//   now      scale = max(abs_max, 1e-10) / limit, NaN if abs_max is not finite
//   count    stats[saturated] += sum of saturated
//            stats[norm_squared] = NaN if an abs_max is not finite
//
// Data     declared in llmq/ops/quantize/fp8_scale.py. scales, factors, abs_maxes, saturated: only
//          the first element of a row is used. history: oldest first; unchanged if abs_maxes is
//          null.
// Launch   update: 256 threads, ceil(n / 256) blocks. count: 256 threads, one block. now: one
//          thread.
// Cost     history read and written once; a launch takes some microseconds.
// Needs    limits positive, history finite and not negative. Counts are exact below 2^32 each.
#include "common.cuh"

constexpr int THREADS = 256, STRIDE = 4;
constexpr int NORM_SQUARED = 2, SATURATED = 4;  // llmq.base.dtypes.STAT
constexpr float LEAST_ABS_MAX = 1e-10f;         // equal to cu/quantize/quantize.cu's

extern "C" __global__ void __launch_bounds__(THREADS)
fp8_scale_update(f32* __restrict__ scales, f32* __restrict__ factors, f32* __restrict__ history,
                 const f32* __restrict__ abs_maxes, const f32* __restrict__ limits, i32 length,
                 i32 n) {
    const int i = blockIdx.x * THREADS + threadIdx.x;
    if (i >= n) { return; }
    float largest = 0.0f;
    if (abs_maxes != nullptr) {
        for (int h = 0; h < length - 1; ++h) {
            const float later = history[(h + 1) * n + i];
            history[h * n + i] = later;
            largest = fmaxf(largest, later);
        }
        const float seen = abs_maxes[i * STRIDE], newest = isfinite(seen) ? seen : 0.0f;
        history[(length - 1) * n + i] = newest;
        largest = fmaxf(largest, newest);
    } else {
        for (int h = 0; h < length; ++h) { largest = fmaxf(largest, history[h * n + i]); }
    }
    const float scale = largest > 0.0f ? fmaxf(largest, LEAST_ABS_MAX) / limits[i] : 1.0f;
    scales[i * STRIDE] = scale;
    if (factors != nullptr) { factors[i * STRIDE] = 1.0f / scale; }
}

extern "C" __global__ void fp8_scale_now(f32* scale, const f32* abs_max, f32 limit) {
    const float m = *abs_max;
    *scale = isfinite(m) ? fmaxf(m, LEAST_ABS_MAX) / limit : m - m;
}

extern "C" __global__ void __launch_bounds__(THREADS)
fp8_scale_count(f64* __restrict__ stats, const i32* __restrict__ saturated,
                const f32* __restrict__ abs_maxes, i32 n) {
    __shared__ f64 shared[32];
    f64 sum = 0.0;  // a sum of integers, exact in any order
    for (int i = threadIdx.x; i < n; i += THREADS) {
        sum += (u32)saturated[i * STRIDE];
        const float seen = abs_maxes[i * STRIDE];
        if (!isfinite(seen)) { stats[NORM_SQUARED] = seen - seen; }  // all threads write NaN
    }
    sum = block_sum(sum, shared);
    if (threadIdx.x == 0) { stats[SATURATED] += sum; }
}

// -- Largest |x| of a tensor, from which its FP8 scale follows.
//
//   abs_max = max(abs_max, max_i |x_i|)        NaN counts as the largest
//   combine: out[i] = max over ranks of gathered[rank, i]
//   scales:  scales[i] = max(abs_maxes[i], 1e-10) / largest, NaN if abs_maxes[i] is not finite
//
// Data     x: n elements of T, 16-byte aligned. abs_max: F32 (1), not negative. out: F32 (n).
//          gathered: F32 (world_size, n), none negative. scales, abs_maxes: F32 (n).
// Launch   256 threads; abs_max: any grid, others: ceil(n / 256) blocks.
// Cost     x read once, and left in the L2 cache for the kernel that quantizes x; four 16-byte
//          loads in flight per thread, one atomic per block.
// Needs    nothing. Deterministic: the maximum of integers does not depend on their order.

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

// The same scale as scale_factor of quantize.cu, for many tensors.
extern "C" __global__ void __launch_bounds__(256)
abs_max_scales(f32* __restrict__ scales, const f32* __restrict__ abs_maxes, f32 largest, i64 n) {
    const i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) { return; }
    const float m = abs_maxes[i];
    scales[i] = isfinite(m) ? fmaxf(m, LEAST_ABS_MAX) / largest : m - m;  // or NaN
}
