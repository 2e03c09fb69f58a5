// rope.cu -- rotary position embedding of every query and key head of the packed QKV activation.
//
//   forward    (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin)   for the pairs (d, d + ROTARY/2)
//              of the first ROTARY channels; pairs of the other channels have angles of 0
//   backward   the same with -sin
//              LENGTHS = 1: query heads are also multiplied by lengths[position]
//   fused      backward; optionally sums of the result over tokens, and FP8 codes of the result
//
// Data     declared in llmq/ops/attention/rope.py. Value heads of qkv and d_qkv do not change.
//          table: cos, sin. HEAD_DIM and ROTARY are even, with WIDE = 1 and in the fused kernel
//          multiples of 16. Token i has position i % seq_length, with DOCUMENTS = 1 less
//          starts[i], which may be negative. abs_max, with ABS_MAX = 1: raised to the largest
//          |d_qkv|, value heads included. fused: partial, with BIAS = 1, sums over 64 tokens;
//          codes, transposed (fp8.cuh), with CODES = 1, TRANSPOSED = 1, in the place of out.
// Launch   128 threads; a thread has 16 bytes (one element without WIDE) of both halves of
//          HEADS_PER_THREAD heads.
//          fused: 256 threads, sizeof(FusedShared), a block for 64 tokens and up to block_tiles
//          times 128 features, in a grid (across, down).
// Cost     query and key heads read once and written once, value heads read once for abs_max;
//          angles once per HEADS_PER_THREAD heads, from L2. Memory-bound.
//          fused: value heads are read; a tile of 64 tokens and 128 features is fetched while the
//          one before it is worked on; angles stay in registers for block_tiles heads where
//          HEAD_DIM divides 128, else are read for every head. About 15 (BIAS) to 21 instructions
//          per element, 3 blocks on an SM (BF16), one barrier per tile.
// Needs    threads < 2^31. a row of the table for each position. fused: fewer than
//          2^22 tokens; for FP8 a multiple of 4.
#include "common.cuh"
#include "fp8.cuh"

#ifndef WIDE
#define WIDE 1
#endif
constexpr int N = WIDE ? Vec<T>::N : 1;
constexpr int HALF = HEAD_DIM / 2;
constexpr int HALF_VECTORS = HALF / N;
constexpr bool PARTIAL = ROTARY < HEAD_DIM;
constexpr int BLOCKS_ON_SM = sizeof(T) == 2 ? 3 : 2;  // of the fused kernel: registers suffice

// The first channel of pair `pair` of a head. Neighbouring pairs have neighbouring channels, within
// a step that divides ROTARY / 2.
__device__ __forceinline__ u32 first_of(u32 pair) {
    return PARTIAL && pair >= ROTARY / 2 ? pair + ROTARY / 2 : pair;
}
// Distance from a pair's first channel to its second.
__device__ __forceinline__ u32 behind(u32 pair) {
    return !PARTIAL ? HALF : pair < ROTARY / 2 ? ROTARY / 2 : HALF - ROTARY / 2;
}

// cos and sin of COUNT neighbouring pairs.
template <int COUNT> struct Angles {
    float cos[COUNT], sin[COUNT];

    // Load angles from the first pair's place in a row of the table. BACKWARD: negate the angles.
    template <bool BACKWARD> __device__ __forceinline__ void load(const f32* row) {
        if constexpr (COUNT == 1) {
            cos[0] = row[0], sin[0] = BACKWARD ? -row[1] : row[1];
            return;
        }
#pragma unroll
        for (int k = 0; k + 1 < COUNT; k += 2) {
            const Vec<f32> pair = load_vec(row + 2 * k);
            cos[k] = pair[0];
            sin[k] = BACKWARD ? -pair[1] : pair[1];
            cos[k + 1] = pair[2];
            sin[k + 1] = BACKWARD ? -pair[3] : pair[3];
        }
    }
    __device__ __forceinline__ float first(int k, float x1, float x2) const {
        return x1 * cos[k] - x2 * sin[k];
    }
    __device__ __forceinline__ float second(int k, float x1, float x2) const {
        return x2 * cos[k] + x1 * sin[k];
    }
};

