// elementwise.cu -- operations on each element alone.
//
//   add      out[i] = T(a[i] + b[i])
//   convert  out[i] = D(x[i])
//   fill     x[i] = T(value)                              all rounded to nearest
//
// Data     n elements of T, or of D and S: each F32 or BF16, 16-byte aligned.
// Launch   256 threads; ceil(n / 2048) blocks, 8 elements per thread; of fill ceil(bytes / 4096)
//          blocks, one 16-byte store per thread.
// Cost     what is given is read once, what results written once.
// Needs    out of add may be a or b: a thread reads what it overwrites.
#include "common.cuh"

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
