// rope.cu -- rotary position embedding of every query and key head of the packed QKV activation.
//
//   forward    (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin)   for the pairs (d, d + Hd/2)
//   backward   the same with -sin
//   fused      backward, and of its result the sums over tokens and the FP8 codes, if wanted
//
// Data     qkv, d_qkv: T (tokens, Hq + 2 Hkv, HEAD_DIM), value heads last and not changed; table:
//          F32 (positions, HEAD_DIM / 2, 2), cos and sin. 16-byte aligned, HEAD_DIM % 16 == 0.
//          Token i has position first_position + i % seq_length.
//          abs_max: F32 (1), with ABS_MAX = 1 raised to the largest |d_qkv|, as stored, value heads
//          included; else not touched, may be null.
//          fused: out is d_qkv or null. partial: with BIAS = 1 F32 (ceil(tokens / 128), features),
//          sums over 128 tokens. codes, transposed, scale, saturated as in fp8.cuh, of matrices
//          (tokens, features), with CODES = 1, TRANSPOSED = 1; out is then not written.
// Launch   128 threads, one thread for 16 bytes of both halves of HEADS_PER_THREAD heads.
//          fused: 256 threads, a block for 128 tokens and up to block_tiles times 128 features, in
//          a grid (across, down). rope_backward_bias: as column_sum in common.cuh.
// Cost     query and key heads read once and written once, value heads read once for abs_max;
//          angles once per HEADS_PER_THREAD heads, from L2. Memory-bound.
//          fused: value heads are read; angles once per block from L2, then from L1, where those
//          of 128 tokens take 512 * HEAD_DIM bytes.
// Needs    threads < 2^31. first_position + seq_length rows in the table. fused: at most 2^22
//          tokens; for FP8 a multiple of 16.
// Same name  llmq/ops/rope.py  llmq/ref/rope.py  tests/ops/test_rope.py
#include "common.cuh"
#include "fp8.cuh"

constexpr int N = Vec<T>::N;
constexpr int HALF = HEAD_DIM / 2;
constexpr int HALF_VECTORS = HALF / N;
constexpr int TILES_ON_SM = sizeof(T) == 2 ? 2 : 1;  // blocks that the registers must do for

// Of COUNT neighbouring pairs.
template <int COUNT> struct Angles {
    float cos[COUNT], sin[COUNT];

    // From a row of the table, at the first of them. BACKWARD: of the opposite angles.
    template <bool BACKWARD> __device__ __forceinline__ void load(const f32* row) {
#pragma unroll
        for (int k = 0; k < COUNT; k += 2) {
            const Vec<f32> pair = load_vec(row + 2 * k);
            cos[k] = pair[0];
            sin[k] = BACKWARD ? -pair[1] : pair[1];
            cos[k + 1] = pair[2];
            sin[k + 1] = BACKWARD ? -pair[3] : pair[3];
        }
    }
    __device__ __forceinline__ T first(int k, T x1, T x2) const {
        return from_f32<T>(to_f32(x1) * cos[k] - to_f32(x2) * sin[k]);
    }
    __device__ __forceinline__ T second(int k, T x1, T x2) const {
        return from_f32<T>(to_f32(x2) * cos[k] + to_f32(x1) * sin[k]);
    }
};

// Rotates this thread's heads. VALUES: it may have value heads too, and only reads those.
// Returns the largest abs_bits of its heads after that.
template <bool BACKWARD, bool VALUES>
__device__ __forceinline__ u32 rotate(T* qkv, const f32* __restrict__ table, i64 tokens,
                                      i32 seq_length, i32 num_heads, i32 num_kv_heads,
                                      i32 first_position) {
    const u32 heads = num_heads + num_kv_heads, all = heads + num_kv_heads;
    const u32 loaded = VALUES ? all : heads;
    const u32 chunks = (loaded + HEADS_PER_THREAD - 1) / HEADS_PER_THREAD;
    const u32 thread = blockIdx.x * blockDim.x + threadIdx.x;
    const u32 column = thread % HALF_VECTORS * N;
    const u32 chunk = thread / HALF_VECTORS % chunks, token = thread / HALF_VECTORS / chunks;
    if (token >= tokens) { return 0; }

    // The heads chunk, chunk + chunks, ...: neighbouring threads work on neighbouring heads.
    T* const first = qkv + (i64)token * all * HEAD_DIM + column;
    Vec<T> x1[HEADS_PER_THREAD], x2[HEADS_PER_THREAD];
#pragma unroll
    for (int j = 0; j < HEADS_PER_THREAD; ++j) {
        const u32 head = chunk + j * chunks;
        if (head < loaded) {
            x1[j] = load_vec(first + head * HEAD_DIM);
            x2[j] = load_vec(first + head * HEAD_DIM + HALF);
        }
    }
    const i64 position = first_position + token % seq_length;
    const f32* angles = table + (position * HALF + column) * 2;
    Angles<N> turn;
    turn.load<BACKWARD>(angles);
    u32 largest = 0;
#pragma unroll
    for (int j = 0; j < HEADS_PER_THREAD; ++j) {
        const u32 head = chunk + j * chunks;
        if (head < heads) {
#pragma unroll
            for (int k = 0; k < N; ++k) {
                const T a = x1[j][k], b = x2[j][k];
                x1[j][k] = turn.first(k, a, b);
                x2[j][k] = turn.second(k, a, b);
            }
            store_vec(first + head * HEAD_DIM, x1[j]);
            store_vec(first + head * HEAD_DIM + HALF, x2[j]);
        }
        if (head < loaded) { largest = max(largest, max(abs_max_bits(x1[j]), abs_max_bits(x2[j]))); }
    }
    return largest;
}

