// attention_gate.cu -- gates of attention's output: channels that lie beside each query head.
//
//   split      copies heads q0 g0 q1 g1 ... k ... v ... to packed heads q ... k ... v ... and gates
//   merge      copies packed heads and gates back to the former order
//   forward    out = x * sigmoid(gate)
//   backward   d_x = d_out * s;   d_gate = d_out * s * x * (1 - s)         s = sigmoid(gate)
//
// Data     declared in llmq/ops/attention/attention_gate.py.
// Launch   256 threads, a 16-byte vector each.
// Cost     each tensor is read or written once. Memory-bound.
// Needs    HEAD_DIM a multiple of 8. backward: d_x may be d_out; a thread reads what it overwrites.
#include "common.cuh"

constexpr int N = Vec<T>::N, VECTORS = HEAD_DIM / N;

// Calls use(i, j, k) for the thread's vector, with its offsets in the product, in qkv or -1, and in
// gate or -1.
template <class Use>
__device__ __forceinline__ void each_vector(i64 rows, i32 heads, i32 kv_heads, Use use) {
    const i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    const i32 all = 2 * (heads + kv_heads), packed = all - heads;
    if (i >= rows * all * VECTORS) { return; }
    const i64 row = i / (all * VECTORS);
    const i32 head = i / VECTORS % all, column = i % VECTORS * N;
    const bool first = head < 2 * heads;
    if (first && head % 2) {
        use(i * N, (i64)-1, (row * heads + head / 2) * HEAD_DIM + column);
    } else {
        const i32 to = first ? head / 2 : head - heads;
        use(i * N, (row * packed + to) * HEAD_DIM + column, (i64)-1);
    }
}

extern "C" __global__ void __launch_bounds__(256)
    attention_gate_split(T* __restrict__ qkv, T* __restrict__ gate, const T* __restrict__ product,
                         i64 rows, i32 heads, i32 kv_heads) {
    each_vector(rows, heads, kv_heads, [&](i64 from, i64 in_qkv, i64 in_gate) {
        store_vec(in_gate < 0 ? qkv + in_qkv : gate + in_gate, load_vec(product + from));
    });
}

extern "C" __global__ void __launch_bounds__(256)
    attention_gate_merge(T* __restrict__ product, const T* __restrict__ qkv,
                         const T* __restrict__ gate, i64 rows, i32 heads, i32 kv_heads) {
    each_vector(rows, heads, kv_heads, [&](i64 to, i64 in_qkv, i64 in_gate) {
        store_vec(product + to, load_vec(in_gate < 0 ? qkv + in_qkv : gate + in_gate));
    });
}

extern "C" __global__ void __launch_bounds__(256)
    attention_gate_forward(T* __restrict__ out, const T* __restrict__ x,
                           const T* __restrict__ gate, i64 n) {
    const i64 i = ((i64)blockIdx.x * blockDim.x + threadIdx.x) * N;
    if (i >= n) { return; }
    Vec<T> a = load_vec(x + i);
    const Vec<T> g = load_vec(gate + i);
#pragma unroll
    for (int k = 0; k < N; ++k) { a[k] = from_f32<T>(to_f32(a[k]) * sigmoid(to_f32(g[k]))); }
    store_vec(out + i, a);
}

extern "C" __global__ void __launch_bounds__(256)
    attention_gate_backward(T* d_x, T* __restrict__ d_gate, const T* d_out,
                            const T* __restrict__ x, const T* __restrict__ gate, i64 n) {
    const i64 i = ((i64)blockIdx.x * blockDim.x + threadIdx.x) * N;
    if (i >= n) { return; }
    Vec<T> d = load_vec(d_out + i), a = load_vec(x + i);
    const Vec<T> g = load_vec(gate + i);
#pragma unroll
    for (int k = 0; k < N; ++k) {
        const float share = sigmoid(to_f32(g[k])), of_x = to_f32(d[k]) * share;
        d[k] = from_f32<T>(of_x);
        a[k] = from_f32<T>(of_x * to_f32(a[k]) * (1.0f - share));
    }
    store_vec(d_x + i, d);
    store_vec(d_gate + i, a);
}

