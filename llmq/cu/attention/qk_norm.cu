// qk_norm.cu -- RMSNorm of queries and keys in the packed QKV activation, in place: over every
// head, or with WIDE = 1 over all query and over all key channels of a token.
//
//   forward    raw = row       rstd = 1 / sqrt(mean(row^2) + eps)
//              row = T(T(rstd * row) * weight)       weight: q_weight or k_weight, of a row's width
//              WIDE, or ROUNDED_ONCE = 1: row = T(rstd * row * weight)
//   backward   x_hat = rstd * raw      d_weight = sum over rows of d_row * x_hat
//              d_row = rstd * (d_row * weight - x_hat * mean(d_row * weight * x_hat))
//
//   OFFSET = 1: 1 + weight takes the place of weight.
//
// Data     declared in llmq/ops/attention/qk_norm.py. Value heads of qkv and d_qkv are not
//          touched. rstd: one for each head; with WIDE one for a token's queries and one for its
//          keys. q_partial, k_partial: each block's sums for d_weight; null with SUMS = 0.
// Launch   the first query_blocks blocks loop over queries, the others over keys; at least one of
//          each. Heads: 256 threads; GROUP lanes (a power of two) share a head, each with 8
//          channels (16 if HEAD_DIM > 256) of HEADS_PER_LANE heads at a time. WIDE: a row lies in
//          registers of WARPS warps, VECTORS 16-byte vectors in each lane; blocks have at least 4
//          (forward) or 8 (backward) warps.
// Cost     forward: rows read once, written twice; backward: read twice, written once.
// Needs    tokens * Hq < 2^31. All tensors are distinct.
#include "common.cuh"
#include "fp8.cuh"

// The factor by which a channel is multiplied.
__device__ __forceinline__ float factor(T weight) {
    return OFFSET ? 1.0f + to_f32(weight) : to_f32(weight);
}

#if WIDE

constexpr int N = Vec<T>::N;
constexpr int FORWARD_ROWS = block_rows(WARPS, 4), FORWARD_THREADS = 32 * WARPS * FORWARD_ROWS;
constexpr int BACKWARD_ROWS = block_rows(WARPS, 8), BACKWARD_THREADS = 32 * WARPS * BACKWARD_ROWS;
constexpr int SM_THREADS = 512;  // an SM needs at least as many for enough loads in flight
constexpr int FORWARD_BLOCKS = SM_THREADS / FORWARD_THREADS;
constexpr int BACKWARD_BLOCKS = SM_THREADS / BACKWARD_THREADS;
using Registers = Row<T, WARPS, VECTORS>;
template <int ROWS> using Sum = RowSum<WARPS, WARPS * ROWS>;

// This block's part: the queries or the keys of all tokens.
struct Part {
    bool query;
    i32 block, blocks, channels, first, width, packed_width;

    __device__ __forceinline__ Part(i32 num_heads, i32 num_kv_heads, i32 query_blocks)
        : query((i32)blockIdx.x < query_blocks),
          block(query ? blockIdx.x : blockIdx.x - query_blocks),
          blocks(query ? query_blocks : gridDim.x - query_blocks),
          channels((query ? num_heads : num_kv_heads) * HEAD_DIM),
          first(query ? 0 : num_heads * HEAD_DIM),
          width((num_heads + num_kv_heads) * HEAD_DIM),
          packed_width(width + num_kv_heads * HEAD_DIM) {}
};

__device__ __forceinline__ void normalise(T* qkv, T* __restrict__ raw, f32* __restrict__ rstd,
                                          const T* __restrict__ q_weight,
                                          const T* __restrict__ k_weight, f32 eps, i64 tokens,
                                          i32 num_heads, i32 num_kv_heads, i32 query_blocks) {
    constexpr int ROWS = FORWARD_ROWS;
    __shared__ float shared[2 * WARPS * ROWS];
    Sum<ROWS> row_sum{shared};
    const Part part(num_heads, num_kv_heads, query_blocks);
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
                x.v[i][k] = from_f32<T>(normalised * factor(weight.v[i][k]));
            }
        }
        forget(weight);
        x.store(row, part.channels, active);
    }
}

__device__ __forceinline__ void gradients(T* d_qkv, f32* __restrict__ q_partial,
                                          f32* __restrict__ k_partial, const T* __restrict__ raw,
                                          const f32* __restrict__ rstd,
                                          const T* __restrict__ q_weight,
                                          const T* __restrict__ k_weight, i64 tokens,
                                          i32 num_heads, i32 num_kv_heads, i32 query_blocks) {
    constexpr int ROWS = BACKWARD_ROWS;
    __shared__ float shared[2 * WARPS * ROWS];
    __shared__ float column_sums[ROWS > 1 ? 32 * WARPS * VECTORS * N : 1];
    Sum<ROWS> row_sum{shared};
    const Part part(num_heads, num_kv_heads, query_blocks);
    float d_weight[VECTORS][N] = {};  // sums for this thread's columns over all its rows
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
                const float product = to_f32(grad.v[i][k]) * (to_f32(x.v[i][k]) * scale);
                dot = fmaf(product, factor(weight.v[i][k]), dot);
                if constexpr (SUMS) { d_weight[i][k] += product; }
            }
        }
        forget(grad);
        forget(x);
        forget(weight);
        dot = row_sum(dot) / (float)part.channels;
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
#pragma unroll
            for (int k = 0; k < N; ++k) {
                const float direct = to_f32(grad.v[i][k]) * factor(weight.v[i][k]);
                const float along = to_f32(x.v[i][k]) * scale * dot;
                grad.v[i][k] = from_f32<T>((direct - along) * scale);
            }
        }
        forget(weight);
        grad.store(row, part.channels, active);
    }
    if constexpr (!SUMS) { return; }
    f32* partial = part.query ? q_partial : k_partial;
    sum_block_rows<T, WARPS, VECTORS, ROWS>(partial + (i64)part.block * part.channels,
                                            part.channels, d_weight, column_sums);
}

