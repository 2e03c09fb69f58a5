// rmsnorm.cu -- RMSNorm over the channels, alone and fused with the residual addition before or
// after it.
//
//   forward    rstd = 1 / sqrt(mean(x^2) + eps)      out = T(T(rstd * x) * weight)
//   residual   x = T(residual + branch) is written too, and is what the norm sees
//   post       out = T(residual + T(rstd * x * weight)), or T(rstd * x * weight) if residual is null
//   backward   x_hat = rstd * x      d_weight = sum over rows of d_out * x_hat
//              d_x = rstd * (d_out * weight - x_hat * mean(d_out * weight * x_hat)) + d_residual
//
// Data     rows of C elements of T (f32, bf16), contiguous, 16-byte aligned, C % 8 == 0; rstd F32.
//          partial: F32 (gridDim.x, C), one row of d_weight sums a block. abs_max: F32 (1), with
//          ABS_MAX = 1 raised to the largest |out|, |d_x|, as stored; else not touched, may be null.
//          codes: with CODES = 1 (rows, C), out, d_x as FP8 (fp8.cuh), C % 16 == 0. OUT = 0: no
//          out.
// Launch   a row lives in the registers of WARPS warps, VECTORS 16-byte vectors in each lane.
//          Blocks of WARPS warps, but at least 4 (forward) or 8 (backward), which then work on
//          several rows at a time, loop over the rows. Any grid.
//          rmsnorm_backward_weight: as column_sum in common.cuh.
// Cost     each tensor is read or written once, weight and partial once a block; memory-bound.
// Needs    residual_out (in post: out) may be residual and d_x may be d_residual: a thread reads
//          what it overwrites. All other tensors are distinct.
// Same name  llmq/ops/rmsnorm.py  llmq/ref/rmsnorm.py  tests/ops/test_rmsnorm.py
#include "common.cuh"
#include "fp8.cuh"
#include "ptx.cuh"

constexpr int N = Vec<T>::N;
constexpr int FORWARD_ROWS = block_rows(WARPS, 4);
constexpr int FORWARD_THREADS = 32 * WARPS * FORWARD_ROWS;
constexpr int BACKWARD_ROWS = block_rows(WARPS, 8), BACKWARD_THREADS = 32 * WARPS * BACKWARD_ROWS;
constexpr int SM_THREADS = 512;  // so many at least on an SM, for enough loads in flight
// The widest rows and their codes do not fit into the registers that two blocks leave each other.
constexpr bool WIDEST = CODES && WARPS == 8 && VECTORS == 4;
constexpr int BACKWARD_SM_THREADS = WIDEST ? BACKWARD_THREADS : SM_THREADS;
using Registers = Row<T, WARPS, VECTORS>;
template <int ROWS> using Sum = RowSum<WARPS, WARPS * ROWS>;
using Emitter = Fp8Rows<Q, CODES>;
using Parameter = RowParameter<T, WARPS, VECTORS, !CODES>;

// Keep the row packed over a reduction: the compiler would keep unpacked copies too, and with them
// fewer rows would be in flight on an SM.
__device__ __forceinline__ void forget(Registers& row) {
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) { forget(reinterpret_cast<uint4&>(row.v[i])); }
}

// 1 / sqrt(mean(x^2) + eps) of the row in x.
__device__ __forceinline__ float inverse_root(Registers& x, f32 eps, i32 C,
                                              Sum<FORWARD_ROWS>& row_sum) {
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
#pragma unroll
        for (int k = 0; k < N; ++k) {
            const float value = to_f32(x.v[i][k]);
            squares = fmaf(value, value, squares);
        }
    }
    forget(x);
    return 1.0f / sqrtf(row_sum(squares) / (float)C + eps);
}

