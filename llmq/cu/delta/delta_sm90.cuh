// delta_sm90.cuh -- scans of the gated delta rule on Hopper: delta_rule.cu.
//
// Chunks wait for each other, so that the time of a chunk in one block bounds a scan. A block has
// 64 of a head's 128 columns of v. One warpgroup of the block only multiplies, with the state in
// registers, F32, transposed: the rounded state is the left factor of the next product. A product
// runs while the warps prepare the factors of another. One thread loads tiles (TMA) some chunks
// ahead; a warpgroup's product reads a tile once for four warps. Each of a head's two blocks loads
// half of their common tiles for both. Another thread stores results.
#pragma once
#include "delta/delta_chunk.cuh"

constexpr int CLUSTER = 2, CHAIN_WARPS = 4, CHAIN_THREADS = 192;
constexpr int CHANNELS = DK % 64 ? 64 : DK;  // channels of keys; a placeholder if DK % 64 != 0
constexpr int CHANNEL_TILES = CHANNELS / 16, CHANNEL_BOXES = CHANNELS / 64;
constexpr int KNOWN_BYTES = (FROM_STATE + 1) * CHUNK * 4;  // a chunk's factors

// Tiles of 64 rows as load_box writes them (ptx.cuh): columns lie in boxes of 64.
struct Boxes {
    static constexpr int LINE = 128, BYTES = CHUNK * LINE;
    SharedAddress at;
    __device__ __forceinline__ SharedAddress address(int row, int column) const {
        return at + column / 64 * BYTES + row * LINE + ((column / 8 % 8 ^ row % 8) << 4) +
               column % 8 * 2;
    }
};

// Starts sums = (ADD: +=) a[0 .. K - 1] (16 rows of each warp) times a tile, whose rows are the
// inner dimension, or with TURNED the columns. sums must not be touched before finish_product.
template <bool TURNED, bool ADD, int K, int N>
__device__ __forceinline__ void start_product(Sums (&sums)[N], const Left<bf16> (&a)[K],
                                              const Boxes& tile) {
    auto& flat = reinterpret_cast<float (&)[8 * N]>(sums);
    wgmma_begin();
#pragma unroll
    for (int k = 0; k < K; ++k) {
        const Descriptor b = TURNED ? k_inside(tile.at) + (k / 4 * (Boxes::BYTES / 16) + k % 4 * 2)
                                    : k_outside(tile.at, Boxes::BYTES) + k * Boxes::LINE;
        wgmma_left<16 * N, !TURNED>(flat, a[k].r, b, ADD || k > 0);
    }
    wgmma_commit();
}
// Wait until at most PENDING later products are under way.
template <int PENDING, int N> __device__ __forceinline__ void finish_product(Sums (&sums)[N]) {
    wgmma_wait<PENDING>();
    arrived(reinterpret_cast<float (&)[8 * N]>(sums));
}
template <int N>
__device__ __forceinline__ void round_left(Left<bf16> (&a)[N], const Sums (&sums)[N]) {
#pragma unroll
    for (int n = 0; n < N; ++n) { a[n] = to_left<bf16>(sums[n]); }
}

// Write each warp's 16 rows to a tile, as rows or with TURNED as columns.
template <bool TURNED, int N>
__device__ __forceinline__ void put_left(const Boxes& to, const Left<bf16> (&a)[N]) {
    const int lane = lane_id(), own = warp_id() * 16;
#pragma unroll
    for (int n = 0; n < N; ++n) {
        const u32(&r)[4] = a[n].r;
        if constexpr (TURNED) {
            stmatrix_x4_trans(to.address(16 * n + lane / 16 * 8 + lane % 8, own + lane / 8 % 2 * 8),
                              r[0], r[1], r[2], r[3]);
        } else {
            stmatrix_x4(to.address(own + lane % 16, 16 * n + lane / 16 * 8), r[0], r[1], r[2], r[3]);
        }
    }
}

enum Way { OUT, STATES, BACKWARD };  // a scan's results: out; states and changes; their gradients

