// paged_tiles.cuh -- tiles of keys and values in shared memory, and their products; rows of caches.
// paged.cu explains T, C and the sizes.
#pragma once
#include "common.cuh"
#include "ptx.cuh"
#include "quantize/bytes.cuh"

#ifndef BLOCK_SIZE  // compiled for another entry
#define BLOCK_SIZE 16
#endif
#ifndef ROWS
#define ROWS 16
#endif
#ifndef HEAD_DIM
#define HEAD_DIM 64
#endif
#ifndef LATENT
#define LATENT 0
#endif
#ifndef VALUE_DIM
#define VALUE_DIM HEAD_DIM
#endif

constexpr int THREADS = 128, WARPS = 4, SPLIT = 256;
constexpr bool HALF = sizeof(T) == 2;  // BF16
constexpr int VECTOR = Vec<T>::N;
constexpr bool CODED = sizeof(C) == 1;
// STEP: keys of a step. A row of a tile has a head's elements, then zeros, and is an odd number of
// 16-byte units long, so that eight rows lie in different banks.
constexpr bool LARGE = LATENT || HEAD_DIM > 256;
constexpr int STEP = HALF ? (HEAD_DIM <= 64 ? 64 : 32) : (HEAD_DIM <= 128 ? 32 : LARGE ? 8 : 16);
constexpr int D = HALF ? (HEAD_DIM + 15) / 16 * 16 : HEAD_DIM, UNITS = D / VECTOR;
constexpr int PITCH = D + VECTOR, SCORES = STEP + 4, PROBS = STEP + 8;
constexpr int TILE = STEP * PITCH;  // elements of a tile of keys or of values
constexpr int TILES = LATENT ? 1 : 2;  // tiles of a stage
constexpr int STAGES = LARGE && !LATENT ? 1 : 2;
// COPIES: vectors of a tile that each thread copies; TOGETHER: vectors copied at once. Addresses of
// all vectors of wide keys would take too many registers.
constexpr int COPIES = (STEP * UNITS + THREADS - 1) / THREADS, TOGETHER = LARGE ? 3 : COPIES;
constexpr int TURNS = ROWS / 16;    // eight threads share a row of scores

// Products of a block's rows with keys and values. The block's threads share the sums: sum[q][i]
// belongs to row(q, i) and column(q, i), which may lie after the last column.
template <class E> struct Products;

template <> struct Products<bf16> {
    static constexpr int KEYS = STEP == 64 ? 16 : 8;
    static constexpr int UNITS = (VALUE_DIM + 15) / 16, OWN = (UNITS + WARPS - 1) / WARPS;
    static constexpr int QUADS = TURNS * OWN * 2;

    static __device__ __forceinline__ int row(int q, int i) {
        return q / (2 * OWN) * 16 + (int)threadIdx.x % 32 / 4 + i / 2 * 8;
    }
    static __device__ __forceinline__ int column(int q, int i) {
        const int unit = q % (2 * OWN) / 2 * WARPS + (int)threadIdx.x / 32;
        return unit * 16 + q % 2 * 8 + (int)threadIdx.x % 4 * 2 + i % 2;
    }
    // scores = queries keys^T; each warp multiplies KEYS keys.
    static __device__ __forceinline__ void score(float* scores, const bf16* queries,
                                                 const bf16* keys) {
        const int lane = threadIdx.x % 32, first = (int)threadIdx.x / 32 * KEYS;
        const int key = first + lane % 8 + (KEYS == 16 ? lane / 16 * 8 : 0);
        const bf16* left = queries + lane % 16 * PITCH + lane / 16 * 8;
        const bf16* right = keys + key * PITCH + lane / 8 % 2 * 8;
        float s[TURNS][KEYS / 8][4] = {};
#pragma unroll
        for (int k = 0; k < D; k += 16) {
            u32 b[4];
            ldmatrix_x4(b, shared_address(right + k));
#pragma unroll
            for (int m = 0; m < TURNS; ++m) {
                u32 a[4];
                ldmatrix_x4(a, shared_address(left + m * 16 * PITCH + k));
                mma_m16n8k16_bf16(s[m][0], a, b[0], b[1]);
                if constexpr (KEYS == 16) { mma_m16n8k16_bf16(s[m][1], a, b[2], b[3]); }
            }
        }
#pragma unroll
        for (int m = 0; m < TURNS; ++m) {
#pragma unroll
            for (int n = 0; n < KEYS / 8; ++n) {
                float* to = scores + (m * 16 + lane / 4) * SCORES + first + n * 8 + lane % 4 * 2;
                store_two(to, s[m][n][0], s[m][n][1]);
                store_two(to + 8 * SCORES, s[m][n][2], s[m][n][3]);
            }
        }
    }
    // sum += probs values; each warp has every fourth group of 16 columns.
    static __device__ __forceinline__ void add(float (&sum)[QUADS][4], const bf16* probs,
                                               const bf16* values) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        const bf16* left = probs + lane % 16 * PROBS + lane / 16 * 8;
        const bf16* right = values + lane % 16 * PITCH + lane / 16 * 8;
#pragma unroll
        for (int k = 0; k < STEP; k += 16) {
            u32 a[TURNS][4];
#pragma unroll
            for (int m = 0; m < TURNS; ++m) {
                ldmatrix_x4(a[m], shared_address(left + m * 16 * PROBS + k));
            }
#pragma unroll
            for (int j = 0; j < OWN; ++j) {
                const int unit = j * WARPS + warp;
                if (UNITS % WARPS != 0 && unit >= UNITS) { continue; }
                u32 b[4];
                ldmatrix_x4_trans(b, shared_address(right + k * PITCH + unit * 16));
#pragma unroll
                for (int m = 0; m < TURNS; ++m) {
                    mma_m16n8k16_bf16(sum[(m * OWN + j) * 2], a[m], b[0], b[1]);
                    mma_m16n8k16_bf16(sum[(m * OWN + j) * 2 + 1], a[m], b[2], b[3]);
                }
            }
        }
    }
};