// out = norm of the row in x; rstd: where the row's value goes. The row is not there: active false.
// Returns the largest abs_bits of what is this thread's of the result.
__device__ __forceinline__ u32 normalise(T* out, f32* rstd, Emitter& fp8, Registers& x,
                                         Parameter& weight, f32 eps, i64 row, i32 C, bool active,
                                         Sum<FORWARD_ROWS>& row_sum) {
    const float scale = inverse_root(x, eps, C, row_sum);
    if (active && Registers::column(0) == 0) { *rstd = scale; }
    Registers result;
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        const Vec<T>& w = weight.vector(i);
#pragma unroll
        for (int k = 0; k < N; ++k) {
            const T normalised = from_f32<T>(to_f32(x.v[i][k]) * scale);
            result.v[i][k] = from_f32<T>(to_f32(normalised) * to_f32(w[k]));
        }
    }
    weight.forget_all();
    if constexpr (OUT) { result.store(out, C, active); }
    fp8.emit(result, row, active);
    return abs_max_bits(result, C, active);
}

extern "C" __global__ void __launch_bounds__(FORWARD_THREADS, SM_THREADS / FORWARD_THREADS)
rmsnorm_forward(T* __restrict__ out, f32* __restrict__ rstd, const T* __restrict__ x,
                const T* __restrict__ weight, f32 eps, i64 rows, i32 C, f32* abs_max,
                Q* __restrict__ codes, const f32* __restrict__ scale, i32* saturated) {
    constexpr int ROWS = FORWARD_ROWS;
    __shared__ float shared[2 * WARPS * ROWS];
    Sum<ROWS> row_sum{shared};
    Emitter fp8(codes, scale, C);
    u32 largest = 0;
    Parameter w(weight, C);
    Registers values;
    for (i64 first = (i64)blockIdx.x * ROWS; first < rows; first += (i64)gridDim.x * ROWS) {
        const i64 row = first + threadIdx.x / (32 * WARPS);
        values.load(x + row * C, C, row < rows);
        const u32 mine = normalise(out + row * C, rstd + row, fp8, values, w, eps, row, C,
                                   row < rows, row_sum);
        largest = max(largest, mine);
    }
    finish_abs_max<ABS_MAX>(abs_max, largest);
    fp8.finish(saturated);
}

extern "C" __global__ void __launch_bounds__(FORWARD_THREADS, SM_THREADS / FORWARD_THREADS)
rmsnorm_forward_residual(T* residual_out, T* __restrict__ out, f32* __restrict__ rstd,
                         const T* residual, const T* __restrict__ branch,
                         const T* __restrict__ weight, f32 eps, i64 rows, i32 C, f32* abs_max,
                         Q* __restrict__ codes, const f32* __restrict__ scale, i32* saturated) {
    constexpr int ROWS = FORWARD_ROWS;
    __shared__ float shared[2 * WARPS * ROWS];
    Sum<ROWS> row_sum{shared};
    Emitter fp8(codes, scale, C);
    u32 largest = 0;
    Parameter w(weight, C);
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
        const u32 mine = normalise(out + row * C, rstd + row, fp8, x, w, eps, row, C,
                                   row < rows, row_sum);
        largest = max(largest, mine);
    }
    finish_abs_max<ABS_MAX>(abs_max, largest);
    fp8.finish(saturated);
}

extern "C" __global__ void __launch_bounds__(FORWARD_THREADS, SM_THREADS / FORWARD_THREADS)
rmsnorm_post(T* out, f32* __restrict__ rstd, const T* __restrict__ x, const T* residual,
             const T* __restrict__ weight, f32 eps, i64 rows, i32 C, f32* abs_max,
             Q* __restrict__ codes, const f32* __restrict__ scale, i32* saturated) {
    constexpr int ROWS = FORWARD_ROWS;
    __shared__ float shared[2 * WARPS * ROWS];
    Sum<ROWS> row_sum{shared};
    Emitter fp8(codes, scale, C);
    u32 largest = 0;
    Parameter w(weight, C);
    Registers values, past;
    for (i64 first = (i64)blockIdx.x * ROWS; first < rows; first += (i64)gridDim.x * ROWS) {
        const i64 row = first + threadIdx.x / (32 * WARPS);
        const bool active = row < rows;
        values.load(x + row * C, C, active);
        past.load(residual + row * C, C, active && residual != nullptr);
        const float inverse = inverse_root(values, eps, C, row_sum);
        if (active && Registers::column(0) == 0) { rstd[row] = inverse; }
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            const Vec<T>& w_i = w.vector(i);
#pragma unroll
            for (int k = 0; k < N; ++k) {
                const T added = from_f32<T>(to_f32(values.v[i][k]) * inverse * to_f32(w_i[k]));
                values.v[i][k] = from_f32<T>(to_f32(past.v[i][k]) + to_f32(added));
            }
        }
        w.forget_all();
        values.store(out + row * C, C, active);
        fp8.emit(values, row, active);
        largest = max(largest, abs_max_bits(values, C, active));
    }
    finish_abs_max<ABS_MAX>(abs_max, largest);
    fp8.finish(saturated);
}

