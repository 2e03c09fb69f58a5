// matmul_exp.cuh -- logits' exponentials behind their product.
//
//   l = bf16(x)        e = exp(l - shift of the row)        0 in columns >= vocab
//
// While two warpgroups multiply a tile, another one takes the exponentials of the one before, in place
// in shared memory, from where the copy engine stores them: one warp on each scheduler, with 32 rows
// of all boxes, a thread one row. So a thread has its row's sum to itself, and swizzled lines keep the
// threads of a warp from meeting in a bank.
//
// Data     e: bf16 (M, N). sums: F32 (ceil(N / 192), M), of e over the columns of a tile, before it
//          is rounded. target_logits: F32 (M), written where a row has a target. shift: F32 (M).
//          targets: I32 (M), negative: none; others < vocab <= N.
// Cost     About 5 instructions and one exponential for each element, which hide behind the product.
//          Of what a product alone would store, sums are 1 % more.
#pragma once
#include "cooperative_sm90.cuh"

using Product = Cooperative<Mainloop, 4>;

// A thread's work on its row of a tile, box after box.
struct Epilogue {
    const TensorMap* e;
    f32 *sums, *target_logits;
    const f32* shift;
    const i32* targets;
    int M, N, vocab;
    unsigned char* dynamic;  // shared memory
    float sum, offset;       // of the row: so far in this tile; -shift in powers of two
    int target;

    __device__ __forceinline__ void begin() const {}
    __device__ __forceinline__ void take(const Product& product, const Work& work, int me) {
        product.take_boxes(work, me, *this);
        if (threadIdx.x % 32 == 0) { stores_are_done(); }
    }

    __device__ __forceinline__ void operator()(const Tile& tile, int b, int first_line,
                                               SharedAddress lines) {
        const int lane = threadIdx.x % 32, first_row = tile.row + first_line, row = first_row + lane;
        const int column = tile.column + BOX * b;
        if (b == 0) {
            sum = 0.0f;
            offset = row < M ? -shift[row] * LOG2E : 0.0f;
            target = row < M ? targets[row] : -1;
        }
        if (column < N) {
            unsigned char* const line = dynamic + (lines - shared_address(dynamic)) + lane * LINE;
            const u32 place = target - column;
            if (place < BOX) {
                const unsigned char* const from = word(line, place / 8) + place % 8 * sizeof(bf16);
                target_logits[row] = to_f32(*reinterpret_cast<const bf16*>(from));
            }
            if (column + BOX <= vocab) {
                take<false>(line, column);
            } else {
                take<true>(line, column);
            }
            stores_begin();
            __syncwarp();
            if (lane == 0) {
                store_box(e, column, first_row, lines);
                stores_have_read();
            }
        }
        if (b == Product::BOXES - 1 && row < M) {
            sums[(i64)(tile.column / TILE_COLUMNS) * M + row] = sum;
        }
    }

private:
    // Of the thread's line. index: of 16-byte words.
    static __device__ __forceinline__ unsigned char* word(unsigned char* line, int index) {
        return line + ((index ^ threadIdx.x & 7) << 4);
    }

    // IS_LAST: columns may be >= vocab.
    template <bool IS_LAST> __device__ __forceinline__ void take(unsigned char* line, int column) {
#pragma unroll 1
        for (int octet = 0; octet < 8; octet += 2) {
            uint4* places[2];
            uint4 x[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {  // both, before one is written
                places[i] = reinterpret_cast<uint4*>(word(line, octet + i));
                x[i] = *places[i];
            }
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                *places[i] = exponentials<IS_LAST>(x[i], column + 8 * (octet + i));
            }
        }
    }

    // Eight logits from this column on become exponentials, and are added to the sum.
    template <bool IS_LAST>
    __device__ __forceinline__ uint4 exponentials(const uint4& x, int column) {
        const u32 pairs[4] = {x.x, x.y, x.z, x.w};
        float y[8];
#pragma unroll
        for (int k = 0; k < 8; ++k) {
            y[k] = k % 2 ? upper_half(pairs[k / 2]) : lower_half(pairs[k / 2]);
        }
#pragma unroll
        for (int k = 0; k < 8; ++k) {
            y[k] = exp2_approx(fmaf(y[k], LOG2E, offset));
            if (IS_LAST && column + k >= vocab) { y[k] = 0.0f; }
        }
        sum += ((y[0] + y[1]) + (y[2] + y[3])) + ((y[4] + y[5]) + (y[6] + y[7]));
        return make_uint4(to_pair(y[0], y[1]), to_pair(y[2], y[3]), to_pair(y[4], y[5]),
                          to_pair(y[6], y[7]));
    }
};

#define PARAMETERS                                                                                 \
    const __grid_constant__ TensorMap e, f32 *sums, f32 *target_logits, const f32 *shift,          \
        const i32 *targets, i32 vocab
#define ARGUMENTS &e, sums, target_logits, shift, targets, M, N, vocab, dynamic
