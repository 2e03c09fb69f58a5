// elementwise.cu -- operations on each element alone.
//
//   add      out[i] = T(a[i] + b[i])
//   scale    out[i] = T(x[i] * by[0])
//   multiply out[r, i + c] = T(a[r, j + c] * b[r, k + c]) for c < channels
//   copy_columns   out[r, i + c] = x[r, j + c], with ADD T(out[r, i + c] + x[r, j + c]);
//            width: elements of a thread, 8, or 1 if a number of columns is no multiple of 8
//   convert  out[i] = D(x[i])
//   fill     x[i] = T(value)                              all rounded to nearest
//
// Data     declared in llmq/ops/pointwise/elementwise.py.
// Launch   256 threads; ceil(n / 2048) blocks, 8 elements per thread; fill: ceil(bytes / 4096)
//          blocks, one 16-byte store per thread.
// Cost     inputs read once, results written once.
// Needs    add's out may be a or b, scale's out may be x: a thread reads the elements before it
//          overwrites them.
#include "common.cuh"

#ifndef ADD  // compiled for another entry
#define ADD 0
#endif

constexpr int COUNT = 8;

extern "C" __global__ void __launch_bounds__(256) add(T* out, const T* a, const T* b, i64 n) {
    const i64 first = ((i64)blockIdx.x * blockDim.x + threadIdx.x) * COUNT;
    if (first + COUNT <= n) {
        Pack<T, COUNT> x, y;
        x.load(a + first);
        y.load(b + first);
#pragma unroll
        for (int k = 0; k < COUNT; ++k) { x.set(k, from_f32<T>(x.get(k) + y.get(k))); }
        x.store(out + first);
    } else {
        for (i64 i = first; i < n; ++i) { out[i] = from_f32<T>(to_f32(a[i]) + to_f32(b[i])); }
    }
}

extern "C" __global__ void __launch_bounds__(256) scale(T* out, const T* x, const T* by, i64 n) {
    const i64 first = ((i64)blockIdx.x * blockDim.x + threadIdx.x) * COUNT;
    const float factor = to_f32(by[0]);
    if (first + COUNT <= n) {
        Pack<T, COUNT> y;
        y.load(x + first);
#pragma unroll
        for (int k = 0; k < COUNT; ++k) { y.set(k, from_f32<T>(y.get(k) * factor)); }
        y.store(out + first);
    } else {
        for (i64 i = first; i < n; ++i) { out[i] = from_f32<T>(to_f32(x[i]) * factor); }
    }
}

extern "C" __global__ void __launch_bounds__(256)
multiply(T* out, const T* a, const T* b, i64 rows, i32 channels, i32 out_first, i32 a_first,
         i32 b_first, i32 out_columns, i32 a_columns, i32 b_columns) {
    const i64 first = ((i64)blockIdx.x * blockDim.x + threadIdx.x) * COUNT;
    if (first >= rows * channels) { return; }
    const i64 row = first / channels, column = first % channels;
    Pack<T, COUNT> x, y;
    x.load(a + row * a_columns + a_first + column);
    y.load(b + row * b_columns + b_first + column);
#pragma unroll
    for (int k = 0; k < COUNT; ++k) { x.set(k, from_f32<T>(x.get(k) * y.get(k))); }
    x.store(out + row * out_columns + out_first + column);
}

extern "C" __global__ void __launch_bounds__(256)
copy_columns(T* out, const T* x, i64 rows, i32 channels, i32 out_first, i32 x_first,
             i32 out_columns, i32 x_columns, i32 width) {
    const i64 first = ((i64)blockIdx.x * blockDim.x + threadIdx.x) * width;
    if (first >= rows * channels) { return; }
    const i64 row = first / channels, column = first % channels;
    T* const to = out + row * out_columns + out_first + column;
    const T* const from = x + row * x_columns + x_first + column;
    if (width == 1) {
        *to = ADD ? from_f32<T>(to_f32(*from) + to_f32(*to)) : *from;
        return;
    }
    Pack<T, COUNT> values;
    values.load(from);
    if (ADD) {
        Pack<T, COUNT> sums;
        sums.load(to);
#pragma unroll
        for (int k = 0; k < COUNT; ++k) {
            values.set(k, from_f32<T>(values.get(k) + sums.get(k)));
        }
    }
    values.store(to);
}

extern "C" __global__ void __launch_bounds__(256)
convert(D* __restrict__ out, const S* __restrict__ x, i64 n) {
    const i64 first = ((i64)blockIdx.x * blockDim.x + threadIdx.x) * COUNT;
    if (first + COUNT <= n) {
        Pack<S, COUNT> in;
        Pack<D, COUNT> result;
        in.load(x + first);
#pragma unroll
        for (int k = 0; k < COUNT; ++k) { result.set(k, from_f32<D>(in.get(k))); }
        result.store(out + first);
    } else {
        for (i64 i = first; i < n; ++i) { out[i] = from_f32<D>(to_f32(x[i])); }
    }
}

extern "C" __global__ void __launch_bounds__(256) fill(T* __restrict__ x, f32 value, i64 n) {
    const i64 first = ((i64)blockIdx.x * blockDim.x + threadIdx.x) * Vec<T>::N;
    const T element = from_f32<T>(value);
    if (first + Vec<T>::N <= n) {
        Vec<T> vector;
#pragma unroll
        for (int k = 0; k < Vec<T>::N; ++k) { vector[k] = element; }
        store_vec(x + first, vector);
    } else {
        for (i64 i = first; i < n; ++i) { x[i] = element; }
    }
}

