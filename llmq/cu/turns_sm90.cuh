// turns_sm90.cuh -- matrix products for Hopper whose tiles are stored by the warps that multiply them.
//
// Three warpgroups: one thread of the first loads, the two others take tiles in turns ("ping-pong"),
// so that one multiplies while the other one stores. Of tiles wider than 192 columns a thread could not
// hold its part: the two take 64 rows each.
//
// Tiles, their ring and their order are those of product_sm90.cuh, and so is what is said there of
// names and of TILE_COLUMNS.
#pragma once
#include "product_sm90.cuh"

constexpr bool IN_TURNS = TILE_COLUMNS == 192;
constexpr int HALVES_OF_TILE = IN_TURNS ? 2 : 1;  // that a warpgroup has, of 64 rows
constexpr int CHUNK_BYTES = 16 * LINE;            // 16 rows of 64 BF16
using Sums = float[HALVES_OF_TILE][SUMS];         // of a thread, as ptx.cuh has those of 64 rows

// Left, Right: formats of left and right. RIGHT_OUTSIDE: right is BF16 (K, N). TAIL_RANK: columns of
// BF16 h and tail, which are the last tiles of the sum; 0: there are none. TAIL_OUTSIDE: tail is
// (TAIL_RANK, N). WARP_BYTES: of shared memory, of each warp that multiplies. HEAD: as load_pair has
// it, of right and tail.
template <class Left, class Right, bool RIGHT_OUTSIDE, int TAIL_RANK, bool TAIL_OUTSIDE,
          int STAGES, int WARP_BYTES, int HEAD = 0>
struct TurnsProduct {
    static constexpr int LOADER_REGISTERS = IN_TURNS ? 24 : 40;  // of a thread
    static constexpr int CONSUMERS = 2, WARPS = 4 * CONSUMERS, THREADS = 128 * (1 + CONSUMERS);
    static constexpr int TAKERS = IN_TURNS ? CONSUMERS : 1;          // of tiles, one after the other
    static constexpr int TAILS = (TAIL_RANK + TAIL_K - 1) / TAIL_K;  // pairs of tiles of h and tail
    static constexpr bool SCALED = sizeof(Left) == 1;
    static constexpr int STEP_K = LINE / sizeof(Left);

    // stages, chunks: 1024-byte aligned, chunks: all WARP_BYTES. The others are barriers: two of each
    // stage, one of each warpgroup and warp that multiplies, the latter for one arrival.
    SharedAddress stages, chunks, full, empty, turn, arrived;
    int steps;  // of K, without tails

    __device__ __forceinline__ TurnsProduct(void* shared, int K) : steps((K + STEP_K - 1) / STEP_K) {
        stages = (shared_address(shared) + 1023) & ~(SharedAddress)1023;
        chunks = stages + STAGES * STAGE_BYTES;
        full = chunks + WARPS * WARP_BYTES;
        empty = full + 8 * STAGES;
        turn = empty + 8 * STAGES;
        arrived = turn + 8 * CONSUMERS;
    }

