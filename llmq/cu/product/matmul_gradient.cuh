// matmul_gradient.cuh -- a weight's gradient: a product of fp8 codes that is added to a stored sum.
//
//   d = accumulate ? round(d + bf16(x)) : bf16(x)
//
// The sum is rounded stochastically, by the element's random bits, so that the result equals a
// separate product followed by a sum of gradients (reduce.cu), bit for bit.
//
// Warps add a tile in shared memory to the gradient in device memory, 32 rows of a box at a time: 8
// lanes have a row's 64 columns, which are a line of memory. Two other warpgroups multiply the next
// tile meanwhile.
//
// Data     d: bf16 (M, N). scalars: seed, step and micro_step, used with accumulate. part_steps:
//          with EXACT, number of steps of 128 of K after which the tensor cores' sums are added up
//          in F32.
// Cost     d is written once, and with accumulate read once; about 11 instructions for each
//          element, which overlap with the next tile's product.
#pragma once
#include "product/smem_tiles.cuh"

struct Shape : Boxes {
    static constexpr bool HELPED = true, IN_PARTS = EXACT;
};
using Product = Cooperative<Mainloop, 4, Shape>;

// A warp's work on its 32 rows of a box.
struct Epilogue {
    bf16* d;
    const StepScalars* scalars;
    bool accumulate;
    u32 salt;
    int part_steps, M, N;
    u32 seed;

    __device__ __forceinline__ void begin() { seed = gradient_seed(scalars, salt); }
    __device__ __forceinline__ void take(const Product& product, const Work& work, int me) {
        product.take_boxes(work, me, *this);
    }
    // Of the last tile the epilogue's warps take the first units, the warps that multiply the
    // others.
    template <class Helped>
    __device__ __forceinline__ void help(const Helped& product, const Work& work) {
        product.take_last(work, __shfl_sync(~0u, threadIdx.x / 32, 0), *this);
    }

    __device__ __forceinline__ void operator()(const Tile& tile, int b, int first_line,
                                               SharedAddress lines) const {
        constexpr int ROWS = 4;  // rows of a lane, whose loads are in flight together
        const int lane = threadIdx.x % 32, octet = lane % 8;
        const int column = tile.column + BOX * b + 8 * octet;
        if (column >= N) { return; }
#pragma unroll 1
        for (int first = lane / 8; first < 32; first += 4 * ROWS) {
            const int row = tile.row + first_line + first;
            bf16* const to = d + (i64)row * N + column;
            uint4 before[ROWS];
            if (accumulate) {
#pragma unroll
                for (int i = 0; i < ROWS; ++i) {
                    if (row + 4 * i < M) { before[i] = load_packed_stream(to + (i64)(4 * i) * N); }
                }
            }
#pragma unroll
            for (int i = 0; i < ROWS; ++i) {
                const int line = first + 4 * i;
                const uint4 x = load_shared(lines + line * LINE + ((octet ^ line & 7) << 4));
                if (row + 4 * i < M) { store(to + (i64)(4 * i) * N, before[i], x); }
            }
        }
    }

private:
    // Store or add eight neighbouring elements. before: d's elements. x: the product's.
    __device__ __forceinline__ void store(bf16* to, const uint4& before, const uint4& x) const {
        const u64 eight = (to - d) >> 3;
        __stcs(reinterpret_cast<uint4*>(to), accumulate ? add_gradients(before, x, seed, eight) : x);
    }
};

#define PARAMETERS bf16 *d, const StepScalars *scalars, i32 accumulate, u32 salt, i32 part_steps
#define ARGUMENTS d, scalars, accumulate != 0, salt, part_steps, M, N
