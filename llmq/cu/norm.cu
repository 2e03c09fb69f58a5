// norm.cu -- RMSNorm and LayerNorm (CENTRED = 1) over the channels, alone and fused with the
// residual addition before or after it.
//
//   forward    centre = mean(x), 0 in RMSNorm        rstd = 1 / sqrt(mean((x - centre)^2) + eps)
//              RMSNorm: out = T(T(rstd * x) * weight)
//              LayerNorm: out = T((x - mean) * rstd * weight + bias)
//   residual   x = T(residual + branch) is written too, and is what the norm sees
//   post       out = T(residual + T(rstd * x * weight)), or T(rstd * x * weight) if residual is
//              null; of RMSNorm alone
//   backward   x_hat = (x - centre) * rstd           d_norm = d_out * weight
//              d_x = rstd * (d_norm - mean(d_norm) - x_hat * mean(d_norm * x_hat)) + d_residual,
//              without mean(d_norm) in RMSNorm
//              d_weight = sum over rows of d_out * x_hat        d_bias = sum over rows of d_out
//
//   OFFSET = 1, of RMSNorm: 1 + weight (F32) takes the place of weight everywhere, and forward
//   rounds as post does, T(rstd * x * (1 + weight)).
//
// Data     rows of C elements of T (f32, bf16), contiguous, 16-byte aligned, C % 8 == 0; mean and
//          rstd F32. mean and bias are LayerNorm's, else not touched, may be null. partial: F32
//          (1 + CENTRED, gridDim.x, C), sums of a block for d_weight, then d_bias; with SUMS = 0
//          none are made, may be null. abs_max: F32
//          (1), with ABS_MAX = 1 raised to the largest |out|, |d_x|, as stored; else not touched,
//          may be null. codes: with CODES = 1 (rows, C), out, d_x as FP8 (fp8.cuh), C % 16 == 0.
//          OUT = 0: no out.
// Launch   a row lives in the registers of WARPS warps, VECTORS 16-byte vectors in each lane.
//          Blocks of WARPS warps, but at least 4 (forward) or 8 (backward), which then work on
//          several rows at a time, loop over the rows. Any grid.
// Cost     each tensor is read or written once, parameters and partial once a block; memory-bound.
// Needs    residual_out (in post: out) may be residual and d_x may be d_residual: a thread reads
//          what it overwrites. All other tensors are distinct.
// Same name  llmq/ops/norm.py  llmq/ref/norm.py  tests/ops/test_norm.py
#include "common.cuh"
#include "fp8.cuh"
#include "ptx.cuh"

constexpr int N = Vec<T>::N;
constexpr int FORWARD_ROWS = block_rows(WARPS, 4);
constexpr int FORWARD_THREADS = 32 * WARPS * FORWARD_ROWS;
constexpr int BACKWARD_ROWS = block_rows(WARPS, 8), BACKWARD_THREADS = 32 * WARPS * BACKWARD_ROWS;
constexpr int SM_THREADS = 512;  // so many at least on an SM, for enough loads in flight
// LayerNorm's norm_forward has one load in flight for each vector: as many threads as need no
// spills.
constexpr int PLAIN_SM_THREADS = !CENTRED || CODES || VECTORS > 3 ? SM_THREADS
                                 : VECTORS == 3                   ? 1024
                                 : ABS_MAX                        ? 1152
                                                                  : 1280;
// The widest rows and their codes do not fit into the registers that two blocks leave each other.
constexpr bool WIDEST = !CENTRED && CODES && WARPS == 8 && VECTORS == 4;
constexpr int BACKWARD_SM_THREADS = WIDEST ? BACKWARD_THREADS : SM_THREADS;
using Registers = Row<T, WARPS, VECTORS>;
template <int ROWS> using Sum = RowSum<WARPS, WARPS * ROWS>;
using Emitter = Fp8Rows<Q, CODES>;
template <bool HELD> using Parameter = RowParameter<T, WARPS, VECTORS, HELD>;

// What an element is multiplied by.
__device__ __forceinline__ float factor(T weight) {
    return OFFSET ? 1.0f + to_f32(weight) : to_f32(weight);
}

