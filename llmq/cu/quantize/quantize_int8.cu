// quantize_int8.cu -- signed bytes with a scale for each row, or for each column of the transpose.
//
//   rows      q[r, c] = int8(y[r, c] / scale[r])      scale[r] = max(largest |y[r, :]|, 1e-30) / 127
//   columns   q_t[c, r] = int8(x[r, c] / scale[c])    scale[c] = max(largest |x[:, c]|, 1e-30) / 127
//
// y = x, or with FACTORS x[r, c] * factors[c]. int8() rounds to nearest even; with STOCHASTIC up or
// down with probabilities that keep the mean. The random numbers follow from seed, step, salt, the
// row's sequence in the step and the row's place in the sequence. If the largest value of a row or
// column is infinite or NaN, its scale is NaN and its codes are 0: all products with these codes
// are NaN. column_max writes the largest |x[:, c]| of each column, which `columns` reads. decode:
// out = q * the row's scale.
//
// Data     declared in llmq/ops/quantize/quantize_int8.py. Rows of q_t end with zeros up to a
//          multiple of 16.
// Launch   rows: WARPS warps hold a row, 32 * WARPS * ROWS threads, a block for every ROWS rows.
//          column_max, columns: 256 threads, a block for every OctetTile; blockIdx.x counts along
//          columns, blockIdx.y along rows.
// Cost     memory-bound: `rows` reads x once, column_max and columns once each. Stochastic rounding
//          takes 6 instructions for an element's random bits.
// Needs    rows and `sequence` (rows per sequence) multiples of 4, cols of 16. column_max is zero
//          before the launch.
#include "common.cuh"
#include "fp8.cuh"

constexpr float I8_MAX = 127.0f;
constexpr float LEAST_ABS_MAX = 1e-30f;  // equal to llmq/ref/quantize/quantize_int8.py's

#ifndef WARPS  // in compilations of other entries
#define WARPS 1
#define FACTORS 0
#endif
#ifndef STOCHASTIC
#define STOCHASTIC 0
#endif

// Constants of quantize_int8_rows. VECTORS: 16-byte vectors of a row in a lane's registers.
constexpr int VECTORS = 8, ROWS = block_rows(WARPS, 4), THREADS = 32 * WARPS * ROWS;

struct Scale {
    float value, factor;

    // largest: the bits of the largest |x|.
    __device__ __forceinline__ explicit Scale(u32 largest) {
        const float m = __uint_as_float(largest);
        const bool finite = isfinite(m);
        value = finite ? fmaxf(m, LEAST_ABS_MAX) / I8_MAX : m - m;  // or NaN
        factor = finite ? 1.0f / value : 0.0f;
    }
};

// Random bits for the elements of one row.
struct RowBits {
    u32 seed;
    u64 start;

    __device__ __forceinline__ RowBits(const StepScalars* scalars, u32 salt, i32 sequence, i64 row,
                                       i32 cols) {
        if constexpr (STOCHASTIC) {
            seed = mix_word(mix_word(mix_word(0, scalars->seed), scalars->step), salt);
            const u32 number = (u32)row / (u32)sequence, token = (u32)row % (u32)sequence;
            const u64 first = scalars->first_sequence + (u64)number * scalars->sequence_stride;
            start = (first * (u32)sequence + token) * (u32)cols;
        }
    }
    // Random bits for columns c and c + 1, c even: 16 bits each.
    __device__ __forceinline__ u32 pair(int c) const {
        if constexpr (STOCHASTIC) { return random_bits(seed, (start + (u32)c) >> 1); }
        return 0;
    }
};

// The code of x * factor. bits: 16 random bits in the lower half.
__device__ __forceinline__ u32 code(float x, float factor, u32 bits) {
    // Factor 0 (no scale) gives code 0, even where x is infinite.
    const float v = factor == 0.0f ? 0.0f : x * factor;
    int rounded;
    if constexpr (STOCHASTIC) {
        rounded = __float2int_rd(v + (float)(bits & 0xFFFFu) * 0x1p-16f);
        rounded = max(-127, min(127, rounded));  // 127 / 127 * 127 may be a little more
    } else {
        rounded = __float2int_rn(v);
    }
    return (u32)rounded & 0xFFu;
}

// A word with the codes of columns c to c + 3, c a multiple of 4.
template <class Get, class Factor>
__device__ __forceinline__ u32 four_codes(const RowBits& row, int c, Get get, Factor factor) {
    const u32 low = row.pair(c), high = row.pair(c + 2);
    return code(get(0), factor(0), low) | code(get(1), factor(1), low >> 16) << 8 |
           code(get(2), factor(2), high) << 16 | code(get(3), factor(3), high >> 16) << 24;
}

// x, or x times its column's factor.
__device__ __forceinline__ float scaled_by(float x, const f32* factors, int c) {
    if constexpr (FACTORS) { return x * factors[c]; }
    return x;
}

