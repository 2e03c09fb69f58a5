// attention_backward.cu -- gradient of causal self-attention on Hopper, in products of warpgroups.
//
//   P = exp(scale q k^T - lse);  dS = P * (d_out v^T - delta), both 0 for later keys
//   d_v = P^T d_out;   d_k = scale dS^T q;   d_q = scale dS k
//
// attention_gradient: a block of the persistent grid takes tiles of 128 rows, keys or queries, of
// one head; each of two warpgroups has 64 rows. The warpgroups walk over the rows of the other side
// in steps of 64. One thread loads steps ahead into a ring of stages (TMA); another thread loads
// tiles. A counter deals out tiles: tiles of keys first, which take longest. Scores never leave
// registers: rounded to BF16, scores are the left operand of the next product. Tiles of keys
// compute transposed scores.
//
// A tile of keys walks over all query heads that share the keys. Where this walk would outlast all
// other work, the tile is divided into parts with fewer heads. All parts but the last leave their
// sums in memory; the last part waits for these sums and adds them in order. Blocks take the last
// part last, when the other parts are already under way.
//
// Data     declared in llmq/ops/attention/attention_backward.py. lse: natural logarithm.
//          statistics: for each 64 queries lse * log2(e), then -delta; delta = sum of d_out * out.
//          taken: number of tiles that blocks have taken, then for each 64 keys the number of warps
//          that have left sums. sums: d_k and d_v for each part but the last and each 64 keys, in
//          the threads' order; null without parts. part_heads: number of query heads in a part.
//          HEAD_DIM is 64 or 128, T a multiple of 64. Sums are F32; P and dS are rounded before
//          they are multiplied.
// Launch   statistics: 8 threads a row, 256 a block, grid (blocks, B); leaves 0 in taken. gradient:
//          384 threads, at most as many blocks as multiprocessors; shared memory as
//          llmq/ops/attention/attention_backward.py says.
// Cost     7 B Hq T^2 HEAD_DIM FLOPs: 4 products in tiles of keys, 3 in those of queries, so that
//          every element is summed in a fixed order; sums, written and read once.
// Needs    sm_90a. lse of the forward.
#include "attention/attention_items.cuh"

constexpr int SCORES = ROWS / 2;  // scores of a thread: 128 threads share 64 x 64
constexpr int DELTA_LANES = 8;    // threads that share a row of attention_statistics
constexpr bool EARLY = D == 64;   // multiply P for dV before computing dS: registers hold both

// -- The warpgroups that multiply -----------------------------------------------------------------

// The thread's number in its warpgroup. Volatile: the compiler computes derived values again
// instead of holding registers for them.
__device__ __forceinline__ u32 this_thread() {
    u32 thread = threadIdx.x % 128;
    forget(thread);
    return thread;
}

// scores = left step^T [+ scores], summed over HEAD_DIM. left, step: 64 rows of a head.
template <bool ADD>
__device__ __forceinline__ void multiply_rows(float (&scores)[SCORES], SharedAddress left,
                                              SharedAddress step) {
    const Descriptor a = k_inside(left), b = k_inside(step);
    wgmma_begin();
#pragma unroll
    for (int k = 0; k < D / 16; ++k) {
        const int at = k / 4 * (BOX_BYTES / 16) + k % 4 * 2;
        wgmma<ROWS, bf16, bf16, false>(scores, a + at, b + at, ADD || k > 0);
    }
    wgmma_commit();
}

// sum += left step: left is 64 x 64, step has 64 rows of a head.
__device__ __forceinline__ void multiply_columns(float (&sum)[D / 2], const u32 (&left)[4][4],
                                                 SharedAddress step) {
    const Descriptor right = k_outside(step, BOX_BYTES);
#pragma unroll
    for (int k = 0; k < ROWS / 16; ++k) {
        wgmma_left<D, true>(sum, left[k], right + k * (16 * LINE / 16), 1);
    }
    wgmma_commit();
}

// Round sums to a left operand, which has the same layout. One product takes 2 x 8 columns.
__device__ __forceinline__ void round_left(u32 (&left)[4], const float* x) {
#pragma unroll
    for (int i = 0; i < 4; ++i) { left[i] = to_pair(x[2 * i], x[2 * i + 1]); }
}

