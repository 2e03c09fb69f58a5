// gated_norm.cu -- RMSNorm over every head, times SiLU of a gate.
//
//   forward    out = T(T(weight * T(rstd * x)) * silu(gate))     rstd = 1 / sqrt(mean(x^2) + eps)
//   backward   x_hat = rstd * x;   d_y = d_out * silu(gate);   d_weight = sum of d_y * x_hat
//              d_gate = d_out * weight * x_hat * silu'(gate)
//              d_x = rstd * (d_y * weight - x_hat * mean(d_y * weight * x_hat))
//
// Data     x, out and their gradients: T (rows, heads, HEAD_DIM). gate, d_gate: T (rows, columns), the
//          heads side by side from column `offset` on. weight: T (HEAD_DIM). partial: F32 (blocks,
//          HEAD_DIM), sums of a block.
// Launch   256 threads, a head in each warp; blocks loop over the heads of all rows.
// Cost     forward: x and the gate read, out written. backward: three reads, two writes.
//          Memory-bound.
// Needs    HEAD_DIM a multiple of 32 up to 256; columns and offset even.
#include "pointwise/activation.cuh"

constexpr int THREADS = 256, WARPS = THREADS / 32, COUNT = HEAD_DIM / 32;

// Elements of a head: pairs lane, lane + 32, ..., or single ones where that does not come out even.
struct Head {
    static constexpr int TOGETHER = COUNT % 2 ? 1 : 2;
    float v[COUNT];

    static __device__ __forceinline__ int place(int i) {
        return threadIdx.x % 32 * TOGETHER + i / TOGETHER * 32 * TOGETHER + i % TOGETHER;
    }
    __device__ __forceinline__ void load(const T* head) {
#pragma unroll
        for (int i = 0; i < COUNT; i += TOGETHER) {
            if constexpr (TOGETHER == 2) {
                const float2 two = load_two(head + place(i));
                v[i] = two.x, v[i + 1] = two.y;
            } else {
                v[i] = to_f32(head[place(i)]);
            }
        }
    }
    __device__ __forceinline__ void store(T* head) const {
#pragma unroll
        for (int i = 0; i < COUNT; i += TOGETHER) {
            if constexpr (TOGETHER == 2) {
                store_two(head + place(i), v[i], v[i + 1]);
            } else {
                head[place(i)] = from_f32<T>(v[i]);
            }
        }
    }
    __device__ __forceinline__ float rstd(float eps) const {
        float squares = 0.0f;
#pragma unroll
        for (int i = 0; i < COUNT; ++i) { squares = fmaf(v[i], v[i], squares); }
        return 1.0f / sqrtf(warp_sum(squares) / (float)HEAD_DIM + eps);
    }
};

__device__ __forceinline__ float part_of(float z) { return share<Silu, sizeof(T) == 4>(z); }
__device__ __forceinline__ float rounded(float x) { return to_f32(from_f32<T>(x)); }

extern "C" __global__ void __launch_bounds__(THREADS)
    gated_norm_forward(T* __restrict__ out, const T* __restrict__ x, const T* __restrict__ gate,
                       const T* __restrict__ weight, f32 eps, i64 rows, i32 heads, i32 columns,
                       i32 offset) {
    Head w;
    w.load(weight);
    for (i64 i = (i64)blockIdx.x * WARPS + threadIdx.x / 32; i < rows * heads;
         i += (i64)gridDim.x * WARPS) {
        Head a, z;
        a.load(x + i * HEAD_DIM);
        z.load(gate + i / heads * columns + offset + i % heads * HEAD_DIM);
        const float rstd = a.rstd(eps);
#pragma unroll
        for (int k = 0; k < COUNT; ++k) {
            const float y = rounded(w.v[k] * rounded(rstd * a.v[k]));
            a.v[k] = y * (z.v[k] * part_of(z.v[k]));
        }
        a.store(out + i * HEAD_DIM);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 6)
    gated_norm_backward(T* __restrict__ d_x, T* __restrict__ d_gate, f32* __restrict__ partial,
                        const T* __restrict__ d_out, const T* __restrict__ x,
                        const T* __restrict__ gate, const T* __restrict__ weight, f32 eps,
                        i64 rows, i32 heads, i32 columns, i32 offset) {
    __shared__ float shared[WARPS][HEAD_DIM];
    Head w;
    w.load(weight);
    float sums[COUNT] = {};
    for (i64 i = (i64)blockIdx.x * WARPS + threadIdx.x / 32; i < rows * heads;
         i += (i64)gridDim.x * WARPS) {
        const i64 of_gate = i / heads * columns + offset + i % heads * HEAD_DIM;
        Head a, z, d;
        a.load(x + i * HEAD_DIM);
        z.load(gate + of_gate);
        d.load(d_out + i * HEAD_DIM);
        const float rstd = a.rstd(eps);
        float dot = 0.0f;
#pragma unroll
        for (int k = 0; k < COUNT; ++k) {
            const float x_hat = rstd * a.v[k], part = part_of(z.v[k]);
            const float slope = Silu::slope(z.v[k], part, z.v[k] * part);
            const float d_y = d.v[k] * (z.v[k] * part);
            z.v[k] = d.v[k] * (w.v[k] * x_hat) * slope;
            sums[k] = fmaf(d_y, x_hat, sums[k]);
            a.v[k] = x_hat;
            d.v[k] = d_y * w.v[k];
            dot = fmaf(d.v[k], x_hat, dot);
        }
        const float mean = warp_sum(dot) / (float)HEAD_DIM;
#pragma unroll
        for (int k = 0; k < COUNT; ++k) { d.v[k] = rstd * (d.v[k] - a.v[k] * mean); }
        z.store(d_gate + of_gate);
        d.store(d_x + i * HEAD_DIM);
    }
#pragma unroll
    for (int k = 0; k < COUNT; ++k) { shared[threadIdx.x / 32][Head::place(k)] = sums[k]; }
    __syncthreads();
    for (int c = threadIdx.x; c < HEAD_DIM; c += THREADS) {
        float sum = 0.0f;
#pragma unroll
        for (int warp = 0; warp < WARPS; ++warp) { sum += shared[warp][c]; }
        partial[(i64)blockIdx.x * HEAD_DIM + c] = sum;
    }
}
