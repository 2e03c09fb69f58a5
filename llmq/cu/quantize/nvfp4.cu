// nvfp4.cu -- NVFP4: 4-bit codes of weights (E2M1), a scale (E4M3) for each 16 codes, a factor
// (F32) for a module.
//
//   factor = max |x| of the module / (448 * 6)
//   scales[b] = (max |x| in block b of 16) / 6 / factor, at least the smallest E4M3 number
//   codes: a sign, and the nearest to |x| / (scale * factor) of 0, 0.5, 1, 1.5, 2, 3, 4, 6
//   x ~ level * (scale * factor), rounded to out
//
// Data     x, out: T (n); codes: U8 (n/2), two neighbours in a byte, the first in the lower bits;
//          scales: E4M3 (n/16). All but scales 16-byte aligned. abs_max, factor: F32 (1).
//          Decoding: several modules of n elements, one after another, each with its factor.
// Launch   256 threads. A thread encodes 8 or decodes 16 elements: ceil(n / 2048) or ceil(n / 4096)
//          blocks, times modules when decoding.
// Cost     inputs read and outputs written once; a decoding thread reads 8 bytes of codes.
// Needs    n a multiple of 16.
#include "common.cuh"
#include "quantize/four_bits.cuh"

constexpr int THREADS = 256, COUNT = 8, DECODED = 16;  // elements per thread
constexpr int LANES = DECODED / COUNT;      // threads that share a block of elements
constexpr float LEAST_ABS_MAX = 1e-10f;     // equal to llmq/ref/quantize/quantize.py's
constexpr float LEAST_SCALE = 0.001953125f; // 2^-9, the smallest E4M3 number

extern "C" __global__ void __launch_bounds__(THREADS)
nvfp4_encode(u8* __restrict__ codes, e4m3* __restrict__ scales, f32* __restrict__ factor,
             const T* __restrict__ x, const f32* __restrict__ abs_max, i64 n) {
    const i64 first = ((i64)blockIdx.x * THREADS + threadIdx.x) * COUNT;
    const bool inside = first < n;
    const float whole = fmaxf(*abs_max, LEAST_ABS_MAX) / (448.0f * 6.0f);
    if (blockIdx.x + threadIdx.x == 0) { *factor = whole; }
    float v[COUNT];
    const float largest = load_block<LANES>(v, x + first, inside);
    if (!inside) { return; }
    const u32 scale = to_fp8<e4m3>(fmaxf(largest / 6.0f / whole, LEAST_SCALE), 0.0f, 0.0f, 0.0f);
    const float step = from_fp8<e4m3>(scale & 0xFFFFu).x * whole;
    u32 packed = 0;
#pragma unroll
    for (int k = 0; k < COUNT; ++k) {
        const float size = fabsf(v[k]) / step;
        u32 code = (size > 0.25f) + (size >= 0.75f) + (size > 1.25f) + (size >= 1.75f);
        code += (size > 2.5f) + (size >= 3.5f) + (size > 5.0f);
        code |= (__float_as_uint(v[k]) >> 31) << 3;
        packed |= code << (4 * k);
    }
    *reinterpret_cast<u32*>(codes + first / 2) = packed;
    if (first % DECODED == 0) { reinterpret_cast<u8*>(scales)[first / DECODED] = (u8)scale; }
}

extern "C" __global__ void __launch_bounds__(THREADS)
nvfp4_decode(T* __restrict__ out, const u8* __restrict__ codes, const e4m3* __restrict__ scales,
             const f32* __restrict__ factors, i64 n) {
    i64 first = ((i64)blockIdx.x * THREADS + threadIdx.x) * DECODED;
    if (first >= n) { return; }
    first += blockIdx.y * n;
    const float step = float(scales[first / DECODED]) * factors[blockIdx.y];
    const uint2 packed = *reinterpret_cast<const uint2*>(codes + first / 2);
    Pack<T, DECODED> result;
#pragma unroll
    for (int k = 0; k < DECODED; ++k) {
        const u32 word = k < 8 ? packed.x : packed.y;
        result.set(k, from_f32<T>(level_of(word >> (4 * (k % 8))) * step));
    }
    result.store(out + first);
}
