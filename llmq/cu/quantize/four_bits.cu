// four_bits.cu -- NF4: 4-bit codes of weights, a scale for each 64 codes, 8-bit codes of scales.
//
//   scales[b] = max |x| in block b of 64       codes: the nearest of 16 levels to x / scales[b]
//   groups[g] = max |scales - mean| in group g of 256 blocks
//   codes of scales: the nearest of 256 levels to (scales - mean) / groups[g]
//   x ~ level * (scale level * groups[g] + mean)           in F32, then rounded to out
//
// Data     declared in llmq/ops/quantize/four_bits.py. codes: two neighbours in a byte, the first
//          in the higher bits. levels ascend. nf4_decode_fp8 divides values by *scale before
//          rounding. Decoding: several modules of n elements, each with its own groups and mean.
// Launch   256 threads. A thread encodes 8 or decodes 16 elements: ceil(n / 2048) or ceil(n / 4096)
//          blocks, times modules when decoding. nf4_quantize_scales: a block for each group.
// Cost     inputs read and outputs written once; a decoding thread reads 8 bytes of codes.
// Needs    n a multiple of 64.
#include "common.cuh"
#include "ptx.cuh"
#include "quantize/four_bits.cuh"

constexpr int THREADS = 256, COUNT = 8, DECODED = 16;  // elements per thread
constexpr int LANES = BLOCK / COUNT;     // threads that share a block of elements
constexpr float LEAST = 1e-38f;          // equal to llmq/ref/quantize/four_bits.py's

extern "C" __global__ void __launch_bounds__(THREADS)
nf4_quantize(u8* __restrict__ codes, f32* __restrict__ scales, const T* __restrict__ x, i64 n) {
    const i64 first = ((i64)blockIdx.x * THREADS + threadIdx.x) * COUNT;
    const bool inside = first < n;
    float v[COUNT];
    const float largest = load_block<LANES>(v, x + first, inside);
    if (!inside) { return; }
    const float factor = 1.0f / fmaxf(largest, LEAST);
    u32 packed = 0;
#pragma unroll
    for (int k = 0; k < COUNT; ++k) {
        const float scaled = v[k] * factor;
        u32 code = 0;
#pragma unroll
        for (int i = 0; i < 15; ++i) { code += scaled > (LEVELS[i] + LEVELS[i + 1]) / 2.0f; }
        packed |= code << (8 * (k / 2) + (k % 2 ? 0 : 4));
    }
    *reinterpret_cast<u32*>(codes + first / 2) = packed;
    if (first % BLOCK == 0) { scales[first / BLOCK] = largest; }
}

extern "C" __global__ void __launch_bounds__(GROUP)
nf4_quantize_scales(u8* __restrict__ codes, f32* __restrict__ groups,
                    const f32* __restrict__ scales, const f32* __restrict__ mean,
                    const f32* __restrict__ levels, i64 count) {
    __shared__ float shared[32], edges[GROUP];
    const i64 i = (i64)blockIdx.x * GROUP + threadIdx.x;
    const int t = threadIdx.x;
    edges[t] = t < 255 ? (levels[t] + levels[t + 1]) * 0.5f : INFINITY;
    const float value = i < count ? scales[i] - *mean : 0.0f;
    const float largest = block_max(fabsf(value), shared);  // its barriers also order edges
    const float scaled = value * (1.0f / fmaxf(largest, LEAST));
    int code = 0;
#pragma unroll
    for (int step = 128; step > 0; step >>= 1) {
        if (scaled > edges[code + step - 1]) { code += step; }
    }
    if (i < count) { codes[i] = (u8)code; }
    if (t == 0) { groups[blockIdx.x] = largest; }
}

