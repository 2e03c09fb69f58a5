// route.cu -- routers of experts: choice and weights, their gradients, and balancing losses.
//
// With p = softmax(l) of a row of logits and s = p, or with BY_SIGMOID = 1 s = sigmoid(l):
//
//   route           chosen = the experts of the top_k largest s + bias, the lowest expert first
//                   where sums are equal, NaN last. With GROUPS > 1 only experts of the
//                   ACTIVE_GROUPS groups of neighbours with the largest scores. A group's score is
//                   its largest s + bias, with BY_SIGMOID = 1 the sum of the two largest.
//                   weights = scale * s[chosen] (RENORMALIZE = 1: / the sum of s[chosen])
//   route_backward  d_logits from d_weights, and with FACTORS = 1 from the two losses:
//                   p * (f - sum of f p) + p * lse * f[E], f: factors
//   route_balance   both losses over all layers, their factors, the mean entropy and the largest
//                   load; adds sums to totals and clears sums
//
// A warp has a row, each lane every 32nd logit. The warp compares keys, integers in the order of
// the numbers: both zeros have the same key, and NaN has the lowest.
//
// Sums over rows are integers: blocks add to them with atomics, and the order changes no bit. The
// sums of a layer (SUMS = 1): rows by expert (E), probabilities by expert (E) in units of 2^-32,
// number of rows, entropies in 2^-32, squares of log-sum-exp in 2^-20, and number of rows whose
// logits are not finite. Sums and losses leave out filler: rows whose target is FILLER.
//
// Data     declared in llmq/ops/experts/route.py. of_experts is added to d_weights at chosen
//          experts. targets null: no row is filler. by: weights of rows; null: all are 1. PER_LANE:
//          E / 32, rounded up.
// Launch   route, route_backward: 256 threads; a block takes 8 rows at a time, and route loops over
//          further rows. route_balance: one block of 256 threads.
// Cost     logits read once; top_k steps of a few instructions and two warp reductions each.
// Needs    top_k at most 32 and E, E at most 512; GROUPS at most 32, a divisor of E.
// Source   arXiv:2412.19437, 2.1.2 (sums of two); arXiv:2405.04434, 2.2.2 (groups);
//          arXiv:2101.03961, eq. 4 to 6 (load balance); arXiv:2202.08906, eq. 5 (z-loss).
#include "common.cuh"

#ifndef PER_LANE  // compiled for another entry
#define PER_LANE 1
#define BY_SIGMOID 0
#define RENORMALIZE 0
#endif
#ifndef GROUPS
#define GROUPS 1
#define ACTIVE_GROUPS 1
#endif
#ifndef SUMS
#define SUMS 0
#endif
#ifndef FACTORS
#define FACTORS 0
#endif

constexpr u32 ALL = 0xFFFFFFFFu;
constexpr int WARPS = 8;
constexpr int EXTRA = 4;      // sums after the two by expert
constexpr int FILLER = -101;  // FILLER_TARGET of llmq/base/batch.py
constexpr float PROBABILITY_UNIT = 4294967296.0f, SQUARE_UNIT = 1048576.0f, MOST_SQUARE = 1048576.0f;
constexpr float TINY = 1e-20f;

