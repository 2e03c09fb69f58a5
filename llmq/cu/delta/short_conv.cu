// short_conv.cu -- causal convolution of every channel with a few weights of its own, then SiLU.
// Tokens of other documents do not count.
//
//   forward    z[t] = bias + sum over j < TAPS of weight[j] * x[t - TAPS + 1 + j];  out = z * sigmoid(z)
//   backward   d_z = d_out * silu'(z);  d_x[t] = sum over j of weight[TAPS - 1 - j] * d_z[t + j]
//              d_weight[j] = sum over t of d_z[t] * x[t - TAPS + 1 + j];  d_bias = sum over t of d_z[t]
//   SILU = 0   out = z;  d_z = d_out
//   keep       stores the last TAPS - 1 tokens, from which generation goes on
//
// Data     x, d_x: T (B, seq_len, columns), of which the first `channels` are read, or written.
//          out, d_out: T (B, seq_len, channels). weight: T (channels, TAPS). bias: T (channels), or
//          null: 0. before: F32 (B, TAPS - 1, channels), the tokens in front of the text, or null:
//          0. starts: I32 (B, seq_len), the first position of each token's document, or null: 0.
//          partial: F32 (B * spans, channels, TAPS), each block's sums for d_weight, or null.
//          bias_partial: F32 (B * spans, channels), the same for d_bias.
// Launch   128 threads, each with WIDE neighbouring channels (8 bytes). forward: grid (channels /
//          (128 WIDE), spans of 32 tokens, B), rounded up. backward: a warp has 32 WIDE channels of
//          128 tokens; grid (channels / (32 WIDE), spans of 512 tokens, B). keep: a channel in each
//          thread, grid (channels / 128, 1, B). A thread reads the next batch of tokens while it
//          computes with this one.
// Cost     x is read once, and TAPS - 1 more tokens for each span; out is written once.
//          Memory-bound.
// Needs    TAPS at least 2. channels and columns multiples of WIDE: 4 in BF16, 2 in F32.
#include "pointwise/activation.cuh"

constexpr int SPAN = 32, SPAN_BACKWARD = 128, THREADS = 128, BEFORE = TAPS - 1;
constexpr int WARPS = THREADS / 32;
constexpr int WIDE = 8 / sizeof(T);

// A thread's channels of one token.
struct Few {
    float v[WIDE];
    __device__ __forceinline__ void add_products(const Few& a, const Few& b) {
#pragma unroll
        for (int c = 0; c < WIDE; ++c) { v[c] = fmaf(a.v[c], b.v[c], v[c]); }
    }
};
__device__ __forceinline__ uint2 load_raw(const T* p) { return *reinterpret_cast<const uint2*>(p); }
__device__ __forceinline__ Few unpack_few(uint2 raw) {
    const u32 words[2] = {raw.x, raw.y};
    Few x;
#pragma unroll
    for (int c = 0; c < WIDE; ++c) {
        const u32 word = words[2 * c / WIDE];
        x.v[c] = WIDE == 2 ? __uint_as_float(word) : c % 2 ? upper_half(word) : lower_half(word);
    }
    return x;
}
__device__ __forceinline__ void store_few(T* p, const Few& x) {
    u32 words[2];
#pragma unroll
    for (int w = 0; w < 2; ++w) {
        const float first = x.v[w * WIDE / 2], last = x.v[(w + 1) * WIDE / 2 - 1];
        words[w] = WIDE == 2 ? __float_as_uint(first) : to_pair(first, last);
    }
    *reinterpret_cast<uint2*>(p) = make_uint2(words[0], words[1]);
}
__device__ __forceinline__ float part_of(float z) {
    return SILU ? share<Silu, sizeof(T) == 4>(z) : 1.0f;
}

// A thread's channels of a sequence, whose tokens the thread meets in order.
struct Channels {
    const T* x;
    const i32* starts;
    i32 columns, seq_len;
    Few weight[TAPS], met[TAPS];  // the newest token last
    Few bias = {};