extern "C" __global__ void __launch_bounds__(128)
rope_forward(T* qkv, const f32* __restrict__ table, i64 tokens, i32 seq_length, i32 num_heads,
             i32 num_kv_heads, i32 first_position) {
    rotate<false, false>(qkv, table, tokens, seq_length, num_heads, num_kv_heads, first_position);
}

extern "C" __global__ void __launch_bounds__(128)
rope_backward(T* d_qkv, const f32* __restrict__ table, i64 tokens, i32 seq_length, i32 num_heads,
              i32 num_kv_heads, f32* abs_max) {
    const u32 largest =
        rotate<true, ABS_MAX>(d_qkv, table, tokens, seq_length, num_heads, num_kv_heads, 0);
    finish_abs_max<ABS_MAX>(abs_max, largest);
}

// -- Fused ----------------------------------------------------------------------------------------

// A tile of a block: 128 tokens and 8 octets of both halves of a head, which may be of several
// heads. A thread has 4 tokens and one octet of both halves.
struct PairTile {
    static constexpr int OCTETS = 8, WARPS = 8, HALF_OCTETS = HALF / 8;
    OctetTile half[2];
    float sums[WARPS][2][OCTETS * 8];

    // The column of d_qkv where octet `pair` of all first halves begins.
    static __device__ __forceinline__ i32 column(u32 pair) {
        return pair / HALF_OCTETS * HEAD_DIM + pair % HALF_OCTETS * 8;
    }

    // This thread's sums over its 4 tokens; a barrier must follow.
    __device__ __forceinline__ void put_sums(int which, float (&x)[8]) {
#pragma unroll
        for (int k = 0; k < 8; ++k) {
            x[k] += __shfl_xor_sync(0xFFFFFFFFu, x[k], 8);
            x[k] += __shfl_xor_sync(0xFFFFFFFFu, x[k], 16);
        }
        if ((threadIdx.x & 31) < OCTETS) {
            float4* place = reinterpret_cast<float4*>(
                &sums[threadIdx.x >> 5][which][(threadIdx.x & 7) * 8]);
            place[0] = make_float4(x[0], x[1], x[2], x[3]);
            place[1] = make_float4(x[4], x[5], x[6], x[7]);
        }
    }
    // The sums of all 128 tokens, to partial[column].
    __device__ __forceinline__ void store_sums(f32* partial, u32 first_pair, i32 columns) const {
        if (threadIdx.x < 2 * OCTETS * 8) {
            const int which = threadIdx.x / (OCTETS * 8), line = threadIdx.x % (OCTETS * 8);
            const i32 first = column(first_pair + line / 8) + line % 8;
            float total = 0.0f;
#pragma unroll
            for (int w = 0; w < WARPS; ++w) { total += sums[w][which][line]; }
            if (first < columns) { partial[first + which * HALF] = total; }
        }
    }
};

// Codes of 4 rows and 8 columns to codes, (rows, columns), from there on.
__device__ __forceinline__ void store_codes(Q* codes, i64 row, i32 column, i32 columns,
                                            const uint2 (&four)[4], bool inside) {
    if constexpr (HALF % 16 == 0) {
        OctetTile::store_rows(codes, row, column, columns, four, inside);
    } else if (inside) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            *reinterpret_cast<uint2*>(codes + (row + i) * columns + column) = four[i];
        }
    }
}

