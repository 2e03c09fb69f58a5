// matmul_rope.cu -- the product of queries, keys and values for Hopper, with RoPE behind it.
//
//   x   = scale_a * scale_b * (a @ b^T) + h @ tail^T + bias
//   qkv = x, but of query and key heads the pairs (d, d + HEAD_DIM / 2) turned as in rope.cu
//
// The product is that of turns_sm90.cuh. A tile has 96 pairs: the columns of their first elements, and
// then those of their second ones, so that a pair is in one thread. x is rounded to BF16 first: all
// bits are those of the product and of rope.cu behind it. While a warpgroup turns its tile, the other
// one multiplies.
//
// Data     qkv: bf16 (M, N), heads of HEAD_DIM columns, num_heads of queries, num_kv_heads of keys and
//          as many of values. a: A (M, K), b: A (N, K). h: bf16 (M, R), tail: bf16 (N, R); RANK: R
//          rounded up to 16; 0: there are no h and tail. scale_a, scale_b: F32 (1), of fp8 codes.
//          bias: bf16 (N), with BIAS. table, starts, DOCUMENTS: as in rope.cu; row i has position
//          i % seq_length, less starts[i].
// Launch   as matmul_adapted.cu with tiles of 192 columns, of half as many columns of pairs.
// Cost     2 M N (K + R) FLOPs. About 14 instructions for each element of qkv, and 16 bytes of the
//          table for 4, from L2 or L1: they hide behind the product where K is long enough.
// Needs    compute capability 9.0; HEAD_DIM 64, 128 or 256; rows of a, b, h and tail of multiples of
//          16 bytes; seq_length rows in the table, M HEAD_DIM < 2^31.
// Same name  llmq/ops/matmul_rope.py  llmq/ref/matmul_rope.py  tests/ops/test_matmul_rope.py
// Source   PTX ISA, as matmul_adapted.cu.
constexpr int TILE_COLUMNS = 192;
#include "turns_sm90.cuh"

constexpr int STAGES = 4, AHEAD = 3;
using Product = TurnsProduct<A, A, false, RANK, false, STAGES, 1 + AHEAD, HEAD_DIM>;
constexpr int HALF = HEAD_DIM / 2;
static_assert(IN_TURNS && PAIRS * 2 == BOX);

// What a warp does with its rows of a tile, in steps: 16 rows of 16 pairs. The angles that a thread
// needs are copied to places of its own, AHEAD steps before that: there are no registers for them. Two
// steps fill the warp's first chunk, where a line has the first elements of 32 pairs, and then the
// second ones.
struct Turned {
    static constexpr int STEP_PAIRS = 16, STEPS = 2 * TILE_COLUMNS / 2 / STEP_PAIRS;

    bf16* qkv;
    const bf16* bias;
    const f32* table;
    const i32* starts;
    int M, N, seq_length, turned;  // turned: how many heads are

    __device__ __forceinline__ void operator()(const Tile& tile, const Sums& d, int first_row,
                                               SharedAddress chunk, SharedAddress) const {
        int angles[2];  // of this thread's rows of a half: where they are in the table
        find(angles, tile.row + first_row, threadIdx.x % 32);
#pragma unroll
        for (int step = 0; step < AHEAD; ++step) {
            fetch(step, angles, tile.column, chunk, threadIdx.x % 32);
        }
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            int lane = threadIdx.x % 32, first = tile.column;
            forget(lane), forget(first);  // or what all steps make of them would be held
            const int half = half_of(step), c = pair_of(step), pair = first + c;
            const int row = tile.row + first_row + 64 * half;
            cp_async_wait<AHEAD - 1>();
            if (c % PAIRS == 0) { __syncwarp(); }  // all have read the chunk
#pragma unroll
            for (int j = 0; j < STEP_PAIRS; j += 8) {
                u32 x[2], y[2];  // of the first and of the second elements, as stmatrix takes them
                round(x, y, d[half] + (c + j) / 2, pair + j, lane);
                if (turns(pair)) {
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        turn(x[i], y[i], load_shared(place(chunk, step, j / 4 + i, lane)));
                    }
                }
                const u32 line = lane & 15, word = (c % PAIRS + j) / 8 + (lane >> 4) * 4;
                stmatrix_x4(chunk + line * LINE + ((word ^ line & 7) << 4), x[0], x[1], y[0], y[1]);
            }
            if (step + AHEAD == STEPS / 2) { find(angles, row + 64, lane); }
            fetch(step + AHEAD, angles, first, chunk, lane);
            if (c % PAIRS != 0) {
                __syncwarp();
                store(row, pair - STEP_PAIRS, chunk, lane);
            }
        }
    }

