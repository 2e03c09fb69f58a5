// global_norm.cu -- the norm of all gradients, gradient scale and skip flag for the update rule.
//
//   partials[block] = sum of x^2 over the block's part      stats[norm_squared] += sum(partials)
//   combine: stats[k] = sum of gathered[rank, k] in the order of ranks, or the largest of them if
//            bit k of maxima is set
//   norm = sqrt(norm_squared) / count
//   grad_scale = (grad_clip / norm if 0 < grad_clip < norm else 1) / count
//   skip_update = norm is not finite or count == 0 or, for a limit above 0, one of these is false:
//                 norm <= norm_limit, loss / count <= loss_limit
//
// Data     declared in llmq/ops/update/global_norm.py. partials: one per block.
// Launch   partials: 256 threads, any grid. sum: 1024 threads, 1 block. combine: n threads.
//          finish: one thread.
// Cost     x read once; four 16-byte loads in flight per thread; squares add up in F32 over 64
//          bytes at a time, then in F64, so that the slow F64 of consumer GPUs costs no time.
// Needs    finish: loss, count and norm_squared final on the same stream.
#include "common.cuh"

// Indices of llmq.base.dtypes.STAT.
constexpr int LOSS = 0, COUNT = 1, NORM_SQUARED = 2, NORM = 3;
constexpr int UNROLL = 4;

extern "C" __global__ void __launch_bounds__(256)
global_norm_partials(f64* __restrict__ partials, const G* __restrict__ x, i64 n) {
    __shared__ f64 shared[32];
    const i64 vectors = n / Vec<G>::N;
    const i64 chunk = (i64)UNROLL * blockDim.x;
    f64 total = 0.0;
    for (i64 start = blockIdx.x * chunk; start < vectors; start += gridDim.x * chunk) {
        Vec<G> loaded[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            const i64 i = start + u * blockDim.x + threadIdx.x;
            if (i < vectors) {
                loaded[u] = load_vec_stream(x + i * Vec<G>::N);
            } else {
                *reinterpret_cast<uint4*>(&loaded[u]) = make_uint4(0, 0, 0, 0);
            }
        }
        float sum = 0.0f;
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
#pragma unroll
            for (int k = 0; k < Vec<G>::N; ++k) {
                const float value = to_f32(loaded[u][k]);
                sum = fmaf(value, value, sum);
            }
        }
        total += sum;
    }
    if (blockIdx.x == 0 && threadIdx.x < n - vectors * Vec<G>::N) {
        const float value = to_f32(x[vectors * Vec<G>::N + threadIdx.x]);
        total += value * value;
    }
    total = block_sum(total, shared);
    if (threadIdx.x == 0) { partials[blockIdx.x] = total; }
}

extern "C" __global__ void __launch_bounds__(1024)
global_norm_sum(f64* __restrict__ stats, const f64* __restrict__ partials, i32 num_partials) {
    __shared__ f64 shared[32];
    f64 total = 0.0;
#pragma unroll 4
    for (int i = threadIdx.x; i < num_partials; i += blockDim.x) { total += partials[i]; }
    total = block_sum(total, shared);
    if (threadIdx.x == 0) { stats[NORM_SQUARED] += total; }
}

extern "C" __global__ void __launch_bounds__(64)
global_norm_combine(f64* __restrict__ stats, const f64* __restrict__ gathered, i32 world_size,
                    i64 maxima) {
    const int k = threadIdx.x;
    f64 total = gathered[k];
    for (int rank = 1; rank < world_size; ++rank) {
        const f64 other = gathered[rank * blockDim.x + k];
        total = maxima >> k & 1 ? fmax(total, other) : total + other;
    }
    stats[k] = total;
}

extern "C" __global__ void global_norm_finish(f64* __restrict__ stats,
                                              StepScalars* __restrict__ scalars) {
    const f64 count = stats[COUNT];
    const f64 norm = count > 0.0 ? sqrt(stats[NORM_SQUARED]) / count : 0.0;
    stats[NORM] = norm;
    const f64 norm_limit = scalars->norm_limit, loss_limit = scalars->loss_limit;
    const bool over = (norm_limit > 0.0 && !(norm <= norm_limit)) ||
                      (loss_limit > 0.0 && !(stats[LOSS] / count <= loss_limit));
    const bool skip = count == 0.0 || !isfinite(norm) || over;
    const f64 clip = scalars->grad_clip;
    const f64 factor = clip > 0.0 && norm > clip ? clip / norm : 1.0;
    scalars->grad_scale = skip ? 0.0f : (float)(factor / count);
    scalars->skip_update = skip;
}
