// value_norm.cu -- RMSNorm of values, head by head and without weights.
//
//   forward    value = T(rstd * x)       rstd = 1 / sqrt(mean(x^2) + eps)
//   backward   d_x = T(rstd * (d_value - value * mean(d_value * value)))
//
//   KEYS = 0   x: the value heads of qkv, in place; d_x takes the place of d_value in d_qkv.
//   KEYS = 1   x: the key heads of product; qkv also gets product's query and key heads. d_product:
//              the query heads of d_qkv, and T(key heads of d_qkv + d_x).
//
// Data     declared in llmq/ops/attention/value_norm.py. product, d_product: null with KEYS = 0.
// Launch   256 threads; a warp for each value head, with KEYS = 1 also for each query head; VECTORS
//          vectors of 16 bytes in each lane.
// Cost     operands are read once, results written once. Memory-bound.
// Needs    fewer than 2^31 heads.
#include "common.cuh"

#ifndef KEYS  // no preset launches this kernel
#define KEYS 1
#endif
#ifndef HEAD_DIM
#define HEAD_DIM 512
#endif
#ifndef VECTORS
#define VECTORS 2
#endif

constexpr int N = Vec<T>::N;
using Registers = Row<T, 1, VECTORS>;

// This warp's head: its token, and its number among the token's heads that the kernel works on.
// first: number of the first value head in qkv.
struct Head {
    i64 token, head;
    bool active, query;
    i32 heads, first;

    __device__ __forceinline__ Head(i64 tokens, i32 num_heads, i32 num_kv_heads)
        : heads(KEYS ? num_heads + num_kv_heads : num_kv_heads), first(num_heads + num_kv_heads) {
        const i64 warp = ((i64)blockIdx.x * blockDim.x + threadIdx.x) / 32;
        token = warp / heads;
        head = warp % heads;
        active = token < tokens;
        query = KEYS && head < num_heads;
    }
};

extern "C" __global__ void __launch_bounds__(256)
value_norm_forward(T* qkv, f32* __restrict__ rstd, const T* __restrict__ product, f32 eps,
                   i64 tokens, i32 num_heads, i32 num_kv_heads) {
    const Head at(tokens, num_heads, num_kv_heads);
    T* packed = qkv + at.token * (at.first + num_kv_heads) * HEAD_DIM;
    const i64 value = at.first + at.head - (KEYS ? num_heads : 0);
    Registers x;
    if (KEYS) {
        x.load(product + (at.token * at.heads + at.head) * HEAD_DIM, HEAD_DIM, at.active);
        x.store(packed + at.head * HEAD_DIM, HEAD_DIM, at.active);
    } else {
        x.load(packed + value * HEAD_DIM, HEAD_DIM, at.active);
    }
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
#pragma unroll
        for (int k = 0; k < N; ++k) {
            squares = fmaf(to_f32(x.v[i][k]), to_f32(x.v[i][k]), squares);
        }
    }
    const float scale = 1.0f / sqrtf(warp_sum(squares) / (float)HEAD_DIM + eps);
    const bool active = at.active && !at.query;
    if (active && threadIdx.x % 32 == 0) { rstd[at.token * num_kv_heads + value - at.first] = scale; }
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
#pragma unroll
        for (int k = 0; k < N; ++k) { x.v[i][k] = from_f32<T>(to_f32(x.v[i][k]) * scale); }
    }
    x.store(packed + value * HEAD_DIM, HEAD_DIM, active);
}

extern "C" __global__ void __launch_bounds__(256)
value_norm_backward(T* __restrict__ d_product, T* d_qkv, const T* __restrict__ qkv,
                    const f32* __restrict__ rstd, i64 tokens, i32 num_heads, i32 num_kv_heads) {
    const Head at(tokens, num_heads, num_kv_heads);
    const i64 packed = at.token * (at.first + num_kv_heads) * HEAD_DIM;
    const i64 value = at.first + at.head - (KEYS ? num_heads : 0);
    const i64 from = packed + value * HEAD_DIM;
    const bool active = at.active && !at.query;
    Registers d, v, key;
    d.load(d_qkv + from, HEAD_DIM, active);
    v.load(qkv + from, HEAD_DIM, active);
    if (KEYS) { key.load(d_qkv + packed + at.head * HEAD_DIM, HEAD_DIM, at.active); }
    float dot = 0.0f;
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
#pragma unroll
        for (int k = 0; k < N; ++k) { dot = fmaf(to_f32(d.v[i][k]), to_f32(v.v[i][k]), dot); }
    }
    dot = warp_sum(dot) / (float)HEAD_DIM;
    const float scale = active ? rstd[at.token * num_kv_heads + value - at.first] : 0.0f;
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
#pragma unroll
        for (int k = 0; k < N; ++k) {
            const float d_x = (to_f32(d.v[i][k]) - to_f32(v.v[i][k]) * dot) * scale;
            d.v[i][k] = from_f32<T>(KEYS ? to_f32(key.v[i][k]) + d_x : d_x);
        }
    }
    if (KEYS) {
        d.store(d_product + (at.token * at.heads + at.head) * HEAD_DIM, HEAD_DIM, at.active);
    } else {
        d.store(d_qkv + from, HEAD_DIM, at.active);
    }
}
