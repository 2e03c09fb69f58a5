// expert_scale.cu -- trained factors of experts.
//
//   forward    out[i] = weights[i] * scale[chosen[i]]
//   backward   d_scale[e] = sum of d[i] * weights[i], then d[i] *= scale[e], for the choices i of
//              expert e, i = order[r] with r in [starts[e], starts[e + 1])
//
// Data     declared in llmq/ops/experts/expert_scale.py.
// Launch   256 threads. forward: a thread for each choice. backward: a block for each expert.
// Cost     inputs read once, results written once. Sums have a fixed order.
// Needs    0 <= chosen < E.
#include "common.cuh"

constexpr int THREADS = 256;

extern "C" __global__ void __launch_bounds__(THREADS)
expert_scale_forward(f32* __restrict__ out, const f32* __restrict__ weights,
                     const T* __restrict__ scale, const i32* __restrict__ chosen, i64 n) {
    const i64 i = (i64)blockIdx.x * THREADS + threadIdx.x;
    if (i < n) { out[i] = weights[i] * to_f32(scale[chosen[i]]); }
}

extern "C" __global__ void __launch_bounds__(THREADS)
expert_scale_backward(f32* d_weights, f32* __restrict__ d_scale, const f32* __restrict__ weights,
                      const T* __restrict__ scale, const i32* __restrict__ order,
                      const i32* __restrict__ starts) {
    __shared__ float sums[THREADS];
    const int e = blockIdx.x;
    const float factor = to_f32(scale[e]);
    float sum = 0.0f;
    for (int r = starts[e] + threadIdx.x; r < starts[e + 1]; r += THREADS) {
        const i32 i = order[r];
        const float d = d_weights[i];
        sum = fmaf(d, weights[i], sum);
        d_weights[i] = d * factor;
    }
    sums[threadIdx.x] = sum;
    for (int half = THREADS / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) { sums[threadIdx.x] += sums[threadIdx.x + half]; }
    }
    if (threadIdx.x == 0) { d_scale[e] = sums[0]; }
}
