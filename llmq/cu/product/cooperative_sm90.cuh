// cooperative_sm90.cuh -- products for Hopper that hand tiles to other warps through shared memory.
//
// product_sm90.cuh explains tiles, their ring and order, and names.
#pragma once
#include "product/smem_tiles.cuh"
#include "product/product_sm90.cuh"

// A product whose epilogue runs in other warps than the multiplication.
//
// Tiles have 192 columns. One thread loads. Two warpgroups multiply a tile together, 64 rows each;
// they scale the tile, round it to BF16, put it into shared memory, and go on with the next tile.
// EPILOGUES further warps take units of the tile in turns. EPILOGUES: 4, a warpgroup, or 7, all
// warps that are left.
//
// HELPED: warps that multiply, which have more registers, also take units of the last tile.
// IN_PARTS: sums of the tensor cores over some steps are added up in F32. BARRIERS: number of the
// epilogue's barriers, for UNITS_OF_BOX arrivals each, from `more` on.
template <class Base, int EPILOGUES, class Policy = Boxes> struct Cooperative : Base, Policy {
    using Base::TAILS, Base::SCALED, Base::full, Base::steps;
    using typename Base::Ring;
    using Policy::PAIRED, Policy::HELPED, Policy::IN_PARTS, Policy::UNITS_OF_BOX, Policy::BARRIERS;
    static constexpr int BOXES = TILE_COLUMNS / BOX, BOX_BYTES = TILE_ROWS * LINE;
    static constexpr int WIDTH = PAIRED ? TILE_COLUMNS / 2 : TILE_COLUMNS;
    static constexpr int THREADS = 512;
    // Registers of a thread; equal shares would not hold two sums of each element.
    static constexpr int LOADER_REGISTERS = 24, PRODUCT_REGISTERS = 216, EPILOGUE_REGISTERS = 56;

    SharedAddress boxes, ready, taken, more;  // ready, taken: a barrier of each box

    __device__ __forceinline__ Cooperative(void* shared, int K)
        : Base(shared, K, BOXES * BOX_BYTES),
          boxes(Base::results),
          ready(Base::others),
          taken(ready + 8 * BOXES),
          more(taken + 8 * BOXES) {}

    // One thread of the block calls init; then all threads of the cluster wait for each other.
    __device__ __forceinline__ void init() const {
        Base::init(4);
        for (int i = 0; i < BOXES; ++i) {
            barrier_init(ready + 8 * i, 8);  // 8 warps multiply
            barrier_init(taken + 8 * i, UNITS_OF_BOX);
        }
        for (int i = 0; i < BARRIERS; ++i) { barrier_init(more + 8 * i, UNITS_OF_BOX); }
        barriers_ready();
    }

    // A block's work. Warp `me` of the epilogue runs epilogue.take(product, work, me). HELPED: each
    // warp that has multiplied runs epilogue.help(product, work). IN_PARTS: epilogue.part_steps is
    // the number of steps of a part, at least 2.
    template <class Epilogue>
    __device__ __forceinline__ void run(const Work& work, const Operands& operands,
                                        Epilogue& epilogue) const {
        if constexpr (EPILOGUES == 4) {
            const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
            if (warpgroup == 0) {
                if constexpr (HELPED) { give_registers<LOADER_REGISTERS>(); }
                load(work, operands);
            } else if (warpgroup < 3) {
                if constexpr (HELPED) { take_registers<PRODUCT_REGISTERS>(); }
                multiply_tiles(work, operands, epilogue, warpgroup - 1);
                if constexpr (HELPED) { epilogue.help(*this, work); }
            } else {
                if constexpr (HELPED) { give_registers<EPILOGUE_REGISTERS>(); }
                epilogue.take(*this, work, __shfl_sync(~0u, threadIdx.x / 32 % 4, 0));
            }
            return;
        }
        const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), warpgroup = warp / 4;
        if (warpgroup == 1 || warpgroup == 2) {
            multiply_tiles(work, operands, epilogue, warpgroup - 1);
        } else if (warp == 0) {
            load(work, operands);
        } else {
            epilogue.take(*this, work, warp < 4 ? warp - 1 : warp - 9);
        }
    }

    __device__ __forceinline__ void load(const Work& work, const Operands& operands) const {
        if (threadIdx.x == 0) {
            Base::load(work, operands, PAIRED ? operands.N : TILE_COLUMNS / 2);
        }
    }

    // Run by warpgroup `me`, 0 or 1, of the two that multiply.
    template <class Epilogue>
    __device__ __forceinline__ void multiply_tiles(const Work& work, const Operands& operands,
                                                   const Epilogue& epilogue, int me) const {
        const float scale = Base::scale(operands);  // factor of the sum without tails
        Ring ring(0);
        u32 free_parity = 1;  // the boxes are free at first
        for (int t = work.cluster; t < work.tiles; t += work.clusters) {
            float d[1][SUMS];
            if constexpr (IN_PARTS) {
                float more[1][SUMS];
#pragma unroll
                for (int i = 0; i < SUMS; ++i) { d[0][i] = 0.0f; }
                // One warpgroup adds while products of the other are under way.
                const int part = epilogue.part_steps;
                int count = me == 0 ? part : part / 2;
#pragma unroll 1
                for (int left = steps; left > 0; left -= count, count = part) {
                    count = min(count, left);
                    finish_steps(more, ring, me, count);
#pragma unroll
                    for (int i = 0; i < SUMS; ++i) { d[0][i] += more[0][i]; }
                }
            } else {
                finish_steps(d, ring, me, steps);
            }
            if constexpr (TAILS > 0) {
                if constexpr (SCALED) {
#pragma unroll
                    for (int i = 0; i < SUMS; ++i) { d[0][i] *= scale; }
                }
#pragma unroll
                for (int k = 0; k < TAILS; ++k, ring.next()) {
                    barrier_wait(full + 8 * ring.stage, ring.parity);
                    Base::multiply_tail(d, ring, 64 * me, k);
                }
            }
            hand_over(d[0], 64 * me, scale, free_parity);
            free_parity ^= 1;
        }
    }

    // d = the sum over the next `count` steps, for a warpgroup's rows.
    __device__ __forceinline__ void finish_steps(float (&d)[1][SUMS], Ring& ring, int me,
                                                 int count) const {
        const SharedAddress before = Base::multiply_steps(d, ring, 64 * me, count);
        wgmma_wait<0>();
        Base::release(before);
    }

    // Write a warp's 16 rows of a tile into the boxes.
    __device__ __forceinline__ void hand_over(const float (&d)[SUMS], int first_row, float scale,
                                              u32 free_parity) const {
        int thread = threadIdx.x % 128;
        forget(thread);  // else addresses would stay in registers, which are too few
        const u32 warp = thread / 32, lane = thread % 32;
        const u32 row = lane & 15, octet = lane >> 4;  // 16-byte words, for stmatrix
        const SharedAddress line = boxes + (first_row + 16 * warp + row) * LINE;
#pragma unroll
        for (int b = 0; b < BOXES; ++b) {
            barrier_wait(taken + 8 * b, free_parity);
#pragma unroll
            for (int j = 0; j < 4; ++j) {  // 16 columns
                const int first = PAIRED ? 4 * b + 2 * (j % 2) + 12 * (j / 2) : 8 * b + 2 * j;
                u32 pairs[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float* x = d + 4 * first + 2 * i;
                    const float factor = SCALED && TAILS == 0 ? scale : 1.0f;
                    pairs[i] = to_pair(x[0] * factor, x[1] * factor);
                }
                stmatrix_x4(line + b * BOX_BYTES + ((2 * j + octet ^ row & 7) << 4), pairs[0],
                            pairs[1], pairs[2], pairs[3]);
            }
            __syncwarp();
            if (lane == 0) { barrier_arrive(ready + 8 * b); }
        }
    }

    // Run by warp `me` of the epilogue: work_on.begin(), then work_on(tile, b, line, address of
    // line) for each of the warp's units, 32 lines of box b, which work_on must have read when it
    // returns. HELPED: the warp takes one unit of the last tile; the multiplying warps take the
    // others (take_last).
    template <class WorkOn>
    __device__ __forceinline__ void take_boxes(const Work& work, int me, WorkOn& work_on) const {
        static_assert(UNITS_OF_BOX == PARTS, "units of other sizes are taken by the file's own code");
        work_on.begin();
        u32 unit = me, parity = 0;
        for (int t = work.cluster; t < work.tiles; t += work.clusters) {
            const Tile tile(t, work);
            const bool alone = !HELPED || t + work.clusters < work.tiles;
#pragma unroll 1
            for (; unit < UNITS; unit += alone ? EPILOGUES : UNITS) {
                const u32 b = unit / PARTS, line = unit % PARTS * 32;
                barrier_wait(ready + 8 * b, parity);
                work_on(tile, b, line, boxes + b * BOX_BYTES + line * LINE);
                __syncwarp();
                if (threadIdx.x % 32 == 0) { barrier_arrive(taken + 8 * b); }
            }
            unit -= UNITS;
            parity ^= 1;
        }
    }

    // Run by a warp that has multiplied all tiles: takes one unit of the last tile.
    template <class WorkOn>
    __device__ __forceinline__ void take_last(const Work& work, u32 unit, WorkOn& work_on) const {
        static_assert(UNITS == EPILOGUES + 8, "a unit for each warp");
        work_on.begin();
        if (work.cluster >= work.tiles) { return; }
        const int before = (work.tiles - 1 - work.cluster) / work.clusters;  // tiles
        const Tile tile(work.cluster + before * work.clusters, work);
        const u32 b = unit / PARTS, line = unit % PARTS * 32;
        barrier_wait(ready + 8 * b, before & 1);
        work_on(tile, b, line, boxes + b * BOX_BYTES + line * LINE);
    }

private:
    static constexpr int PARTS = TILE_ROWS / 32, UNITS = BOXES * PARTS;  // of a tile
};
