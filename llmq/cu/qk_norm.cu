// qk_norm.cu -- RMSNorm over every query and key head of the packed QKV activation, in place.
//
//   forward    raw = head       rstd = 1 / sqrt(mean(head^2) + eps)
//              head = T(T(rstd * head) * weight)     weight: q_weight or k_weight, (Hd,)
//              with OFFSET = 1: head = T(rstd * head * (1 + weight))
//   backward   x_hat = rstd * raw      d_weight = sum over tokens and heads of d_head * x_hat
//              d_head = rstd * (d_head * weight - x_hat * mean(d_head * weight * x_hat))
//              with OFFSET = 1: 1 + weight in place of weight
//
// Data     qkv, d_qkv: T (tokens, Hq + 2 Hkv, HEAD_DIM), value heads last and not touched. raw: T
//          and rstd: F32 (tokens, Hq + Hkv[, HEAD_DIM]). 16-byte aligned, HEAD_DIM % 8 == 0.
//          partial: F32 (gridDim.x, HEAD_DIM), sums of a block for the weight of its kind of head.
// Launch   256 threads. The first query_blocks blocks loop over the query heads, the others over
//          the key heads; at least one of each. GROUP lanes (a power of two) share a head, 8
//          channels each, HEADS_PER_LANE heads at a time.
// Cost     forward: heads read once, written twice; backward: read twice, written once.
// Needs    tokens * Hq < 2^31.
// Same name  llmq/ops/qk_norm.py  llmq/ref/qk_norm.py  tests/ops/test_qk_norm.py
#include "common.cuh"

constexpr int N = 8;  // channels of a lane: a warp of them is the largest head
constexpr int THREADS = 256;
constexpr int GROUPS = THREADS / GROUP;
constexpr int STEP = GROUPS * HEADS_PER_LANE;  // heads of a block at a time

// The heads that this block works on: all of one kind, numbered [0, total) through all tokens.
struct Heads {
    bool query;
    u32 block, blocks, per_token, first, stride, packed_stride, total;

    __device__ __forceinline__ Heads(i64 tokens, u32 num_heads, u32 num_kv_heads, u32 query_blocks)
        : query(blockIdx.x < query_blocks),
          block(query ? blockIdx.x : blockIdx.x - query_blocks),
          blocks(query ? query_blocks : gridDim.x - query_blocks),
          per_token(query ? num_heads : num_kv_heads),
          first(query ? 0 : num_heads),
          stride(num_heads + num_kv_heads),
          packed_stride(stride + num_kv_heads),
          total((u32)tokens * per_token) {}

    // Its place among all query and key heads, as in raw and rstd, and in the packed tensor.
    __device__ __forceinline__ i64 place(u32 head) const {
        return (i64)(head / per_token) * stride + first + head % per_token;
    }
    __device__ __forceinline__ i64 packed_place(u32 head) const {
        return (i64)(head / per_token) * packed_stride + first + head % per_token;
    }
};

// Sum over the GROUP lanes that share a head.
__device__ __forceinline__ float group_sum(float x) {
#pragma unroll
    for (int mask = GROUP / 2; mask > 0; mask >>= 1) {
        x += __shfl_xor_sync(0xFFFFFFFFu, x, mask);
    }
    return x;
}

// The channels of a lane.
struct Channels {
    Vec<T> part[N / Vec<T>::N];

    // Those at p, or zeros.
    __device__ __forceinline__ Channels(const T* p, bool active) {
#pragma unroll
        for (int i = 0; i < N / Vec<T>::N; ++i) {
            *reinterpret_cast<uint4*>(&part[i]) = make_uint4(0, 0, 0, 0);
            if (active) { part[i] = load_vec(p + i * Vec<T>::N); }
        }
    }
    Channels() = default;
    __device__ __forceinline__ T& operator[](int k) {
        return part[k / Vec<T>::N][k % Vec<T>::N];
    }
    __device__ __forceinline__ void store(T* p) const {
#pragma unroll
        for (int i = 0; i < N / Vec<T>::N; ++i) { store_vec(p + i * Vec<T>::N, part[i]); }
    }
};

// What a channel is multiplied by.
__device__ __forceinline__ float factor(T weight) {
    return OFFSET ? 1.0f + to_f32(weight) : to_f32(weight);
}

