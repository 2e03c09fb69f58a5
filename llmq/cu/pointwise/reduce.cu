// reduce.cu -- add tensors to a gradient; and column sums, the gradient of a bias.
//
//   d_sum[i] = round((accumulate ? d_sum[i] : 0) + part0[i] + part1[i] + ...)
//
// The kernel adds from left to right in F32 and rounds once. A BF16 d_sum with more than one addend
// is rounded stochastically, by the random bits of element first + i; other sums to nearest.
//
// Data     declared in llmq/ops/pointwise/reduce.py. The first PARTS parts are set, the others
//          null; a part may be d_sum, or in pinned memory.
// Launch   256 threads, ceil(n / 2048) blocks: 8 elements per thread.
// Cost     all parts read and d_sum written once; a thread's loads of all parts are in flight
//          together.
// Needs    scalars' seed, step and micro_step, if G is BF16 and something is added. first % 8 == 0.
#include "common.cuh"

#ifndef PARTS  // compiled for another entry
#define PARTS 1
#endif

constexpr int COUNT = 8, MAX_PARTS = 8;  // each number of PARTS is compiled separately

__device__ __forceinline__ float summed(float x, bool several, u32 bits, float) { return x; }
__device__ __forceinline__ bf16 summed(float x, bool several, u32 bits, bf16) {
    return several ? round_stochastic(x, bits) : from_f32<bf16>(x);
}

// COUNT neighbours as they were loaded.
template <class X> struct Loaded {
    static constexpr int N = Vec<X>::N;
    uint4 vector[COUNT / N];

    __device__ __forceinline__ void load(const X* p) {
#pragma unroll
        for (int k = 0; k < COUNT / N; ++k) { vector[k] = load_packed_stream(p + k * N); }
    }
    __device__ __forceinline__ void add_to(float (&total)[COUNT]) const {
#pragma unroll
        for (int k = 0; k < COUNT; ++k) { total[k] += to_f32(unpack<X>(vector[k / N])[k % N]); }
    }
};

extern "C" __global__ void __launch_bounds__(256)
reduce_sum(G* d_sum, const T* part0, const T* part1, const T* part2, const T* part3, const T* part4,
           const T* part5, const T* part6, const T* part7,
           const StepScalars* __restrict__ scalars, i32 accumulate, u32 salt, i64 first, i64 n) {
    const T* const parts[MAX_PARTS] = {part0, part1, part2, part3, part4, part5, part6, part7};
    const i64 start = ((i64)blockIdx.x * blockDim.x + threadIdx.x) * COUNT;
    const bool several = accumulate || PARTS > 1;
    const u32 seed = gradient_seed(scalars, salt);
    if (start + COUNT <= n) {
        Loaded<G> before;
        Loaded<T> loaded[PARTS];
        if (accumulate) { before.load(d_sum + start); }
#pragma unroll
        for (int p = 0; p < PARTS; ++p) { loaded[p].load(parts[p] + start); }
        // Adding -0 changes no number, not even -0.
        float total[COUNT];
#pragma unroll
        for (int k = 0; k < COUNT; ++k) { total[k] = -0.0f; }
        if (accumulate) { before.add_to(total); }
#pragma unroll
        for (int p = 0; p < PARTS; ++p) { loaded[p].add_to(total); }
        Pack<G, COUNT> out;
#pragma unroll
        for (int k = 0; k < COUNT; ++k) {
            out.set(k, summed(total[k], several, gradient_bits(seed, first + start >> 3, k), G()));
        }
        out.store(d_sum + start);
    } else {
        for (i64 i = start; i < n; ++i) {
            float total = accumulate ? to_f32(d_sum[i]) : -0.0f;
#pragma unroll
            for (int p = 0; p < PARTS; ++p) { total += to_f32(parts[p][i]); }
            const u32 bits = gradient_bits(seed, first + start >> 3, i - start);
            d_sum[i] = summed(total, several, bits, G());
        }
    }
}

// -- the gradient of a bias: column sums, in two stages
//
//   partial[s, c] = sum of d_out[r, c] over the rows r of split s, s = r / ceil(rows / splits)
//   d[c]          = or += sum of partial[s, c] over s, as store_gradient
//
// column_sum also adds up the partial sums of other operations' blocks.
//
// Data     d_out: (rows, N) of T, 16-byte aligned, N with WIDE a multiple of 16 bytes. partial:
//          (splits, N) F32, for column_sum any (rows, columns). d: N of G.
// Launch   backward: 256 threads, (ceil(N / tile), splits) blocks; a tile is 16 threads wide, 16
//          bytes each, without WIDE one element each. column_sum: 1024 threads; several warps of a
//          block, a power of two, share 32 columns, so that each warp adds about 8 rows.
// Cost     d_out read once; 8 16-byte loads in flight per thread. column_sum takes a few
//          microseconds.
// Needs    no split without rows.

