// matmul_rope.cu -- the product of queries, keys and values for Hopper, with RoPE behind it.
//
//   x   = scale_a * scale_b * (a @ b^T) + h @ tail^T + bias
//   qkv = x, but of query and key heads the pairs (d, d + HEAD_DIM / 2) turned as in rope.cu
//
// The product is that of turns_sm90.cuh. A tile has 32 pairs of each of three heads, the same ones
// where heads have more: the columns of their first elements, and then those of their second ones, so
// that a pair is in one thread, and an angle serves three heads. x is rounded to BF16 first: all bits
// are those of the product and of rope.cu behind it. While a warpgroup turns its tile, the other one
// multiplies.
//
// Data     qkv: bf16 (M, N), heads of HEAD_DIM columns, num_heads of queries, num_kv_heads of keys and
//          as many of values. a: A (M, K), b: A (N, K). h: bf16 (M, R), tail: bf16 (N, R); RANK: R
//          rounded up to 16; 0: there are no h and tail. scale_a, scale_b: F32 (1), of fp8 codes.
//          bias: bf16 (N), with BIAS. table, starts, DOCUMENTS: as in rope.cu; row i has position
//          i % seq_length, less starts[i].
// Launch   as matmul_adapted.cu with tiles of 192 columns, of half as many columns of pairs.
// Cost     2 M N (K + R) FLOPs. About 10 instructions for each element of qkv, and 8 bytes of the table
//          for 6 elements, from L2: they hide behind the product where K is long enough.
// Needs    compute capability 9.0; HEAD_DIM 64, or 128 or 256 and more than one value head, so that no
//          tile has queries or keys of two parts of heads; rows of a, b, h and tail of multiples of 16
//          bytes; seq_length rows in the table, M HEAD_DIM < 2^31.
// Same name  llmq/ops/matmul_rope.py  llmq/ref/matmul_rope.py  tests/ops/test_matmul_rope.py
// Source   PTX ISA, as matmul_adapted.cu.
constexpr int TILE_COLUMNS = 192;
#include "turns_sm90.cuh"

// A warp has chunks of 16 rows and 16 pairs, one for each box of pairs, angles of AHEAD steps, and the
// bias of a tile.
constexpr int BOXES = TILE_COLUMNS / 2 / PAIRS, AHEAD = 4;
constexpr int CHUNK_LINE = 64, CHUNK = 16 * CHUNK_LINE, ANGLES = 2 * 32 * sizeof(uint4);
constexpr int ANGLES_AT = BOXES * CHUNK, BIAS_AT = ANGLES_AT + AHEAD * ANGLES;
constexpr int WARP_BYTES = BIAS_AT + BOXES * 2 * PAIRS * sizeof(bf16);
using Product = TurnsProduct<A, A, false, RANK, false, 4, WARP_BYTES, HEAD_DIM>;
using Box = HeadBox<HEAD_DIM>;
constexpr int HALF = HEAD_DIM / 2, PARTS = HALF / PAIRS;
static_assert(IN_TURNS && PAIRS * 2 == BOX && WARP_BYTES % 128 == 0);

// What a warp does with its rows of a tile, in steps: it rounds and turns 16 rows of eight pairs of
// each box, and puts them into the box's chunk, which is stored when two steps have filled it. All
// boxes of queries and keys have the same angles; a thread copies those that it needs to places of its
// own, AHEAD steps before that: there are no registers for them.
struct Turned {
    static constexpr int OCTETS = PAIRS / 8, STEPS = HALVES_OF_TILE * OCTETS;

    bf16* qkv;
    const bf16* bias;
    const f32* table;
    const i32* starts;
    int M, N, seq_length, heads, turned;  // turned: how many heads are
    SharedAddress mine;                   // the warp's WARP_BYTES
    int angles[HALVES_OF_TILE][2];        // of the thread's rows: where they are in the table

    // Before a tile is multiplied: what would have to be waited for after that.
    __device__ __forceinline__ void begin(const Tile& tile, int first_row) {
        const int lane = threadIdx.x % 32;
        const Box box(tile.column / PAIRS, heads), next = box.next(heads), last = next.next(heads);
        if constexpr (BIAS) {
            copy_bias(0, box, lane), copy_bias(1, next, lane), copy_bias(2, last, lane);
        }
        const int part = turns(box) ? box.part : min(last.part, PARTS - 1);
#pragma unroll
        for (int i = 0; i < 2 * HALVES_OF_TILE; ++i) {
            const int below = first_row + lane / 4 + 8 * (i % 2) + 64 * (i / 2);
            const int row = min(tile.row + below, M - 1);  // of rows that are not stored any will do
            const int position = (u32)row % (u32)seq_length - (DOCUMENTS ? starts[row] : 0);
            angles[i / 2][i % 2] = position * HEAD_DIM + 2 * part * PAIRS + lane % 4 * 4;
        }
#pragma unroll
        for (int step = 0; step < AHEAD; ++step) { fetch(step, lane); }
    }

