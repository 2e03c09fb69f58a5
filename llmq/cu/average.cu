// average.cu -- the moving average of weights, and its exchange with them.
//
//   update     average += (1 - d) * (param - average), d = min(decay, (1 + step) / (10 + step))
//   exchange   param = the average, rounded to nearest; average: all that gives both back
//
// An F32 param changes places with the average. Of a BF16 param, the average becomes a word with the
// bits of param in front and behind them the half of its own that param does not show.
//
// Data     average: F32, param P: F32 or BF16; n elements, a multiple of 128.
// Launch   128 threads, ceil(n / 1024) blocks: 8 elements per thread.
// Cost     update: param read, average read and written, once. exchange: both read and written.
// Needs    update: scalars final on the same stream; with skip_update nothing changes.
#include "common.cuh"

constexpr int COUNT = 8;

extern "C" __global__ void __launch_bounds__(128)
average_update(f32* __restrict__ average, const P* __restrict__ param,
               const StepScalars* __restrict__ scalars, f32 decay, i64 n) {
    const i64 start = ((i64)blockIdx.x * blockDim.x + threadIdx.x) * COUNT;
    if (start >= n || scalars->skip_update) { return; }
    const float step = (float)scalars->step;
    const float weight = 1.0f - fminf(decay, (1.0f + step) / (10.0f + step));
    Pack<f32, COUNT> kept;
    Pack<P, COUNT> now;
    kept.load(average + start);
    now.load(param + start);
#pragma unroll
    for (int k = 0; k < COUNT; ++k) {
        kept.set(k, kept.get(k) + (now.get(k) - kept.get(k)) * weight);
    }
    kept.store(average + start);
}

__device__ __forceinline__ bf16 bf16_of_bits(u32 bits) {
    return __ushort_as_bfloat16((unsigned short)bits);
}

// Nearest, and of two equally near the one nearer to 0: the lower half alone says which it was.
__device__ __forceinline__ void show(f32& average, bf16& param) {
    const u32 bits = __float_as_uint(average), low = bits & 0xFFFF;
    average = __uint_as_float(__float_as_uint(to_f32(param)) | low);
    param = bf16_of_bits((bits >> 16) + (low > 0x8000));
}

__device__ __forceinline__ void give_back(f32& average, bf16& param) {
    const u32 bits = __float_as_uint(average), low = bits & 0xFFFF;
    const u32 high = (__float_as_uint(to_f32(param)) >> 16) - (low > 0x8000);
    param = bf16_of_bits(bits >> 16);
    average = __uint_as_float(high << 16 | low);
}

__device__ __forceinline__ void show(f32& average, f32& param) {
    const float before = average;
    average = param, param = before;
}
__device__ __forceinline__ void give_back(f32& average, f32& param) { show(average, param); }

extern "C" __global__ void __launch_bounds__(128)
average_exchange(f32* __restrict__ average, P* __restrict__ param, i32 back, i64 n) {
    const i64 start = ((i64)blockIdx.x * blockDim.x + threadIdx.x) * COUNT;
    if (start >= n) { return; }
    Pack<f32, COUNT> kept;
    Pack<P, COUNT> shown;
    kept.load(average + start);
    shown.load(param + start);
#pragma unroll
    for (int k = 0; k < COUNT; ++k) {
        f32 a = kept.at(k);
        P p = shown.at(k);
        if (back) {
            give_back(a, p);
        } else {
            show(a, p);
        }
        kept.set(k, a);
        shown.set(k, p);
    }
    kept.store(average + start);
    shown.store(param + start);
}
