// mxfp4.cu -- four bits for each weight (E2M1), and a power of two for 32 of them (E8M0).
//
//   exponents[b] = 127 + the smallest e with which no |x| / 2^e in block b of 32 is above 6
//   codes: the level nearest to x / 2^e, of 0, 0.5, 1, 1.5, 2, 3, 4, 6 and a sign; of two the even one
//   x ~ level * 2^e, which BF16 holds exactly
//
// Data     x, out: T (n); codes: U8 (n/2), of two neighbours each, the first one in the lower bits;
//          exponents: U8 (n/32). All 16-byte aligned.
// Launch   256 threads. 8 elements per thread: ceil(n / 2048) blocks.
// Cost     what is read and written, once; a thread reads 4 bytes of codes.
// Needs    n a multiple of 32.
#include "common.cuh"

constexpr int THREADS = 256, COUNT = 8;  // elements of a thread
constexpr int BLOCK = 32, LANES = BLOCK / COUNT;

// 2^(exponent - 127); of exponent 0 nothing that F32 holds as a normal number.
__device__ __forceinline__ float power_of(u32 exponent) {
    return __uint_as_float(exponent ? exponent << 23 : 0x00400000u);
}

__device__ __forceinline__ float level_of(u32 code) {
    const u32 m = code & 7;
    const float size = m < 2 ? 0.5f * m : 0.25f * ((2 + (m & 1)) << (m >> 1));
    return code & 8 ? -size : size;
}

extern "C" __global__ void __launch_bounds__(THREADS)
mxfp4_encode(u8* __restrict__ codes, u8* __restrict__ exponents, const T* __restrict__ x, i64 n) {
    const i64 first = ((i64)blockIdx.x * THREADS + threadIdx.x) * COUNT;
    const bool inside = first < n;
    float v[COUNT];
    const float largest = load_block<LANES>(v, x + first, inside);
    if (!inside) { return; }
    // 4 * 1.m is at most 6, or half of it is.
    const u32 bits = __float_as_uint(largest);
    const int wanted = (int)(bits >> 23) - 2 + ((bits & 0x7FFFFFu) > 0x400000u);
    const u32 exponent = wanted < 0 ? 0 : wanted;
    const float factor = power_of(254 - exponent);
    u32 packed = 0;
#pragma unroll
    for (int k = 0; k < COUNT; ++k) {
        const float size = fabsf(v[k]) * factor;
        u32 code = (size > 0.25f) + (size >= 0.75f) + (size > 1.25f) + (size >= 1.75f);
        code += (size > 2.5f) + (size >= 3.5f) + (size > 5.0f);
        code |= (__float_as_uint(v[k]) >> 31) << 3;
        packed |= code << (4 * k);
    }
    *reinterpret_cast<u32*>(codes + first / 2) = packed;
    if (first % BLOCK == 0) { exponents[first / BLOCK] = (u8)exponent; }
}

extern "C" __global__ void __launch_bounds__(THREADS)
mxfp4_decode(T* __restrict__ out, const u8* __restrict__ codes, const u8* __restrict__ exponents,
             i64 n) {
    const i64 first = ((i64)blockIdx.x * THREADS + threadIdx.x) * COUNT;
    if (first >= n) { return; }
    const float power = power_of(exponents[first / BLOCK]);
    const u32 packed = *reinterpret_cast<const u32*>(codes + first / 2);
    Pack<T, COUNT> result;
#pragma unroll
    for (int k = 0; k < COUNT; ++k) {
        result.set(k, from_f32<T>(level_of(packed >> (4 * k)) * power));
    }
    result.store(out + first);
}