// N neighbouring elements of a head.
#if WIDE
using Piece = Vec<T>;
__device__ __forceinline__ Piece load_piece(const T* p) { return load_vec(p); }
__device__ __forceinline__ void store_piece(T* p, const Piece& x) { store_vec(p, x); }
__device__ __forceinline__ u32 peak_bits(const Piece& x) { return abs_max_bits(x); }
#else
struct Piece {
    T x;
    __device__ __forceinline__ T& operator[](int) { return x; }
};
__device__ __forceinline__ Piece load_piece(const T* p) { return {*p}; }
__device__ __forceinline__ void store_piece(T* p, const Piece& piece) { *p = piece.x; }
__device__ __forceinline__ u32 peak_bits(const Piece& piece) { return abs_bits(to_f32(piece.x)); }
#endif

// Rotates this thread's heads. VALUES: the thread also reads value heads, which do not change.
// Returns the largest abs_bits of the thread's heads after the rotation.
template <bool BACKWARD, bool VALUES>
__device__ __forceinline__ u32 rotate(T* qkv, const f32* __restrict__ table, i64 tokens,
                                      i32 seq_length, i32 num_heads, i32 num_kv_heads,
                                      const i32* __restrict__ starts,
                                      const f32* __restrict__ lengths) {
    const u32 heads = num_heads + num_kv_heads, all = heads + num_kv_heads;
    const u32 loaded = VALUES ? all : heads;
    const u32 chunks = (loaded + HEADS_PER_THREAD - 1) / HEADS_PER_THREAD;
    const u32 thread = blockIdx.x * blockDim.x + threadIdx.x;
    const u32 pair = thread % HALF_VECTORS * N, second = behind(pair);
    const u32 chunk = thread / HALF_VECTORS % chunks, token = thread / HALF_VECTORS / chunks;
    if (token >= tokens) { return 0; }

    // The thread has heads chunk, chunk + chunks, ..., so that neighbours have neighbouring heads.
    T* const first = qkv + (i64)token * all * HEAD_DIM + first_of(pair);
    Piece x1[HEADS_PER_THREAD], x2[HEADS_PER_THREAD];
#pragma unroll
    for (int j = 0; j < HEADS_PER_THREAD; ++j) {
        const u32 head = chunk + j * chunks;
        if (head < loaded) {
            x1[j] = load_piece(first + head * HEAD_DIM);
            x2[j] = load_piece(first + head * HEAD_DIM + second);
        }
    }
    const i64 position = token % seq_length - (DOCUMENTS ? starts[token] : 0);
    const f32* angles = table + (position * HALF + pair) * 2;
    Angles<N> turn;
    turn.load<BACKWARD>(angles);
    const float length = LENGTHS ? lengths[position] : 1.0f;
    u32 largest = 0;
#pragma unroll
    for (int j = 0; j < HEADS_PER_THREAD; ++j) {
        const u32 head = chunk + j * chunks;
        if (head < heads) {
#pragma unroll
            for (int k = 0; k < N; ++k) {
                const float a = to_f32(x1[j][k]), b = to_f32(x2[j][k]);
                const float by = LENGTHS && head < num_heads ? length : 1.0f;
                x1[j][k] = from_f32<T>(turn.first(k, a, b) * by);
                x2[j][k] = from_f32<T>(turn.second(k, a, b) * by);
            }
            store_piece(first + head * HEAD_DIM, x1[j]);
            store_piece(first + head * HEAD_DIM + second, x2[j]);
        }
        if (head < loaded) { largest = max(largest, max(peak_bits(x1[j]), peak_bits(x2[j]))); }
    }
    return largest;
}

extern "C" __global__ void __launch_bounds__(128)
rope_forward(T* qkv, const f32* __restrict__ table, i64 tokens, i32 seq_length, i32 num_heads,
             i32 num_kv_heads, const i32* __restrict__ starts,
             const f32* __restrict__ lengths) {
    start_next_kernel();
    wait_for_earlier_kernels();
    rotate<false, false>(qkv, table, tokens, seq_length, num_heads, num_kv_heads, starts,
                         lengths);
}