    __device__ __forceinline__ void operator()(const Tile& tile, const Sums& d, int first_row,
                                               SharedAddress, SharedAddress) const {
        int lane = threadIdx.x % 32;
        forget(lane);  // or what is made of it would be held while tiles are multiplied
        const Box box(tile.column / PAIRS, heads), next = box.next(heads);
        const Box boxes[BOXES] = {box, next, next.next(heads)};
        const SharedAddress to = mine + word_of_chunk(lane & 15, lane >> 4 << 1);
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            const int half = step / OCTETS, octet = step % OCTETS;
            cp_async_wait<AHEAD - 1>();
            if (BIAS && step == 0) { __syncwarp(); }
            const uint4 first = load_shared(place(step, 0, lane));
            const uint4 second = load_shared(place(step, 1, lane));
            fetch(step + AHEAD, lane);
#pragma unroll
            for (int b = 0; b < BOXES; ++b) {
                u32 x[2], y[2];  // of the first and of the second elements, as stmatrix takes them
                round(x, y, d[half] + 4 * (OCTETS * b + octet), b, octet, lane);
                if (turns(boxes[b])) {
                    turn(x[0], y[0], first);
                    turn(x[1], y[1], second);
                }
                stmatrix_x4((to ^ octet % 2 << 4) + b * CHUNK, x[0], x[1], y[0], y[1]);
            }
            if (octet % 2 == 1) {
                __syncwarp();
                store(boxes, tile.row + first_row + 64 * half, (octet - 1) * 8, lane);
                __syncwarp();
            }
        }
    }

private:
    __device__ __forceinline__ bool turns(const Box& box) const { return box.head < turned; }

    // In a chunk, whose lines are two words of 16 bytes of first elements, and two of second ones.
    // Eight rows have one word in different banks, and four rows have two.
    static __device__ __forceinline__ int word_of_chunk(int row, int word) {
        return row * CHUNK_LINE + ((word ^ (row & 2) ^ (row >> 2 & 1)) << 4);
    }
    __device__ __forceinline__ SharedAddress place(int step, int i, int lane) const {
        return mine + ANGLES_AT + step % AHEAD * ANGLES + (i * 32 + lane) * sizeof(uint4);
    }

    // Two neighbouring columns of the first elements lie beside those of the second ones.
    __device__ __forceinline__ void copy_bias(int b, const Box& box, int lane) const {
        const int word = lane % 16;
        cp_async_cached<4>(mine + BIAS_AT + (b * 32 + word * 2 + lane / 16) * 4,
                           bias + box.row() + lane / 16 * HALF + word * 2, true);
    }

    // Begins to copy cos and sin of two neighbouring pairs, for each of two rows.
    __device__ __forceinline__ void fetch(int step, int lane) const {
        if (step < STEPS) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const f32* const from = table + angles[step / OCTETS][i] + step % OCTETS * 16;
                cp_async_16(place(step, i, lane), from, true);
            }
        }
        cp_async_commit();
    }

    // Two neighbouring columns of each of two rows. sums: of the first elements.
    __device__ __forceinline__ void round(u32 (&x)[2], u32 (&y)[2], const float* sums, int b, int octet,
                                          int lane) const {
        u32 more[2];  // bias of the first elements' columns, and of the second ones'
        if constexpr (BIAS) {
            const float2 pair =
                load_shared_pair(mine + BIAS_AT + (b * 16 + octet * 4 + lane % 4) * 8);
            more[0] = __float_as_uint(pair.x), more[1] = __float_as_uint(pair.y);
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

    // The chunks: 16 rows from this one on, 16 pairs of each box from `pair` on. Of a box behind the last
    // one nothing is stored.
    __device__ __forceinline__ void store(const Box (&boxes)[BOXES], int first_row, int pair,
                                          int lane) const {
        const int line = lane / 2, row = first_row + line;
        bf16* const to = qkv + (i64)row * N + pair + lane % 2 * 8;
        const SharedAddress from = mine + word_of_chunk(line, lane % 2);
#pragma unroll
        for (int b = 0; b < BOXES; ++b) {
            const uint4 x = load_shared(from + b * CHUNK), y = load_shared((from ^ 32) + b * CHUNK);
            if (row < M && boxes[b].part < PARTS) {
                *reinterpret_cast<uint4*>(to + boxes[b].row()) = x;
                *reinterpret_cast<uint4*>(to + boxes[b].row() + HALF) = y;
            }
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
        product.load_tiles(work, &a, &b, &h, &tail, num_heads + 2 * num_kv_heads);
    } else {
        const float scale = Product::SCALED ? *scale_a * *scale_b : 1.0f;
        const SharedAddress mine = product.chunks + (threadIdx.x / 32 - 4) * WARP_BYTES;
        const int turned = num_heads + num_kv_heads, heads = turned + num_kv_heads;
        Turned turns{qkv, bias, table, starts, M, N, seq_length, heads, turned, mine};
        product.multiply_tiles(work, warpgroup - 1, scale, turns);
    }
    cluster_arrive();
    cluster_wait();  // a block may not end while the other one still arrives at its barriers
}
