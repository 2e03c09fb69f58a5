// common.cuh -- code that all kernels share: types, 16-byte vectors, reductions, random bits.
//
// StepScalars is STEP_SCALARS in llmq/base/dtypes.py; llmq/ref/common.py has the random functions
// in Python. Both sides must stay bit-identical: tests compare them exactly.
// Compiled with -fmad=false: a fused multiply-add appears only where fmaf() is written, so that
// results do not depend on the compiler's choice and match NumPy.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp8.h>

using bf16 = __nv_bfloat16;
using i64 = long long;
using u32 = unsigned int;
using f32 = float;
using f64 = double;
using i32 = int;
using i8 = signed char;
using u8 = unsigned char;
using u64 = unsigned long long;

#ifdef __CUDACC_RTC__  // NVRTC has no <math.h>
#define INFINITY __int_as_float(0x7F800000)
#endif

struct StepScalars {
    float lr, beta1_correction, beta2_correction, grad_clip;
    u32 seed, step, micro_step;
    float norm_limit, loss_limit;
    u32 first_sequence, sequence_stride, reserved[3];
    float grad_scale;
    u32 skip_update;
};

__device__ __forceinline__ float to_f32(float x) { return x; }
__device__ __forceinline__ float to_f32(bf16 x) { return __bfloat162float(x); }

template <class T> __device__ __forceinline__ T from_f32(float x);
template <> __device__ __forceinline__ float from_f32<float>(float x) { return x; }
template <> __device__ __forceinline__ bf16 from_f32<bf16>(float x) { return __float2bfloat16(x); }

// Two BF16 in a word.
__device__ __forceinline__ float lower_half(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float upper_half(u32 pair) { return __uint_as_float(pair & 0xFFFF0000u); }
__device__ __forceinline__ u32 to_pair(float lower, float upper) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(lower, upper);
    return *reinterpret_cast<const u32*>(&pair);
}

// 16 bytes of T: 8 bf16 or 4 f32 in one load or store.
template <class T> struct alignas(16) Vec {
    static constexpr int N = 16 / sizeof(T);
    T v[N];
    __device__ __forceinline__ T& operator[](int i) { return v[i]; }
    __device__ __forceinline__ const T& operator[](int i) const { return v[i]; }
    __device__ __forceinline__ T at(int i) const { return v[i]; }
    // Set elements i, which is even, and i + 1 (two() reads them). One instruction rounds two BF16;
    // one instruction reads each, if the kernel reads all its vectors by pairs: a lone element
    // would have to be moved first.
    __device__ __forceinline__ void set_two(int i, float a, float b) {
        if constexpr (sizeof(T) == 2) {
            *reinterpret_cast<__nv_bfloat162*>(v + i) = __floats2bfloat162_rn(a, b);
        } else {
            v[i] = a, v[i + 1] = b;
        }
    }
    __device__ __forceinline__ float2 two(int i) const {
        if constexpr (sizeof(T) == 2) {
            const u32 word = *reinterpret_cast<const u32*>(v + i);
            return make_float2(lower_half(word), upper_half(word));
        } else {
            return make_float2(v[i], v[i + 1]);
        }
    }
    // Set elements i, i + 1 to products of a and b, rounded once.
    __device__ __forceinline__ void set_products(int i, const Vec& a, const Vec& b) {
        if constexpr (sizeof(T) == 2) {
            using Two = __nv_bfloat162;
            *reinterpret_cast<Two*>(v + i) = __hmul2(*reinterpret_cast<const Two*>(a.v + i),
                                                     *reinterpret_cast<const Two*>(b.v + i));
        } else {
            v[i] = a[i] * b[i], v[i + 1] = a[i + 1] * b[i + 1];
        }
    }
};

template <class T> __device__ __forceinline__ Vec<T> load_vec(const T* p) {
    Vec<T> out;
    *reinterpret_cast<uint4*>(&out) = *reinterpret_cast<const uint4*>(p);
    return out;
}

// Load data that is used only once, without displacing other data from L2.
template <class T> __device__ __forceinline__ Vec<T> load_vec_stream(const T* p) {
    Vec<T> out;
    *reinterpret_cast<uint4*>(&out) = __ldcs(reinterpret_cast<const uint4*>(p));
    return out;
}

template <class T> __device__ __forceinline__ void store_vec(T* p, const Vec<T>& x) {
    *reinterpret_cast<uint4*>(p) = *reinterpret_cast<const uint4*>(&x);
}

template <class T> __device__ __forceinline__ void store_vec_stream(T* p, const Vec<T>& x) {
    __stcs(reinterpret_cast<uint4*>(p), *reinterpret_cast<const uint4*>(&x));
}

