// layernorm.cu -- LayerNorm over the channels, alone and fused with the residual addition before.
//
//   forward    mean, variance over C (biased)        rstd = 1 / sqrt(variance + eps)
//              out = T((x - mean) * rstd * weight + bias)
//   residual   x = T(residual + branch) is written too, and is what the norm sees
//   backward   d_norm = d_out * weight               x_hat = (x - mean) * rstd
//              d_x = rstd * (d_norm - mean(d_norm) - x_hat * mean(d_norm * x_hat)) + d_residual
//              d_weight = sum over rows of d_out * x_hat        d_bias = sum over rows of d_out
//
// Data     rows of C elements of T (f32, bf16), contiguous, 16-byte aligned, C % 8 == 0; mean and
//          rstd F32. partial: F32 (2, gridDim.x, C), sums of a block for d_weight, then d_bias.
//          abs_max: F32 (1), with ABS_MAX = 1 raised to the largest |out|, |d_x|, as stored; else
//          not touched, may be null.
//          codes: with CODES = 1 (rows, C), out, d_x as FP8 (fp8.cuh), C % 16 == 0. OUT = 0: no
//          out.
// Launch   a row lives in the registers of WARPS warps, VECTORS 16-byte vectors in each lane.
//          Blocks of WARPS warps, but at least 4 (forward) or 8 (backward), which then work on
//          several rows at a time, loop over the rows. Any grid.
//          layernorm_backward_parameter: as column_sum in common.cuh.
// Cost     each tensor is read or written once, parameters and partial once a block; memory-bound.
// Needs    residual_out may be residual and d_x may be d_residual: a thread reads what it
//          overwrites. All other tensors are distinct.
// Same name  llmq/ops/layernorm.py  llmq/ref/layernorm.py  tests/ops/test_layernorm.py
#include "common.cuh"
#include "fp8.cuh"
#include "ptx.cuh"

constexpr int N = Vec<T>::N;
constexpr int FORWARD_ROWS = block_rows(WARPS, 4);
constexpr int FORWARD_THREADS = 32 * WARPS * FORWARD_ROWS;
constexpr int BACKWARD_ROWS = block_rows(WARPS, 8), BACKWARD_THREADS = 32 * WARPS * BACKWARD_ROWS;
constexpr int SM_THREADS = 512;  // so many at least on an SM, for enough loads in flight
// layernorm_forward has one load in flight for each vector: as many threads as need no spills.
constexpr int PLAIN_SM_THREADS = CODES || VECTORS > 3 ? SM_THREADS
                                 : VECTORS == 3       ? 1024
                                 : ABS_MAX            ? 1152
                                                      : 1280;
using Registers = Row<T, WARPS, VECTORS>;
template <int ROWS> using Sum = RowSum<WARPS, WARPS * ROWS>;
using Emitter = Fp8Rows<Q, CODES>;
using Parameter = RowParameter<T, WARPS, VECTORS, !CODES>;
using PlainParameter = RowParameter<T, WARPS, VECTORS, false>;

// Keep the row packed over a reduction: the compiler would keep unpacked copies too, and with them
// fewer rows would be in flight on an SM.
__device__ __forceinline__ void forget(Registers& row) {
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) { forget(reinterpret_cast<uint4&>(row.v[i])); }
}

// out = norm of the row in x; mean, rstd: where the row's values go. active false: no such row.
// Returns the largest abs_bits of what is this thread's of the result.
template <class Parameters>
__device__ __forceinline__ u32 normalise(T* out, f32* mean, f32* rstd, Emitter& fp8, Registers& x,
                                         Parameters& weight, Parameters& bias, f32 eps, i64 row,
                                         i32 C, bool active, Sum<FORWARD_ROWS>& row_sum) {
    float sum = 0.0f, squares = 0.0f;
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
#pragma unroll
        for (int k = 0; k < N; ++k) { sum += to_f32(x.v[i][k]); }
    }
    forget(x);
    const float centre = row_sum(sum) / (float)C;
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        if (Registers::column(i) >= C) { continue; }
#pragma unroll
        for (int k = 0; k < N; ++k) {
            const float value = to_f32(x.v[i][k]) - centre;
            squares = fmaf(value, value, squares);
        }
    }
    forget(x);
    const float scale = 1.0f / sqrtf(row_sum(squares) / (float)C + eps);
    if (active && Registers::column(0) == 0) {
        *mean = centre;
        *rstd = scale;
    }
    Registers result;
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        const Vec<T>& w = weight.vector(i);
        const Vec<T>& b = bias.vector(i);
