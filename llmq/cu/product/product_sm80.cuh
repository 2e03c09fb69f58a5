// product_sm80.cuh -- the main loop of products on the tensor cores of all GPUs since Ampere.
//
//   sum += a (M, K) @ b (N, K)^T        for a block's tile; sums of BF16, F32 and fp8 codes are
//   F32,
//                                       sums of I8 have 32 bits
//
// Each operand lies in memory with K inside, in rows of K, or with K outside, (K, M) or (K, N). Steps
// of 64 bytes of K arrive in shared memory by cp.async, DEPTH - 1 steps ahead, in the memory's
// layout: ldmatrix transposes BF16 whose K is outside. Each of DOWN x ACROSS warps has 64 rows and
// WIDE columns of the tile, with sums in registers as in ptx.cuh.
//
// An operand's part of a stage has lines of 16-byte units: a line of four units for each row, or
// with K outside a line for each index of the step's K. Units are permuted within a line, so that
// the eight rows of an 8 x 8 matrix lie in different banks.
//
// For fp8 codes the tensor cores, whose sums may have fewer bits than F32, sum only within a step.
// The steps' sums are added up in F32, one addition for 64 products of each element. With IN_HALF a
// step's sums are in half precision, which GeForce's tensor cores add at twice the rate. Codes are
// E4M3_HALF then: 64 products of such codes never exceed half precision.
//
// F32 is multiplied by plain multiply-adds, in the order of K, from the same stages and into the same
// sums. Tests of exact numbers use F32, which is not made for speed.
#pragma once
#include "ptx.cuh"

// One operand of a tile. data: the element of the tile's first row and K. pitch: elements from a
// row (with K outside, from an index of K) to the next. rows: number of rows from data on; further
// rows are zeros.
template <class X> struct TileOperand {
    const X* data;
    int pitch, rows;
};

// Four neighbouring elements of a result, in one access.
template <class X> struct alignas(4 * sizeof(X)) Four {
    X v[4];
};

// Type of sums. OF_STEPS: true if each step has sums of its own, which are added up.
template <class X> struct SumOf {
    using Type = float;
    static constexpr bool OF_STEPS = sizeof(X) == 1;
};
template <> struct SumOf<i8> {
    using Type = i32;
    static constexpr bool OF_STEPS = false;
};

template <class X, int DOWN, int ACROSS, int WIDE, int DEPTH, bool LEFT_K_OUTSIDE = false,
          bool RIGHT_K_OUTSIDE = false, class Y = X, bool IN_HALF = false>
struct Sm80Mainloop {
    static_assert(sizeof(X) == sizeof(Y), "X, Y: formats of a and b");
    static constexpr int HIGH = 64, THREADS = 32 * DOWN * ACROSS;
    static constexpr int ROWS = HIGH * DOWN, COLUMNS = WIDE * ACROSS;  // rows and columns of a tile
    static constexpr int STEP_BYTES = 64, STEP = STEP_BYTES / sizeof(X);
    static constexpr int UNIT = 16 / sizeof(X);  // elements
    static constexpr int LEFT_BYTES = ROWS * STEP_BYTES;
    static constexpr int STAGE_BYTES = LEFT_BYTES + COLUMNS * STEP_BYTES;
    static constexpr int M16 = HIGH / 16, N8 = WIDE / 8;
    static constexpr int SLICES = STEP_BYTES / 32;  // slices of a step, of one instruction each
    // True if a step's first slice is loaded while the last slice of the step before is multiplied.
    static constexpr bool EARLY =
        sizeof(X) == 2 ? LEFT_K_OUTSIDE && RIGHT_K_OUTSIDE : sizeof(X) == 1 && !SumOf<X>::OF_STEPS;
    using Sum = typename SumOf<X>::Type;
    using Sums = Sum[M16][N8][4];

    // Byte offset of a unit of a line. WIDTH: rows or columns of the operand's tile, for K outside.
    template <bool K_OUTSIDE, int WIDTH>
    static __device__ __forceinline__ int place(int line, int unit) {
        return K_OUTSIDE ? line * (WIDTH * (int)sizeof(X)) + ((unit ^ (line & 7)) << 4)
                         : line * STEP_BYTES + ((unit ^ (line >> 1 & 3)) << 4);
    }

    // This warp's first row and column of the tile.
    static __device__ __forceinline__ int warp_row() { return threadIdx.x / 32 % DOWN * HIGH; }
    static __device__ __forceinline__ int warp_column() { return threadIdx.x / 32 / DOWN * WIDE; }