private:
    static __device__ __forceinline__ int half_of(int step) { return step / (STEPS / 2); }
    static __device__ __forceinline__ int pair_of(int step) { return step % (STEPS / 2) * STEP_PAIRS; }
    static __device__ __forceinline__ SharedAddress place(SharedAddress chunk, int step, int i,
                                                          int lane) {
        return chunk + (1 + step % AHEAD) * CHUNK_BYTES + (i * 32 + lane) * sizeof(uint4);
    }

    __device__ __forceinline__ bool turns(int pair) const { return pair / HALF < turned; }

    // Of the first pair of a head, for two rows. Rows of which nothing is stored have any.
    __device__ __forceinline__ void find(int (&angles)[2], int first_row, int lane) const {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int row = min(first_row + lane / 4 + 8 * i, M - 1);
            angles[i] = (row % seq_length - (DOCUMENTS ? starts[row] : 0)) * HEAD_DIM;
        }
    }

    // Begins to copy cos and sin of two neighbouring pairs for each turn of a step.
    __device__ __forceinline__ void fetch(int step, const int (&angles)[2], int pair,
                                          SharedAddress chunk, int lane) const {
        if (step < STEPS && turns(pair + pair_of(step))) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int box = pair + pair_of(step) / PAIRS * PAIRS;  // its first pair
                const int of_head = (HALF == PAIRS ? 0 : box % HALF) + pair_of(step) % PAIRS;
                const int from = angles[i % 2] + 2 * of_head + lane % 4 * 4;
                cp_async_cached<16>(place(chunk, step, i, lane), table + from + i / 2 * 16, true);
            }
        }
        cp_async_commit();
    }

    // Two neighbouring columns of each of two rows. sums: of the first elements.
    __device__ __forceinline__ void round(u32 (&x)[2], u32 (&y)[2], const float* sums, int pair,
                                          int lane) const {
        u32 more[2];  // bias of the first elements' columns, and of the second ones'
        if constexpr (BIAS) {
            const int first = (2 * pair < N ? row_of_pair<HEAD_DIM>(pair) : 0) + lane % 4 * 2;
            more[0] = __ldg(reinterpret_cast<const u32*>(bias + first));
            more[1] = __ldg(reinterpret_cast<const u32*>(bias + first + HALF));
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            x[i] = rounded(sums + 2 * i, more[0]);
            y[i] = rounded(sums + SUMS / 2 + 2 * i, more[1]);
        }
    }
    static __device__ __forceinline__ u32 rounded(const float* sum, u32 more) {
        if constexpr (!BIAS) { return to_pair(sum[0], sum[1]); }
        return to_pair(sum[0] + lower_half(more), sum[1] + upper_half(more));
    }

    // Two pairs. angles: cos and sin of each.
    static __device__ __forceinline__ void turn(u32& x, u32& y, const uint4& angles) {
        const float a0 = lower_half(x), a1 = upper_half(x), b0 = lower_half(y), b1 = upper_half(y);
        const float cos0 = __uint_as_float(angles.x), sin0 = __uint_as_float(angles.y);
        const float cos1 = __uint_as_float(angles.z), sin1 = __uint_as_float(angles.w);
        x = to_pair(a0 * cos0 - b0 * sin0, a1 * cos1 - b1 * sin1);
        y = to_pair(b0 * cos0 + a0 * sin0, b1 * cos1 + a1 * sin1);
    }

    // The chunk: 16 rows from this one on, PAIRS pairs.
    __device__ __forceinline__ void store(int first_row, int pair, SharedAddress chunk,
                                          int lane) const {
        const u32 word = lane % 8;
        const int column = row_of_pair<HEAD_DIM>(pair) + word / 4 * HALF + word % 4 * 8;
        const int row = first_row + lane / 8, rows = 2 * pair < N ? M - row : 0;
        bf16* to = qkv + (i64)row * N + column;
#pragma unroll 2
        for (int i = 0; i < 16; i += 4, to += 4 * N) {
            const u32 line = i + lane / 8;
            const uint4 x = load_shared(chunk + line * LINE + ((word ^ line & 7) << 4));
            if (i < rows) { *reinterpret_cast<uint4*>(to) = x; }
        }
    }
};

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(Product::THREADS, 1)
matmul_rope(bf16* qkv, const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b,
            const __grid_constant__ TensorMap h, const __grid_constant__ TensorMap tail,
            const float* scale_a, const float* scale_b, const bf16* bias, const f32* table,
            const i32* starts, i32 M, i32 N, i32 K, i32 seq_length, i32 num_heads,
            i32 num_kv_heads) {
    extern __shared__ unsigned char shared[];
    const Product product(shared, K);
    if (threadIdx.x == 0) { product.init(); }
    cluster_arrive();
    cluster_wait();
    const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
    const Work work(M, N / 2, TILE_COLUMNS / 2, K * (int)sizeof(A));
    if (warpgroup == 0) {
        product.load_tiles(work, &a, &b, &h, &tail);
    } else {
        const float scale = Product::SCALED ? *scale_a * *scale_b : 1.0f;
        const Turned turned{qkv, bias, table, starts, M, N, seq_length, num_heads + num_kv_heads};
        product.multiply_tiles(work, warpgroup - 1, scale, turned);
    }
    cluster_arrive();
    cluster_wait();  // a block may not end while the other one still arrives at its barriers
}
