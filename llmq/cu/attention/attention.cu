// attention.cu -- causal self-attention with grouped key/value heads.
//
//   S = scale q k^T, keys that the query does not see masked
//   lse = log sum exp(S);  P = exp(S - lse)
//   out = P v;   delta = sum over Hd of d_out * out
//   dS = P * (d_out v^T - delta)
//   d_v = P^T d_out;   d_k = scale dS^T q;   d_q = scale dS k
//   sum_heads: d_k, d_v = F32 sums of d_kv over the query heads of each key/value head, ascending
//
// Data     declared in llmq/ops/attention/attention.py. T: BF16 (tensor cores, attention_mma.cuh)
//          or F32 (attention_fma.cuh). Sums and statistics are F32; BF16 P and dS are rounded
//          before they are multiplied. HEAD_DIM up to 512, in tiles with zeros up to a multiple of
//          16. Query t sees keys from max(starts[t], t - window + 1) on, with MASKED = 0 from 0
//          on. starts, which may be null, never falls along a sequence.
// Launch   forward: FORWARD_OWN queries a block, grid (tiles, Hq, B). backward: BACKWARD_OWN keys
//          or queries a block, grid tiles * B * (Hkv + Hq), keys first. Tiles and dynamic shared
//          memory come from llmq/ops/attention/attention.py. delta: 8 threads a row, grid (blocks, B).
//          sum_heads: 256 threads, one for each 16-byte vector of keys and values; d_kv: T
//          (2, Hq, seq_len, HEAD_DIM), for keys and for values.
// Cost     forward 2, backward 7 B Hq seq_len^2 HEAD_DIM FLOPs: 4 products in blocks of keys, 3 in
//          blocks of queries; 8 in all with SPLIT_KEYS = 1, where registers cannot hold dK and dV
//          at once. Every block that uses a tile reads it, mostly from L2. Tiles in which no query
//          sees a key are skipped. Unseen keys change nothing, not even if they are NaN.
// Needs    sm_80 for BF16. backward: lse of the forward, delta of attention_delta. No atomics:
//          every element is summed by one thread in a fixed order.
#include "common.cuh"

// Number of pieces of this size that cover n.
__host__ __device__ constexpr int pieces(int n, int size) { return (n + size - 1) / size; }

// The keys that each query of one sequence sees. Neither limit falls from query to query, so that
// the first and the last query of a tile bound the tile's keys.
struct Sight {
    const int* starts;  // the sequence's part of starts, or null
    int window, seq_len;

    static __device__ __forceinline__ Sight of(const int* starts, int batch, int window,
                                               int seq_len) {
        return {MASKED && starts ? starts + (i64)batch * seq_len : nullptr, window, seq_len};
    }
    // The first key that a query sees, which may lie beyond the sequence.
    __device__ __forceinline__ int first_key(int query) const {
        if (!MASKED) { return 0; }
        query = min(query, seq_len - 1);
        const int start = starts ? __ldg(starts + query) : 0;
        return max(start, query + 1 - window);
    }
    // Returns the end of the queries that see a key up to `key`, a key of the sequence. All lanes
    // of the warp search together.
    __device__ __forceinline__ int end_of_queries(int key) const {
        if (!MASKED) { return seq_len; }
        int end = window < seq_len - key ? key + window : seq_len;
        int seen = key;  // a query that sees the key: the one at its position
        if (!starts) { return end; }
        while (end - seen > 1) {
            const int piece = pieces(end - seen - 1, 32);
            const int query = seen + ((int)threadIdx.x % 32 + 1) * piece;
            const bool sees = query < end && __ldg(starts + query) <= key;
            const int count = __popc(__ballot_sync(0xFFFFFFFFu, sees));  // of the first lanes
            end = min(end, seen + (count + 1) * piece);
            seen += count * piece;
        }
        return end;
    }
};

// Results of a block of backward: dK and dV of its keys, only one of the two, or dQ of its queries.
enum class Part { KEYS, ONLY_K, ONLY_V, QUERIES };

