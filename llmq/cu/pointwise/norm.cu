// norm.cu -- RMSNorm and LayerNorm (CENTRED = 1) over the channels, alone and fused with the
// residual addition before or after it.
//
//   forward    centre = mean(x), 0 in RMSNorm        rstd = 1 / sqrt(mean((x - centre)^2) + eps)
//              RMSNorm: out = T(T(rstd * x) * weight)
//              LayerNorm: out = T((x - mean) * rstd * weight + bias)
//   residual   x = T(residual + branch) is the norm's input, and is written too
//   post       out = T(residual + T(rstd * x * weight)), or T(rstd * x * weight) if residual is
//              null; RMSNorm only
//   backward   x_hat = (x - centre) * rstd           d_norm = d_out * weight
//              d_x = rstd * (d_norm - mean(d_norm) - x_hat * mean(d_norm * x_hat)) + d_residual,
//              without mean(d_norm) in RMSNorm
//              d_weight = sum over rows of d_out * x_hat        d_bias = sum over rows of d_out
//
//   OFFSET = 1, RMSNorm only: 1 + weight (F32) takes the place of weight everywhere, and forward
//   rounds once, T(rstd * x * (1 + weight)). ROUND_ONCE = 1: forward rounds once without OFFSET.
//
// Data     declared in llmq/ops/pointwise/norm.py. partial: each block's sums for d_weight, then
//          d_bias; null with SUMS = 0. abs_max, with ABS_MAX = 1: raised to the largest |out| in
//          forward, |d_x| in backward. codes, with CODES = 1: FP8 codes of out or d_x (fp8.cuh).
//          OUT = 0: no out.
// Launch   a row lives in the registers of WARPS warps, VECTORS 16-byte vectors in each lane.
//          Blocks of WARPS warps, but at least 4, which then work on several rows at a time, loop
//          over the rows. Any grid.
// Cost     each tensor is read or written once, parameters and partial once a block; memory-bound.
// Needs    residual_out (in post: out) may be residual and d_x may be d_residual: a thread reads
//          the elements before it overwrites them. All other tensors are distinct.
#include "common.cuh"
#include "fp8.cuh"
#include "ptx.cuh"

#ifndef ROUND_ONCE
#define ROUND_ONCE 0
#endif

constexpr int N = Vec<T>::N;
constexpr int ROWS = block_rows(WARPS, 4), THREADS = 32 * WARPS * ROWS;  // per block
constexpr int SM_THREADS = 512;  // least number of threads on an SM, for enough loads in flight
// LayerNorm's norm_forward has one load in flight for each vector. So it runs the largest number of
// threads whose registers do not spill.
constexpr int PLAIN_SM_THREADS = !CENTRED || CODES || VECTORS > 3 ? SM_THREADS
                                 : VECTORS == 3                   ? (ABS_MAX ? 896 : 1024)
                                 : ABS_MAX                        ? 1152
                                                                  : 1280;
// With codes a lane holds more values, so that the registers suffice for fewer threads.
constexpr bool CROWDED = CODES && VECTORS >= (CENTRED ? 3 : 4);
constexpr int BACKWARD_SM_THREADS = CROWDED ? 384 : SM_THREADS;
using Registers = Row<T, WARPS, VECTORS>;
using Sum = RowSum<WARPS, WARPS * ROWS>;
using Emitter = Fp8Rows<Q, CODES>;
template <bool HELD> using Parameter = RowParameter<T, WARPS, VECTORS, HELD>;

// Factors that elements k and k + 1 are multiplied by.
__device__ __forceinline__ float2 factors(const Vec<T>& weight, int k) {
    const float2 w = weight.two(k);
    return OFFSET ? make_float2(1.0f + w.x, 1.0f + w.y) : w;
}

__device__ __forceinline__ float2 centred(const Vec<T>& x, int k, float centre) {
    const float2 two = x.two(k);
    return CENTRED ? make_float2(two.x - centre, two.y - centre) : two;
}

// centre = the mean of the row in x (LayerNorm) or 0; scale = 1 / sqrt(variance + eps).
__device__ __forceinline__ void statistics(float& centre, float& scale, Registers& x, f32 eps,
                                           i32 C, Sum& row_sum) {
    float sum = 0.0f, squares = 0.0f;
    centre = 0.0f;
    if constexpr (CENTRED) {
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
#pragma unroll
            for (int k = 0; k < N; k += 2) {
                const float2 two = x.v[i].two(k);
                sum += two.x;
                sum += two.y;
            }
        }
        forget(x);
        centre = row_sum(sum) / (float)C;
    }
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        if (CENTRED && Registers::column(i) >= C) { continue; }
#pragma unroll
        for (int k = 0; k < N; k += 2) {
            const float2 two = centred(x.v[i], k, centre);
            squares = fmaf(two.x, two.x, squares);
            squares = fmaf(two.y, two.y, squares);
        }
    }
    forget(x);
    scale = 1.0f / sqrtf(row_sum(squares) / (float)C + eps);
}

