// sample.cu -- a token of each row of logits: an id of the largest sum of score and Gumbel noise.
//
//   x = cap(logit); l = x; if the id was seen, l = x / repetition for x > 0, else x * repetition
//   score q = (l - max l) * (1 / temperature); rank: descending q, equal scores by ascending id
//   kept: the first top_k ids; of these the first ids whose exp(q) add up to the share top_p of the
//   sum over the first top_k; of these the ids with exp(q) >= min_p
//   token = argmax of q + noise(seed, position, id) over the kept ids; logprob = x - log sum exp(x)
//
//   scan: in each part of a row the largest l, the largest x, and the sum of exp(x - largest x)
//   cut: the rank of the last id that top_k and top_p keep
//   draw: in each part the largest q + noise
//   finish: the token (with temperature 0 the id of the largest l), and the logprob
//
// Data     tokens: I32 (rows); logprobs: F32 (rows); logits: T (rows, padded_vocab), whose columns
//          from vocab on are ignored. temperature (0: the token is argmax l), top_p (1: all),
//          min_p, repetition: F32 (rows); top_k (0: all), position: I32 (rows); seed: I64 (rows).
//          seen: I32 (rows, (vocab + 31) / 32), a bit for each id, where finish sets the token's
//          bit; or null. Where a logit is NaN or infinity, or all are -infinity, the token is -1
//          and the logprob NaN.
//          stats: F32 (rows, parts, 2): the largest x, NaN if a logit is NaN or infinity, and the
//          sum. largest, found: I64 (rows, parts): an l with its id, and a q + noise with its id,
//          as largest_first packs them. last: I64 (rows): a rank. parts = ceil(vocab / PART).
// Launch   scan, draw: THREADS threads, grid (parts, rows). cut: THREADS threads, a block for each
//          row. finish: 32 threads, one for each row.
// Cost     a row is read twice, and twice more for top_k and for top_p each, mostly from L2: once
//          for a histogram of ranks, once for the ids in the bin of the last kept id. A bin with
//          more than MOST ids takes further histograms.
// Needs    nothing. Deterministic: sums of exp(q) are integers, in units of 2^-31, which atomics
//          may add in any order.
#include "common.cuh"
#include "ptx.cuh"

#ifndef SOFTCAP
#define SOFTCAP 0
#endif

constexpr int THREADS = 1024, N = Vec<T>::N;
constexpr int PART = 8192;  // ids per block, where a row has several blocks
constexpr int BINS = 1024, MOST = 1024;  // bins of a histogram; most ids that are ranked one by one
constexpr float BINS_PER_SCORE = 32.0f;  // so that the last bin has the scores below -32
constexpr float LARGEST = 3e38f;         // upper bound of 1 / temperature
constexpr float MOST_NOISE = 23.0f;      // above the noise of any id

// A place in the order of ids, from 0 on: the bits of |q|, then the id.
using Rank = u64;
__device__ __forceinline__ float score_of(Rank rank) { return -__uint_as_float(rank >> 32); }
// exp(q) as a whole number of 2^-31.
__device__ __forceinline__ u32 mass_of(Rank rank) {
    return (u32)rintf(expf(score_of(rank)) * 2147483648.0f);
}
// x and its id as one number, in the order of x, and by descending id where x is equal.
__device__ __forceinline__ u64 largest_first(float x, int id) {
    const u32 bits = __float_as_uint(x + 0.0f);  // -0 is 0
    return (u64)(bits >> 31 ? ~bits : bits | 0x80000000u) << 32 | (u32)~id;
}
// The inverse of largest_first: the x.
__device__ __forceinline__ float number_of(u64 order) {
    const u32 bits = order >> 32;
    return __uint_as_float(bits >> 31 ? bits ^ 0x80000000u : ~bits);
}
__device__ __forceinline__ u64 block_largest(u64 x, u64* shared) {
    return block_reduce(x, shared, u64(0), [](u64 y) {
#pragma unroll
        for (int mask = 16; mask > 0; mask >>= 1) {
            const u64 other = __shfl_xor_sync(0xFFFFFFFFu, y, mask);
            y = other > y ? other : y;
        }
        return y;
    });
}