template <> struct Products<float> {
    static constexpr int OWN = (VALUE_DIM + THREADS - 1) / THREADS, QUADS = ROWS / 4 * OWN;

    static __device__ __forceinline__ int row(int q, int i) { return q % (ROWS / 4) * 4 + i; }
    static __device__ __forceinline__ int column(int q, int i) {
        return q / (ROWS / 4) * THREADS + (int)threadIdx.x;
    }
    static __device__ __forceinline__ void score(float* scores, const float* queries,
                                                 const float* keys) {
        constexpr int AT_ONCE = THREADS / STEP;  // rows that the block computes at once
        const int key = threadIdx.x % STEP, first = threadIdx.x / STEP;
        float s[ROWS / AT_ONCE] = {};
#pragma unroll 1  // else loads ahead take too many registers
        for (int d = 0; d < D; d += 4) {
            const Vec<float> x = load_vec(keys + key * PITCH + d);
#pragma unroll
            for (int i = 0; i < ROWS / AT_ONCE; ++i) {
                const Vec<float> q = load_vec(queries + (first + i * AT_ONCE) * PITCH + d);
#pragma unroll
                for (int k = 0; k < 4; ++k) { s[i] = fmaf(q[k], x[k], s[i]); }
            }
        }
#pragma unroll
        for (int i = 0; i < ROWS / AT_ONCE; ++i) { scores[(first + i * AT_ONCE) * SCORES + key] = s[i]; }
    }
    static __device__ __forceinline__ void add(float (&sum)[QUADS][4], const float* probs,
                                               const float* values) {
#pragma unroll 1
        for (int k = 0; k < STEP; ++k) {
#pragma unroll
            for (int q = 0; q < QUADS; ++q) {
                const float x = column(q, 0) < VALUE_DIM ? values[k * PITCH + column(q, 0)] : 0.0f;
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    sum[q][i] = fmaf(probs[row(q, i) * PROBS + k], x, sum[q][i]);
                }
            }
        }
    }
};

using Sums = float[Products<T>::QUADS][4];

// -- rows of a cache: a row belongs to one head at one position

// Store elements column + [0, VECTOR) of a row in a cache.
__device__ __forceinline__ void put(T* to, bf16* scale, const T* row, int column) {
    store_vec(to + column, load_vec(row + column));
}
// Store them as codes, relative to the smallest power of two that keeps the row within 448.
__device__ __forceinline__ void put(__nv_fp8_e4m3* to, bf16* scale, const T* row, int column) {
    float largest = 0.0f;
    for (int i = 0; i < HEAD_DIM; i += VECTOR) {
        const Vec<T> x = load_vec(row + i);
#pragma unroll
        for (int k = 0; k < VECTOR; ++k) {
            const float size = fabsf(to_f32(x[k]));
            largest = size <= largest ? largest : size;  // NaN stays
        }
    }
    const u32 bits = __float_as_uint(largest), all = bits >> 23;
    const u32 power = max((int)(all - 8 + ((bits & 0x7FFFFFu) > 0x600000u)), 1);
    const float factor = __uint_as_float((254 - power) << 23);
    const Vec<T> x = load_vec(row + column);
    u32 words[VECTOR / 4];
#pragma unroll
    for (int i = 0; i < VECTOR; i += 4) {
        words[i / 4] = to_fp8<__nv_fp8_e4m3>(to_f32(x[i]) * factor, to_f32(x[i + 1]) * factor,
                                             to_f32(x[i + 2]) * factor, to_f32(x[i + 3]) * factor);
    }
    u32* const into = reinterpret_cast<u32*>(to + column);
#pragma unroll
    for (int i = 0; i < VECTOR / 4; ++i) { into[i] = words[i]; }
    if (column == 0) { *scale = __ushort_as_bfloat16(all == 255 ? 0x7FC0 : power << 7); }
}

// VECTOR codes, and the numbers they stand for. scale: the BF16 scale, twice in a word.
struct alignas(VECTOR) Codes {
    u32 word[VECTOR / 4];
};
__device__ __forceinline__ Codes load_codes(const C* from, bool valid) {
    Codes x = {};
    if (valid && VECTOR == 8) {
        const uint2 both = __ldcg(reinterpret_cast<const uint2*>(from));
        x.word[0] = both.x, x.word[VECTOR / 4 - 1] = both.y;
    } else if (valid) {
        x.word[0] = __ldcg(reinterpret_cast<const u32*>(from));
    }
    return x;
}
__device__ __forceinline__ Vec<T> decoded(const Codes& x, u32 scale) {
    Vec<T> out;
#pragma unroll
    for (int i = 0; i < VECTOR; i += 2) {
        const u32 pair = pair_of(__nv_fp8_e4m3(), x.word[i / 4], i / 2 % 2);
        const u32 two = fma_pair(pair, scale, 0x80008000u);
        out.set_two(i, lower_half(two), upper_half(two));
    }
    return out;
}
