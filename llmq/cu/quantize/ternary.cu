// ternary.cu -- weights as -1, 0 and 1 with one scale for each module.
//
//   sums     sums[r] = sum of |w[r, :]|
//   scales   scale[r] = max(sum of all sums / (rows * cols), 1e-5), the same in all rows
//   codes    q[r, c] = -1, 0 or 1, the nearest to w[r, c] / scale[r]
//   round    out[r, c] = q[r, c] * scale[r]
//
// If an element is infinite or NaN, the scale is infinite or NaN and the codes are 0 or +-1; out and
// all products with the codes are then NaN or infinite.
//
// Data     declared in llmq/ops/quantize/ternary.py.
// Launch   sums: 256 threads, a warp for each row. scales: one block of 1024 threads for a module.
//          codes, round: 256 threads, four neighbours each.
// Cost     memory-bound: scales reads one number for each row, the other kernels read w once.
// Needs    cols a multiple of 16.
#include "common.cuh"

constexpr float LEAST_MEAN = 1e-5f;  // equal to llmq/ref/quantize/ternary.py's

extern "C" __global__ void __launch_bounds__(256)
ternary_sums(f32* __restrict__ sums, const T* __restrict__ w, i64 rows, i32 cols) {
    const i64 row = (i64)blockIdx.x * 8 + threadIdx.x / 32;
    float sum = 0.0f;
    for (int c = threadIdx.x % 32 * Vec<T>::N; row < rows && c < cols; c += 32 * Vec<T>::N) {
        const Vec<T> values = load_vec(w + row * cols + c);
#pragma unroll
        for (int k = 0; k < Vec<T>::N; ++k) { sum += fabsf(to_f32(values[k])); }
    }
    sum = warp_sum(sum);
    if (row < rows && threadIdx.x % 32 == 0) { sums[row] = sum; }
}

extern "C" __global__ void __launch_bounds__(1024)
ternary_scales(f32* __restrict__ scale, const f32* __restrict__ sums, i64 rows, i32 cols) {
    __shared__ f64 shared[32];
    f64 total = 0.0;
    for (i64 r = threadIdx.x; r < rows; r += 1024) { total += sums[r]; }
    const float mean = (float)(block_sum(total, shared) / ((f64)rows * cols));
    for (i64 r = threadIdx.x; r < rows; r += 1024) {
        scale[r] = mean < LEAST_MEAN ? LEAST_MEAN : mean;  // NaN stays NaN
    }
}

__device__ __forceinline__ int ternary(float w, float factor) {
    const float v = w * factor;
    return (v > 0.5f) - (v < -0.5f);
}

extern "C" __global__ void __launch_bounds__(256)
ternary_codes(i8* __restrict__ q, const T* __restrict__ w, const f32* __restrict__ scale, i64 rows,
              i32 cols) {
    const i64 i = ((i64)blockIdx.x * 256 + threadIdx.x) * 4;
    if (i >= rows * cols) { return; }
    const float factor = 1.0f / scale[i / cols];
    u32 four = 0;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        four |= ((u32)ternary(to_f32(w[i + k]), factor) & 0xFFu) << (8 * k);
    }
    *reinterpret_cast<u32*>(q + i) = four;
}

extern "C" __global__ void __launch_bounds__(256)
ternary_round(T* __restrict__ out, const T* __restrict__ w, const f32* __restrict__ scale, i64 rows,
              i32 cols) {
    const i64 i = ((i64)blockIdx.x * 256 + threadIdx.x) * 4;
    if (i >= rows * cols) { return; }
    const float own = scale[i / cols], factor = 1.0f / own;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        out[i + k] = from_f32<T>((float)ternary(to_f32(w[i + k]), factor) * own);
    }
}
