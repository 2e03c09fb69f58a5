// rope.cu -- rotary position embedding of every query and key head of the packed QKV activation.
//
//   forward    (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin)   for the pairs (d, d + Hd/2)
//   backward   the same with -sin
//
// Data     qkv, d_qkv: T (tokens, Hq + 2 Hkv, HEAD_DIM), value heads last and not changed; table:
//          F32 (positions, HEAD_DIM / 2, 2), cos and sin. 16-byte aligned, HEAD_DIM % 16 == 0.
//          Token i has position first_position + i % seq_length.
//          abs_max: F32 (1), with ABS_MAX = 1 raised to the largest |d_qkv|, as stored, value heads
//          included; else not touched, may be null.
// Launch   128 threads, one thread for 16 bytes of both halves of HEADS_PER_THREAD heads.
// Cost     query and key heads read once and written once, value heads read once for abs_max;
//          angles once per HEADS_PER_THREAD heads, from L2. Memory-bound.
// Needs    threads < 2^31. first_position + seq_length rows in the table.
// Same name  llmq/ops/rope.py  llmq/ref/rope.py  tests/ops/test_rope.py
#include "common.cuh"

constexpr int N = Vec<T>::N;
constexpr int HALF = HEAD_DIM / 2;
constexpr int HALF_VECTORS = HALF / N;

// Rotates this thread's heads. VALUES: it may have value heads too, and only reads those.
// Returns the largest abs_bits of its heads after that.
template <bool BACKWARD, bool VALUES>
__device__ __forceinline__ u32 rotate(T* qkv, const f32* __restrict__ table, i64 tokens,
                                      i32 seq_length, i32 num_heads, i32 num_kv_heads,
                                      i32 first_position) {
    const u32 heads = num_heads + num_kv_heads, all = heads + num_kv_heads;
    const u32 loaded = VALUES ? all : heads;
    const u32 chunks = (loaded + HEADS_PER_THREAD - 1) / HEADS_PER_THREAD;
    const u32 thread = blockIdx.x * blockDim.x + threadIdx.x;
    const u32 column = thread % HALF_VECTORS * N;
    const u32 chunk = thread / HALF_VECTORS % chunks, token = thread / HALF_VECTORS / chunks;
    if (token >= tokens) { return 0; }

    // The heads chunk, chunk + chunks, ...: neighbouring threads work on neighbouring heads.
    T* const first = qkv + (i64)token * all * HEAD_DIM + column;
    Vec<T> x1[HEADS_PER_THREAD], x2[HEADS_PER_THREAD];
#pragma unroll
    for (int j = 0; j < HEADS_PER_THREAD; ++j) {
        const u32 head = chunk + j * chunks;
        if (head < loaded) {
            x1[j] = load_vec(first + head * HEAD_DIM);
            x2[j] = load_vec(first + head * HEAD_DIM + HALF);
        }
    }
    const i64 position = first_position + token % seq_length;
    const f32* angles = table + (position * HALF + column) * 2;
    float cos[N], sin[N];
#pragma unroll
    for (int k = 0; k < N; k += 2) {
        const Vec<f32> pair = load_vec(angles + 2 * k);
        cos[k] = pair[0];
        sin[k] = BACKWARD ? -pair[1] : pair[1];
        cos[k + 1] = pair[2];
        sin[k + 1] = BACKWARD ? -pair[3] : pair[3];
    }
    u32 largest = 0;
#pragma unroll
    for (int j = 0; j < HEADS_PER_THREAD; ++j) {
        const u32 head = chunk + j * chunks;
        if (head < heads) {
#pragma unroll
            for (int k = 0; k < N; ++k) {
                const float a = to_f32(x1[j][k]), b = to_f32(x2[j][k]);
                x1[j][k] = from_f32<T>(a * cos[k] - b * sin[k]);
                x2[j][k] = from_f32<T>(b * cos[k] + a * sin[k]);
            }
            store_vec(first + head * HEAD_DIM, x1[j]);
            store_vec(first + head * HEAD_DIM + HALF, x2[j]);
        }
        if (head < loaded) { largest = max(largest, max(abs_max_bits(x1[j]), abs_max_bits(x2[j]))); }
    }
    return largest;
}

extern "C" __global__ void __launch_bounds__(128)
rope_forward(T* qkv, const f32* __restrict__ table, i64 tokens, i32 seq_length, i32 num_heads,
             i32 num_kv_heads, i32 first_position) {
    rotate<false, false>(qkv, table, tokens, seq_length, num_heads, num_kv_heads, first_position);
}

extern "C" __global__ void __launch_bounds__(128)
rope_backward(T* d_qkv, const f32* __restrict__ table, i64 tokens, i32 seq_length, i32 num_heads,
              i32 num_kv_heads, f32* abs_max) {
    const u32 largest =
        rotate<true, ABS_MAX>(d_qkv, table, tokens, seq_length, num_heads, num_kv_heads, 0);
    finish_abs_max<ABS_MAX>(abs_max, largest);
}