extern "C" __global__ void __launch_bounds__(128)
rope_backward(T* d_qkv, const f32* __restrict__ table, i64 tokens, i32 seq_length, i32 num_heads,
              i32 num_kv_heads, const i32* __restrict__ starts, const f32* __restrict__ lengths,
              f32* abs_max) {
    const u32 largest = rotate<true, ABS_MAX>(d_qkv, table, tokens, seq_length, num_heads,
                                              num_kv_heads, starts, lengths);
    finish_abs_max<ABS_MAX>(abs_max, largest);
}

// -- Fused ----------------------------------------------------------------------------------------

// Four neighbouring elements in their stored form: two BF16 elements stay packed in a word.
struct alignas(4 * sizeof(T)) Quad {
    static constexpr bool PACKED = sizeof(T) == 2;
    u32 word[sizeof(T)];

    __device__ __forceinline__ void get(float (&x)[4]) const {
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const u32 bits = word[PACKED ? k / 2 : k];
            x[k] = !PACKED ? __uint_as_float(bits) : k % 2 ? upper_half(bits) : lower_half(bits);
        }
    }
    __device__ __forceinline__ void set(const float (&x)[4]) {
#pragma unroll
        for (int k = 0; k < 4; k += PACKED ? 2 : 1) {
            word[PACKED ? k / 2 : k] = PACKED ? to_pair(x[k], x[k + PACKED]) : __float_as_uint(x[k]);
        }
    }
    // The largest abs_bits; if PACKED, one for the lower halves and one for the upper halves of
    // words.
    __device__ __forceinline__ u32 raise(u32 peak) const {
#pragma unroll
        for (u32 bits : word) {
            peak = PACKED ? __vmaxu2(peak, bits & 0x7FFF7FFFu) : max(peak, bits & 0x7FFFFFFFu);
        }
        return peak;
    }
    static __device__ __forceinline__ u32 peak_bits(u32 peak) {
        return PACKED ? max(peak << 16, peak & 0xFFFF0000u) : peak;
    }
    // Number of elements with an absolute value above the limit.
    __device__ __forceinline__ u32 count_above(float limit) const {
        float x[4];
        get(x);
        u32 count = 0;
#pragma unroll
        for (int k = 0; k < 4; ++k) { count += fabsf(x[k]) > limit; }
        return count;
    }
};

// A tile: 64 tokens and 16 quads of both halves of heads, of one head or several. A thread has 4
// tokens and one quad of both halves; a warp has 8 tokens and all quads.
constexpr int TILE_TOKENS = 64, TILE_QUADS = 16, THREADS = 256, WARPS = THREADS / 32;
constexpr int HALF_QUADS = HALF < 4 ? 1 : HALF / 4;  // unused if HALF < 4
constexpr bool SAME_ANGLES = TILE_QUADS % HALF_QUADS == 0;  // in all tiles across the features

// The column of d_qkv where quad number `quad` of all heads' first halves begins.
__device__ __forceinline__ i32 quad_column(u32 quad) {
    return quad / HALF_QUADS * HEAD_DIM + first_of(quad % HALF_QUADS * 4);
}
// Distance from a quad to its partner in the second half, in columns.
__device__ __forceinline__ i32 quad_behind(u32 quad) { return behind(quad % HALF_QUADS * 4); }

// The codes of a tile, a line of 64 bytes for each column. Column i of quad q is line i * 16 + q: 8
// lanes read 16 bytes each from different banks; 32 lanes write 4 bytes each to 16 banks.
struct CodeTile {
    static constexpr int PLACES = TILE_TOKENS / 16;
    uint4 line[2][4 * TILE_QUADS][PLACES];

    // Put this thread's codes of one half into the tile. A barrier must follow.
    __device__ __forceinline__ void put(int half, const u32 (&four)[4]) {
        const u32 quad = threadIdx.x % TILE_QUADS, rows = threadIdx.x / TILE_QUADS;
        u32 turned[4];
        transpose_bytes(turned, four);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            uint4* place = &line[half][i * TILE_QUADS + quad][rows / 4 ^ quad / 2 % PLACES];
            reinterpret_cast<u32*>(place)[rows % 4] = turned[i];
        }
    }
    // Store the part of the tile that lies inside transposed: (columns, turned), with
    // turned = turned_columns(tokens).
    template <class Format>
    __device__ __forceinline__ void store(Format* transposed, i64 first_row, i64 turned,
                                          u32 first_quad, i32 columns) const {
        const u32 place = threadIdx.x % PLACES, l = threadIdx.x / PLACES, quad = l % TILE_QUADS;
        const i64 row = first_row + place * 16;
        const i32 column = quad_column(first_quad + quad) + l / TILE_QUADS;
        const i32 second = quad_behind(first_quad + quad);
        if (row < turned && column < columns) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                *reinterpret_cast<uint4*>(transposed + (column + half * second) * turned + row) =
                    line[half][l][place ^ quad / 2 % PLACES];
            }
        }
    }
};

