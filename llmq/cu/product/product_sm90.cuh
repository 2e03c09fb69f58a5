// product_sm90.cuh -- code that the matrix products for Hopper share: tiles, their ring, the main
// loop.
//
// A block computes tiles of 128 rows and TILE_COLUMNS columns, left (M, K) times right (N, K), or
// (K, N) with K outside. The two blocks of a cluster have neighbouring tiles of `left` and the same
// tile of `right`; each block loads a half of the tile of `right` into both. Grids are persistent.
// Tiles go through one group of tile columns after another, so that the group's part of `right`
// stays in L2. One thread loads pairs of tiles by TMA into a ring of stages.
//
// Included after the type variables and constants of a launch are defined: no name in here may be
// one of those. TILE_COLUMNS, 192 or 224, is a constant of the file that includes it.
#pragma once
#include "product/smem_tiles.cuh"

#ifndef GROUPED
#define GROUPED 0
#endif
#ifndef HAS_ALPHA
#define HAS_ALPHA 0
#endif

// LINE is also the bytes of K in a tile, BOX the rows of a tile (K, N).
constexpr int TILE_BOXES = (TILE_COLUMNS + BOX - 1) / BOX, SUMS = TILE_COLUMNS / 2;  // of a thread
constexpr int LEFT_BYTES = TILE_ROWS * LINE, RIGHT_BYTES = TILE_BOXES * BOX * LINE;
constexpr int STAGE_BYTES = LEFT_BYTES + RIGHT_BYTES;
constexpr int RESIDENT = 5 << 20;  // most bytes of `right` in a group of tile columns,
constexpr int NARROWEST = 8;       // but a group has at least so many tile columns
constexpr int SLICES = 4;          // products of a tile, each over 32 bytes of K
constexpr int TAIL_K = 64;         // K of a tile of h or tail (adapters): a line of BF16

// A place in the ring of stages. parity: parity of the phase of the stage's barrier to wait for.
template <int STAGES> struct Place {
    u32 stage, parity;
    __device__ __forceinline__ Place(u32 steps) : stage(steps % STAGES), parity(steps / STAGES & 1) {}
    __device__ __forceinline__ void next() {
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
};

#if GROUPED
#include "product/grouped_sm90.cuh"
#else
// All tiles of a product, and this cluster's share. width: columns from tile to tile. depth: bytes
// of K.
struct Work {
    int pairs, columns, tiles, width, group, cluster, clusters;
    u32 rank;
    __device__ __forceinline__ Work(int rows, int all_columns, int width, int depth)
        : pairs((rows + 2 * TILE_ROWS - 1) / (2 * TILE_ROWS)),
          columns((all_columns + width - 1) / width),
          tiles(pairs * columns),
          width(width),
          cluster(blockIdx.x / 2),
          clusters(gridDim.x / 2),
          rank(cluster_rank()) {
        const int most = max(NARROWEST, RESIDENT / (TILE_COLUMNS * depth));
        const int groups = (columns + most - 1) / most;
        group = (columns + groups - 1) / groups;  // all groups are about equally wide
    }
};

// The place of tile t. The cluster's second block has the rows below the first block's.
struct Tile {
    static constexpr int right = 0, tail = 0;  // rows where its matrices begin
    int row, column;
    __device__ __forceinline__ Tile(int t, const Work& work) {
        const int first = t / (work.group * work.pairs) * work.group;
        const int wide = min(work.group, work.columns - first), rest = t - first * work.pairs;
        row = (rest / wide * 2 + work.rank) * TILE_ROWS;
        column = (first + rest % wide) * work.width;
    }
};
#endif

#if GROUPED == 1
// Like load_pair, for blocks side by side: loads half of the tile of `left` for both blocks, and
// this block's tile of `right`.
template <bool K_OUTSIDE>
__device__ __forceinline__ void load_beside(SharedAddress stage, SharedAddress arrived,
                                            const TensorMap* left, const TensorMap* right, int k,
                                            const Tile& tile, int matrix, u32 rank, int apart) {
    load_box_for(stage + rank * (LEFT_BYTES / 2), left, k, tile.row + rank * (TILE_ROWS / 2), arrived,
                 3);
    const SharedAddress to = stage + LEFT_BYTES;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        if constexpr (K_OUTSIDE) {
#pragma unroll
            for (int c = 0; c < TILE_BOXES; ++c) {
                load_box(to + c * BOX * LINE + half * (BOX / 2 * LINE), right, tile.column + c * BOX,
                         matrix + k + half * (BOX / 2), arrived);
            }
        } else {
            load_box(to + half * (TILE_COLUMNS / 2 * LINE), right, k,
                     matrix + tile.column + half * apart, arrived);
        }
    }
}
#endif

