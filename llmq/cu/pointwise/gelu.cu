// gelu.cu -- GELU with the tanh approximation, or with RELU2 = 1 the square of ReLU, and gradients.
//
//   out = x * s      s = 0.5 * (1 + tanh(u)) = sigmoid(2u)      2u = x * (C1 + C3 * x^2)
//   d_x = d_out * (s + s * (1 - s) * x * (C1 + 3 * C3 * x^2))
//   RELU2: s = max(x, 0)     d_x = d_out * 2s
//
// Data     declared in llmq/ops/pointwise/gelu.py. Outputs may be inputs. abs_max, with ABS_MAX =
//          1: raised to the largest |out| in forward, |d_x| in backward. OUT = 1: backward writes
//          forward's out again. _fp8: FP8 codes (fp8.cuh) of out or d_x, in `codes` with CODES = 1,
//          in `transposed` with TRANSPOSED = 1. out_*, with OUT_TRANSPOSED = 1: transposed E4M3
//          codes of backward's out.
// Launch   256 threads, ceil(n / (512 vectors)) blocks: 2 vectors per thread.
//          _fp8: a block for every 128 rows and 64 columns, grid (across, down).
// Cost     forward reads n and writes n, backward reads 2n and writes n, or 2n with out; memory-
//          bound, about 30 instructions per element. _fp8: twice as many loads in flight, about 10
//          instructions more; codes in both layouts take as many bytes as BF16; 8 KiB of shared
//          memory for each transposed result.
// Needs    _fp8: rows a multiple of 4, columns of 16, rows at most 65535 * 128.
#include "pointwise/activation.cuh"
#include "common.cuh"
#include "fp8.cuh"

using Activation = ActivationOf<RELU2>::Type;
constexpr int THREADS = 256, VECTORS = 2;
constexpr int N = Vec<T>::N;
constexpr bool EXACT = sizeof(T) == 4;
constexpr int TILES_ON_SM = sizeof(T) == 2 ? 4 : 2;  // blocks that share the registers of an SM
// With a second result: as many blocks as the registers suffice for. The inputs of 2 blocks are
// 64 KiB, more bytes in flight than any GPU needs to use its full memory bandwidth.
constexpr int BACKWARD_TILES_ON_SM = sizeof(T) == 2 && !(OUT || OUT_TRANSPOSED) ? 4
                                     : sizeof(T) == 2 && ON_HOPPER            ? 3
                                                                              : 2;

__device__ __forceinline__ T activation(T x) {
    const float v = to_f32(x);
    return from_f32<T>(share<Activation, EXACT>(v) * v);
}

// Returns d_x. out = activation(x), from the same sigmoid.
__device__ __forceinline__ T gradient(T& out, T d_out, T x) {
    const float v = to_f32(x), s = share<Activation, EXACT>(v), active = s * v;
    out = from_f32<T>(active);
    return from_f32<T>(Activation::slope(v, s, active) * to_f32(d_out));
}

__device__ __forceinline__ i64 offset(int i) {
    return (((i64)blockIdx.x * VECTORS + i) * THREADS + threadIdx.x) * N;
}

extern "C" __global__ void __launch_bounds__(THREADS)
gelu_forward(T* out, const T* x, i64 n, f32* abs_max) {
    start_next_kernel();
    wait_for_earlier_kernels();
    u32 largest = 0;
    uint4 in[VECTORS];
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        if (offset(i) < n) { in[i] = load_packed_stream(x + offset(i)); }
    }
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        if (offset(i) >= n) { break; }
        const Vec<T> in_i = unpack<T>(in[i]);
        Vec<T> result;
#pragma unroll
        for (int k = 0; k < N; ++k) { result[k] = activation(in_i[k]); }
        store_vec(out + offset(i), result);
        largest = max(largest, abs_max_bits(result));
    }
    finish_abs_max<ABS_MAX>(abs_max, largest);
}

extern "C" __global__ void __launch_bounds__(THREADS)
gelu_backward(T* d_x, const T* d_out, const T* x, i64 n, f32* abs_max, T* out) {
    u32 largest = 0;
    uint4 in[VECTORS], d[VECTORS];
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        if (offset(i) < n) {
            in[i] = load_packed_stream(x + offset(i));
            d[i] = load_packed_stream(d_out + offset(i));
        }
    }
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        if (offset(i) >= n) { break; }
        const Vec<T> in_i = unpack<T>(in[i]), d_i = unpack<T>(d[i]);
        Vec<T> result, out_i;
