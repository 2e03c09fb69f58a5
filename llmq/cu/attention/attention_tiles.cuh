// attention_tiles.cuh -- tiles of heads' rows in shared memory, and the products of attention_mma.cuh.
//
// The eight rows of an 8 x 8 matrix lie in different banks of shared memory: the row's number
// permutes the 16-byte units within each eight units of a row. Rows whose length is not a multiple
// of eight units are padded to an odd number of units.
//
// Sums of more than 256 columns do not fit into registers: two warps then share their rows. With
// SCORE_PARTS = 2 each of the two warps multiplies half of the columns for the scores, and the
// warps exchange sums, because reads of shared memory limit these kernels.
#pragma once
#include "ptx.cuh"

namespace mma {

// A row of a tile has D elements: a head's, then zeros. UNITS: number of 16-byte units in a row.
constexpr int D = pieces(HEAD_DIM, 16) * 16, UNITS = D / 8;
// SHARING: warps that share rows. Each has all scores of the rows, and sums of OWN_D columns.
constexpr int SHARING = D > 256 ? 2 : 1, OWN_D = D / SHARING, OWN_UNITS = UNITS / SHARING;
// Columns that a warp multiplies for the scores.
constexpr int SCORE_D = D / SCORE_PARTS;
static_assert(SCORE_PARTS == 1 || SHARING == 2, "only warps that share rows share their scores");
constexpr bool EXCHANGED = UNITS % 8 == 0;
constexpr int ROW_BYTES = EXCHANGED ? 2 * D : 2 * (D + 8);

// Byte offset of unit `unit` of a row in a tile.
__device__ __forceinline__ int place(int row, int unit) {
    return row * ROW_BYTES + (EXCHANGED ? unit ^ row & 7 : unit) * 16;
}
// Address that is `bytes` (a multiple of 32) after `row`, one of the row's first two units.
__device__ __forceinline__ SharedAddress along(SharedAddress row, int bytes) {
    return EXCHANGED ? (row ^ bytes & 96) + (bytes & ~127) : row + bytes;
}

// Eight elements of a head's row from `column` on, zeros behind its end.
__device__ __forceinline__ Vec<bf16> eight_of_head(const bf16* row, int column, bool valid) {
    Vec<bf16> x;
#pragma unroll
    for (int k = 0; k < 8; ++k) {
        x[k] = valid && column + k < HEAD_DIM ? row[column + k] : __float2bfloat16(0.0f);
    }
    return x;
}

// Start copying ROWS rows of a head, which are `pitch` elements apart in global memory. Rows from
// `limit` on become zeros. `first` is a row below the limit. PER_ROW threads share a row.
template <int ROWS, int THREADS>
__device__ __forceinline__ void load_rows(SharedAddress to, const bf16* from, int pitch, int first,
                                          int limit) {
    constexpr int PER_ROW = UNITS & -UNITS, AT_ONCE = THREADS / PER_ROW;
    const int unit = threadIdx.x % PER_ROW;
#pragma unroll
    for (int i = 0; i < pieces(ROWS, AT_ONCE); ++i) {
        const int row = i * AT_ONCE + (int)threadIdx.x / PER_ROW;
        if (ROWS % AT_ONCE == 0 || row < ROWS) {
            const bool valid = first + row < limit;
            const bf16* p = from + (i64)(valid ? first + row : first) * pitch + unit * 8;
#pragma unroll
            for (int j = 0; j < UNITS; j += PER_ROW) {
                if constexpr (D == HEAD_DIM) {
                    cp_async_16(to + place(row, unit + j), p + j * 8, valid);
                } else {
                    const int column = (unit + j) * 8;
                    const Vec<bf16> x = eight_of_head(p - unit * 8, column, valid);
                    store_shared(to + place(row, unit + j), pack(x));
                }
            }
        }
    }
}

// Offset of this lane's row for ldmatrix in a 16 x 16 piece of a tile. The order of the four 8 x 8
// matrices (rows, columns; + is 8..15) is that of the operand's registers in ptx.cuh:
//   left                                               (0, 0) (+, 0) (0, +) (+, +)
//   right of a b^T, two of 8 columns: tile rows are    (0, 0) (0, +) (+, 0) (+, +)
//   the columns of B
//   right of a b, likewise: tile rows are inner, each  (0, 0) (+, 0) (0, +) (+, +)
//   matrix transposed
__device__ __forceinline__ int left_offset(int lane) {
    return place(lane & 15, lane >> 4);
}
__device__ __forceinline__ int right_rows_offset(int lane) {
    return place((lane & 7) + (lane >> 4) * 8, lane >> 3 & 1);
}
__device__ __forceinline__ int right_columns_offset(int lane) { return left_offset(lane); }

// sum = a b^T over SCORE_D columns: a has 16 M rows, b 8 N rows.
template <int M, int N>
__device__ __forceinline__ void multiply_rows(float (&sum)[M][N][4], SharedAddress a,
                                              SharedAddress b) {
#pragma unroll
    for (int m = 0; m < M; ++m) {
#pragma unroll
        for (int n = 0; n < N; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) { sum[m][n][i] = 0.0f; }
        }
    }
#pragma unroll
    for (int k = 0; k < SCORE_D / 16; ++k) {
        u32 left[M][4];
#pragma unroll
        for (int m = 0; m < M; ++m) { ldmatrix_x4(left[m], along(a, k * 32) + m * 16 * ROW_BYTES); }
#pragma unroll
        for (int n = 0; n < N / 2; ++n) {
            u32 right[4];
            ldmatrix_x4(right, along(b, k * 32) + n * 16 * ROW_BYTES);
#pragma unroll
            for (int m = 0; m < M; ++m) {
                mma_m16n8k16_bf16(sum[m][2 * n], left[m], right[0], right[1]);
                mma_m16n8k16_bf16(sum[m][2 * n + 1], left[m], right[2], right[3]);
            }
        }
    }
}

