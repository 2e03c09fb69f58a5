// pingpong_sm90.cuh -- products for Hopper in which the warps that multiply a tile also store it.
//
// Three warpgroups: one thread of the first loads; the other two take tiles in turns ("ping-pong"),
// so that one multiplies while the other stores. In tiles wider than 192 columns, a thread could
// not hold its sums: there the two warpgroups share a tile, 64 rows each.
//
// product_sm90.cuh explains tiles, their ring and order, names, and TILE_COLUMNS.
#pragma once
#include "product/product_sm90.cuh"

constexpr bool IN_TURNS = TILE_COLUMNS == 192;
constexpr int HALVES_OF_TILE = IN_TURNS ? 2 : 1;  // halves of a tile, 64 rows each, in a warpgroup
constexpr int CHUNK_BYTES = 16 * LINE;            // 16 rows of 64 BF16
using Sums = float[HALVES_OF_TILE][SUMS];         // of a thread, as ptx.cuh lays them out

// WARP_BYTES: bytes of shared memory of each warp that multiplies.
template <class Base, int WARP_BYTES> struct PingPong : Base {
    using Base::TAILS, Base::SCALED, Base::full, Base::steps;
    using typename Base::Ring;
    static constexpr int WIDTH = TILE_COLUMNS;
    static constexpr int LOADER_REGISTERS = IN_TURNS && !GROUPED ? 24 : 40;  // of a thread
    static constexpr int CONSUMERS = 2, WARPS = 4 * CONSUMERS, THREADS = 128 * (1 + CONSUMERS);
    static constexpr int TAKERS = IN_TURNS ? CONSUMERS : 1;  // warpgroups that take turns

    // chunks: the warps' WARP_BYTES. turn: a barrier of each warpgroup that multiplies. arrived: a
    // barrier of each warp that multiplies, for one arrival.
    SharedAddress chunks, turn, arrived;

    __device__ __forceinline__ PingPong(void* shared, int K)
        : Base(shared, K, WARPS * WARP_BYTES),
          chunks(Base::results),
          turn(Base::others),
          arrived(turn + 8 * CONSUMERS) {}

    // One thread of the block calls init; then all threads of the cluster wait for each other.
    __device__ __forceinline__ void init() const {
        Base::init(2 * CONSUMERS / TAKERS);
        for (int i = 0; i < CONSUMERS; ++i) { barrier_init(turn + 8 * i, 128); }
        for (int i = 0; i < WARPS; ++i) { barrier_init(arrived + 8 * i, 1); }
        barriers_ready();
    }

    // A block's work. Each warp gives each of its tiles to store(tile, d, row, chunks, arrived). d:
    // the thread's sums; the warp has 16 rows of the tile, from `row` on, in each half of the
    // warpgroup's rows. chunks, arrived: the warp's own.
    template <class Store>
    __device__ __forceinline__ void run(const Work& work, const Operands& operands,
                                        const Store& store) const {
        const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
        if (warpgroup == 0) {
            give_registers<LOADER_REGISTERS>();
            if (threadIdx.x == 0) { Base::load(work, operands, TILE_COLUMNS / 2); }
        } else {
            take_registers<252 - LOADER_REGISTERS / 2>();
            multiply_tiles(work, warpgroup - 1, Base::scale(operands), store);
            if (threadIdx.x % 32 == 0) { stores_are_done(); }
        }
    }

    // Run by warpgroup `me`, 0 or 1, of the two that multiply. scale: factor of the sum without
    // tails.
    template <class Store>
    __device__ __forceinline__ void multiply_tiles(const Work& work, int me, float scale,
                                                   const Store& store) const {
        const int thread = threadIdx.x % 128, warp = me * 4 + thread / 32;
        const int taker = IN_TURNS ? me : 0, first_row = IN_TURNS ? 0 : 64 * me;
        const SharedAddress chunk = chunks + warp * WARP_BYTES;
        // n: number of the cluster's tile. Values derived from n take no registers during products.
        for (int n = taker, t; t = work.cluster + n * work.clusters, t < work.tiles; n += TAKERS) {
            const Tile tile(t, work);
            const int row = first_row + thread / 32 * 16;
            Sums d;
            Ring ring(n * (steps + TAILS));
            if constexpr (IN_TURNS) {  // only in turns is the phase known; 0 begins
                barrier_wait(turn + 8 * me, me ^ 1 ^ n / CONSUMERS & 1);
            }
            const SharedAddress before = Base::multiply_steps(d, ring, first_row, steps);
            Ring last = ring;
#pragma unroll
            for (int k = 0; k < TAILS; ++k, last.next()) {
                barrier_wait(full + 8 * last.stage, last.parity);
            }
            if constexpr (IN_TURNS) {
                barrier_arrive(turn + 8 * (me ^ 1));  // the other multiplies while this one scales
            }
            wgmma_wait<0>();
            Base::release(before);
            if (SCALED) {
#pragma unroll
                for (int i = 0; i < HALVES_OF_TILE * SUMS; ++i) { d[i / SUMS][i % SUMS] *= scale; }
            }
#pragma unroll
            for (int k = 0; k < TAILS; ++k, ring.next()) {
                Base::multiply_tail(d, ring, first_row, k);
            }
            store(tile, d, row, chunk, arrived + 8 * warp);
        }
    }
};
