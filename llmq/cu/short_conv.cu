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
// Launch   128 threads, a channel each; grid (channels / 128, spans of 64 tokens, B), both rounded
//          up; keep: (channels / 128, 1, B).
// Cost     x read once, and TAPS - 1 tokens more of each span; out written once. Memory-bound.
// Needs    TAPS at least 2.
// Same name  llmq/ops/short_conv.py  llmq/ref/short_conv.py  tests/ops/test_short_conv.py
#include "common.cuh"

constexpr int SPAN = 64, THREADS = 128;

// A channel of a sequence, whose tokens a thread meets in order.
struct Channel {
    const T* x;
    const f32* before;
    const i32* starts;
    i32 channels, columns, seq_len;
    float weight[TAPS], met[TAPS];  // the newest token last

    __device__ __forceinline__ Channel(const T* x, const T* weights, const f32* before,
                                       const i32* starts, i32 channel, i32 seq_len, i32 channels,
                                       i32 columns, i32 first)
        : x(x + (i64)blockIdx.z * seq_len * columns + channel),
          before(before ? before + (i64)blockIdx.z * (TAPS - 1) * channels + channel : nullptr),
          starts(starts ? starts + (i64)blockIdx.z * seq_len : nullptr), channels(channels),
          columns(columns), seq_len(seq_len) {
#pragma unroll
        for (int j = 0; j < TAPS; ++j) { weight[j] = to_f32(weights[(i64)channel * TAPS + j]); }
#pragma unroll
        for (int j = 1; j < TAPS; ++j) { met[j] = at(first - TAPS + j); }
    }
    __device__ __forceinline__ float at(i32 t) const {
        if (t >= 0) { return to_f32(x[(i64)t * columns]); }
        return before ? before[(i64)(TAPS - 1 + t) * channels] : 0.0f;
    }
    __device__ __forceinline__ i32 start(i32 t) const { return starts ? __ldg(starts + t) : -TAPS; }
    // Meets token t, of a document that starts there; gives z.
    __device__ __forceinline__ float meet(i32 t, i32 start) {
#pragma unroll
        for (int j = 1; j < TAPS; ++j) { met[j - 1] = met[j]; }
        met[TAPS - 1] = at(t);
        float z = 0.0f;
#pragma unroll
        for (int j = 0; j < TAPS; ++j) {
            z = fmaf(weight[j], t - (TAPS - 1) + j >= start ? met[j] : 0.0f, z);
        }
        return z;
    }
};

extern "C" __global__ void __launch_bounds__(THREADS)
    short_conv_forward(T* __restrict__ out, const T* __restrict__ x, const T* __restrict__ weight,
                       const f32* __restrict__ before, const i32* __restrict__ starts, i32 seq_len,
                       i32 channels, i32 columns) {
    const i32 channel = blockIdx.x * THREADS + threadIdx.x, first = blockIdx.y * SPAN;
    if (channel >= channels) { return; }
    Channel of(x, weight, before, starts, channel, seq_len, channels, columns, first);
    T* to = out + (i64)blockIdx.z * seq_len * channels + channel;
    for (i32 t = first; t < min(first + SPAN, seq_len); ++t) {
        const float z = of.meet(t, of.start(t));
        to[(i64)t * channels] = from_f32<T>(z * sigmoid(z));
    }
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

extern "C" __global__ void __launch_bounds__(THREADS)
    short_conv_backward(T* __restrict__ d_x, f32* __restrict__ partial,
                        const T* __restrict__ d_out, const T* __restrict__ x,
                        const T* __restrict__ weight, const i32* __restrict__ starts, i32 seq_len,
                        i32 channels, i32 columns) {
    const i32 channel = blockIdx.x * THREADS + threadIdx.x, first = blockIdx.y * SPAN;
    if (channel >= channels) { return; }
    const i32 stop = min(first + SPAN, seq_len);
    Channel of(x, weight, nullptr, starts, channel, seq_len, channels, columns, first);
    T* to = d_x + (i64)blockIdx.z * seq_len * columns + channel;
    const T* from = d_out + (i64)blockIdx.z * seq_len * channels + channel;
    float d_z[TAPS] = {}, d_weight[TAPS] = {};
    i32 start[TAPS] = {};
    for (i32 t = first; t < stop + TAPS - 1; ++t) {
#pragma unroll
        for (int j = 1; j < TAPS; ++j) { d_z[j - 1] = d_z[j], start[j - 1] = start[j]; }
        d_z[TAPS - 1] = 0.0f;
        if (t < seq_len) {
            start[TAPS - 1] = of.start(t);
            const float z = of.meet(t, start[TAPS - 1]), share = sigmoid(z);
            const float slope = share * (1.0f + z * (1.0f - share));
            d_z[TAPS - 1] = to_f32(from[(i64)t * channels]) * slope;
        }
        if (t < stop) {
#pragma unroll
            for (int j = 0; j < TAPS; ++j) {
                const bool seen = t - (TAPS - 1) + j >= start[TAPS - 1];
                d_weight[j] = fmaf(d_z[TAPS - 1], seen ? of.met[j] : 0.0f, d_weight[j]);
            }
        }
        const i32 done = t - (TAPS - 1);
        if (done >= first) {
            float sum = 0.0f;
#pragma unroll
            for (int j = 0; j < TAPS; ++j) {
                sum = fmaf(of.weight[TAPS - 1 - j], start[j] <= done ? d_z[j] : 0.0f, sum);
            }
            to[(i64)done * columns] = from_f32<T>(sum);
        }
    }
    if (partial) {
        const i64 row = (i64)blockIdx.z * gridDim.y + blockIdx.y;
#pragma unroll
        for (int j = 0; j < TAPS; ++j) {
            partial[(row * channels + channel) * TAPS + j] = d_weight[j];
        }
    }
}
