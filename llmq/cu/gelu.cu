// gelu.cu -- GELU with the tanh approximation, and its gradient.
//
//   out = x * s      s = 0.5 * (1 + tanh(u)) = sigmoid(2u)      2u = x * (C1 + C3 * x^2)
//   d_x = d_out * (s + s * (1 - s) * x * (C1 + 3 * C3 * x^2))
//
// Data     out, x, d_out, d_x: n elements of T, 16-byte aligned, n a multiple of one 16-byte
//          vector. Outputs may be inputs. abs_max: F32 (1), with ABS_MAX = 1 raised to the largest
//          |out|, |d_x|, as stored; else not touched, may be null.
// Launch   256 threads, ceil(n / (512 vectors)) blocks: 2 vectors per thread.
// Cost     forward reads n and writes n, backward reads 2n and writes n; memory-bound, about 30
//          instructions per element: the sigmoid form has no branch, unlike tanhf, and no
//          cancellation.
// Needs    nothing else.
// Same name  llmq/ops/gelu.py  llmq/ref/gelu.py  tests/ops/test_gelu.py
#include "common.cuh"

constexpr int THREADS = 256, VECTORS = 2;
constexpr int N = Vec<T>::N;
constexpr float C1 = 1.5957691216057308f;   // 2 * sqrt(2 / pi)
constexpr float C3 = 0.07135481627260025f;  // C1 * 0.044715
constexpr float THREE_C3 = 0.21406444881780073f;  // rounded as the reference rounds 3 * C3

// exp overflows to infinity for x < -88, and 1 / infinity is the right result.
__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

__device__ __forceinline__ i64 offset(int i) {
    return (((i64)blockIdx.x * VECTORS + i) * THREADS + threadIdx.x) * N;
}

extern "C" __global__ void __launch_bounds__(THREADS)
gelu_forward(T* out, const T* x, i64 n, f32* abs_max) {
    u32 largest = 0;
    uint4 in[VECTORS];
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        if (offset(i) < n) { in[i] = load_packed_stream(x + offset(i)); }
    }
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        if (offset(i) >= n) { break; }
        const Vec<T> in_i = unpack<T>(in[i]);
        Vec<T> result;
#pragma unroll
        for (int k = 0; k < N; ++k) {
            const float v = to_f32(in_i[k]);
            result[k] = from_f32<T>(sigmoid((v * v * C3 + C1) * v) * v);
        }
        store_vec(out + offset(i), result);
        largest = max(largest, abs_max_bits(result));
    }
    finish_abs_max<ABS_MAX>(abs_max, largest);
}

extern "C" __global__ void __launch_bounds__(THREADS)
gelu_backward(T* d_x, const T* d_out, const T* x, i64 n, f32* abs_max) {
    u32 largest = 0;
    uint4 in[VECTORS], d[VECTORS];
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        if (offset(i) < n) {
            in[i] = load_packed_stream(x + offset(i));
            d[i] = load_packed_stream(d_out + offset(i));
        }
    }
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        if (offset(i) >= n) { break; }
        const Vec<T> in_i = unpack<T>(in[i]), d_i = unpack<T>(d[i]);
        Vec<T> result;
#pragma unroll
        for (int k = 0; k < N; ++k) {
            const float v = to_f32(in_i[k]);
            const float s = sigmoid((v * v * C3 + C1) * v);
            const float slope = (v * v * THREE_C3 + C1) * v * s * (1.0f - s) + s;
            result[k] = from_f32<T>(slope * to_f32(d_i[k]));
        }
        store_vec(d_x + offset(i), result);
        largest = max(largest, abs_max_bits(result));
    }
    finish_abs_max<ABS_MAX>(abs_max, largest);
}