constexpr int THREADS = 256, LANES = 16, ROWS = THREADS / LANES, WARPS = THREADS / 32;
constexpr int UNROLL = 8;
#ifndef WIDE
#define WIDE 1
#endif
constexpr int VECTOR = WIDE ? Vec<T>::N : 1;

// A thread's columns of one row, as they were loaded.
struct Columns {
#if WIDE
    uint4 x;
    __device__ __forceinline__ void load(const T* p) { x = load_packed_stream(p); }
    __device__ __forceinline__ void add_to(float (&sum)[VECTOR]) const {
        const Vec<T> v = unpack<T>(x);
#pragma unroll
        for (int k = 0; k < VECTOR; ++k) { sum[k] += to_f32(v[k]); }
    }
#else
    T x;
    __device__ __forceinline__ void load(const T* p) { x = *p; }
    __device__ __forceinline__ void add_to(float (&sum)[VECTOR]) const { sum[0] += to_f32(x); }
#endif
};

extern "C" __global__ void __launch_bounds__(THREADS, 3)
bias_backward(f32* __restrict__ partial, const T* __restrict__ d_out, i64 rows, i32 N, i32 splits) {
    __shared__ float shared[WARPS][LANES * VECTOR];
    const int lane = threadIdx.x % LANES;
    const i64 column = ((i64)blockIdx.x * LANES + lane) * VECTOR;
    const i64 step = (rows + splits - 1) / splits;
    const i64 end = min(rows, (blockIdx.y + 1) * step);
    float sum[VECTOR] = {};
    if (column < N) {
        const T* const top = d_out + column;
        for (i64 r = blockIdx.y * step + threadIdx.x / LANES; r < end; r += ROWS * UNROLL) {
            Columns x[UNROLL];
#pragma unroll
            for (int u = 0; u < UNROLL; ++u) {
                if (r + u * ROWS < end) { x[u].load(top + (r + u * ROWS) * N); }
            }
#pragma unroll
            for (int u = 0; u < UNROLL; ++u) {
                if (r + u * ROWS < end) { x[u].add_to(sum); }
            }
        }
    }
    // The two halves of a warp hold the same columns of different rows.
#pragma unroll
    for (int k = 0; k < VECTOR; ++k) {
        sum[k] += __shfl_xor_sync(0xFFFFFFFFu, sum[k], LANES);
        if (threadIdx.x % 32 < LANES) { shared[threadIdx.x / 32][lane * VECTOR + k] = sum[k]; }
    }
    __syncthreads();
    const i64 c = (i64)blockIdx.x * LANES * VECTOR + threadIdx.x;
    if (threadIdx.x < LANES * VECTOR && c < N) {
        float total = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) { total += shared[w][threadIdx.x]; }
        partial[blockIdx.y * (i64)N + c] = total;
    }
}

extern "C" __global__ void __launch_bounds__(1024, 1)
column_sum(G* __restrict__ d, const f32* __restrict__ partial, const i32* __restrict__ scalars,
           i32 rows, i32 columns, i32 accumulate, u32 salt) {
    constexpr int UNROLL = 8;
    __shared__ float sums[32][32];
    int groups = 1;  // warps that share 32 columns
    while (groups < 32 && groups * UNROLL < rows) { groups *= 2; }
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, across = 32 / groups;
    const int c = (blockIdx.x * across + warp % across) * 32 + lane;
    // The time of a short kernel is the number of loads that wait for one another. So the values
    // that are needed at the end are loaded first.
    const bool mine = warp < across && c < columns;
    const u32 seed = gradient_seed(reinterpret_cast<const StepScalars*>(scalars), salt);
    const G before = mine && accumulate ? d[c] : from_f32<G>(0.0f);
    float sum = 0.0f;
    for (int start = warp / across; start < rows; start += groups * UNROLL) {
        float loaded[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            const int r = start + groups * u;
            loaded[u] = r < rows && c < columns ? partial[(i64)r * columns + c] : 0.0f;
        }
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) { sum += loaded[u]; }
    }
    sums[warp][lane] = sum;
    __syncthreads();
    if (mine) {
        for (int g = warp + across; g < 32; g += across) { sum += sums[g][lane]; }
        d[c] = accumulate ? add_gradient(before, sum, gradient_bits(seed, c >> 3, c & 7))
                          : from_f32<G>(sum);
    }
}