// An integer key in the order of x. No number has key 0; NaN has key 1.
__device__ __forceinline__ u32 key_of(float x) {
    if (x != x) { return 1; }
    const u32 bits = __float_as_uint(x + 0.0f);  // -0 becomes 0
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// The inverse of key_of.
__device__ __forceinline__ float number_of(u32 key) {
    return __uint_as_float(key == 1 ? 0x7FC00000u : key >> 31 ? key & 0x7FFFFFFFu : ~key);
}

// Keys of a row's experts: lane l has experts l, l + 32, ...; key 0: the expert is left out.
struct Keys {
    u32 key[PER_LANE];

    // The expert with the largest key among [first, stop) without `other`; the lowest expert where
    // keys are equal. top: its key.
    __device__ __forceinline__ u32 best(u32& top, int first, int stop, u32 other) const {
        const int lane = threadIdx.x % 32;
        u32 largest = 0, expert = ~0u;
#pragma unroll
        for (int i = 0; i < PER_LANE; ++i) {
            const int e = lane + 32 * i;
            const bool meant = first <= e && e < stop && e != other;
            if (meant && key[i] > largest) { largest = key[i], expert = e; }
        }
        top = __reduce_max_sync(ALL, largest);
        return __reduce_min_sync(ALL, largest == top ? expert : ~0u);
    }
    // Returns the best expert, and leaves it out from now on.
    __device__ __forceinline__ u32 take() {
        u32 top;
        const u32 expert = best(top, 0, 32 * PER_LANE, ~0u);
#pragma unroll
        for (int i = 0; i < PER_LANE; ++i) {
            if (expert == threadIdx.x % 32 + 32 * i) { key[i] = 0; }
        }
        return expert;
    }
    // Leaves out the experts of all but the best groups.
    __device__ __forceinline__ void choose_groups(int E) {
        const int lane = threadIdx.x % 32, size = E / GROUPS;
        u32 mine = 0, top, groups = 0;  // mine: in lane g, group g's key
#pragma unroll 1
        for (int g = 0; g < GROUPS; ++g) {
            float score = 0.0f;
            u32 expert = ~0u;
            for (int n = 0; n < (BY_SIGMOID ? 2 : 1); ++n) {
                expert = best(top, g * size, (g + 1) * size, expert);
                score += number_of(top);
            }
            if (lane == g) { mine = key_of(score); }
        }
#pragma unroll 1
        for (int k = 0; k < ACTIVE_GROUPS; ++k) {
            top = __reduce_max_sync(ALL, mine);
            const u32 group = __reduce_min_sync(ALL, mine == top ? lane : 32);
            groups |= 1u << group;
            if (lane == group) { mine = 0; }
        }
#pragma unroll
        for (int i = 0; i < PER_LANE; ++i) {
            const int e = lane + 32 * i;
            if (e < E && !(groups >> (e / size) & 1)) { key[i] = 0; }
        }
    }
};

// A row of logits; elements past E are -inf.
struct Logits {
    float x[PER_LANE];
    float most, total;  // the largest x, and the sum of exp(x - most)

    __device__ __forceinline__ Logits(const f32* row, int E) {
        const int lane = threadIdx.x % 32;
        most = -INFINITY;
#pragma unroll
        for (int i = 0; i < PER_LANE; ++i) {
            x[i] = lane + 32 * i < E ? row[lane + 32 * i] : -INFINITY;
            most = fmaxf(most, x[i]);
        }
        most = warp_max(most);
        total = 0.0f;
#pragma unroll
        for (int i = 0; i < PER_LANE; ++i) { total += exponential(x[i], lane + 32 * i < E); }
        total = warp_sum(total);
    }
    // exp(value - most); 0 past E, where value - most would be NaN if all logits were -inf.
    __device__ __forceinline__ float exponential(float value, bool there = true) const {
        return there ? expf(value - most) : 0.0f;
    }
    __device__ __forceinline__ float lse() const { return most + logf(total); }
};

// value: in lane k the share of the k-th chosen expert, before `scale`. sum: all chosen experts'.
struct Shares {
    float value, sum;

    __device__ __forceinline__ Shares(const Logits& logits, const f32* row, int expert, int top_k) {
        const bool has = threadIdx.x % 32 < top_k;
        const float x = has ? row[expert] : 0.0f;
        value = BY_SIGMOID ? sigmoid(x) : logits.exponential(x) / logits.total;
        sum = 0.0f;
        if (RENORMALIZE) {
            for (int k = 0; k < top_k; ++k) { sum += __shfl_sync(ALL, value, k); }
            if (BY_SIGMOID) { sum += TINY; }
        }
    }
};

__device__ __forceinline__ u64 units(float x, float unit) { return (u64)__float2ll_rn(x * unit); }
__device__ __forceinline__ void add(u64* to, u64 x) {
    if (x) { atomicAdd(to, x); }
}

// The sums of a warp over its rows.
struct Seen {
    u64 probability[PER_LANE] = {}, entropy = 0, square = 0;
    int rows = 0, not_finite = 0;

    __device__ __forceinline__ void add_row(const Logits& logits) {
        ++rows;
        const float lse = logits.lse();
        if (!isfinite(lse)) {
            ++not_finite;
            return;
        }
        const float one = 1.0f / logits.total;
        float mean = 0.0f;
#pragma unroll
        for (int i = 0; i < PER_LANE; ++i) {
            const float p = expf(logits.x[i] - logits.most) * one;
            probability[i] += units(p, PROBABILITY_UNIT);
            if (p > 0.0f) { mean += p * logits.x[i]; }
        }
        mean = warp_sum(mean);
        entropy += units(lse - mean, PROBABILITY_UNIT);
        square += units(fminf(lse * lse, MOST_SQUARE), SQUARE_UNIT);
    }
    // shared: (2, 32 PER_LANE); the second row gets the probabilities.
    __device__ __forceinline__ void add_to(u64* sums, u64* shared, int E) const {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < PER_LANE; ++i) {
            add(shared + 32 * PER_LANE + lane + 32 * i, probability[i]);
        }
        const u64 extra[EXTRA] = {(u64)rows, entropy, square, (u64)not_finite};
#pragma unroll
        for (int i = 0; i < EXTRA; ++i) {
            if (lane == i) { add(sums + 2 * E + i, extra[i]); }
        }
    }
};