    __device__ __forceinline__ Channels(const T* x, const T* weights, const T* biases,
                                        const f32* before, const i32* starts, i32 channel, i32 seq_len, i32 channels,
                                        i32 columns, i32 first)
        : x(x + (i64)blockIdx.z * seq_len * columns + channel),
          starts(starts ? starts + (i64)blockIdx.z * seq_len : nullptr), columns(columns),
          seq_len(seq_len) {
        if (biases) { bias = unpack_few(load_raw(biases + channel)); }
        const T* const own = weights + (i64)channel * TAPS;
#pragma unroll
        for (int n = 0; n < TAPS; ++n) {
            const Few some = unpack_few(load_raw(own + n * WIDE));
#pragma unroll
            for (int e = 0; e < WIDE; ++e) {
                weight[(n * WIDE + e) % TAPS].v[(n * WIDE + e) / TAPS] = some.v[e];
            }
        }
#pragma unroll
        for (int j = 1; j < TAPS; ++j) {
            const i32 t = first - TAPS + j;
            met[j] = {};
            if (t >= 0) {
                met[j] = unpack_few(raw(t));
            } else if (before) {
#pragma unroll
                for (int c = 0; c < WIDE; ++c) {
                    met[j].v[c] =
                        before[((i64)blockIdx.z * BEFORE + BEFORE + t) * channels + channel + c];
                }
            }
        }
    }
    __device__ __forceinline__ uint2 raw(i32 t) const { return load_raw(x + (i64)t * columns); }
    __device__ __forceinline__ i32 start(i32 t) const {
        return starts ? __ldg(starts + min(t, seq_len - 1)) : -TAPS;
    }
    // True if each of the tokens `first` to `last` sees all BEFORE tokens in front of it.
    __device__ __forceinline__ bool inside(i32 first, i32 last) const {
        return start(last) <= first - BEFORE;
    }
    // True if token t sees the token of tap j. ALL: always true.
    template <bool ALL> __device__ __forceinline__ bool sees(i32 t, int j) const {
        return ALL || t - BEFORE + j >= start(t);
    }
    // Takes token t with its inputs `next`, and returns z.
    template <bool ALL> __device__ __forceinline__ Few meet(i32 t, const Few& next) {
#pragma unroll
        for (int j = 1; j < TAPS; ++j) { met[j - 1] = met[j]; }
        met[BEFORE] = next;
        Few z = bias;
#pragma unroll
        for (int j = 0; j < TAPS; ++j) {
            if (sees<ALL>(t, j)) { z.add_products(weight[j], met[j]); }
        }
        return z;
    }
};