#ifndef SOFTCAP
#define SOFTCAP 0  // none
#endif
constexpr float CAP = SOFTCAP ? SOFTCAP : 1;
// The soft-capped value of a scaled score, and the slope of the cap at a capped score.
__device__ __forceinline__ float capped(float score) { return CAP * tanhf(score * (1.0f / CAP)); }
__device__ __forceinline__ float slope_of(float capped_score) {
    const float share = capped_score * (1.0f / CAP);
    return 1.0f - share * share;
}

#include "attention/attention_fma.cuh"
#include "attention/attention_mma.cuh"

constexpr bool WHOLE_VECTORS = HEAD_DIM % 16 == 0;  // in a head; else its elements are loaded one by one
constexpr int DELTA_LANES = 8;  // threads that share a row of attention_delta
constexpr int DECODE_THREADS = 128;

// The code for each element type; a template, so that only the needed one is compiled.
template <class E> struct Attention;

template <> struct Attention<bf16> {
    template <int OWN, int STEP, int THREADS, class... Args>
    static __device__ __forceinline__ void forward(Args... args) {
        mma::forward<OWN, STEP, THREADS>(args...);
    }
    template <Part PART, int OWN, int STEP, int THREADS, class... Args>
    static __device__ __forceinline__ void backward(Args... args) {
        mma::backward<OWN, STEP, THREADS, PART>(args...);
    }
};

template <> struct Attention<float> {
    template <int OWN, int STEP, int THREADS, class... Args>
    static __device__ __forceinline__ void forward(Args... args) {
        simt::forward<OWN, STEP, THREADS>(args...);
    }
    template <Part PART, int OWN, int STEP, int THREADS, class... Args>
    static __device__ __forceinline__ void backward(Args... args) {
        simt::backward<OWN, STEP, THREADS, PART>(args...);
    }
};

extern "C" __global__ void __launch_bounds__(FORWARD_THREADS, 1)
    attention_forward(T* __restrict__ out, float* __restrict__ lse, const T* __restrict__ qkv,
                      int seq_len, int num_heads, int num_kv_heads,
                      const int* __restrict__ starts, int window, float scale) {
    extern __shared__ __align__(128) char shared[];
    const Sight sight = Sight::of(starts, blockIdx.z, window, seq_len);
    Attention<T>::forward<FORWARD_OWN, FORWARD_STEP, FORWARD_THREADS>(
        out, lse, qkv, seq_len, num_heads, num_kv_heads, sight, scale, shared);
}

extern "C" __global__ void __launch_bounds__(256)
    attention_delta(float* __restrict__ delta, const T* __restrict__ d_out,
                    const T* __restrict__ out, int seq_len, int num_heads) {
    constexpr int N = WHOLE_VECTORS ? Vec<T>::N : 1, VECTORS = HEAD_DIM / N;
    const int row = (blockIdx.x * 256 + threadIdx.x) / DELTA_LANES;  // row of (seq_len, Hq)
    const int lane = threadIdx.x % DELTA_LANES, rows = seq_len * num_heads;
    const i64 first_row = (i64)blockIdx.y * rows;  // the sequence's first row
    float sum = 0.0f;
    if (row < rows) {
#pragma unroll
        for (int n = 0; n < pieces(VECTORS, DELTA_LANES); ++n) {
            const int v = n * DELTA_LANES + lane;
            if (v < VECTORS) {
                const i64 at = (first_row + row) * HEAD_DIM + v * N;
                if constexpr (WHOLE_VECTORS) {
                    const Vec<T> a = load_vec(d_out + at), b = load_vec(out + at);
#pragma unroll
                    for (int i = 0; i < N; ++i) { sum = fmaf(to_f32(a[i]), to_f32(b[i]), sum); }
                } else {
                    sum = fmaf(to_f32(d_out[at]), to_f32(out[at]), sum);
                }
            }
        }
    }
#pragma unroll
    for (int mask = DELTA_LANES / 2; mask > 0; mask >>= 1) {
        sum += __shfl_xor_sync(0xFFFFFFFFu, sum, mask);
    }
    if (row < rows && lane == 0) {
        const int token = row / num_heads, head = row % num_heads;
        delta[first_row + head * seq_len + token] = sum;
    }
}

