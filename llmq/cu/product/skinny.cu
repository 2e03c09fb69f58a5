// skinny.cu -- products of few rows with large matrices: out = alpha a b^T [+ bias] [+ addend].
//
//   out[m][n] = alpha * sum over k of a[m][k] b[n][k], in F32, plus what is added, rounded once
//
// Data     a: BF16 (M, K); b: BF16 (N, K); out, addend: D (M, N); bias: D (N). bias, addend may be
//          null.
//          skinny_nf4: rows first + [0, rows) of b as NF4 codes (quantize/four_bits.cu) of so many
//          modules, decoded to BF16. skinny_mxfp4: all of b as MXFP4 codes. starts: I32 (E + 1),
//          null where E = 1: rows [starts[e], starts[e + 1]) of a are multiplied by the e-th N rows
//          of b, with the e-th N of bias.
// Launch   32 WARPS threads, a block for each FEATURES rows of b; TILES: of 8 rows of a. The tensor
//          cores have b on the left, so that rows of a are columns. Warps take every eighth 64
//          elements of K; their sums are added one warp after the other.
//          Those of codes: grid (blocks, E); 128 elements of K, and any M.
// Cost     memory: b once, in 16-byte loads past L1; a from L1 and L2 for each block.
// Needs    sm_80; K a multiple of 8; M <= 8 TILES. A sum's order follows from K alone, not from M, N
//          or the other rows.
#include "common.cuh"
#include "ptx.cuh"
#include "quantize/four_bits.cuh"

#ifndef TILES
#define TILES 1
#endif

constexpr int WARPS = 8, FEATURES = 16, COLUMNS = 8 * TILES;
constexpr int CHUNK = 64;  // elements of K at a time: of each row two vectors a lane
constexpr int CODED_CHUNK = 128;  // of codes: one vector a lane
constexpr int AHEAD = 4, CODED_AHEAD = 3;   // chunks that are on their way
constexpr int PITCH = FEATURES + 1;

// Two rows' elements of a chunk: vectors k and 32 + k behind its first element.
struct Fragment {
    uint4 rows[2][2];
};

__device__ __forceinline__ uint4 zeros() { return make_uint4(0, 0, 0, 0); }

using Sums = float[TILES][4];

// Columns first + [0, FEATURES) of out, up to the column `end`: what all warps have summed, and what
// is added.
__device__ __forceinline__ void finish(const Sums& sum, D* out, const D* bias, const D* addend, int M,
                                       int N, int first, int end, float alpha) {
    __shared__ float sums[WARPS][COLUMNS * PITCH];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int m = tile * 8 + 2 * t + i % 2, n = g + i / 2 * 8;
            sums[warp][m * PITCH + n] = sum[tile][i];
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < COLUMNS * FEATURES; i += 32 * WARPS) {
        const int m = i / FEATURES, n = i % FEATURES;
        if (m >= M || first + n >= end) { continue; }
        float total = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) { total += sums[w][m * PITCH + n]; }
        total *= alpha;
        const i64 at = (i64)m * N + first + n;
        if (bias) { total += to_f32(bias[first + n]); }
        if (addend) { total += to_f32(addend[at]); }
        out[at] = from_f32<D>(total);
    }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS)
    skinny(D* __restrict__ out, const bf16* __restrict__ a, const bf16* __restrict__ b,
           const D* __restrict__ bias, const D* __restrict__ addend, int M, int N, int K,
           float alpha) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const int first = blockIdx.x * FEATURES;
    const auto load = [&](int k) {
        Fragment x;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int n = first + 8 * r + g;
            const bf16* row = b + (i64)n * K;
#pragma unroll
            for (int v = 0; v < 2; ++v) {
                const int at = k + 32 * v + 8 * t;
                const bool there = n < N && at < K;
                x.rows[r][v] = there ? __ldcs(reinterpret_cast<const uint4*>(row + at)) : zeros();
            }
        }
        return x;
    };
    Sums sum = {};
    for (int start = warp * CHUNK; start < K; start += AHEAD * WARPS * CHUNK) {
        Fragment left[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) { left[i] = load(start + i * WARPS * CHUNK); }
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            const int k = start + i * WARPS * CHUNK;
            if (k >= K) { break; }
#pragma unroll
            for (int v = 0; v < 2; ++v) {
                const int at = k + 32 * v + 8 * t;
                const uint4 low = left[i].rows[0][v], high = left[i].rows[1][v];
#pragma unroll
                for (int tile = 0; tile < TILES; ++tile) {
                    const int m = tile * 8 + g;
                    uint4 x = zeros();
                    if (m < M && at < K) {
                        x = __ldg(reinterpret_cast<const uint4*>(a + (i64)m * K + at));
                    }
                    // Lane t has the same four elements of K of both operands.
                    const u32 one[4] = {low.x, high.x, low.y, high.y};
                    const u32 two[4] = {low.z, high.z, low.w, high.w};
                    mma_m16n8k16_bf16(sum[tile], one, x.x, x.y);
                    mma_m16n8k16_bf16(sum[tile], two, x.z, x.w);
                }
            }
        }
    }
    finish(sum, out, bias, addend, M, N, first, N, alpha);
}

