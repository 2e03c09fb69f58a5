// swiglu.cu -- the gated activation of Llama- and Qwen-class MLPs, and its gradient.
//
//   out = up * (gate * s)        s = sigmoid(gate)
//   d_up = d_out * (gate * s)    d_gate = d_out * up * s * (1 + gate * (1 - s))
//
// Data     up_gate, d_up_gate: (rows, 2F), [up | gate] in every row. out, d_out: (rows, F). All
//          of T, 16-byte aligned, F a multiple of one 16-byte vector. d_up_gate may be up_gate.
//          abs_max: F32 (1), with ABS_MAX = 1 raised to the largest |out|, |d_up_gate|, as stored;
//          else not touched, may be null.
// Launch   256 threads, ceil(rows * F / (512 vectors)) blocks: 2 vectors per thread.
// Cost     forward reads 2 and writes 1 element per output, backward reads 3 and writes 2;
//          memory-bound: 4 or 6 16-byte loads in flight per thread, about 30 instructions per
//          output element.
// Needs    rows * F below 2^32 vectors.
// Same name  llmq/ops/swiglu.py  llmq/ref/swiglu.py  tests/ops/test_swiglu.py
#include "common.cuh"

constexpr int THREADS = 256, VECTORS = 2;
constexpr int N = Vec<T>::N;

// exp overflows to infinity for x < -88, and 1 / infinity is the right result.
__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// Element offsets of output vector i of this thread: in out, and in up_gate.
struct Place {
    bool inside;
    i64 out, up;
    __device__ __forceinline__ Place(int i, i64 rows, int F) {
        const u32 index = (blockIdx.x * VECTORS + i) * THREADS + threadIdx.x;
        const u32 row = index / (u32)(F / N);
        inside = row < rows;
        out = (i64)index * N;
        up = out + (i64)row * F;
    }
};

extern "C" __global__ void __launch_bounds__(THREADS)
swiglu_forward(T* __restrict__ out, const T* __restrict__ up_gate, i64 rows, i32 F,
               f32* abs_max) {
    u32 largest = 0;
    uint4 up[VECTORS], gate[VECTORS];
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        const Place place(i, rows, F);
        if (place.inside) {
            up[i] = load_packed_stream(up_gate + place.up);
            gate[i] = load_packed_stream(up_gate + place.up + F);
        }
    }
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        const Place place(i, rows, F);
        if (!place.inside) { break; }
        const Vec<T> up_i = unpack<T>(up[i]), gate_i = unpack<T>(gate[i]);
        Vec<T> result;
#pragma unroll
        for (int k = 0; k < N; ++k) {
            const float g = to_f32(gate_i[k]);
            result[k] = from_f32<T>(to_f32(up_i[k]) * (g * sigmoid(g)));
        }
        store_vec(out + place.out, result);
        largest = max(largest, abs_max_bits(result));
    }
    finish_abs_max<ABS_MAX>(abs_max, largest);
}

// No __restrict__ on what may be one array: every thread reads its elements before it writes them.
// 4 blocks on an SM: with ABS_MAX the compiler would take two registers too many for that.
extern "C" __global__ void __launch_bounds__(THREADS, 4)
swiglu_backward(T* d_up_gate, const T* __restrict__ d_out, const T* up_gate, i64 rows, i32 F,
                f32* abs_max) {
    u32 largest = 0;
    uint4 d[VECTORS], up[VECTORS], gate[VECTORS];
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        const Place place(i, rows, F);
        if (place.inside) {
            d[i] = load_packed_stream(d_out + place.out);
            up[i] = load_packed_stream(up_gate + place.up);
            gate[i] = load_packed_stream(up_gate + place.up + F);
        }
    }
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        const Place place(i, rows, F);
        if (!place.inside) { break; }
        const Vec<T> d_i = unpack<T>(d[i]), up_i = unpack<T>(up[i]), gate_i = unpack<T>(gate[i]);
        Vec<T> d_up, d_gate;
#pragma unroll
        for (int k = 0; k < N; ++k) {
            const float g = to_f32(gate_i[k]), s = sigmoid(g), d_k = to_f32(d_i[k]);
            const float slope = ((1.0f - s) * g + 1.0f) * s;
            d_up[k] = from_f32<T>(g * s * d_k);
            d_gate[k] = from_f32<T>(slope * to_f32(up_i[k]) * d_k);
        }
        store_vec(d_up_gate + place.up, d_up);
        store_vec(d_up_gate + place.up + F, d_gate);
        largest = max(largest, max(abs_max_bits(d_up), abs_max_bits(d_gate)));
    }
    finish_abs_max<ABS_MAX>(abs_max, largest);
}