// Decode DECODED elements of this block's module, from `first` on. n: elements of a module. before:
// number of elements in the preceding modules. table: LEVELS, in shared memory.
__device__ __forceinline__ void decode(float (&v)[DECODED], const float* table, i64 first, i64 before,
                                       i64 n, const u8* codes, const u8* scale_codes,
                                       const f32* groups, const f32* mean, const f32* levels) {
    const i64 block = first / BLOCK, of_module = (n / BLOCK + GROUP - 1) / GROUP;
    const float group = groups[blockIdx.y * of_module + block / GROUP];
    const float scale = levels[scale_codes[before / BLOCK + block]] * group + mean[blockIdx.y];
    const uint2 packed = *reinterpret_cast<const uint2*>(codes + (before + first) / 2);
#pragma unroll
    for (int k = 0; k < DECODED; ++k) {
        const u32 word = k < 8 ? packed.x : packed.y;
        v[k] = table[word >> (8 * (k % 8 / 2) + (k % 2 ? 0 : 4)) & 15] * scale;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
nf4_decode(T* __restrict__ out, const u8* __restrict__ codes, const u8* __restrict__ scale_codes,
           const f32* __restrict__ groups, const f32* __restrict__ mean,
           const f32* __restrict__ levels, i64 n) {
    __shared__ float table[16];
    if (threadIdx.x < 16) { table[threadIdx.x] = LEVELS[threadIdx.x]; }
    __syncthreads();
    const i64 first = ((i64)blockIdx.x * THREADS + threadIdx.x) * DECODED, before = blockIdx.y * n;
    if (first >= n) { return; }
    float v[DECODED];
    decode(v, table, first, before, n, codes, scale_codes, groups, mean, levels);
    Pack<T, DECODED> result;
#pragma unroll
    for (int k = 0; k < DECODED; ++k) { result.set(k, from_f32<T>(v[k])); }
    result.store(out + before + first);
}

extern "C" __global__ void __launch_bounds__(THREADS)
nf4_decode_fp8(e4m3* __restrict__ out, const f32* __restrict__ scale,
               const u8* __restrict__ codes, const u8* __restrict__ scale_codes,
               const f32* __restrict__ groups, const f32* __restrict__ mean,
               const f32* __restrict__ levels, i64 n) {
    __shared__ float table[16];
    if (threadIdx.x < 16) { table[threadIdx.x] = LEVELS[threadIdx.x]; }
    __syncthreads();
    const i64 first = ((i64)blockIdx.x * THREADS + threadIdx.x) * DECODED, before = blockIdx.y * n;
    if (first >= n) { return; }
    const float factor = 1.0f / *scale;
    float v[DECODED];
    decode(v, table, first, before, n, codes, scale_codes, groups, mean, levels);
#pragma unroll
    for (int k = 0; k < DECODED; ++k) { v[k] *= factor; }
    u32 words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        words[i] = to_fp8<e4m3>(v[4 * i], v[4 * i + 1], v[4 * i + 2], v[4 * i + 3]);
    }
    *reinterpret_cast<uint4*>(out + before + first) =
        make_uint4(words[0], words[1], words[2], words[3]);
}

// -- MXFP4: 4-bit codes of weights (E2M1), a power of two (E8M0) for each 32 codes.
//
//   exponents[b] = 127 + the smallest e with which no |x| / 2^e in block b of 32 is above 6
//   codes: a sign, and the nearest to |x| / 2^e of 0, 0.5, 1, 1.5, 2, 3, 4, 6; ties to even codes
//   x ~ level * 2^e, exact in BF16
//
// Data     x, out: T (n); codes: U8 (n/2), two neighbours in a byte, the first in the lower bits;
//          exponents: U8 (n/32). All 16-byte aligned.
// Launch   256 threads. 8 elements per thread: ceil(n / 2048) blocks.
// Cost     inputs read and outputs written once; a thread reads 4 bytes of codes.
// Needs    n a multiple of 32.

constexpr int MXFP4_BLOCK = 32, MXFP4_LANES = MXFP4_BLOCK / COUNT;

extern "C" __global__ void __launch_bounds__(THREADS)
mxfp4_encode(u8* __restrict__ codes, u8* __restrict__ exponents, const T* __restrict__ x, i64 n) {
    const i64 first = ((i64)blockIdx.x * THREADS + threadIdx.x) * COUNT;
    const bool inside = first < n;
    float v[COUNT];
    const float largest = load_block<MXFP4_LANES>(v, x + first, inside);
    if (!inside) { return; }
    // A largest |x| of 1.m * 2^k becomes 4 * 1.m, or 2 * 1.m if 4 * 1.m is above 6.
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
    if (first % MXFP4_BLOCK == 0) { exponents[first / MXFP4_BLOCK] = (u8)exponent; }
}

extern "C" __global__ void __launch_bounds__(THREADS)
mxfp4_decode(T* __restrict__ out, const u8* __restrict__ codes, const u8* __restrict__ exponents,
             i64 n) {
    const i64 first = ((i64)blockIdx.x * THREADS + threadIdx.x) * COUNT;
    if (first >= n) { return; }
    const float power = power_of(exponents[first / MXFP4_BLOCK]);
    const u32 packed = *reinterpret_cast<const u32*>(codes + first / 2);
    Pack<T, COUNT> result;
#pragma unroll
    for (int k = 0; k < COUNT; ++k) {
        result.set(k, from_f32<T>(level_of(packed >> (4 * k)) * power));
    }
    result.store(out + first);
}