    // By one thread of the block; all threads of the cluster meet after that.
    __device__ __forceinline__ void init() const {
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(full + 8 * i, 1);
            barrier_init(empty + 8 * i, 2 * CONSUMERS / TAKERS);  // those of both blocks
        }
        for (int i = 0; i < CONSUMERS; ++i) { barrier_init(turn + 8 * i, 128); }
        for (int i = 0; i < WARPS; ++i) { barrier_init(arrived + 8 * i, 1); }
        barriers_ready();
    }

    // The first warpgroup. heads: of HEAD columns, and tile.column then counts pairs.
    __device__ __forceinline__ void load_tiles(const Work& work, const TensorMap* left,
                                               const TensorMap* right, const TensorMap* h,
                                               const TensorMap* tail, int heads = 1) const {
        give_registers<LOADER_REGISTERS>();
        if (threadIdx.x != 0) { return; }
        Ring<STAGES> ring(STAGES);  // the first wait for an empty stage is over at once
        for (int t = work.cluster; t < work.tiles; t += work.clusters) {
            const Tile tile(t, work);
            const HeadBox<HEAD> box(HEAD > 0 ? tile.column / PAIRS : 0, heads);
#pragma unroll 1
            for (int k = 0; k < steps + TAILS; ++k, ring.next()) {
                const SharedAddress stage = stages + ring.stage * STAGE_BYTES;
                const SharedAddress arrived = full + 8 * ring.stage;
                barrier_wait(empty + 8 * ring.stage, ring.parity);
                if (k < steps) {
                    load_pair<RIGHT_OUTSIDE, HEAD>(stage, arrived, left, right, k * STEP_K, tile,
                                                   work.rank, TILE_COLUMNS / 2, box, heads);
                } else {
                    load_pair<TAIL_OUTSIDE, HEAD>(stage, arrived, h, tail, (k - steps) * TAIL_K,
                                                  tile, work.rank, TILE_COLUMNS / 2, box, heads);
                }
            }
        }
    }

    // Warpgroup `me`, 0 or 1, of the two that multiply. scale: of the sum without tails. Of each tile
    // store.begin(tile, row), before it is multiplied, and then store(tile, d, row, chunks, arrived):
    // of d, Sums, 16 rows of the tile from `row` on are the warp's, of each half of the warpgroup's
    // rows; chunks, arrived: the warp's.
    template <class Store>
    __device__ __forceinline__ void multiply_tiles(const Work& work, int me, float scale,
                                                   Store& store) const {
        take_registers<252 - LOADER_REGISTERS / 2>();
        const int thread = threadIdx.x % 128, warp = me * 4 + thread / 32;
        const int taker = IN_TURNS ? me : 0, first_row = IN_TURNS ? 0 : 64 * me;
        const SharedAddress chunk = chunks + warp * WARP_BYTES;
        // n: of the cluster's tiles. What can be had of it takes no register meanwhile.
        for (int n = taker, t; t = work.cluster + n * work.clusters, t < work.tiles; n += TAKERS) {
            const Tile tile(t, work);
            const int row = first_row + thread / 32 * 16;
            store.begin(tile, row);
            Sums d;
            Ring<STAGES> ring(n * (steps + TAILS));
            SharedAddress before = empty;
            if constexpr (IN_TURNS) {  // else a wait may be for a later phase; the first may begin
                barrier_wait(turn + 8 * me, me ^ 1 ^ n / CONSUMERS & 1);
            }
#pragma unroll 1
            for (int k = 0; k < steps; ++k, ring.next()) {
                barrier_wait(full + 8 * ring.stage, ring.parity);
                multiply<Left, Right, RIGHT_OUTSIDE>(d, stages + ring.stage * STAGE_BYTES, first_row,
                                                     SLICES, k);
                wgmma_wait<1>();
                if (k > 0 && thread < 2) { barrier_arrive_at(before, thread); }
                before = empty + 8 * ring.stage;
            }
            Ring<STAGES> last = ring;
#pragma unroll
            for (int k = 0; k < TAILS; ++k, last.next()) {
                barrier_wait(full + 8 * last.stage, last.parity);
            }
            if constexpr (IN_TURNS) {
                barrier_arrive(turn + 8 * (me ^ 1));  // the other one multiplies while this one scales
            }
            wgmma_wait<0>();
            if (thread < 2) { barrier_arrive_at(before, thread); }
            if (SCALED) {
#pragma unroll
                for (int i = 0; i < HALVES_OF_TILE * SUMS; ++i) { d[i / SUMS][i % SUMS] *= scale; }
            }
#pragma unroll
            for (int k = 0; k < TAILS; ++k, ring.next()) {
                const int slices = (TAIL_RANK - k * TAIL_K + 15) / 16;
                multiply<bf16, bf16, TAIL_OUTSIDE>(d, stages + ring.stage * STAGE_BYTES, first_row,
                                                   slices, 1);
                wgmma_wait<0>();
                if (thread < 2) { barrier_arrive_at(empty + 8 * ring.stage, thread); }
            }
            store(tile, d, row, chunk, arrived + 8 * warp);
        }
    }
};
