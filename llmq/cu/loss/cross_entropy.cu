// cross_entropy.cu -- loss and log-sum-exp of rows of logits, the gradient in place, statistics.
//
//   lse = log sum_v exp(x[v])         loss = lse - x[target]
//   d_x[v] = weight * (exp(x[v] - lse) * (1 + z_loss * lse) - (v == target))
//   codes[v] = fp8(d_x[v] * code_factor)        instead of d_x in place, with CODES = 1
//   SOFTCAP = bits of an F32 cap: cap * tanh(x / cap) takes the place of x, d_x is times its slope
//
// Data     declared in llmq/ops/loss/cross_entropy.py. Columns >= vocab are ignored on entry and 0
//          on return. Negative targets are masked: loss and gradient 0. With CODES = 1 logits stay
//          unchanged. weights: read with WEIGHTED = 1; else all weights are 1.
// Launch   forward_backward_registers: THREADS threads, ceil(rows / ROWS) * CLUSTER blocks; the
//          CLUSTER blocks of a cluster share a row, each thread holds VECTORS 16-byte vectors of
//          the row, and the cluster works on ROWS rows one after the other. forward,
//          forward_backward: 512 threads, a block per row. stats: 1024 threads, one block.
// Cost     registers: logits read once and written once (codes: half as many bytes). All loads of a
//          row are in flight together; the loads of the cluster's next row go to the registers that
//          the written gradient frees. About 12 instructions and 2 exponentials per element.
//          forward_backward reads a row twice, the second time backwards, because the caches still
//          hold the row's end. stats: about 16 us for 32k rows.
// Needs    target < vocab. forward_backward_registers: no SOFTCAP, for lack of registers; CLUSTER *
//          THREADS * VECTORS vectors hold a row; CLUSTER > 1 only from compute capability 9.0 on.
#include "common.cuh"
#include "ptx.cuh"
#include "loss/row_weights.cuh"

constexpr int ROW_THREADS = 512, UNROLL = 4;
constexpr int N = Vec<T>::N;
// The maximum of no elements: below any logit, and finite, so that the difference of two maxima is
// not NaN.
constexpr float LOWEST = -1e30f;

#ifndef SOFTCAP
#define SOFTCAP 0
#endif

// A logit after the soft cap; -infinity, in padding, stays -infinity.
__device__ __forceinline__ float capped(float x) {
    if constexpr (SOFTCAP != 0) {
        const float cap = __uint_as_float(SOFTCAP);
        return x < LOWEST ? x : cap * tanhf(x / cap);
    }
    return x;
}

// The derivative of `capped`, given its result.
__device__ __forceinline__ float slope_of(float y) {
    if constexpr (SOFTCAP != 0) {
        const float part = y / __uint_as_float(SOFTCAP);
        return y < LOWEST ? 0.0f : 1.0f - part * part;
    }
    return 1.0f;
}

// sum = sum of exp(x - max) over the elements seen so far.
struct Softmax {
    float max = LOWEST, sum = 0.0f;

    __device__ __forceinline__ void add(float other_max, float other_sum) {
        const float both = fmaxf(max, other_max);
        sum = sum * exp2_approx((max - both) * LOG2E) +
              other_sum * exp2_approx((other_max - both) * LOG2E);
        max = both;
    }
    // Combines the lanes of a warp; all lanes get the result.
    __device__ __forceinline__ void reduce_warp() {
        const float all = warp_max(max);
        sum = warp_sum(sum * exp2_approx((max - all) * LOG2E));
        max = all;
    }
    __device__ __forceinline__ float lse() const { return max + logf(sum); }
};

__device__ __forceinline__ float exp_below(float x, float max) {
    return exp2_approx((x - max) * LOG2E);
}

// A vector of elements whose exponential is 0.
__device__ __forceinline__ uint4 nothing() {
    const u32 bits = sizeof(T) == 2 ? 0xFF80FF80u : 0xFF800000u;  // -infinity
    return make_uint4(bits, bits, bits, bits);
}

// Vector i of a row, columns >= vocab replaced by -infinity.
__device__ __forceinline__ uint4 masked(uint4 x, int i, int vocab) {
    if ((i + 1) * N <= vocab) { return x; }
    constexpr int PER_WORD = 4 / sizeof(T);
    const int valid = vocab - i * N;  // elements of the vector that are below vocab
    const uint4 none = nothing();
    u32 words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int w = 0; w < 4; ++w) {
        if (w * PER_WORD >= valid) {
            words[w] = none.x;
        } else if (w * PER_WORD + 1 == valid && PER_WORD == 2) {
            words[w] = (words[w] & 0xFFFFu) | (none.x & 0xFFFF0000u);
        }
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
}