#pragma unroll
        for (int k = 0; k < N; ++k) { result[k] = gradient(out_i[k], d_i[k], in_i[k]); }
        store_vec(d_x + offset(i), result);
        if constexpr (OUT) { store_vec(out + offset(i), out_i); }
        largest = max(largest, abs_max_bits(result));
    }
    finish_abs_max<ABS_MAX>(abs_max, largest);
}

// One block's part of the two kernels with an FP8 result. again: forward's result of x, which
// BACKWARD writes with OUT or OUT_TRANSPOSED.
template <bool BACKWARD>
__device__ __forceinline__ void work_on_tile(T* out, const T* d_out, const T* x, i64 rows,
                                             i32 columns, f32* abs_max, Q* codes, Q* transposed,
                                             const f32* scale, i32* saturated, T* again = nullptr,
                                             O* again_transposed = nullptr,
                                             const f32* again_scale = nullptr,
                                             i32* again_saturated = nullptr) {
#if CODES || TRANSPOSED || OUT_TRANSPOSED
    constexpr bool AGAIN = BACKWARD && OUT, AGAIN_TRANSPOSED = BACKWARD && OUT_TRANSPOSED;
    __shared__ OctetTile tile, again_tile;
    const OctetPlace place(rows, columns);
    const i64 at = place.row * columns + place.column;
    OctetRows<T> in, d;
    in.load(x + at, columns, place.there);
    if constexpr (BACKWARD) { d.load(d_out + at, columns, place.there); }
    Fp8Encoder<Q, CODES || TRANSPOSED> encoder(scale);
    Fp8Encoder<O, AGAIN_TRANSPOSED> again_encoder(again_scale);
    u32 largest = 0;
    uint2 result[4], again_result[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const Pack<T, 8> in_i = in.row(i);
        Pack<T, 8> d_i, out_i, again_i;
        if constexpr (BACKWARD) { d_i = d.row(i); }
#pragma unroll
        for (int k = 0; k < 8; ++k) {
            if constexpr (BACKWARD) {
                T again_k;
                out_i.set(k, gradient(again_k, d_i.at(k), in_i.at(k)));
                again_i.set(k, again_k);
            } else {
                out_i.set(k, activation(in_i.at(k)));
            }
        }
        forget(out_i);  // else the compiler interleaves the rows, which takes too many registers
        if constexpr (AGAIN || AGAIN_TRANSPOSED) { forget(again_i); }
        if (out != nullptr && place.inside) { out_i.store(out + at + (i64)i * columns); }
        if constexpr (AGAIN) {
            if (place.inside) { again_i.store(again + at + (i64)i * columns); }
        }
        largest = max(largest, abs_max_bits(out_i));
        result[i] = encoder.encode(out_i);
        if constexpr (AGAIN_TRANSPOSED) { again_result[i] = again_encoder.encode(again_i); }
    }
    if constexpr (AGAIN_TRANSPOSED) { again_tile.put(again_result); }
    if constexpr (CODES) {
        tile.store_rows(codes, place.row, place.column, columns, result, place.inside);
    }
    if constexpr (TRANSPOSED) { tile.put(result); }
    if constexpr (TRANSPOSED || AGAIN_TRANSPOSED) { __syncthreads(); }
    const i64 turned = turned_columns(rows);
    if constexpr (TRANSPOSED) {
        tile.store(transposed, place.first_row, place.first_column, turned, columns);
    }
    if constexpr (AGAIN_TRANSPOSED) {
        again_tile.store(again_transposed, place.first_row, place.first_column, turned, columns);
    }
    encoder.finish(saturated);
    again_encoder.finish(again_saturated);
    finish_abs_max<ABS_MAX>(abs_max, largest);
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS, TILES_ON_SM)
gelu_forward_fp8(T* out, const T* x, i64 rows, i32 columns, f32* abs_max, Q* codes, Q* transposed,
                 const f32* scale, i32* saturated) {
    work_on_tile<false>(out, nullptr, x, rows, columns, abs_max, codes, transposed, scale,
                        saturated);
}

extern "C" __global__ void __launch_bounds__(THREADS, BACKWARD_TILES_ON_SM)
gelu_backward_fp8(T* d_x, const T* d_out, const T* x, i64 rows, i32 columns, f32* abs_max, Q* codes,
                  Q* transposed, const f32* scale, i32* saturated, T* out, O* out_transposed,
                  const f32* out_scale, i32* out_saturated) {
    work_on_tile<true>(d_x, d_out, x, rows, columns, abs_max, codes, transposed, scale, saturated,
                       out, out_transposed, out_scale, out_saturated);
}
