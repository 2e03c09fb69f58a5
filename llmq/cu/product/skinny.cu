// skinny.cu -- products of few rows with large matrices: out = alpha a b^T [+ bias] [+ addend].
//
//   out[m][n] = alpha * sum over k of a[m][k] b[n][k] [+ bias[n]] [+ addend[m][n]], rounded once
//   from F32
//
// Data     a: BF16 (M, K); b: BF16 (N, K); out, addend: D (M, N); bias: D (N). bias, addend may be
//          null.
//          skinny_nf4: rows first + [0, rows) of b as NF4 codes (quantize/four_bits.cu) of
//          `modules` modules, decoded to BF16. skinny_mxfp4: all of b as MXFP4 codes. skinny_bytes:
//          rows first + [0, rows) of b as E4M3 (no NaN) or I8 codes Q, in modules of of_module
//          rows. Each of_scale rows of a module share a scale for all columns; if columns > 1, for
//          each 128 columns. starts: I32 (E + 1), null if E = 1: rows [starts[e], starts[e + 1]) of
//          a are multiplied by the e-th N rows of b, and get the e-th N elements of bias.
// Launch   32 WARPS threads, any grid: a block has FEATURES = 8 TILES rows of b at a time. Warps take
//          every eighth 64 elements of K; the block adds their sums one warp after the other.
//          Kernels of codes: b is the tensor cores' left operand, with 128 elements of K (bytes:
//          64) at a time; TILES of 8 rows of a at a time, for any M, and SPREAD tiles of 16 rows of
//          b; grid (b's rows / (16 SPREAD), E); dynamic shared memory for all stages, or all warps'
//          sums.
// Cost     memory: b once, in 16-byte loads past L1; a from L1 and L2 for each block. First loads
//          of b are in flight while the kernel before this one still runs.
// Needs    sm_80; K a multiple of 8, of bytes of 16; M <= ROWS. b, codes and scales are written by no
//          kernel that is launched programmatically. A sum's order follows from K alone, not from M,
//          N or the other rows.
#include "common.cuh"
#include "ptx.cuh"
#include "quantize/bytes.cuh"
#include "quantize/four_bits.cuh"

#ifndef TILES  // compiled for another entry
#define TILES 2
#endif
#ifndef SPREAD
#define SPREAD 1
#endif

constexpr int WARPS = 8, ROWS = 16, FEATURES = 8 * TILES;
constexpr int CODED_ROWS = 8 * TILES, CODED_FEATURES = 16 * SPREAD;
constexpr int CHUNK = 64;  // elements of K at a time: two vectors of each row per lane
constexpr int AHEAD = TILES == 1 ? 2 : 1;     // chunks under way
constexpr int RESIDENT = TILES == 1 ? 4 : 3;  // blocks per multiprocessor
constexpr int STRIDE = WARPS * CHUNK;
#if __CUDA_ARCH__ >= 1000  // the compiler needs more registers here
constexpr int MOST_OF_THREE = 1;
#else
constexpr int MOST_OF_THREE = 2;
#endif
constexpr int CODED_RESIDENT = TILES * SPREAD <= MOST_OF_THREE             ? 3
                               : TILES * SPREAD <= 4 || SPREAD == 1 ? 2
                                                                     : 1;
constexpr int STAGES = SPREAD == 1 ? 4 : 2;  // stages of codes; all but one are under way
constexpr int UNROLL = TILES * SPREAD == 1 ? 2 : 1;   // 1: more decodes too early

__device__ __forceinline__ uint4 zeros() { return make_uint4(0, 0, 0, 0); }

// Rows m and m + 8 of a, eight elements of K each. A lane takes four elements at a time of both
// operands.
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

using Sums = float[TILES][4];  // a tile: eight rows of b, or of a if b is coded