extern "C" __global__ void
__launch_bounds__(BACKWARD_THREADS, BACKWARD_SM_THREADS / BACKWARD_THREADS)
rmsnorm_backward(T* d_x, f32* __restrict__ partial, const T* __restrict__ d_out,
                 const T* __restrict__ x, const T* __restrict__ weight,
                 const f32* __restrict__ rstd, const T* d_residual, i64 rows, i32 C, f32* abs_max,
                 Q* __restrict__ codes, const f32* __restrict__ fp8_scale, i32* saturated) {
    constexpr int ROWS = BACKWARD_ROWS;
    __shared__ float shared[2 * WARPS * ROWS];
    __shared__ float column_sums[ROWS > 1 ? 32 * WARPS * VECTORS * N : 1];
    Sum<ROWS> row_sum{shared};
    Emitter fp8(codes, fp8_scale, C);
    u32 largest = 0;
    float d_weight[VECTORS][N] = {};  // of this thread's columns, over all its rows
    Parameter w(weight, C);
    for (i64 first = (i64)blockIdx.x * ROWS; first < rows; first += (i64)gridDim.x * ROWS) {
        const i64 row = first + threadIdx.x / (32 * WARPS);
        const bool active = row < rows;
        Registers grad, values, past;
        grad.load(d_out + row * C, C, active);
        values.load(x + row * C, C, active);
        past.load(d_residual + row * C, C, active && d_residual != nullptr);
        const float scale = active ? rstd[row] : 0.0f;
        float dot = 0.0f;
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            const Vec<T>& w_i = w.vector(i);
#pragma unroll
            for (int k = 0; k < N; ++k) {
                const float product = to_f32(grad.v[i][k]) * to_f32(values.v[i][k]);
                dot = fmaf(product, to_f32(w_i[k]), dot);
                d_weight[i][k] = fmaf(product, scale, d_weight[i][k]);
            }
        }
        forget(grad);
        forget(values);
        forget(past);
        w.forget_all();
        const float slope = row_sum(dot) * (scale * scale * scale / (float)C);
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            const Vec<T>& w_i = w.vector(i);
#pragma unroll
            for (int k = 0; k < N; ++k) {
                const float direct = to_f32(grad.v[i][k]) * to_f32(w_i[k]) * scale;
                const float along = to_f32(values.v[i][k]) * slope;
                grad.v[i][k] = from_f32<T>(direct + to_f32(past.v[i][k]) - along);
            }
            w.forget_vector(i);
        }
        grad.store(d_x + row * C, C, active);
        fp8.emit(grad, row, active);
        largest = max(largest, abs_max_bits(grad, C, active));
    }
    finish_abs_max<ABS_MAX>(abs_max, largest);
    fp8.finish(saturated);
    sum_block_rows<T, WARPS, VECTORS, ROWS>(partial + (i64)blockIdx.x * C, C, d_weight,
                                            column_sums);
}

extern "C" __global__ void __launch_bounds__(1024, 1)
rmsnorm_backward_weight(G* __restrict__ d_weight, const f32* __restrict__ partial,
                        const i32* __restrict__ scalars, i32 num_partials, i32 C, i32 accumulate,
                        u32 salt) {
    column_sum(d_weight, partial, scalars, num_partials, C, accumulate, salt);
}