// Position of the residual addition.
enum Addition { NONE, BEFORE, AFTER };

// One block's part of a forward pass. added: BEFORE: the branch, which is added to x, with the sum
// going to residual_out; AFTER: the residual, which is added to the norm's result, or null. HELD:
// parameters stay in registers.
template <Addition ADDITION, bool HELD>
__device__ __forceinline__ void forward(T* residual_out, T* out, f32* mean, f32* rstd, const T* x,
                                        const T* added, const T* weight, const T* bias, f32 eps,
                                        i64 rows, i32 C, f32* abs_max, Q* codes,
                                        const f32* fp8_scale, i32* saturated) {
    __shared__ float shared[2 * WARPS * ROWS];
    Sum row_sum{shared};
    Emitter fp8(codes, fp8_scale, C);
    u32 largest = 0;
    Parameter<HELD> w(weight, C);
    Parameter<HELD && CENTRED> b(bias, C);
    Registers values, past;
    for (i64 first = (i64)blockIdx.x * ROWS; first < rows; first += (i64)gridDim.x * ROWS) {
        const i64 row = first + threadIdx.x / (32 * WARPS);
        const bool active = row < rows;
        values.load(x + row * C, C, active);
        if constexpr (ADDITION == BEFORE) {
            past.load(added + row * C, C, active);
#pragma unroll
            for (int i = 0; i < VECTORS; ++i) {
#pragma unroll
                for (int k = 0; k < N; k += 2) {
                    const float2 a = values.v[i].two(k), b = past.v[i].two(k);
                    values.v[i].set_two(k, a.x + b.x, a.y + b.y);
                }
            }
            values.store(residual_out + row * C, C, active);
        }
        if constexpr (ADDITION == AFTER) {
            past.load(added + row * C, C, active && added != nullptr);
        }
        float centre, scale;
        statistics(centre, scale, values, eps, C, row_sum);
        if (active && Registers::column(0) == 0) {
            if constexpr (CENTRED) { mean[row] = centre; }
            rstd[row] = scale;
        }
        Registers result;
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            const Vec<T>& w_i = w.vector(i);
            if constexpr (CENTRED) {
                const Vec<T>& b_i = b.vector(i);
#pragma unroll
                for (int k = 0; k < N; k += 2) {
                    const float2 x = centred(values.v[i], k, centre);
                    const float2 f = w_i.two(k), b = b_i.two(k);
                    result.v[i].set_two(k, x.x * scale * f.x + b.x, x.y * scale * f.y + b.y);
                }
            } else {
                Vec<T> normed;
#pragma unroll
                for (int k = 0; k < N; k += 2) {
                    const float2 x = values.v[i].two(k);
                    if constexpr (ADDITION == AFTER || OFFSET || ROUND_ONCE) {
                        const float2 f = factors(w_i, k);
                        normed.set_two(k, x.x * scale * f.x, x.y * scale * f.y);
                    } else {
                        normed.set_two(k, x.x * scale, x.y * scale);
                        normed.set_products(k, normed, w_i);
                    }
                    if constexpr (ADDITION == AFTER) {
                        const float2 before = past.v[i].two(k), y = normed.two(k);
                        normed.set_two(k, before.x + y.x, before.y + y.y);
                    }
                }
                result.v[i] = normed;
            }
        }
        w.forget_all();
        b.forget_all();
        if constexpr (OUT) { result.store(out + row * C, C, active); }
        largest = max(largest, fp8.emit(result, row, active));
    }
    finish_abs_max<ABS_MAX>(abs_max, largest);
    fp8.finish(saturated);
}

extern "C" __global__ void __launch_bounds__(THREADS, PLAIN_SM_THREADS / THREADS)
norm_forward(T* __restrict__ out, f32* __restrict__ mean, f32* __restrict__ rstd,
             const T* __restrict__ x, const T* __restrict__ weight, const T* __restrict__ bias,
             f32 eps, i64 rows, i32 C, f32* abs_max, Q* __restrict__ codes,
             const f32* __restrict__ scale, i32* saturated) {
    start_next_kernel();
    wait_for_earlier_kernels();
    forward<NONE, !CENTRED && !CODES>(nullptr, out, mean, rstd, x, nullptr, weight, bias, eps, rows,
                                      C, abs_max, codes, scale, saturated);
}

extern "C" __global__ void __launch_bounds__(THREADS, SM_THREADS / THREADS)
norm_forward_residual(T* residual_out, T* __restrict__ out, f32* __restrict__ mean,
                      f32* __restrict__ rstd, const T* residual, const T* __restrict__ branch,
                      const T* __restrict__ weight, const T* __restrict__ bias, f32 eps, i64 rows,
                      i32 C, f32* abs_max, Q* __restrict__ codes, const f32* __restrict__ scale,
                      i32* saturated) {
    start_next_kernel();
    wait_for_earlier_kernels();
    forward<BEFORE, !CODES>(residual_out, out, mean, rstd, residual, branch, weight, bias, eps,
                            rows, C, abs_max, codes, scale, saturated);
}

