// skinny.cu -- products of few rows with large matrices: out = alpha a b^T [+ bias] [+ addend].
//
//   out[m][n] = alpha * sum over k of a[m][k] b[n][k], in F32, plus what is added, rounded once
//
// Data     a: BF16 (M, K); b: BF16 (N, K); out, addend: D (M, N); bias: D (N). bias, addend may be
//          null.
//          skinny_nf4: rows first + [0, rows) of b as NF4 codes (quantize/four_bits.cu) of so many
//          modules, decoded to BF16. skinny_mxfp4: all of b as MXFP4 codes. skinny_bytes: rows as
//          E4M3 (no NaN) or I8 codes Q, in modules of of_module rows, of which of_scale rows and
//          all columns have a scale, or 128 where there are more `columns` of scales. starts: I32 (E + 1),
//          null where E = 1: rows [starts[e], starts[e + 1]) of a are multiplied by the e-th N rows
//          of b, with the e-th N of bias.
// Launch   32 WARPS threads, any grid: a block has FEATURES = 8 TILES rows of b at a time. Warps take
//          every eighth 64 elements of K; their sums are added one warp after the other.
//          Those of codes: b on the left of the tensor cores, 128 elements of K (bytes: 64), TILES of
//          8 rows of a at a time, of any M; grid (a block for each 16 rows of b, E).
// Cost     memory: b once, in 16-byte loads past L1; a from L1 and L2 for each block. The first loads
//          of b are in flight while the kernel in front of this one still runs.
// Needs    sm_80; K a multiple of 8, of bytes of 16; M <= ROWS. b, codes and scales are written by no kernel that is
//          launched programmatically. A sum's order follows from K alone, not from M, N or the other
//          rows.
#include "common.cuh"
#include "ptx.cuh"
#include "quantize/bytes.cuh"
#include "quantize/four_bits.cuh"

#ifndef TILES  // compiled for another entry
#define TILES 2
#endif

constexpr int WARPS = 8, ROWS = 16, FEATURES = 8 * TILES;
constexpr int CODED_ROWS = 8 * TILES, CODED_FEATURES = 16;
constexpr int CHUNK = 64;         // elements of K at a time: of each row two vectors a lane
constexpr int AHEAD = TILES == 1 ? 2 : 1;     // chunks that are on their way
constexpr int RESIDENT = TILES == 1 ? 4 : 3;  // blocks of a multiprocessor
constexpr int CODED_RESIDENT = TILES <= 2 ? 2 : 1;
constexpr int STAGES = 4;         // of a lane's codes, of which all but one are on their way
constexpr int STRIDE = WARPS * CHUNK;

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

using Sums = float[TILES][4];  // of each tile of eight rows of b, or of a if b is coded

// Columns first + [0, FEATURES) of out, up to the column `end`: the sums of all warps, and what is
// added. sums: shared memory, F32 (WARPS, ROWS, FEATURES + 1). CODED: b was on the left.
template <bool CODED>
__device__ __forceinline__ void finish(float* sums, const Sums& sum, D* out, const D* bias,
                                       const D* addend, int M, int N, int first, int end,
                                       float alpha) {
    constexpr int OF_A = CODED ? CODED_ROWS : ROWS, OF_B = CODED ? CODED_FEATURES : FEATURES;
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

// A lane's elements of a chunk of TILES rows of b: vectors k and 32 + k behind the first element.
struct Right {
    uint4 rows[TILES][2];
};

// a, addend: written by the kernel in front of this one, so that no load of these is one of constants.
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
        finish<false>(sums, sum, out, bias, addend, M, N, first, N, alpha);
        __syncthreads();  // before the sums of the next rows
    }
}

// Pairs of BF16 of eight codes, of which a byte has two. table: F32 of each code, see lookup_shared.
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

