// product_sm80.cuh -- the main loop of products on the tensor cores of all GPUs since Ampere.
//
//   sum += a (M, K) @ b (N, K)^T        of a block's tile: of BF16 and F32 in F32, of I8 in 32 bits
//
// Each operand lies in memory with K inside, in rows of K, or with K outside, (K, M) or (K, N). Steps
// of 64 bytes of K arrive in shared memory by cp.async, DEPTH - 1 of them ahead, as they lie there:
// ldmatrix transposes BF16 whose K is outside. DOWN x ACROSS warps have 64 rows and WIDE columns of
// the tile each, and sums in registers as in ptx.cuh.
//
// A stage's operand has lines of units of 16 bytes: a line of four for each row, or with K outside one
// for each of the step's K. Units are exchanged within a line so that the eight rows of an 8 x 8
// matrix are in different banks.
//
// F32 is multiplied by plain multiply-adds, in the order of K, from the same stages and into the same
// sums: it is what tests of exact numbers run on, and not made for speed.
#pragma once
#include "ptx.cuh"

// One operand of a tile. data: where its first row and K is. pitch: elements from a row, or with K
// outside from a K, to the next. rows: how many there are from there on; those behind are zeros.
template <class X> struct TileOperand {
    const X* data;
    int pitch, rows;
};

// Four neighbours of a result, in one access.
template <class X> struct alignas(4 * sizeof(X)) Four {
    X v[4];
};

template <class X> struct SumOf {
    using Type = float;
};
template <> struct SumOf<i8> {
    using Type = i32;
};

template <class X, int DOWN, int ACROSS, int WIDE, int DEPTH, bool A_K_OUTSIDE = false,
          bool B_K_OUTSIDE = false>
struct Sm80Mainloop {
    static constexpr int HIGH = 64, THREADS = 32 * DOWN * ACROSS;
    static constexpr int ROWS = HIGH * DOWN, COLUMNS = WIDE * ACROSS;  // of a tile
    static constexpr int STEP_BYTES = 64, STEP = STEP_BYTES / sizeof(X);
    static constexpr int UNIT = 16 / sizeof(X);  // elements
    static constexpr int LEFT_BYTES = ROWS * STEP_BYTES;
    static constexpr int STAGE_BYTES = LEFT_BYTES + COLUMNS * STEP_BYTES;
    static constexpr int M16 = HIGH / 16, N8 = WIDE / 8;
    using Sum = typename SumOf<X>::Type;
    using Sums = Sum[M16][N8][4];

    // The place of a unit of a line, in bytes. WIDTH: of the operand's tile, where K is outside.
    template <bool K_OUTSIDE, int WIDTH>
    static __device__ __forceinline__ int place(int line, int unit) {
        return K_OUTSIDE ? line * (WIDTH * (int)sizeof(X)) + ((unit ^ (line & 7)) << 4)
                         : line * STEP_BYTES + ((unit ^ (line >> 1 & 3)) << 4);
    }

    // This warp's first row and column of the tile.
    static __device__ __forceinline__ int warp_row() { return threadIdx.x / 32 % DOWN * HIGH; }
    static __device__ __forceinline__ int warp_column() { return threadIdx.x / 32 / DOWN * WIDE; }

    // sum += the product; shared: DEPTH * STAGE_BYTES. All threads come here together.
    static __device__ __forceinline__ void run(Sums& sum, char* shared, const TileOperand<X>& a,
                                               const TileOperand<X>& b, int K) {
        const int steps = (K + STEP - 1) / STEP;
        const SharedAddress stages = shared_address(shared);
        auto load = [&](int step) {
            if (step < steps) {
                const SharedAddress to = stages + step % DEPTH * STAGE_BYTES;
                load_operand<A_K_OUTSIDE, ROWS>(to, a, step * STEP, K);
                load_operand<B_K_OUTSIDE, COLUMNS>(to + LEFT_BYTES, b, step * STEP, K);
            }
            cp_async_commit();  // also without copies, so that groups are counted alike
        };
        __syncthreads();  // nobody still reads the stages of the tile before
#pragma unroll
        for (int i = 0; i < DEPTH - 1; ++i) { load(i); }
#pragma unroll 1
        for (int step = 0; step < steps; ++step) {
            cp_async_wait<DEPTH - 2>();
            __syncthreads();  // everybody's copies are there, and the stage before is used up
            load(step + DEPTH - 1);
            const int at = step % DEPTH * STAGE_BYTES;
            if constexpr (sizeof(X) == 4) {
                multiply(sum, shared + at);
            } else {
                multiply(sum, stages + at);
            }
        }
        cp_async_wait<0>();
    }

    // f(row, column, values) for each four neighbours of this warp's sums, in the tile.
    template <class F> static __device__ __forceinline__ void each_four(const Sums& sum, F f) {
        const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
        const bool odd = t & 1;  // has four of the second piece of 8 columns, an even one of the first
#pragma unroll
        for (int n = 0; n < N8; n += 2) {
#pragma unroll
            for (int m = 0; m < M16; ++m) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const Sum(&near)[4] = sum[m][n], (&far)[4] = sum[m][n + 1];
                    Sum x[4];
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        const Sum first = near[2 * half + i], second = far[2 * half + i];
                        const Sum got = __shfl_xor_sync(0xFFFFFFFFu, odd ? first : second, 1);
                        x[i] = odd ? got : first;
                        x[2 + i] = odd ? second : got;
                    }
                    const int column = warp_column() + n * 8 + (odd ? 6 : 0) + 2 * t;
                    f(warp_row() + m * 16 + half * 8 + g, column, x);
                }
            }
        }
    }

