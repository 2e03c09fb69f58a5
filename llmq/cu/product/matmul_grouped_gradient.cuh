// matmul_grouped_gradient.cuh -- gradients of experts' matrices, from rows sorted by expert.
//
//   d[e] = accumulate ? round(d[e] + bf16(x)) : bf16(x)      x = a^T @ b over the rows of e, in F32
//
// The sum is rounded stochastically, by the element's random bits, as in matmul_gradient.cuh. Both
// operands have K, the rows, outside. Warpgroups work as in pingpong_sm90.cuh, but each tile has
// its own number of steps, and the last step may have rows of the next expert: in shared memory
// these rows become zeros, up to a whole slice. The last tile of a row multiplies only boxes that
// have columns.
//
// Half a tile at a time goes to shared memory, from which a short loop adds it to d while the other
// warpgroup multiplies. Unrolled over all sums, the loop would not stay in the instruction cache.
//
// Data     a: bf16 (K, M). b: bf16 (K, N). d: bf16 (experts, M, N). starts: I32 (experts + 1),
//          first row of each expert, from 0 to K. scalars: seed, step and micro_step, used with
//          accumulate.
// Cost     A cluster has 256 rows of a matrix. d is written once, and with accumulate read once;
//          about 11 instructions for each element, while the other warpgroup multiplies.
#pragma once
#include "product/pingpong_sm90.cuh"

constexpr int LINES_BYTES = TILE_BOXES * CHUNK_BYTES;  // a warp's memory: 16 rows of a tile
using Base = PingPong<Mainloop, LINES_BYTES>;

struct Product : Base {
    static constexpr int STEP_ROWS = 64, SLICE_ROWS = STEP_ROWS / SLICES;
    static constexpr int BOX_BYTES = BOX * LINE, STAGE_BOXES = 2 + TILE_BOXES;
    static_assert(IN_TURNS && LEFT_BYTES == 2 * BOX_BYTES && TAILS == 0);
    using Base::Base;

    // Like PingPong::init; `arrived` has a barrier for each warpgroup, on which all its threads
    // arrive.
    __device__ __forceinline__ void init() const {
        Mainloop::init(2);
        for (int i = 0; i < CONSUMERS; ++i) {
            barrier_init(turn + 8 * i, 128);
            barrier_init(arrived + 8 * i, 128);
        }
        barriers_ready();
    }

    template <class Store>
    __device__ __forceinline__ void run(const Work& work, const Operands& operands,
                                        const Store& store) const {
        const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
        if (warpgroup == 0) {
            give_registers<LOADER_REGISTERS>();
            if (threadIdx.x == 0) { load(work, operands); }
        } else {
            take_registers<252 - LOADER_REGISTERS / 2>();
            multiply_tiles(work, warpgroup - 1, store);
        }
    }

    __device__ __forceinline__ void load(const Work& work, const Operands& from) const {
        Ring ring(RING_STAGES);  // the first wait for an empty stage is over at once
        for (int t = work.cluster; t < work.tiles; t += work.clusters) {
            const Tile tile(t, work);
#pragma unroll 1
            for (int k = 0; k < tile.count; k += STEP_ROWS, ring.next()) {
                const SharedAddress stage = stages + ring.stage * STAGE_BYTES;
                const SharedAddress arrived = full + 8 * ring.stage;
                barrier_wait(empty + 8 * ring.stage, ring.parity);
                load_pair<true>(stage, arrived, from.left, from.right, tile.first + k, tile, 0,
                                work.rank, 0);
            }
        }
    }

    // Run by warpgroup `me`, 0 or 1, of the two that multiply.
    template <class Store>
    __device__ __forceinline__ void multiply_tiles(const Work& work, int me,
                                                   const Store& store) const {
        const int thread = threadIdx.x % 128, warp = me * 4 + thread / 32;
        u32 before = 0, cleared = 0;  // steps of earlier tiles; parity of `arrived`
        int n = 0;
        for (int t = work.cluster; t < work.tiles; t += work.clusters, ++n) {
            const Tile tile(t, work);
            const int count = tile.count, steps = (count + STEP_ROWS - 1) / STEP_ROWS;
            if (n % CONSUMERS == me) {
                store.prefetch(tile, thread);
                Sums d;
                Ring ring(before);
#pragma unroll
                for (int i = 0; i < HALVES_OF_TILE * SUMS; ++i) { d[i / SUMS][i % SUMS] = 0.0f; }
                barrier_wait(turn + 8 * me, me ^ 1 ^ n / CONSUMERS & 1);
                if (tile.boxes == TILE_BOXES) {
                    multiply_rows<TILE_COLUMNS>(d, ring, count, me, cleared);
                } else if (tile.boxes == 2) {
                    multiply_rows<2 * BOX>(d, ring, count, me, cleared);
                } else {
                    multiply_rows<BOX>(d, ring, count, me, cleared);
                }
                store(Tile(t, work), d, thread / 32 * 16, chunks + warp * LINES_BYTES);
            }
            before += steps;
        }
    }

private:
    // d += the sum over `count` rows, for the first COLUMNS columns. Then the other warpgroup's
    // turn begins.
    template <int COLUMNS>
    __device__ __forceinline__ void multiply_rows(Sums& d, Ring& ring, int count, int me,
                                                  u32& cleared) const {
        SharedAddress last = empty;
#pragma unroll 1
        for (int k = 0; k < count / STEP_ROWS; ++k, ring.next()) {
            barrier_wait(full + 8 * ring.stage, ring.parity);
            multiply<bf16, bf16, true, true, COLUMNS>(d, stages + ring.stage * STAGE_BYTES, 0,
                                                      SLICES, 1);
            wgmma_wait<1>();
            if (k > 0) { release(last); }
            last = empty + 8 * ring.stage;
        }
        const int rest = count % STEP_ROWS;
        if (rest > 0) {
            const SharedAddress stage = stages + ring.stage * STAGE_BYTES;
            barrier_wait(full + 8 * ring.stage, ring.parity);
            clear(stage, rest);
            barrier_arrive(arrived + 8 * me);
            barrier_wait(arrived + 8 * me, cleared);
            cleared ^= 1;
            multiply<bf16, bf16, true, true, COLUMNS>(d, stage, 0,
                                                      (rest + SLICE_ROWS - 1) / SLICE_ROWS, 1);
        }
        barrier_arrive(turn + 8 * (me ^ 1));
        wgmma_wait<1>();
        if (rest > 0 && count > STEP_ROWS) { release(last); }
        wgmma_wait<0>();
        if (count > 0) { release(rest > 0 ? empty + 8 * ring.stage : last); }
    }