// Store this warp's 16 rows of the sum, times factor, through its part of a free tile.
__device__ __forceinline__ void store_rows(const TensorMap* map, int column, int row,
                                           const float (&sum)[D / 2], float factor,
                                           SharedAddress tile) {
    const u32 thread = this_thread(), warp = thread / 32, lane = thread % 32;
    const SharedAddress rows = tile + warp * 16 * LINE, line = rows + lane % 16 * LINE;
#pragma unroll
    for (int j = 0; j < D / 16; ++j) {  // 16 columns
        u32 pairs[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            pairs[i] = to_pair(sum[8 * j + 2 * i] * factor, sum[8 * j + 2 * i + 1] * factor);
        }
        stmatrix_x4(line + j / 4 * BOX_BYTES + ((j % 4 * 2 + lane / 16 ^ lane & 7) << 4), pairs[0],
                    pairs[1], pairs[2], pairs[3]);
    }
    stores_begin();
    __syncwarp();
    if (lane == 0) {
#pragma unroll
        for (int i = 0; i < BOXES; ++i) {
            store_box(map, column + 64 * i, row + 16 * warp, rows + i * BOX_BYTES);
        }
    }
}

// Arrive at `barrier` once for each warp, after the warp's reads.
__device__ __forceinline__ void release(SharedAddress barrier) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) { barrier_arrive(barrier); }
}

// Release `steps` stages of the ring that this warpgroup does not use.
__device__ __forceinline__ void pass_by(const Memory& memory, Ring& ring, int steps) {
#pragma unroll 1
    for (int i = 0; i < steps; ++i, ring.next()) {
        barrier_wait(memory.full + 8 * ring.stage, ring.parity);
        release(memory.empty + 8 * ring.stage);
    }
}

// Statistics of a thread's two rows, in a tile of queries.
struct RowStatistics {
    float lse[2], delta[2];
};

// Set d_s to -delta, to which the step's product is added. step: address of the step's statistics.
template <bool IS_KEYS>
__device__ __forceinline__ void begin_d_s(float (&d_s)[SCORES], SharedAddress step,
                                          const RowStatistics& rows) {
#pragma unroll
    for (int j = 0; j < SCORES / 4; ++j) {
        float2 d = make_float2(0.0f, 0.0f);
        if (IS_KEYS) { d = load_shared_pair(step + 4 * ROWS + 32 * j + threadIdx.x % 4 * 8); }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            d_s[4 * j + i] = IS_KEYS ? (i % 2 ? d.y : d.x) : rows.delta[i / 2];
        }
    }
}

// p = exp(scale * scores - lse); on the diagonal p is 0 for keys after the query.
template <bool IS_KEYS>
__device__ __forceinline__ void to_probabilities(float (&p)[SCORES], SharedAddress step,
                                                 const RowStatistics& rows, float scale_log2,
                                                 bool diagonal) {
    if (diagonal) {
        const u32 thread = this_thread(), warp = thread / 32, lane = thread % 32;
#pragma unroll
        for (int i = 0; i < SCORES; ++i) {
            const int row = warp * 16 + lane / 4 + (i / 2 % 2) * 8;
            const int column = i / 4 * 8 + lane % 4 * 2 + i % 2;
            if (IS_KEYS ? row > column : column > row) { p[i] = -INFINITY; }
        }
    }
#pragma unroll
    for (int j = 0; j < SCORES / 4; ++j) {
        float2 l = make_float2(0.0f, 0.0f);
        if (IS_KEYS) { l = load_shared_pair(step + 32 * j + threadIdx.x % 4 * 8); }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float shift = IS_KEYS ? (i % 2 ? l.y : l.x) : rows.lse[i / 2];
            p[4 * j + i] = exp2_approx(fmaf(p[4 * j + i], scale_log2, -shift));
        }
    }
}

// d_s = p * d_s, for a thread's 8 elements of one product's left operand.
__device__ __forceinline__ void to_d_s(float* d_s, const float* p) {
#pragma unroll
    for (int i = 0; i < 8; ++i) { d_s[i] *= p[i]; }
}

// A warpgroup's part of a tile: the 64 rows of block `block`, in the steps from begin to stop of
// each head. x, y: the step's tensors (Q, dO in tiles of keys; K, V in tiles of queries).
//   P, dP = own x^T, own y^T;   d_y += P y (dV, in tiles of keys);   d_x += dS x (dK or dQ)
struct Walk {
    const Memory& memory;
    SharedAddress a_tile, b_tile;
    int block, begin, stop, before, behind, heads;  // before, behind: numbers of unused steps
    float scale_log2;

    __device__ __forceinline__ SharedAddress x(u32 stage) const {
        return memory.stages + stage * STAGE_BYTES;
    }
    __device__ __forceinline__ SharedAddress statistics(u32 stage) const {
        return memory.statistics + stage * STATISTICS_BYTES;
    }

