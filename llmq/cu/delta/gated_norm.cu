// gated_norm.cu -- RMSNorm over every head, times SiLU of a gate.
//
//   forward    out = T(T(weight * T(rstd * x)) * silu(gate))     rstd = 1 / sqrt(mean(x^2) + eps)
//   backward   x_hat = rstd * x;   d_y = d_out * silu(gate);   d_weight = sum of d_y * x_hat
//              d_gate = d_out * weight * x_hat * silu'(gate)
//              d_x = rstd * (d_y * weight - x_hat * mean(d_y * weight * x_hat))
//
//   GATE_FIRST = 1 (state spaces): n = x * silu(gate) is normalized instead of x, and the result is
//   not gated: out = T(weight * rstd * n). With d_n, the gradient of n: d_x = d_n * silu(gate),
//   d_gate = d_n * x * silu'(gate).
//
// Data     x, out and their gradients: T (rows, heads, HEAD_DIM). gate, d_gate: T (rows, columns), the
//          heads side by side from column `offset` on. weight: T (weights, HEAD_DIM); weights is 1,
//          or the number of heads. partial: F32 (blocks, weights, HEAD_DIM), each block's sums.
// Launch   256 threads with a head in each warp; if HEAD_DIM > 256, a head in each block, which has
//          512 threads if HEAD_DIM > 2048. Grid (blocks, weights): blocks loop over the heads of a
//          weight in all rows.
// Cost     forward: x and the gate read, out written. backward: three reads, two writes.
//          Memory-bound.
// Needs    HEAD_DIM a multiple of 32 up to 256, or of 256 up to 2048, or of 512 up to 8192; columns and
//          offset even.
#include "pointwise/activation.cuh"

constexpr int THREADS = HEAD_DIM > 2048 ? 512 : 256;
constexpr int LANES = HEAD_DIM > 256 ? THREADS : 32;  // threads that share a head
// HEADS: heads that a block takes at once. COUNT: elements of a head in each thread.
constexpr int HEADS = THREADS / LANES, COUNT = HEAD_DIM / LANES;
// Blocks per multiprocessor in backward: as many as registers allow.
constexpr int BLOCKS = THREADS == 512 ? 1 : COUNT > 4 ? 3 : sizeof(T) == 2 ? 5 : 4;
using HeadSum = RowSum<LANES / 32, THREADS / 32>;

// A thread's elements of a head: pairs number lane, lane + LANES, ...; single elements if COUNT is
// odd.
struct Head {
    static constexpr int TOGETHER = COUNT % 2 ? 1 : 2;
    float v[COUNT];

