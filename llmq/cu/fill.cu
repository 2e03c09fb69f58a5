// fill.cu -- one value everywhere.
//
//   x[i] = value
//
// Data     x: n elements of T, F32 or BF16, 16-byte aligned.
// Launch   256 threads, ceil(bytes / 4096) blocks: one 16-byte store per thread.
// Cost     x written once.
// Needs    nothing.
// Same name  llmq/ops/fill.py  llmq/ref/fill.py  tests/ops/test_fill.py
#include "common.cuh"

extern "C" __global__ void __launch_bounds__(256) fill(T* __restrict__ x, f32 value, i64 n) {
    const i64 first = ((i64)blockIdx.x * blockDim.x + threadIdx.x) * Vec<T>::N;
    const T element = from_f32<T>(value);
    if (first + Vec<T>::N <= n) {
        Vec<T> vector;
#pragma unroll
        for (int k = 0; k < Vec<T>::N; ++k) { vector[k] = element; }
        store_vec(x + first, vector);
    } else {
        for (i64 i = first; i < n; ++i) { x[i] = element; }
    }
}