#pragma unroll
        for (int k = 0; k < N; ++k) {
            const float x_hat = (to_f32(x.v[i][k]) - centre) * scale;
            result.v[i][k] = from_f32<T>(x_hat * to_f32(w[k]) + to_f32(b[k]));
        }
    }
    weight.forget_all();
    bias.forget_all();
    if constexpr (OUT) { result.store(out, C, active); }
    fp8.emit(result, row, active);
    return abs_max_bits(result, C, active);
}

extern "C" __global__ void __launch_bounds__(FORWARD_THREADS, PLAIN_SM_THREADS / FORWARD_THREADS)
layernorm_forward(T* __restrict__ out, f32* __restrict__ mean, f32* __restrict__ rstd,
                  const T* __restrict__ x, const T* __restrict__ weight,
                  const T* __restrict__ bias, f32 eps, i64 rows, i32 C, f32* abs_max,
                  Q* __restrict__ codes, const f32* __restrict__ scale, i32* saturated) {
    constexpr int ROWS = FORWARD_ROWS;
    __shared__ float shared[2 * WARPS * ROWS];
    Sum<ROWS> row_sum{shared};
    Emitter fp8(codes, scale, C);
    u32 largest = 0;
    PlainParameter w(weight, C), b(bias, C);
    Registers values;
    for (i64 first = (i64)blockIdx.x * ROWS; first < rows; first += (i64)gridDim.x * ROWS) {
        const i64 row = first + threadIdx.x / (32 * WARPS);
        values.load(x + row * C, C, row < rows);
        const u32 mine = normalise(out + row * C, mean + row, rstd + row, fp8, values, w,
                                   b, eps, row, C, row < rows, row_sum);
        largest = max(largest, mine);
    }
    finish_abs_max<ABS_MAX>(abs_max, largest);
    fp8.finish(saturated);
}

extern "C" __global__ void __launch_bounds__(FORWARD_THREADS, SM_THREADS / FORWARD_THREADS)
layernorm_forward_residual(T* residual_out, T* __restrict__ out, f32* __restrict__ mean,
                           f32* __restrict__ rstd, const T* residual,
                           const T* __restrict__ branch, const T* __restrict__ weight,
                           const T* __restrict__ bias, f32 eps, i64 rows, i32 C, f32* abs_max,
                           Q* __restrict__ codes, const f32* __restrict__ scale,
                           i32* saturated) {
    constexpr int ROWS = FORWARD_ROWS;
    __shared__ float shared[2 * WARPS * ROWS];
    Sum<ROWS> row_sum{shared};
    Emitter fp8(codes, scale, C);
    u32 largest = 0;
    Parameter w(weight, C), b(bias, C);
    Registers x, added;
    for (i64 first = (i64)blockIdx.x * ROWS; first < rows; first += (i64)gridDim.x * ROWS) {
        const i64 row = first + threadIdx.x / (32 * WARPS);
        x.load(residual + row * C, C, row < rows);
        added.load(branch + row * C, C, row < rows);
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
#pragma unroll
            for (int k = 0; k < N; ++k) {
                x.v[i][k] = from_f32<T>(to_f32(x.v[i][k]) + to_f32(added.v[i][k]));
            }
        }
        x.store(residual_out + row * C, C, row < rows);
        const u32 mine = normalise(out + row * C, mean + row, rstd + row, fp8, x, w, b,
                                   eps, row, C, row < rows, row_sum);
        largest = max(largest, mine);
    }
    finish_abs_max<ABS_MAX>(abs_max, largest);
    fp8.finish(saturated);
}

