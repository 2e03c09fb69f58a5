// adapter.cu -- low-rank adapters of rows of a matrix: their B in one matrix, and back.
//
//   expand    whole[r, k * rank + c] = T(scale_k * b[i, c])   for row r = the i-th of all spans'
//             elsewhere 0                                     rows, which is in span k
//   collect   b[i, c] = T(scale_k * whole[r, k * rank + c])
//   norms     norms[r] = sqrt(sum over j of (w[r, j] + scale_k * sum over c of b[i, c]
//             * a[k * rank + c, j])^2), elsewhere 0
//   columns   out[n, r] = x[n, r] * magnitudes[r] / norms[r] + bias[r], the factor 1 where norms[r] is
//             0; with y x[n, r] * y[n, r] / norms[r], and 0 there
//
// Data     whole: (rows, columns), b: (rows of all spans, rank), T (f32, bf16). Spans ascend, those
//          that are not used are empty. They are of `period` rows, and the next ones have them, too.
//          w: (rows, K), a: (columns, K), x, y, out: (rows, columns), bias of T; norms, magnitudes: F32.
// Launch   256 threads, one for each element of b, or for eight of whole, as they are written. norms: a
//          block for 16 rows. columns: a 16-byte vector of 16 rows each.
// Cost     what is written, once; the other one is read where it has a counterpart. norms: w read once,
//          and rank multiplications of each of its elements.
// Needs    columns >= rank * spans, a multiple of 8; fewer than 2^35 elements of whole. norms: K even.
//          columns: whole vectors in a row; out may be x.
// Same name  llmq/ops/adapter.py  llmq/ref/adapter.py  tests/ops/test_adapter.py
#include "common.cuh"

constexpr int MAX_SPANS = 4, OCTET = 8;  // OCTET: columns of a thread

struct Spans {
    i64 start[MAX_SPANS], stop[MAX_SPANS];

    __device__ __forceinline__ i64 count() const {
        i64 rows = 0;
#pragma unroll
        for (int k = 0; k < MAX_SPANS; ++k) { rows += stop[k] - start[k]; }
        return rows;
    }
};

extern "C" __global__ void __launch_bounds__(256)
adapter_expand(T* __restrict__ whole, const T* __restrict__ b, f32 scale0, f32 scale1, f32 scale2,
               f32 scale3, i32 rank, i32 columns, i64 rows, i64 period, i64 start0, i64 stop0,
               i64 start1, i64 stop1, i64 start2, i64 stop2, i64 start3, i64 stop3) {
    const Spans spans = {{start0, start1, start2, start3}, {stop0, stop1, stop2, stop3}};
    const f32 scales[MAX_SPANS] = {scale0, scale1, scale2, scale3};
    const u32 i = blockIdx.x * blockDim.x + threadIdx.x, octets = columns / OCTET;
    const u32 at = i / octets, height = period;  // divisions of 64 bits would take most of the time
    if (at >= rows) { return; }
    const i64 row = at % height;
    const T* from = nullptr;  // the row's elements of b, which stand in columns from `begin` on
    int begin = 0;
    f32 scale = 0.0f;
    i64 before = at / height * spans.count();  // rows of earlier spans
#pragma unroll
    for (int k = 0; k < MAX_SPANS; ++k) {
        if (row >= spans.start[k] && row < spans.stop[k]) {
            from = b + (before + row - spans.start[k]) * rank;
            begin = k * rank;
            scale = scales[k];
        }
        before += spans.stop[k] - spans.start[k];
    }
    Pack<T, OCTET> out;
#pragma unroll
    for (int j = 0; j < OCTET; ++j) {
        const int c = (int)(i % octets) * OCTET + j - begin;
        const bool inside = from != nullptr && c >= 0 && c < rank;
        out.set(j, from_f32<T>(inside ? scale * to_f32(from[c]) : 0.0f));
    }
    T* const to = whole + (i64)i * OCTET;
#pragma unroll
    for (int k = 0; k < OCTET / Vec<T>::N; ++k) {
        store_vec(to + k * Vec<T>::N, out.part[k]);  // a product reads it at once
    }
}

extern "C" __global__ void __launch_bounds__(256)
adapter_collect(T* __restrict__ b, const T* __restrict__ whole, f32 scale0, f32 scale1, f32 scale2,
                f32 scale3, i32 rank, i32 columns, i64 rows, i64 period, i64 start0, i64 stop0,
                i64 start1, i64 stop1, i64 start2, i64 stop2, i64 start3, i64 stop3) {
    const Spans spans = {{start0, start1, start2, start3}, {stop0, stop1, stop2, stop3}};
    const f32 scales[MAX_SPANS] = {scale0, scale1, scale2, scale3};
    const i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    // It counts in b, then in one matrix, then within the spans behind those that were passed.
    i64 row = i / rank;
    const i64 first = row / spans.count() * period;
    if (first >= rows) { return; }
    row %= spans.count();
    const int column = (int)(i % rank);
#pragma unroll
    for (int k = 0; k < MAX_SPANS; ++k) {
        const i64 count = spans.stop[k] - spans.start[k];
        if (row >= 0 && row < count) {
            const i64 at = (first + spans.start[k] + row) * columns + k * rank + column;
            b[i] = from_f32<T>(scales[k] * to_f32(whole[at]));
        }
        row -= count;
    }
}

constexpr int NORM_ROWS = 16;  // whose sums are in registers: a is read once for all of them