    // Clear rows of a stage's boxes from `valid` to the end of the slice. No other warpgroup of the
    // block reads these rows.
    static __device__ __forceinline__ void clear(SharedAddress stage, int valid) {
        const int row = valid + threadIdx.x / 8 % SLICE_ROWS;
        if (row / SLICE_ROWS == valid / SLICE_ROWS) {
            const int at = row * LINE + threadIdx.x % 8 * 16;
#pragma unroll
            for (int b = 0; b < STAGE_BOXES; ++b) {
                store_shared(stage + b * BOX_BYTES + at, make_uint4(0, 0, 0, 0));
            }
        }
        stores_begin();
    }
};

// A warp's work on its rows of a tile: 16 rows of each half, from first_row on, 64 columns at a
// time.
struct Epilogue {
    bf16* d;
    const StepScalars* scalars;
    bool accumulate;
    u32 salt;
    int M, N;

    // Prefetch this tile's rows of the gradient d to the L2 cache while tensor cores multiply the
    // tile, or each warp would wait for device memory two dozen times. A thread prefetches one row.
    __device__ __forceinline__ void prefetch(const Tile& tile, int thread) const {
        const int row = tile.row + thread;
        if (!accumulate || tile.count == 0 || row >= M) { return; }
        const bf16* const from = d + ((i64)tile.expert * M + row) * N + tile.column;
#pragma unroll
        for (int c = 0; c < TILE_COLUMNS; c += BOX) {
            if (tile.column + c < N) { prefetch_line(from + c); }
        }
    }

    __device__ __forceinline__ void operator()(const Tile& tile, const Sums& sums, int first_row,
                                               SharedAddress lines) const {
        if (accumulate && tile.count == 0) { return; }
        const u32 seed = gradient_seed(scalars, salt), lane = threadIdx.x % 32;
        const u32 line = lane & 15, octet = lane >> 4;  // 16-byte words, for stmatrix
#pragma unroll
        for (int half = 0; half < HALVES_OF_TILE; ++half) {
            __syncwarp();  // the old contents have been read
#pragma unroll
            for (int j = 0; j < 4 * TILE_BOXES; ++j) {
                u32 pairs[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float* sum = sums[half] + 8 * j + 2 * i;
                    pairs[i] = to_pair(sum[0], sum[1]);
                }
                const SharedAddress to = lines + j / 4 * CHUNK_BYTES + line * LINE;
                stmatrix_x4(to + ((2 * (j % 4) + octet ^ line & 7) << 4), pairs[0], pairs[1],
                            pairs[2], pairs[3]);
            }
            __syncwarp();
            add(tile, tile.row + first_row + TILE_ROWS / 2 * half, lines, seed);
        }
    }

private:
    // Add the lines' sums to 16 rows of d from `row` on. A lane has a word of every fourth row of a
    // box; words of d for the next box are loaded meanwhile.
    __device__ __forceinline__ void add(const Tile& tile, int row, SharedAddress lines,
                                        u32 seed) const {
        const int lane = threadIdx.x % 32, word = lane % 8, below = lane / 8;
        const int rows = M - row - below, column = tile.column + 8 * word;
        bf16* to = d + ((i64)tile.expert * M + row + below) * N + column;
        uint4 next[4], x[4];
        load(next, to, column < N ? rows : 0);
#pragma unroll 1
        for (int box = 0; box < tile.boxes; ++box, to += BOX) {
            const int first = column + box * BOX, valid = first < N ? rows : 0;
            uint4 before[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const u32 r = below + 4 * i;
                before[i] = next[i];
                x[i] = load_shared(lines + box * CHUNK_BYTES + r * LINE + ((word ^ r & 7) << 4));
            }
            load(next, to + BOX, box + 1 < tile.boxes && first + BOX < N ? rows : 0);
            if (accumulate) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const u64 index = to - d + (i64)(4 * i) * N;
                    x[i] = add_gradients(before[i], x[i], seed, index >> 3);
                }
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                uint4* const at = reinterpret_cast<uint4*>(to + (i64)(4 * i) * N);
                if (4 * i < valid) { __stcs(at, x[i]); }
            }
        }
    }

    __device__ __forceinline__ void load(uint4 (&before)[4], const bf16* from, int rows) const {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (accumulate && 4 * i < rows) { before[i] = load_packed_stream(from + (i64)(4 * i) * N); }
        }
    }
};

#define PARAMETERS \
    bf16 *d, const StepScalars *scalars, i32 accumulate, u32 salt, const i32 *starts, i32 experts
#define ARGUMENTS d, scalars, accumulate != 0, salt, M, N
#define WORK starts, experts, M, N, Product::WIDTH