// Store columns first + [0, FEATURES) of out (CODED: 16 columns) that lie before `end`: all warps'
// sums times alpha, plus bias and addend. sums: shared memory, F32 (WARPS, ROWS, FEATURES + 1).
// CODED: b was the left operand.
template <bool CODED>
__device__ __forceinline__ void finish(float* sums, const Sums& sum, D* out, const D* bias,
                                       const D* addend, int M, int N, int first, int end,
                                       float alpha) {
    constexpr int OF_A = CODED ? CODED_ROWS : ROWS, OF_B = CODED ? 16 : FEATURES;
    constexpr int PITCH = OF_B + 1;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int row = g + i / 2 * 8, column = tile * 8 + 2 * t + i % 2;
            const int m = CODED ? column : row, n = CODED ? row : column;
            sums[(warp * OF_A + m) * PITCH + n] = sum[tile][i];
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < OF_A * OF_B; i += 32 * WARPS) {
        const int m = i / OF_B, n = i % OF_B;
        if (m >= M || first + n >= end) { continue; }
        float total = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) { total += sums[(w * OF_A + m) * PITCH + n]; }
        total *= alpha;
        const i64 at = (i64)m * N + first + n;
        if (bias) { total += to_f32(bias[first + n]); }
        if (addend) { total += to_f32(addend[at]); }
        out[at] = from_f32<D>(total);
    }
}

// A lane's elements of a chunk, in TILES rows of b: the vectors at elements k and k + 32.
struct Right {
    uint4 rows[TILES][2];
};

// The kernel before this one may write a and addend, so that neither is __restrict__.
extern "C" __global__ void __launch_bounds__(32 * WARPS, RESIDENT)
    skinny(D* out, const bf16* a, const bf16* __restrict__ b, const D* __restrict__ bias,
           const D* addend, int M, int N, int K, float alpha) {
    __shared__ float sums[WARPS * ROWS * (FEATURES + 1)];
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
    constexpr int STEP = AHEAD * STRIDE;  // elements of K in the chunks under way
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
        finish<false>(sums, sum, out, bias, addend, M, N, first, N, alpha);
        __syncthreads();  // all warps have read the sums
    }
}

// Decode a word of eight 4-bit codes to pairs of BF16. table: F32 value of each code, see
// lookup_shared.
template <bool HIGH_FIRST>
__device__ __forceinline__ uint4 decode(u32 word, SharedAddress table, float scale) {
    const u32 low = word << 2 & 0x3C3C3C3Cu, high = word >> 2 & 0x3C3C3C3Cu;  // offsets in bytes
    u32 pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float one = lookup_shared(table, HIGH_FIRST ? high : low, i);
        const float two = lookup_shared(table, HIGH_FIRST ? low : high, i);
        pairs[i] = to_pair(one * scale, two * scale);
    }
    return make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}

// Rows of a that this block multiplies: all rows, or the rows of one expert.
struct Span {
    int begin, end;
    __device__ __forceinline__ Span(const int* starts, int M)
        : begin(starts ? starts[blockIdx.y] : 0), end(starts ? starts[blockIdx.y + 1] : M) {}
};

// Number of this block's n-th row among all rows of codes, at most the matrix's last row.
__device__ __forceinline__ int code_row(int n, int rows) {
    return blockIdx.y * rows + min(blockIdx.x * CODED_FEATURES + n, rows - 1);
}

// A format of codes has PER_VECTOR elements in 16 bytes; eight(words, scale) decodes eight
// elements, whose codes have type Eight. Scales holds a lane's scales for rows n and n + 8, which
// multiply elements, or sums with SCALES_SUMS. fetch(k) loads scales for the chunk of four vectors
// of codes at k, turn() converts the loaded values, of(r, s) is the scale of row n + 8 r in the
// chunk's s-th 32 elements.

// Codes of four bits. table: F32 value of each code.
template <bool HIGH_FIRST> struct FourBits {
    static constexpr int PER_VECTOR = 32;
    static constexpr bool SCALES_SUMS = false;
    using Eight = u32;
    SharedAddress table;
    __device__ __forceinline__ uint4 eight(u32 word, float scale) const {
        return decode<HIGH_FIRST>(word, table, scale);
    }
};

struct Nf4Codes : FourBits<true> {
    const u8* codes;
    const float *groups, *mean, *levels;  // levels: shared memory
    int rows, blocks, of_module;          // of_module: rows of a module

