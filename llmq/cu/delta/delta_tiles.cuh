// delta_tiles.cuh -- products of tiles with F32 sums: of BF16 on the tensor cores, of F32 without.
//
// Fragments are those of m16n8k16 (ptx.cuh), of F32 too, whose products are FMA; what is cut to TF32
// has another order of the inner index than m16n8k8's, for both factors alike.
//
// Tiles of BF16 lie in shared memory, where rows are 8 elements longer than they are wide: an odd
// number of 16-byte units, so that eight rows lie in different banks. Tiles of F32 stay where they are.
#pragma once
#include "common.cuh"
#include "ptx.cuh"

__device__ __forceinline__ int lane_id() { return threadIdx.x % 32; }
__device__ __forceinline__ int warp_id() { return __shfl_sync(0xFFFFFFFFu, threadIdx.x / 32, 0); }
__device__ __forceinline__ int lane_row() { return lane_id() / 4; }
__device__ __forceinline__ int lane_column() { return lane_id() % 4 * 2; }
__device__ __forceinline__ float from_lane(float x, int lane) {
    return __shfl_sync(0xFFFFFFFFu, x, lane);
}

// 16 rows, 16 of the inner dimension: element e of register i is row g + 8 (i % 2), inner index
// 2t + 8 (i / 2) + e.
template <class E> struct Left;
template <> struct Left<bf16> {
    using Pair = u32;
    Pair r[4];
    __device__ __forceinline__ float2 get(int i) const {
        return make_float2(lower_half(r[i]), upper_half(r[i]));
    }
    __device__ __forceinline__ void set(int i, float a, float b) { r[i] = to_pair(a, b); }
};
template <> struct Left<float> {
    using Pair = float2;
    Pair r[4];
    __device__ __forceinline__ float2 get(int i) const { return r[i]; }
    __device__ __forceinline__ void set(int i, float a, float b) { r[i] = make_float2(a, b); }
};

// 16 of the inner dimension, 16 columns: registers 0 and 1 are columns 0 .. 7, inner indices from 0
// and from 8 on; 2 and 3 are the other columns.
template <class E> struct Right {
    Left<E> of;
};

// Elements (row, column) of a matrix. F32: from `rows` on they are 0; WHOLE: all are there.
template <class E, bool WHOLE = false> struct Tile {
    const E* at;
    int pitch, rows;
    __device__ __forceinline__ float get(int row, int column) const {
        if constexpr (sizeof(E) == 2 || WHOLE) {
            return to_f32(at[row * pitch + column]);
        } else {  // registers are few: nothing is loaded far ahead, or by a branch
            u32 place = min(row, rows - 1) * pitch + column;
            forget(place);
            const float x = load_here(at + place);
            return row < rows ? x : 0.0f;
        }
    }
    __device__ __forceinline__ SharedAddress address(int row, int column) const {
        return shared_address(at) + (row * pitch + column) * (int)sizeof(E);
    }
};

// Rows [row, row + 16) and inner indices [inner, inner + 16) of a tile of rows, or (turned) of one
// whose rows are the inner dimension.
template <bool TURNED, class Bf16Tile>
__device__ __forceinline__ Left<bf16> left(const Bf16Tile& tile, int row, int inner) {
    Left<bf16> a;
    const int lane = lane_id();
    if constexpr (TURNED) {
        ldmatrix_x4_trans(a.r, tile.address(inner + lane % 8 + lane / 16 * 8,
                                            row + lane / 8 % 2 * 8));
    } else {
        ldmatrix_x4(a.r, tile.address(row + lane % 16, inner + lane / 16 * 8));
    }
    return a;
}
template <bool TURNED, bool WHOLE>
__device__ __forceinline__ Left<float> left(const Tile<float, WHOLE>& tile, int row, int inner) {
    Left<float> a;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int r = row + lane_row() + i % 2 * 8, k = inner + lane_column() + i / 2 * 8;
        a.r[i] = TURNED ? make_float2(tile.get(k, r), tile.get(k + 1, r))
                        : make_float2(tile.get(r, k), tile.get(r, k + 1));
    }
    return a;
}

// The same from global memory: rows `pitch` elements apart, zeros from `rows` on.
template <class E>
__device__ __forceinline__ Left<E> load_left(const E* from, int pitch, int rows) {
    using Pair = typename Left<E>::Pair;
    Left<E> a = {};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int row = lane_row() + i % 2 * 8, column = lane_column() + i / 2 * 8;
        if (row < rows) { a.r[i] = *reinterpret_cast<const Pair*>(from + row * pitch + column); }
    }
    return a;
}