// Codes of four bits: a vector of 32, with a scale for PER_SCALE. table: what they stand for.
template <bool HIGH_FIRST, int PER_SCALE> struct FourBits {
    static constexpr int PER_VECTOR = 32;
    static constexpr bool SCALES_SUMS = false;
    SharedAddress table;
    const u8* scales[2];  // of the two rows of a lane
    __device__ __forceinline__ FourBits(SharedAddress table, const u8* codes, const i64 (&row)[2], int K)
        : table(table), scales{codes + row[0] * K / PER_SCALE, codes + row[1] * K / PER_SCALE} {}
    __device__ __forceinline__ u8 scale_code(int r, int k) const { return scales[r][k / PER_SCALE]; }
    __device__ __forceinline__ uint4 eight(const uint4& words, int w, float scale) const {
        return decode<HIGH_FIRST>(w ? words.y : words.x, table, scale);
    }
};

// Codes of eight bits: a vector of 16. Scales are factors of sums.
struct Bytes {
    static constexpr int PER_VECTOR = 16;
    static constexpr bool SCALES_SUMS = true;
    const float* scales[2];  // of the two rows of a lane
    bool blocks;
    __device__ __forceinline__ float scale_code(int r, int k) const {
        return scales[r][blocks ? k / 128 : 0];
    }
    __device__ __forceinline__ uint4 eight(const uint4& words, int w, float) const {
        const u32 one = w ? words.z : words.x, two = w ? words.w : words.y;
        return make_uint4(pair_of(Q(), one, 0), pair_of(Q(), one, 1), pair_of(Q(), two, 0),
                          pair_of(Q(), two, 1));
    }
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
            const int n = blockIdx.x * CODED_FEATURES + 8 * r + (int)threadIdx.x % 32 / 4;
            there[r] = n < rows;
            row[r] = there[r] ? (i64)blockIdx.y * rows + n : 0;
        }
    }
};

