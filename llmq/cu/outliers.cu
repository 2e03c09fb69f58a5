// outliers.cu -- columns of an activation that signed bytes are too coarse for.
//
//   select    limit = threshold, or the least with which at most `most` columns are above it
//             index = columns c with column_max[c] > limit, ascending, then -1
//             mask[c] = 0 of these columns, 1 of others
//   take      out[r, j] = x[r, index[j]], 0 where index[j] < 0
//   weight    out[r, j] = q[r, index[j]] * scale[r], 0 where index[j] < 0
//
// Data     column_max, mask: F32 (cols); index: I32 (most); x: T (rows, cols), out: T (rows, most);
//          q: I8 (rows, cols), scale: F32 (rows).
// Launch   select: one block of 1024 threads. take, weight: 256 threads, one element each.
// Cost     select: cols read 32 times, from the cache. take, weight: a sector for each element.
// Needs    column_max not negative; NaN is above everything.
#include "common.cuh"

constexpr int SELECT_THREADS = 1024;

// How many columns are above the limit; the same in all threads.
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
    // Bits of numbers that are not negative have their order.
    u32 limit = __float_as_uint(threshold);
    if (count_above(column_max, cols, limit, shared) > most) {
        u32 low = limit, high = 0x7FFFFFFFu;  // too many are above low, few enough above high
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
    // Each thread has neighbouring columns, so that theirs follow those of the threads before.
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