// The larger element at each place of two words; a word holds two BF16 or one F32.
__device__ __forceinline__ u32 max_of_words(u32 a, u32 b) {
    if constexpr (sizeof(T) == 4) {
        return __float_as_uint(fmaxf(__uint_as_float(a), __uint_as_float(b)));
    }
    const __nv_bfloat162 larger = __hmax2(*reinterpret_cast<const __nv_bfloat162*>(&a),
                                          *reinterpret_cast<const __nv_bfloat162*>(&b));
    return *reinterpret_cast<const u32*>(&larger);
}

// Results of a row's first pass that the second pass needs.
struct RowResult {
    float max, factor;  // d_x = exp(x - max) * factor - onehot * weight
    float lse;
    int target;
    float weight, slope;  // slope: the soft cap's derivative at the target's logit
};

__device__ __forceinline__ RowResult finish(const Softmax& row, int target, float z_loss,
                                            float weight, float slope = 1.0f) {
    const float lse = row.lse();
    return {row.max, weight * (1.0f + z_loss * lse) / row.sum, lse, target, weight, slope};
}

// Storage of a gradient: vectors of the logits' dtype, or eight codes.
#ifndef CODES  // compiled for another entry
#define CODES 0
#endif
#if CODES
using Logits = const T;
using Stored = uint2;
__device__ __forceinline__ Stored stored(const float (&d)[N], float factor) {
    static_assert(N == 8, "codes are made of BF16 logits");
    return make_uint2(to_fp8<Q>(d[0] * factor, d[1] * factor, d[2] * factor, d[3] * factor),
                      to_fp8<Q>(d[4] * factor, d[5] * factor, d[6] * factor, d[7] * factor));
}
__device__ __forceinline__ Stored* first_stored(Logits* logits, Q* codes, i64 offset) {
    return reinterpret_cast<Stored*>(codes + offset);
}
#else
using Logits = T;
using Stored = uint4;
__device__ __forceinline__ Stored stored(const float (&d)[N], float factor) {
    Vec<T> result;
#pragma unroll
    for (int k = 0; k < N; ++k) { result[k] = from_f32<T>(d[k]); }
    return pack(result);
}
__device__ __forceinline__ Stored* first_stored(Logits* logits, Q* codes, i64 offset) {
    return reinterpret_cast<Stored*>(logits + offset);
}
#endif

// Gradient of vector i.
__device__ __forceinline__ Stored gradient(uint4 packed, int i, const RowResult& row,
                                           float code_factor) {
    if (row.target < 0) { return Stored{}; }
    const Vec<T> x = unpack<T>(packed);
    float d[N];
#pragma unroll
    for (int k = 0; k < N; ++k) {
        const float y = capped(to_f32(x[k]));
        d[k] = exp_below(y, row.max) * row.factor * slope_of(y);
    }
    if (row.target / N == i) {
#pragma unroll
        for (int k = 0; k < N; ++k) {
            d[k] -= k == row.target % N ? row.weight * row.slope : 0.0f;
        }
    }
    return stored(d, code_factor);
}

#ifndef VECTORS  // compiled for another entry
#define THREADS 256
#define VECTORS 1
#define CLUSTER 1
#define ROWS 1
#endif
#if __CUDA_ARCH__ < 900  // older GPUs have no clusters: CLUSTER is 1
#undef __cluster_dims__
#define __cluster_dims__(...)
#endif

// Blocks whose registers fit into a multiprocessor: a thread needs 52 beside its part of the row.
constexpr int RESIDENT_BLOCKS = 65536 / (THREADS * (4 * VECTORS + 52));