// Pairs of BF16 of eight codes, of which a byte has two.
template <bool HIGH_FIRST>
__device__ __forceinline__ void decode(u32 (&pairs)[4], u32 word, const float* table, float scale) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const u32 low = word >> 8 * i & 15, high = word >> (8 * i + 4) & 15;
        const float one = table[HIGH_FIRST ? high : low], two = table[HIGH_FIRST ? low : high];
        pairs[i] = to_pair(one * scale, two * scale);
    }
}

// A lane's 32 codes of two rows of b, and the codes of their scales.
struct Codes {
    uint4 codes[2];
    u8 scales[2];
};

// Rows of a that this block's matrix multiplies: all, or those of an expert.
struct Span {
    int begin, end;
    __device__ __forceinline__ Span(const int* starts, int M)
        : begin(starts ? starts[blockIdx.y] : 0), end(starts ? starts[blockIdx.y + 1] : M) {}
};

// The two rows of b that this lane has, by their place among all codes, and whether they are there.
struct TwoRows {
    i64 row[2];
    bool there[2];
    __device__ __forceinline__ explicit TwoRows(int rows) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int n = blockIdx.x * FEATURES + 8 * r + (int)threadIdx.x % 32 / 4;
            there[r] = n < rows;
            row[r] = there[r] ? (i64)blockIdx.y * rows + n : 0;
        }
    }
};