__device__ __forceinline__ float centred(T x, float centre) {
    if constexpr (CENTRED) { return to_f32(x) - centre; }
    return to_f32(x);
}

// mean (of LayerNorm) and 1 / sqrt(variance + eps) of the row in x.
__device__ __forceinline__ void statistics(float& centre, float& scale, Registers& x, f32 eps,
                                           i32 C, Sum<FORWARD_ROWS>& row_sum) {
    float sum = 0.0f, squares = 0.0f;
    centre = 0.0f;
    if constexpr (CENTRED) {
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
#pragma unroll
            for (int k = 0; k < N; ++k) { sum += to_f32(x.v[i][k]); }
        }
        forget(x);
        centre = row_sum(sum) / (float)C;
    }
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        if (CENTRED && Registers::column(i) >= C) { continue; }
#pragma unroll
        for (int k = 0; k < N; ++k) {
            const float value = centred(x.v[i][k], centre);
            squares = fmaf(value, value, squares);
        }
    }
    forget(x);
    scale = 1.0f / sqrtf(row_sum(squares) / (float)C + eps);
}

// Where the residual addition stands.
enum Addition { NONE, BEFORE, AFTER };

// One block's part of a forward pass. added: what is added to x BEFORE, the branch, with the sum
// going to residual_out, or to its norm AFTER, the residual or null. HELD: parameters stay in
// registers.
template <Addition ADDITION, bool HELD>
__device__ __forceinline__ void forward(T* residual_out, T* out, f32* mean, f32* rstd, const T* x,
                                        const T* added, const T* weight, const T* bias, f32 eps,
                                        i64 rows, i32 C, f32* abs_max, Q* codes,
                                        const f32* fp8_scale, i32* saturated) {
    constexpr int ROWS = FORWARD_ROWS;
    __shared__ float shared[2 * WARPS * ROWS];
    Sum<ROWS> row_sum{shared};
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
                for (int k = 0; k < N; ++k) {
                    values.v[i][k] = from_f32<T>(to_f32(values.v[i][k]) + to_f32(past.v[i][k]));
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
                for (int k = 0; k < N; ++k) {
                    const float x_hat = centred(values.v[i][k], centre) * scale;
                    result.v[i][k] = from_f32<T>(x_hat * to_f32(w_i[k]) + to_f32(b_i[k]));
                }
            } else {
#pragma unroll
                for (int k = 0; k < N; ++k) {
                    const float x_hat = to_f32(values.v[i][k]) * scale;
                    if constexpr (ADDITION == AFTER) {
                        const T normed = from_f32<T>(x_hat * factor(w_i[k]));
                        result.v[i][k] = from_f32<T>(to_f32(past.v[i][k]) + to_f32(normed));
                    } else if constexpr (OFFSET) {
                        result.v[i][k] = from_f32<T>(x_hat * factor(w_i[k]));
                    } else {
                        const T rounded = from_f32<T>(x_hat);
                        result.v[i][k] = from_f32<T>(to_f32(rounded) * factor(w_i[k]));
                    }
                }
            }
        }
        w.forget_all();
        b.forget_all();
        if constexpr (OUT) { result.store(out + row * C, C, active); }
        fp8.emit(result, row, active);
        largest = max(largest, abs_max_bits(result, C, active));
    }
    finish_abs_max<ABS_MAX>(abs_max, largest);
    fp8.finish(saturated);
}

extern "C" __global__ void __launch_bounds__(FORWARD_THREADS, PLAIN_SM_THREADS / FORWARD_THREADS)
norm_forward(T* __restrict__ out, f32* __restrict__ mean, f32* __restrict__ rstd,
             const T* __restrict__ x, const T* __restrict__ weight, const T* __restrict__ bias,
             f32 eps, i64 rows, i32 C, f32* abs_max, Q* __restrict__ codes,
             const f32* __restrict__ scale, i32* saturated) {
    forward<NONE, !CENTRED && !CODES>(nullptr, out, mean, rstd, x, nullptr, weight, bias, eps, rows,
                                      C, abs_max, codes, scale, saturated);
}