// table is not __restrict__: its loads would not wait for __syncwarp.
extern "C" __global__ void __launch_bounds__(256, TILES_ON_SM)
rope_backward_fused(T* out, const T* d_qkv, f32* __restrict__ partial,
                    const f32* table, i64 tokens, i32 seq_length, i32 num_heads,
                    i32 num_kv_heads, i32 block_tiles, f32* abs_max, Q* __restrict__ codes,
                    Q* __restrict__ transposed, const f32* __restrict__ scale, i32* saturated) {
#if BIAS || CODES || TRANSPOSED
    constexpr bool FP8 = CODES || TRANSPOSED;
    __shared__ PairTile tile;
    const i32 heads = num_heads + num_kv_heads, all = heads + num_kv_heads;
    const i32 columns = all * HEAD_DIM, tiles = (columns + 127) / 128;
    const i64 first_row = (i64)blockIdx.y * OctetTile::LINES, row = first_row + OctetTile::row();
    const i32 first_position = (u32)row % seq_length;
    const int inside = row < tokens ? (int)min(tokens - row, (i64)4) : 0;
    Fp8Encoder<Q, FP8> encoder(scale);
    u32 largest = 0;
    const i32 end = min(((i32)blockIdx.x + 1) * block_tiles, tiles);
    for (i32 t = blockIdx.x * block_tiles; t < end; ++t) {
        const u32 pair = t * PairTile::OCTETS + (threadIdx.x & 7);
        const i32 column = PairTile::column(pair), head = pair / PairTile::HALF_OCTETS;
        const int there = head < all ? inside : 0;
        // In place: one pointer, so that it is clear that the loads come first.
        const i64 at = row * columns + column;
        const T* from = (FP8 ? d_qkv : out) + at;
        OctetRows<T> x1, x2;
        x1.load(from, columns, there);
        x2.load(from + HALF, columns, there);
        i32 position = first_position;
        uint2 codes1[4], codes2[4];
        float sum1[8] = {}, sum2[8] = {};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            __syncwarp();  // keeps the loads of angles apart, else there are too few registers
            Angles<8> turn;  // loaded for value heads too, so that there is no branch
            turn.load<true>(table + ((i64)position * HALF + column % HEAD_DIM) * 2);
            if (++position == seq_length) { position = 0; }
            Pack<T, 8> y1 = x1.row(i), y2 = x2.row(i);
#pragma unroll
            for (int k = 0; k < 8; ++k) {
                const T a = y1.at(k), b = y2.at(k);
                y1.set(k, head < heads ? turn.first(k, a, b) : a);
                y2.set(k, head < heads ? turn.second(k, a, b) : b);
                sum1[k] += y1.get(k);
                sum2[k] += y2.get(k);
            }
            if (!FP8 && i < there && head < heads) {
                y1.store(out + at + (i64)i * columns);
                y2.store(out + at + (i64)i * columns + HALF);
            }
            largest = max(largest, max(abs_max_bits(y1), abs_max_bits(y2)));
#if CODES || TRANSPOSED
            codes1[i] = encoder.encode(y1);
            codes2[i] = encoder.encode(y2);
#endif
        }
        if constexpr (CODES) {
            store_codes(codes, row, column, columns, codes1, there > 0);
            store_codes(codes, row, column + HALF, columns, codes2, there > 0);
        }
        if constexpr (TRANSPOSED) {
            tile.half[0].put(codes1);
            tile.half[1].put(codes2);
        }
        if constexpr (BIAS) {
            tile.put_sums(0, sum1);
            tile.put_sums(1, sum2);
        }
        __syncthreads();
        if constexpr (TRANSPOSED) {
            const u32 first_pair = t * PairTile::OCTETS;
            const auto place = [=](int line) {
                return PairTile::column(first_pair + line / 8) + line % 8;
            };
            tile.half[0].store(transposed, first_row, tokens, columns, place);
            tile.half[1].store(transposed + (i64)HALF * tokens, first_row, tokens, columns, place);
        }
        if constexpr (BIAS) {
            f32* sums = partial + (i64)blockIdx.y * columns;
            tile.store_sums(sums, t * PairTile::OCTETS, columns);
        }
        __syncthreads();  // before the next tile
    }
    encoder.finish(saturated);
    finish_abs_max<ABS_MAX>(abs_max, largest);
#endif
}

extern "C" __global__ void __launch_bounds__(1024)
rope_backward_bias(G* __restrict__ d_bias, const f32* __restrict__ partial,
                   const i32* __restrict__ scalars, i32 num_partials, i32 features, i32 accumulate,
                   u32 salt) {
    column_sum(d_bias, partial, scalars, num_partials, features, accumulate, salt);
}
