// dropout.cu -- dropout whose choice follows from seed, step, sequence and place.
//
//   index = sequence * per_sequence + place     sequence = first_sequence + i / per_sequence * stride
//   out[i] = T([out[i] +] (random_bits(seed, index) >= threshold ? scale * x[i] : 0))
//
// Data     out, x: n elements of T (f32, bf16), 16-byte aligned; per_sequence % 8 == 0.
// Launch   256 threads, ceil(n / 2048) blocks: 8 elements per thread. ADD is a constant.
// Cost     x read, out written (with ADD read too) once; 12 instructions for an element's bits.
// Needs    scalars' seed, step, first_sequence, sequence_stride. out may be x.
#include "common.cuh"

constexpr int COUNT = 8;

extern "C" __global__ void __launch_bounds__(256)
dropout(T* out, const T* x, const StepScalars* __restrict__ scalars, u32 threshold, f32 scale,
        u32 salt, i64 per_sequence, i64 n) {
    const i64 first = ((i64)blockIdx.x * blockDim.x + threadIdx.x) * COUNT;
    if (first >= n) { return; }
    const u32 seed = mix_word(mix_word(mix_word(0, scalars->seed), scalars->step), salt);
    const u64 number = (u64)(first / per_sequence);
    const u64 sequence = scalars->first_sequence + number * scalars->sequence_stride;
    const u64 start = sequence * (u64)per_sequence + (u64)(first % per_sequence);
    Pack<T, COUNT> values, sums;
    values.load(x + first);
    if (ADD) { sums.load(out + first); }
#pragma unroll
    for (int k = 0; k < COUNT; ++k) {
        // A multiple of 8: `|` keeps the index's high word the same for all k.
        const bool stays = random_bits(seed, start | k) >= threshold;
        const float kept = stays ? __fmul_rn(values.get(k), scale) : 0.0f;
        sums.set(k, from_f32<T>(ADD ? sums.get(k) + kept : kept));
    }
    sums.store(out + first);
}