// Starts the copies of one pair of tiles: this block's tile of `left`, and this block's half of the
// tile of `right`, for both blocks. matrix: the row of `right` where the matrix begins. apart: with
// K inside, rows of `right` from the first block's half to the second block's. With K outside the
// last box may have columns beyond the tile, which are not used.
template <bool K_OUTSIDE>
__device__ __forceinline__ void load_pair(SharedAddress stage, SharedAddress arrived,
                                          const TensorMap* left, const TensorMap* right, int k,
                                          const Tile& tile, int matrix, u32 rank, int apart) {
    constexpr int HALF_BYTES = TILE_COLUMNS / 2 * LINE;
    barrier_expect(arrived, LEFT_BYTES + (K_OUTSIDE ? RIGHT_BYTES : 2 * HALF_BYTES));
#if GROUPED == 1
    if (tile.beside) {
        load_beside<K_OUTSIDE>(stage, arrived, left, right, k, tile, matrix, rank, apart);
        return;
    }
#endif
    if constexpr (GROUPED == 2) {  // K is outside of both
#pragma unroll
        for (int c = 0; c < TILE_ROWS / BOX; ++c) {
            load_box(stage + c * BOX * LINE, left, tile.row + c * BOX, k, arrived);
        }
    } else if constexpr (GROUPED == 1) {
        load_box(stage, left, k, tile.row, arrived);
        load_box(stage + LEFT_BYTES / 2, left, k, tile.row + TILE_ROWS / 2, arrived);
    } else {
        load_box(stage, left, k, tile.row, arrived);
    }
    const SharedAddress to = stage + LEFT_BYTES;
    if constexpr (K_OUTSIDE) {
#pragma unroll
        for (int c = 0; c < TILE_BOXES; ++c) {
            load_box_for(to + c * BOX * LINE + rank * (BOX / 2 * LINE), right,
                         tile.column + c * BOX, matrix + k + rank * (BOX / 2), arrived, 3);
        }
    } else {
        load_box_for(to + rank * HALF_BYTES, right, k, matrix + tile.column + rank * apart,
                     arrived, 3);
    }
}

// d += the product of the first `slices` slices of a pair of tiles, as one group, for 64 * COUNT
// rows from first_row on. add: 0 if the first slice overwrites d. LEFT_OUTSIDE: `left` has K
// outside, too. COLUMNS: number of columns to multiply; the others' sums do not change.
template <class Left, class Right, bool K_OUTSIDE, bool LEFT_OUTSIDE = false,
          int COLUMNS = TILE_COLUMNS, int COUNT>
__device__ __forceinline__ void multiply(float (&d)[COUNT][SUMS], SharedAddress stage,
                                         int first_row, int slices, int add) {
    const SharedAddress own = stage + first_row * LINE;
    const Descriptor top = LEFT_OUTSIDE ? k_outside(own, BOX * LINE) : k_inside(own);
    const SharedAddress tile = stage + LEFT_BYTES;
    const Descriptor right = K_OUTSIDE ? k_outside(tile, BOX * LINE) : k_inside(tile);
    constexpr int STEP = K_OUTSIDE ? 16 * LINE / 16 : 2;  // to the next slice, in 16 bytes
    constexpr int LEFT_STEP = LEFT_OUTSIDE ? STEP : 2;
    constexpr int NEXT = 64 * LINE / 16;                  // to the next 64 rows
    wgmma_begin();
#pragma unroll
    for (int i = 0; i < SLICES; ++i) {
        if (i < slices) {
#pragma unroll
            for (int m = 0; m < COUNT; ++m) {
                wgmma<COLUMNS, Left, Right, K_OUTSIDE, LEFT_OUTSIDE>(
                    reinterpret_cast<float(&)[COLUMNS / 2]>(d[m]),
                    top + (NEXT * m + LEFT_STEP * i), right + STEP * i, add | i);
            }
        }
    }
    wgmma_commit();
}

// Operands and factors. N: number of columns of the result.
struct Operands {
    const TensorMap *left, *right, *h, *tail;
    const f32 *scale_left, *scale_right;  // scales of fp8 codes
    float alpha;
    int N;
};

