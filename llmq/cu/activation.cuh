// activation.cuh -- activations that are their argument times a share of it, x * s(x).
//
//   SiLU    s = sigmoid(x)
//   GELU    s = 0.5 * (1 + tanh(u)) = sigmoid(2u), with 2u = x * (C1 + C3 * x^2): the tanh
//           approximation. The sigmoid form has no branch, unlike tanhf, and no cancellation.
#pragma once
#include "common.cuh"
#include "ptx.cuh"

constexpr float C1 = 1.5957691216057308f;   // 2 * sqrt(2 / pi)
constexpr float C3 = 0.07135481627260025f;  // C1 * 0.044715
constexpr float THREE_C3 = 0.21406444881780073f;  // rounded as the references round 3 * C3

// argument: what s is the sigmoid of. FAR: the bits of a BF16 number above those for which s is no
// normal number, -87 and -9.875.
struct Silu {
    static constexpr u32 FAR = 0xC2AE;
    static __device__ __forceinline__ float argument(float x) { return x; }
    static __device__ __forceinline__ float share(float x) { return sigmoid(argument(x)); }
    // The derivative of x * s.
    static __device__ __forceinline__ float slope(float x, float s) {
        return ((1.0f - s) * x + 1.0f) * s;
    }
};

struct Gelu {
    static constexpr u32 FAR = 0xC11E;
    static __device__ __forceinline__ float argument(float x) { return (x * x * C3 + C1) * x; }
    static __device__ __forceinline__ float share(float x) { return sigmoid(argument(x)); }
    // s + s * (1 - s) * x * (C1 + 3 * C3 * x^2)
    static __device__ __forceinline__ float slope(float x, float s) {
        return (x * x * THREE_C3 + C1) * x * s * (1.0f - s) + s;
    }
};

// s[k] = Activation::share(x[k]), the same bits. A division has a branch, for results that are not
// normal numbers, between which the compiler cannot mix instructions. MAY_BE_FAR = false: all x are
// above FAR, and there is no branch.
template <class Activation, bool MAY_BE_FAR, int COUNT>
__device__ __forceinline__ void shares(float (&s)[COUNT], const float (&x)[COUNT]) {
#pragma unroll
    for (int k = 0; k < COUNT; ++k) {
        if constexpr (MAY_BE_FAR) {
            s[k] = Activation::share(x[k]);
        } else {
            const float y = 1.0f + expf(-Activation::argument(x[k]));
            const float near = reciprocal_approx(y);
            s[k] = fmaf(near, fmaf(-y, near, 1.0f), near);  // as division does it
        }
    }
}