extern "C" __global__ void __launch_bounds__(BACKWARD_THREADS, 1)
    attention_backward_tiles(T* __restrict__ d_qkv, const T* __restrict__ d_out,
                             const float* __restrict__ lse, const float* __restrict__ delta,
                             const T* __restrict__ qkv, int seq_len, int num_heads,
                             int num_kv_heads, const int* __restrict__ starts, int window,
                             float scale) {
    extern __shared__ __align__(128) char shared[];
    // Tiles of one head are neighbours, so that they share reads in L2. In all parts the longest
    // come first.
    const int tiles = pieces(seq_len, BACKWARD_OWN), tile = blockIdx.x % tiles;
    const int strip = blockIdx.x / tiles, strips = gridDim.x / tiles;
    const int batches = strips / ((1 + SPLIT_KEYS) * num_kv_heads + num_heads);
    const int key_strips = batches * num_kv_heads, keys_end = (1 + SPLIT_KEYS) * key_strips;
#define BACKWARD(part, tile, strip, heads)                                                        \
    Attention<T>::backward<part, BACKWARD_OWN, BACKWARD_STEP, BACKWARD_THREADS>(                  \
        d_qkv, d_out, lse, delta, qkv, seq_len, num_heads, num_kv_heads, tile, (strip) % (heads), \
        (strip) / (heads), Sight::of(starts, (strip) / (heads), window, seq_len), scale, shared)
    if (strip < key_strips) {
        BACKWARD(SPLIT_KEYS ? Part::ONLY_K : Part::KEYS, tile, strip, num_kv_heads);
    } else if (SPLIT_KEYS && strip < keys_end) {
        BACKWARD(Part::ONLY_V, tile, strip - key_strips, num_kv_heads);
    } else {
        const int query_strip = strip - keys_end;
        BACKWARD(Part::QUERIES, tiles - 1 - tile, query_strip, num_heads);
    }
#undef BACKWARD
}

// Sum d_kv, a gradient of keys and values for each query head, to d_k and d_v of key/value heads.
extern "C" __global__ void __launch_bounds__(256)
attention_sum_heads(T* __restrict__ d_qkv, const T* __restrict__ d_kv, i32 seq_len, i32 num_heads,
                    i32 num_kv_heads) {
    const i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    constexpr int VECTOR = Vec<T>::N, vectors = pieces(HEAD_DIM, VECTOR);
    const int group = num_heads / num_kv_heads;
    if (i >= (i64)2 * num_kv_heads * seq_len * vectors) { return; }
    const int column = (int)(i % vectors) * VECTOR;
    const i64 row = i / vectors;  // row of (2 Hkv, seq_len)
    const int head = (int)(row / seq_len), t = (int)(row % seq_len);
    // Keys precede values in both tensors: Hkv heads of each in d_qkv, Hq = group * Hkv in d_kv.
    const i64 step = (i64)seq_len * HEAD_DIM;
    const T* const first = d_kv + (i64)head * group * step + (i64)t * HEAD_DIM + column;
    float sum[VECTOR];
    const Vec<T> start = unpack<T>(load_packed_stream(first));
#pragma unroll
    for (int k = 0; k < VECTOR; ++k) { sum[k] = to_f32(start[k]); }
#pragma unroll 4
    for (int h = 1; h < group; ++h) {
        const Vec<T> next = unpack<T>(load_packed_stream(first + h * step));
#pragma unroll
        for (int k = 0; k < VECTOR; ++k) { sum[k] += to_f32(next[k]); }
    }
    Vec<T> out;
#pragma unroll
    for (int k = 0; k < VECTOR; ++k) { out[k] = from_f32<T>(sum[k]); }
    const int heads = num_heads + 2 * num_kv_heads;
    store_vec(d_qkv + ((i64)t * heads + num_heads + head) * HEAD_DIM + column, out);
}