// Vector i of a row; -infinity past the end of the row.
__device__ __forceinline__ uint4 load_or_nothing(const uint4* row, int i, int vectors) {
    return i < vectors ? __ldcs(row + i) : nothing();
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1)
__launch_bounds__(THREADS, RESIDENT_BLOCKS)
cross_entropy_forward_backward_registers(Logits* __restrict__ logits, f32* __restrict__ losses,
                                         f32* __restrict__ lse, const i32* __restrict__ targets,
                                         Q* __restrict__ codes, i64 rows, i32 vocab,
                                         i32 padded_vocab, f32 z_loss, f32 code_factor WEIGHTS_ARG) {
    constexpr int WARPS = THREADS / 32, STEP = CLUSTER * THREADS;
    // Alternate rows use alternate buffers, so that one barrier per row is enough.
    __shared__ float2 partial[2][WARPS];
    const u32 rank = CLUSTER > 1 ? cluster_rank() : 0;
    const int vectors = padded_vocab / N;
    int first = rank * THREADS + threadIdx.x;
    const i64 first_row = (i64)(blockIdx.x / CLUSTER) * ROWS;
    const i64 last_row = min(rows, first_row + ROWS) - 1;
    const uint4* row = reinterpret_cast<const uint4*>(logits + first_row * padded_vocab);
    Stored* out = first_stored(logits, codes, first_row * padded_vocab);

    uint4 x[VECTORS];
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) { x[v] = load_or_nothing(row, first + v * STEP, vectors); }
#pragma unroll 1
    for (i64 r = first_row; r <= last_row; ++r) {
        forget(first);  // else first + v * STEP would stay in registers from row to row
        const int target = targets[r];
        // The target's logit is read here: no block overwrites it before the barrier below.
        const bool writes = rank == 0 && threadIdx.x == 0;
        const float logit =
            writes && target >= 0 ? to_f32(logits[r * padded_vocab + target]) : 0.0f;
        uint4 max = nothing();
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
            x[v] = masked(x[v], first + v * STEP, vocab);
            max = make_uint4(max_of_words(max.x, x[v].x), max_of_words(max.y, x[v].y),
                             max_of_words(max.z, x[v].z), max_of_words(max.w, x[v].w));
            forget(x[v]);
        }
        Softmax own;
#pragma unroll
        for (int k = 0; k < N; ++k) { own.max = fmaxf(own.max, to_f32(unpack<T>(max)[k])); }
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
            const Vec<T> elements = unpack<T>(x[v]);
#pragma unroll
            for (int k = 0; k < N; ++k) { own.sum += exp_below(to_f32(elements[k]), own.max); }
            forget(x[v]);
        }
        own.reduce_warp();
        float2* const sums = partial[r & 1];
        if (threadIdx.x % 32 == 0) { sums[threadIdx.x / 32] = make_float2(own.max, own.sum); }
        if constexpr (CLUSTER > 1) {
            cluster_arrive();
            cluster_wait();
        } else {
            __syncthreads();
        }
        // Every warp of every block combines the warps of the whole cluster, in the same order.
        Softmax all;
        for (int w = threadIdx.x % 32; w < CLUSTER * WARPS; w += 32) {
            const float2 other = CLUSTER > 1 ? load_cluster(&sums[w % WARPS], w / WARPS) : sums[w];
            all.add(other.x, other.y);
        }
        all.reduce_warp();
        const RowResult result = finish(all, target, z_loss, WEIGHT_OF(r));
        if (writes) {
            lse[r] = result.lse;
            losses[r] = target < 0 ? 0.0f : result.lse - logit;
        }
        // The next row's loads into the registers of this row run while this row is written.
        const uint4* const next = row + vectors;
        int to_load = r < last_row ? vectors : 0;
        forget(first);
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
            const int i = first + v * STEP;
            Stored d = gradient(x[v], i, result, code_factor);
            forget(d);
            forget(to_load);
            if (i < to_load) { x[v] = __ldcs(next + i); }
            if (i < vectors) { __stcs(out + i, d); }
        }
        row = next;
        out += vectors;
    }
    // A block's shared memory must stay until the cluster's other blocks have read it.
    if constexpr (CLUSTER > 1) {
        cluster_arrive();
        cluster_wait();
    }
}

// Max and sum of one row by a block of ROW_THREADS; every thread gets both.
__device__ __forceinline__ Softmax read_row(const uint4* row, int vocab) {
    __shared__ float2 partial[ROW_THREADS / 32];
    const int vectors = (vocab + N - 1) / N;
    Softmax own;
    for (int start = threadIdx.x; start < vectors; start += ROW_THREADS * UNROLL) {
        uint4 x[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            const int i = start + u * ROW_THREADS;
            x[u] = i < vectors ? row[i] : nothing();
        }
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            const Vec<T> elements = unpack<T>(masked(x[u], start + u * ROW_THREADS, vocab));
            float max = own.max, sum = 0.0f;
#pragma unroll
            for (int k = 0; k < N; ++k) { max = fmaxf(max, capped(to_f32(elements[k]))); }
#pragma unroll
            for (int k = 0; k < N; ++k) { sum += exp_below(capped(to_f32(elements[k])), max); }
            own.sum = own.sum * exp_below(own.max, max) + sum;
            own.max = max;
        }
    }
    own.reduce_warp();
    if (threadIdx.x % 32 == 0) { partial[threadIdx.x / 32] = make_float2(own.max, own.sum); }
    __syncthreads();
    Softmax all;
    if (threadIdx.x % 32 < ROW_THREADS / 32) {
        const float2 other = partial[threadIdx.x % 32];
        all.add(other.x, other.y);
    }
    all.reduce_warp();
    return all;
}