    // sum += the product. shared: DEPTH * STAGE_BYTES bytes. All threads of the block call this.
    static __device__ __forceinline__ void run(Sums& sum, char* shared, const TileOperand<X>& a,
                                               const TileOperand<Y>& b, int K) {
        const SharedAddress stages = shared_address(shared);
        Loader<LEFT_K_OUTSIDE, ROWS, X> left(a, K);
        Loader<RIGHT_K_OUTSIDE, COLUMNS, Y> right(b, K);
        int steps = (K + STEP - 1) / STEP, ahead = steps;  // steps left to multiply, to load
        auto load = [&](int at) {
            if (ahead-- > 0) {
                left.load(stages + at);
                right.load(stages + at + LEFT_BYTES);
            }
            cp_async_commit();  // also without copies, so that group counts match
        };
        auto wait_for_stage = [] {
            cp_async_wait<DEPTH - 2>();
            __syncthreads();  // all copies have arrived, and all warps have used the last stage
        };
        auto next = [](int at) { return at == (DEPTH - 1) * STAGE_BYTES ? 0 : at + STAGE_BYTES; };
        __syncthreads();  // all warps have read the last tile's stages
#pragma unroll
        for (int i = 0; i < DEPTH - 1; ++i) { load(i * STAGE_BYTES); }
        int at = 0;
        if constexpr (EARLY) {
            Slice slice[SLICES];
            wait_for_stage();
            load((DEPTH - 1) * STAGE_BYTES);
            load_slice(slice[0], stages, 0);
#pragma unroll 1
            for (; steps > 0; --steps) {
#pragma unroll
                for (int k = 1; k < SLICES; ++k) {
                    load_slice(slice[k], stages + at, k);
                    multiply(sum, slice[k - 1]);
                }
                wait_for_stage();
                load(at);
                at = next(at);
                load_slice(slice[0], stages + at, 0);
                multiply(sum, slice[SLICES - 1]);
            }
        } else {
#pragma unroll 1
            for (; steps > 0; --steps, at = next(at)) {
                wait_for_stage();
                load(at == 0 ? (DEPTH - 1) * STAGE_BYTES : at - STAGE_BYTES);
                if constexpr (sizeof(X) == 4) {
                    multiply(sum, shared + at);
                } else if constexpr (SumOf<X>::OF_STEPS) {
                    multiply_codes(sum, stages + at);
                } else {
                    multiply(sum, stages + at);
                }
            }
        }
        cp_async_wait<0>();
    }