extern "C" __global__ void __launch_bounds__(BACKWARD_THREADS, SM_THREADS / BACKWARD_THREADS)
layernorm_backward(T* d_x, f32* __restrict__ partial, const T* __restrict__ d_out,
                   const T* __restrict__ x, const T* __restrict__ weight,
                   const f32* __restrict__ mean, const f32* __restrict__ rstd,
                   const T* d_residual, i64 rows, i32 C, f32* abs_max, Q* __restrict__ codes,
                   const f32* __restrict__ fp8_scale, i32* saturated) {
    constexpr int ROWS = BACKWARD_ROWS;
    __shared__ float shared[2 * WARPS * ROWS];
    __shared__ float column_sums[ROWS > 1 ? 32 * WARPS * VECTORS * N : 1];
    Sum<ROWS> row_sum{shared};
    Emitter fp8(codes, fp8_scale, C);
    u32 largest = 0;
    float d_weight[VECTORS][N] = {}, d_bias[VECTORS][N] = {};  // of this thread's columns
    Parameter w(weight, C);
    for (i64 first = (i64)blockIdx.x * ROWS; first < rows; first += (i64)gridDim.x * ROWS) {
        const i64 row = first + threadIdx.x / (32 * WARPS);
        const bool active = row < rows;
        Registers grad, values, past;
        grad.load(d_out + row * C, C, active);
        values.load(x + row * C, C, active);
        past.load(d_residual + row * C, C, active && d_residual != nullptr);
        const float centre = active ? mean[row] : 0.0f, scale = active ? rstd[row] : 0.0f;
        float sum = 0.0f, dot = 0.0f;
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            const Vec<T>& w_i = w.vector(i);
#pragma unroll
            for (int k = 0; k < N; ++k) {
                const float g = to_f32(grad.v[i][k]), weighted = g * to_f32(w_i[k]);
                const float x_hat = (to_f32(values.v[i][k]) - centre) * scale;
                sum += weighted;
                dot = fmaf(weighted, x_hat, dot);
                d_weight[i][k] = fmaf(g, x_hat, d_weight[i][k]);
                d_bias[i][k] += g;
            }
        }
        forget(grad);
        forget(values);
        forget(past);
        w.forget_all();
        const float offset = row_sum(sum) / (float)C, slope = row_sum(dot) / (float)C;
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            const Vec<T>& w_i = w.vector(i);
#pragma unroll
            for (int k = 0; k < N; ++k) {
                const float weighted = to_f32(grad.v[i][k]) * to_f32(w_i[k]);
                const float x_hat = (to_f32(values.v[i][k]) - centre) * scale;
                const float through = (weighted - offset - x_hat * slope) * scale;
                grad.v[i][k] = from_f32<T>(through + to_f32(past.v[i][k]));
            }
            w.forget_vector(i);
        }
        grad.store(d_x + row * C, C, active);
        fp8.emit(grad, row, active);
        largest = max(largest, abs_max_bits(grad, C, active));
    }
    finish_abs_max<ABS_MAX>(abs_max, largest);
    fp8.finish(saturated);
    float* row = partial + (i64)blockIdx.x * C;
    sum_block_rows<T, WARPS, VECTORS, ROWS>(row, C, d_weight, column_sums);
    __syncthreads();  // column_sums is used again
    row += (i64)gridDim.x * C;
    sum_block_rows<T, WARPS, VECTORS, ROWS>(row, C, d_bias, column_sums);
}

extern "C" __global__ void __launch_bounds__(1024, 1)
layernorm_backward_parameter(G* __restrict__ d_parameter, const f32* __restrict__ partial,
                             const i32* __restrict__ scalars, i32 num_partials, i32 C,
                             i32 accumulate, u32 salt) {
    column_sum(d_parameter, partial, scalars, num_partials, C, accumulate, salt);
}