// Inner indices [inner, inner + 16) and columns [column, column + 16) of a tile whose rows are the
// inner dimension, or (turned) the columns.
template <bool TURNED>
__device__ __forceinline__ Right<bf16> right(const Tile<bf16>& tile, int inner, int column) {
    Right<bf16> b;
    const int lane = lane_id();
    if constexpr (TURNED) {
        ldmatrix_x4(b.of.r, tile.address(column + lane % 8 + lane / 16 * 8,
                                         inner + lane / 8 % 2 * 8));
    } else {
        ldmatrix_x4_trans(b.of.r, tile.address(inner + lane % 16, column + lane / 16 * 8));
    }
    return b;
}
template <bool TURNED, bool WHOLE>
__device__ __forceinline__ Right<float> right(const Tile<float, WHOLE>& tile, int inner, int column) {
    Right<float> b;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int k = inner + lane_column() + i % 2 * 8, n = column + lane_row() + i / 2 * 8;
        b.of.r[i] = TURNED ? make_float2(tile.get(n, k), tile.get(n, k + 1))
                           : make_float2(tile.get(k, n), tile.get(k + 1, n));
    }
    return b;
}

// A left factor as a right factor: rows become columns, inner indices stay.
template <class E> __device__ __forceinline__ Right<E> turned(const Left<E>& a) {
    return {{a.r[0], a.r[2], a.r[1], a.r[3]}};
}

// Sums of 16 rows and 16 columns: of each half of the columns, the elements of m16n8k16's D.
using Sums = float[2][4];

// Calls use(row, column, element) for this thread's part of sums.
template <class Use>
__device__ __forceinline__ void each_sum(Sums& sums, int row, int column, Use use) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        use(row + lane_row() + i / 2 % 2 * 8, column + i / 4 * 8 + lane_column() + i % 2,
            sums[i / 4][i % 4]);
    }
}
// Calls use(row, element) for this thread's part of the diagonal.
template <class Use> __device__ __forceinline__ void each_diagonal(const Sums& sums, Use use) {
    if (lane_id() % 4 != lane_row() / 2) { return; }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        use(lane_row() + 8 * r, lane_row() % 2 ? sums[r][2 * r + 1] : sums[r][2 * r]);
    }
}
__device__ __forceinline__ void multiply_by(Sums& sums, float factor) {
#pragma unroll
    for (int i = 0; i < 8; ++i) { sums[i / 4][i % 4] *= factor; }
}
template <int N> __device__ __forceinline__ void multiply_by(Sums (&sums)[N], float factor) {
#pragma unroll
    for (int n = 0; n < N; ++n) { multiply_by(sums[n], factor); }
}

__device__ __forceinline__ void multiply(Sums& d, const Left<bf16>& a, const Right<bf16>& b) {
    mma_m16n8k16_bf16(d[0], a.r, b.of.r[0], b.of.r[1]);
    mma_m16n8k16_bf16(d[1], a.r, b.of.r[2], b.of.r[3]);
}

// EXACT: by FMA, each sum in the order of its inner indices, with factors from the lanes that hold them.
// Gradients of decays are small differences of large sums, and three products of factors split in TF32
// are not exact enough for these. Else factors are cut to TF32, which has 11 bits.
template <bool EXACT = true>
__device__ __forceinline__ void multiply(Sums& d, const Left<float>& a, const Right<float>& b) {
#pragma unroll
    for (int k = 0; k < 2; ++k) {
        const float2 top = a.r[2 * k], bottom = a.r[2 * k + 1];
        if constexpr (EXACT) {
#pragma unroll 1  // registers are few
            for (int from = 0; from < 4; ++from) {
                const int row = lane_row() * 4 + from, column = lane_column() * 4 + from;  // lanes
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const float x = from_lane(e ? top.y : top.x, row);
                    const float y = from_lane(e ? bottom.y : bottom.x, row);
#pragma unroll
                    for (int n = 0; n < 2; ++n) {
                        const float2 c = b.of.r[2 * n + k];
                        const float first = from_lane(e ? c.y : c.x, column);
                        const float second = from_lane(e ? c.y : c.x, column + 4);
                        d[n][0] = __fmaf_rn(x, first, d[n][0]);
                        d[n][1] = __fmaf_rn(x, second, d[n][1]);
                        d[n][2] = __fmaf_rn(y, first, d[n][2]);
                        d[n][3] = __fmaf_rn(y, second, d[n][3]);
                    }
                }
            }
        } else {
            const float cut[4] = {top.x, bottom.x, top.y, bottom.y};
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                const float2 c = b.of.r[2 * n + k];
                mma_m16n8k8_tf32(d[n], cut, c.x, c.y);
            }
        }
    }
}