// The product with rows of codes, of which PER_SCALE have a scale: scale_of(r, k, its code) for
// element k of row r of the lane's. table: what the codes stand for, in shared memory.
template <bool HIGH_FIRST, int PER_SCALE, class Scale>
__device__ __forceinline__ void multiply_codes(D* out, const bf16* a, const u8* codes,
                                               const u8* scale_codes, const D* bias,
                                               const D* addend, const Span& span,
                                               const TwoRows& b, int N, int K, int first, int rows,
                                               float alpha, const float* table, Scale scale_of) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const auto load = [&](int k) {
        Codes x;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const bool valid = b.there[r] && k < K;
            const i64 at = b.row[r] * K + k;
            const uint4* from = reinterpret_cast<const uint4*>(codes + at / 2);
            x.codes[r] = valid ? __ldcs(from) : zeros();
            x.scales[r] = valid ? scale_codes[at / PER_SCALE] : 0;
        }
        return x;
    };
    for (int top = span.begin; top < span.end; top += COLUMNS) {
        Sums sum = {};
        for (int start = warp * CODED_CHUNK + 32 * t; start - 32 * t < K;
             start += CODED_AHEAD * WARPS * CODED_CHUNK) {
            Codes left[CODED_AHEAD];
#pragma unroll
            for (int i = 0; i < CODED_AHEAD; ++i) { left[i] = load(start + i * WARPS * CODED_CHUNK); }
#pragma unroll
            for (int i = 0; i < CODED_AHEAD; ++i) {
                const int k = start + i * WARPS * CODED_CHUNK;
                if (k - 32 * t >= K) { break; }
                float scale[2];
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    const bool valid = b.there[r] && k < K;
                    scale[r] = valid ? scale_of(r, k, left[i].scales[r]) : 0.0f;
                }
#pragma unroll
                for (int w = 0; w < 4; ++w) {
                    const auto word = [&](int r) {
                        return reinterpret_cast<const u32*>(&left[i].codes[r])[w];
                    };
                    u32 low[4], high[4];
                    decode<HIGH_FIRST>(low, word(0), table, scale[0]);
                    decode<HIGH_FIRST>(high, word(1), table, scale[1]);
#pragma unroll
                    for (int tile = 0; tile < TILES; ++tile) {
                        const int m = top + tile * 8 + g;
                        uint4 x = zeros();
                        if (m < span.end && k < K) {
                            x = __ldg(reinterpret_cast<const uint4*>(a + (i64)m * K + k + 8 * w));
                        }
                        const u32 one[4] = {low[0], high[0], low[1], high[1]};
                        const u32 two[4] = {low[2], high[2], low[3], high[3]};
                        mma_m16n8k16_bf16(sum[tile], one, x.x, x.y);
                        mma_m16n8k16_bf16(sum[tile], two, x.z, x.w);
                    }
                }
            }
        }
        const i64 at = (i64)top * N;
        finish(sum, out + at, bias ? bias + (i64)blockIdx.y * N : nullptr,
               addend ? addend + at : nullptr, span.end - top, N, first + blockIdx.x * FEATURES,
               first + rows, alpha);
        __syncthreads();  // before the sums of the next rows
    }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS)
    skinny_nf4(D* __restrict__ out, const bf16* __restrict__ a, const u8* __restrict__ codes,
               const u8* __restrict__ scale_codes, const float* __restrict__ groups,
               const float* __restrict__ mean, const float* __restrict__ levels,
               const D* __restrict__ bias, const D* __restrict__ addend,
               const int* __restrict__ starts, int M, int N, int K, int E, int first, int rows,
               int modules, float alpha) {
    __shared__ float table[16], scale_levels[GROUP];
    const Span span(starts, M);
    if (span.begin == span.end) { return; }
    if (threadIdx.x < 16) { table[threadIdx.x] = LEVELS[threadIdx.x]; }
    scale_levels[threadIdx.x] = levels[threadIdx.x];
    __syncthreads();
    const TwoRows b(rows);
    const int of_module = E * rows / modules, blocks = K / BLOCK;  // rows, and blocks of a row
    const i64 of_groups = ((i64)of_module * blocks + GROUP - 1) / GROUP;
    const float* group[2];
    float means[2];
    i64 block[2];  // the row's first one in its module
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const i64 module = b.row[r] / of_module;
        group[r] = groups + module * of_groups;
        means[r] = mean[module];
        block[r] = (b.row[r] - module * of_module) * blocks;
    }
    const auto scale_of = [&](int r, int k, u8 code) {
        return scale_levels[code] * group[r][(block[r] + k / BLOCK) / GROUP] + means[r];
    };
    multiply_codes<true, BLOCK>(out, a, codes, scale_codes, bias, addend, span, b, N, K, first, rows,
                                alpha, table, scale_of);
}

extern "C" __global__ void __launch_bounds__(32 * WARPS)
    skinny_mxfp4(D* __restrict__ out, const bf16* __restrict__ a, const u8* __restrict__ codes,
                 const u8* __restrict__ exponents, const D* __restrict__ bias,
                 const D* __restrict__ addend, const int* __restrict__ starts, int M, int N, int K,
                 int E, float alpha) {
    __shared__ float table[16];
    const Span span(starts, M);
    if (span.begin == span.end) { return; }
    if (threadIdx.x < 16) { table[threadIdx.x] = level_of(threadIdx.x); }
    __syncthreads();
    const auto scale_of = [](int r, int k, u8 code) { return power_of(code); };
    multiply_codes<false, 32>(out, a, codes, exponents, bias, addend, span, TwoRows(N), N, K, 0, N,
                              alpha, table, scale_of);
}
