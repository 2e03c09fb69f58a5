// random.cu -- normally distributed random numbers: Philox4x32-10 and Box-Muller.
//
//   (w0, w1, w2, w3) = philox(key = seed, counter = j)     u(w) = (w >> 8) / 2^24
//   elements 4j, 4j+1 = std * sqrt(-2 ln(u(w0) + 2^-24)) * (cos, sin)(2 pi u(w1)); 4j+2, 4j+3 from
//   w2, w3. out[i] is element first_index + i.
//
// Data     out: n elements of T, F32 or BF16.
// Launch   256 threads, one counter each: ceil((first_index % 4 + n) / 4) counters.
// Cost     out written once, four elements at a time if first_index % 4 == 0. Bound by arithmetic:
//          60 instructions per element. Start-up only.
// Needs    nothing.
#include "common.cuh"

constexpr int ROUNDS = 10;

// Elements of one counter.
struct alignas(4 * sizeof(T)) Four {
    T v[4];
};

// J. Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (2011), table 2.
__device__ __forceinline__ void philox(u32 (&x)[4], u32 k0, u32 k1) {
#pragma unroll
    for (int round = 0; round < ROUNDS; ++round) {
        const u64 product0 = (u64)x[0] * 0xD2511F53u;
        const u64 product1 = (u64)x[2] * 0xCD9E8D57u;
        x[0] = (u32)(product1 >> 32) ^ x[1] ^ k0;
        x[1] = (u32)product1;
        x[2] = (u32)(product0 >> 32) ^ x[3] ^ k1;
        x[3] = (u32)product0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
}

extern "C" __global__ void __launch_bounds__(256)
random_normal(T* __restrict__ out, f32 std, u32 seed_low, u32 seed_high, i64 first_index, i64 n) {
    const i64 counter = first_index / 4 + (i64)blockIdx.x * blockDim.x + threadIdx.x;
    const i64 first = 4 * counter - first_index;
    if (first >= n) { return; }
    u32 words[4] = {(u32)counter, (u32)((u64)counter >> 32), 0, 0};
    philox(words, seed_low, seed_high);
    Four result;
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
        // 24 bits each, exact in F32: the radius from (0, 1], the angle from [0, 1).
        const float unit = ((float)(words[2 * pair] >> 8) + 1.0f) * 0x1p-24f;
        const float turn = (float)(words[2 * pair + 1] >> 8) * 0x1p-24f;
        const float radius = sqrtf(-2.0f * logf(unit));
        float sine, cosine;
        sincospif(2.0f * turn, &sine, &cosine);
        result.v[2 * pair] = from_f32<T>(radius * cosine * std);
        result.v[2 * pair + 1] = from_f32<T>(radius * sine * std);
    }
    if (first_index % 4 == 0 && first + 4 <= n) {
        *reinterpret_cast<Four*>(out + first) = result;
        return;
    }
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        if (first + k >= 0 && first + k < n) { out[first + k] = result.v[k]; }
    }
}
