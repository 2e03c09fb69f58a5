// distill.cu -- rows of logits learn from a teacher's largest probabilities: loss and gradient.
//
//   q = softmax(x / temperature), p = the teacher's; over k columns, and one for all other columns
//   kl = sum p log(p / q), or with reverse sum q log(q / p)
//   loss = mixture * (cross-entropy of the target) + (1 - mixture) * temperature^2 * kl
//   x = d loss / d x, in place
//   add: stats[index] += the sum of kl
//   top_k, for a teacher's logits: top[:k] = the columns v < vocab of the k largest x[v],
//   ascending, the first columns among equal logits; top[k:] = x of these columns - lse
//
// Data     declared in llmq/ops/loss/distill.py. Columns >= vocab are ignored on entry, and 0 on
//          return if there is a gradient. lse: at temperature 1. Negative targets are masked:
//          losses, kl and gradient 0. teacher: k columns as the bits of I32, and their
//          log-probabilities at temperature 1. Another temperature keeps the k columns' total
//          probability and divides it in proportion to p^(1 / temperature). The probability of the
//          other columns is 1 - sum p for the teacher, in F64, and a sum over them for q; both are
//          raised to at least 2^-30 before the logarithm.
// Launch   512 threads, one block for each row. add: 1024 threads, one block. top_k: 1024 threads,
//          one block for each row.
// Cost     a row is read three times and written once. top_k reads a row 33 times, mostly from the
//          cache, to find the k-th largest logit bit by bit.
// Needs    k <= 256; the teacher's columns distinct in each row that is not masked; target < vocab.
//          top_k: k <= vocab; NaN counts as the largest or the smallest logit.
#include "common.cuh"

constexpr int THREADS = 512, MOST = 256, TOLD_THREADS = 1024;
constexpr float LEAST = 1.0f / (1 << 30);  // least probability of the other columns, for logarithms

// The gradient of a column outside the teacher's: the factors of its two exponentials, at
// temperature 1 and at `temperature`.
struct Dense {
    float max, own, soft, inverse;

    __device__ __forceinline__ float at(float x) const {
        return own * expf(x - max) + soft * expf((x - max) * inverse);
    }
};

extern "C" __global__ void __launch_bounds__(THREADS)
distill(T* __restrict__ logits, f32* __restrict__ losses, f32* __restrict__ lse,
        f32* __restrict__ kl, const i32* __restrict__ targets, const f32* __restrict__ teacher,
        i64 rows, i32 vocab, i32 padded_vocab, i32 k, i32 reverse, i32 gradient, f32 mixture,
        f32 temperature) {
    __shared__ float shared[32];
    __shared__ f64 shared64[32];
    __shared__ int ids[MOST];
    const i64 r = blockIdx.x;
    T* const row = logits + r * padded_vocab;
    const int t = threadIdx.x, target = targets[r];
    const float inverse = 1.0f / temperature;

    float most = -INFINITY;
    for (int v = t; v < vocab; v += THREADS) { most = fmaxf(most, to_f32(row[v])); }
    const float max = block_max(most, shared);

    // Thread t has the teacher's column t. The teacher's columns are -infinity in the row while the
    // kernel adds up the other columns: 1 minus the teacher's columns would cancel digits.
    const f32* const of_row = teacher + r * 2 * k;
    const bool has = t < k;
    const int id = has ? __float_as_int(of_row[t]) : 0;
    const T kept = row[id];
    const float x_id = to_f32(kept), teacher_logprob = has ? of_row[k + t] : 0.0f;
    const float x_target = target < 0 ? 0.0f : to_f32(row[target]);
    if (has) { ids[t] = id; }
    __syncthreads();
    bool counts = has;  // without a teacher all k columns are column 0, which counts once
    for (int i = 0; has && i < t; ++i) { counts &= ids[i] != id; }
    if (has) { row[id] = from_f32<T>(-INFINITY); }
    __syncthreads();
    float sum = 0.0f, soft_others = 0.0f;
    for (int v = t; v < vocab; v += THREADS) {
        const float x = to_f32(row[v]) - max;
        sum += expf(x);
        soft_others += expf(x * inverse);
    }
    sum = block_sum(sum + (counts ? expf(x_id - max) : 0.0f), shared);
    soft_others = block_sum(soft_others, shared);
    const float teacher_columns = block_sum(counts ? expf((x_id - max) * inverse) : 0.0f, shared);
    const float soft_sum = soft_others + teacher_columns;
    const float own_lse = max + logf(sum), soft_lse = max * inverse + logf(soft_sum);
    if (has) { row[id] = kept; }

    const f64 mass = block_sum(has ? exp((f64)teacher_logprob) : 0.0, shared64);
    const float softened = block_sum(has ? expf(teacher_logprob * inverse) : 0.0f, shared);
    const float rest = fmaxf((float)(1.0 - mass), LEAST);
    const float log_p = teacher_logprob * inverse - logf(softened) + logf(1.0f - rest);
    const float p = expf(log_p);
    const float log_q = x_id * inverse - soft_lse, q = expf(log_q);
    const float q_rest = fmaxf(soft_others / soft_sum, LEAST);
    const float log_ratio = logf(q_rest / rest);
    const float part = reverse ? q * (log_q - log_p) : p * (log_p - log_q);
    const float divergence = block_sum(has ? part : 0.0f, shared) +
                             (reverse ? q_rest * log_ratio : -rest * log_ratio);
    if (t == 0) {
        const float ce = own_lse - x_target, soft = (1.0f - mixture) * temperature * temperature;
        lse[r] = own_lse;
        kl[r] = target < 0 ? 0.0f : divergence;
        losses[r] = target < 0 ? 0.0f : mixture * ce + soft * divergence;
    }
    if (!gradient) { return; }
    const float scale = (1.0f - mixture) * temperature;
    const float outside = reverse ? log_ratio - divergence : 1.0f - rest / q_rest;
    const Dense dense{max, mixture / sum, scale * outside / soft_sum, inverse};
    __syncthreads();  // all threads have read the row
    for (int v = t; v < padded_vocab; v += THREADS) {
        const float d = v < vocab && target >= 0 ? dense.at(to_f32(row[v])) : 0.0f;
        row[v] = from_f32<T>(v == target ? d - mixture : d);
    }
    __syncthreads();
    if (has && target >= 0) {
        const float inside = reverse ? q * (log_q - log_p - divergence) : q - p;
        const float hit = id == target ? mixture : 0.0f;
        row[id] = from_f32<T>(mixture * expf(x_id - own_lse) + scale * inside - hit);
    }
}

