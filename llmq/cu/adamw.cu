// adamw.cu -- one AdamW step on a flat slab that holds several parameters.
//
//   g = grad_scale * grad       m += (1 - beta1) * (g - m)       v += (1 - beta2) * (g * g - v)
//   param -= lr * beta1_correction * m / (sqrt(v * beta2_correction) + epsilon) + decay * param
//   decay = lr * weight_decay in the segments that decay, else 0;  work = bf16(param)
//
// Data     param P, grad G, m M, v V: F32 or BF16; work BF16 or null; n elements, n % 128 == 0.
//          segments: (end element, decays) of each parameter, ends ascending multiples of 128.
// Launch   256 threads, ceil(n / 2048) blocks: 8 elements per thread.
// Cost     param, m, v read and written, grad read, work written, once each; memory-bound, though
//          not by far: 130 instructions per element with three stochastic roundings.
// Needs    scalars final on the same stream. skip_update: every thread returns at once.
// Same name  llmq/ops/adamw.py  llmq/ref/adamw.py  tests/ops/test_adamw.py
#include "common.cuh"

constexpr int COUNT = 8;  // elements per thread: one vector of BF16, two of F32

// BF16 is rounded stochastically by the low 16 of the bits.
template <class X> __device__ __forceinline__ X rounded(float x, u32 bits);
template <> __device__ __forceinline__ float rounded<float>(float x, u32 bits) { return x; }
template <> __device__ __forceinline__ bf16 rounded<bf16>(float x, u32 bits) {
    return round_stochastic(x, bits);
}

// Whether the parameter that holds element i decays: binary search for the first end above i.
__device__ __forceinline__ bool decays_at(const i64* segments, i32 num_segments, i64 i) {
    int low = 0, high = num_segments - 1;
    while (low < high) {
        const int middle = (low + high) >> 1;
        if (segments[2 * middle] > i) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    return segments[2 * low + 1] != 0;
}

extern "C" __global__ void __launch_bounds__(256, 4)
adamw(P* __restrict__ param, bf16* __restrict__ work, const G* __restrict__ grad,
      M* __restrict__ m, V* __restrict__ v, const i64* __restrict__ segments, i32 num_segments,
      const StepScalars* __restrict__ scalars, f32 one_minus_beta1, f32 one_minus_beta2,
      f32 epsilon, f32 weight_decay, u32 salt, i64 n) {
    const i64 first = ((i64)blockIdx.x * blockDim.x + threadIdx.x) * COUNT;
    if (first >= n || scalars->skip_update) { return; }
    Pack<P, COUNT> p_pack;
    Pack<G, COUNT> g_pack;
    Pack<M, COUNT> m_pack;
    Pack<V, COUNT> v_pack;
    p_pack.load(param + first);
    g_pack.load(grad + first);
    m_pack.load(m + first);
    v_pack.load(v + first);

    const float grad_scale = scalars->grad_scale;
    const float step_size = scalars->lr * scalars->beta1_correction;
    const float beta2_correction = scalars->beta2_correction;
    const bool decays = decays_at(segments, num_segments, first);
    const float decay = decays ? scalars->lr * weight_decay : 0.0f;
    const u32 seed = mix_word(mix_word(mix_word(0, scalars->seed), scalars->step), salt);
    const u32 seed_m = mix_word(0, seed);
#pragma unroll
    for (int k = 0; k < COUNT; ++k) {
        // first is a multiple of 8: `|` keeps the index's high word the same for all k.
        const u64 index = (u64)first | k;
        const u32 shared_bits = random_bits(seed, index);  // two halves: low for param, high for v
        const float g = g_pack.get(k) * grad_scale;
        float m_new = m_pack.get(k), v_new = v_pack.get(k), p_new = p_pack.get(k);
        m_new += (g - m_new) * one_minus_beta1;
        v_new += (g * g - v_new) * one_minus_beta2;
        float change = m_new / (sqrtf(v_new * beta2_correction) + epsilon) * step_size;
        if (decays) { change += p_new * decay; }
        p_new -= change;
        p_pack.set(k, rounded<P>(p_new, shared_bits));
        v_pack.set(k, rounded<V>(v_new, shared_bits >> 16));
        m_pack.set(k, rounded<M>(m_new, random_bits(seed_m, index)));
    }
    p_pack.store(param + first);
    m_pack.store(m + first);
    v_pack.store(v + first);
    if (work != nullptr) {
        Pack<bf16, COUNT> work_pack;
#pragma unroll
        for (int k = 0; k < COUNT; ++k) { work_pack.set(k, __float2bfloat16(p_pack.get(k))); }
        work_pack.store(work + first);
    }
}