extern "C" __global__ void __launch_bounds__(THREADS)
quantize_int8_rows(i8* __restrict__ q, f32* __restrict__ scale, const T* __restrict__ x,
                   const f32* __restrict__ factors, const StepScalars* __restrict__ scalars,
                   u32 salt, i32 sequence, i64 rows, i32 cols) {
    constexpr int N = Vec<T>::N;
    const int in_row = threadIdx.x % (32 * WARPS);
    const i64 row = (i64)blockIdx.x * ROWS + threadIdx.x / (32 * WARPS);
    const bool active = row < rows;
    Row<T, WARPS, VECTORS> values;
    values.load(x + row * cols, cols, active);
    u32 largest = 0;
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        if constexpr (FACTORS) {
            const int c = values.column(i);
#pragma unroll
            for (int k = 0; k < N; ++k) {
                const float y = c < cols ? scaled_by(to_f32(values.v[i][k]), factors, c + k) : 0.0f;
                largest = max(largest, abs_bits(y));
            }
        } else {
            largest = max(largest, abs_max_bits(values.v[i]));
        }
    }
    largest = __reduce_max_sync(0xFFFFFFFFu, largest);
    if constexpr (WARPS > 1) {
        __shared__ u32 of_warps[WARPS * ROWS];
        const int warp = threadIdx.x >> 5;
        if ((threadIdx.x & 31) == 0) { of_warps[warp] = largest; }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < WARPS; ++i) {
            largest = max(largest, of_warps[warp / WARPS * WARPS + i]);
        }
    }
    const Scale own(largest);
    if (!active) { return; }
    if (in_row == 0) { scale[row] = own.value; }
    const RowBits bits(scalars, salt, sequence, row, cols);
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        const int c = values.column(i);
        if (c >= cols) { continue; }
        uint4 packed = pack(values.v[i]);
        forget(packed);  // else the compiler unpacks all vectors early, into too many registers
        const Vec<T> part = unpack<T>(packed);
        u32 words[N / 4];
#pragma unroll
        for (int w = 0; w < N / 4; ++w) {
            words[w] = four_codes(
                bits, c + 4 * w,
                [&](int k) { return scaled_by(to_f32(part[4 * w + k]), factors, c + 4 * w + k); },
                [&](int) { return own.factor; });
        }
        i8* place = q + row * cols + c;
        if constexpr (N == 8) {
            *reinterpret_cast<uint2*>(place) = make_uint2(words[0], words[N / 4 - 1]);
        } else {
            *reinterpret_cast<u32*>(place) = words[0];
        }
    }
}

extern "C" __global__ void __launch_bounds__(256)
quantize_int8_column_max(f32* column_max, const T* __restrict__ x, i64 rows, i32 cols) {
    __shared__ u32 of_block[OctetTile::COLUMNS];
    const OctetPlace place(rows, cols);
    OctetRows<T> loaded;
    loaded.load(x + place.row * cols + place.column, cols, place.there);
    if (threadIdx.x < OctetTile::COLUMNS) { of_block[threadIdx.x] = 0; }
    __syncthreads();
    u32 largest[8] = {};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const Pack<T, 8> eight = loaded.row(i);
#pragma unroll
        for (int k = 0; k < 8; ++k) { largest[k] = max(largest[k], abs_bits(eight.get(k))); }
    }
#pragma unroll
    for (int k = 0; k < 8; ++k) {  // the four groups of rows of a warp
        largest[k] = max(largest[k], __shfl_xor_sync(0xFFFFFFFFu, largest[k], 8));
        largest[k] = max(largest[k], __shfl_xor_sync(0xFFFFFFFFu, largest[k], 16));
        if ((threadIdx.x & 31) < 8) {
            atomicMax(&of_block[OctetTile::column() + k], largest[k]);
        }
    }
    __syncthreads();
    const int column = place.first_column + threadIdx.x;
    if (threadIdx.x < OctetTile::COLUMNS && column < cols) {
        // The maximum of integers does not depend on the order of blocks.
        atomicMax(reinterpret_cast<u32*>(column_max) + column, of_block[threadIdx.x]);
    }
}

extern "C" __global__ void __launch_bounds__(256)
quantize_int8_columns(i8* __restrict__ q_t, f32* __restrict__ scale, const T* __restrict__ x,
                      const f32* __restrict__ column_max, const StepScalars* __restrict__ scalars,
                      u32 salt, i32 sequence, i64 rows, i32 cols) {
    __shared__ OctetTile tile;
    const OctetPlace place(rows, cols);
    OctetRows<T> loaded;
    loaded.load(x + place.row * cols + place.column, cols, place.there);
    float factors[8];
#pragma unroll
    for (int k = 0; k < 8; ++k) {
        const int c = place.column + k;
        const Scale own(c < cols ? abs_bits(column_max[c]) : 0u);
        factors[k] = own.factor;
        if (blockIdx.y == 0 && threadIdx.x < 8 && c < cols) { scale[c] = own.value; }
    }
    uint2 codes[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const Pack<T, 8> eight = loaded.row(i);
        const RowBits bits(scalars, salt, sequence, place.row + i, cols);
        u32 words[2];
#pragma unroll
        for (int w = 0; w < 2; ++w) {
            words[w] = four_codes(
                bits, place.column + 4 * w, [&](int k) { return eight.get(4 * w + k); },
                [&](int k) { return factors[4 * w + k]; });
        }
        codes[i] = make_uint2(words[0], words[1]);
    }
    tile.put(codes);
    __syncthreads();
    tile.store(q_t, place.first_row, place.first_column, turned_columns(rows), cols);
}

