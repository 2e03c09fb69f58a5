// matmul_grouped_gradient.cuh -- gradients of experts' matrices: of rows that are sorted by expert.
//
//   d[e] = accumulate ? round(d[e] + bf16(x)) : bf16(x)      x = a^T @ b over the rows of e, in F32
//
// The sum is rounded stochastically, by the random number of the element, as matmul_gradient.cuh has
// it. Both operands have K, the rows, outside. As pingpong_sm90.cuh has it, but that each tile has steps
// of its own, and that the last one may have rows of the next expert: in shared memory they become zeros.
//
// Data     a: bf16 (K, M). b: bf16 (K, N). d: bf16 (experts, M, N). starts: I32 (experts + 1), from 0 to
//          K. scalars: seed, step and micro_step, if something is added.
// Cost     A cluster has 256 rows of a matrix. d is written once, and read once if it is added to; about
//          25 instructions for each element, while the other warpgroup multiplies.
#pragma once
#include "pingpong_sm90.cuh"

using Base = PingPong<Mainloop, CHUNK_BYTES>;

struct Product : Base {
    static constexpr int STEP_ROWS = 64, BOX_BYTES = BOX * LINE, STAGE_BOXES = 2 + TILE_BOXES;
    static_assert(IN_TURNS && LEFT_BYTES == 2 * BOX_BYTES && TAILS == 0);
    using Base::Base;

    // As of PingPong; `arrived` has a barrier of each warpgroup, for all of its threads.
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

    // Warpgroup `me`, 0 or 1, of the two that multiply.
    template <class Store>
    __device__ __forceinline__ void multiply_tiles(const Work& work, int me,
                                                   const Store& store) const {
        const int thread = threadIdx.x % 128, warp = me * 4 + thread / 32;
        u32 before = 0, cleared = 0;  // steps of the tiles before; phases of `arrived`
        int n = 0;
        for (int t = work.cluster; t < work.tiles; t += work.clusters, ++n) {
            const Tile tile(t, work);
            const int count = tile.count, steps = (count + STEP_ROWS - 1) / STEP_ROWS;
            if (n % CONSUMERS == me) {
                store.prefetch(tile, thread);
                Sums d;
                Ring ring(before);
                barrier_wait(turn + 8 * me, me ^ 1 ^ n / CONSUMERS & 1);
                multiply_rows(d, ring, count, me, cleared);
                barrier_arrive(turn + 8 * (me ^ 1));
                store(Tile(t, work), d, thread / 32 * 16, chunks + warp * CHUNK_BYTES);
            }
            before += steps;
        }
    }

private:
    // d = the sum over so many rows.
    __device__ __forceinline__ void multiply_rows(Sums& d, Ring& ring, int count, int me,
                                                  u32& cleared) const {
#pragma unroll
        for (int i = 0; i < HALVES_OF_TILE * SUMS; ++i) { d[i / SUMS][i % SUMS] = 0.0f; }
        SharedAddress last = empty;
        int k = 0;
#pragma unroll 1
        for (; k + STEP_ROWS <= count; k += STEP_ROWS, ring.next()) {
            barrier_wait(full + 8 * ring.stage, ring.parity);
            multiply<bf16, bf16, true, true>(d, stages + ring.stage * STAGE_BYTES, 0, SLICES, 1);
            wgmma_wait<1>();
            if (k > 0) { release(last); }
            last = empty + 8 * ring.stage;
        }
        wgmma_wait<0>();
        if (k > 0) { release(last); }
        if (k < count) {
            const SharedAddress stage = stages + ring.stage * STAGE_BYTES;
            barrier_wait(full + 8 * ring.stage, ring.parity);
            clear(stage, count - k);
            barrier_arrive(arrived + 8 * me);
            barrier_wait(arrived + 8 * me, cleared);
            cleared ^= 1;
            multiply<bf16, bf16, true, true>(d, stage, 0, SLICES, 1);
            wgmma_wait<0>();
            release(empty + 8 * ring.stage);
        }
    }

    // Rows from `valid` on of a stage's boxes, which this warpgroup alone reads in this block.
    static __device__ __forceinline__ void clear(SharedAddress stage, int valid) {
        for (int at = valid * LINE + threadIdx.x % 128 * 16; at < BOX_BYTES; at += 128 * 16) {
#pragma unroll
            for (int b = 0; b < STAGE_BOXES; ++b) {
                store_shared(stage + b * BOX_BYTES + at, make_uint4(0, 0, 0, 0));
            }
        }
        stores_begin();
    }
};

// A warp's work on its rows of a tile: 16 of each half from first_row on, 64 columns at a time.
struct Epilogue {
    bf16* d;
    const StepScalars* scalars;
    bool accumulate;
    u32 salt;
    int M, N;

    // What is added to comes to L2 while the tile is multiplied: else each warp would wait for device
    // memory two dozen times. A thread of the warpgroup has a row.
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
                                               SharedAddress chunk) const {
        if (accumulate && tile.count == 0) { return; }
        const u32 seed = gradient_seed(scalars, salt), lane = threadIdx.x % 32;
        const u32 line = lane & 15, octet = lane >> 4;  // of 16-byte words, for stmatrix
        const u32 word = lane % 8, below = lane / 8;    // of a row, for memory
#pragma unroll
        for (int c = 0; c < HALVES_OF_TILE * TILE_BOXES; ++c) {
            const int half = c / TILE_BOXES, box = c % TILE_BOXES;
            // Or addresses of all boxes would be held at once, for which there are no registers.
            int first = tile.column, row = first_row + TILE_ROWS / 2 * half;
            forget(first), forget(row);
            first += box * BOX, row += tile.row;
            __syncwarp();  // the chunk is empty
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                u32 pairs[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float* sum = sums[half] + box * (BOX / 2) + 8 * j + 2 * i;
                    pairs[i] = to_pair(sum[0], sum[1]);
                }
                stmatrix_x4(chunk + line * LINE + ((2 * j + octet ^ line & 7) << 4), pairs[0],
                            pairs[1], pairs[2], pairs[3]);
            }
            __syncwarp();
            const int column = first + 8 * word, rows = column < N ? M - row - (int)below : 0;
            bf16* const to = d + ((i64)tile.expert * M + row + below) * N + column;
            uint4 before[4];
            if (accumulate) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    if (4 * i < rows) { before[i] = load_packed_stream(to + (i64)(4 * i) * N); }
                }
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const u32 r = below + 4 * i;
                const uint4 x = load_shared(chunk + r * LINE + ((word ^ r & 7) << 4));
                if (4 * i < rows) { store(to + (i64)(4 * i) * N, before[i], x, seed); }
            }
        }
    }

private:
    // Eight neighbours.
    __device__ __forceinline__ void store(bf16* to, const uint4& old, const uint4& x, u32 seed) const {
        Vec<bf16> sum = unpack<bf16>(x);
        if (accumulate) {
            const Vec<bf16> before = unpack<bf16>(old);
            const u64 index = to - d;  // a multiple of 8
#pragma unroll
            for (int k = 0; k < 8; ++k) {
                sum[k] = add_gradient(before[k], to_f32(sum[k]), seed, index | k);
            }
        }
        store_vec_stream(to, sum);
    }
};

#define PARAMETERS \
    bf16 *d, const StepScalars *scalars, i32 accumulate, u32 salt, const i32 *starts, i32 experts
#define ARGUMENTS d, scalars, accumulate != 0, salt, M, N
#define WORK starts, experts, M, N, Product::WIDTH