// Sums over the tokens of each warp: quads of the first half, then of the second half.
struct alignas(16) SumTile {
    static constexpr int LINES = 2 * 4 * TILE_QUADS;
    float sum[WARPS][LINES];

    // Put this thread's sums over its warp's tokens. A barrier must follow.
    __device__ __forceinline__ void put(const float (&x1)[4], const float (&x2)[4]) {
        const bool second = threadIdx.x & TILE_QUADS;
        Vec<f32> x;
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const float given = second ? x1[k] : x2[k];
            x[k] = (second ? x2[k] : x1[k]) + __shfl_xor_sync(0xFFFFFFFFu, given, TILE_QUADS);
        }
        store_vec(&sum[threadIdx.x / 32][threadIdx.x % 32 * 4], x);
    }
    // LINES threads store the sums over the tile's tokens to partial[column].
    __device__ __forceinline__ void store(f32* partial, u32 first_quad, i32 columns) const {
        const u32 l = threadIdx.x % LINES;
        const u32 quad = first_quad + l / 4 % TILE_QUADS;
        const i32 column = quad_column(quad) + l % 4, half = l / (4 * TILE_QUADS);
        float total = sum[0][l];
#pragma unroll
        for (int w = 1; w < WARPS; ++w) { total += sum[w][l]; }
        if (column < columns) { partial[column + half * quad_behind(quad)] = total; }
    }
};

// Rotate four neighbours of the first half with their partners in the second, times length.
__device__ __forceinline__ void rotate(const Angles<4>& turn, float length, Quad& first,
                                       Quad& second) {
    float x1[4], x2[4], y1[4], y2[4];
    first.get(x1);
    second.get(x2);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        y1[k] = turn.first(k, x1[k], x2[k]) * length;
        y2[k] = turn.second(k, x1[k], x2[k]) * length;
    }
    first.set(y1);
    second.set(y2);
}

struct FusedShared {
    Quad arriving[8][THREADS];  // quads of the next tile; a thread reads only its own copies
    CodeTile codes[2];          // used in turns: one barrier for each tile
    SumTile sums[2];
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_ON_SM)
rope_backward_fused(T* out, const T* d_qkv, f32* __restrict__ partial,
                    const f32* __restrict__ table, i64 tokens, i32 seq_length, i32 num_heads,
                    i32 num_kv_heads, const i32* __restrict__ starts,
                    const f32* __restrict__ lengths, i32 block_tiles, f32* abs_max,
                    Q* __restrict__ codes, Q* __restrict__ transposed,
                    const f32* __restrict__ scale, i32* saturated) {
#if BIAS || CODES || TRANSPOSED
    constexpr bool FP8 = CODES || TRANSPOSED;
    extern __shared__ uint4 memory[];
    FusedShared& shared = *reinterpret_cast<FusedShared*>(memory);
    const i32 heads = num_heads + num_kv_heads, all = heads + num_kv_heads;
    const i32 columns = all * HEAD_DIM;
    const i32 first_tile = blockIdx.x * block_tiles;
    const i32 end = min(first_tile + block_tiles, (columns + 127) / 128);
    const i32 first_row = blockIdx.y * TILE_TOKENS, row = first_row + threadIdx.x / TILE_QUADS * 4;
    u32 largest = 0;
    Angles<4> turn[4];
    float length[4];

    // Starts asynchronous copies of this thread's quads of tile t, which take no registers.
    const auto fetch = [&](i32 t) {
        const u32 quad = t * TILE_QUADS + threadIdx.x % TILE_QUADS;
        const i32 column = quad_column(quad), second = quad_behind(quad);
        const int there = column < columns ? (i32)tokens - row : 0;  // existing rows, of 4
        const T* from = d_qkv + (there > 0 ? (i64)row * columns + column : 0);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const T* place = from + (i64)(i < there ? i : 0) * columns;  // always a valid address
            const auto to = [&](int j) { return shared_address(&shared.arriving[j][threadIdx.x]); };
            cp_async_cached<sizeof(Quad)>(to(2 * i), place, i < there);
            cp_async_cached<sizeof(Quad)>(to(2 * i + 1), place + second, i < there);
        }
        cp_async_commit();
    };
    fetch(first_tile);
    Fp8Encoder<Q, FP8> encoder(scale);
