// clamped_swiglu.cu -- the gated activation of pairs that are cut off, and its gradient.
//
//   out = (u + 1) * (g * s)      g = min(gate, limit), u = up from -limit to limit, s = sigmoid(alpha g)
//   d_up = d_out * (g * s)       d_gate = d_out * (u + 1) * s * (1 + alpha g (1 - s))
//
// A gradient is 0 where its own input is cut off.
//
// Data     pairs, d_pairs: (rows, 2F), gate and up side by side. out, d_out: (rows, F). All of T, 16-byte
//          aligned. n: elements of out, a multiple of one 16-byte vector. d_pairs may be pairs.
// Launch   256 threads, a 16-byte vector of out each.
// Cost     forward reads 2 and writes 1 element per output, backward reads 3 and writes 2. Memory-bound.
// Needs    limit above 0.
#include "common.cuh"

constexpr int THREADS = 256, N = Vec<T>::N;

// Comparisons let NaN be, which fminf would not.
struct Parts {
    float gate, up, share;
    bool gate_cut, up_cut;

    __device__ __forceinline__ Parts(float g, float u, float alpha, float limit) {
        gate_cut = g > limit, up_cut = fabsf(u) > limit;
        gate = gate_cut ? limit : g;
        up = up_cut ? copysignf(limit, u) : u;
        share = sigmoid(alpha * gate);
    }
};

extern "C" __global__ void __launch_bounds__(THREADS)
clamped_swiglu_forward(T* __restrict__ out, const T* __restrict__ pairs, i64 n, f32 alpha, f32 limit) {
    const i64 i = ((i64)blockIdx.x * THREADS + threadIdx.x) * N;
    if (i >= n) { return; }
    Pack<T, 2 * N> x;
    x.load(pairs + 2 * i);
    Vec<T> result;
#pragma unroll
    for (int k = 0; k < N; ++k) {
        const Parts p(x.get(2 * k), x.get(2 * k + 1), alpha, limit);
        result[k] = from_f32<T>((p.up + 1.0f) * (p.gate * p.share));
    }
    store_vec(out + i, result);
}

extern "C" __global__ void __launch_bounds__(THREADS)
clamped_swiglu_backward(T* d_pairs, const T* __restrict__ d_out, const T* pairs, i64 n, f32 alpha,
                        f32 limit) {
    const i64 i = ((i64)blockIdx.x * THREADS + threadIdx.x) * N;
    if (i >= n) { return; }
    Pack<T, 2 * N> x;
    x.load(pairs + 2 * i);
    const Vec<T> d = load_vec(d_out + i);
#pragma unroll
    for (int k = 0; k < N; ++k) {
        const Parts p(x.get(2 * k), x.get(2 * k + 1), alpha, limit);
        const float of_out = to_f32(d[k]), slope = p.share * (1.0f + alpha * p.gate * (1.0f - p.share));
        x.set(2 * k, from_f32<T>(p.gate_cut ? 0.0f : of_out * (p.up + 1.0f) * slope));
        x.set(2 * k + 1, from_f32<T>(p.up_cut ? 0.0f : of_out * (p.gate * p.share)));
    }
    x.store(d_pairs + 2 * i);
}
