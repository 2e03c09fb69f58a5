// heads.cu -- copies and sums of attention heads between tensors with different layouts.
//
//   copy  out[out_first + r out_row + h out_head + c] = x[x_first + r x_row + h x_head + c]
//   sum   out[out_first + r out_row + c] = T(sum over h of x[x_first + r x_row + h x_head + c])
//
// Data     r < rows, h < heads, c < size; out, x: T, F32 or BF16, 16-byte aligned, and all numbers
//          of elements multiples of 8. Sums in F32, one head after the other.
// Launch   256 threads, 8 elements of out each: copy ceil(rows heads size / 2048) blocks, sum
//          ceil(rows size / 2048) blocks.
// Cost     each element of x read once, each element of out written once. Memory-bound.
// Needs    out and x in other memory; fewer than 2^31 * 8 elements.
#include "common.cuh"

constexpr u32 COUNT = 8;

extern "C" __global__ void __launch_bounds__(256)
heads_copy(T* __restrict__ out, const T* __restrict__ x, i32 rows, i32 heads, i32 size,
           i64 out_first, i64 out_row, i64 out_head, i64 x_first, i64 x_row, i64 x_head) {
    const u32 index = blockIdx.x * 256 + threadIdx.x, pieces = (u32)size / COUNT;
    const u32 column = index % pieces * COUNT, head = index / pieces % (u32)heads;
    const u32 row = index / pieces / (u32)heads;
    if (row >= (u32)rows) { return; }
    Pack<T, COUNT> v;
    v.load(x + x_first + row * x_row + head * x_head + column);
    v.store(out + out_first + row * out_row + head * out_head + column);
}

extern "C" __global__ void __launch_bounds__(256)
heads_sum(T* __restrict__ out, const T* __restrict__ x, i32 rows, i32 heads, i32 size,
          i64 out_first, i64 out_row, i64 x_first, i64 x_row, i64 x_head) {
    const u32 index = blockIdx.x * 256 + threadIdx.x, pieces = (u32)size / COUNT;
    const u32 column = index % pieces * COUNT, row = index / pieces;
    if (row >= (u32)rows) { return; }
    const T* from = x + x_first + row * x_row + column;
    float sum[COUNT] = {};
#pragma unroll 4
    for (i32 head = 0; head < heads; ++head) {
        Pack<T, COUNT> v;
        v.load(from + head * x_head);
#pragma unroll
        for (u32 k = 0; k < COUNT; ++k) { sum[k] += v.get(k); }
    }
    Pack<T, COUNT> total;
#pragma unroll
    for (u32 k = 0; k < COUNT; ++k) { total.set(k, from_f32<T>(sum[k])); }
    total.store(out + out_first + row * out_row + column);
}