extern "C" __global__ void __launch_bounds__(256, 2)
adapter_norms(f32* __restrict__ norms, const T* __restrict__ w, const T* __restrict__ a,
              const T* __restrict__ b, f32 scale0, f32 scale1, f32 scale2, f32 scale3, i32 rank,
              i64 rows, i32 K, i64 start0, i64 stop0, i64 start1, i64 stop1, i64 start2, i64 stop2,
              i64 start3, i64 stop3) {
    constexpr int STAGE = 64;  // elements of a row of b that are in shared memory at a time
    const Spans spans = {{start0, start1, start2, start3}, {stop0, stop1, stop2, stop3}};
    const f32 scales[MAX_SPANS] = {scale0, scale1, scale2, scale3};
    __shared__ __align__(16) f32 of_b[STAGE][NORM_ROWS];
    __shared__ f32 shared[32];
    const i64 first = (i64)blockIdx.x * NORM_ROWS;
    int staged = -1;  // the elements that are there: mostly they stay, once loaded
    f32 sums[NORM_ROWS] = {};
    for (int top = 0; top < K; top += 2 * blockDim.x) {
        const int j = top + 2 * threadIdx.x;
        float2 values[NORM_ROWS];
#pragma unroll
        for (int i = 0; i < NORM_ROWS; ++i) {
            const bool there = j < K && first + i < rows;
            values[i] = there ? load_two(w + (first + i) * K + j) : make_float2(0.0f, 0.0f);
        }
        i64 before = 0;
#pragma unroll
        for (int k = 0; k < MAX_SPANS; ++k) {
            const i64 start = spans.start[k], stop = spans.stop[k];
            for (int c0 = 0; first < stop && first + NORM_ROWS > start && c0 < rank; c0 += STAGE) {
                if (staged != k * rank + c0) {
                    staged = k * rank + c0;
                    __syncthreads();
                    for (int n = threadIdx.x; n < STAGE * NORM_ROWS; n += blockDim.x) {
                        const int i = n % NORM_ROWS, c = c0 + n / NORM_ROWS;
                        const i64 row = first + i;
                        const bool inside = row >= start && row < stop && c < rank;
                        const i64 at = (before + row - start) * rank + c;
                        of_b[n / NORM_ROWS][i] = inside ? scales[k] * to_f32(b[at]) : 0.0f;
                    }
                    __syncthreads();
                }
                const int count = j < K ? min(STAGE, rank - c0) : 0;
#pragma unroll 2
                for (int s = 0; s < count; ++s) {
                    const float2 x = load_two(a + ((i64)k * rank + c0 + s) * K + j);
#pragma unroll
                    for (int i = 0; i < NORM_ROWS; ++i) {
                        values[i].x = fmaf(of_b[s][i], x.x, values[i].x);
                        values[i].y = fmaf(of_b[s][i], x.y, values[i].y);
                    }
                }
            }
            before += stop - start;
        }
#pragma unroll
        for (int i = 0; i < NORM_ROWS; ++i) {
            sums[i] = fmaf(values[i].x, values[i].x, sums[i]);
            sums[i] = fmaf(values[i].y, values[i].y, sums[i]);
        }
    }
#pragma unroll
    for (int i = 0; i < NORM_ROWS; ++i) {
        const f32 sum = block_sum(sums[i], shared);
        bool inside = false;
#pragma unroll
        for (int k = 0; k < MAX_SPANS; ++k) {
            inside = inside || (first + i >= spans.start[k] && first + i < spans.stop[k]);
        }
        if (threadIdx.x == 0 && first + i < rows) { norms[first + i] = inside ? sqrtf(sum) : 0.0f; }
    }
}

constexpr int COLUMN_ROWS = 16;  // of a thread, whose columns have one factor each

extern "C" __global__ void __launch_bounds__(256)
adapter_columns(T* out, const T* x, const T* __restrict__ y, const f32* __restrict__ norms,
                const f32* __restrict__ magnitudes, const T* __restrict__ bias, i64 rows,
                i32 columns) {
    constexpr int N = Vec<T>::N;
    const int column = (blockIdx.x * blockDim.x + threadIdx.x) * N;
    if (column >= columns) { return; }
    f32 factor[N], offset[N];
#pragma unroll
    for (int k = 0; k < N; ++k) {
        const f32 norm = norms[column + k];
        factor[k] = y == nullptr ? 1.0f : 0.0f;
        if (norm > 0.0f) {
            factor[k] = (magnitudes == nullptr ? 1.0f : magnitudes[column + k]) / norm;
        }
        offset[k] = bias == nullptr ? 0.0f : to_f32(bias[column + k]);
    }
    const i64 first = (i64)blockIdx.y * COLUMN_ROWS;
    const int count = (int)min((i64)COLUMN_ROWS, rows - first);
    const i64 start = first * columns + column;
#pragma unroll 4
    for (int r = 0; r < count; ++r) {
        const i64 at = start + (i64)r * columns;
        Vec<T> value = load_vec(x + at);
        const Vec<T> other = load_vec(y == nullptr ? x + at : y + at);
#pragma unroll
        for (int k = 0; k < N; ++k) {
            f32 product = to_f32(value[k]) * factor[k];
            if (y != nullptr) { product *= to_f32(other[k]); }
            if (bias != nullptr) { product += offset[k]; }
            value[k] = from_f32<T>(product);
        }
        store_vec(out + at, value);
    }
}
