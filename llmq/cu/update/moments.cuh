// moments.cuh -- moments of update rules: F32, BF16 rounded stochastically, or E4M3.
//
// E4M3 moments: m = code * scale, v = (code * scale)^2. 128 neighbours share a scale, the smallest
// power of two with which their largest code is at most 448. A thread has COUNT elements, and whole
// warps call `fit`, since SCALE_THREADS neighbouring threads share a scale.
#pragma once
#include "common.cuh"

constexpr int COUNT = 8;            // elements per thread: one vector of BF16, two of F32
constexpr int SCALE_THREADS = 16;   // 128 elements
constexpr int LEAST_EXPONENT = 27;  // a scale's least exponent, biased by 127: 1 / scale is finite

template <class X> __device__ __forceinline__ X rounded(float x, u32 bits);
template <> __device__ __forceinline__ float rounded<float>(float x, u32 bits) { return x; }
template <> __device__ __forceinline__ bf16 rounded<bf16>(float x, u32 bits) {
    return round_stochastic(x, bits);
}

// A thread's COUNT elements of a moment. SECOND: v, rounded by the high random bits; else m, by the
// low bits. ROOT: fit and set take the square roots of new values.
template <class X, bool SECOND> struct Moment {
    static constexpr bool ROOT = false;
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
    static constexpr bool ROOT = SECOND;
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
    // Sets the scale for the new values of this thread and of the threads that share the scale.
    __device__ __forceinline__ void fit(const float (&x)[COUNT]) {
        float largest = 0.0f;
#pragma unroll
        for (int k = 0; k < COUNT; ++k) { largest = fmaxf(largest, fabsf(x[k])); }
#pragma unroll
        for (int other = SCALE_THREADS / 2; other > 0; other >>= 1) {
            largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, other));
        }
        // 448 = 1.75 * 2^8: the exponent rises by one if the fraction is larger than 0.75.
        const int exponent = (int)((__float_as_uint(largest) + 0x1FFFFFu) >> 23) - 8;
        const int fitting = max(exponent, LEAST_EXPONENT);
        scale = __uint_as_float((u32)fitting << 23);
        inverse = __uint_as_float((u32)(254 - fitting) << 23);
    }
    // The code of x, in the highest byte, rounded stochastically by the high 20 of the bits. The
    // bits of an E4M3 number, shifted left by 20, are the bits of 2^-120 times the number in F32,
    // for subnormal numbers too.
    __device__ __forceinline__ u32 code(float x, u32 bits) const {
        const u32 raw = __float_as_uint(fabsf(x) * inverse * 0x1p-120f) + (bits >> 12);
        // A second moment never becomes zero.
        if constexpr (SECOND) { return max(raw, 1u << 20) << 4; }
        return (raw << 4 & 0x7FFFFFFFu) | (__float_as_uint(x) & 0x80000000u);
    }
    __device__ __forceinline__ void set(int k, float x, u32 bits) {
        const u32 before = k % 4 == 0 ? 0u : words[k / 4];  // earlier codes, in the highest bytes
        words[k / 4] = __byte_perm(before, code(x, bits), 0x7321);
    }
    __device__ __forceinline__ void store(e4m3* p, f32* scales, i64 start) const {
        __stcs(reinterpret_cast<uint2*>(p + start), make_uint2(words[0], words[1]));
        if (threadIdx.x % SCALE_THREADS == 0) { scales[start / (COUNT * SCALE_THREADS)] = scale; }
    }
};