// Ids [first, end): a block's part of a row of logits, or all ids.
struct Part {
    int first, end;
    __device__ __forceinline__ Part(int first, int end) : first(first), end(end) {}
    __device__ __forceinline__ explicit Part(int vocab)
        : first((int)blockIdx.x * PART), end(min(first + PART, vocab)) {}
};

// A row of logits as its request reads it. best: the largest l. inverse: 1 / temperature.
struct Logits {
    const T* row;
    const u32* seen;
    int vocab;
    float repetition, best, inverse;

    __device__ __forceinline__ Logits(const T* rows, const int* seen, const float* repetition, int r,
                                      int vocab, int padded_vocab)
        : row(rows + (i64)r * padded_vocab),
          seen(seen ? reinterpret_cast<const u32*>(seen) + (i64)r * ((vocab + 31) / 32) : nullptr),
          vocab(vocab), repetition(repetition[r]) {}
    // first: largest_first of the largest l.
    __device__ __forceinline__ void scale(u64 first, float temperature) {
        inverse = fminf(1.0f / temperature, LARGEST);
        best = number_of(first);
    }

    __device__ __forceinline__ static float capped(T logit) {
        const float x = to_f32(logit), cap = __uint_as_float(SOFTCAP);
        return SOFTCAP == 0 ? x : cap * tanhf(x / cap);
    }
    // Calls f(id, x, l) for the ids of this thread in a part, ascending.
    template <class F> __device__ __forceinline__ void each(const Part& part, F f) const {
#pragma unroll 1
        for (int first = part.first + (int)threadIdx.x * N; first < part.end; first += THREADS * N) {
            const Vec<T> vector = load_vec(row + first);
            const u32 word = seen ? seen[first / 32] >> first % 32 : 0;
#pragma unroll
            for (int i = 0; i < N; ++i) {
                const float x = capped(vector[i]);
                float l = x;
                if (word >> i & 1) { l = x > 0.0f ? x / repetition : x * repetition; }
                if (first + i < part.end) { f(first + i, x, l); }
            }
        }
    }
    // Calls f(rank) for the ids of this thread in a part whose rank is at most `last`.
    template <class F>
    __device__ __forceinline__ void each_rank(const Part& part, Rank last, F f) const {
        each(part, [&](int id, float x, float l) {
            const Rank rank = (u64)__float_as_uint(fabsf((l - best) * inverse)) << 32 | (u32)id;
            if (rank <= last) { f(rank); }
        });
    }
};

struct Shared {
    u64 ranks[MOST], sums[32], reduction[32];
    u32 count[BINS], low[BINS], high[BINS];  // each bin's ids, and the two words of its weight
    u64 before;  // weight of all ids in front of the bin at the crossing
    int bin, collected;
};

// Finds the bin in which `before` plus the running sum of the bins' weights reaches the target.
// Writes s.bin, -1 if the sum stays below the target, and s.before. by_share: sets the target to
// top_p of the total. Each thread has the bin of its number.
__device__ __forceinline__ void find_crossing(Shared& s, u64 before, u64& target, bool by_share,
                                              float top_p) {
    const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
    const u64 own = (u64)s.high[tid] << 32 | s.low[tid];
    u64 sum = own, in_front = before, total = before;
#pragma unroll
    for (int delta = 1; delta < 32; delta *= 2) {
        const u64 other = __shfl_up_sync(0xFFFFFFFFu, sum, delta);
        if (lane >= delta) { sum += other; }
    }
    if (lane == 31) { s.sums[warp] = sum; }
    if (tid == 0) { s.bin = -1, s.collected = 0; }
    __syncthreads();
    for (int w = 0; w < THREADS / 32; ++w) {
        if (w == warp) { in_front = total; }
        total += s.sums[w];
    }
    if (by_share) { target = max((u64)ceil((f64)fmaxf(top_p, 0.0f) * (f64)total), u64(1)); }
    in_front += sum - own;
    if (in_front < target && target <= in_front + own) { s.bin = tid, s.before = in_front; }
    __syncthreads();
}

