// muon.cu -- Muon's kernels beside its products: proposed change, its norm, its application.
//
//   propose     g = grad_scale * grad          m += (1 - momentum) * (g - m)
//               change = bf16(m + (1 - momentum) * (g - m)), Nesterov's rule
//   squares     partials[i] = sums of squares of the elements of matrix i
//   normalize   out[i] = x[i] / max(bf16(norm of x[i]), 1e-7)
//   diagonal    x[i] += value * identity
//   row_factors v += (1 - decay) * (mean square of the row - v) for each row
//               factors = c / (sqrt(v) + 1e-10), with the c that keeps the matrix's norm
//   row_scale   x *= its row's factor
//   apply       param -= lr * change + lr * weight_decay * param;  work = bf16(param)
//
// Data     declared in llmq/ops/update/muon.py. m_scale: null unless m is E4M3, see moments.cuh.
//          first: the slab's element at which the tensors begin. squares, normalize: x are matrices
//          of n elements, out may be x. partials: equally many for each matrix. row_factors:
//          squares has one number for each row; v is used from element `shift` on.
// Launch   propose, apply: 128 threads, ceil(n / 1024) blocks. squares, normalize: 256 threads, a
//          column of blocks for each matrix. diagonal: 256 threads, one for each number.
//          row_factors: 256 threads, a block for each matrix. row_scale: 256 threads, a block for
//          each row.
// Cost     every tensor once; memory-bound. normalize: each block also sums the partials of its
//          matrix. squares, normalize: with several matrices of n elements, n not a multiple of 8,
//          each element takes a load. diagonal: a sector of memory for each number.
// Needs    scalars final on the same stream. skip_update: propose writes zeros, apply nothing, and
//          row_factors keeps v, as for any matrix of zeros.
#include "update/moments.cuh"

// The same seed as AdamW's, since only one update rule works on a slab.
__device__ __forceinline__ u32 slab_seed(const StepScalars* scalars, u32 salt) {
    return mix_word(mix_word(mix_word(0, scalars->seed), scalars->step), salt);
}

extern "C" __global__ void __launch_bounds__(128)
muon_propose(bf16* __restrict__ change, const G* __restrict__ grad, M* __restrict__ m,
             f32* __restrict__ m_scale, const StepScalars* __restrict__ scalars,
             f32 one_minus_momentum, u32 salt, i64 first, i64 n) {
    const i64 mine = ((i64)blockIdx.x * blockDim.x + threadIdx.x) * COUNT;
    Pack<bf16, COUNT> change_pack;
    if (scalars->skip_update) {
#pragma unroll
        for (int k = 0; k < COUNT; ++k) { change_pack.set(k, __float2bfloat16(0.0f)); }
        if (mine < n) { change_pack.store(change + mine); }
        return;
    }
    // `fit` needs whole warps: threads past the end compute the last elements and store nothing.
    const i64 start = min(mine, n - COUNT);
    Pack<G, COUNT> g_pack;
    Moment<M, false> state;
    g_pack.load(grad + start);
    state.load(m, m_scale, start);
    float m_new[COUNT];
#pragma unroll
    for (int k = 0; k < COUNT; ++k) {
        const float g = g_pack.get(k) * scalars->grad_scale;
        m_new[k] = state.get(k);
        m_new[k] += (g - m_new[k]) * one_minus_momentum;
        change_pack.set(k, __float2bfloat16(m_new[k] + (g - m_new[k]) * one_minus_momentum));
    }
    state.fit(m_new);
    const u32 seed = mix_word(0, slab_seed(scalars, salt));
#pragma unroll
    for (int k = 0; k < COUNT; ++k) {
        state.set(k, m_new[k], random_bits(seed, (u64)(first + start) | k));
    }
    if (mine >= n) { return; }
    change_pack.store(change + start);
    state.store(m, m_scale, start);
}

// Number of vectors in each matrix of n elements; 0 if a matrix does not begin on 16 bytes.
__device__ __forceinline__ i64 whole_vectors(i64 n) {
    return gridDim.x == 1 || n % Vec<bf16>::N == 0 ? n / Vec<bf16>::N : 0;
}

extern "C" __global__ void __launch_bounds__(256)
muon_squares(f64* __restrict__ partials, const bf16* __restrict__ x, i64 n) {
    __shared__ f64 shared[32];
    x += blockIdx.x * n;
    const i64 vectors = whole_vectors(n), stride = (i64)gridDim.y * blockDim.x;
    const i64 own = (i64)blockIdx.y * blockDim.x + threadIdx.x;
    f64 total = 0.0;
#pragma unroll 4  // puts the loads in flight together
    for (i64 i = own; i < vectors; i += stride) {
        const Vec<bf16> v = load_vec(x + i * Vec<bf16>::N);
        float sum = 0.0f;
#pragma unroll
        for (int k = 0; k < Vec<bf16>::N; ++k) { sum += to_f32(v[k]) * to_f32(v[k]); }
        total += sum;
    }
    for (i64 i = vectors * Vec<bf16>::N + own; i < n; i += stride) {
        total += to_f32(x[i]) * to_f32(x[i]);
    }
    total = block_sum(total, shared);
    if (threadIdx.x == 0) { partials[(i64)blockIdx.x * gridDim.y + blockIdx.y] = total; }
}

