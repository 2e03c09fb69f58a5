// adamw.cu -- one AdamW step on a flat slab that holds several parameters, or on a part of it.
//
//   lr = lr_scale * scalars.lr
//   g = grad_scale * grad       m += (1 - beta1) * (g - m)       v += (1 - beta2) * (g * g - v)
//   param -= lr * beta1_correction * m / (sqrt(v * beta2_correction) + epsilon) + decay * param
//   decay = lr * weight_decay in the segments that decay, else 0;  work = bf16(param)
//
// E4M3 moments: m = code * scale, v = (code * scale)^2, one scale for 128 neighbours, the smallest
// power of two with which the largest of them is at most 448. See llmq/ops/adamw.py for why.
//
// Data     param P, grad G: F32 or BF16; m M, v V: F32, BF16 or E4M3; work BF16 or null; n elements,
//          n % 128 == 0. m_scale, v_scale: F32 (n / 128), null unless the moment is E4M3.
//          segments: (end element, decays) of each parameter, ends ascending multiples of 128,
//          counted from the start of the slab; param, work, grad, m, v start at its element first.
// Launch   128 threads, ceil(n / 1024) blocks: 8 elements per thread, 16 threads for a scale.
// Cost     param, m, v read and written, grad read, work written, once each; memory-bound, though
//          not by far: 100 instructions per element with three stochastic roundings.
// Needs    scalars final on the same stream. skip_update: every thread returns at once.
// Same name  llmq/ops/adamw.py  llmq/ref/adamw.py  tests/ops/test_adamw.py
#include "common.cuh"

constexpr int COUNT = 8;            // elements per thread: one vector of BF16, two of F32
constexpr int SCALE_THREADS = 16;   // 128 elements
constexpr int LEAST_EXPONENT = 27;  // of a scale, with F32's bias of 127, so that 1 / scale exists

template <class X> __device__ __forceinline__ X rounded(float x, u32 bits);
template <> __device__ __forceinline__ float rounded<float>(float x, u32 bits) { return x; }
template <> __device__ __forceinline__ bf16 rounded<bf16>(float x, u32 bits) {
    return round_stochastic(x, bits);
}

// The COUNT elements of a moment that a thread has. SECOND: v, of which the high bits decide; of m
// the low ones.
template <class X, bool SECOND> struct Moment {
    Pack<X, COUNT> pack;

    __device__ __forceinline__ void load(const X* p, const f32* scales, i64 start) {
        pack.load(p + start);
    }
    __device__ __forceinline__ float get(int k) const { return pack.get(k); }
    __device__ __forceinline__ void fit(const float (&x)[COUNT]) {}
    __device__ __forceinline__ void set(int k, float x, u32 bits) {
        pack.set(k, rounded<X>(x, SECOND ? bits >> 16 : bits));
    }
    __device__ __forceinline__ void store(X* p, f32* scales, i64 start) const {
        pack.store(p + start);
    }
};

template <bool SECOND> struct Moment<e4m3, SECOND> {
    u32 words[COUNT / 4];
    float scale, inverse;

    __device__ __forceinline__ void load(const e4m3* p, const f32* scales, i64 start) {
        const uint2 both = __ldcs(reinterpret_cast<const uint2*>(p + start));
        words[0] = both.x;
        words[1] = both.y;
        scale = scales[start / (COUNT * SCALE_THREADS)];
    }
    __device__ __forceinline__ float get(int k) const {
        const __nv_fp8x2_storage_t pair = (__nv_fp8x2_storage_t)(words[k / 4] >> (k % 4 & 2) * 8);
        const float2 both = __half22float2(__nv_cvt_fp8x2_to_halfraw2(pair, __NV_E4M3));
        const float x = (k % 2 ? both.y : both.x) * scale;
        return SECOND ? x * x : x;
    }
    // The scale for these new values of this thread and of those that share it.
    __device__ __forceinline__ void fit(const float (&x)[COUNT]) {
        float largest = 0.0f;
#pragma unroll
        for (int k = 0; k < COUNT; ++k) { largest = fmaxf(largest, fabsf(x[k])); }
#pragma unroll
        for (int other = SCALE_THREADS / 2; other > 0; other >>= 1) {
            largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, other));
        }
        if (SECOND) { largest = sqrtf(largest); }
        // 448 = 1.75 * 2^8: up to the next exponent if the fraction is larger than 0.75.
        const int exponent = (int)((__float_as_uint(largest) + 0x1FFFFFu) >> 23) - 8;
        const int fitting = max(exponent, LEAST_EXPONENT);
        scale = __uint_as_float((u32)fitting << 23);
        inverse = __uint_as_float((u32)(254 - fitting) << 23);
    }
    // Rounded stochastically by the high 20 of the bits. The bits of an E4M3 number, moved 20 places
    // to the left, are those of an F32 number 2^-120 times as large, subnormal numbers included.
    __device__ __forceinline__ u32 code(float x, u32 bits) const {
        const float y = SECOND ? sqrtf(x) : fabsf(x);
        const u32 raw = __float_as_uint(y * inverse * 0x1p-120f) + (bits >> 12);
        // In the highest byte. A second moment does not become zero.
        if constexpr (SECOND) { return max(raw, 1u << 20) << 4; }
        return (raw << 4 & 0x7FFFFFFFu) | (__float_as_uint(x) & 0x80000000u);
    }
    __device__ __forceinline__ void set(int k, float x, u32 bits) {
        const u32 before = k % 4 == 0 ? 0u : words[k / 4];  // of new ones, in the highest bytes
        words[k / 4] = __byte_perm(before, code(x, bits), 0x7321);
    }
    __device__ __forceinline__ void store(e4m3* p, f32* scales, i64 start) const {
        __stcs(reinterpret_cast<uint2*>(p + start), make_uint2(words[0], words[1]));
        if (threadIdx.x % SCALE_THREADS == 0) { scales[start / (COUNT * SCALE_THREADS)] = scale; }
    }
};

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
    // Threads past the end, which whole warps need, compute the last elements and store nothing.
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
    const float beta2_correction = scalars->beta2_correction;
    const bool decays = decays_at(segments, num_segments, first + start);
    const float decay = decays ? lr * weight_decay : 0.0f;
    const u32 seed = mix_word(mix_word(mix_word(0, scalars->seed), scalars->step), salt);
    const u32 seed_m = mix_word(0, seed);
    float m_new[COUNT], v_new[COUNT];
#pragma unroll
    for (int k = 0; k < COUNT; ++k) {
        const float g = g_pack.get(k) * grad_scale;
        m_new[k] = m_state.get(k);
        v_new[k] = v_state.get(k);
        m_new[k] += (g - m_new[k]) * one_minus_beta1;
        v_new[k] += (g * g - v_new[k]) * one_minus_beta2;
    }
    m_state.fit(m_new);
    v_state.fit(v_new);
#pragma unroll
    for (int k = 0; k < COUNT; ++k) {
        // A multiple of 8: `|` keeps the index's high word the same for all k.
        const u64 index = (u64)(first + start) | k;
        const u32 shared_bits = random_bits(seed, index);  // two halves: low for param, high for v
        float p_new = p_pack.get(k);
        float change = m_new[k] / (sqrtf(v_new[k] * beta2_correction) + epsilon) * step_size;
        if (decays) { change += p_new * decay; }
        p_new -= change;
        p_pack.set(k, rounded<P>(p_new, shared_bits));
        v_state.set(k, v_new[k], shared_bits);
        m_state.set(k, m_new[k], random_bits(seed_m, index));
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
