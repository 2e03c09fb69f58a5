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
// Launch   32 WARPS threads, any grid: a block has FEATURES = 8 TILES rows of b at a time. Warps take
//          every eighth 64 elements of K; their sums are added one warp after the other.
//          Those of codes: TILES = 2, grid (a block for each FEATURES rows, E); 128 elements of K, and
//          any M.
// Cost     memory: b once, in 16-byte loads past L1; a from L1 and L2 for each block. The first loads
//          of b are in flight while the kernel in front of this one still runs.
// Needs    sm_80; K a multiple of 8; M <= ROWS. b, codes and scales are written by no kernel that is
//          launched programmatically. A sum's order follows from K alone, not from M, N or the other
//          rows.
#include "common.cuh"
#include "ptx.cuh"
#include "quantize/four_bits.cuh"

#ifndef TILES  // compiled for another entry
#define TILES 2
#endif

constexpr int WARPS = 8, ROWS = 16, FEATURES = 8 * TILES;
constexpr int CHUNK = 64;         // elements of K at a time: of each row two vectors a lane
constexpr int CODED_CHUNK = 128;  // of codes: one vector a lane
constexpr int AHEAD = 3 - TILES;     // chunks that are on their way
constexpr int RESIDENT = 5 - TILES;  // blocks of a multiprocessor
constexpr int STAGES = 4;         // of a lane's codes, of which all but one are on their way
constexpr int STRIDE = WARPS * CHUNK, CODED_STRIDE = WARPS * CODED_CHUNK;
constexpr int PITCH = FEATURES + 1;

__device__ __forceinline__ uint4 zeros() { return make_uint4(0, 0, 0, 0); }

// Rows m and m + 8 of a, at eight elements of K, which lane t has four at a time of both operands.
struct Left {
    uint4 low, high;
    __device__ __forceinline__ Left(const bf16* a, int m, int end, int k, int K)
        : low(load(a, m, end, k, K)), high(load(a, m + 8, end, k, K)) {}
    static __device__ __forceinline__ uint4 load(const bf16* a, int m, int end, int k, int K) {
        if (m >= end || k >= K) { return zeros(); }
        return *reinterpret_cast<const uint4*>(a + (i64)m * K + k);
    }
    __device__ __forceinline__ void multiply(float (&sum)[4], const uint4& b) const {
        const u32 one[4] = {low.x, high.x, low.y, high.y};
        const u32 two[4] = {low.z, high.z, low.w, high.w};
        mma_m16n8k16_bf16(sum, one, b.x, b.y);
        mma_m16n8k16_bf16(sum, two, b.z, b.w);
    }
};

using Sums = float[TILES][4];  // of each tile of eight rows of b