// Two neighbouring elements of T: 4 bytes of bf16 or 8 bytes of f32, aligned to their size.
__device__ __forceinline__ float2 load_two(const float* p) {
    return *reinterpret_cast<const float2*>(p);
}
__device__ __forceinline__ float2 load_two(const bf16* p) {
    const u32 pair = *reinterpret_cast<const u32*>(p);
    return make_float2(lower_half(pair), upper_half(pair));
}
__device__ __forceinline__ void store_two(float* p, float a, float b) {
    *reinterpret_cast<float2*>(p) = make_float2(a, b);
}
__device__ __forceinline__ void store_two(bf16* p, float a, float b) {
    *reinterpret_cast<u32*>(p) = to_pair(a, b);
}

// Butterfly sum: every lane gets the same total, added in a fixed order.
template <class F> __device__ __forceinline__ F warp_sum(F x) {
#pragma unroll
    for (int mask = 16; mask > 0; mask >>= 1) { x += __shfl_xor_sync(0xFFFFFFFFu, x, mask); }
    return x;
}

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int mask = 16; mask > 0; mask >>= 1) {
        x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, mask));
    }
    return x;
}

// Reduce x over all threads of a block: every thread gets warp_result of all warps' warp_result(x).
// shared: room for 32 results. nothing: the neutral element. blockDim.x is a multiple of 32.
template <class F, class Warp>
__device__ __forceinline__ F block_reduce(F x, F* shared, F nothing, Warp warp_result) {
    x = warp_result(x);
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    __syncthreads();  // a second call may not overwrite what slow warps still read
    if (lane == 0) { shared[warp] = x; }
    __syncthreads();
    return warp_result(lane < warps ? shared[lane] : nothing);
}

template <class F> __device__ __forceinline__ F block_sum(F x, F* shared) {
    return block_reduce(x, shared, F(0), [](F y) { return warp_sum(y); });
}

__device__ __forceinline__ float block_max(float x, float* shared) {
    return block_reduce(x, shared, -INFINITY, [](float y) { return warp_max(y); });
}

constexpr float LOG2E = 1.4426950408889634f;

// exp overflows to infinity for x < -88, and 1 / infinity is the right result.
__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

__device__ __forceinline__ u32 random_bits(u32 seed, u64 index) {
    u32 h = (u32)index * 0x9E3779B9u + seed;
    h ^= (u32)(index >> 32) * 0x85EBCA6Bu;
    h ^= h >> 16;
    h *= 0x21F0AAADu;
    h ^= h >> 15;
    h *= 0x735A2D97u;
    h ^= h >> 15;
    return h;
}

__device__ __forceinline__ u32 mix_word(u32 h, u32 word) {
    h = (h ^ word) * 0x01000193u + 0x9E3779B9u;
    h ^= h >> 15;
    h *= 0x2C1B3C6Du;
    h ^= h >> 12;
    return h;
}

// x's bits plus `less`, a number below 2^16. For random `less` the upper half is x in BF16, rounded
// up with a probability proportional to x's lower half. Infinities stay infinite.
__device__ __forceinline__ u32 add_bits(float x, u32 less) {
    return __float_as_uint(x) + (x == x ? less : 0u);
}

// x in BF16, rounded stochastically by the low 16 bits of `bits`.
__device__ __forceinline__ bf16 round_stochastic(float x, u32 bits) {
    return __ushort_as_bfloat16((unsigned short)(add_bits(x, bits & 0xFFFFu) >> 16));
}

__device__ __forceinline__ u32 gradient_seed(const StepScalars* s, u32 salt) {
    return mix_word(mix_word(mix_word(mix_word(0, s->seed), s->step), s->micro_step), salt);
}

// Eight neighbouring elements share a hash; each element multiplies the hash by a factor of its
// own. In a gradient two neighbours use the halves of one product. Sums vary like sums of eight
// independent hashes.
__device__ constexpr u32 neighbour_factor(u32 n) {
    constexpr u32 FACTOR = 0xA7F7D5BDu, SQUARE = FACTOR * FACTOR;
    return (n & 1 ? FACTOR : 1u) * (n & 2 ? SQUARE : 1u) * (n & 4 ? SQUARE * SQUARE : 1u);
}

// Random bits that round element k of eight; only the lower 16 bits count. seed: from
// gradient_seed.
__device__ __forceinline__ u32 gradient_bits(u32 seed, u64 eight, u32 k) {
    return random_bits(seed, eight) * neighbour_factor(k >> 1) >> 16 * (k & 1);
}

