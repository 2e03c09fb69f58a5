// mtp.cu -- inputs and statistics of a head for multi-token prediction.
//
//   shift    tokens and targets of the next position; target -100 at a document's last position
//   stats    stats[0] += k * mean loss of the head, stats[1] += k * mean of min(1, q / p), where k
//            is the number of the trunk's targets, p and q a target's probability by trunk and head
//
// Data     declared in llmq/ops/loss/mtp.py. starts: first position of each token's document in its
//          row, or null. Negative targets are masked. trunk: the trunk's losses; position i + 1 of
//          the trunk has the same target as position i of the head.
// Launch   shift: 256 threads, a position each. stats: one block of 1024.
// Cost     each array read once; microseconds in each micro-step.
// Needs    starts ascend along each row; stats: the head's last target is masked.
#include "common.cuh"

extern "C" __global__ void __launch_bounds__(256)
mtp_shift(i32* __restrict__ tokens, i32* __restrict__ targets, const i32* __restrict__ of_tokens,
          const i32* __restrict__ of_targets, const i32* __restrict__ starts, i64 n, i32 seq_len) {
    const i64 i = (i64)blockIdx.x * 256 + threadIdx.x;
    if (i >= n) { return; }
    const bool last = i % seq_len == seq_len - 1 || (starts && starts[i + 1] != starts[i]);
    tokens[i] = of_tokens[last ? i : i + 1];
    targets[i] = last ? -100 : of_targets[i + 1];
}

extern "C" __global__ void __launch_bounds__(1024)
mtp_stats(f64* __restrict__ stats, const f32* __restrict__ losses, const f32* __restrict__ trunk,
          const i32* __restrict__ targets, const i32* __restrict__ of_targets, i64 n, i64 every) {
    __shared__ f64 shared[32];
    f64 loss = 0.0, accepted = 0.0, count = 0.0, times = 0.0;
    for (i64 i = threadIdx.x; i < every; i += 1024) { times += of_targets[i] >= 0 ? 1.0 : 0.0; }
    for (i64 i = threadIdx.x; i < n; i += 1024) {
        if (targets[i] < 0) { continue; }
        loss += losses[i];
        accepted += expf(fminf(trunk[i + 1] - losses[i], 0.0f));
        count += 1.0;
    }
    loss = block_sum(loss, shared);
    accepted = block_sum(accepted, shared);
    count = block_sum(count, shared);
    times = block_sum(times, shared);
    if (threadIdx.x == 0 && count > 0.0) {
        stats[0] += times / count * loss;
        stats[1] += times / count * accepted;
    }
}