extern "C" __global__ void __launch_bounds__(THREADS, SM_THREADS / THREADS)
norm_post(T* out, f32* __restrict__ rstd, const T* __restrict__ x, const T* residual,
          const T* __restrict__ weight, f32 eps, i64 rows, i32 C, f32* abs_max,
          Q* __restrict__ codes, const f32* __restrict__ scale, i32* saturated) {
    start_next_kernel();
    wait_for_earlier_kernels();
#if !CENTRED
    forward<AFTER, !CODES>(nullptr, out, nullptr, rstd, x, residual, weight, nullptr, eps, rows, C,
                           abs_max, codes, scale, saturated);
#endif
}

extern "C" __global__ void
__launch_bounds__(THREADS, BACKWARD_SM_THREADS / THREADS)
norm_backward(T* d_x, f32* __restrict__ partial, const T* __restrict__ d_out,
              const T* __restrict__ x, const T* __restrict__ weight, const f32* __restrict__ mean,
              const f32* __restrict__ rstd, const T* d_residual, i64 rows, i32 C, f32* abs_max,
              Q* __restrict__ codes, const f32* __restrict__ fp8_scale, i32* saturated) {
    __shared__ float shared[2 * WARPS * ROWS];
    __shared__ float column_sums[ROWS > 1 ? 32 * WARPS * VECTORS * N : 1];
    Sum row_sum{shared};
    Emitter fp8(codes, fp8_scale, C);
    u32 largest = 0;
    float d_weight[VECTORS][N] = {}, d_bias[VECTORS][N] = {};  // of this thread's columns
    Parameter<!CODES> w(weight, C);
    for (i64 first = (i64)blockIdx.x * ROWS; first < rows; first += (i64)gridDim.x * ROWS) {
        const i64 row = first + threadIdx.x / (32 * WARPS);
        const bool active = row < rows;
        Registers grad, values, past;
        grad.load(d_out + row * C, C, active);
        values.load(x + row * C, C, active);
        past.load(d_residual + row * C, C, active && d_residual != nullptr);
        const float centre = CENTRED && active ? mean[row] : 0.0f;
        const float scale = active ? rstd[row] : 0.0f;
        float sum = 0.0f, dot = 0.0f;
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            const Vec<T>& w_i = w.vector(i);
#pragma unroll
            for (int k = 0; k < N; k += 2) {
                const float2 gs = grad.v[i].two(k), fs = factors(w_i, k);
                const float2 xs = centred(values.v[i], k, centre);
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    const float g = j ? gs.y : gs.x, f = j ? fs.y : fs.x, x = j ? xs.y : xs.x;
                    if constexpr (CENTRED) {
                        const float weighted = g * f, x_hat = x * scale;
                        sum += weighted;
                        dot = fmaf(weighted, x_hat, dot);
                        if constexpr (SUMS) {
                            d_weight[i][k + j] = fmaf(g, x_hat, d_weight[i][k + j]);
                            d_bias[i][k + j] += g;
                        }
                    } else {
                        const float product = g * x;
                        dot = fmaf(product, f, dot);
                        if constexpr (SUMS) {
                            d_weight[i][k + j] = fmaf(product, scale, d_weight[i][k + j]);
                        }
                    }
                }
            }
        }
        forget(grad);
        forget(values);
        forget(past);
        w.forget_all();
        const float offset = CENTRED ? row_sum(sum) / (float)C : 0.0f;
        const float slope = CENTRED ? row_sum(dot) / (float)C
                                    : row_sum(dot) * (scale * scale * scale / (float)C);
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            const Vec<T>& w_i = w.vector(i);
#pragma unroll
            for (int k = 0; k < N; k += 2) {
                const float2 gs = grad.v[i].two(k), fs = factors(w_i, k);
                const float2 xs = centred(values.v[i], k, centre), before = past.v[i].two(k);
                float d[2];
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    const float weighted = j ? gs.y * fs.y : gs.x * fs.x, x = j ? xs.y : xs.x;
                    const float added = j ? before.y : before.x;
                    if constexpr (CENTRED) {
                        d[j] = (weighted - offset - x * scale * slope) * scale + added;
                    } else {
                        d[j] = weighted * scale + added - x * slope;
                    }
                }
                grad.v[i].set_two(k, d[0], d[1]);
            }
            w.forget_vector(i);
        }
        grad.store(d_x + row * C, C, active);
        largest = max(largest, fp8.emit(grad, row, active));
    }
    finish_abs_max<ABS_MAX>(abs_max, largest);
    fp8.finish(saturated);
    if constexpr (!SUMS) { return; }
    float* sums = partial + (i64)blockIdx.x * C;
    sum_block_rows<T, WARPS, VECTORS, ROWS>(sums, C, d_weight, column_sums);
    if constexpr (CENTRED) {
        __syncthreads();  // the next iteration overwrites column_sums
        sums += (i64)gridDim.x * C;
        sum_block_rows<T, WARPS, VECTORS, ROWS>(sums, C, d_bias, column_sums);
    }
}
