// matmul.cu -- what a block-scaled product of the library reads beside its codes.
//
//   scales[i] = 127, which is the scale 1;  scalars[0] = scale_a * scale_b;  scalars[4] = beta
//
// Data     scales: n bytes, a multiple of 16, 16-byte aligned. scalars: 8 numbers.
// Launch   256 threads, ceil(n / 4096) blocks: one 16-byte store per thread.
// Cost     scales written once.
// Needs    nothing.
#include "common.cuh"

extern "C" __global__ void __launch_bounds__(256) block_scales(
    u8* __restrict__ scales, f32* __restrict__ scalars, const f32* __restrict__ scale_a,
    const f32* __restrict__ scale_b, f32 beta, i64 n) {
    const i64 first = 16 * ((i64)blockIdx.x * blockDim.x + threadIdx.x);
    if (first < n) {
        constexpr u32 ONES = 0x7F7F7F7F;
        *reinterpret_cast<uint4*>(scales + first) = make_uint4(ONES, ONES, ONES, ONES);
    }
    if (first == 0) {
        scalars[0] = scale_a[0] * scale_b[0];
        scalars[4] = beta;
    }
}