// Among the ids up to the rank `last`, returns the rank of the last kept id. The kernel keeps the
// first top_k ids; or, with top_k = 0, the first ids whose mass reaches top_p of the total, at
// least one.
__device__ __forceinline__ Rank cut(const Logits& logits, Shared& s, Rank last, u32 top_k, float top_p) {
    const int tid = threadIdx.x;
    const Part all(0, logits.vocab);
    const auto weight = [&](Rank rank) { return top_k ? 1u : mass_of(rank); };
    u64 target = top_k, before = 0;   // ids in front of `first` weigh `before`
    Rank first = 0, end = ~Rank(0);   // the last kept rank is in [first, end)
    for (int shift = -1;;) {          // bins have 2^shift ranks, at first equal parts of scores
        s.count[tid] = s.low[tid] = s.high[tid] = 0;
        __syncthreads();
        logits.each_rank(all, last, [&](Rank rank) {
            if (rank < first || rank >= end) { return; }
            const float part = fminf(-score_of(rank) * BINS_PER_SCORE, BINS - 1);
            const int bin = shift < 0 ? (int)part : (int)((rank - first) >> shift);
            const u32 more = weight(rank), old = atomicAdd(&s.low[bin], more);
            if (old + more < old) { atomicAdd(&s.high[bin], 1u); }
            atomicAdd(&s.count[bin], 1u);
        });
        __syncthreads();
        find_crossing(s, before, target, shift < 0 && !top_k, top_p);
        const int bin = s.bin;
        if (bin < 0) { return last; }
        before = s.before;
        if (shift < 0) {
            const float part = 1.0f / BINS_PER_SCORE;
            if (bin < BINS - 1) { end = (Rank)__float_as_uint((bin + 1) * part) << 32; }
            first = (Rank)__float_as_uint(bin * part) << 32;
        } else {
            first += (Rank)bin << shift;
            end = min(end, first + (Rank(1) << shift));
        }
        if (s.count[bin] <= MOST) { break; }
        shift = max(0, 64 - __clzll(end - first - 1) - 10);
        __syncthreads();  // all threads have read s.count
    }
    logits.each_rank(all, last, [&](Rank rank) {
        if (rank >= first && rank < end) { s.ranks[atomicAdd(&s.collected, 1)] = rank; }
    });
    __syncthreads();
    Rank kept = 0;
    if (tid < s.collected) {
        for (int i = 0; i < s.collected; ++i) {
            if (s.ranks[i] < s.ranks[tid]) { before += weight(s.ranks[i]); }
        }
        if (before < target) { kept = s.ranks[tid]; }
    }
    return block_largest(kept, s.reduction);
}

__device__ __forceinline__ float noise(u32 seed, u64 high, u32 id) {
    const float uniform = random_bits(seed, high << 32 | id) * 0x1p-32f + 0x1p-33f;
    return -logf(-log1pf(-fminf(uniform, 1.0f - 0x1p-24f)));
}

extern "C" __global__ void __launch_bounds__(THREADS)
    sample_scan(float* __restrict__ stats, i64* __restrict__ largest, const T* rows,
                const float* __restrict__ repetition, const int* seen, int vocab, int padded_vocab,
                int parts) {
    start_next_kernel();
    __shared__ float numbers[32];
    __shared__ u64 reduction[32];
    wait_for_earlier_kernels();
    const int r = blockIdx.y;
    const Logits logits(rows, seen, repetition, r, vocab, padded_vocab);
    float top = -INFINITY, sum = 0.0f;
    u64 first = 0;
    bool wrong = false;
    logits.each(Part(vocab), [&](int id, float x, float l) {
        wrong |= !(x < INFINITY);
        if (x > top) {
            sum *= expf(top - x);
            top = x;
        }
        if (x > -INFINITY) { sum += expf(x - top); }
        const u64 own = largest_first(l, id);
        first = own > first ? own : first;
    });
    wrong = __syncthreads_or(wrong);
    const float most = block_max(top, numbers);
    sum = block_sum(top > -INFINITY ? sum * expf(top - most) : 0.0f, numbers);
    first = block_largest(first, reduction);
    if (threadIdx.x == 0) {
        const i64 at = (i64)r * parts + blockIdx.x;
        store_two(stats + 2 * at, wrong ? __uint_as_float(0x7FC00000u) : most, sum);
        largest[at] = first;
    }
}

