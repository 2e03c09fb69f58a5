// add.cu -- Sum of two tensors.
//
//   out[i] = T(a[i] + b[i])
//
// Data     out, a, b: n elements of T (f32, bf16), 16-byte aligned.
// Launch   256 threads, ceil(n / 2048) blocks: 8 elements per thread.
// Cost     a and b read, out written once.
// Needs    out may be a or b: a thread reads what it overwrites.
// Same name  llmq/ops/add.py  llmq/ref/add.py  tests/ops/test_add.py
#include "common.cuh"

constexpr int COUNT = 8;

extern "C" __global__ void __launch_bounds__(256) add(T* out, const T* a, const T* b, i64 n) {
    const i64 first = ((i64)blockIdx.x * blockDim.x + threadIdx.x) * COUNT;
    if (first + COUNT <= n) {
        Pack<T, COUNT> x, y;
        x.load(a + first);
        y.load(b + first);
#pragma unroll
        for (int k = 0; k < COUNT; ++k) { x.set(k, from_f32<T>(x.get(k) + y.get(k))); }
        x.store(out + first);
    } else {
        for (i64 i = first; i < n; ++i) { out[i] = from_f32<T>(to_f32(a[i]) + to_f32(b[i])); }
    }
}