// Calls use(inner, t, read(t)) for tokens [first, stop); read must accept later tokens too. inner:
// a literal, true if the whole batch lies before stop and inside() holds for it. Inner tokens take
// no branches, which would cost as much as all else, because values rotate through registers.
template <int BATCH, class Read, class Use>
__device__ __forceinline__ void in_batches(const Channels& of, i32 first, i32 stop, Read read, Use use) {
    decltype(read(first)) values[BATCH], coming[BATCH];
#pragma unroll
    for (int n = 0; n < BATCH; ++n) { coming[n] = read(first + n); }
    for (i32 t = first; t < stop; t += BATCH) {
#pragma unroll
        for (int n = 0; n < BATCH; ++n) { values[n] = coming[n]; }
        if (t + BATCH < stop) {
#pragma unroll
            for (int n = 0; n < BATCH; ++n) { coming[n] = read(t + BATCH + n); }
        }
        if (t + BATCH <= stop && of.inside(t, t + BATCH - 1)) {
#pragma unroll
            for (int n = 0; n < BATCH; ++n) { use(true, t + n, values[n]); }
        } else {
#pragma unroll 1
            for (i32 s = t; s < min(t + BATCH, stop); ++s) { use(false, s, read(s)); }
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    short_conv_forward(T* __restrict__ out, const T* __restrict__ x, const T* __restrict__ weight,
                       const T* __restrict__ bias, const f32* __restrict__ before,
                       const i32* __restrict__ starts, i32 seq_len, i32 channels, i32 columns) {
    const i32 channel = WIDE * (blockIdx.x * THREADS + threadIdx.x), first = blockIdx.y * SPAN;
    if (channel >= channels) { return; }
    Channels of(x, weight, bias, before, starts, channel, seq_len, channels, columns, first);
    T* to = out + (i64)blockIdx.z * seq_len * channels + channel;
    const i32 stop = min(first + SPAN, seq_len);
    in_batches<sizeof(T) == 2 ? 8 : 4>(
        of, first, stop, [&](i32 t) { return of.raw(min(t, seq_len - 1)); },
        [&](bool inner, i32 t, uint2 raw) {
            const Few next = unpack_few(raw);
            Few z = inner ? of.meet<true>(t, next) : of.meet<false>(t, next);
#pragma unroll
            for (int c = 0; c < WIDE; ++c) { z.v[c] *= part_of(z.v[c]); }
            store_few(to + (i64)t * channels, z);
        });
}

extern "C" __global__ void __launch_bounds__(THREADS)
    short_conv_keep(f32* before, const T* __restrict__ x, i32 seq_len, i32 channels, i32 columns) {
    const i32 channel = blockIdx.x * THREADS + threadIdx.x;
    if (channel >= channels) { return; }
    f32* kept = before + (i64)blockIdx.z * (TAPS - 1) * channels + channel;
    const T* of = x + (i64)blockIdx.z * seq_len * columns + channel;
    for (int j = 0; j < TAPS - 1; ++j) {  // overwrites only tokens read before
        const i32 t = seq_len - (TAPS - 1) + j;
        kept[(i64)j * channels] =
            t >= 0 ? to_f32(of[(i64)t * columns]) : kept[(i64)(j + seq_len) * channels];
    }
}

// A token's inputs in backward: x, d_out.
struct Both {
    uint2 x, d_out;
};

// Sums over a span's tokens, and the gradients d_z of the newest TAPS tokens, the newest last.
struct Gradients {
    Few d_z[TAPS], d_weight[TAPS], d_bias;

    template <bool ALL>
    __device__ __forceinline__ void meet(Channels& of, i32 t, const Both& next, bool own) {
#pragma unroll
        for (int j = 1; j < TAPS; ++j) { d_z[j - 1] = d_z[j]; }
        const Few z = of.meet<ALL>(t, unpack_few(next.x)), d_out = unpack_few(next.d_out);
#pragma unroll
        for (int c = 0; c < WIDE; ++c) {
            const float part = part_of(z.v[c]);
            const float slope = SILU ? Silu::slope(z.v[c], part, z.v[c] * part) : 1.0f;
            d_z[BEFORE].v[c] = d_out.v[c] * slope;
        }
        if (own) {
#pragma unroll
            for (int c = 0; c < WIDE; ++c) { d_bias.v[c] += d_z[BEFORE].v[c]; }
#pragma unroll
            for (int j = 0; j < TAPS; ++j) {
                if (of.sees<ALL>(t, j)) { d_weight[j].add_products(d_z[BEFORE], of.met[j]); }
            }
        }
    }
    // d_x of token t - BEFORE.
    template <bool ALL> __device__ __forceinline__ Few d_x(const Channels& of, i32 t) const {
        Few sum = {};
#pragma unroll
        for (int j = 0; j < TAPS; ++j) {
            if (of.sees<ALL>(t - BEFORE + j, BEFORE - j)) {
                sum.add_products(of.weight[BEFORE - j], d_z[j]);
            }
        }
        return sum;
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 4)
    short_conv_backward(T* __restrict__ d_x, f32* __restrict__ partial,
                        f32* __restrict__ bias_partial, const T* __restrict__ d_out,
                        const T* __restrict__ x, const T* __restrict__ weight,
                        const T* __restrict__ bias, const i32* __restrict__ starts, i32 seq_len,
                        i32 channels, i32 columns) {
    constexpr int OWN = WIDE * TAPS;  // number of sums of a thread
    __shared__ float parts[WARPS][32][OWN + 1];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const i32 begin = blockIdx.x * 32 * WIDE, channel = begin + lane * WIDE;
    const i32 first = (blockIdx.y * WARPS + warp) * SPAN_BACKWARD;
    const i32 stop = min(first + SPAN_BACKWARD, seq_len);
    Gradients sums = {};
    if (channel < channels && first < stop) {
        Channels of(x, weight, bias, nullptr, starts, channel, seq_len, channels, columns, first);
        T* to = d_x + (i64)blockIdx.z * seq_len * columns + channel;
        const T* from = d_out + (i64)blockIdx.z * seq_len * channels + channel;
        const auto read = [&](i32 t) {
            const i32 there = min(t, seq_len - 1);
            const uint2 none = make_uint2(0, 0);  // the gradient after the sequence's end
            const uint2 d = load_raw(from + (i64)there * channels);
            return Both{of.raw(there), t < seq_len ? d : none};
        };
        // The warp that writes d_x of token t - BEFORE adds token t to the sums. The earlier warp
        // adds the first BEFORE tokens, but warp 0 of a sequence adds its own.
        const i32 ready = first + BEFORE;
#pragma unroll 1
        for (i32 t = first; t < ready; ++t) { sums.meet<false>(of, t, read(t), first == 0); }
        in_batches<4>(of, ready, stop + BEFORE, read, [&](bool inner, i32 t, const Both& next) {
            T* const there = to + (i64)(t - BEFORE) * columns;
            if (inner) {
                sums.meet<true>(of, t, next, true);
                store_few(there, sums.d_x<true>(of, t));
            } else {
                sums.meet<false>(of, t, next, true);
                store_few(there, sums.d_x<false>(of, t));
            }
        });
    }
    if (partial) {
#pragma unroll
        for (int n = 0; n < OWN; ++n) { parts[warp][lane][n] = sums.d_weight[n % TAPS].v[n / TAPS]; }
        __syncthreads();
        f32* const row = partial + ((i64)blockIdx.z * gridDim.y + blockIdx.y) * channels * TAPS;
        for (int n = threadIdx.x; n < 32 * OWN; n += THREADS) {
            float sum = 0.0f;
#pragma unroll
            for (int w = 0; w < WARPS; ++w) { sum += parts[w][n / OWN][n % OWN]; }
            if (begin * TAPS + n < channels * TAPS) { row[begin * TAPS + n] = sum; }
        }
    }
    if (bias_partial) {
        __syncthreads();  // all threads have read the sums of d_weight
#pragma unroll
        for (int c = 0; c < WIDE; ++c) { parts[warp][lane][c] = sums.d_bias.v[c]; }
        __syncthreads();
        const int n = threadIdx.x;
        if (n < 32 * WIDE && begin + n < channels) {
            float sum = 0.0f;
#pragma unroll
            for (int w = 0; w < WARPS; ++w) { sum += parts[w][n / WIDE][n % WIDE]; }
            bias_partial[((i64)blockIdx.z * gridDim.y + blockIdx.y) * channels + begin + n] = sum;
        }
    }
}
