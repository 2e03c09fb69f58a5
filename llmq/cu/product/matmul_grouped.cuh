// matmul_grouped.cuh -- products of rows sorted by expert, each expert's rows with the expert's
// matrix.
//
//   out[r] = x[r] [+ bias[e]]     x: the sum of matmul_fused.cu, rounded once; e: the expert of row
//   r
//
// Data     b: the experts' matrices (N, K) below each other; with B_K_OUTSIDE (K, N), K a multiple
//          of 64. tail: likewise (N, R), or (R, N) with TAIL_ROWS = R; its last box may reach into
//          the next expert's rows, where h has zeros. out: bf16 (M, N). bias: bf16 (experts, N),
//          with BIAS. starts: I32 (experts + 1), first row of each expert, from 0 to M. At most 512
//          experts.
// Cost     A cluster has 256 rows of one expert, or 128 rows and twice the columns: on average an
//          expert's tiles waste 64 rows. Results go from a chunk of 16 rows to memory by plain
//          stores, because the chunk may reach into another expert's rows; the other warpgroup
//          multiplies meanwhile.
#pragma once
#include "product/pingpong_sm90.cuh"

using Product = PingPong<Mainloop, CHUNK_BYTES>;

// A warp's work on its rows of a tile, as in matmul_adapted.cuh.
struct Epilogue {
    bf16* out;
    const bf16* bias;
    int N;

    __device__ __forceinline__ void operator()(const Tile& tile, const Sums& d, int first_row,
                                               SharedAddress chunk, SharedAddress) const {
        static_assert(TILE_COLUMNS % BOX == 0);
        const u32 lane = threadIdx.x % 32;
        const u32 line = lane & 15, octet = lane >> 4;  // of 16-byte words, for stmatrix
#pragma unroll
        for (int c = 0; c < HALVES_OF_TILE * TILE_BOXES; ++c) {
            const int half = c / TILE_BOXES, box = c % TILE_BOXES;
            // Else addresses of all boxes would be held at once, which registers cannot.
            int first = tile.column, row = first_row + TILE_ROWS / 2 * half;
            forget(first), forget(row);
            first += box * BOX, row += tile.row;
            const volatile u32* const mine =
                reinterpret_cast<const u32*>(bias) + (tile.expert * N + first) / 2 + lane % 4;
            __syncwarp();  // the chunk is empty
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                u32 pairs[4], more[2];  // more: bias for two of every 8 columns
                if constexpr (BIAS) {
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        const int before = 16 * j + 8 * i;
                        more[i] = before < N - first ? mine[before / 2] : 0;
                    }
                }
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float* sum = d[half] + box * (BOX / 2) + 8 * j + 2 * i;
                    float low = sum[0], high = sum[1];
                    if constexpr (BIAS) {
                        low += lower_half(more[i / 2]);
                        high += upper_half(more[i / 2]);
                    }
                    pairs[i] = to_pair(low, high);
                }
                stmatrix_x4(chunk + line * LINE + ((2 * j + octet ^ line & 7) << 4), pairs[0],
                            pairs[1], pairs[2], pairs[3]);
            }
            __syncwarp();
            const int word = lane % 8, below = lane / 8, column = first + 8 * word;
            bf16* const to = out + (i64)(row + below) * N + column;
            const int rows = column < N ? tile.end - row - below : 0;
#pragma unroll
            for (int i = 0; i < 16; i += 4) {
                const int r = below + i;
                const uint4 x = load_shared(chunk + r * LINE + ((word ^ r & 7) << 4));
                if (i < rows) { *reinterpret_cast<uint4*>(to + (i64)i * N) = x; }
            }
        }
    }
};

#define PARAMETERS bf16 *out, const bf16 *bias, const i32 *starts, i32 experts
#define ARGUMENTS out, bias, N
#define WORK \
    starts, experts, N, Product::WIDTH, B_K_OUTSIDE ? K : N, TAIL_K_OUTSIDE ? TAIL_ROWS : N
