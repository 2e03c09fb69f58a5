// reduce.cu -- add a tensor to a gradient.
//
//   d_sum[i] = accumulate ? round(d_sum[i] + x[i]) : x[i]     BF16 sums are rounded stochastically
//
// Data     d_sum G, x T: n elements, each F32 or BF16, 16-byte aligned.
// Launch   256 threads, ceil(n / 2048) blocks: 8 elements per thread.
// Cost     both read and d_sum written once.
// Needs    scalars' seed, step and micro_step, if accumulate and G is BF16.
// Same name  llmq/ops/reduce.py  llmq/ref/reduce.py  tests/ops/test_reduce.py
#include "common.cuh"

constexpr int COUNT = 8;

extern "C" __global__ void __launch_bounds__(256)
reduce_add(G* __restrict__ d_sum, const T* __restrict__ x, const StepScalars* __restrict__ scalars,
           i32 accumulate, u32 salt, i64 n) {
    const i64 first = ((i64)blockIdx.x * blockDim.x + threadIdx.x) * COUNT;
    const u32 seed = gradient_seed(scalars, salt);
    if (first + COUNT <= n) {
        Pack<T, COUNT> in;
        in.load(x + first);
        float values[COUNT];
#pragma unroll
        for (int k = 0; k < COUNT; ++k) { values[k] = in.get(k); }
        if (accumulate) {
            add_gradients(d_sum, first, values, seed);
        } else {
            Pack<G, COUNT> out;
#pragma unroll
            for (int k = 0; k < COUNT; ++k) { out.set(k, from_f32<G>(values[k])); }
            out.store(d_sum + first);
        }
    } else {
        for (i64 i = first; i < n; ++i) {
            store_gradient(d_sum, i, to_f32(x[i]), accumulate, seed);
        }
    }
}