// -- normally distributed random numbers: Philox4x32-10 and Box-Muller
//
//   (w0, w1, w2, w3) = philox(key = seed, counter = j)     u(w) = (w >> 8) / 2^24
//   elements 4j, 4j+1 = std * sqrt(-2 ln(u(w0) + 2^-24)) * (cos, sin)(2 pi u(w1)); 4j+2, 4j+3 from
//   w2, w3. out[i] is element first_index + i.
//
// Data     out: n elements of T, F32 or BF16.
// Launch   256 threads, one counter each: ceil((first_index % 4 + n) / 4) counters.
// Cost     out written once, four elements at a time if first_index % 4 == 0. Bound by arithmetic:
//          60 instructions per element. Start-up only.
// Needs    nothing.

constexpr int ROUNDS = 10;

// Elements that one counter gives.
struct alignas(4 * sizeof(T)) Four {
    T v[4];
};

// J. Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (2011), table 2.
__device__ __forceinline__ void philox(u32 (&x)[4], u32 k0, u32 k1) {
#pragma unroll
    for (int round = 0; round < ROUNDS; ++round) {
        const u64 product0 = (u64)x[0] * 0xD2511F53u;
        const u64 product1 = (u64)x[2] * 0xCD9E8D57u;
        x[0] = (u32)(product1 >> 32) ^ x[1] ^ k0;
        x[1] = (u32)product1;
        x[2] = (u32)(product0 >> 32) ^ x[3] ^ k1;
        x[3] = (u32)product0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
}

extern "C" __global__ void __launch_bounds__(256)
random_normal(T* __restrict__ out, f32 std, u32 seed_low, u32 seed_high, i64 first_index, i64 n) {
    const i64 counter = first_index / 4 + (i64)blockIdx.x * blockDim.x + threadIdx.x;
    const i64 first = 4 * counter - first_index;
    if (first >= n) { return; }
    u32 words[4] = {(u32)counter, (u32)((u64)counter >> 32), 0, 0};
    philox(words, seed_low, seed_high);
    Four result;
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
        // 24 bits each, exact in F32: the radius from (0, 1], the angle from [0, 1).
        const float unit = ((float)(words[2 * pair] >> 8) + 1.0f) * 0x1p-24f;
        const float turn = (float)(words[2 * pair + 1] >> 8) * 0x1p-24f;
        const float radius = sqrtf(-2.0f * logf(unit));
        float sine, cosine;
        sincospif(2.0f * turn, &sine, &cosine);
        result.v[2 * pair] = from_f32<T>(radius * cosine * std);
        result.v[2 * pair + 1] = from_f32<T>(radius * sine * std);
    }
    if (first_index % 4 == 0 && first + 4 <= n) {
        *reinterpret_cast<Four*>(out + first) = result;
        return;
    }
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        if (first + k >= 0 && first + k < n) { out[first + k] = result.v[k]; }
    }
}

// -- dropout: seed, step, sequence and place determine which elements stay
//
//   index = sequence * per_sequence + place     sequence = first_sequence + i / per_sequence * stride
//   out[i] = T([out[i] +] (random_bits(seed, index) >= threshold ? scale * x[i] : 0))
//
// Data     out, x: n elements of T (f32, bf16), 16-byte aligned; per_sequence % 8 == 0.
// Launch   256 threads, ceil(n / 2048) blocks: 8 elements per thread. ADD is a constant.
// Cost     x read, out written (with ADD read too) once; 12 instructions for each element's random
//          bits.
// Needs    scalars' seed, step, first_sequence, sequence_stride. out may be x.

extern "C" __global__ void __launch_bounds__(256)
dropout(T* out, const T* x, const StepScalars* __restrict__ scalars, u32 threshold, f32 scale,
        u32 salt, i64 per_sequence, i64 n) {
    const i64 first = ((i64)blockIdx.x * blockDim.x + threadIdx.x) * COUNT;
    if (first >= n) { return; }
    const u32 seed = mix_word(mix_word(mix_word(0, scalars->seed), scalars->step), salt);
    const u64 number = (u64)(first / per_sequence);
    const u64 sequence = scalars->first_sequence + number * scalars->sequence_stride;
    const u64 start = sequence * (u64)per_sequence + (u64)(first % per_sequence);
    Pack<T, COUNT> values, sums;
    values.load(x + first);
    if (ADD) { sums.load(out + first); }
#pragma unroll
    for (int k = 0; k < COUNT; ++k) {
        // A multiple of 8: `|` keeps the index's high word the same for all k.
        const bool stays = random_bits(seed, start | k) >= threshold;
        const float kept = stays ? __fmul_rn(values.get(k), scale) : 0.0f;
        sums.set(k, from_f32<T>(ADD ? sums.get(k) + kept : kept));
    }
    sums.store(out + first);
}

// -- the moving average of weights, and its exchange with them.
//
//   update     average += (1 - d) * (param - average), d = min(decay, (1 + step) / (10 + step))
//   exchange   param = the average, rounded to nearest; average = the bits that restore both later
//
// An F32 param and the average change places. With a BF16 param, the average's upper half becomes
// the old bits of param; its lower half stays, since the rounded average in param lacks these bits.
//
// Data     average: F32, param P: F32 or BF16; n elements, a multiple of 128.
// Launch   128 threads, ceil(n / 1024) blocks: 8 elements per thread.
// Cost     update: param read, average read and written, once. exchange: both read and written.
// Needs    update: scalars final on the same stream; with skip_update nothing changes.

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

// Rounds to nearest, ties toward 0, so that the lower half alone tells give_back whether the upper
// half was rounded up.
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