// Add the results of multiply_rows of two warps that share rows; both warps get the sum. Calls
// with the same BUFFER share memory and need a barrier of the block in between.
template <int BUFFER, int THREADS, int M, int N>
__device__ __forceinline__ void add_parts(float (&sum)[M][N][4]) {
    if constexpr (SCORE_PARTS > 1) {
        __shared__ float4 sums[M * N][THREADS];
        const int own = (int)threadIdx.x, other = own ^ 32;
#pragma unroll
        for (int i = 0; i < M * N; ++i) {
            const float* const x = sum[i / N][i % N];
            sums[i][own] = make_float4(x[0], x[1], x[2], x[3]);
        }
        barrier_sync(1 + own / 64, 64);
#pragma unroll
        for (int i = 0; i < M * N; ++i) {
            float* const x = sum[i / N][i % N];
            const float4 y = sums[i][other];
            x[0] += y.x;
            x[1] += y.y;
            x[2] += y.z;
            x[3] += y.w;
        }
    }
}

// sum += a b: a is a result of multiply_rows (16 M x 8 N), rounded to BF16; b has 8 N rows of D.
template <int M, int N>
__device__ __forceinline__ void multiply_columns(float (&sum)[M][OWN_D / 8][4],
                                                 const float (&a)[M][N][4], SharedAddress b) {
#pragma unroll
    for (int k = 0; k < N / 2; ++k) {
        u32 left[M][4];
#pragma unroll
        for (int m = 0; m < M; ++m) {
            // Accumulator and left operand have one layout: two 16 x 8 results make one 16 x 16.
            left[m][0] = to_pair(a[m][2 * k][0], a[m][2 * k][1]);
            left[m][1] = to_pair(a[m][2 * k][2], a[m][2 * k][3]);
            left[m][2] = to_pair(a[m][2 * k + 1][0], a[m][2 * k + 1][1]);
            left[m][3] = to_pair(a[m][2 * k + 1][2], a[m][2 * k + 1][3]);
        }
#pragma unroll
        for (int n = 0; n < OWN_D / 16; ++n) {
            u32 right[4];
            ldmatrix_x4_trans(right, along(b, n * 32) + k * 16 * ROW_BYTES);
#pragma unroll
            for (int m = 0; m < M; ++m) {
                mma_m16n8k16_bf16(sum[m][2 * n], left[m], right[0], right[1]);
                mma_m16n8k16_bf16(sum[m][2 * n + 1], left[m], right[2], right[3]);
            }
        }
    }
}

// Write this warp's 16 M rows of sums, times each row's factor, to columns from unit `first` on.
// The rows pass through a part of shared memory that no other warp reads; row r < rows goes to
// `to + r * pitch`.
template <int M>
__device__ __forceinline__ void store_rows(bf16* to, int pitch, int rows,
                                           const float (&sum)[M][OWN_D / 8][4],
                                           const float (&factor)[M][2], char* tile, int first,
                                           int lane) {
    const int g = lane >> 2, t = lane & 3;
    __syncwarp();
#pragma unroll
    for (int m = 0; m < M; ++m) {
#pragma unroll
        for (int n = 0; n < OWN_D / 8; ++n) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const float f = factor[m][r];
                *reinterpret_cast<u32*>(tile + place(m * 16 + r * 8 + g, first + n) + t * 4) =
                    to_pair(sum[m][n][2 * r] * f, sum[m][n][2 * r + 1] * f);
            }
        }
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < M * OWN_UNITS / 2; ++i) {
        const int unit = i * 32 + lane, row = unit / OWN_UNITS, column = first + unit % OWN_UNITS;
        if (row < rows) {
            bf16* const at = to + (i64)row * pitch + column * 8;
            const auto& x = *reinterpret_cast<const Vec<bf16>*>(tile + place(row, column));
            if constexpr (D == HEAD_DIM) {
                store_vec(at, x);
            } else {
#pragma unroll
                for (int k = 0; k < 8; ++k) {
                    if (column * 8 + k < HEAD_DIM) { at[k] = x[k]; }
                }
            }
        }
    }
}

}  // namespace mma