// Columns first + [0, FEATURES) of out, up to the column `end`: the sums of all warps, and what is
// added.
__device__ __forceinline__ void finish(const Sums& sum, D* out, const D* bias, const D* addend, int M,
                                       int N, int first, int end, float alpha) {
    __shared__ float sums[WARPS][ROWS * PITCH];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            sums[warp][(g + i / 2 * 8) * PITCH + tile * 8 + 2 * t + i % 2] = sum[tile][i];
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < ROWS * FEATURES; i += 32 * WARPS) {
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

// A lane's elements of a chunk of TILES rows of b: vectors k and 32 + k behind the first element.
struct Right {
    uint4 rows[TILES][2];
};

// a, addend: written by the kernel in front of this one, so that no load of these is one of constants.
extern "C" __global__ void __launch_bounds__(32 * WARPS, RESIDENT)
    skinny(D* out, const bf16* a, const bf16* __restrict__ b, const D* __restrict__ bias,
           const D* addend, int M, int N, int K, float alpha) {
    start_next_kernel();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const auto load = [&](int first, int k) {
        Right x;
#pragma unroll
        for (int r = 0; r < TILES; ++r) {
            const int n = first + 8 * r + g;
            const bf16* row = b + (i64)n * K;
#pragma unroll
            for (int v = 0; v < 2; ++v) {
                const int at = k + 32 * v + 8 * t;
                const bool valid = n < N && at < K;
                x.rows[r][v] = valid ? __ldcs(reinterpret_cast<const uint4*>(row + at)) : zeros();
            }
        }
        return x;
    };
    constexpr int STEP = AHEAD * STRIDE;  // elements of K of the chunks that are on their way
    int first = blockIdx.x * FEATURES;
    Right right[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) { right[i] = load(first, warp * CHUNK + i * STRIDE); }
    wait_for_earlier_kernels();
    for (int next; first < N; first = next) {
        next = first + gridDim.x * FEATURES;
        Sums sum = {};
        for (int start = warp * CHUNK; start - warp * CHUNK < K; start += STEP) {
            const bool last = start - warp * CHUNK + STEP >= K;
            const int next_first = last ? next : first, next_start = last ? warp * CHUNK : start + STEP;
#pragma unroll
            for (int i = 0; i < AHEAD; ++i) {
                const Right x = right[i];
                right[i] = load(next_first, next_start + i * STRIDE);
#pragma unroll
                for (int v = 0; v < 2; ++v) {
                    const Left left(a, g, M, start + i * STRIDE + 32 * v + 8 * t, K);
#pragma unroll
                    for (int r = 0; r < TILES; ++r) { left.multiply(sum[r], x.rows[r][v]); }
                }
            }
        }
        finish(sum, out, bias, addend, M, N, first, N, alpha);
        __syncthreads();  // before the sums of the next rows
    }
}

// Pairs of BF16 of eight codes, of which a byte has two.
template <bool HIGH_FIRST>
__device__ __forceinline__ uint4 decode(u32 word, const float* table, float scale) {
    const char* levels = reinterpret_cast<const char*>(table);
    const u32 low = word << 2 & 0x3C3C3C3Cu, high = word >> 2 & 0x3C3C3C3Cu;  // offsets in bytes
    u32 pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const u32 first = __byte_perm(HIGH_FIRST ? high : low, 0, 0x4440 + i);
        const u32 second = __byte_perm(HIGH_FIRST ? low : high, 0, 0x4440 + i);
        const float one = *reinterpret_cast<const float*>(levels + first);
        const float two = *reinterpret_cast<const float*>(levels + second);
        pairs[i] = to_pair(one * scale, two * scale);
    }
    return make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}

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
    __shared__ uint4 stages[STAGES][2][32 * WARPS];  // each lane's own 32 codes of both rows
    const auto fetch = [&](int stage, int k) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const bool valid = b.there[r] && k < K;
            const u8* from = codes + (valid ? (b.row[r] * K + k) / 2 : 0);
            cp_async_16(shared_address(&stages[stage][r][threadIdx.x]), from, valid);
        }
        cp_async_commit();
    };
    const auto scale_code = [&](int r, int k) -> u8 {
        return b.there[r] && k < K ? scale_codes[(b.row[r] * K + k) / PER_SCALE] : 0;
    };
    const int own = warp * CODED_CHUNK + 32 * t;
    for (int top = span.begin; top < span.end; top += ROWS) {
        Sums sum = {};
        u8 next[2];
#pragma unroll
        for (int i = 0; i < STAGES - 1; ++i) { fetch(i, own + i * CODED_STRIDE); }
#pragma unroll
        for (int r = 0; r < 2; ++r) { next[r] = scale_code(r, own); }
        if (top == span.begin) { wait_for_earlier_kernels(); }
        int stage = 0;
        for (int k = own; k - 32 * t < K; k += CODED_STRIDE) {
            cp_async_wait<STAGES - 2>();
            uint4 words[2];
            float scale[2];
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                words[r] = stages[stage][r][threadIdx.x];
                scale[r] = b.there[r] && k < K ? scale_of(r, k, next[r]) : 0.0f;
                next[r] = scale_code(r, k + CODED_STRIDE);
            }
            fetch((stage + STAGES - 1) % STAGES, k + (STAGES - 1) * CODED_STRIDE);
            stage = (stage + 1) % STAGES;
#pragma unroll 1  // else too many registers hold what is decoded early
            for (int w = 0; w < 4; ++w) {
                const Left left(a, top + g, span.end, k + 8 * w, K);
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    left.multiply(sum[r], decode<HIGH_FIRST>(words[r].x, table, scale[r]));
                    words[r] = make_uint4(words[r].y, words[r].z, words[r].w, 0);
                }
            }
        }
        cp_async_wait<0>();
        const i64 at = (i64)top * N;
        finish(sum, out + at, bias ? bias + (i64)blockIdx.y * N : nullptr,
               addend ? addend + at : nullptr, span.end - top, N, first + blockIdx.x * FEATURES,
               first + rows, alpha);
        __syncthreads();  // before the sums of the next rows
    }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS)
    skinny_nf4(D* out, const bf16* a, const u8* __restrict__ codes,
               const u8* __restrict__ scale_codes, const float* __restrict__ groups,
               const float* __restrict__ mean, const float* __restrict__ levels,
               const D* __restrict__ bias, const D* addend, const int* starts, int M, int N, int K,
               int E, int first, int rows, int modules, float alpha) {
    __shared__ float table[16], scale_levels[GROUP];
    start_next_kernel();
    if (starts) { wait_for_earlier_kernels(); }
    const Span span(starts, M);
    if (span.begin == span.end) { return; }
    if (threadIdx.x < 16) { table[threadIdx.x] = LEVELS[threadIdx.x]; }
    scale_levels[threadIdx.x] = levels[threadIdx.x];
    __syncthreads();
    const TwoRows b(rows);
    const int of_module = E * rows / modules, blocks = K / BLOCK;  // rows, and blocks of a row
    const int of_groups = (int)(((i64)of_module * blocks + GROUP - 1) / GROUP);
    float means[2];
    int group[2], block[2];  // the first ones of the module, and of the row in it
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int module = (int)(b.row[r] / of_module);
        group[r] = module * of_groups;
        means[r] = mean[module];
        block[r] = ((int)b.row[r] - module * of_module) * blocks;
    }
    const auto scale_of = [&](int r, int k, u8 code) {
        const int at = group[r] + (block[r] + k / BLOCK) / GROUP;
        return scale_levels[code] * groups[at] + means[r];
    };
    multiply_codes<true, BLOCK>(out, a, codes, scale_codes, bias, addend, span, b, N, K, first, rows,
                                alpha, table, scale_of);
}

extern "C" __global__ void __launch_bounds__(32 * WARPS)
    skinny_mxfp4(D* out, const bf16* a, const u8* __restrict__ codes,
                 const u8* __restrict__ exponents, const D* __restrict__ bias, const D* addend,
                 const int* starts, int M, int N, int K, int E, float alpha) {
    __shared__ float table[16];
    start_next_kernel();
    if (starts) { wait_for_earlier_kernels(); }
    const Span span(starts, M);
    if (span.begin == span.end) { return; }
    if (threadIdx.x < 16) { table[threadIdx.x] = level_of(threadIdx.x); }
    __syncthreads();
    const auto scale_of = [](int r, int k, u8 code) { return power_of(code); };
    multiply_codes<false, 32>(out, a, codes, exponents, bias, addend, span, TwoRows(N), N, K, 0, N,
                              alpha, table, scale_of);
}