// The product with rows of codes. scale_of(r, k, its code): the scale of element k of row r of the
// lane's.
template <class Codes, class Scale>
__device__ __forceinline__ void multiply_codes(D* out, const bf16* a, const u8* codes,
                                               const D* bias, const D* addend, const Span& span,
                                               const TwoRows& b, int N, int K, int first, int rows,
                                               float alpha, const Codes& format, Scale scale_of) {
    // Each lane's own codes of both rows; then the sums of all warps.
    constexpr int SUMS = WARPS * CODED_ROWS * (CODED_FEATURES + 1) * 4;
    constexpr int STAGE = 2 * 32 * WARPS;  // vectors
    constexpr int SHARED = STAGES * STAGE * 16 > SUMS ? STAGES * STAGE * 16 : SUMS;
    constexpr int VECTOR = Codes::PER_VECTOR, CODED_STRIDE = WARPS * 4 * VECTOR;
    __shared__ __align__(16) char shared[SHARED];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    uint4* const own_stages = reinterpret_cast<uint4*>(shared) + threadIdx.x;
    const int own = (warp * 4 + t) * VECTOR;
    const int to_scale = Codes::SCALES_SUMS ? VECTOR * t : 0;  // a sum is of four lanes' elements
    const u8* of_row[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) { of_row[r] = codes + b.row[r] * K * 16 / VECTOR; }
    const auto fetch = [&](int stage, int k) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const bool valid = b.there[r] && k < K;
            const SharedAddress to = shared_address(own_stages + stage * STAGE + r * 32 * WARPS);
            cp_async_16(to, of_row[r] + (valid ? k * 16 / VECTOR : 0), valid);
        }
        cp_async_commit();
    };
    for (int top = span.begin; top < span.end; top += CODED_ROWS) {
        Sums sum = {};
        decltype(format.scale_code(0, 0)) next[2];
#pragma unroll
        for (int i = 0; i < STAGES - 1; ++i) { fetch(i, own + i * CODED_STRIDE); }
#pragma unroll
        for (int r = 0; r < 2; ++r) { next[r] = own - to_scale < K ? format.scale_code(r, own - to_scale) : 0; }
        if (top == span.begin) { wait_for_earlier_kernels(); }
        const bf16* left = a + (i64)(top + g) * K;
        int stage = 0;
        for (int k = own; k - VECTOR * t < K; k += CODED_STRIDE) {
            cp_async_wait<STAGES - 2>();
            const bool inside = k < K;
            uint4 words[2];
            float scale[2];
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                words[r] = own_stages[stage * STAGE + r * 32 * WARPS];
                scale[r] = k - to_scale < K ? scale_of(r, k, next[r]) : 0.0f;
                const int behind = k + CODED_STRIDE - to_scale;
                next[r] = behind < K ? format.scale_code(r, behind) : 0;
            }
            fetch(stage == 0 ? STAGES - 1 : stage - 1, k + (STAGES - 1) * CODED_STRIDE);
            stage = stage == STAGES - 1 ? 0 : stage + 1;
            Sums part = {};
            Sums& to = Codes::SCALES_SUMS ? part : sum;
#pragma unroll 1  // else too many registers hold what is decoded early
            for (int half = 0; half < VECTOR / 16; ++half) {
#pragma unroll
                for (int w = 0; w < 2; ++w) {
                    const uint4 x = format.eight(words[0], w, scale[0]);
                    const uint4 y = format.eight(words[1], w, scale[1]);
                    const u32 one[4] = {x.x, y.x, x.y, y.y}, two[4] = {x.z, y.z, x.w, y.w};
#pragma unroll
                    for (int tile = 0; tile < TILES; ++tile) {
                        uint4 right = zeros();
                        if (inside && top + tile * 8 + g < span.end) {
                            const bf16* from = left + (i64)tile * 8 * K + k + 16 * half + 8 * w;
                            right = *reinterpret_cast<const uint4*>(from);
                        }
                        mma_m16n8k16_bf16(to[tile], one, right.x, right.y);
                        mma_m16n8k16_bf16(to[tile], two, right.z, right.w);
                    }
                }
#pragma unroll
                for (int r = 0; r < 2; ++r) { words[r].x = words[r].z, words[r].y = words[r].w; }
            }
            if constexpr (Codes::SCALES_SUMS) {
#pragma unroll
                for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        sum[tile][i] = fmaf(part[tile][i], scale[i / 2], sum[tile][i]);
                    }
                }
            }
        }
        cp_async_wait<0>();
        __syncthreads();  // all warps have read their stages
        const i64 at = (i64)top * N;
        finish<true>(reinterpret_cast<float*>(shared), sum, out + at,
                     bias ? bias + (i64)blockIdx.y * N : nullptr, addend ? addend + at : nullptr,
                     span.end - top, N, first + blockIdx.x * CODED_FEATURES, first + rows, alpha);
        __syncthreads();  // before the stages of the next rows
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
    const FourBits<true, BLOCK> format(shared_address(table), scale_codes, b.row, K);
    multiply_codes(out, a, codes, bias, addend, span, b, N, K, first, rows, alpha, format, scale_of);
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
    const TwoRows b(N);
    const FourBits<false, 32> format(shared_address(table), exponents, b.row, K);
    const auto scale_of = [](int r, int k, u8 code) { return power_of(code); };
    multiply_codes(out, a, codes, bias, addend, span, b, N, K, 0, N, alpha, format, scale_of);
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, CODED_RESIDENT)
    skinny_bytes(D* out, const bf16* a, const Q* __restrict__ codes,
                 const float* __restrict__ scales, const D* __restrict__ bias, const D* addend,
                 const int* starts, int M, int N, int K, int E, int first, int rows, int of_module,
                 int of_scale, int columns, float alpha) {
    start_next_kernel();
    if (starts) { wait_for_earlier_kernels(); }
    const Span span(starts, M);
    if (span.begin == span.end) { return; }
    const TwoRows b(rows);
    const int blocks = (of_module + of_scale - 1) / of_scale;  // of a module's rows
    Bytes format{{}, columns > 1};
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const i64 module = b.row[r] / of_module, row = b.row[r] % of_module;
        format.scales[r] = scales + (module * blocks + row / of_scale) * columns;
    }
    multiply_codes(out, a, reinterpret_cast<const u8*>(codes), bias, addend, span, b, N, K, first,
                   rows, alpha, format, [](int r, int k, float scale) { return scale; });
}