#pragma unroll 1
    for (i32 t = first_tile; t < end; ++t) {
        const u32 quad = t * TILE_QUADS + threadIdx.x % TILE_QUADS;
        const i32 column = quad_column(quad), head = quad / HALF_QUADS;
        const i32 second = quad_behind(quad);
        const int there = head < all ? (i32)tokens - row : 0;
        const i64 at = (i64)row * columns + column;
        if (!SAME_ANGLES || t == first_tile) {
            i32 position = row % seq_length;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const i32 start = DOCUMENTS && row + i < tokens ? starts[row + i] : 0;
                const i64 row_of_table = position - start;
                turn[i].load<true>(table + (row_of_table * HALF + quad % HALF_QUADS * 4) * 2);
                length[i] = LENGTHS ? lengths[row_of_table] : 1.0f;
                if (++position == seq_length) { position = 0; }
            }
        }
        cp_async_wait<0>();
        Quad y1[4], y2[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            y1[i] = shared.arriving[2 * i][threadIdx.x];
            y2[i] = shared.arriving[2 * i + 1][threadIdx.x];
        }
        if (t + 1 < end) { fetch(t + 1); }
        if (head < heads && there > 0) {  // keeps zeros after the last token without a sign
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                rotate(turn[i], LENGTHS && head < num_heads ? length[i] : 1.0f, y1[i], y2[i]);
                if (!FP8 && i < there) {
                    T* place = out + at + (i64)i * columns;
                    *reinterpret_cast<Quad*>(place) = y1[i];
                    *reinterpret_cast<Quad*>(place + second) = y2[i];
                }
            }
        }
        u32 peak = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) { peak = y2[i].raise(y1[i].raise(peak)); }
        peak = Quad::peak_bits(peak);
        largest = max(largest, peak);
        if (FP8 && peak > __float_as_uint(encoder.limit)) {  // rare: codes may saturate
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                encoder.count += y1[i].count_above(encoder.limit);
                encoder.count += y2[i].count_above(encoder.limit);
            }
        }
        u32 codes1[4], codes2[4];
        float sum1[4] = {}, sum2[4] = {};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float v1[4], v2[4];
            y1[i].get(v1);
            y2[i].get(v2);
#pragma unroll
            for (int k = 0; k < 4; ++k) { sum1[k] += v1[k], sum2[k] += v2[k]; }
            codes1[i] = encoder.four(v1[0], v1[1], v1[2], v1[3]);
            codes2[i] = encoder.four(v2[0], v2[1], v2[2], v2[3]);
            if (CODES && there > 0) {
                u32* place = reinterpret_cast<u32*>(codes + at + (i64)i * columns);
                place[0] = codes1[i];
                place[second / 4] = codes2[i];
            }
        }
        const u32 which = t % 2;
        if constexpr (BIAS) { shared.sums[which].put(sum1, sum2); }
        if constexpr (TRANSPOSED) {
            shared.codes[which].put(0, codes1);
            shared.codes[which].put(1, codes2);
        }
        if (BIAS || TRANSPOSED) { __syncthreads(); }
        if constexpr (TRANSPOSED) {
            shared.codes[which].store(transposed, first_row, turned_columns(tokens),
                                      t * TILE_QUADS, columns);
        }
        if (BIAS && threadIdx.x / SumTile::LINES == which) {
            shared.sums[which].store(partial + (i64)blockIdx.y * columns, t * TILE_QUADS, columns);
        }
    }
    encoder.finish(saturated);
    finish_abs_max<ABS_MAX>(abs_max, largest);
#endif
}