// A block of a scan. own: u, or d_out if BACKWARD. results: out, changes, or gradients of changes.
// all: states or their gradients. carried: the state in front, or the gradient of the state behind;
// F32 (DK, DV), or null.
template <Way WAY> struct Walk {
    // Boxes of a stage: one box of `own`, then boxes that both blocks use.
    static constexpr int KEYS = 1, W = KEYS + CHANNEL_BOXES, QUERIES = W + CHANNEL_BOXES;
    static constexpr int SCORES = QUERIES + CHANNEL_BOXES;
    static constexpr int BOXES = WAY == STATES ? QUERIES : SCORES + 1, STAGES = WAY == STATES ? 4 : 3;
    static constexpr int STAGE_BYTES = BOXES * Boxes::BYTES + KNOWN_BYTES;
    static constexpr int RESULT_BOXES = WAY == OUT ? 1 : 1 + CHANNEL_BOXES;

    const Place& at;
    const TensorMap *results, *all, *own, *qkv, *w, *scores;
    const float* factors;
    float* carried;
    char* memory;  // stages, results, then barriers

    __device__ __forceinline__ int chunk(int turn) const {
        return WAY == BACKWARD ? at.chunks - 1 - turn : turn;
    }
    __device__ __forceinline__ char* stage(int s) const { return memory + s * STAGE_BYTES; }
    __device__ __forceinline__ SharedAddress result(int box) const {
        return shared_address(memory) + STAGES * STAGE_BYTES + box * Boxes::BYTES;
    }
    __device__ __forceinline__ SharedAddress full(int s) const { return result(RESULT_BOXES) + 8 * s; }
    __device__ __forceinline__ SharedAddress empty(int s) const { return full(STAGES + s); }
    // Barriers of `results` (i = 0) and of `all` (i = 1).
    __device__ __forceinline__ SharedAddress ready(int i) const { return full(2 * STAGES + i); }
    __device__ __forceinline__ SharedAddress taken(int i) const { return ready(2 + i); }

    __device__ __forceinline__ void init() const {
        for (int s = 0; s < STAGES; ++s) {
            barrier_init(full(s), 1);
            barrier_init(empty(s), CLUSTER * CHAIN_WARPS);
        }
        for (int i = 0; i < 2; ++i) {
            barrier_init(ready(i), CHAIN_WARPS);
            barrier_init(taken(i), 1);
        }
        barriers_ready();
    }

    // Run by the thread that loads tiles.
    __device__ __forceinline__ void load() const {
        const int rank = blockIdx.x;
        for (int turn = 0; turn < at.chunks; ++turn) {
            const int s = turn % STAGES, c = chunk(turn);
            const SharedAddress to = shared_address(stage(s)), barrier = full(s);
            const int token = at.token(c * CHUNK), row = at.of_chunk(c) * CHUNK;
            const int key = (at.key_heads + at.key_head) * DK, query = at.key_head * DK;
            barrier_wait(empty(s), turn / STAGES % 2 ^ 1);
            barrier_expect(barrier, STAGE_BYTES);
            if (WAY == BACKWARD) {
                load_box(to, own, at.head * DV + rank * 64, token, barrier);
            } else {
                load_box(to, own, rank * 64, row, barrier);
            }
            const auto share = [&](int box, const TensorMap* map, int x, int y) {
                constexpr int ROWS = CHUNK / CLUSTER;
                load_box_for(to + box * Boxes::BYTES + rank * ROWS * Boxes::LINE, map, x,
                             y + rank * ROWS, barrier, (1 << CLUSTER) - 1);
            };
#pragma unroll
            for (int i = 0; i < CHANNEL_BOXES; ++i) {
                share(KEYS + i, qkv, key + 64 * i, token);
                share(W + i, w, 64 * i, row);
                if (WAY != STATES) { share(QUERIES + i, qkv, query + 64 * i, token); }
            }
            if (WAY != STATES) { share(SCORES, scores, 0, row); }
            load_bytes(to + BOXES * Boxes::BYTES, factors + of_factors(at, c), KNOWN_BYTES, barrier);
        }
    }

    // Run by the thread that stores results.
    __device__ __forceinline__ void store() const {
        const int column = blockIdx.x * 64;
        for (int turn = 0; turn < at.chunks; ++turn) {
            const int c = chunk(turn), of_chunk = at.of_chunk(c);
            if (WAY != OUT) {
                barrier_wait(ready(1), turn % 2);
#pragma unroll
                for (int i = 0; i < CHANNEL_BOXES; ++i) {
                    store_box(all, 64 * i, of_chunk * DV + column, result(1 + i));
                }
                stores_have_read();
                barrier_arrive(taken(1));
            }
            barrier_wait(ready(0), turn % 2);
            if (WAY == OUT) {
                store_box(results, at.head * DV + column, at.token(c * CHUNK), result(0));
            } else {
                store_box(results, column, of_chunk * CHUNK, result(0));
            }
            stores_have_read();
            barrier_arrive(taken(0));
        }
        stores_are_done();
    }

    // The warpgroup runs this and all functions below. Hand a turn's results to the storing thread.
    template <bool TURNED, int N>
    __device__ __forceinline__ void give(int i, int turn, const Left<bf16> (&a)[N]) const {
        barrier_wait(taken(i), turn % 2 ^ 1);
        put_left<TURNED>(Boxes{result(i)}, a);
        stores_begin();
        __syncwarp();
        if (lane_id() == 0) { barrier_arrive(ready(i)); }
    }
    // The warp has read this stage.
    __device__ __forceinline__ void release(int s) const {
        __syncwarp();
        if (lane_id() < CLUSTER) { barrier_arrive_at(empty(s), lane_id()); }
    }
    template <class Use> __device__ __forceinline__ void each(Sums (&S)[CHANNEL_TILES], Use use) const {
#pragma unroll
        for (int n = 0; n < CHANNEL_TILES; ++n) { each_place(S[n], n, use); }
    }
    __device__ __forceinline__ void multiply_chunks() const {
        Sums S[CHANNEL_TILES];
        each(S, [&](float& x, int place) { x = carried ? carried[place] : 0.0f; });
        if constexpr (WAY == BACKWARD) {
            backward(S);
        } else {
            forward(S);
        }
        if (carried) {
            each(S, [&](float& x, int place) { carried[place] = x; });
        }
    }

    __device__ __forceinline__ void forward(Sums (&S)[CHANNEL_TILES]) const {
        constexpr int MORE = WAY == OUT;  // products that may run while the warps wait for a change
        Sums read[4];
        Left<bf16> rounded[4];
        int last = 0;  // the last turn's stage
        for (int turn = 0; turn < at.chunks; ++turn) {
            const int s = turn % STAGES;
            char* const here = stage(s);
            const auto tile = [&](int box) { return Boxes{shared_address(here) + box * Boxes::BYTES}; };
            const auto* const known = reinterpret_cast<const float*>(here + BOXES * Boxes::BYTES);
            Left<bf16> a[CHANNEL_TILES], changes[4], to_keys[4];
            round_left(a, S);
            barrier_wait(full(s), turn / STAGES % 2);
            Sums change[4];
#pragma unroll
            for (int n = 0; n < 4; ++n) {
                to_sums(change[n], left<true>(tile(0), warp_id() * 16, 16 * n), -1.0f);
            }
            start_product<true, true>(change, a, tile(W));
            if constexpr (WAY == OUT) {
                if (turn) {
                    finish_product<1>(read);
                    release(last);
                    round_left(rounded, read);
                    give<true>(0, turn - 1, rounded);
                }
                start_product<true, false>(read, a, tile(QUERIES));
                last = s;
            } else {
                give<false>(1, turn, a);
            }
            multiply_by(S, known[FROM_STATE * CHUNK + CHUNK - 1]);
            finish_product<MORE>(change);
            multiply_by(change, -1.0f);
            round_left(changes, change);
#pragma unroll
            for (int n = 0; n < 4; ++n) { Tokens{known + TO_KEY * CHUNK}.scale(change[n], 16 * n); }
            round_left(to_keys, change);
            start_product<false, true>(S, to_keys, tile(KEYS));
            if constexpr (WAY == OUT) {
                finish_product<1>(read);
#pragma unroll
                for (int n = 0; n < 4; ++n) {
                    Tokens{known + FROM_QUERY * CHUNK}.scale(read[n], 16 * n);
                }
                start_product<true, true>(read, changes, tile(SCORES));
            } else {
                give<true>(0, turn, changes);
            }
            finish_product<MORE>(S);
            if (WAY != OUT) { release(s); }
        }
        if constexpr (WAY == OUT) {
            finish_product<0>(read);
            release(last);
            round_left(rounded, read);
            give<true>(0, at.chunks - 1, rounded);
        }
    }

    __device__ __forceinline__ void backward(Sums (&S)[CHANNEL_TILES]) const {
        for (int turn = 0; turn < at.chunks; ++turn) {
            const int s = turn % STAGES;
            char* const here = stage(s);
            const auto tile = [&](int box) { return Boxes{shared_address(here) + box * Boxes::BYTES}; };
            const auto* const known = reinterpret_cast<const float*>(here + BOXES * Boxes::BYTES);
            Left<bf16> a[CHANNEL_TILES], d_o[4], of_queries[4], rounded[4], minus[4];
            round_left(a, S);
            barrier_wait(full(s), turn / STAGES % 2);
            Sums d_change[4];
            start_product<true, false>(d_change, a, tile(KEYS));
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                d_o[k] = left<true>(tile(0), warp_id() * 16, 16 * k);
                of_queries[k] = Tokens{known + FROM_QUERY * CHUNK}.scaled(d_o[k], 16 * k);
            }
            multiply_by(S, known[FROM_STATE * CHUNK + CHUNK - 1]);
            start_product<false, true>(S, of_queries, tile(QUERIES));
            give<false>(1, turn, a);
            finish_product<1>(d_change);
#pragma unroll
            for (int n = 0; n < 4; ++n) {
                Tokens{known + TO_KEY * CHUNK}.scale(d_change[n], 16 * n);
            }
            start_product<false, true>(d_change, d_o, tile(SCORES));
            finish_product<0>(d_change);
#pragma unroll
            for (int n = 0; n < 4; ++n) {
                rounded[n] = to_left<bf16>(d_change[n]);
                minus[n] = negative(rounded[n]);
            }
            start_product<false, true>(S, minus, tile(W));
            give<true>(0, turn, rounded);
            finish_product<0>(S);
            release(s);
        }
    }

    // All threads of the block call this function.
    __device__ __forceinline__ void run() const {
        if (threadIdx.x == 0) { init(); }
        __syncthreads();
        cluster_arrive();
        cluster_wait();
        const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
        if (warp < CHAIN_WARPS) {
            multiply_chunks();
        } else if (lane_id() == 0) {
            if (warp == CHAIN_WARPS) {
                load();
            } else {
                store();
            }
        }
        __syncwarp();
        cluster_arrive();  // wait: the other block may still arrive at this block's barriers
        cluster_wait();
    }
};

__device__ __forceinline__ char* aligned_memory(void* memory) {
    return static_cast<char*>(memory) + (1024 - shared_address(memory) % 1024) % 1024;
}

// The body of a kernel. Tensors as in Walk. state: all heads' states, or null.
template <Way WAY>
__device__ __forceinline__ void walk(const TensorMap* results, const TensorMap* all,
                                     const TensorMap* own, const TensorMap* qkv, const TensorMap* w,
                                     const TensorMap* scores, const float* factors, float* state,
                                     int seq_len, int key_heads, int value_heads) {
    extern __shared__ uint4 memory[];
    const Place at(blockIdx.y, seq_len, key_heads, value_heads);
    float* const carried = state ? state + at.of_head() * DK * DV : nullptr;
    Walk<WAY>{at, results, all, own, qkv, w, scores, factors, carried, aligned_memory(memory)}.run();
}
