// exp_rows.cu -- what rows of exponentials of logits need beside them to be a gradient.
//
//   shift     = x @ weight[target] + margin           of a masked row: with column 0
//   sum       = the sum of the row's sums              lse = shift + log sum
//   loss      = lse - target_logit                     0 of masked rows
//   share     = (1 + z_loss * lse) / sum
//   e[target] = exp(target_logit - shift) - 1 / share
//   factor    = share * weight                         0 of masked rows
//   x         = x * factor                             with SCALED = 1
//
// So that factor * e is the gradient of the row's logits, which stands in no memory: the rows of the
// gradient of x are multiplied by factor afterwards (exp_rows_scale), those of x, for the gradient of
// weight, before.
//
// A sum above `limit`, or below 1 / limit, says that the row's exponentials are too large or too small
// for bf16 and F32, or nearly so: its block computes the row's gradient again, from its logits, and
// its factor is its weight or 0.
//
// Data     e: bf16 (rows, columns), as matmul_exp.cuh writes it. losses, lse, factors, shift,
//          target_logits: F32 (rows). sums: F32 (tiles, rows). x, d: bf16 (rows, K). weight: bf16
//          (columns, K). targets: I32 (rows); negative: masked. weights: F32 (rows), with
//          WEIGHTED = 1; else all are 1.
// Launch   shift: 256 threads, a warp for each row. finish: 256 threads, a block for 32 rows. scale:
//          256 threads, a warp for each row.
// Cost     shift reads x and as many rows of weight; finish sums, and with SCALED = 1 reads and
//          writes x. A row that is computed again reads all of weight.
// Needs    K % 8 == 0, columns % 8 == 0, target < vocab <= columns.
#include "common.cuh"
#include "ptx.cuh"
#include "row_weights.cuh"

constexpr int THREADS = 256, ROW_WARPS = THREADS / 32, BLOCK_ROWS = 32;
// Of 1 + z_loss * lse, which it is divided by: less changes the gradient by less than it is rounded.
constexpr float LEAST = 0x1p-20f;

// Of bf16 vectors of K elements: all lanes of a warp get it.
__device__ __forceinline__ float dot(const bf16* x, const bf16* y, int K) {
    float sum = 0.0f;
    for (int i = threadIdx.x % 32 * 8; i < K; i += 32 * 8) {
        const Vec<bf16> a = load_vec(x + i), b = load_vec(y + i);
#pragma unroll
        for (int k = 0; k < 8; ++k) { sum = fmaf(to_f32(a[k]), to_f32(b[k]), sum); }
    }
    return warp_sum(sum);
}

