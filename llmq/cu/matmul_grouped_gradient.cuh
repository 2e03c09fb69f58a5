// matmul_grouped_gradient.cuh -- gradients of experts' matrices: of rows that are sorted by expert.
//
//   d[e] = accumulate ? round(d[e] + bf16(x)) : bf16(x)      x = a^T @ b over the rows of e, in F32
//
// The sum is rounded stochastically, by the random number of the element, as matmul_gradient.cuh has
// it. Both operands have K, the rows, outside. As pingpong_sm90.cuh has it, but that each tile has steps
// of its own, and that one of them may have rows of the next expert: in shared memory they become zeros.
// A tile has few steps, so that what becomes of its sums takes nearly as long as these.
//
// Data     a: bf16 (K, M). b: bf16 (K, N). d: bf16 (experts, M, N). starts: I32 (experts + 1), from 0 to
//          K. scalars: seed, step and micro_step, if something is added.
// Cost     A cluster has 256 rows of a matrix. d is written once, and read once if it is added to; about
//          20 instructions for each element, while the other warpgroup multiplies.
#pragma once
#include "pingpong_sm90.cuh"

// One warpgroup's results at a time have all chunks: of each warp, those of all its boxes.
constexpr int BOXES = HALVES_OF_TILE * TILE_BOXES;
using Base = PingPong<Mainloop, BOXES / 2 * CHUNK_BYTES>;

struct Product : Base {
    static constexpr int STEP_ROWS = 64, BOX_BYTES = BOX * LINE, STAGE_BOXES = 2 + TILE_BOXES;
    static_assert(IN_TURNS && LEFT_BYTES == 2 * BOX_BYTES && TAILS == 0);
    // As of PingPong; in the place of `arrived`, barriers of each warpgroup: its threads have cleared a
    // stage; the other one is near the end of its tile, and its own first stage is the next to come there.
    // stored: of each warp, which is done with its chunks.
    SharedAddress clear_done, near, stored;

    __device__ __forceinline__ Product(void* shared, int K)
        : Base(shared, K),
          clear_done(arrived),
          near(clear_done + 8 * CONSUMERS),
          stored(near + 8 * CONSUMERS) {}

    __device__ __forceinline__ void init() const {
        Mainloop::init(2);
        for (int i = 0; i < CONSUMERS; ++i) {
            barrier_init(turn + 8 * i, 128);
            barrier_init(clear_done + 8 * i, 128);
            barrier_init(near + 8 * i, 128);
        }
        for (int i = 0; i < WARPS; ++i) { barrier_init(stored + 8 * i, 1); }
        barriers_ready();
    }

    template <class Store>
    __device__ __forceinline__ void run(const Work& work, const Operands& operands,
                                        const Store& store) const {
        const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
        if (warpgroup == 0) {
            give_registers<LOADER_REGISTERS>();
            if (threadIdx.x == 0) { load(work, operands, store); }
        } else {
            take_registers<252 - LOADER_REGISTERS / 2>();
            multiply_tiles(work, warpgroup - 1, store);
        }
    }

    // Steps of a tile. The first one has the rows that are no whole step, and are the last ones.
    static __device__ __forceinline__ int steps_of(const Tile& tile) {
        return (tile.count + STEP_ROWS - 1) / STEP_ROWS;
    }

    // As of Mainloop; store: see prefetch of Epilogue.
    template <class Store>
    __device__ __forceinline__ void load(const Work& work, const Operands& from,
                                         const Store& store) const {
        Ring ring(RING_STAGES);  // the first wait for an empty stage is over at once
        for (int t = work.cluster; t < work.tiles; t += work.clusters) {
            const Tile tile(t, work);
            const int steps = steps_of(tile), part = steps > 0 ? (TILE_ROWS + steps - 1) / steps : 0;
            const int last = (steps - 1) * STEP_ROWS, rest = tile.count % STEP_ROWS;
#pragma unroll 1
            for (int k = 0; k < tile.count; k += STEP_ROWS, ring.next()) {
                const SharedAddress stage = stages + ring.stage * STAGE_BYTES;
                const SharedAddress arrived = full + 8 * ring.stage;
                barrier_wait(empty + 8 * ring.stage, ring.parity);
                const int row = rest == 0 ? k : k == 0 ? last : k - STEP_ROWS;
                load_pair<true>(stage, arrived, from.left, from.right, tile.first + row, tile, 0,
                                work.rank, 0);
                store.prefetch(tile, k / STEP_ROWS * part, part);
            }
        }
    }

