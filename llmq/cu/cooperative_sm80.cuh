// cooperative_sm80.cuh -- products for all GPUs since Ampere whose tiles go to boxes in shared memory.
//
// It has for the epilogues of cooperative_sm90.cuh what that has for Hopper. Here all warps of a block
// multiply a tile, put it into boxes, where its stages were, and work on its units. Blocks are small,
// so that two of them share a multiprocessor: one multiplies while the other has its epilogue.
//
// Names are as in product_sm90.cuh.
#pragma once
#include "boxes.cuh"
#include "product_sm80.cuh"

constexpr int GROUP = 16;

// What is multiplied. N: the results' columns.
struct Operands {
    const A* left;
    const B* right;
    const f32 *scale_left, *scale_right;  // of fp8 codes
    int M, N, K;
};

// The result, of which each block has a tile. width: columns from a tile to the next.
struct Work {
    int rows, columns, width;
};

// The place of tile t. GROUP rows of tiles go together, so that they share `right` in L2.
struct Tile {
    int row, column;
    __device__ __forceinline__ Tile(int t, const Work& work) {
        const int down = (work.rows + TILE_ROWS - 1) / TILE_ROWS;
        const int across = (work.columns + work.width - 1) / work.width;
        const int first = t / (GROUP * across) * GROUP;
        const int high = min(GROUP, down - first), rest = t - first * across;
        row = (first + rest % high) * TILE_ROWS;
        column = rest / high * work.width;
    }
};

template <class Base, int, class Policy = Boxes> struct Cooperative : Policy {
    using Policy::PAIRED, Policy::UNITS_OF_BOX;
    static_assert(Base::ROWS == TILE_ROWS && sizeof(typename Policy::Rounded) == 2);
    static constexpr int BOXES = Base::COLUMNS / BOX, BOX_BYTES = TILE_ROWS * LINE;
    static constexpr int WIDTH = PAIRED ? Base::COLUMNS / 2 : Base::COLUMNS;
    static constexpr int THREADS = Base::THREADS, WARPS = THREADS / 32;

    unsigned char* shared;
    const Operands& operands;
    SharedAddress boxes;
    __device__ __forceinline__ Cooperative(unsigned char* shared, const Operands& operands)
        : shared(shared), operands(operands), boxes(shared_address(shared)) {}

    // Warp `me` of all: work_on.begin(), then work_on(tile, b, line, its address) for each of its units,
    // some lines of box b from that one.
    template <class WorkOn>
    __device__ __forceinline__ void take_boxes(const Work& work, int me, WorkOn& work_on) const {
        constexpr int LINES = TILE_ROWS / UNITS_OF_BOX;
        const Tile tile = fill_boxes(work);
        work_on.begin();
#pragma unroll 1
        for (int unit = me; unit < BOXES * UNITS_OF_BOX; unit += WARPS) {
            const int b = unit / UNITS_OF_BOX, line = unit % UNITS_OF_BOX * LINES;
            work_on(tile, b, line, boxes + b * BOX_BYTES + line * LINE);
        }
    }

    // The block's tile, whose product becomes what is in the boxes.
    __device__ __forceinline__ Tile fill_boxes(const Work& work) const {
        int t = blockIdx.x, rows = work.rows;
        multiply(Tile(t, work));
        forget(t), forget(rows);  // or the place would be kept in registers, of which there are none
        return Tile(t, {rows, work.columns, work.width});
    }

private:
    __device__ __forceinline__ void multiply(const Tile& tile) const {
        const Operands& of = operands;
        constexpr bool A_OUTSIDE = Base::LEFT_OUTSIDE, B_OUTSIDE = Base::RIGHT_OUTSIDE;
        typename Base::Sums sum = {};
        Base::run(sum, reinterpret_cast<char*>(shared),
                  {of.left + (A_OUTSIDE ? (i64)tile.row : (i64)tile.row * of.K),
                   A_OUTSIDE ? of.M : of.K, of.M - tile.row},
                  {of.right + (B_OUTSIDE ? (i64)tile.column : (i64)tile.column * of.K),
                   B_OUTSIDE ? of.N : of.K, of.N - tile.column, of.N},
                  of.K);
        const float scale = sizeof(A) == 1 ? *of.scale_left * *of.scale_right : 1.0f;
        __syncthreads();  // nobody still reads the stages
        const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
        for (int n = 0; n < Base::N8; ++n) {
            const int column = Base::warp_column() + 8 * n;
            const int b = PAIRED ? column % WIDTH / (BOX / 2) : column / BOX;
            const int octet = PAIRED ? column % (BOX / 2) / 8 + column / WIDTH * 4 : column % BOX / 8;
#pragma unroll
            for (int i = 0; i < 2 * Base::M16; ++i) {
                const float* const x = sum[i / 2][n] + i % 2 * 2;
                const int row = Base::warp_row() + 8 * i + g;
                unsigned char* const to = shared + b * BOX_BYTES + row * LINE;
                *reinterpret_cast<u32*>(to + ((octet ^ row & 7) << 4) + 4 * t) =
                    sizeof(A) == 1 ? to_pair(x[0] * scale, x[1] * scale) : to_pair(x[0], x[1]);
            }
        }
        __syncthreads();
    }
};