// The largest number that any part of a row has found.
__device__ __forceinline__ u64 largest_of(const i64* found, int r, int parts) {
    u64 most = 0;
    for (int i = 0; i < parts; ++i) {
        const u64 other = found[(i64)r * parts + i];
        most = other > most ? other : most;
    }
    return most;
}
extern "C" __global__ void __launch_bounds__(THREADS)
    sample_cut(i64* __restrict__ last, const T* rows, const i64* largest,
               const float* __restrict__ temperature, const int* __restrict__ top_k,
               const float* __restrict__ top_p, const float* __restrict__ repetition,
               const int* seen, int vocab, int padded_vocab, int parts) {
    start_next_kernel();
    __shared__ Shared s;
    wait_for_earlier_kernels();
    const int r = blockIdx.x;
    const u64 first = largest_of(largest, r, parts);
    Rank kept = ~Rank(0);
    if (temperature[r] != 0.0f && number_of(first) > -INFINITY && number_of(first) < INFINITY) {
        Logits logits(rows, seen, repetition, r, vocab, padded_vocab);
        logits.scale(first, temperature[r]);
#pragma unroll 1  // one copy of the code
        for (int by_mass = 0; by_mass < 2; ++by_mass) {
            const u32 most = by_mass ? 0 : top_k[r];
            const float share = by_mass ? top_p[r] : 1.0f;
            if (most > 0 || share < 1.0f) { kept = cut(logits, s, kept, most, share); }
        }
    }
    if (threadIdx.x == 0) { last[r] = kept; }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    sample_draw(i64* __restrict__ found, const T* rows, const i64* largest, const i64* last,
                const float* __restrict__ temperature, const float* __restrict__ min_p,
                const float* __restrict__ repetition, const i64* __restrict__ seeds,
                const int* __restrict__ positions, const int* seen, int vocab, int padded_vocab,
                int parts) {
    start_next_kernel();
    __shared__ u64 reduction[32];
    wait_for_earlier_kernels();
    const int r = blockIdx.y;
    const u64 first = largest_of(largest, r, parts);
    u64 own = first;  // the result with temperature 0
    if (temperature[r] != 0.0f) {
        Logits logits(rows, seen, repetition, r, vocab, padded_vocab);
        logits.scale(first, temperature[r]);
        const u32 lower = (u64)seeds[r], upper = (u64)seeds[r] >> 32, position = positions[r];
        const u32 seed = mix_word(mix_word(mix_word(0, lower), upper), position);
        const u64 high = mix_word(mix_word(mix_word(0, position), upper), lower);
        const float least = fminf(min_p[r], 1.0f);
        float most = -INFINITY;
        own = 0;
        logits.each_rank(Part(vocab), last[r], [&](Rank rank) {
            const float q = score_of(rank);
            if (q + MOST_NOISE < most || expf(q) < least) { return; }
            const float x = q + noise(seed, high, (u32)rank);
            most = fmaxf(most, x);
            const u64 other = largest_first(x, (u32)rank);
            own = other > own ? other : own;
        });
        own = block_largest(own, reduction);
    }
    if (threadIdx.x == 0) { found[(i64)r * parts + blockIdx.x] = own; }
}

extern "C" __global__ void __launch_bounds__(32)
    sample_finish(int* __restrict__ tokens, float* __restrict__ logprobs, const T* rows,
                  const float* stats, const i64* found, int* seen, int rows_count, int vocab,
                  int padded_vocab, int parts) {
    start_next_kernel();
    wait_for_earlier_kernels();
    const int r = blockIdx.x * 32 + threadIdx.x;
    if (r >= rows_count) { return; }
    float top = -INFINITY, sum = 0.0f;
    bool wrong = false;
    for (int i = 0; i < parts; ++i) {
        const float2 part = load_two(stats + 2 * ((i64)r * parts + i));
        wrong |= !(part.x < INFINITY);
        const float most = fmaxf(top, part.x), base = most > -INFINITY ? most : 0.0f;
        sum = sum * expf(top - base) + part.y * expf(part.x - base);
        top = most;
    }
    if (wrong || top == -INFINITY) {
        tokens[r] = -1, logprobs[r] = __uint_as_float(0x7FC00000u);
        return;
    }
    const u32 token = ~(u32)largest_of(found, r, parts);
    tokens[r] = token;
    logprobs[r] = Logits::capped(rows[(i64)r * padded_vocab + token]) - (top + logf(sum));
    if (seen) {
        u32* bits = reinterpret_cast<u32*>(seen) + (i64)r * ((vocab + 31) / 32);
        bits[token / 32] |= 1u << token % 32;
    }
}