// sums[n] += left(k) right(k, n), for K left factors. Right factors are read ahead of their use: loads
// and products stay in the order that is written here, and a warp alone would wait for each.
template <int K, int N, class A, class B>
__device__ __forceinline__ void multiply_all(Sums (&sums)[N], A left_of, B right_of) {
    constexpr int AT_ONCE = N % 4 ? 2 : 4, PARTS = N / AT_ONCE;
    Right<T> read[2][AT_ONCE];
    Left<T> a;
#pragma unroll
    for (int i = 0; i <= K * PARTS; ++i) {
        if (i < K * PARTS) {
#pragma unroll
            for (int n = 0; n < AT_ONCE; ++n) {
                read[i % 2][n] = right_of(i / PARTS, i % PARTS * AT_ONCE + n);
            }
        }
        if (i > 0) {
            const int now = i - 1;
            if (now % PARTS == 0) { a = left_of(now / PARTS); }
#pragma unroll
            for (int n = 0; n < AT_ONCE; ++n) {
                multiply(sums[now % PARTS * AT_ONCE + n], a, read[now % 2][n]);
            }
        }
    }
}

// sums += left(k) (16 rows) times a lower triangle (64, 64), whose rows are the inner dimension, or
// (turned) the columns.
template <bool TURNED, class A>
__device__ __forceinline__ void multiply_lower(Sums (&sums)[4], A left_of, const Tile<T>& tile) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        const Left<T> a = left_of(k);
#pragma unroll
        for (int n = TURNED ? k : 0; n < (TURNED ? 4 : k + 1); ++n) {
            multiply(sums[n], a, right<TURNED>(tile, 16 * k, 16 * n));
        }
    }
}

// Sums as the left factor of the next product, rounded to E, and back.
template <class E> __device__ __forceinline__ Left<E> to_left(const Sums& d) {
    Left<E> a;
#pragma unroll
    for (int i = 0; i < 4; ++i) { a.set(i, d[i / 2][i % 2 * 2], d[i / 2][i % 2 * 2 + 1]); }
    return a;
}
template <class E> __device__ __forceinline__ void to_sums(Sums& d, const Left<E>& a, float factor) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        d[i / 2][i % 2 * 2] = factor * a.get(i).x;
        d[i / 2][i % 2 * 2 + 1] = factor * a.get(i).y;
    }
}

// A number that elements are multiplied by. Beside BF16 the sum of two, each in both halves of a word:
// two instructions multiply a pair, and round it as a product in F32, but for 2^-8 of a rounding.
template <class E> struct Scale {
    float of;
    __device__ __forceinline__ void set(float x) { of = x; }
    __device__ __forceinline__ float2 times(float2 x) const { return make_float2(x.x * of, x.y * of); }
};
template <> struct Scale<bf16> {
    __nv_bfloat162 high, low;
    __device__ __forceinline__ void set(float x) {
        high = __floats2bfloat162_rn(x, x);
        const float rest = x - to_f32(high.x);
        low = __floats2bfloat162_rn(rest, rest);
    }
    __device__ __forceinline__ u32 times(u32 x) const {
        const auto pair = *reinterpret_cast<const __nv_bfloat162*>(&x);
        const __nv_bfloat162 product = __hfma2(pair, high, __hmul2(pair, low));
        return *reinterpret_cast<const u32*>(&product);
    }
};
// A left factor with rows g and g + 8 times a factor each; negated; with each inner index times its
// element of `factors`.
template <class E>
__device__ __forceinline__ Left<E> times_rows(const Left<E>& a, const Scale<E>& top,
                                              const Scale<E>& bottom) {
    return {top.times(a.r[0]), bottom.times(a.r[1]), top.times(a.r[2]), bottom.times(a.r[3])};
}
__device__ __forceinline__ Left<bf16> negative(const Left<bf16>& a) {
    constexpr u32 SIGNS = 0x80008000u;
    return {a.r[0] ^ SIGNS, a.r[1] ^ SIGNS, a.r[2] ^ SIGNS, a.r[3] ^ SIGNS};
}
__device__ __forceinline__ Left<float> negative(const Left<float>& a) {
    Left<float> b;
#pragma unroll
    for (int i = 0; i < 4; ++i) { b.r[i] = make_float2(-a.r[i].x, -a.r[i].y); }
    return b;
}
template <class E>
__device__ __forceinline__ Left<E> times_inner(const Left<E>& a, const float2 (&factors)[2]) {
    Left<E> scaled;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float2 x = a.get(i), f = factors[i / 2];
        scaled.set(i, x.x * f.x, x.y * f.y);
    }
    return scaled;
}

