// short_conv.cu -- causal convolution of every channel with its few weights, and SiLU, inside of
// documents.
//
//   forward    z[t] = sum over j < TAPS of weight[j] * x[t - TAPS + 1 + j];  out = z * sigmoid(z)
//   backward   d_z = d_out * silu'(z);  d_x[t] = sum over j of weight[TAPS - 1 - j] * d_z[t + j]
//              d_weight[j] = sum over t of d_z[t] * x[t - TAPS + 1 + j]
//   keep       the last TAPS - 1 tokens, for what follows a text
//
// Data     x, d_x: T (B, seq_len, columns), of which the first `channels` are read, or written.
//          out, d_out: T (B, seq_len, channels). weight: T (channels, TAPS). before: F32 (B, TAPS - 1,
//          channels), the tokens in front of the text, or null: 0. starts: I32 (B, seq_len), the first
//          position of each one's document, or null: 0. partial: F32 (B * spans, channels, TAPS),
//          sums over 64 tokens, or null.
// Launch   128 threads, two neighbouring channels each; grid (channels / 256, spans of 64 tokens, B),
//          both rounded up; keep: a channel each, (channels / 128, 1, B). A thread reads eight tokens
//          before it computes with them.
// Cost     x read once, and TAPS - 1 tokens more of each span; out written once. Memory-bound.
// Needs    TAPS at least 2. channels and columns even.
// Same name  llmq/ops/short_conv.py  llmq/ref/short_conv.py  tests/ops/test_short_conv.py
#include "activation.cuh"

constexpr int SPAN = 64, THREADS = 128, BATCH = 8, BEFORE = TAPS - 1;

__device__ __forceinline__ float2 add_product(float2 a, float2 b, float2 sum) {
    return make_float2(fmaf(a.x, b.x, sum.x), fmaf(a.y, b.y, sum.y));
}
__device__ __forceinline__ float part_of(float z) { return share<Silu, sizeof(T) == 4>(z); }

// Two channels of a sequence, whose tokens a thread meets in order.
struct Channels {
    const T* x;
    const f32* before;
    const i32* starts;
    i32 channels, columns, seq_len;
    float2 weight[TAPS], met[TAPS];  // the newest token last

    __device__ __forceinline__ Channels(const T* x, const T* weights, const f32* before,
                                        const i32* starts, i32 channel, i32 seq_len, i32 channels,
                                        i32 columns, i32 first)
        : x(x + (i64)blockIdx.z * seq_len * columns + channel),
          before(before ? before + (i64)blockIdx.z * BEFORE * channels + channel : nullptr),
          starts(starts ? starts + (i64)blockIdx.z * seq_len : nullptr), channels(channels),
          columns(columns), seq_len(seq_len) {
        const T* const own = weights + (i64)channel * TAPS;
#pragma unroll
        for (int j = 0; j < TAPS; ++j) {
            weight[j] = make_float2(to_f32(own[j]), to_f32(own[TAPS + j]));
        }
#pragma unroll
        for (int j = 1; j < TAPS; ++j) { met[j] = at(first - TAPS + j); }
    }
    __device__ __forceinline__ float2 at(i32 t) const {
        if (t >= 0) { return load_two(x + (i64)t * columns); }
        return before ? load_two(before + (i64)(BEFORE + t) * channels) : make_float2(0.0f, 0.0f);
    }
    __device__ __forceinline__ i32 start(i32 t) const { return starts ? __ldg(starts + t) : -TAPS; }
    // Whether all tokens from `first` to `last` see all that `BEFORE` tokens in front of them do.
    __device__ __forceinline__ bool inside(i32 first, i32 last) const {
        return start(min(last, seq_len - 1)) <= first - BEFORE;
    }
    // Whether token t sees the one that tap j is for. ALL: it is known to.
    template <bool ALL> __device__ __forceinline__ bool sees(i32 t, int j) const {
        return ALL || t - BEFORE + j >= start(t);
    }
    // Meets token t; gives z.
    template <bool ALL> __device__ __forceinline__ float2 meet(i32 t, float2 next) {
#pragma unroll
        for (int j = 1; j < TAPS; ++j) { met[j - 1] = met[j]; }
        met[BEFORE] = next;
        float2 z = make_float2(0.0f, 0.0f);
#pragma unroll
        for (int j = 0; j < TAPS; ++j) {
            if (sees<ALL>(t, j)) { z = add_product(weight[j], met[j], z); }
        }
        return z;
    }
};