    // Add up dK in d_x and dV in d_y, one step after the other.
    __device__ __forceinline__ void of_keys(float (&d_x)[D / 2], float (&d_y)[D / 2],
                                            Ring& ring) const {
        SharedAddress held = 0;  // the barrier of the last step's stage: its products may still run
#pragma unroll 1
        for (int n = 0; n < heads; ++n) {
            pass_by(memory, ring, before);
#pragma unroll 1
            for (int step = begin; step < stop; ++step, ring.next()) {
                const SharedAddress x = this->x(ring.stage), y = x + TILE_BYTES;
                barrier_wait(memory.full + 8 * ring.stage, ring.parity);
                float p[SCORES], d_s[SCORES];
                multiply_rows<false>(p, a_tile, x);
                wgmma_wait<1>();  // frees the registers of the last step's left operands
                if (held) { release(held); }
                held = memory.empty + 8 * ring.stage;
                begin_d_s<true>(d_s, statistics(ring.stage), {});
                multiply_rows<true>(d_s, b_tile, y);
                wgmma_wait<1>();
                arrived(p);
                to_probabilities<true>(p, statistics(ring.stage), {}, scale_log2, step == block);
                u32 left_p[4][4], left_s[4][4];
                if constexpr (EARLY) {
#pragma unroll
                    for (int k = 0; k < 4; ++k) { round_left(left_p[k], p + 8 * k); }
                    wgmma_begin();
                    multiply_columns(d_y, left_p, y);
                    wgmma_wait<1>();
                } else {
                    arrived(p);  // compute p before the wait for d_s
                    wgmma_wait<0>();
                }
                arrived(d_s);
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    to_d_s(d_s + 8 * k, p + 8 * k);
                    round_left(left_s[k], d_s + 8 * k);
                    if constexpr (!EARLY) { round_left(left_p[k], p + 8 * k); }
                }
                wgmma_begin();
                if constexpr (!EARLY) { multiply_columns(d_y, left_p, y); }
                multiply_columns(d_x, left_s, x);
            }
            pass_by(memory, ring, behind);
        }
        wgmma_wait<0>();
        if (held) { release(held); }
    }

    // Add up dQ in d_x. A step's product for d_x runs after the next step's scores, which the
    // warpgroup waits for.
    __device__ __forceinline__ void of_queries(float (&d_x)[D / 2], Ring& ring,
                                               const RowStatistics& rows) const {
        SharedAddress held = 0, last_x = a_tile;
        u32 left_s[4][4] = {};
        pass_by(memory, ring, before);
#pragma unroll 1
        for (int step = begin; step < stop; ++step, ring.next()) {
            const SharedAddress x = this->x(ring.stage), y = x + TILE_BYTES;
            barrier_wait(memory.full + 8 * ring.stage, ring.parity);
            float p[SCORES], d_s[SCORES];
            multiply_rows<false>(p, a_tile, x);
            if (held) {
                wgmma_begin();
                multiply_columns(d_x, left_s, last_x);
            } else {
                wgmma_commit();  // an empty group, so that the waits count alike
            }
            begin_d_s<false>(d_s, 0, rows);
            multiply_rows<true>(d_s, b_tile, y);
            wgmma_wait<2>();
            arrived(p);
            to_probabilities<false>(p, 0, rows, scale_log2, step == block);
            arrived(p);  // compute p before the wait for d_s
            wgmma_wait<0>();
            arrived(d_s);
            if (held) { release(held); }
            held = memory.empty + 8 * ring.stage;
            last_x = x;
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                to_d_s(d_s + 8 * k, p + 8 * k);
                round_left(left_s[k], d_s + 8 * k);
            }
        }
        pass_by(memory, ring, behind);
        if (held) {
            wgmma_begin();
            multiply_columns(d_x, left_s, last_x);
            wgmma_wait<0>();
            release(held);
        }
    }
};

// Sums of a block of 64 keys that parts of query heads leave for the last part.
struct Parts {
    const Sizes& sizes;
    float4* sums;
    i32* taken;
    int part, block;  // block: number of the 64 keys among all sequences and heads

    __device__ __forceinline__ Parts(const Sizes& sizes, float* sums, i32* taken, const Item& item,
                                     int me)
        : sizes(sizes), sums(reinterpret_cast<float4*>(sums)), taken(taken) {
        const int head = item.to - sizes.num_heads;
        const int before = item.head - head * sizes.group();
        part = (u32)before / sizes.part_heads;
        block = (item.batch * sizes.num_kv_heads + head) * sizes.blocks() + item.block + me;
    }
    __device__ __forceinline__ bool last() const { return part == sizes.parts() - 1; }
    __device__ __forceinline__ float4* place(int of_part) const {
        const i64 blocks = (i64)sizes.batches * sizes.num_kv_heads * sizes.blocks();
        return sums + (of_part * blocks + block) * (2 * ROWS * D / 4) + this_thread();
    }

