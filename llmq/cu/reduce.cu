// reduce.cu -- add tensors to a gradient.
//
//   d_sum[i] = round((accumulate ? d_sum[i] : 0) + part0[i] + part1[i] + ...)
//
// from left to right in F32, rounded once: stochastically where d_sum is BF16 and there is more than
// one addend, by the random bits of element first + i; else to nearest.
//
// Data     d_sum G, PARTS parts T: n elements, each F32 or BF16, 16-byte aligned; the other
//          pointers are null. d_sum may be one of the parts. Parts may be in pinned memory.
// Launch   256 threads, ceil(n / 2048) blocks: 8 elements per thread.
// Cost     all read and d_sum written once; a thread's loads of all parts are in flight together.
// Needs    scalars' seed, step and micro_step, if G is BF16 and something is added. first % 8 == 0.
#include "common.cuh"

constexpr int COUNT = 8, MAX_PARTS = 8;  // PARTS of them is a constant of the launch

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
        // -0 is what does not change any number that it is added to.
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