// Calls use(all, t, values of token t) for tokens [first, stop), which read(t) gives, at once for
// several. all: true where inside() says so, and always a literal.
template <class Read, class Use>
__device__ __forceinline__ void in_batches(const Channels& of, i32 first, i32 stop, Read read,
                                           Use use) {
    i32 t = first;
    for (; t + BATCH <= stop; t += BATCH) {
        decltype(read(t)) values[BATCH];
#pragma unroll
        for (int n = 0; n < BATCH; ++n) { values[n] = read(t + n); }
        if (of.inside(t, t + BATCH - 1)) {
#pragma unroll
            for (int n = 0; n < BATCH; ++n) { use(true, t + n, values[n]); }
        } else {
#pragma unroll 1
            for (int n = 0; n < BATCH; ++n) { use(false, t + n, read(t + n)); }
        }
    }
    for (; t < stop; ++t) { use(false, t, read(t)); }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    short_conv_forward(T* __restrict__ out, const T* __restrict__ x, const T* __restrict__ weight,
                       const f32* __restrict__ before, const i32* __restrict__ starts, i32 seq_len,
                       i32 channels, i32 columns) {
    const i32 channel = 2 * (blockIdx.x * THREADS + threadIdx.x), first = blockIdx.y * SPAN;
    if (channel >= channels) { return; }
    Channels of(x, weight, before, starts, channel, seq_len, channels, columns, first);
    T* to = out + (i64)blockIdx.z * seq_len * channels + channel;
    in_batches(
        of, first, min(first + SPAN, seq_len), [&](i32 t) { return of.at(t); },
        [&](bool all, i32 t, float2 next) {
            const float2 z = all ? of.meet<true>(t, next) : of.meet<false>(t, next);
            store_two(to + (i64)t * channels, z.x * part_of(z.x), z.y * part_of(z.y));
        });
}

extern "C" __global__ void __launch_bounds__(THREADS)
    short_conv_keep(f32* before, const T* __restrict__ x, i32 seq_len, i32 channels, i32 columns) {
    const i32 channel = blockIdx.x * THREADS + threadIdx.x;
    if (channel >= channels) { return; }
    f32* kept = before + (i64)blockIdx.z * (TAPS - 1) * channels + channel;
    const T* of = x + (i64)blockIdx.z * seq_len * columns + channel;
    for (int j = 0; j < TAPS - 1; ++j) {  // what it overwrites, it has read
        const i32 t = seq_len - (TAPS - 1) + j;
        kept[(i64)j * channels] =
            t >= 0 ? to_f32(of[(i64)t * columns]) : kept[(i64)(j + seq_len) * channels];
    }
}

// What a token is read for in the backward: x, d_out.
struct Both {
    float2 x, d_out;
};

// Sums of a span's tokens, and the gradients of the newest z, the last one's last.
struct Gradients {
    float2 d_z[TAPS], d_weight[TAPS];

    template <bool ALL>
    __device__ __forceinline__ void meet(Channels& of, i32 t, const Both& next, bool own) {
#pragma unroll
        for (int j = 1; j < TAPS; ++j) { d_z[j - 1] = d_z[j]; }
        d_z[BEFORE] = make_float2(0.0f, 0.0f);
        if (t < of.seq_len) {
            const float2 z = of.meet<ALL>(t, next.x);
            const float a = part_of(z.x), b = part_of(z.y);
            d_z[BEFORE] = make_float2(next.d_out.x * Silu::slope(z.x, a, z.x * a),
                                      next.d_out.y * Silu::slope(z.y, b, z.y * b));
        }
        if (own) {
#pragma unroll
            for (int j = 0; j < TAPS; ++j) {
                if (of.sees<ALL>(t, j)) {
                    d_weight[j] = add_product(d_z[BEFORE], of.met[j], d_weight[j]);
                }
            }
        }
    }
    // d_x of the token BEFORE tokens in front of t.
    template <bool ALL> __device__ __forceinline__ float2 d_x(const Channels& of, i32 t) const {
        float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
        for (int j = 0; j < TAPS; ++j) {
            const i32 later = t - BEFORE + j;
            if (later < of.seq_len && of.sees<ALL>(later, BEFORE - j)) {
                sum = add_product(of.weight[BEFORE - j], d_z[j], sum);
            }
        }
        return sum;
    }
};

extern "C" __global__ void __launch_bounds__(THREADS)
    short_conv_backward(T* __restrict__ d_x, f32* __restrict__ partial,
                        const T* __restrict__ d_out, const T* __restrict__ x,
                        const T* __restrict__ weight, const i32* __restrict__ starts, i32 seq_len,
                        i32 channels, i32 columns) {
    const i32 channel = 2 * (blockIdx.x * THREADS + threadIdx.x), first = blockIdx.y * SPAN;
    if (channel >= channels) { return; }
    const i32 stop = min(first + SPAN, seq_len);
    Channels of(x, weight, nullptr, starts, channel, seq_len, channels, columns, first);
    T* to = d_x + (i64)blockIdx.z * seq_len * columns + channel;
    const T* from = d_out + (i64)blockIdx.z * seq_len * channels + channel;
    Gradients sums = {};
    in_batches(
        of, first, stop + BEFORE,
        [&](i32 t) {
            const i32 there = min(t, seq_len - 1);
            return Both{of.at(there), load_two(from + (i64)there * channels)};
        },
        [&](bool all, i32 t, const Both& next) {
            const bool own = t < stop;
            all ? sums.meet<true>(of, t, next, own) : sums.meet<false>(of, t, next, own);
            if (t - BEFORE >= first) {
                const float2 sum = all ? sums.d_x<true>(of, t) : sums.d_x<false>(of, t);
                store_two(to + (i64)(t - BEFORE) * columns, sum.x, sum.y);
            }
        });
    if (partial) {
        f32* const row = partial + (((i64)blockIdx.z * gridDim.y + blockIdx.y) * channels + channel) *
                                       TAPS;
#pragma unroll
        for (int j = 0; j < TAPS; ++j) {
            row[j] = sums.d_weight[j].x;
            row[TAPS + j] = sums.d_weight[j].y;
        }
    }
}