#else

constexpr int N = HEAD_DIM > 256 ? 16 : 8;  // channels of a lane: one warp holds the largest head
constexpr int THREADS = 256;
constexpr int FORWARD_THREADS = THREADS, BACKWARD_THREADS = THREADS;
constexpr int FORWARD_BLOCKS = 1, BACKWARD_BLOCKS = 2;  // on an SM: registers must suffice
constexpr int GROUPS = THREADS / GROUP;
constexpr int STEP = GROUPS * HEADS_PER_LANE;  // heads that a block takes at a time

// The heads that this block works on: either queries or keys, numbered [0, total) over all tokens.
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

    // A head's place among all query and key heads (as in raw and rstd), and in the packed tensor.
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

    // The channels at p, or zeros.
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

__device__ __forceinline__ void normalise(T* qkv, T* __restrict__ raw, f32* __restrict__ rstd,
                                          const T* __restrict__ q_weight,
                                          const T* __restrict__ k_weight, f32 eps, i64 tokens,
                                          i32 num_heads, i32 num_kv_heads, i32 query_blocks) {
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
                    const float rounded = ROUNDED_ONCE ? x_hat : to_f32(from_f32<T>(x_hat));
                    x[j][k] = from_f32<T>(rounded * factor(weight[k]));
                }
                x[j].store(qkv + heads.packed_place(head) * HEAD_DIM + column);
            }
        }
    }
}

__device__ __forceinline__ void gradients(T* d_qkv, f32* __restrict__ q_partial,
                                          f32* __restrict__ k_partial, const T* __restrict__ raw,
                                          const f32* __restrict__ rstd,
                                          const T* __restrict__ q_weight,
                                          const T* __restrict__ k_weight, i64 tokens,
                                          i32 num_heads, i32 num_kv_heads, i32 query_blocks) {
    const Heads heads(tokens, num_heads, num_kv_heads, query_blocks);
    const int column = threadIdx.x % GROUP * N;
    const bool inside = column < HEAD_DIM;
    Channels weight((heads.query ? q_weight : k_weight) + column, inside);
    float d_weight[N] = {};  // sums for this thread's columns over all its heads
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
                if constexpr (SUMS) { d_weight[k] += product; }
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
    if constexpr (!SUMS) { return; }
    __shared__ float sums[N][THREADS];
#pragma unroll
    for (int k = 0; k < N; ++k) { sums[k][threadIdx.x] = d_weight[k]; }
    __syncthreads();
    for (int channel = threadIdx.x; channel < HEAD_DIM; channel += THREADS) {
        const int k = channel % N, lane = channel / N;
        float sum = 0.0f;
        for (int g = 0; g < GROUPS; ++g) { sum += sums[k][g * GROUP + lane]; }
        f32* partial = heads.query ? q_partial : k_partial;
        partial[(i64)heads.block * HEAD_DIM + channel] = sum;
    }
}

#endif

extern "C" __global__ void __launch_bounds__(FORWARD_THREADS, FORWARD_BLOCKS)
qk_norm_forward(T* qkv, T* __restrict__ raw, f32* __restrict__ rstd,
                const T* __restrict__ q_weight, const T* __restrict__ k_weight, f32 eps,
                i64 tokens, i32 num_heads, i32 num_kv_heads, i32 query_blocks) {
    start_next_kernel();
    wait_for_earlier_kernels();
    normalise(qkv, raw, rstd, q_weight, k_weight, eps, tokens, num_heads, num_kv_heads,
              query_blocks);
}

extern "C" __global__ void __launch_bounds__(BACKWARD_THREADS, BACKWARD_BLOCKS)
qk_norm_backward(T* d_qkv, f32* __restrict__ q_partial, f32* __restrict__ k_partial,
                 const T* __restrict__ raw, const f32* __restrict__ rstd,
                 const T* __restrict__ q_weight, const T* __restrict__ k_weight, i64 tokens,
                 i32 num_heads, i32 num_kv_heads, i32 query_blocks) {
    gradients(d_qkv, q_partial, k_partial, raw, rstd, q_weight, k_weight, tokens, num_heads,
              num_kv_heads, query_blocks);
}