// Start copying a tile of ROWS x COLUMNS to shared memory, by all THREADS; rows from `rows` on become
// zeros, the first one is there. The tile. F32: nothing is copied. ONCE: nobody reads it again.
template <int ROWS, int COLUMNS, int THREADS, bool ONCE = false>
__device__ __forceinline__ Tile<bf16> stage(void* memory, const bf16* from, int pitch, int rows) {
    constexpr int UNITS = COLUMNS / 8, STEP = THREADS / UNITS;  // rows at once
    constexpr bool EVEN = THREADS % UNITS == 0 && ROWS % STEP == 0;
    int thread = threadIdx.x;
    forget(thread);  // or what follows from it stays in registers from call to call
    int row = thread / UNITS;
    const int column = thread % UNITS * 8;
    SharedAddress to = shared_address(memory) + (row * (COLUMNS + 8) + column) * 2;
    const bf16* source = from + (i64)row * pitch + column;
#pragma unroll 4
    for (int n = 0; n < (ROWS + STEP - 1) / STEP; ++n) {
        if (EVEN || (thread < STEP * UNITS && row < ROWS)) {
            cp_async_16<ONCE>(to, source, row < rows);
        }
        row += STEP;
        to += STEP * (COLUMNS + 8) * 2;
        source += (i64)STEP * pitch;
    }
    return {reinterpret_cast<const bf16*>(memory), COLUMNS + 8, ROWS};
}
template <int ROWS, int COLUMNS, int THREADS, bool ONCE = false>
__device__ __forceinline__ Tile<float> stage(void* memory, const float* from, int pitch, int rows) {
    return {from, pitch, rows};
}

// Sums to rows of E, `pitch` elements apart, of which `rows` are there: BF16 in 8 bytes a lane.
__device__ __forceinline__ void put(bf16* to, i64 pitch, int rows, const Sums& d) {
    const bool odd = lane_id() % 2;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const u32 first = to_pair(d[0][2 * r], d[0][2 * r + 1]);
        const u32 second = to_pair(d[1][2 * r], d[1][2 * r + 1]);
        const u32 other = __shfl_xor_sync(0xFFFFFFFFu, odd ? first : second, 1);
        const int row = lane_row() + 8 * r;
        if (row < rows) {
            *reinterpret_cast<uint2*>(to + row * pitch + (odd ? 6 : 0) + lane_column()) =
                odd ? make_uint2(other, second) : make_uint2(first, other);
        }
    }
}
__device__ __forceinline__ void put(float* to, i64 pitch, int rows, const Sums& d) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int row = lane_row() + i % 2 * 8;
        if (row < rows) {
            store_two(to + row * pitch + i / 2 * 8 + lane_column(), d[i / 2][i % 2 * 2],
                      d[i / 2][i % 2 * 2 + 1]);
        }
    }
}

// Sums to a tile in shared memory, as they are or (turned) with their rows as its columns.
template <bool TURNED, class E>
__device__ __forceinline__ void put_tile(E* tile, int pitch, int row, int column, const Sums& d) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int r = row + lane_row() + i % 2 * 8, c = column + lane_column() + i / 2 * 8;
        const float a = d[i / 2][i % 2 * 2], b = d[i / 2][i % 2 * 2 + 1];
        if constexpr (TURNED) {
            tile[c * pitch + r] = from_f32<E>(a);
            tile[(c + 1) * pitch + r] = from_f32<E>(b);
        } else {
            store_two(tile + r * pitch + c, a, b);
        }
    }
}