// No __restrict__: out may be x.
extern "C" __global__ void __launch_bounds__(256)
muon_normalize(bf16* out, const bf16* x, const f64* __restrict__ partials, i32 num_partials,
               i64 n) {
    __shared__ f64 shared[32];
    out += blockIdx.x * n, x += blockIdx.x * n, partials += (i64)blockIdx.x * num_partials;
    f64 total = 0.0;
    for (int i = threadIdx.x; i < num_partials; i += blockDim.x) { total += partials[i]; }
    const float norm = (float)sqrt(block_sum(total, shared));
    const float factor = 1.0f / fmaxf(to_f32(__float2bfloat16(norm)), 1e-7f);
    const i64 vectors = whole_vectors(n), stride = (i64)gridDim.y * blockDim.x;
    const i64 own = (i64)blockIdx.y * blockDim.x + threadIdx.x;
    for (i64 i = own; i < vectors; i += stride) {
        Vec<bf16> v = load_vec_stream(x + i * Vec<bf16>::N);
#pragma unroll
        for (int k = 0; k < Vec<bf16>::N; ++k) { v[k] = __float2bfloat16(to_f32(v[k]) * factor); }
        store_vec(out + i * Vec<bf16>::N, v);
    }
    for (i64 i = vectors * Vec<bf16>::N + own; i < n; i += stride) {
        out[i] = __float2bfloat16(to_f32(x[i]) * factor);
    }
}

extern "C" __global__ void __launch_bounds__(256)
muon_diagonal(bf16* __restrict__ x, f32 value, i32 side, i32 count) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count * side) { return; }
    bf16* const number = x + ((i64)i / side * side + i % side) * side + i % side;
    *number = __float2bfloat16(to_f32(*number) + value);
}

extern "C" __global__ void __launch_bounds__(256)
muon_row_factors(f32* __restrict__ factors, f32* __restrict__ v, const f64* __restrict__ squares,
                 f32 one_minus_decay, i32 columns, i32 rows, i32 shift) {
    __shared__ f64 shared[32];
    const i64 first = (i64)blockIdx.x * rows;
    factors += first, v += shift + first, squares += first;
    f64 before = 0.0, after = 0.0;
    for (int i = threadIdx.x; i < rows; i += blockDim.x) { before += squares[i]; }
    before = block_sum(before, shared);
    for (int i = threadIdx.x; i < rows; i += blockDim.x) {
        if (before > 0.0) { v[i] += ((float)(squares[i] / columns) - v[i]) * one_minus_decay; }
        factors[i] = 1.0f / (sqrtf(v[i]) + 1e-10f);
        after += squares[i] * factors[i] * factors[i];
    }
    after = block_sum(after, shared);
    const float times = after > 0.0 ? (float)sqrt(before / after) : 0.0f;
    for (int i = threadIdx.x; i < rows; i += blockDim.x) { factors[i] *= times; }
}

extern "C" __global__ void __launch_bounds__(256)
muon_row_scale(bf16* __restrict__ x, const f32* __restrict__ factors, i32 columns) {
    bf16* const row = x + (i64)blockIdx.x * columns;
    const float factor = factors[blockIdx.x];
    for (int i = threadIdx.x; i < columns; i += blockDim.x) {
        row[i] = __float2bfloat16(to_f32(row[i]) * factor);
    }
}

extern "C" __global__ void __launch_bounds__(128)
muon_apply(P* __restrict__ param, bf16* __restrict__ work, const D* __restrict__ change,
           const StepScalars* __restrict__ scalars, f32 lr_scale, f32 weight_decay, u32 salt,
           i64 first, i64 n) {
    const i64 start = ((i64)blockIdx.x * blockDim.x + threadIdx.x) * COUNT;
    if (start >= n || scalars->skip_update) { return; }
    Pack<P, COUNT> p_pack;
    Pack<D, COUNT> change_pack;
    Pack<bf16, COUNT> work_pack;
    p_pack.load(param + start);
    change_pack.load(change + start);
    const float lr = scalars->lr * lr_scale, decay = lr * weight_decay;
    const u32 seed = slab_seed(scalars, salt);
#pragma unroll
    for (int k = 0; k < COUNT; ++k) {
        const float p = p_pack.get(k);
        const float step = change_pack.get(k) * lr + p * decay;
        p_pack.set(k, rounded<P>(p - step, random_bits(seed, (u64)(first + start) | k)));
        work_pack.set(k, __float2bfloat16(p_pack.get(k)));
    }
    p_pack.store(param + start);
    if (work != nullptr) { work_pack.store(work + start); }
}