    // Warpgroup `me`, 0 or 1, of the two that multiply.
    template <class Store>
    __device__ __forceinline__ void multiply_tiles(const Work& work, int me,
                                                   const Store& store) const {
        const int thread = threadIdx.x % 128, warp = me * 4 + thread / 32;
        const u32 seed = gradient_seed(store.scalars, store.salt);
        u32 before = 0, cleared = 0;  // steps of the tiles before; phases of clear_done
        int n = 0;
        for (int t = work.cluster; t < work.tiles; t += work.clusters, ++n) {
            const Tile tile(t, work);
            const int steps = steps_of(tile);
            if (n % CONSUMERS == me) {
                Sums d;
#pragma unroll
                for (int i = 0; i < HALVES_OF_TILE * SUMS; ++i) { d[i / SUMS][i % SUMS] = 0.0f; }
                Ring ring(before);
                const u32 phase = me ^ 1 ^ n / CONSUMERS & 1;
                barrier_wait(near + 8 * me, phase);  // or a wait may be for a later phase of `full`
                if (tile.count % STEP_ROWS != 0) {   // while the other one multiplies
                    barrier_wait(full + 8 * ring.stage, ring.parity);
                    clear(stages + ring.stage * STAGE_BYTES, tile.count % STEP_ROWS);
                    barrier_arrive(clear_done + 8 * me);
                    barrier_wait(clear_done + 8 * me, cleared);
                    cleared ^= 1;
                }
                barrier_wait(turn + 8 * me, phase);
                const int tell = max(0, steps - RING_STAGES);
                const SharedAddress last =
                    Base::multiply_steps<true>(d, ring, 0, steps, [&](int k) {
                        if (k == tell) { barrier_arrive(near + 8 * (me ^ 1)); }
                    });
                if (steps == 0) { barrier_arrive(near + 8 * (me ^ 1)); }
                barrier_arrive(turn + 8 * (me ^ 1));
                wgmma_wait<0>();
                if (steps > 0) { Base::release(last); }
                // The chunks are those of the other warpgroup's warp, whose tile was the one before.
                barrier_wait(stored + 8 * (warp ^ 4), phase);
                store(Tile(t, work), d, warp % 4, chunks + warp % 4 * BOXES * CHUNK_BYTES, seed);
                if (thread % 32 == 0) { barrier_arrive(stored + 8 * warp); }
            }
            before += steps;
        }
    }

private:
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

    // What is added to comes to L2 beside the operands of its tile, some rows for each step: else each
    // warp would wait for device memory. All rows at once would come before operands.
    __device__ __forceinline__ void prefetch(const Tile& tile, int first, int count) const {
        if (!accumulate) { return; }
        const u32 bytes = 2 * min(N - tile.column, TILE_COLUMNS);
        const int end = tile.row + min(first + count, TILE_ROWS);
#pragma unroll 1
        for (int row = tile.row + first; row < min(end, M); ++row) {
            prefetch_bytes(d + ((i64)tile.expert * M + row) * N + tile.column, bytes);
        }
    }

    // seed: of gradient_seed. Sums leave their registers first. The loop is one piece of code for all
    // boxes, which is small enough to be kept where instructions are fetched from.
    __device__ __forceinline__ void operator()(const Tile& tile, const Sums& sums, int warp,
                                               SharedAddress chunks, u32 seed) const {
        if (accumulate && tile.count == 0) { return; }
        const u32 lane = threadIdx.x % 32;
        const u32 line = lane & 15, octet = lane >> 4;  // of 16-byte words, for stmatrix
        const u32 word = lane % 8, below = lane / 8;    // of a row, for memory
#pragma unroll
        for (int c = 0; c < BOXES; ++c) {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                u32 pairs[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float* sum =
                        sums[c / TILE_BOXES] + c % TILE_BOXES * (BOX / 2) + 8 * j + 2 * i;
                    pairs[i] = to_pair(sum[0], sum[1]);
                }
                stmatrix_x4(chunks + c * CHUNK_BYTES + line * LINE + ((2 * j + octet ^ line & 7) << 4),
                            pairs[0], pairs[1], pairs[2], pairs[3]);
            }
        }
        __syncwarp();
        Box box(*this, tile, 16 * warp, 0);
        uint4 before[4];  // what the next rows are added to
#pragma unroll
        for (int i = 0; i < 4; ++i) { load(box, i, before[i]); }
#pragma unroll 1
        for (int c = 0; c < BOXES; ++c) {
            const Box here = box;
            box = Box(*this, tile, 16 * warp, c + 1);
            if (c + 1 == BOXES) { box.rows = 0; }
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const u32 r = below + 4 * i;
                const uint4 x =
                    load_shared(chunks + c * CHUNK_BYTES + r * LINE + ((word ^ r & 7) << 4));
                bf16* const at = here.at + (i64)(4 * i) * N;
                const u64 index = at - d;  // a multiple of 8
                const uint4 sum = accumulate ? add_gradients(before[i], x, seed, index) : x;
                if (4 * i < here.rows) { __stcs(reinterpret_cast<uint4*>(at), sum); }
                load(box, i, before[i]);
            }
        }
        __syncwarp();  // all have read
    }

private:
    // A lane's place in box c of its warp: its first word, and how many rows there are from there on.
    struct Box {
        bf16* at;
        int rows;

        __device__ __forceinline__ Box(const Epilogue& of, const Tile& tile, int first_row, int c) {
            const int column = tile.column + c % TILE_BOXES * BOX + threadIdx.x % 8 * 8;
            const int half = c / TILE_BOXES * (TILE_ROWS / 2);
            const int row = tile.row + first_row + half + threadIdx.x % 32 / 8;
            rows = column < of.N ? of.M - row : 0;
            at = of.d + ((i64)tile.expert * of.M + row) * of.N + column;
        }
    };

    // Of a box's rows, that one which is 4 i below the first.
    __device__ __forceinline__ void load(const Box& box, int i, uint4& to) const {
        if (accumulate && 4 * i < box.rows) { to = load_packed_stream(box.at + (i64)(4 * i) * N); }
    }
};

#define PARAMETERS \
    bf16 *d, const StepScalars *scalars, i32 accumulate, u32 salt, const i32 *starts, i32 experts
#define ARGUMENTS d, scalars, accumulate != 0, salt, M, N
#define WORK starts, experts, M, N, Product::WIDTH