// Add x to a gradient's element d; a BF16 result is rounded stochastically.
__device__ __forceinline__ float add_gradient(float d, float x, u32 bits) { return d + x; }
__device__ __forceinline__ bf16 add_gradient(bf16 d, float x, u32 bits) {
    return round_stochastic(to_f32(d) + x, bits);
}

// Add eight neighbouring BF16 elements x to d, number `eight` of the gradient's groups of eight.
__device__ __forceinline__ uint4 add_gradients(const uint4& d, const uint4& x, u32 seed, u64 eight) {
    const u32 hash = random_bits(seed, eight);
    const auto add = [&](u32 before, u32 more, u32 pair) {
        const float lower = lower_half(before) + lower_half(more);
        const float upper = upper_half(before) + upper_half(more);
        const u32 bits = hash * neighbour_factor(pair);
        return __byte_perm(add_bits(lower, bits & 0xFFFFu), add_bits(upper, bits >> 16), 0x7632);
    };
    return make_uint4(add(d.x, x.x, 0), add(d.y, x.y, 1), add(d.z, x.z, 2), add(d.w, x.w, 3));
}

// Write element i of a gradient, or with `accumulate` add to it.
template <class G>
__device__ __forceinline__ void store_gradient(G* d, i64 i, float x, int accumulate, u32 seed) {
    d[i] = accumulate ? add_gradient(d[i], x, gradient_bits(seed, i >> 3, i & 7)) : from_f32<G>(x);
}

// COUNT elements of T in whole 16-byte vectors, read as F32. For kernels whose arrays have
// different types, but whose threads must get the same elements of each. Indices must be
// compile-time constants.
template <class T, int COUNT> struct Pack {
    Vec<T> part[COUNT / Vec<T>::N];
    __device__ __forceinline__ T at(int i) const { return part[i / Vec<T>::N][i % Vec<T>::N]; }
    __device__ __forceinline__ float get(int i) const { return to_f32(at(i)); }
    __device__ __forceinline__ void set(int i, T x) { part[i / Vec<T>::N][i % Vec<T>::N] = x; }
    __device__ __forceinline__ void set_two(int i, float a, float b) {
        part[i / Vec<T>::N].set_two(i % Vec<T>::N, a, b);
    }
    __device__ __forceinline__ void load(const T* p) {
#pragma unroll
        for (int k = 0; k < COUNT / Vec<T>::N; ++k) {
            part[k] = load_vec_stream(p + k * Vec<T>::N);
        }
    }
    __device__ __forceinline__ void store(T* p) const {
#pragma unroll
        for (int k = 0; k < COUNT / Vec<T>::N; ++k) {
            store_vec_stream(p + k * Vec<T>::N, part[k]);
        }
    }
};

// Load a thread's COUNT elements from x on, zeros if not inside. Returns the largest |x| of the
// LANES threads that share a block of elements. All threads of the warp call this function.
template <int LANES, class T, int COUNT>
__device__ __forceinline__ float load_block(float (&v)[COUNT], const T* x, bool inside) {
    Pack<T, COUNT> in;
    float largest = 0.0f;
    if (inside) { in.load(x); }
#pragma unroll
    for (int k = 0; k < COUNT; ++k) {
        v[k] = inside ? in.get(k) : 0.0f;
        largest = fmaxf(largest, fabsf(v[k]));
    }
#pragma unroll
    for (int mask = LANES / 2; mask > 0; mask >>= 1) {
        largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, mask));
    }
    return largest;
}

// Rows in registers: WARPS consecutive warps hold one row, VECTORS 16-byte vectors in each lane.
// RowLayout in llmq/ops/common.py chooses WARPS and VECTORS, and also has block_rows.
__device__ constexpr int block_rows(int warps, int block_warps) {
    return block_warps > warps ? block_warps / warps : 1;
}

template <class T, int WARPS, int VECTORS> struct Row {
    Vec<T> v[VECTORS];

    // Column of the first element of vector i. In the last lanes the column may be past the row's
    // end.
    static __device__ __forceinline__ int column(int i) {
        return ((int)(threadIdx.x % (32 * WARPS)) + i * 32 * WARPS) * Vec<T>::N;
    }
    // Load a row; elements past its end are zeros, and with active = false all elements.
    __device__ __forceinline__ void load(const T* row, int columns, bool active) {
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            *reinterpret_cast<uint4*>(&v[i]) = make_uint4(0, 0, 0, 0);
            if (active && column(i) < columns) { v[i] = load_vec(row + column(i)); }
        }
    }
    __device__ __forceinline__ void store(T* row, int columns, bool active) const {
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            if (active && column(i) < columns) { store_vec(row + column(i), v[i]); }
        }
    }
};