extern "C" __global__ void __launch_bounds__(1024)
distill_add(f64* __restrict__ stats, const f32* __restrict__ kl, i64 rows, i32 index) {
    __shared__ f64 shared[32];
    f64 sum = 0.0;
    for (i64 i = threadIdx.x; i < rows; i += 1024) { sum += kl[i]; }
    sum = block_sum(sum, shared);
    if (threadIdx.x == 0) { stats[index] += sum; }
}

// Maps floats to unsigned numbers in the same order.
__device__ __forceinline__ u32 key(T x) {
    const u32 bits = __float_as_uint(to_f32(x));
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

extern "C" __global__ void __launch_bounds__(TOLD_THREADS)
top_k(f32* __restrict__ top, const T* __restrict__ logits, const f32* __restrict__ lse, i64 rows,
      i32 vocab, i32 padded_vocab, i32 k) {
    __shared__ int shared[32], greater[TOLD_THREADS], equal[TOLD_THREADS];
    const T* const row = logits + blockIdx.x * (i64)padded_vocab;
    const int t = threadIdx.x;
    u32 low = 0, high = 0xFFFFFFFFu;  // at least k keys are >= low, fewer than k are >= high
    while (high - low > 1) {
        const u32 middle = low + (high - low) / 2;
        int count = 0;
        for (int v = t; v < vocab; v += TOLD_THREADS) { count += key(row[v]) >= middle; }
        (block_sum(count, shared) >= k ? low : high) = middle;
    }
    // Each thread has a range of neighbouring columns, in the order of the threads.
    const int each = (vocab + TOLD_THREADS - 1) / TOLD_THREADS, first = t * each;
    const int last = min(first + each, vocab);
    int own_greater = 0, own_equal = 0;
    for (int v = first; v < last; ++v) {
        const u32 x = key(row[v]);
        own_greater += x > low;
        own_equal += x == low;
    }
    greater[t] = own_greater;
    equal[t] = own_equal;
    __syncthreads();
    for (int step = 1; step < TOLD_THREADS; step *= 2) {
        const int more = t >= step ? greater[t - step] : 0, same = t >= step ? equal[t - step] : 0;
        __syncthreads();
        greater[t] += more;
        equal[t] += same;
        __syncthreads();
    }
    const int room = k - greater[TOLD_THREADS - 1];  // places for columns equal to the k-th
    int before = greater[t] - own_greater, alike = equal[t] - own_equal;
    for (int v = first; v < last; ++v) {
        const u32 x = key(row[v]);
        if (x > low || (x == low && alike < room)) {
            const i64 place = blockIdx.x * (i64)(2 * k) + before + min(alike, room);
            top[place] = __int_as_float(v);
            top[place + k] = to_f32(row[v]) - lse[blockIdx.x];
        }
        before += x > low;
        alike += x == low;
    }
}