    __device__ __forceinline__ void leave(const float (&d_x)[D / 2], const float (&d_y)[D / 2]) {
        float4* const to = place(part);
#pragma unroll
        for (int i = 0; i < D / 8; ++i) {
            to[128 * i] = {d_x[4 * i], d_x[4 * i + 1], d_x[4 * i + 2], d_x[4 * i + 3]};
            to[128 * (D / 8 + i)] = {d_y[4 * i], d_y[4 * i + 1], d_y[4 * i + 2], d_y[4 * i + 3]};
        }
        __threadfence();
        __syncwarp();
        if (threadIdx.x % 32 == 0) { atomicAdd(taken + 1 + block, 1); }
    }

    // Add the sums of all parts in front of this one.
    __device__ __forceinline__ void add(float (&d_x)[D / 2], float (&d_y)[D / 2]) {
        wait_for_count(taken + 1 + block, WARPS / 2 * part);
#pragma unroll 1
        for (int other = 0; other < part; ++other) {
            const float4* const from = place(other);
#pragma unroll
            for (int i = 0; i < D / 8; ++i) {
                add_to(d_x + 4 * i, __ldcg(from + 128 * i));
                add_to(d_y + 4 * i, __ldcg(from + 128 * (D / 8 + i)));
            }
        }
    }

    static __device__ __forceinline__ void add_to(float* sum, float4 x) {
        sum[0] += x.x, sum[1] += x.y, sum[2] += x.z, sum[3] += x.w;
    }
};

// Warpgroup `me`'s part of a tile.
template <bool IS_KEYS>
__device__ __forceinline__ void compute(Sizes sizes, const void* shared, int me, u32 turn,
                                        Ring& ring, const float* statistics,
                                        const TensorMap* d_qkv, float* sums, i32* taken) {
    forget(me);
    forget(sizes.seq_len);
    const Memory memory(shared);
    const SharedAddress own = memory.own + (turn & 1) * OWN_BYTES + me * TILE_BYTES;
    const Item item = item_at(memory, turn);
    const int block = item.block + me;
    const bool present = block < sizes.blocks();
    float d_x[D / 2], d_y[IS_KEYS ? D / 2 : 1];
#pragma unroll
    for (float& x : d_x) { x = 0.0f; }
#pragma unroll
    for (float& x : d_y) { x = 0.0f; }
    RowStatistics rows = {};
    if (!IS_KEYS && present) {
        const u32 thread = this_thread();
        const float* const of_row =
            statistics + thread / 32 * 16 + thread % 32 / 4 +
            ((i64)(item.batch * sizes.num_heads + item.head) * sizes.blocks() + block) * (2 * ROWS);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            rows.lse[r] = __ldg(of_row + 8 * r);
            rows.delta[r] = __ldg(of_row + 8 * r + ROWS);
        }
    }
    {
        // Steps in which these rows meet rows of the other side.
        const int begin = IS_KEYS ? block : item.first;
        const int stop = IS_KEYS ? item.end : present ? min(block + 1, item.end) : item.first;
        const Walk walk{memory, own,  own + 2 * TILE_BYTES, block, begin,
                        stop,   begin - item.first, item.end - stop, item.heads, sizes.scale_log2};
        if constexpr (IS_KEYS) {
            walk.of_keys(d_x, d_y, ring);
        } else {
            walk.of_queries(d_x, ring, rows);
        }
    }
    arrived(d_x);
    if constexpr (IS_KEYS) { arrived(d_y); }
    release(memory.read + 8 * me);  // wait until all warps have read the warpgroup's own rows
    barrier_wait(memory.read + 8 * me, turn & 1);
    bool leaves = false;
    if (IS_KEYS && present && sizes.part_heads < sizes.group()) {
        Parts parts(sizes, sums, taken, item_at(memory, turn), me);
        leaves = !parts.last();
        if constexpr (IS_KEYS) {
            if (leaves) {
                parts.leave(d_x, d_y);
            } else {
                parts.add(d_x, d_y);
            }
        }
    }
    if (present && !leaves) {
        const Item item = item_at(memory, turn);  // computed again: no registers could hold it
        const int row = item.batch * sizes.seq_len + (item.block + me) * ROWS;
        store_rows(d_qkv, item.to * D, row, d_x, sizes.scale, own);
        if constexpr (IS_KEYS) {
            const int column = (item.to + sizes.num_kv_heads) * D;
            store_rows(d_qkv, column, row, d_y, 1.0f, own + 2 * TILE_BYTES);
        }
        if (threadIdx.x % 32 == 0) { stores_have_read(); }
    }
    release(memory.own_empty + 8 * (turn & 1));
}

