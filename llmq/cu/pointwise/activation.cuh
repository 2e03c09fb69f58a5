// activation.cuh -- activations of the form x * s(x).
//
//   SiLU    s = sigmoid(x)
//   GELU    s = 0.5 * (1 + tanh(u)) = sigmoid(2u), with 2u = x * (C1 + C3 * x^2): the tanh
//           approximation. The sigmoid form has no branch, unlike tanhf, and no cancellation.
//   RELU2   s = max(x, 0): the square of ReLU
#pragma once
#include "common.cuh"
#include "ptx.cuh"

#ifdef __CUDA_ARCH__
constexpr bool ON_HOPPER = __CUDA_ARCH__ == 900;
#else
constexpr bool ON_HOPPER = false;
#endif

constexpr float C1 = 1.5957691216057308f;   // 2 * sqrt(2 / pi)
constexpr float C3 = 0.07135481627260025f;  // C1 * 0.044715
constexpr float THREE_C3 = 0.21406444881780073f;  // rounded as the references round 3 * C3

// exponent: s = 1 / (1 + 2^exponent). argument: s = sigmoid(argument).
struct Silu {
    static constexpr bool SIGMOID = true;
    static __device__ __forceinline__ float argument(float x) { return x; }
    static __device__ __forceinline__ float exponent(float x) { return -LOG2E * x; }
    // The derivative of x * s, given both: s + s * (1 - s) * x.
    static __device__ __forceinline__ float slope(float, float s, float active) {
        return fmaf(active, 1.0f - s, s);
    }
};

struct Gelu {
    static constexpr bool SIGMOID = true;
    static __device__ __forceinline__ float argument(float x) { return (x * x * C3 + C1) * x; }
    static __device__ __forceinline__ float exponent(float x) {
        return (x * x * (-LOG2E * C3) + -LOG2E * C1) * x;
    }
    // s + s * (1 - s) * x * (C1 + 3 * C3 * x^2)
    static __device__ __forceinline__ float slope(float x, float s, float active) {
        return fmaf((x * x * THREE_C3 + C1) * (1.0f - s), active, s);
    }
};

struct SquaredRelu {
    static constexpr bool SIGMOID = false;
    static __device__ __forceinline__ float slope(float, float s, float) { return 2.0f * s; }
};

template <bool GELU_GATE> struct GateOf { using Type = Silu; };
template <> struct GateOf<true> { using Type = Gelu; };
template <bool SQUARED> struct ActivationOf { using Type = Gelu; };
template <> struct ActivationOf<true> { using Type = SquaredRelu; };

// Returns s(x). EXACT, for results in F32: the error is a few units in the last place. Otherwise
// two instructions without a branch compute s within 1e-5 of s, which is 2^-8 of BF16's rounding
// error; the result is 0 where s is subnormal.
template <class Activation, bool EXACT> __device__ __forceinline__ float share(float x) {
    if constexpr (!Activation::SIGMOID) {
        return x < 0.0f ? 0.0f : x;  // NaN stays NaN
    } else if constexpr (EXACT) {
        return sigmoid(Activation::argument(x));
    } else {
        return reciprocal_approx(1.0f + exp2_approx(Activation::exponent(x)));
    }
}
