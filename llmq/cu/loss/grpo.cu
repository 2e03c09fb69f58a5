// grpo.cu -- losses of a policy's own samples by advantages: sums, weights of rows, statistics.
//
//   sums      at each document's first position, over its trained tokens: sum of the logarithm of
//             the ratio, -loss - old; number of tokens; sum of the divergences d
//   weights   d loss / d (loss of the token), 0 where masked
//   stats     stats[..] += loss, count, and the sums that llmq/model/losses/grpo.py names
//
//   x = -loss - old; r = exp(x); A = advantage; g = reference + loss; d = exp(g) - g - 1
//   TOKEN     -min(r A, clip(r, low, high) A)
//   SEQUENCE  the same with r = exp(mean x of the document)
//   CAPPED    -min(r, high) A (-loss), where min(r, high) is a constant without a gradient
//   each kind + beta r d, whose gradient goes through both r and d
//   PER_DOCUMENT  each token's loss / length; with length 0, / trained tokens of its document
//
// Data     declared in llmq/ops/loss/grpo.py. Negative targets are masked. old, reference:
//          log-probabilities. starts: first position of each token's document in its row; null: 0.
//          sums: written at first positions of documents.
// Launch   sums: 256 threads, a warp looks for documents that begin at its 32 positions, and adds
//          up each of them. weights: 256 threads, one position each. stats: one block of 1024.
// Cost     each array read once; microseconds in each micro-step.
// Needs    starts ascend along each row; n < 2^31.
#include "common.cuh"
#include "loss/document_sums.cuh"

constexpr int SEQUENCE = 1, CAPPED = 2, PER_DOCUMENT = 1;
constexpr float LARGEST_LOG = 80.0f;  // keeps exp finite, so that advantage 0 gives 0

struct Form {
    i32 kind;
    float low, high, beta;
    i32 per;
    float length;
};

struct Samples {
    const f32* sums;
    const i32* targets;
    const f32 *losses, *old, *reference, *advantages;
    const i32* starts;
    i64 n;
    i32 seq_len;
};

struct Value {
    float loss, weight, clipped, ratio, kl;
};

// The position in its row at which a token's document begins.
__device__ __forceinline__ int start_of(const i32* starts, i64 i) { return starts ? starts[i] : 0; }

// One-sample estimate of the divergence from the reference.
__device__ __forceinline__ float divergence(float gap) {
    return expm1f(fminf(gap, LARGEST_LOG)) - gap;
}

// Loss and weight of a trained token.
__device__ __forceinline__ Value value(const Form& form, const Samples& s, i64 i) {
    const float logp = -s.losses[i], advantage = s.advantages[i];
    const i64 first = i - (int)((u32)i % (u32)s.seq_len) + start_of(s.starts, i);
    const float count = s.sums[s.n + first];
    const float x = form.kind == SEQUENCE ? s.sums[first] / count : logp - s.old[i];
    Value v{0.0f, 0.0f, 0.0f, expf(fminf(x, LARGEST_LOG)), 0.0f};
    if (form.kind == CAPPED) {
        const float bounded = fminf(v.ratio, form.high);
        v.clipped = v.ratio > form.high;
        v.weight = bounded * advantage;
        v.loss = -v.weight * logp;
    } else {
        const float own = v.ratio * advantage;
        const float held = fminf(fmaxf(v.ratio, form.low), form.high) * advantage;
        v.clipped = own > held;
        v.weight = own > held ? 0.0f : own;
        v.loss = own > held ? -held : -own;
    }
    if (s.reference) {
        const float gap = s.reference[i] - logp, own = divergence(gap);
        const float slope = form.kind == SEQUENCE ? own + gap - s.sums[2 * s.n + first] / count : gap;
        v.kl = v.ratio * own;
        v.loss += form.beta * v.kl;
        v.weight += form.beta * v.ratio * slope;
    }
    if (form.per == PER_DOCUMENT) {
        const float each = 1.0f / (form.length > 0.0f ? form.length : count);
        v.loss *= each;
        v.weight *= each;
    }
    return v;
}

extern "C" __global__ void __launch_bounds__(256)
grpo_sums(f32* __restrict__ sums, const i32* __restrict__ targets, const f32* __restrict__ losses,
          const f32* __restrict__ old, const f32* __restrict__ reference,
          const i32* __restrict__ starts, i64 n, i32 seq_len) {
    document_sums(
        sums, n, seq_len, [&](i64 i, int column) { return start_of(starts, i) == column; },
        [&](i64 i, f64 (&total)[3]) {
            if (targets[i] < 0) { return; }
            total[0] -= (f64)losses[i] + old[i];
            total[1] += 1.0;
            if (reference) { total[2] += divergence(reference[i] + losses[i]); }
        });
}

#define SAMPLES_ARGS                                                                              \
    const f32 *__restrict__ sums, const i32 *__restrict__ targets, const f32 *__restrict__ losses, \
        const f32 *__restrict__ old, const f32 *__restrict__ reference,                           \
        const f32 *__restrict__ advantages, const i32 *__restrict__ starts, i64 n, i32 seq_len,   \
        i32 kind, float low, float high, float beta, i32 per, float length

extern "C" __global__ void __launch_bounds__(256)
grpo_weights(f32* __restrict__ weights, SAMPLES_ARGS) {
    const i64 i = (i64)blockIdx.x * 256 + threadIdx.x;
    if (i >= n) { return; }
    const Samples s{sums, targets, losses, old, reference, advantages, starts, n, seq_len};
    const Form form{kind, low, high, beta, per, length};
    weights[i] = targets[i] < 0 ? 0.0f : value(form, s, i).weight;
}

extern "C" __global__ void __launch_bounds__(1024)
grpo_stats(f64* __restrict__ stats, SAMPLES_ARGS) {
    constexpr int LOSS = 0, COUNT = 1, FIRST = 6, SUMS = 7;
    __shared__ f64 shared[32];
    const Samples s{sums, targets, losses, old, reference, advantages, starts, n, seq_len};
    const Form form{kind, low, high, beta, per, length};
    f64 loss = 0.0, of[SUMS] = {};
    for (i64 i = threadIdx.x; i < n; i += 1024) {
        const bool begins = start_of(starts, i) == (int)((u32)i % (u32)seq_len);
        of[1] += begins && sums[n + i] > 0.0f;
        if (targets[i] < 0) { continue; }
        const Value v = value(form, s, i);
        loss += v.loss;
        of[0] += 1.0;
        of[2] += v.clipped;
        of[3] += v.ratio;
        of[4] += fabsf(-losses[i] - old[i]);
        of[5] += v.kl;
        of[6] += losses[i];
    }
    loss = block_sum(loss, shared);
    for (int k = 0; k < SUMS; ++k) { of[k] = block_sum(of[k], shared); }
    if (threadIdx.x == 0) {
        stats[LOSS] += loss;
        stats[COUNT] += form.per == PER_DOCUMENT ? of[1] : of[0];
        for (int k = 0; k < SUMS; ++k) { stats[FIRST + k] += of[k]; }
    }
}