    // Call f(row, column, values) for each four neighbours of this warp's sums, with their place in
    // the tile.
    template <class F> static __device__ __forceinline__ void each_four(const Sums& sum, F f) {
        const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
        const bool odd = t & 1;  // odd: four of the second 8 columns, else of the first
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
    // A thread's units of an operand, step after step: in a step, one unit in every LINES-th line.
    template <bool K_OUTSIDE, int WIDTH, class Element> struct Loader {
        static constexpr int PER_LINE = K_OUTSIDE ? WIDTH / UNIT : STEP / UNIT;
        static constexpr int LINES = THREADS / PER_LINE, COUNT = WIDTH * STEP_BYTES / 16 / THREADS;
        static_assert(COUNT * THREADS * 16 == WIDTH * STEP_BYTES && LINES * PER_LINE == THREADS);

        const Element* const readable;
        const Element* next;  // the first unit of the next step
        const int pitch;
        int rest;       // indices of K left, from `next` on
        u32 there = 0;  // bit i: the row of unit i exists

        __device__ __forceinline__ Loader(const TileOperand<Element>& from, int K)
            : readable(from.data),
              next(from.data + (i64)line() * from.pitch + unit() * UNIT),
              pitch(from.pitch),
              rest(K - (K_OUTSIDE ? line() : unit() * UNIT)) {
#pragma unroll
            for (int i = 0; i < COUNT; ++i) {
                const int row = K_OUTSIDE ? unit() * UNIT : line() + i * LINES;
                there |= (u32)(row < from.rows) << i;
            }
        }
        static __device__ __forceinline__ int line() { return threadIdx.x / PER_LINE; }
        static __device__ __forceinline__ int unit() { return threadIdx.x % PER_LINE; }

        __device__ __forceinline__ void load(SharedAddress to) {
#pragma unroll
            for (int i = 0; i < COUNT; ++i) {
                const bool valid = (there >> i & 1) && rest > (K_OUTSIDE ? i * LINES : 0);
                const Element* const p = valid ? next + (i64)(i * LINES) * pitch : readable;
                cp_async_16(to + place<K_OUTSIDE, WIDTH>(line() + i * LINES, unit()), p, valid);
            }
            rest -= STEP;
            next += K_OUTSIDE ? (i64)STEP * pitch : STEP;
        }
    };

    // ldmatrix's four 8 x 8 matrices are in the order of the operand's registers in ptx.cuh. k:
    // which 32 bytes of the step. m: which 16 rows of the warp.
    static __device__ __forceinline__ void load_left(u32 (&left)[4], SharedAddress stage, int k, int m) {
        const int lane = threadIdx.x & 31, low = lane & 15, high = lane >> 4, mid = lane >> 3 & 1;
        if constexpr (LEFT_K_OUTSIDE) {
            const int line = 16 * k + (lane & 7) + high * 8;
            const int unit = warp_row() / 8 + 2 * m + mid;
            ldmatrix_x4_trans(left, stage + place<true, ROWS>(line, unit));
        } else {
            const int first = place<false, ROWS>(warp_row() + low, high + 2 * k);
            ldmatrix_x4(left, stage + first + m * 16 * STEP_BYTES);
        }
    }
    // Load the right operand of 16 columns, n-th of the warp.
    static __device__ __forceinline__ void load_right(u32 (&right)[4], SharedAddress stage, int k,
                                                      int n) {
        const int lane = threadIdx.x & 31, low = lane & 15, high = lane >> 4, mid = lane >> 3 & 1;
        const SharedAddress tile = stage + LEFT_BYTES;
        if constexpr (RIGHT_K_OUTSIDE) {
            const int unit = warp_column() / 8 + 2 * n + high;
            ldmatrix_x4_trans(right, tile + place<true, COLUMNS>(16 * k + low, unit));
        } else {
            const int line = warp_column() + (lane & 7) + high * 8;
            const int first = place<false, COLUMNS>(line, mid + 2 * k);
            ldmatrix_x4(right, tile + first + n * 16 * STEP_BYTES);
        }
    }

    // A warp's operands for 32 bytes of K.
    struct Slice {
        u32 left[M16][4], right[N8 / 2][4];
    };
    static __device__ __forceinline__ void load_slice(Slice& to, SharedAddress stage, int k) {
#pragma unroll
        for (int m = 0; m < M16; ++m) { load_left(to.left[m], stage, k, m); }
#pragma unroll
        for (int n = 0; n < N8 / 2; ++n) { load_right(to.right[n], stage, k, n); }
    }
    static __device__ __forceinline__ void multiply(Sums& sum, const Slice& slice) {
#pragma unroll
        for (int m = 0; m < M16; ++m) {
#pragma unroll
            for (int n = 0; n < N8; ++n) {
                const u32(&right)[4] = slice.right[n / 2];
                multiply(sum[m][n], slice.left[m], right[n % 2 * 2], right[n % 2 * 2 + 1]);
            }
        }
    }
    static __device__ __forceinline__ void multiply(Sums& sum, SharedAddress stage) {
#pragma unroll
        for (int k = 0; k < SLICES; ++k) {
            Slice slice;
            load_slice(slice, stage, k);
            multiply(sum, slice);
        }
    }

    // Multiply a step of fp8 codes, half of the rows at a time, because registers are few.
    static __device__ __forceinline__ void multiply_codes(Sums& sum, SharedAddress stage) {
#pragma unroll
        for (int first = 0; first < M16; first += 2) {
            u32 left[SLICES][2][4];
#pragma unroll
            for (int i = 0; i < SLICES * 2; ++i) {
                load_left(left[i / 2][i % 2], stage, i / 2, first + i % 2);
            }
#pragma unroll
            for (int n = 0; n < N8 / 2; ++n) {
                u32 right[SLICES][4];
#pragma unroll
                for (int k = 0; k < SLICES; ++k) { load_right(right[k], stage, k, n); }
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int m = i / 2, b = i % 2 * 2;
                    float(&to)[4] = sum[first + m][2 * n + b / 2];
                    if constexpr (IN_HALF) {
                        u32 part[2] = {};
#pragma unroll
                        for (int k = 0; k < SLICES; ++k) {
                            mma_m16n8k32_half(part, left[k][m], right[k][b], right[k][b + 1]);
                        }
#pragma unroll
                        for (int j = 0; j < 2; ++j) {
                            const float2 two = from_halves(part[j]);
                            to[2 * j] += two.x, to[2 * j + 1] += two.y;
                        }
                    } else {
                        float part[4];
                        mma_m16n8k32_fp8<X, Y, false>(part, left[0][m], right[0][b], right[0][b + 1]);
                        mma_m16n8k32_fp8<X, Y, true>(part, left[1][m], right[1][b], right[1][b + 1]);
#pragma unroll
                        for (int j = 0; j < 4; ++j) { to[j] += part[j]; }
                    }
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
                right[i / 2][i % 2] = value<RIGHT_K_OUTSIDE, COLUMNS>(stage + LEFT_BYTES, column, k);
            }
#pragma unroll
            for (int i = 0; i < 2 * M16; ++i) {
                const int row = warp_row() + i / 2 * 16 + i % 2 * 8 + g;
                const float left = value<LEFT_K_OUTSIDE, ROWS>(stage, row, k);
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
