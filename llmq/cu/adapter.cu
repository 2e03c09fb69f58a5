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
//          block for 16 rows. columns: a 16-byte vector each.
// Cost     what is written, once; the other one is read where it has a counterpart. norms: w read once,
//          and rank multiplications of each of its elements.
// Needs    columns >= rank * spans, a multiple of 8; fewer than 2^35 elements of whole. columns: whole
//          vectors in a row; out may be x.
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
    if (i / octets >= rows) { return; }
    const i64 row = i / octets % period;
    const T* from = nullptr;  // the row's elements of b, which stand in columns from `begin` on
    int begin = 0;
    f32 scale = 0.0f;
    i64 before = i / octets / period * spans.count();  // rows of earlier spans
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

// For F32 the assembler keeps to 64 registers on sm_89, and spills, unless told that it may use more.
constexpr int NORM_BLOCKS = sizeof(T) == 4 ? 2 : 0;  // on a multiprocessor; 0: as the assembler likes

extern "C" __global__ void __launch_bounds__(256, NORM_BLOCKS)
adapter_norms(f32* __restrict__ norms, const T* __restrict__ w, const T* __restrict__ a,
              const T* __restrict__ b, f32 scale0, f32 scale1, f32 scale2, f32 scale3, i32 rank,
              i64 rows, i32 K, i64 start0, i64 stop0, i64 start1, i64 stop1, i64 start2, i64 stop2,
              i64 start3, i64 stop3) {
    constexpr int STAGE = 16;  // elements of a row of b that are in shared memory at a time
    const Spans spans = {{start0, start1, start2, start3}, {stop0, stop1, stop2, stop3}};
    const f32 scales[MAX_SPANS] = {scale0, scale1, scale2, scale3};
    __shared__ f32 of_b[STAGE][NORM_ROWS], shared[32];
    const i64 first = (i64)blockIdx.x * NORM_ROWS;
    f32 sums[NORM_ROWS] = {};
    for (int top = 0; top < K; top += blockDim.x) {
        const int j = top + threadIdx.x;
        f32 values[NORM_ROWS];
#pragma unroll
        for (int i = 0; i < NORM_ROWS; ++i) {
            values[i] = j < K && first + i < rows ? to_f32(w[(first + i) * K + j]) : 0.0f;
        }
        i64 before = 0;
#pragma unroll
        for (int k = 0; k < MAX_SPANS; ++k) {
            const i64 start = spans.start[k], stop = spans.stop[k];
            if (first < stop && first + NORM_ROWS > start) {
                for (int c0 = 0; c0 < rank; c0 += STAGE) {
                    __syncthreads();
                    const int i = threadIdx.x % NORM_ROWS, c = c0 + threadIdx.x / NORM_ROWS;
                    const i64 row = first + i;
                    const bool inside = row >= start && row < stop && c < rank;
                    of_b[threadIdx.x / NORM_ROWS][i] =
                        inside ? scales[k] * to_f32(b[(before + row - start) * rank + c]) : 0.0f;
                    __syncthreads();
                    for (int s = 0; s < min(STAGE, rank - c0) && j < K; ++s) {
                        const f32 x = to_f32(a[((i64)k * rank + c0 + s) * K + j]);
#pragma unroll
                        for (int i = 0; i < NORM_ROWS; ++i) {
                            values[i] = fmaf(of_b[s][i], x, values[i]);
                        }
                    }
                }
            }
            before += stop - start;
        }
#pragma unroll
        for (int i = 0; i < NORM_ROWS; ++i) { sums[i] = fmaf(values[i], values[i], sums[i]); }
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

extern "C" __global__ void __launch_bounds__(256)
adapter_columns(T* out, const T* x, const T* __restrict__ y, const f32* __restrict__ norms,
                const f32* __restrict__ magnitudes, const T* __restrict__ bias, i64 rows,
                i32 columns) {
    constexpr int N = Vec<T>::N;
    const i64 i = ((i64)blockIdx.x * blockDim.x + threadIdx.x) * N;
    if (i >= rows * columns) { return; }
    const int column = (int)(i % columns);
    Vec<T> value = load_vec(x + i);
    const Vec<T> other = load_vec(y == nullptr ? x + i : y + i);
#pragma unroll
    for (int k = 0; k < N; ++k) {
        const f32 norm = norms[column + k];
        f32 factor = y == nullptr ? 1.0f : 0.0f;
        if (norm > 0.0f) { factor = (magnitudes == nullptr ? 1.0f : magnitudes[column + k]) / norm; }
        f32 product = to_f32(value[k]) * factor;
        if (y != nullptr) { product *= to_f32(other[k]); }
        if (bias != nullptr) { product += to_f32(bias[column + k]); }
        value[k] = from_f32<T>(product);
    }
    store_vec(out + i, value);
}