// x *= factor, by a warp.
__device__ __forceinline__ void scale_row(bf16* x, float factor, int K) {
    for (int i = threadIdx.x % 32 * 8; i < K; i += 32 * 8) {
        Vec<bf16> y = load_vec(x + i);
#pragma unroll
        for (int k = 0; k < 8; k += 2) {
            y.set_two(k, to_f32(y[k]) * factor, to_f32(y[k + 1]) * factor);
        }
        store_vec(x + i, y);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
exp_rows_shift(f32* __restrict__ shift, const bf16* __restrict__ x, const bf16* __restrict__ weight,
               const i32* __restrict__ targets, i32 rows, i32 K, f32 margin) {
    const int row = blockIdx.x * ROW_WARPS + threadIdx.x / 32;
    if (row >= rows) { return; }
    const float logit = dot(x + (i64)row * K, weight + (i64)max(targets[row], 0) * K, K);
    if (threadIdx.x % 32 == 0) { shift[row] = logit + margin; }
}

extern "C" __global__ void __launch_bounds__(THREADS)
exp_rows_scale(bf16* __restrict__ d, const f32* __restrict__ factors, i32 rows, i32 K) {
    const int row = blockIdx.x * ROW_WARPS + threadIdx.x / 32;
    if (row < rows) { scale_row(d + (i64)row * K, factors[row], K); }
}

#ifndef SCALED  // compiled for another entry
#define SCALED 0
#endif

// A row's loss, and its gradient in place of e, from its logits: by all threads of a block, which get
// the log-sum-exp. loss: by the first one.
__device__ __forceinline__ float row_again(bf16* e, float* loss, const bf16* x, const bf16* weight,
                                           int target, int columns, int vocab, int K, float z_loss) {
    __shared__ float shared[32];
    const int warp = threadIdx.x / 32;
    float most = -INFINITY;
    for (int v = warp; v < vocab; v += ROW_WARPS) {
        const bf16 logit = __float2bfloat16(dot(x, weight + (i64)v * K, K));
        most = fmaxf(most, to_f32(logit));
        if (threadIdx.x % 32 == 0) { e[v] = logit; }
    }
    most = block_max(most, shared);  // behind its barriers all logits are seen
    float sum = 0.0f;
    for (int v = threadIdx.x; v < vocab; v += THREADS) {
        sum += exp2_approx((to_f32(e[v]) - most) * LOG2E);
    }
    sum = block_sum(sum, shared);
    const float lse = most + logf(sum), share = (1.0f + z_loss * lse) / sum;
    if (threadIdx.x == 0) { *loss = target < 0 ? 0.0f : lse - to_f32(e[target]); }
    __syncthreads();
    for (int v = threadIdx.x; v < columns; v += THREADS) {
        float d = 0.0f;
        if (target >= 0 && v < vocab) {
            d = exp2_approx((to_f32(e[v]) - most) * LOG2E) * share - (v == target ? 1.0f : 0.0f);
        }
        e[v] = __float2bfloat16(d);
    }
    return lse;
}

extern "C" __global__ void __launch_bounds__(THREADS, 4)
exp_rows_finish(bf16* e, bf16* x, f32* __restrict__ losses, f32* __restrict__ lse,
                f32* __restrict__ factors, const f32* __restrict__ sums,
                const f32* __restrict__ shift, const f32* __restrict__ target_logits,
                const bf16* __restrict__ weight, const i32* __restrict__ targets, i32 rows,
                i32 columns, i32 vocab, i32 K, i32 tiles, f32 z_loss, f32 limit WEIGHTS_ARG) {
    __shared__ float parts[ROW_WARPS][BLOCK_ROWS], found[BLOCK_ROWS];
    const int first = blockIdx.x * BLOCK_ROWS, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float part = 0.0f;
    if (first + lane < rows) {
#pragma unroll 4
        for (int t = warp; t < tiles; t += ROW_WARPS) { part += sums[(i64)t * rows + first + lane]; }
    }
    parts[warp][lane] = part;
    __syncthreads();
    if (warp == 0 && first + lane < rows) {
        const int row = first + lane, target = targets[row];
        float sum = 0.0f, factor = 0.0f;
#pragma unroll
        for (int w = 0; w < ROW_WARPS; ++w) { sum += parts[w][lane]; }
        const bool again = sum > limit || sum < 1.0f / limit;  // not of a NaN
        const float row_lse = shift[row] + logf(sum);
        float loss = 0.0f;
        if (target >= 0 && !again) {
            const float logit = target_logits[row], share = 1.0f + z_loss * row_lse;
            factor = (fabsf(share) < LEAST ? copysignf(LEAST, share) : share) / sum;
            const float onehot = 1.0f / factor;
            loss = row_lse - logit;
            const float own = exp2_approx(fmaf(logit, LOG2E, -shift[row] * LOG2E));
            e[(i64)row * columns + target] = __float2bfloat16(own - onehot);
            factor *= WEIGHT_OF(row);
        } else if (target >= 0) {
            factor = WEIGHT_OF(row);
        }
        losses[row] = loss, lse[row] = row_lse, factors[row] = factor;
        found[lane] = again ? INFINITY : factor;
    }
    __syncthreads();
    const int count = min(BLOCK_ROWS, rows - first);
    for (int i = 0; i < count; ++i) {
        if (found[i] != INFINITY) { continue; }
        const i64 row = first + i;
        const float row_lse = row_again(e + row * columns, losses + row, x + row * K, weight,
                                        targets[row], columns, vocab, K, z_loss);
        if (threadIdx.x == 0) { lse[row] = row_lse, found[i] = targets[row] < 0 ? 0.0f : WEIGHT_OF(row); }
        __syncthreads();
    }
    if constexpr (SCALED) {
        for (int i = warp; i < count; i += ROW_WARPS) {
            scale_row(x + (i64)(first + i) * K, found[i], K);
        }
    }
}
