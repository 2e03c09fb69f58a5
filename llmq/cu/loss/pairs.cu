// pairs.cu -- losses of pairs of documents: sums of each, weights of rows, statistics.
//
//   sums      at each document's first position, over its trained tokens: sum of the gain over the
//             reference, -loss - reference; sum of -loss; number of tokens
//   gains     over the second documents of pairs: sum of the gains, number of documents
//   shift     z0 = max(0, mean gain of the second documents of all ranks), for KTO
//   weights   d loss / d (loss of the token), 0 outside of pairs
//   stats     stats[..] += over all pairs: loss, count, and the sums that
//             llmq/model/losses/preferences.py names
//
//   x = gain of a document, with `normalize` divided by its tokens; a = mean log-probability of its
//   tokens; m = margin; c, r: the chosen and the rejected document; e: smoothing
//   SIGMOID   m = beta (x_c - x_r) - gamma    (1 - e) softplus(-m) + e softplus(m)
//   IPO       m = x_c - x_r - 1 / (2 beta)    m^2
//   ORPO      m = logit(exp(a_c)) - logit(exp(a_r))    beta softplus(-m)
//   KTO       m = +-beta (x - z0)             weight * (1 - sigmoid(m)), first document only
//   every kind but KTO      - sft * a_c
//
// Data     declared in llmq/ops/loss/pairs.py. Negative targets are masked. reference:
//          log-probabilities, or null. starts: first position of each token's document in its row.
//          partner: 1 + first position of the pair's other document, negated in rejected documents,
//          0 outside pairs. sums: written at first positions of documents.
// Launch   sums: 256 threads, a warp looks for documents that begin at its 32 positions, and adds
//          up each of them. gains, stats: one block of 1024. shift: one thread. weights: 256
//          threads, one position each.
// Cost     each array read once or twice; microseconds in each micro-step.
// Needs    starts ascend along each row; both documents of a pair in one row; n < 2^31.
#include "common.cuh"
#include "loss/document_sums.cuh"

constexpr int SIGMOID = 0, IPO = 1, ORPO = 2, KTO = 3;

struct Document {
    float gain, logp, count;
};

__device__ __forceinline__ Document document(const f32* sums, i64 n, i64 at) {
    return {sums[at], sums[n + at], sums[2 * n + at]};
}

struct Form {
    i32 kind, normalize;
    float beta, gamma, smoothing, sft;
};

// A pair's loss, its derivatives by the documents' sums of log-probabilities, and the rewards.
struct Value {
    float loss, d_chosen, d_rejected, chosen, rejected;
};

__device__ __forceinline__ float softplus(float x) {
    return fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x)));
}

// log(p / (1 - p)) of p = exp(a), a < 0, and its derivative.
__device__ __forceinline__ float log_odds(float a, float* slope) {
    const float rest = -expm1f(fminf(a, -1e-7f));
    *slope = 1.0f / rest;
    return a - logf(rest);
}

__device__ __forceinline__ Value of_pair(const Form& form, const Document& c, const Document& r) {
    const float each_c = form.normalize ? 1.0f / c.count : 1.0f;
    const float each_r = form.normalize ? 1.0f / r.count : 1.0f;
    const float x_c = c.gain * each_c, x_r = r.gain * each_r;
    Value v{0.0f, 0.0f, 0.0f, form.beta * x_c, form.beta * x_r};
    if (form.kind == SIGMOID) {
        const float m = form.beta * (x_c - x_r) - form.gamma, e = form.smoothing;
        v.loss = (1.0f - e) * softplus(-m) + e * softplus(m);
        const float slope = form.beta * (e * sigmoid(m) - (1.0f - e) * sigmoid(-m));
        v.d_chosen = slope * each_c;
        v.d_rejected = -slope * each_r;
    } else if (form.kind == IPO) {
        const float m = x_c - x_r - 0.5f / form.beta;
        v.loss = m * m;
        v.d_chosen = 2.0f * m * each_c;
        v.d_rejected = -2.0f * m * each_r;
    } else {
        float slope_c, slope_r;
        const float m = log_odds(c.logp / c.count, &slope_c) - log_odds(r.logp / r.count, &slope_r);
        v.loss = form.beta * softplus(-m);
        const float slope = -form.beta * sigmoid(-m);
        v.d_chosen = slope * slope_c / c.count;
        v.d_rejected = -slope * slope_r / r.count;
    }
    v.loss -= form.sft * c.logp / c.count;
    v.d_chosen -= form.sft / c.count;
    return v;
}

// KTO's loss of one document. preferred: whether the document is desirable. gamma, sft: weights of
// desirable and of undesirable documents.
__device__ __forceinline__ Value of_label(const Form& form, const Document& own, bool preferred,
                                          float shift) {
    const float sign = preferred ? form.beta : -form.beta;
    const float weight = preferred ? form.gamma : form.sft;
    const float s = sigmoid(sign * (own.gain - shift));
    const float slope = -weight * s * (1.0f - s) * sign, reward = form.beta * own.gain;
    return {weight * (1.0f - s), slope, 0.0f, reward, reward};
}

extern "C" __global__ void __launch_bounds__(256)
pairs_sums(f32* __restrict__ sums, const i32* __restrict__ targets, const f32* __restrict__ losses,
           const f32* __restrict__ reference, const i32* __restrict__ starts,
           const f32* __restrict__ partner, i64 n, i32 seq_len) {
    document_sums(
        sums, n, seq_len, [&](i64 i, int column) { return partner[i] != 0.0f && starts[i] == column; },
        [&](i64 i, f64 (&total)[3]) {
            if (targets[i] < 0) { return; }
            total[0] -= (f64)losses[i] + (reference ? reference[i] : 0.0f);
            total[1] -= losses[i];
            total[2] += 1.0;
        });
}

