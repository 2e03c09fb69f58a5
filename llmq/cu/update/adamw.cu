// adamw.cu -- one AdamW step on a flat slab that holds several parameters, or on a part of it.
//
//   lr = lr_scale * scalars.lr
//   g = grad_scale * grad       m += (1 - beta1) * (g - m)       v += (1 - beta2) * (g * g - v)
//   param -= lr * beta1_correction * m / (sqrt(v) * sqrt(beta2_correction) + epsilon) + decay * param
//   decay = lr * weight_decay in segments with weight decay, else 0;  work = bf16(param)
//
// E4M3 moments: see moments.cuh; llmq/ops/update/adamw.py gives the reasons.
//
// Data     declared in llmq/ops/update/adamw.py. m_scale, v_scale: null unless the moment is E4M3.
//          segments: ends ascend, in multiples of 128 from the start of the slab; param, work,
//          grad, m, v start at the slab's element `first`.
// Launch   128 threads, ceil(n / 1024) blocks: 8 elements per thread, 16 threads for a scale.
// Cost     param, m, v read and written, grad read, work written, once each; memory-bound, but
//          barely: 80 instructions per element with three stochastic roundings. An exact division
//          or root takes ten instructions.
// Needs    scalars final on the same stream. skip_update: every thread returns at once.
#include "update/moments.cuh"

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

extern "C" __global__ void __launch_bounds__(128, 7)
adamw(P* __restrict__ param, bf16* __restrict__ work, const G* __restrict__ grad,
      M* __restrict__ m, V* __restrict__ v, f32* __restrict__ m_scale, f32* __restrict__ v_scale,
      const i64* __restrict__ segments, i32 num_segments, const StepScalars* __restrict__ scalars,
      f32 one_minus_beta1, f32 one_minus_beta2, f32 epsilon, f32 weight_decay, f32 lr_scale,
      u32 salt, i64 first, i64 n) {
    const i64 mine = ((i64)blockIdx.x * blockDim.x + threadIdx.x) * COUNT;
    if (scalars->skip_update) { return; }
    // `fit` needs whole warps: threads past the end compute the last elements and store nothing.
    const i64 start = min(mine, n - COUNT);
    Pack<P, COUNT> p_pack;
    Pack<G, COUNT> g_pack;
    Moment<M, false> m_state;
    Moment<V, true> v_state;
    p_pack.load(param + start);
    g_pack.load(grad + start);
    m_state.load(m, m_scale, start);
    v_state.load(v, v_scale, start);

    const float grad_scale = scalars->grad_scale;
    const float lr = scalars->lr * lr_scale;
    const float step_size = lr * scalars->beta1_correction;
    const float root_correction = sqrtf(scalars->beta2_correction);
    const bool decays = decays_at(segments, num_segments, first + start);
    const float decay = decays ? lr * weight_decay : 0.0f;
    const u32 seed = mix_word(mix_word(mix_word(0, scalars->seed), scalars->step), salt);
    const u64 eight = (u64)(first + start) / COUNT;
    const u32 hash = random_bits(seed, eight), hash_m = random_bits(mix_word(0, seed), eight);
    float m_new[COUNT], v_new[COUNT], root[COUNT];
#pragma unroll
    for (int k = 0; k < COUNT; ++k) {
        const float g = g_pack.get(k) * grad_scale;
        m_new[k] = m_state.get(k);
        v_new[k] = v_state.get(k);
        m_new[k] += (g - m_new[k]) * one_minus_beta1;
        v_new[k] += (g * g - v_new[k]) * one_minus_beta2;
        root[k] = sqrtf(v_new[k]);
        if (Moment<V, true>::ROOT) { v_new[k] = root[k]; }
    }
    m_state.fit(m_new);
    v_state.fit(v_new);
#pragma unroll
    for (int k = 0; k < COUNT; ++k) {
        const u32 shared_bits = hash * neighbour_factor(k);  // low half: param, high: v
        float p_new = p_pack.get(k);
        float change = m_new[k] / (root[k] * root_correction + epsilon) * step_size;
        if (decays) { change += p_new * decay; }
        p_new -= change;
        p_pack.set(k, rounded<P>(p_new, shared_bits));
        v_state.set(k, v_new[k], shared_bits);
        m_state.set(k, m_new[k], hash_m * neighbour_factor(k));
    }
    if (mine >= n) { return; }
    p_pack.store(param + start);
    m_state.store(m, m_scale, start);
    v_state.store(v, v_scale, start);
    if (work != nullptr) {
        Pack<bf16, COUNT> work_pack;
#pragma unroll
        for (int k = 0; k < COUNT; ++k) { work_pack.set(k, __float2bfloat16(p_pack.get(k))); }
        work_pack.store(work + start);
    }
}
