// delta_gates.cu -- decays and betas of a delta net, or of a state space (parts = 1), for every token
// and value head.
//
//   forward    decay = -exp(a_log) * step     step = max(softplus(a + dt_bias), least)
//              beta = sigmoid(b); in a state space beta = step
//   backward   d_b = d_beta * beta * (1 - beta);  d_step = d_decay * -exp(a_log), plus d_beta in a
//              state space;   d_a = d_step * sigmoid(a + dt_bias), 0 where step is `least`
//              d_a_log = sum over rows of d_decay * decay;   d_dt_bias = sum over rows of d_a
//
// Data     declared in llmq/ops/delta/delta_gates.py. x, d_x: b from column `offset` on, then a,
//          `heads` columns each; a state space has only a. gates, d_gates: decays, then betas.
//          a_log_partial, dt_bias_partial: each block's sums.
// Launch   256 threads, a head in each lane, a row in each warp; grid (heads / 32, rows / 32), both
//          rounded up.
// Cost     b, a and gates read or written once. Memory-bound, and small.
// Needs    nothing. One thread adds each sum's elements in a fixed order.
#include "common.cuh"

constexpr int THREADS = 256, WARPS = THREADS / 32, ROWS = 32;

// softplus with torch's threshold of 20.
__device__ __forceinline__ float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

// Calls use(row, head) for this thread's rows of a block.
template <class Use> __device__ __forceinline__ void each_row(i64 rows, i32 heads, Use use) {
    const i32 head = blockIdx.x * 32 + threadIdx.x % 32;
    const i64 first = (i64)blockIdx.y * ROWS, stop = min(first + ROWS, rows);
    if (head >= heads) { return; }
    for (i64 row = first + threadIdx.x / 32; row < stop; row += WARPS) { use(row, head); }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    delta_gates_forward(f32* __restrict__ gates, const T* __restrict__ x,
                        const T* __restrict__ a_log, const T* __restrict__ dt_bias, f32 least,
                        i64 rows, i32 heads, i32 columns, i32 offset, i32 parts) {
    each_row(rows, heads, [&](i64 row, i32 head) {
        const T* at = x + row * columns + offset + head;
        const float a = to_f32(at[(parts - 1) * heads]) + to_f32(dt_bias[head]);
        const float soft = softplus(a), step = soft < least ? least : soft;  // NaN stays
        gates[row * 2 * heads + head] = -expf(to_f32(a_log[head])) * step;
        gates[(row * 2 + 1) * heads + head] = parts == 2 ? sigmoid(to_f32(at[0])) : step;
    });
}

extern "C" __global__ void __launch_bounds__(THREADS)
    delta_gates_backward(T* __restrict__ d_x, f32* __restrict__ a_log_partial,
                         f32* __restrict__ dt_bias_partial, const f32* __restrict__ d_gates,
                         const f32* __restrict__ gates, const T* __restrict__ x,
                         const T* __restrict__ a_log, const T* __restrict__ dt_bias, f32 least,
                         i64 rows, i32 heads, i32 columns, i32 offset, i32 parts) {
    __shared__ float shared[2][WARPS][32];
    float of_a_log = 0.0f, of_dt_bias = 0.0f;
    each_row(rows, heads, [&](i64 row, i32 head) {
        const i64 of_b = row * columns + offset + head, of_a = of_b + (parts - 1) * heads;
        const i64 decay = row * 2 * heads + head, beta = decay + heads;
        const float share = gates[beta], d_decay = d_gates[decay], d_beta = d_gates[beta];
        if (parts == 2) { d_x[of_b] = from_f32<T>(d_beta * share * (1.0f - share)); }
        const float a = to_f32(x[of_a]) + to_f32(dt_bias[head]);
        const float slope = softplus(a) < least ? 0.0f : sigmoid(a);
        const float rate = -expf(to_f32(a_log[head]));
        const float d_a = parts == 2 ? d_decay * (rate * slope) : fmaf(d_decay, rate, d_beta) * slope;
        d_x[of_a] = from_f32<T>(d_a);
        of_a_log = fmaf(d_decay, gates[decay], of_a_log);
        of_dt_bias += d_a;
    });
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    shared[0][warp][lane] = of_a_log;
    shared[1][warp][lane] = of_dt_bias;
    __syncthreads();
    const i32 head = blockIdx.x * 32 + lane;
    if (warp < 2 && head < heads) {
        float sum = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) { sum += shared[warp][w][lane]; }
        (warp ? dt_bias_partial : a_log_partial)[(i64)blockIdx.y * heads + head] = sum;
    }
}