// Each thread decodes four neighbours.
extern "C" __global__ void __launch_bounds__(256)
quantize_int8_decode(T* __restrict__ out, const i8* __restrict__ q, const f32* __restrict__ scale,
                     i64 rows, i32 cols) {
    const i64 i = ((i64)blockIdx.x * 256 + threadIdx.x) * 4;
    if (i >= rows * cols) { return; }
    const u32 four = *reinterpret_cast<const u32*>(q + i);
    const float factor = scale[i / cols];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        out[i + k] = from_f32<T>((float)(i8)(four >> (8 * k) & 0xFF) * factor);
    }
}

// -- outliers: columns of an activation for which signed bytes are too coarse
//
//   select    limit = threshold, or the least larger limit that at most `most` columns exceed
//             index = columns c with column_max[c] > limit, ascending, then -1
//             mask[c] = 0 for these columns, 1 for others
//   take      out[r, j] = x[r, index[j]], 0 where index[j] < 0
//   weight    out[r, j] = q[r, index[j]] * scale[r], 0 where index[j] < 0
//
// Data     column_max, mask: F32 (cols); index: I32 (most); x: T (rows, cols), out: T (rows, most);
//          q: I8 (rows, cols), scale: F32 (rows).
// Launch   select: one block of 1024 threads. take, weight: 256 threads, one element each.
// Cost     select: column_max read about 32 times, from the cache. take, weight: each element reads
//          a 32-byte sector.
// Needs    column_max not negative; NaN is above every limit.

constexpr int SELECT_THREADS = 1024;

// Returns the number of columns above the limit to all threads.
__device__ __forceinline__ int count_above(const f32* column_max, int cols, u32 limit,
                                           int* shared) {
    int count = 0;
    for (int c = threadIdx.x; c < cols; c += SELECT_THREADS) {
        count += __float_as_uint(column_max[c]) > limit;
    }
    return block_sum(count, shared);
}

extern "C" __global__ void __launch_bounds__(SELECT_THREADS)
outliers_select(f32* __restrict__ mask, i32* __restrict__ index,
                const f32* __restrict__ column_max, f32 threshold, i32 most, i32 cols) {
    __shared__ int shared[32], before[SELECT_THREADS];
    // Nonnegative floats have the same order as their bits.
    u32 limit = __float_as_uint(threshold);
    if (count_above(column_max, cols, limit, shared) > most) {
        u32 low = limit, high = 0x7FFFFFFFu;  // low: too many columns above; high: at most `most`
        while (high - low > 1) {
            const u32 middle = low + (high - low) / 2;
            if (count_above(column_max, cols, middle, shared) > most) {
                low = middle;
            } else {
                high = middle;
            }
        }
        limit = high;
    }
    // Each thread has a range of neighbouring columns, so that indices ascend over the threads.
    const int each = (cols + SELECT_THREADS - 1) / SELECT_THREADS, t = threadIdx.x;
    const int first = t * each, last = min(first + each, cols);
    int own = 0;
    for (int c = first; c < last; ++c) { own += __float_as_uint(column_max[c]) > limit; }
    before[t] = own;
    __syncthreads();
    for (int step = 1; step < SELECT_THREADS; step *= 2) {
        const int more = t >= step ? before[t - step] : 0;
        __syncthreads();
        before[t] += more;
        __syncthreads();
    }
    int place = before[t] - own;
    const int total = before[SELECT_THREADS - 1];
    for (int c = first; c < last; ++c) {
        const bool above = __float_as_uint(column_max[c]) > limit;
        mask[c] = above ? 0.0f : 1.0f;
        if (above) { index[place++] = c; }
    }
    for (int j = total + t; j < most; j += SELECT_THREADS) { index[j] = -1; }
}

extern "C" __global__ void __launch_bounds__(256)
outliers_take(T* __restrict__ out, const T* __restrict__ x, const i32* __restrict__ index,
              i64 rows, i32 cols, i32 most) {
    const i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= rows * most) { return; }
    const int c = index[i % most];
    out[i] = c < 0 ? from_f32<T>(0.0f) : x[i / most * cols + c];
}

extern "C" __global__ void __launch_bounds__(256)
outliers_weight(T* __restrict__ out, const i8* __restrict__ q, const f32* __restrict__ scale,
                const i32* __restrict__ index, i64 rows, i32 cols, i32 most) {
    const i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= rows * most) { return; }
    const i64 row = i / most;
    const int c = index[i % most];
    out[i] = from_f32<T>(c < 0 ? 0.0f : (float)q[row * cols + c] * scale[row]);
}
