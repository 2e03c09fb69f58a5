// activation.cuh -- activations that are their argument times a share of it, x * s(x).
//
//   SiLU    s = sigmoid(x)
//   GELU    s = 0.5 * (1 + tanh(u)) = sigmoid(2u), with 2u = x * (C1 + C3 * x^2): the tanh
//           approximation. The sigmoid form has no branch, unlike tanhf, and no cancellation.
#pragma once
#include "common.cuh"

constexpr float C1 = 1.5957691216057308f;   // 2 * sqrt(2 / pi)
constexpr float C3 = 0.07135481627260025f;  // C1 * 0.044715
constexpr float THREE_C3 = 0.21406444881780073f;  // rounded as the references round 3 * C3

struct Silu {
    static __device__ __forceinline__ float share(float x) { return sigmoid(x); }
    // The derivative of x * s.
    static __device__ __forceinline__ float slope(float x, float s) {
        return ((1.0f - s) * x + 1.0f) * s;
    }
};

struct Gelu {
    static __device__ __forceinline__ float share(float x) {
        return sigmoid((x * x * C3 + C1) * x);
    }
    // s + s * (1 - s) * x * (C1 + 3 * C3 * x^2)
    static __device__ __forceinline__ float slope(float x, float s) {
        return (x * x * THREE_C3 + C1) * x * s * (1.0f - s) + s;
    }
};