extern "C" __global__ void __launch_bounds__(32 * WARPS)
route(i32* __restrict__ chosen, f32* __restrict__ weights, i64* sums, const f32* __restrict__ logits,
      const f32* __restrict__ bias, const i32* __restrict__ targets, i32 rows, i32 E, i32 top_k,
      f32 scale) {
    constexpr int MOST = 32 * PER_LANE;
    __shared__ u64 shared[SUMS ? 2 * MOST : 1];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (SUMS) {
        for (int i = threadIdx.x; i < 2 * MOST; i += 32 * WARPS) { shared[i] = 0; }
        __syncthreads();
    }
    Seen seen;
    for (i64 r = (i64)blockIdx.x * WARPS + warp; r < rows; r += (i64)gridDim.x * WARPS) {
        const f32* const row = logits + r * E;
        const Logits x(row, E);
        Keys keys;
#pragma unroll
        for (int i = 0; i < PER_LANE; ++i) {
            const int e = lane + 32 * i;
            float score = BY_SIGMOID ? sigmoid(x.x[i]) : x.x[i];
            if (bias && e < E) { score += bias[e]; }
            keys.key[i] = e < E ? key_of(score) : 0;
        }
        if (GROUPS > 1) { keys.choose_groups(E); }
        int mine = 0;
        for (int k = 0; k < top_k; ++k) {
            const int expert = keys.take();
            if (lane == k) { mine = expert; }
        }
        const Shares shares(x, row, mine, top_k);
        const bool counts = SUMS && !(targets && targets[r] == FILLER);
        if (lane < top_k) {
            chosen[r * top_k + lane] = mine;
            weights[r * top_k + lane] =
                (RENORMALIZE ? shares.value / shares.sum : shares.value) * scale;
            if (counts) { atomicAdd(shared + mine, (u64)1); }
        }
        if (counts) { seen.add_row(x); }
    }
    if (SUMS) {
        u64* const to = reinterpret_cast<u64*>(sums);
        seen.add_to(to, shared, E);
        __syncthreads();
        for (int e = threadIdx.x; e < E; e += 32 * WARPS) {
            add(to + e, shared[e]);
            add(to + E + e, shared[MOST + e]);
        }
    }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, 3)