extern "C" __global__ void __launch_bounds__(384, 1)
attention_gradient(const __grid_constant__ TensorMap d_qkv, const __grid_constant__ TensorMap d_out,
                   const float* __restrict__ statistics, const __grid_constant__ TensorMap qkv,
                   i32* taken, float* sums, i32 part_heads, i32 batches, i32 seq_len, i32 num_heads,
                   i32 num_kv_heads, float scale, float scale_log2) {
    extern __shared__ char shared[];
    const Sizes sizes{seq_len, num_heads, num_kv_heads, batches, part_heads, scale, scale_log2};
    const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
    if (threadIdx.x == 0) {
        const Memory memory(shared);
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(memory.full + 8 * i, 1);
            barrier_init(memory.empty + 8 * i, WARPS);
        }
        for (int i = 0; i < 2; ++i) {
            barrier_init(memory.own_full + 8 * i, 1);
            barrier_init(memory.own_empty + 8 * i, WARPS + 1);  // the warps, and load_steps
            barrier_init(memory.read + 8 * i, WARPS / 2);
        }
        barriers_ready();
    }
    __syncthreads();
    if (warpgroup == 0) {
        give_registers<LOADER_REGISTERS>();
        if (threadIdx.x == 0) { load_own(shared, sizes, taken, &qkv, &d_out); }
        if (threadIdx.x == 32) { load_steps(shared, sizes, statistics, &qkv, &d_out); }
    } else {
        take_registers<252 - LOADER_REGISTERS / 2>();
        Ring ring(0);
#pragma unroll 1
        for (u32 turn = 0;; ++turn) {
            const Memory memory(shared);
            barrier_wait(memory.own_full + 8 * (turn & 1), turn >> 1 & 1);
            const int kind = item_at(memory, turn).kind;
            if (kind == NOTHING) { break; }
            if (kind == KEYS) {
                compute<true>(sizes, shared, warpgroup - 1, turn, ring, statistics, &d_qkv, sums,
                              taken);
            } else {
                compute<false>(sizes, shared, warpgroup - 1, turn, ring, statistics, &d_qkv, sums,
                               taken);
            }
        }
        if (threadIdx.x % 32 == 0) { stores_are_done(); }
    }
}

extern "C" __global__ void __launch_bounds__(256)
attention_statistics(float* __restrict__ statistics, i32* __restrict__ taken,
                     const bf16* __restrict__ d_out, const bf16* __restrict__ out,
                     const float* __restrict__ lse, i32 counts, i32 seq_len, i32 num_heads) {
    constexpr int VECTORS = D / 8 / DELTA_LANES;
    const int row = (blockIdx.x * 256 + threadIdx.x) / DELTA_LANES;  // row of (seq_len, Hq)
    const int lane = threadIdx.x % DELTA_LANES, rows = seq_len * num_heads;
    const i64 first_row = (i64)blockIdx.y * rows;  // of the sequence
    const i64 thread = ((i64)blockIdx.y * gridDim.x + blockIdx.x) * 256 + threadIdx.x;
    if (thread < counts) { taken[thread] = 0; }
    float sum = 0.0f;
    if (row < rows) {
#pragma unroll
        for (int n = 0; n < VECTORS; ++n) {
            const i64 at = (first_row + row) * D + (n * DELTA_LANES + lane) * 8;
            const Vec<bf16> a = load_vec(d_out + at), b = load_vec(out + at);
#pragma unroll
            for (int i = 0; i < 8; ++i) { sum = fmaf(to_f32(a[i]), to_f32(b[i]), sum); }
        }
    }
#pragma unroll
    for (int mask = DELTA_LANES / 2; mask > 0; mask >>= 1) {
        sum += __shfl_xor_sync(0xFFFFFFFFu, sum, mask);
    }
    if (row < rows && lane == 0) {
        const int token = row / num_heads, head = row % num_heads;
        const i64 of_head = first_row + (i64)head * seq_len;
        float* const to = statistics + (of_head + token / ROWS * ROWS) * 2 + token % ROWS;
        to[0] = lse[of_head + token] * LOG2E;
        to[ROWS] = -sum;
    }
}