// The pair of position i: the first positions of i's document and of the other document, and
// whether the pair's first document begins at i.
struct Place {
    i64 own, other;
    bool preferred, is_first;
};

__device__ __forceinline__ Place place(const i32* starts, const f32* partner, i64 i, i32 seq_len) {
    const int other = (int)fabsf(partner[i]) - 1, own = starts[i];
    const int at = (int)((u32)i % (u32)seq_len);
    const i64 row = i - at;
    return {row + own, row + other, partner[i] > 0.0f, at == own && own < other};
}

extern "C" __global__ void __launch_bounds__(1024)
pairs_gains(f64* __restrict__ gains, const f32* __restrict__ sums, const i32* __restrict__ starts,
            const f32* __restrict__ partner, i64 n, i32 seq_len) {
    __shared__ f64 shared[32];
    f64 gain = 0.0, count = 0.0;
    for (i64 i = threadIdx.x; i < n; i += 1024) {
        if (partner[i] == 0.0f) { continue; }
        const Place p = place(starts, partner, i, seq_len);
        if (!p.is_first || sums[2 * n + p.other] == 0.0f) { continue; }
        gain += sums[p.other];
        count += 1.0;
    }
    gain = block_sum(gain, shared);
    count = block_sum(count, shared);
    if (threadIdx.x == 0) {
        gains[0] = gain;
        gains[1] = count;
    }
}

extern "C" __global__ void __launch_bounds__(1)
pairs_shift(f32* __restrict__ shift, const f64* __restrict__ gained, i32 ranks) {
    f64 gain = 0.0, count = 0.0;
    for (int r = 0; r < ranks; ++r) {
        gain += gained[2 * r];
        count += gained[2 * r + 1];
    }
    shift[0] = count > 0.0 ? fmaxf((f32)(gain / count), 0.0f) : 0.0f;
}

extern "C" __global__ void __launch_bounds__(256)
pairs_weights(f32* __restrict__ weights, const f32* __restrict__ sums,
              const f32* __restrict__ shift, const i32* __restrict__ targets,
              const i32* __restrict__ starts, const f32* __restrict__ partner, i64 n, i32 seq_len,
              i32 kind, i32 normalize, f32 beta, f32 gamma, f32 smoothing, f32 sft) {
    const i64 i = (i64)blockIdx.x * 256 + threadIdx.x;
    if (i >= n) { return; }
    weights[i] = 0.0f;
    if (targets[i] < 0 || partner[i] == 0.0f) { return; }
    const Form form{kind, normalize, beta, gamma, smoothing, sft};
    const Place p = place(starts, partner, i, seq_len);
    const Document own = document(sums, n, p.own);
    if (kind == KTO) {
        if (p.own < p.other) { weights[i] = -of_label(form, own, p.preferred, *shift).d_chosen; }
        return;
    }
    const Document other = document(sums, n, p.other);
    if (other.count == 0.0f) { return; }
    weights[i] = p.preferred ? -of_pair(form, own, other).d_chosen
                             : -of_pair(form, other, own).d_rejected;
}

extern "C" __global__ void __launch_bounds__(1024)
pairs_stats(f64* __restrict__ stats, const f32* __restrict__ sums, const f32* __restrict__ shift,
            const i32* __restrict__ starts, const f32* __restrict__ partner, i64 n, i32 seq_len,
            i32 kind, i32 normalize, f32 beta, f32 gamma, f32 smoothing, f32 sft) {
    constexpr int LOSS = 0, COUNT = 1, FIRST = 6, SUMS = 9;
    __shared__ f64 shared[32];
    const Form form{kind, normalize, beta, gamma, smoothing, sft};
    f64 loss = 0.0, pairs = 0.0, of[SUMS] = {};
    for (i64 i = threadIdx.x; i < n; i += 1024) {
        if (partner[i] == 0.0f) { continue; }
        const Place p = place(starts, partner, i, seq_len);
        if (!p.is_first) { continue; }
        const Document one = document(sums, n, p.own), two = document(sums, n, p.other);
        if (one.count == 0.0f || (two.count == 0.0f && kind != KTO)) { continue; }
        pairs += 1.0;
        of[0] += one.count + (kind == KTO ? 0.0f : two.count);
        if (kind == KTO) {
            const Value v = of_label(form, one, p.preferred, *shift);
            const int side = p.preferred ? 0 : 1;
            loss += v.loss;
            of[1] += (v.chosen > 0.0f) == p.preferred;
            of[2 + side] += 1.0;
            of[4 + side] += v.chosen;
            of[6 + side] += one.logp;
            of[8] += *shift;
            continue;
        }
        const Document &c = p.preferred ? one : two, &r = p.preferred ? two : one;
        const Value v = of_pair(form, c, r);
        loss += v.loss;
        of[1] += v.chosen > v.rejected;
        of[2] += 1.0;
        of[3] += 1.0;
        of[4] += v.chosen;
        of[5] += v.rejected;
        of[6] += c.logp;
        of[7] += r.logp;
    }
    loss = block_sum(loss, shared);
    pairs = block_sum(pairs, shared);
    if (threadIdx.x == 0) {
        stats[LOSS] += loss;
        stats[COUNT] += pairs;
    }
    for (int s = 0; s < SUMS; ++s) {
        const f64 total = block_sum(of[s], shared);
        if (threadIdx.x == 0) { stats[FIRST + s] += total; }
    }
}
