// labels.cu -- rows of a score head's logits: the loss of each row's label, and its gradient.
//
//   linear    loss = -x[label]                  x = -weight at the label, else 0
//   else      loss = log sum exp(x) - x[label]  x = weight (softmax(x) - 1 at the label)
//             hits = 1 where the label's column is the first of the largest
//
// Data     declared in llmq/ops/loss/labels.py. Columns >= vocab are ignored on entry, and 0 on
//          return if there is a gradient. Negative targets are masked: all results of the row are
//          0. With linear, lse and hits are 0.
// Launch   256 threads, one warp for each row.
// Cost     a row is read twice and written once.
// Needs    target < vocab.
#include "common.cuh"

constexpr int WARPS = 8;

extern "C" __global__ void __launch_bounds__(32 * WARPS)
labels(T* __restrict__ logits, f32* __restrict__ losses, f32* __restrict__ lse,
       f32* __restrict__ hits, const i32* __restrict__ targets, const f32* __restrict__ weights,
       i64 rows, i32 vocab, i32 padded_vocab, i32 linear, i32 gradient) {
    const int lane = threadIdx.x & 31;
    const i64 r = blockIdx.x * (i64)WARPS + threadIdx.x / 32;
    if (r >= rows) { return; }
    T* const row = logits + r * padded_vocab;
    const int target = targets[r];
    const bool counts = target >= 0;
    const float own = counts ? to_f32(row[target]) : 0.0f;

    float most = -INFINITY, sum = 0.0f, before = 0.0f;  // before: columns ranked above the label
    for (int v = lane; v < vocab; v += 32) {
        const float x = to_f32(row[v]);
        before += x > own || (x == own && v < target);
        most = fmaxf(most, x);
    }
    most = warp_max(most);
    before = warp_sum(before);
    for (int v = lane; v < vocab; v += 32) { sum += expf(to_f32(row[v]) - most); }
    const float of_row = most + logf(warp_sum(sum));

    if (gradient) {
        const float weight = counts ? (weights ? weights[r] : 1.0f) : 0.0f;
        for (int v = lane; v < padded_vocab; v += 32) {
            const bool inside = counts && v < vocab;
            const float p = inside && !linear ? expf(to_f32(row[v]) - of_row) : 0.0f;
            row[v] = from_f32<T>(inside ? weight * (p - (v == target)) : 0.0f);
        }
    }
    if (lane == 0) {
        losses[r] = !counts ? 0.0f : linear ? -own : of_row - own;
        lse[r] = counts && !linear ? of_row : 0.0f;
        hits[r] = counts && !linear && before == 0.0f;
    }
}
