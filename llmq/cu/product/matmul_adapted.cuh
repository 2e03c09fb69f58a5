// matmul_adapted.cuh -- a product that is stored, with a bias and a matrix of its size added.
//
//   out = x + bias + addend        x: the sum of matmul_fused.cu, rounded once with what is added
//
// Data     out: bf16 (M, N). bias: bf16 (N), with BIAS. addend: as out, other memory, with ADDEND.
//          A tile has 192 or 224 columns, which changes no bit.
// Cost     The addend is loaded, a part at a time, into the chunk from which the result is stored.
//          If warpgroups take turns, the other warpgroup multiplies meanwhile.
#pragma once
#include "product/pingpong_sm90.cuh"

constexpr int CHUNKS = IN_TURNS ? 1 : 2;
using Product = PingPong<Mainloop, CHUNKS * CHUNK_BYTES>;

// A warp's work on its rows of a tile: 16 rows of each half, from first_row on, pass through the
// warp's chunks 64 columns at a time. Of 224 columns the last 64 overlap the 64 before, and both
// write equal values. arrived: the warp's barrier, whose phase is even before and after.
struct Epilogue {
    const TensorMap *out, *addend;
    const bf16* bias;
    int N;

    __device__ __forceinline__ void operator()(const Tile& tile, const Sums& d, int first_row,
                                               SharedAddress chunks, SharedAddress arrived) const {
        static_assert(HALVES_OF_TILE * TILE_BOXES % 2 == 0 && TILE_BOXES * HALVES_OF_TILE % CHUNKS == 0);
        const u32 lane = threadIdx.x % 32;
        const u32 line = lane & 15, octet = lane >> 4;  // of 16-byte words, for stmatrix
        const int left = N - tile.column;
        const volatile u32* mine = reinterpret_cast<const u32*>(bias) + tile.column / 2 + lane % 4;
#pragma unroll
        for (int c = 0; c < HALVES_OF_TILE * TILE_BOXES; ++c) {
            const int half = c / TILE_BOXES, first = min(c % TILE_BOXES * BOX, TILE_COLUMNS - BOX);
            const SharedAddress chunk = chunks + c % CHUNKS * CHUNK_BYTES;
            u32 more[BOX / 8];  // bias for two of every 8 columns
            if constexpr (BIAS) {
#pragma unroll
                for (int i = 0; i < BOX / 8; ++i) {
                    // Volatile, because registers cannot hold the bias of all boxes at once.
                    const int column = first + 8 * i;
                    more[i] = column < left ? mine[column / 2] : 0;
                }
            }
            const int x = tile.column + first, y = tile.row + TILE_ROWS / 2 * half + first_row;
            if (lane == 0) {
                stores_have_read<CHUNKS - 1>();
                if constexpr (ADDEND) {
                    barrier_expect(arrived, CHUNK_BYTES);
                    load_box(chunk, addend, x, y, arrived);
                }
            }
            __syncwarp();
            if constexpr (ADDEND) { barrier_wait(arrived, c & 1); }
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const SharedAddress word = chunk + line * LINE + ((2 * j + octet ^ line & 7) << 4);
                u32 pairs[4];
                if constexpr (ADDEND) { ldmatrix_x4(pairs, word); }
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float* sum = d[half] + first / 2 + 8 * j + 2 * i;
                    float low = sum[0], high = sum[1];
                    if constexpr (BIAS) {
                        low += lower_half(more[2 * j + i / 2]);
                        high += __uint_as_float(more[2 * j + i / 2] & 0xffff0000u);
                    }
                    if constexpr (ADDEND) {
                        low += lower_half(pairs[i]);
                        high += upper_half(pairs[i]);
                    }
                    pairs[i] = to_pair(low, high);
                }
                stmatrix_x4(word, pairs[0], pairs[1], pairs[2], pairs[3]);
            }
            stores_begin();
            __syncwarp();
            if (lane == 0) { store_box(out, x, y, chunk); }
        }
    }
};

#define PARAMETERS                                                                                 \
    const __grid_constant__ TensorMap out, const bf16 *bias, const __grid_constant__ TensorMap addend
#define ARGUMENTS &out, &addend, bias, N