// -- sinks: scores by which query heads attend to nothing, applied after any attention
//
//   forward    out *= sigmoid(without - sink);   lse = log(exp(without) + exp(sink))
//   backward   partial[s, h] = - sum of exp(sink - lse) * (d_out . out) over the rows of split s
//
// column_sum (reduce.cu) adds the partial sums up.
//
// Data     out, d_out: T (batch, seq_len, heads, HEAD_DIM), 16-byte aligned. lse, without: F32 (batch,
//          heads, seq_len). sinks: T (heads). partial: F32 (splits, heads).
// Launch   256 threads. forward: a 16-byte vector each. backward: (tiles, splits) blocks; a tile
//          has as many whole heads as 256 vectors of 16 bytes hold; a thread has a vector of each
//          row.
// Cost     forward: out read and written once. backward: d_out and out read once. Memory-bound.
// Needs    HEAD_DIM a multiple of 16 bytes, of at most 256 vectors. No split without rows.

constexpr int THREADS = 256, HEADS = THREADS / VECTORS;  // HEADS: heads of a tile

extern "C" __global__ void __launch_bounds__(THREADS)
attention_sinks_forward(T* __restrict__ out, f32* __restrict__ lse, const f32* __restrict__ without,
                        const T* __restrict__ sinks, i32 batch, i32 seq_len, i32 heads) {
    const i64 i = (i64)blockIdx.x * THREADS + threadIdx.x, row = i / VECTORS / heads;
    if (row >= (i64)batch * seq_len) { return; }
    const int head = (int)(i / VECTORS % heads);
    const i64 at = (row / seq_len * heads + head) * seq_len + row % seq_len;
    const float above = without[at] - to_f32(sinks[head]);
    if (i % VECTORS == 0) {
        // log(exp(a) + exp(b)) = the larger one + log(1 + exp(-|a - b|))
        lse[at] = (above < 0.0f ? to_f32(sinks[head]) : without[at]) + log1pf(expf(-fabsf(above)));
    }
    const float share = sigmoid(above);
    Vec<T> x = load_vec(out + i * N);
#pragma unroll
    for (int k = 0; k < N; ++k) { x[k] = from_f32<T>(to_f32(x[k]) * share); }
    store_vec(out + i * N, x);
}

extern "C" __global__ void __launch_bounds__(THREADS)
attention_sinks_backward(f32* __restrict__ partial, const T* __restrict__ d_out,
                         const T* __restrict__ out, const f32* __restrict__ lse,
                         const T* __restrict__ sinks, i32 batch, i32 seq_len, i32 heads, i32 splits) {
    __shared__ float sums[THREADS];
    const int of_tile = threadIdx.x / VECTORS, head = blockIdx.x * HEADS + of_tile;
    const i64 rows = (i64)batch * seq_len, step = (rows + splits - 1) / splits;
    const i64 end = min(rows, (blockIdx.y + 1) * step);
    float sum = 0.0f;
    if (of_tile < HEADS && head < heads) {
        const float sink = to_f32(sinks[head]);
#pragma unroll 4
        for (i64 row = blockIdx.y * step; row < end; ++row) {
            const i64 from = (row * heads + head) * HEAD_DIM + threadIdx.x % VECTORS * N;
            const float of_row = lse[(row / seq_len * heads + head) * seq_len + row % seq_len];
            const Vec<T> d = load_vec(d_out + from), x = load_vec(out + from);
            float dot = 0.0f;
#pragma unroll
            for (int k = 0; k < N; ++k) { dot = fmaf(to_f32(d[k]), to_f32(x[k]), dot); }
            sum -= expf(sink - of_row) * dot;
        }
    }
    sums[threadIdx.x] = sum;
    __syncthreads();
    if (of_tile < HEADS && head < heads && threadIdx.x % VECTORS == 0) {
        float total = 0.0f;
#pragma unroll
        for (int k = 0; k < VECTORS; ++k) { total += sums[threadIdx.x + k]; }
        partial[(i64)blockIdx.y * heads + head] = total;
    }
}