// A block's stages, the thread that fills them, and the warpgroups that multiply their tiles.
//
// Left, Right: formats of left and right. RIGHT_OUTSIDE: right is BF16 (K, N). TAIL_RANK: columns of
// BF16 h and tail, the last tiles of the sum; 0: no h and tail. TAIL_OUTSIDE: tail is
// (TAIL_RANK, N).
template <class Left, class Right, bool RIGHT_OUTSIDE, int TAIL_RANK, bool TAIL_OUTSIDE, int STAGES>
struct Sm90Mainloop {
    static constexpr int TAILS = (TAIL_RANK + TAIL_K - 1) / TAIL_K;  // pairs of tiles of h and tail
    static constexpr bool CODED = sizeof(Left) == 1, SCALED = CODED || HAS_ALPHA;
    using Ring = Place<STAGES>;
    static constexpr int STEP_K = LINE / sizeof(Left);

    // stages, and results behind them, are 1024-byte aligned. full, empty: a barrier of each stage.
    // others: further barriers.
    SharedAddress stages, results, full, empty, others;
    int steps;  // steps of K, without tails

    // bytes: size of results.
    __device__ __forceinline__ Sm90Mainloop(void* shared, int K, int bytes)
        : steps((K + STEP_K - 1) / STEP_K) {
        stages = (shared_address(shared) + 1023) & ~(SharedAddress)1023;
        results = stages + STAGES * STAGE_BYTES;
        full = results + bytes;
        empty = full + 8 * STAGES;
        others = empty + 8 * STAGES;
    }

    // One thread of the block calls this. readers: number of warpgroups, of both blocks, that
    // multiply a stage's tiles.
    __device__ __forceinline__ void init(int readers) const {
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(full + 8 * i, 1);
            barrier_init(empty + 8 * i, readers);
        }
    }

    // One thread of the block calls this. apart: see load_pair.
    __device__ __forceinline__ void load(const Work& work, const Operands& from, int apart) const {
        Ring ring(STAGES);  // the first wait for an empty stage is over at once
        for (int t = work.cluster; t < work.tiles; t += work.clusters) {
            const Tile tile(t, work);
#pragma unroll 1
            for (int k = 0; k < steps + TAILS; ++k, ring.next()) {
                const SharedAddress stage = stages + ring.stage * STAGE_BYTES;
                const SharedAddress arrived = full + 8 * ring.stage;
                barrier_wait(empty + 8 * ring.stage, ring.parity);
                if (k < steps) {
                    load_pair<RIGHT_OUTSIDE>(stage, arrived, from.left, from.right, k * STEP_K,
                                             tile, tile.right, work.rank, apart);
                } else {
                    load_pair<TAIL_OUTSIDE>(stage, arrived, from.h, from.tail,
                                            (k - steps) * TAIL_K, tile, tile.tail, work.rank, apart);
                }
            }
        }
    }

    // The factor of the sum without tails.
    static __device__ __forceinline__ float scale(const Operands& of) {
        const float scale = CODED ? *of.scale_left * *of.scale_right : 1.0f;
        return HAS_ALPHA ? scale * of.alpha : scale;
    }

    // d = the sum over `count` steps, for a warpgroup's rows from first_row on. The last product
    // may still be under way: the function returns its stage's barrier without having arrived
    // there.
    template <int COUNT>
    __device__ __forceinline__ SharedAddress multiply_steps(float (&d)[COUNT][SUMS],
                                                            Ring& ring, int first_row,
                                                            int count) const {
        SharedAddress before = empty;
#pragma unroll 1
        for (int k = 0; k < count; ++k, ring.next()) {
            barrier_wait(full + 8 * ring.stage, ring.parity);
            multiply<Left, Right, RIGHT_OUTSIDE>(d, stages + ring.stage * STAGE_BYTES, first_row,
                                                 SLICES, k);
            wgmma_wait<1>();
            if (k > 0) { release(before); }
            before = empty + 8 * ring.stage;
        }
        return before;
    }

    // d += the product of the k-th tiles of h and tail.
    template <int COUNT>
    __device__ __forceinline__ void multiply_tail(float (&d)[COUNT][SUMS], const Ring& ring,
                                                  int first_row, int k) const {
        multiply<bf16, bf16, TAIL_OUTSIDE>(d, stages + ring.stage * STAGE_BYTES, first_row,
                                           (TAIL_RANK - k * TAIL_K + 15) / 16, 1);
        wgmma_wait<0>();
        release(empty + 8 * ring.stage);
    }

    // Tell both blocks that the warpgroup has read a stage.
    static __device__ __forceinline__ void release(SharedAddress barrier) {
        const u32 thread = threadIdx.x % 128;
        if (thread < 2) { barrier_arrive_at(barrier, thread); }
    }
};