    static __device__ __forceinline__ int place(int i) {
        return threadIdx.x % LANES * TOGETHER + i / TOGETHER * LANES * TOGETHER + i % TOGETHER;
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
};

__device__ __forceinline__ float rstd_of(float squares, float eps, HeadSum& sum) {
    return 1.0f / sqrtf(sum(squares) / (float)HEAD_DIM + eps);
}

// Calls use(i, j) for this thread's heads, which have weight blockIdx.y. i, j: offsets of the
// head's first element in x and in gate.
template <class Use>
__device__ __forceinline__ void each_head(i64 rows, i32 heads, i32 columns, i32 offset, Use use) {
    const i32 own = heads / gridDim.y;
    for (i64 i = (i64)blockIdx.x * HEADS + threadIdx.x / LANES; i < rows * own;
         i += (i64)gridDim.x * HEADS) {
        const i64 row = i / own, first = (i % own + blockIdx.y * own) * HEAD_DIM;
        use(row * heads * HEAD_DIM + first, row * columns + offset + first);
    }
}

__device__ __forceinline__ float part_of(float z) { return share<Silu, sizeof(T) == 4>(z); }
__device__ __forceinline__ float rounded(float x) { return to_f32(from_f32<T>(x)); }

extern "C" __global__ void __launch_bounds__(THREADS)
    gated_norm_forward(T* __restrict__ out, const T* __restrict__ x, const T* __restrict__ gate,
                       const T* __restrict__ weight, f32 eps, i64 rows, i32 heads, i32 columns,
                       i32 offset) {
    __shared__ float shared[2 * THREADS / 32];
    HeadSum sum{shared};
    Head w;
    w.load(weight + blockIdx.y * HEAD_DIM);
    each_head(rows, heads, columns, offset, [&](i64 of_x, i64 of_gate) {
        Head a, z;
        a.load(x + of_x);
        z.load(gate + of_gate);
        float squares = 0.0f;
#pragma unroll
        for (int k = 0; k < COUNT; ++k) {
            z.v[k] *= part_of(z.v[k]);
            if (GATE_FIRST) { a.v[k] *= z.v[k]; }
            squares = fmaf(a.v[k], a.v[k], squares);
        }
        const float rstd = rstd_of(squares, eps, sum);
#pragma unroll
        for (int k = 0; k < COUNT; ++k) {
            a.v[k] = GATE_FIRST ? w.v[k] * (rstd * a.v[k])
                                : rounded(w.v[k] * rounded(rstd * a.v[k])) * z.v[k];
        }
        a.store(out + of_x);
    });
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    gated_norm_backward(T* __restrict__ d_x, T* __restrict__ d_gate, f32* __restrict__ partial,
                        const T* __restrict__ d_out, const T* __restrict__ x,
                        const T* __restrict__ gate, const T* __restrict__ weight, f32 eps,
                        i64 rows, i32 heads, i32 columns, i32 offset) {
    __shared__ float shared[HEADS][HEAD_DIM], summed[2 * THREADS / 32];
    HeadSum sum{summed};
    Head w;
    i32 of_weight = blockIdx.y * HEAD_DIM;
    w.load(weight + of_weight);
    float sums[COUNT] = {};
    each_head(rows, heads, columns, offset, [&](i64 of_x, i64 of_gate) {
        Head a, z, d;
        a.load(x + of_x);
        z.load(gate + of_gate);
        d.load(d_out + of_x);
        float squares = 0.0f;
#pragma unroll
        for (int k = 0; k < COUNT; ++k) {
            const float normed = GATE_FIRST ? a.v[k] * (z.v[k] * part_of(z.v[k])) : a.v[k];
            squares = fmaf(normed, normed, squares);
        }
        const float rstd = rstd_of(squares, eps, sum);
        if (LANES > 32) {  // registers are few: load a wide head's weights from the cache each time
            forget(of_weight);
            w.load(weight + of_weight);
        }
        float dot = 0.0f;
#pragma unroll
        for (int k = 0; k < COUNT; ++k) {
            const float part = part_of(z.v[k]), active = z.v[k] * part;
            const float x_hat = rstd * (GATE_FIRST ? a.v[k] * active : a.v[k]);
            const float d_y = GATE_FIRST ? d.v[k] : d.v[k] * active;
            if (!GATE_FIRST) {
                z.v[k] = d.v[k] * (w.v[k] * x_hat) * Silu::slope(z.v[k], part, active);
                a.v[k] = x_hat;
            }
            sums[k] = fmaf(d_y, x_hat, sums[k]);
            d.v[k] = d_y * w.v[k];
            dot = fmaf(d.v[k], x_hat, dot);
        }
        const float mean = sum(dot) / (float)HEAD_DIM;
#pragma unroll
        for (int k = 0; k < COUNT; ++k) {
            if (GATE_FIRST) {
                const float part = part_of(z.v[k]), active = z.v[k] * part;
                const float d_n = rstd * (d.v[k] - rstd * (a.v[k] * active) * mean);
                d.v[k] = d_n * active;
                z.v[k] = d_n * a.v[k] * Silu::slope(z.v[k], part, active);
            } else {
                d.v[k] = rstd * (d.v[k] - a.v[k] * mean);
            }
        }
        z.store(d_gate + of_gate);
        d.store(d_x + of_x);
    });
#pragma unroll
    for (int k = 0; k < COUNT; ++k) { shared[threadIdx.x / LANES][Head::place(k)] = sums[k]; }
    __syncthreads();
    for (int c = threadIdx.x; c < HEAD_DIM; c += THREADS) {
        float total = 0.0f;
#pragma unroll
        for (int h = 0; h < HEADS; ++h) { total += shared[h][c]; }
        partial[((i64)blockIdx.x * gridDim.y + blockIdx.y) * HEAD_DIM + c] = total;
    }
}