    // A chunk has two scales for each row: four lanes hold the scales of two rows.
    struct Scales {
        const u8* codes;
        const float *groups, *levels;
        float mean, factor, scale;
        int block, end;  // the lane's next block of the module, and the end of its row
        u8 code;
        __device__ __forceinline__ Scales(const Nf4Codes& all, int n, int t)
            : levels(all.levels), factor(0.0f), scale(0.0f), code(0) {
            const int row = code_row(n + 8 * (t / 2), all.rows), module = row / all.of_module;
            const int of_groups = (int)(((i64)all.of_module * all.blocks + GROUP - 1) / GROUP);
            mean = all.mean[module];
            groups = all.groups + module * of_groups;
            block = row % all.of_module * all.blocks;
            end = block + all.blocks;
            codes = all.codes + (i64)module * all.of_module * all.blocks;
            block += t % 2;
        }
        __device__ __forceinline__ void fetch(int k) {
            const int at = block + k / BLOCK;
            if (at < end) { code = codes[at], factor = groups[at / GROUP]; }
        }
        __device__ __forceinline__ void turn() { scale = levels[code] * factor + mean; }
        __device__ __forceinline__ float of(int r, int s) const {
            return __shfl_sync(~0u, scale, 2 * r + s / 2, 4);
        }
    };
};

struct Mxfp4Codes : FourBits<false> {
    const u8* exponents;
    int rows, blocks;

    struct Scales {
        const u8* exponents[2];
        int blocks;
        u8 code[2];
        float scale[2];
        __device__ __forceinline__ Scales(const Mxfp4Codes& all, int n, int t)
            : blocks(all.blocks - t), code{}, scale{} {
            for (int r = 0; r < 2; ++r) {
                exponents[r] = all.exponents + (i64)code_row(n + 8 * r, all.rows) * all.blocks + t;
            }
        }
        __device__ __forceinline__ void fetch(int k) {
            if (k / 32 >= blocks) { return; }
            for (int r = 0; r < 2; ++r) { code[r] = exponents[r][k / 32]; }
        }
        __device__ __forceinline__ void turn() {
            for (int r = 0; r < 2; ++r) { scale[r] = power_of(code[r]); }
        }
        __device__ __forceinline__ float of(int r, int s) const {
            return __shfl_sync(~0u, scale[r], s, 4);
        }
    };
};

// Codes of eight bits. A row has one scale, or `columns` scales for 128 elements each.
struct ByteCodes {
    static constexpr int PER_VECTOR = 16;
    static constexpr bool SCALES_SUMS = true;
    using Eight = uint2;
    const float* scales;
    int rows, of_module, of_scale, columns;
    __device__ __forceinline__ uint4 eight(const uint2& words, float) const {
        return make_uint4(pair_of(Q(), words.x, 0), pair_of(Q(), words.x, 1),
                          pair_of(Q(), words.y, 0), pair_of(Q(), words.y, 1));
    }

    struct Scales {
        const float* scales[2];
        float next[2], scale[2];
        bool blocks;
        __device__ __forceinline__ Scales(const ByteCodes& all, int n, int)
            : next{}, scale{}, blocks(all.columns > 1) {
            for (int r = 0; r < 2; ++r) {
                const int row = code_row(n + 8 * r, all.rows), module = row / all.of_module;
                const int each = (all.of_module + all.of_scale - 1) / all.of_scale;
                const i64 at = (i64)module * each + row % all.of_module / all.of_scale;
                scales[r] = all.scales + at * all.columns;
            }
        }
        __device__ __forceinline__ void fetch(int k) {
            for (int r = 0; r < 2; ++r) { next[r] = scales[r][blocks ? k / 128 : 0]; }
        }
        __device__ __forceinline__ void turn() {
            for (int r = 0; r < 2; ++r) { scale[r] = next[r]; }
        }
        __device__ __forceinline__ float of(int r, int) const { return scale[r]; }
    };
};