route_backward(D* __restrict__ d_logits, const f32* __restrict__ d_weights,
               const f32* __restrict__ of_experts, const f32* __restrict__ logits,
               const i32* __restrict__ chosen, const f32* __restrict__ factors,
               const i32* __restrict__ targets, i32 rows, i32 E, i32 top_k, f32 scale) {
    constexpr bool BY_P = !BY_SIGMOID && !RENORMALIZE;  // weights are probabilities of all experts
    const int lane = threadIdx.x % 32;
    const i64 r = (i64)blockIdx.x * WARPS + threadIdx.x / 32;
    if (r >= rows) { return; }
    const f32* const row = logits + r * E;
    const Logits x(row, E);
    const bool has = lane < top_k;
    const int mine = has ? chosen[r * top_k + lane] : 0;
    const Shares shares(x, row, mine, top_k);
    float g = has ? d_weights[r * top_k + lane] : 0.0f;
    if (has && of_experts) { g += of_experts[r * E + mine]; }
    g *= scale;
    if (RENORMALIZE) {
        g = (g - warp_sum(has ? g * (shares.value / shares.sum) : 0.0f)) / shares.sum;
    }
    if (!BY_P) { g *= shares.value; }
    if (BY_SIGMOID) { g *= 1.0f - shares.value; }

    // For each expert: d is the gradient of the logit, of_p the gradient of the probability.
    const bool counts = FACTORS && !(targets && targets[r] == FILLER);
    const float of_lse = counts ? x.lse() * factors[E] : 0.0f;
    float d[PER_LANE] = {}, of_p[PER_LANE] = {}, p[PER_LANE], inner = 0.0f;
    for (int k = 0; k < top_k; ++k) {
        const int expert = __shfl_sync(ALL, mine, k);
        const float from = __shfl_sync(ALL, g, k);
#pragma unroll
        for (int i = 0; i < PER_LANE; ++i) {
            if (expert == lane + 32 * i) { (BY_P ? of_p[i] : d[i]) += from; }
        }
    }
    if (FACTORS || BY_P) {
        const float one = 1.0f / x.total;
#pragma unroll
        for (int i = 0; i < PER_LANE; ++i) {
            const int e = lane + 32 * i;
            p[i] = x.exponential(x.x[i], e < E) * one;
            if (counts && e < E) { of_p[i] += factors[e]; }
            inner += of_p[i] * p[i];
        }
        inner = warp_sum(inner);
    }
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) {
        const int e = lane + 32 * i;
        if (counts) { d[i] += p[i] * of_lse; }
        if (counts || BY_P) { d[i] += p[i] * (of_p[i] - inner); }
        if (e < E) { d_logits[r * E + e] = from_f32<D>(d[i]); }
    }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS)
route_balance(f32* __restrict__ factors, f64* losses, i64* totals, i64* sums,
              const i32* __restrict__ targets, const f32* __restrict__ by, i32 layers, i32 E,
              i32 rows, f64 aux, f64 z) {
    __shared__ f64 partial[WARPS];
    __shared__ i64 counts[WARPS];
    __shared__ float most[WARPS];
    __shared__ f64 divisor;  // a register for divisor would spill
    const int width = 2 * E + EXTRA;
    i64 mine = 0;
    for (int i = threadIdx.x; i < rows; i += blockDim.x) { mine += targets[i] >= 0; }
    const f64 count = (f64)block_sum(mine, counts);
    f64 by_weight = count;
    if (by) {
        by_weight = 0.0;
        for (int i = threadIdx.x; i < rows; i += blockDim.x) {
            if (targets[i] >= 0) { by_weight += by[i]; }
        }
        by_weight = block_sum(by_weight, partial);
    }
    if (threadIdx.x == 0) { divisor = by_weight; }  // read after the barriers below
    i64 seen = 0, square = 0, entropy = 0;
    for (int l = threadIdx.x; l < layers; l += blockDim.x) {
        seen += sums[(i64)l * width + 2 * E];
        entropy += sums[(i64)l * width + 2 * E + 1];
        square += sums[(i64)l * width + 2 * E + 2];
    }
    const f64 n = (f64)block_sum(seen, counts);
    const f64 squares = (f64)block_sum(square, counts) * (1.0 / SQUARE_UNIT);
    const f64 entropies = (f64)block_sum(entropy, counts) * (1.0 / PROBABILITY_UNIT);
    const f64 one = n > 0.0 ? 1.0 / n : 0.0, weight = count * one;
    f64 product = 0.0;
    float busiest = 0.0f;  // most rows of an expert in a layer: fewer than 2^24
    for (int e = threadIdx.x; e < E; e += blockDim.x) {
        i64 load = 0, probability = 0;
        for (int l = 0; l < layers; ++l) {
            const i64 here = sums[(i64)l * width + e];
            load += here;
            busiest = fmaxf(busiest, (float)here);
            probability += sums[(i64)l * width + E + e];
        }
        const f64 share = (f64)load * one;
        factors[e] = (f32)(aux * E * (divisor * one) * share);
        product += share * ((f64)probability * (1.0 / PROBABILITY_UNIT) * one);
    }
    product = block_sum(product, partial);
    busiest = block_max(busiest, most);
    if (threadIdx.x == 0) {
        factors[E] = (f32)(2.0 * z * (divisor * one));
        losses[0] += count * E * product;
        losses[1] += weight * squares;
        losses[2] += weight * entropies;
        losses[3] += weight * layers * busiest;
    }
    __syncthreads();  // all threads have read the sums
    for (i64 i = threadIdx.x; i < (i64)layers * width; i += blockDim.x) {
        totals[i] += sums[i];
        sums[i] = 0;
    }
}