extern "C" __global__ void __launch_bounds__(THREADS)
qk_norm_forward(T* qkv, T* __restrict__ raw, f32* __restrict__ rstd,
                const T* __restrict__ q_weight, const T* __restrict__ k_weight, f32 eps,
                i64 tokens, i32 num_heads, i32 num_kv_heads, i32 query_blocks) {
    const Heads heads(tokens, num_heads, num_kv_heads, query_blocks);
    const int column = threadIdx.x % GROUP * N;
    const bool inside = column < HEAD_DIM;
    Channels weight((heads.query ? q_weight : k_weight) + column, inside);
    for (u32 start = heads.block * STEP; start < heads.total; start += heads.blocks * STEP) {
        Channels x[HEADS_PER_LANE];
#pragma unroll
        for (int j = 0; j < HEADS_PER_LANE; ++j) {
            const u32 head = start + j * GROUPS + threadIdx.x / GROUP;
            const bool active = inside && head < heads.total;
            x[j] = Channels(qkv + heads.packed_place(head) * HEAD_DIM + column, active);
        }
#pragma unroll
        for (int j = 0; j < HEADS_PER_LANE; ++j) {
            float squares = 0.0f;
#pragma unroll
            for (int k = 0; k < N; ++k) {
                squares = fmaf(to_f32(x[j][k]), to_f32(x[j][k]), squares);
            }
            const float scale = 1.0f / sqrtf(group_sum(squares) / (float)HEAD_DIM + eps);
            const u32 head = start + j * GROUPS + threadIdx.x / GROUP;
            if (inside && head < heads.total) {
                const i64 place = heads.place(head);
                if (column == 0) { rstd[place] = scale; }
                x[j].store(raw + place * HEAD_DIM + column);
#pragma unroll
                for (int k = 0; k < N; ++k) {
                    const float x_hat = to_f32(x[j][k]) * scale;
                    const float rounded = OFFSET ? x_hat : to_f32(from_f32<T>(x_hat));
                    x[j][k] = from_f32<T>(rounded * factor(weight[k]));
                }
                x[j].store(qkv + heads.packed_place(head) * HEAD_DIM + column);
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
qk_norm_backward(T* d_qkv, f32* __restrict__ partial, const T* __restrict__ raw,
                 const f32* __restrict__ rstd, const T* __restrict__ q_weight,
                 const T* __restrict__ k_weight, i64 tokens, i32 num_heads, i32 num_kv_heads,
                 i32 query_blocks) {
    const Heads heads(tokens, num_heads, num_kv_heads, query_blocks);
    const int column = threadIdx.x % GROUP * N;
    const bool inside = column < HEAD_DIM;
    Channels weight((heads.query ? q_weight : k_weight) + column, inside);
    float d_weight[N] = {};  // of this thread's columns, over all its heads
    for (u32 start = heads.block * STEP; start < heads.total; start += heads.blocks * STEP) {
        Channels grad[HEADS_PER_LANE], x[HEADS_PER_LANE];
        float scale[HEADS_PER_LANE];
#pragma unroll
        for (int j = 0; j < HEADS_PER_LANE; ++j) {
            const u32 head = start + j * GROUPS + threadIdx.x / GROUP;
            const bool active = inside && head < heads.total;
            grad[j] = Channels(d_qkv + heads.packed_place(head) * HEAD_DIM + column, active);
            x[j] = Channels(raw + heads.place(head) * HEAD_DIM + column, active);
            scale[j] = active ? rstd[heads.place(head)] : 0.0f;
        }
#pragma unroll
        for (int j = 0; j < HEADS_PER_LANE; ++j) {
            float dot = 0.0f;
#pragma unroll
            for (int k = 0; k < N; ++k) {
                const float product = to_f32(grad[j][k]) * (to_f32(x[j][k]) * scale[j]);
                dot = fmaf(product, factor(weight[k]), dot);
                d_weight[k] += product;
            }
            dot = group_sum(dot) / (float)HEAD_DIM;
#pragma unroll
            for (int k = 0; k < N; ++k) {
                const float direct = to_f32(grad[j][k]) * factor(weight[k]);
                const float along = to_f32(x[j][k]) * scale[j] * dot;
                grad[j][k] = from_f32<T>((direct - along) * scale[j]);
            }
            const u32 head = start + j * GROUPS + threadIdx.x / GROUP;
            if (inside && head < heads.total) {
                grad[j].store(d_qkv + heads.packed_place(head) * HEAD_DIM + column);
            }
        }
    }
    __shared__ float sums[N][THREADS];
#pragma unroll
    for (int k = 0; k < N; ++k) { sums[k][threadIdx.x] = d_weight[k]; }
    __syncthreads();
    if (threadIdx.x < HEAD_DIM) {
        const int k = threadIdx.x % N, lane = threadIdx.x / N;
        float sum = 0.0f;
        for (int g = 0; g < GROUPS; ++g) { sum += sums[k][g * GROUP + lane]; }
        partial[(i64)blockIdx.x * HEAD_DIM + threadIdx.x] = sum;
    }
}