// The product of a's rows `span` and `rows` rows of codes; the first code row gives column `first`.
template <class Codes>
__device__ __forceinline__ void multiply_codes(D* out, const bf16* a, const u8* codes,
                                               const D* bias, const D* addend, const Span& span,
                                               int N, int K, int first, int rows, float alpha,
                                               const Codes& format) {
    // First the codes of all warps, rows and lanes, then the sums of all warps.
    extern __shared__ __align__(128) char shared[];
    constexpr int THREADS = 32 * WARPS, STAGE = 2 * SPREAD * THREADS;  // vectors
    constexpr int VECTOR = Codes::PER_VECTOR, CODED_STRIDE = WARPS * 4 * VECTOR;
    using Eight = typename Codes::Eight;
    constexpr int PER_SLOT = 16 / sizeof(Eight);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    // Four lanes load 64 bytes of a row; each lane then takes every fourth Eight. Slots are
    // permuted, so that rows lie in different banks.
    const int swizzle = g / 2;
    uint4* const own_row = reinterpret_cast<uint4*>(shared) + (threadIdx.x - t);
    const int there = rows - blockIdx.x * CODED_FEATURES, row_bytes = K * 16 / VECTOR;
    const u8* const top_row = codes + (i64)(blockIdx.y * rows + blockIdx.x * CODED_FEATURES) * row_bytes;
    const auto fetch = [&](int stage, int k) {
#pragma unroll
        for (int i = 0; i < 2 * SPREAD; ++i) {
            const int n = 8 * i + g;
            const bool valid = n < there && k + VECTOR * t < K;
            const u8* from = valid ? top_row + (i64)n * row_bytes + (k * 16 / VECTOR + 16 * t) : codes;
            cp_async_16(shared_address(own_row + stage * STAGE + i * THREADS + (t ^ swizzle)), from,
                        valid);
        }
        cp_async_commit();
    };
    const int start = warp * 4 * VECTOR;
    using Scales = typename Codes::Scales;
#if SPREAD == 1
    Scales scales[SPREAD] = {Scales(format, g, t)};
#else
    Scales scales[SPREAD] = {Scales(format, g, t), Scales(format, 16 + g, t)};
#endif
    for (int top = span.begin; top < span.end; top += CODED_ROWS) {
        Sums sum[SPREAD] = {};
#pragma unroll
        for (int i = 0; i < STAGES - 1; ++i) { fetch(i, start + i * CODED_STRIDE); }
#pragma unroll
        for (int f = 0; f < SPREAD; ++f) {
            if (start < K) { scales[f].fetch(start); }
        }
        if (top == span.begin) { wait_for_earlier_kernels(); }
        const bf16* left = a + (i64)(top + g) * K + 8 * t;
        int stage = 0;
        for (int k = start; k < K; k += CODED_STRIDE) {
            cp_async_wait<STAGES - 2>();
            __syncwarp();
#pragma unroll
            for (int f = 0; f < SPREAD; ++f) {
                scales[f].turn();
                if (k + CODED_STRIDE < K) { scales[f].fetch(k + CODED_STRIDE); }
            }
            fetch(stage == 0 ? STAGES - 1 : stage - 1, k + (STAGES - 1) * CODED_STRIDE);
            const uint4* const words = own_row + stage * STAGE;
            stage = stage == STAGES - 1 ? 0 : stage + 1;
            Sums part[SPREAD] = {};
            auto& to = *(Codes::SCALES_SUMS ? &part : &sum);
#pragma unroll UNROLL
            for (int s = 0; s < VECTOR / 8; ++s) {
                uint4 right[TILES];
#pragma unroll
                for (int tile = 0; tile < TILES; ++tile) {
                    const bool valid = k + 32 * s + 8 * t < K && top + tile * 8 + g < span.end;
                    const bf16* from = left + (i64)tile * 8 * K + k + 32 * s;
                    right[tile] = valid ? *reinterpret_cast<const uint4*>(from) : zeros();
                }
                const int eighth = 4 * s + t;
#pragma unroll
                for (int f = 0; f < SPREAD; ++f) {
                    uint4 x[2];
#pragma unroll
                    for (int r = 0; r < 2; ++r) {
                        const uint4* slot = words + (2 * f + r) * THREADS + (eighth / PER_SLOT ^ swizzle);
                        x[r] = format.eight(reinterpret_cast<const Eight*>(slot)[eighth % PER_SLOT],
                                            scales[f].of(r, s));
                    }
                    const u32 one[4] = {x[0].x, x[1].x, x[0].y, x[1].y};
                    const u32 two[4] = {x[0].z, x[1].z, x[0].w, x[1].w};
#pragma unroll
                    for (int tile = 0; tile < TILES; ++tile) {
                        mma_m16n8k16_bf16(to[f][tile], one, right[tile].x, right[tile].y);
                        mma_m16n8k16_bf16(to[f][tile], two, right[tile].z, right[tile].w);
                    }
                }
            }
            if constexpr (Codes::SCALES_SUMS) {
#pragma unroll
                for (int f = 0; f < SPREAD; ++f) {
#pragma unroll
                    for (int i = 0; i < 4 * TILES; ++i) {
                        float& total = sum[f][i / 4][i % 4];
                        total = fmaf(part[f][i / 4][i % 4], scales[f].of(i % 4 / 2, 0), total);
                    }
                }
            }
        }
        cp_async_wait<0>();
        const i64 at = (i64)top * N;
#pragma unroll
        for (int f = 0; f < SPREAD; ++f) {
            __syncthreads();  // all warps have read their stages, or the last sums
            finish<true>(reinterpret_cast<float*>(shared), sum[f], out + at,
                         bias ? bias + (i64)blockIdx.y * N : nullptr, addend ? addend + at : nullptr,
                         span.end - top, N, first + blockIdx.x * CODED_FEATURES + 16 * f,
                         first + rows, alpha);
        }
        __syncthreads();  // all warps have read the sums; the next rows' stages replace them
    }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, CODED_RESIDENT)
    skinny_nf4(D* out, const bf16* a, const u8* __restrict__ codes,
               const u8* __restrict__ scale_codes, const float* __restrict__ groups,
               const float* __restrict__ mean, const float* __restrict__ levels,
               const D* __restrict__ bias, const D* addend, const int* starts, int M, int N, int K,
               int E, int first, int rows, int modules, float alpha) {
    __shared__ __align__(256) float table[16];
    __shared__ float scale_levels[GROUP];
    start_next_kernel();
    if (starts) { wait_for_earlier_kernels(); }
    const Span span(starts, M);
    if (span.begin == span.end) { return; }
    if (threadIdx.x < 16) { table[threadIdx.x] = LEVELS[threadIdx.x]; }
    scale_levels[threadIdx.x] = levels[threadIdx.x];
    __syncthreads();
    const Nf4Codes format{{shared_address(table)}, scale_codes, groups, mean,
                          scale_levels, rows, K / BLOCK, E * rows / modules};
    multiply_codes(out, a, codes, bias, addend, span, N, K, first, rows, alpha, format);
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, CODED_RESIDENT)
    skinny_mxfp4(D* out, const bf16* a, const u8* __restrict__ codes,
                 const u8* __restrict__ exponents, const D* __restrict__ bias, const D* addend,
                 const int* starts, int M, int N, int K, int E, float alpha) {
    __shared__ __align__(256) float table[16];
    start_next_kernel();
    if (starts) { wait_for_earlier_kernels(); }
    const Span span(starts, M);
    if (span.begin == span.end) { return; }
    if (threadIdx.x < 16) { table[threadIdx.x] = level_of(threadIdx.x); }
    __syncthreads();
    const Mxfp4Codes format{{shared_address(table)}, exponents, N, K / 32};
    multiply_codes(out, a, codes, bias, addend, span, N, K, 0, N, alpha, format);
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, TILES == 8 ? 1 : CODED_RESIDENT)
    skinny_bytes(D* out, const bf16* a, const Q* __restrict__ codes,
                 const float* __restrict__ scales, const D* __restrict__ bias, const D* addend,
                 const int* starts, int M, int N, int K, int E, int first, int rows, int of_module,
                 int of_scale, int columns, float alpha) {
    start_next_kernel();
    if (starts) { wait_for_earlier_kernels(); }
    const Span span(starts, M);
    if (span.begin == span.end) { return; }
    const ByteCodes format{scales, rows, of_module, of_scale, columns};
    multiply_codes(out, a, reinterpret_cast<const u8*>(codes), bias, addend, span, N, K, first,
                   rows, alpha, format);
}
