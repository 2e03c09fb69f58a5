// convert.cu -- between F32 and BF16.
//
//   out[i] = x[i], rounded to nearest
//
// Data     out D, x S: n elements, each F32 or BF16, 16-byte aligned.
// Launch   256 threads, ceil(n / 2048) blocks: 8 elements per thread.
// Cost     x read and out written once.
// Needs    nothing.
// Same name  llmq/ops/convert.py  llmq/ref/convert.py  tests/ops/test_convert.py
#include "common.cuh"

constexpr int COUNT = 8;

extern "C" __global__ void __launch_bounds__(256)
convert(D* __restrict__ out, const S* __restrict__ x, i64 n) {
    const i64 first = ((i64)blockIdx.x * blockDim.x + threadIdx.x) * COUNT;
    if (first + COUNT <= n) {
        Pack<S, COUNT> in;
        Pack<D, COUNT> result;
        in.load(x + first);
#pragma unroll
        for (int k = 0; k < COUNT; ++k) { result.set(k, from_f32<D>(in.get(k))); }
        result.store(out + first);
    } else {
        for (i64 i = first; i < n; ++i) { out[i] = from_f32<D>(to_f32(x[i])); }
    }
}
