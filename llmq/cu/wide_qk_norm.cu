// wide_qk_norm.cu -- RMSNorm over all query and over all key channels of the packed QKV activation.
//
//   forward    raw = row        rstd = 1 / sqrt(mean(row^2) + eps)
//              row = T(rstd * row * weight)      row: a token's query channels, or its key channels
//   backward   x_hat = rstd * raw      d_weight = sum over tokens of d_row * x_hat
//              d_row = rstd * (d_row * weight - x_hat * mean(d_row * weight * x_hat))
//
// Data     qkv, d_qkv: T (tokens, Cq + 2 Ck), value channels last and not touched. raw: T (tokens,
//          Cq + Ck), rstd: F32 (tokens, 2). 16-byte aligned, Cq % 8 == Ck % 8 == 0. q_partial:
//          F32 (query_blocks, Cq), k_partial: F32 (the other blocks, Ck), sums of a block.
// Launch   the first query_blocks blocks loop over the queries of tokens, the others over keys; at
//          least one of each. A row lives in the registers of WARPS warps, VECTORS 16-byte vectors
//          in each lane, blocks have at least 4 (forward) or 8 (backward) warps.
// Cost     forward: rows read once, written twice; backward: read twice, written once.
// Needs    all tensors are distinct.
// Same name  llmq/ops/wide_qk_norm.py  llmq/ref/wide_qk_norm.py  tests/ops/test_wide_qk_norm.py
#include "common.cuh"
#include "fp8.cuh"

constexpr int N = Vec<T>::N;
constexpr int FORWARD_ROWS = block_rows(WARPS, 4), FORWARD_THREADS = 32 * WARPS * FORWARD_ROWS;
constexpr int BACKWARD_ROWS = block_rows(WARPS, 8), BACKWARD_THREADS = 32 * WARPS * BACKWARD_ROWS;
constexpr int SM_THREADS = 512;  // so many at least on an SM, for enough loads in flight
using Registers = Row<T, WARPS, VECTORS>;
template <int ROWS> using Sum = RowSum<WARPS, WARPS * ROWS>;

// What this block works on: the queries or the keys of all tokens.
struct Part {
    bool query;
    i32 block, blocks, channels, first, width, packed_width;

    __device__ __forceinline__ Part(i32 q_channels, i32 k_channels, i32 query_blocks)
        : query((i32)blockIdx.x < query_blocks),
          block(query ? blockIdx.x : blockIdx.x - query_blocks),
          blocks(query ? query_blocks : gridDim.x - query_blocks),
          channels(query ? q_channels : k_channels),
          first(query ? 0 : q_channels),
          width(q_channels + k_channels),
          packed_width(width + k_channels) {}
};

extern "C" __global__ void __launch_bounds__(FORWARD_THREADS, SM_THREADS / FORWARD_THREADS)
wide_qk_norm_forward(T* qkv, T* __restrict__ raw, f32* __restrict__ rstd,
                     const T* __restrict__ q_weight, const T* __restrict__ k_weight, f32 eps,
                     i64 tokens, i32 q_channels, i32 k_channels, i32 query_blocks) {
    constexpr int ROWS = FORWARD_ROWS;
    __shared__ float shared[2 * WARPS * ROWS];
    Sum<ROWS> row_sum{shared};
    const Part part(q_channels, k_channels, query_blocks);
    Registers weight, x;
    weight.load(part.query ? q_weight : k_weight, part.channels, true);
    for (i64 start = (i64)part.block * ROWS; start < tokens; start += (i64)part.blocks * ROWS) {
        const i64 token = start + threadIdx.x / (32 * WARPS);
        const bool active = token < tokens;
        T* row = qkv + token * part.packed_width + part.first;
        x.load(row, part.channels, active);
        float squares = 0.0f;
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
#pragma unroll
            for (int k = 0; k < N; ++k) {
                squares = fmaf(to_f32(x.v[i][k]), to_f32(x.v[i][k]), squares);
            }
        }
        forget(x);
        x.store(raw + token * part.width + part.first, part.channels, active);
        const float scale = 1.0f / sqrtf(row_sum(squares) / (float)part.channels + eps);
        if (active && Registers::column(0) == 0) { rstd[2 * token + !part.query] = scale; }
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
#pragma unroll
            for (int k = 0; k < N; ++k) {
                const float normalised = to_f32(x.v[i][k]) * scale;
                x.v[i][k] = from_f32<T>(normalised * to_f32(weight.v[i][k]));
            }
        }
        forget(weight);
        x.store(row, part.channels, active);
    }
}

extern "C" __global__ void __launch_bounds__(BACKWARD_THREADS, SM_THREADS / BACKWARD_THREADS)
wide_qk_norm_backward(T* d_qkv, f32* __restrict__ q_partial, f32* __restrict__ k_partial,
                      const T* __restrict__ raw, const f32* __restrict__ rstd,
                      const T* __restrict__ q_weight, const T* __restrict__ k_weight, i64 tokens,
                      i32 q_channels, i32 k_channels, i32 query_blocks) {
    constexpr int ROWS = BACKWARD_ROWS;
    __shared__ float shared[2 * WARPS * ROWS];
    __shared__ float column_sums[ROWS > 1 ? 32 * WARPS * VECTORS * N : 1];
    Sum<ROWS> row_sum{shared};
    const Part part(q_channels, k_channels, query_blocks);
    float d_weight[VECTORS][N] = {};  // of this thread's columns, over all its rows
    Registers weight;
    weight.load(part.query ? q_weight : k_weight, part.channels, true);
    for (i64 start = (i64)part.block * ROWS; start < tokens; start += (i64)part.blocks * ROWS) {
        const i64 token = start + threadIdx.x / (32 * WARPS);
        const bool active = token < tokens;
        T* row = d_qkv + token * part.packed_width + part.first;
        Registers grad, x;
        grad.load(row, part.channels, active);
        x.load(raw + token * part.width + part.first, part.channels, active);
        const float scale = active ? rstd[2 * token + !part.query] : 0.0f;
        float dot = 0.0f;
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
#pragma unroll
            for (int k = 0; k < N; ++k) {
                const float product = to_f32(grad.v[i][k]) * to_f32(x.v[i][k]);
                dot = fmaf(product, to_f32(weight.v[i][k]), dot);
                d_weight[i][k] = fmaf(product, scale, d_weight[i][k]);
            }
        }
        forget(grad);
        forget(x);
        forget(weight);
        const float slope = row_sum(dot) * (scale * scale * scale / (float)part.channels);
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
#pragma unroll
            for (int k = 0; k < N; ++k) {
                const float direct = to_f32(grad.v[i][k]) * to_f32(weight.v[i][k]) * scale;
                grad.v[i][k] = from_f32<T>(direct - to_f32(x.v[i][k]) * slope);
            }
        }
        forget(weight);
        grad.store(row, part.channels, active);
    }
    f32* partial = part.query ? q_partial : k_partial;
    sum_block_rows<T, WARPS, VECTORS, ROWS>(partial + (i64)part.block * part.channels,
                                            part.channels, d_weight, column_sums);
}