// Sums over rows, each spread over WARPS warps: every thread gets the sum of its row. All threads
// of the block call sum together. `shared` holds 2 * BLOCK_WARPS values.
template <int WARPS, int BLOCK_WARPS> struct RowSum {
    float* shared;
    int turn = 0;

    __device__ __forceinline__ float operator()(float x) {
        x = warp_sum(x);
        if constexpr (WARPS > 1) {
            const int warp = threadIdx.x >> 5;
            float* sums = shared + turn * BLOCK_WARPS;
            turn ^= 1;  // the next sum uses other memory: one barrier is enough
            if ((threadIdx.x & 31) == 0) { sums[warp] = x; }
            __syncthreads();
            x = 0.0f;
#pragma unroll
            for (int i = 0; i < WARPS; ++i) { x += sums[warp / WARPS * WARPS + i]; }
        }
        return x;
    }
};

// Sum values[i][k], which belong to column Row::column(i) + k, over the ROWS rows of a block, and
// store the sums in partial[column]. `shared` holds 32 * WARPS * VECTORS * N values if ROWS > 1.
template <class T, int WARPS, int VECTORS, int ROWS>
__device__ __forceinline__ void sum_block_rows(float* partial, int columns,
                                               const float (&values)[VECTORS][Vec<T>::N],
                                               float* shared) {
    constexpr int N = Vec<T>::N, LANES = 32 * WARPS;
    const int row = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    for (int turn = 0; turn < ROWS; ++turn) {  // a fixed order: deterministic
        if (turn == row) {
#pragma unroll
            for (int i = 0; i < VECTORS; ++i) {
                const int c = Row<T, WARPS, VECTORS>::column(i);
                float sums[N];
#pragma unroll
                for (int k = 0; k < N; ++k) {
                    float* before = shared + (i * N + k) * LANES + lane;
                    sums[k] = turn == 0 ? values[i][k] : *before + values[i][k];
                    if (turn < ROWS - 1) { *before = sums[k]; }
                }
                if (turn == ROWS - 1 && c < columns) {
#pragma unroll
                    for (int k = 0; k < N; k += 4) {
                        *reinterpret_cast<float4*>(partial + c + k) =
                            make_float4(sums[k], sums[k + 1], sums[k + 2], sums[k + 3]);
                    }
                }
            }
        }
        if (turn < ROWS - 1) { __syncthreads(); }
    }
}

// Adds x to COUNT neighbouring elements of a gradient, from `first` on, a multiple of 8. COUNT <=
// 8.
template <class D, int COUNT>
__device__ __forceinline__ void add_gradients(D* d, i64 first, const float (&x)[COUNT], u32 seed) {
    Pack<D, COUNT> sum;
    sum.load(d + first);
#pragma unroll
    for (int k = 0; k < COUNT; ++k) {
        sum.set(k, add_gradient(sum.at(k), x[k], gradient_bits(seed, first >> 3, k)));
    }
    sum.store(d + first);
}

// Unpack 16 bytes of T. Arrays of loaded data hold packed words until their use: a BF16 element
// then takes half a register, but a whole register in a Vec<bf16>.
template <class T> __device__ __forceinline__ Vec<T> unpack(uint4 x) {
    return *reinterpret_cast<const Vec<T>*>(&x);
}
template <class T> __device__ __forceinline__ uint4 pack(const Vec<T>& x) {
    return *reinterpret_cast<const uint4*>(&x);
}
template <class T> __device__ __forceinline__ uint4 load_packed_stream(const T* p) {
    return __ldcs(reinterpret_cast<const uint4*>(p));
}

// |x| as an unsigned integer, in the numbers' order: infinity above all numbers, NaN above
// infinity.
__device__ __forceinline__ u32 abs_bits(float x) { return __float_as_uint(x) & 0x7FFFFFFFu; }

// The largest abs_bits of a vector, of a thread's part of a row, and (below) of a block's threads.
__device__ __forceinline__ u32 abs_max_bits(const Vec<float>& x) {
    return max(max(abs_bits(x[0]), abs_bits(x[1])), max(abs_bits(x[2]), abs_bits(x[3])));
}
__device__ __forceinline__ u32 abs_max_bits(const Vec<bf16>& x) {
    const uint4 pairs = pack(x);
    const u32 abs[4] = {pairs.x & 0x7FFF7FFFu, pairs.y & 0x7FFF7FFFu, pairs.z & 0x7FFF7FFFu,
                        pairs.w & 0x7FFF7FFFu};
    const auto& two = reinterpret_cast<const __nv_bfloat162(&)[4]>(abs);
    const auto most = __hmax2_nan(__hmax2_nan(two[0], two[1]), __hmax2_nan(two[2], two[3]));
    const u32 both = reinterpret_cast<const u32&>(most);
    return max(both << 16, both & 0xFFFF0000u);
}