private:
    template <bool K_OUTSIDE, int WIDTH>
    static __device__ __forceinline__ void load_operand(SharedAddress to, const TileOperand<X>& from,
                                                        int k, int K) {
        constexpr int PER_LINE = K_OUTSIDE ? WIDTH / UNIT : STEP / UNIT;
        constexpr int UNITS = WIDTH * STEP_BYTES / 16;
        static_assert(UNITS % THREADS == 0 && THREADS % PER_LINE == 0, "threads copy as often");
#pragma unroll
        for (int i = 0; i < UNITS; i += THREADS) {
            const int line = (i + (int)threadIdx.x) / PER_LINE, unit = threadIdx.x % PER_LINE;
            const int row = K_OUTSIDE ? unit * UNIT : line, at = k + (K_OUTSIDE ? line : unit * UNIT);
            const bool valid = row < from.rows && at < K;
            const i64 offset = (i64)(K_OUTSIDE ? at : row) * from.pitch + (K_OUTSIDE ? row : at);
            const X* const p = from.data + (valid ? offset : 0);
            cp_async_16(to + place<K_OUTSIDE, WIDTH>(line, unit), p, valid);
        }
    }

    // The order of ldmatrix's four 8 x 8 matrices is that of the operand's registers in ptx.cuh.
    static __device__ __forceinline__ void multiply(Sums& sum, SharedAddress stage) {
        const int lane = threadIdx.x & 31;
        const int low = lane & 15, high = lane >> 4, mid = lane >> 3 & 1;
        const int inner = (lane & 7) + high * 8;
        const SharedAddress tile_b = stage + LEFT_BYTES;
#pragma unroll
        for (int k = 0; k < STEP_BYTES / 32; ++k) {
            u32 left[M16][4], right[N8 / 2][4];
#pragma unroll
            for (int m = 0; m < M16; ++m) {
                if constexpr (A_K_OUTSIDE) {
                    const int unit = warp_row() / 8 + 2 * m + mid;
                    ldmatrix_x4_trans(left[m], stage + place<true, ROWS>(16 * k + inner, unit));
                } else {
                    const int first = place<false, ROWS>(warp_row() + low, high + 2 * k);
                    ldmatrix_x4(left[m], stage + first + m * 16 * STEP_BYTES);
                }
            }
#pragma unroll
            for (int n = 0; n < N8 / 2; ++n) {
                if constexpr (B_K_OUTSIDE) {
                    const int unit = warp_column() / 8 + 2 * n + high;
                    ldmatrix_x4_trans(right[n], tile_b + place<true, COLUMNS>(16 * k + low, unit));
                } else {
                    const int first = place<false, COLUMNS>(warp_column() + inner, mid + 2 * k);
                    ldmatrix_x4(right[n], tile_b + first + n * 16 * STEP_BYTES);
                }
            }
#pragma unroll
            for (int m = 0; m < M16; ++m) {
#pragma unroll
                for (int n = 0; n < N8 / 2; ++n) {
                    multiply(sum[m][2 * n], left[m], right[n][0], right[n][1]);
                    multiply(sum[m][2 * n + 1], left[m], right[n][2], right[n][3]);
                }
            }
        }
    }

    static __device__ __forceinline__ void multiply(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
        mma_m16n8k16_bf16(d, a, b0, b1);
    }
    static __device__ __forceinline__ void multiply(i32 (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
        mma_m16n8k32_s8(d, a, b0, b1);
    }

    template <bool K_OUTSIDE, int WIDTH>
    static __device__ __forceinline__ float value(const char* tile, int row, int k) {
        const int line = K_OUTSIDE ? k : row, at = K_OUTSIDE ? row : k;
        const char* const unit = tile + place<K_OUTSIDE, WIDTH>(line, at / UNIT);
        return reinterpret_cast<const float*>(unit)[at % UNIT];
    }
    static __device__ __forceinline__ void multiply(Sums& sum, const char* stage) {
        const int g = threadIdx.x >> 2 & 7, t = threadIdx.x & 3;
#pragma unroll 1
        for (int k = 0; k < STEP; ++k) {
            float right[N8][2];
#pragma unroll
            for (int i = 0; i < 2 * N8; ++i) {
                const int column = warp_column() + i / 2 * 8 + 2 * t + i % 2;
                right[i / 2][i % 2] = value<B_K_OUTSIDE, COLUMNS>(stage + LEFT_BYTES, column, k);
            }
#pragma unroll
            for (int i = 0; i < 2 * M16; ++i) {
                const int row = warp_row() + i / 2 * 16 + i % 2 * 8 + g;
                const float left = value<A_K_OUTSIDE, ROWS>(stage, row, k);
#pragma unroll
                for (int n = 0; n < N8; ++n) {
#pragma unroll
                    for (int j = 0; j < 2; ++j) {
                        float& to = sum[i / 2][n][i % 2 * 2 + j];
                        to = fmaf(left, right[n][j], to);
                    }
                }
            }
        }
    }
};