extern "C" __global__ void __launch_bounds__(ROW_THREADS)
cross_entropy_forward_backward(Logits* logits, f32* __restrict__ losses, f32* __restrict__ lse,
                               const i32* __restrict__ targets, Q* codes, i64 rows, i32 vocab,
                               i32 padded_vocab, f32 z_loss, f32 code_factor WEIGHTS_ARG) {
    const i64 r = blockIdx.x;
    const uint4* const row = reinterpret_cast<const uint4*>(logits + r * padded_vocab);
    Stored* const out = first_stored(logits, codes, r * padded_vocab);
    const int target = targets[r];
    // The target's logit is read here: no thread overwrites it before read_row's barrier.
    const float logit = target < 0 ? 0.0f : capped(to_f32(logits[r * padded_vocab + target]));
    const RowResult result =
        finish(read_row(row, vocab), target, z_loss, WEIGHT_OF(r), slope_of(logit));
    if (threadIdx.x == 0) {
        lse[r] = result.lse;
        losses[r] = target < 0 ? 0.0f : result.lse - logit;
    }
    const int vectors = padded_vocab / N, turns = (vectors - 1) / (ROW_THREADS * UNROLL);
    for (int turn = turns; turn >= 0; --turn) {
        uint4 x[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            const int i = (turn * UNROLL + u) * ROW_THREADS + threadIdx.x;
            if (i < vectors) { x[u] = __ldcs(row + i); }
        }
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            const int i = (turn * UNROLL + u) * ROW_THREADS + threadIdx.x;
            if (i < vectors) {
                __stcs(out + i, gradient(masked(x[u], i, vocab), i, result, code_factor));
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(ROW_THREADS)
cross_entropy_forward(f32* __restrict__ losses, f32* __restrict__ lse, const T* __restrict__ logits,
                      const i32* __restrict__ targets, i64 rows, i32 vocab, i32 padded_vocab) {
    const i64 r = blockIdx.x;
    const T* const row = logits + r * padded_vocab;
    const int target = targets[r];
    const float log_sum = read_row(reinterpret_cast<const uint4*>(row), vocab).lse();
    if (threadIdx.x == 0) {
        lse[r] = log_sum;
        losses[r] = target < 0 ? 0.0f : log_sum - capped(to_f32(row[target]));
    }
}

extern "C" __global__ void __launch_bounds__(1024)
cross_entropy_stats(f64* __restrict__ stats, const f32* __restrict__ losses,
                    const f32* __restrict__ lse, const i32* __restrict__ targets, i64 n,
                    i32 seq_len, i32 by_weight WEIGHTS_ARG) {
    constexpr int LOSS = 0, COUNT = 1, LOSS_1K = 6, TOKENS_1K = 7, LSE_SUM = 8, LSE_MAX = 9;
    constexpr int TOKENS = 10;
    __shared__ f64 shared[32];
    __shared__ float shared_max[32];
    f64 loss = 0.0, count = 0.0, tokens = 0.0, loss_1k = 0.0, tokens_1k = 0.0, lse_sum = 0.0;
    float lse_max = -INFINITY;
#pragma unroll 4
    for (i64 i = threadIdx.x; i < n; i += 1024) {
        const float row_loss = losses[i] * WEIGHT_OF(i), row_lse = lse[i];
        if (targets[i] < 0) { continue; }
        const bool early = (u32)i % (u32)seq_len < 1024;
        const float each = by_weight ? WEIGHT_OF(i) : 1.0f;
        loss += row_loss;
        count += each;
        tokens += 1.0;
        loss_1k += early ? row_loss : 0.0f;
        tokens_1k += early ? each : 0.0f;
        lse_sum += row_lse;
        lse_max = fmaxf(lse_max, row_lse);
    }
    const auto add = [&](int entry, f64 x) {
        x = block_sum(x, shared);
        if (threadIdx.x == 0) { stats[entry] += x; }
    };
    add(LOSS, loss);
    add(COUNT, count);
    if (by_weight) { add(TOKENS, tokens); }
    add(LOSS_1K, loss_1k);
    add(TOKENS_1K, tokens_1k);
    add(LSE_SUM, lse_sum);
    lse_max = block_max(lse_max, shared_max);
    if (threadIdx.x == 0) { stats[LSE_MAX] = fmax(stats[LSE_MAX], (f64)lse_max); }
}