extern "C" __global__ void __launch_bounds__(FORWARD_THREADS, SM_THREADS / FORWARD_THREADS)
norm_forward_residual(T* residual_out, T* __restrict__ out, f32* __restrict__ mean,
                      f32* __restrict__ rstd, const T* residual, const T* __restrict__ branch,
                      const T* __restrict__ weight, const T* __restrict__ bias, f32 eps, i64 rows,
                      i32 C, f32* abs_max, Q* __restrict__ codes, const f32* __restrict__ scale,
                      i32* saturated) {
    forward<BEFORE, !CODES>(residual_out, out, mean, rstd, residual, branch, weight, bias, eps,
                            rows, C, abs_max, codes, scale, saturated);
}

extern "C" __global__ void __launch_bounds__(FORWARD_THREADS, SM_THREADS / FORWARD_THREADS)
norm_post(T* out, f32* __restrict__ rstd, const T* __restrict__ x, const T* residual,
          const T* __restrict__ weight, f32 eps, i64 rows, i32 C, f32* abs_max,
          Q* __restrict__ codes, const f32* __restrict__ scale, i32* saturated) {
#if !CENTRED
    forward<AFTER, !CODES>(nullptr, out, nullptr, rstd, x, residual, weight, nullptr, eps, rows, C,
                           abs_max, codes, scale, saturated);
#endif
}

extern "C" __global__ void
__launch_bounds__(BACKWARD_THREADS, BACKWARD_SM_THREADS / BACKWARD_THREADS)
norm_backward(T* d_x, f32* __restrict__ partial, const T* __restrict__ d_out,
              const T* __restrict__ x, const T* __restrict__ weight, const f32* __restrict__ mean,
              const f32* __restrict__ rstd, const T* d_residual, i64 rows, i32 C, f32* abs_max,
              Q* __restrict__ codes, const f32* __restrict__ fp8_scale, i32* saturated) {
    constexpr int ROWS = BACKWARD_ROWS;
    __shared__ float shared[2 * WARPS * ROWS];
    __shared__ float column_sums[ROWS > 1 ? 32 * WARPS * VECTORS * N : 1];
    Sum<ROWS> row_sum{shared};
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
            for (int k = 0; k < N; ++k) {
                const float g = to_f32(grad.v[i][k]);
                if constexpr (CENTRED) {
                    const float weighted = g * to_f32(w_i[k]);
                    const float x_hat = centred(values.v[i][k], centre) * scale;
                    sum += weighted;
                    dot = fmaf(weighted, x_hat, dot);
                    if constexpr (SUMS) {
                        d_weight[i][k] = fmaf(g, x_hat, d_weight[i][k]);
                        d_bias[i][k] += g;
                    }
                } else {
                    const float product = g * to_f32(values.v[i][k]);
                    dot = fmaf(product, factor(w_i[k]), dot);
                    if constexpr (SUMS) { d_weight[i][k] = fmaf(product, scale, d_weight[i][k]); }
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
            for (int k = 0; k < N; ++k) {
                const float weighted = to_f32(grad.v[i][k]) * factor(w_i[k]);
                const float added = to_f32(past.v[i][k]);
                if constexpr (CENTRED) {
                    const float x_hat = centred(values.v[i][k], centre) * scale;
                    grad.v[i][k] = from_f32<T>((weighted - offset - x_hat * slope) * scale + added);
                } else {
                    const float along = to_f32(values.v[i][k]) * slope;
                    grad.v[i][k] = from_f32<T>(weighted * scale + added - along);
                }
            }
            w.forget_vector(i);
        }
        grad.store(d_x + row * C, C, active);
        fp8.emit(grad, row, active);
        largest = max(largest, abs_max_bits(grad, C, active));
    }
    finish_abs_max<ABS_MAX>(abs_max, largest);
    fp8.finish(saturated);
    if constexpr (!SUMS) { return; }
    float* sums = partial + (i64)blockIdx.x * C;
    sum_block_rows<T, WARPS, VECTORS, ROWS>(sums, C, d_weight, column_sums);
    if constexpr (CENTRED) {
        __syncthreads();  // column_sums is used again
        sums += (i64)gridDim.x * C;
        sum_block_rows<T, WARPS, VECTORS, ROWS>(sums, C, d_bias, column_sums);
    }
}
