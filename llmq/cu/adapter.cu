// adapter.cu -- low-rank adapters of rows of a matrix: their B in one matrix, and back.
//
//   expand    whole[r, k * rank + c] = T(scale_k * b[i, c])   for row r = the i-th of all spans'
//             elsewhere 0                                     rows, which is in span k
//   collect   b[i, c] = T(scale_k * whole[r, k * rank + c])
//
// Data     whole: (rows, columns), b: (rows of all spans, rank), T (f32, bf16). Spans ascend, those
//          that are not used are empty. They are of `period` rows, and the next ones have them, too.
// Launch   256 threads, one for each element of b, or for eight of whole, as they are written.
// Cost     what is written, once; the other one is read where it has a counterpart.
// Needs    columns >= rank * spans, a multiple of 8; fewer than 2^35 elements of whole.
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