template <class T, int WARPS, int VECTORS>
__device__ __forceinline__ u32 abs_max_bits(const Row<T, WARPS, VECTORS>& row, int columns,
                                            bool active) {
    u32 largest = 0;
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        if (active && row.column(i) < columns) { largest = max(largest, abs_max_bits(row.v[i])); }
    }
    return largest;
}

__device__ __forceinline__ u32 block_max_bits(u32 x, u32* shared) {
    return block_reduce(x, shared, 0u, [](u32 y) { return __reduce_max_sync(0xFFFFFFFFu, y); });
}

// abs_max = max(abs_max, |value|); NaN wins. One thread of every block calls this. The maximum of
// integers does not depend on the order of the blocks.
__device__ __forceinline__ void store_abs_max(float* abs_max, float value) {
    atomicMax(reinterpret_cast<u32*>(abs_max), abs_bits(value));
}

// For kernels with an optional result abs_max: every thread of every block calls this once, with
// the largest abs_bits that it stored. Without WANTED the function does nothing.
template <bool WANTED> __device__ __forceinline__ void finish_abs_max(float* abs_max, u32 largest) {
    if constexpr (WANTED) {
        __shared__ u32 shared[32];
        largest = block_max_bits(largest, shared);
        if (threadIdx.x == 0) { store_abs_max(abs_max, __uint_as_float(largest)); }
    }
}

using e4m3 = __nv_fp8_e4m3;
using e5m2 = __nv_fp8_e5m2;
struct e4m3_half : e4m3 {};  // codes of at most Fp8<e4m3_half>::MAX

// The FP8 formats. MAX: the largest value, as in llmq/base/dtypes.py. MAX_CODE: the code of MAX.
// CLAMPED: true if the conversion does not saturate at MAX by itself.
template <class F> struct Fp8;
template <> struct Fp8<e4m3> {
    static constexpr float MAX = 448.0f;
    static constexpr u32 MAX_CODE = 0x7Eu;
    static constexpr bool CLAMPED = false;
    static constexpr __nv_fp8_interpretation_t FORMAT = __NV_E4M3;
};
template <> struct Fp8<e4m3_half> : Fp8<e4m3> {
    static constexpr float MAX = 30.0f;
    static constexpr u32 MAX_CODE = 0x5Fu;
    static constexpr bool CLAMPED = true;
};
template <> struct Fp8<e5m2> {
    static constexpr float MAX = 57344.0f;
    static constexpr u32 MAX_CODE = 0x7Bu;
    static constexpr bool CLAMPED = false;
    static constexpr __nv_fp8_interpretation_t FORMAT = __NV_E5M2;
};

// x, cut to +-MAX if the format is CLAMPED; NaN stays NaN.
template <class F> __device__ __forceinline__ float clamped(float x) {
    constexpr float MAX = Fp8<F>::MAX;
    if constexpr (Fp8<F>::CLAMPED) { return x > MAX ? MAX : x < -MAX ? -MAX : x; }
    return x;
}

// Four neighbours in FP8 format F, a in the lowest byte, rounded to nearest even. Numbers beyond
// +-MAX, infinity too, become +-MAX; NaN of either sign becomes 0x7F.
template <class F> __device__ __forceinline__ u32 to_fp8(float a, float b, float c, float d) {
    const float2 low = make_float2(clamped<F>(a), clamped<F>(b));
    const float2 high = make_float2(clamped<F>(c), clamped<F>(d));
    return (u32)__nv_cvt_float2_to_fp8x2(low, __NV_SATFINITE, Fp8<F>::FORMAT) |
           (u32)__nv_cvt_float2_to_fp8x2(high, __NV_SATFINITE, Fp8<F>::FORMAT) << 16;
}

// Values of the two codes in the lower half of `two`, the lower code first.
template <class F> __device__ __forceinline__ float2 from_fp8(u32 two) {
    const __half2_raw pair = __nv_cvt_fp8x2_to_halfraw2((__nv_fp8x2_storage_t)two, Fp8<F>::FORMAT);
    return __half22float2(__half2(pair));
}

// Two numbers in half precision, the lower one first.
__device__ __forceinline__ float2 from_halves(u32 pair) {
    return __half22float2(reinterpret_cast<const __half2&>(pair));
}
