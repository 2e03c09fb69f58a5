// swiglu.cu -- the gated activation of Llama- and Qwen-class MLPs, and its gradient.
//
//   out = up * (gate * s)        s = sigmoid(gate), or with GELU = 1 GELU's (activation.cuh)
//   d_up = d_out * (gate * s)    d_gate = d_out * up * d(gate * s) / d gate
//
// Data     declared in llmq/ops/pointwise/swiglu.py. up_gate, d_up_gate: [up | gate] in every row.
//          d_up_gate may be up_gate, out may be d_out. abs_max, with ABS_MAX = 1: raised to the
//          largest |out| in forward, |d_up_gate| in backward. OUT = 1: backward writes forward's
//          out again. _fp8: FP8 codes (fp8.cuh) of out or d_up_gate, in `codes` with CODES = 1, in
//          `transposed` with TRANSPOSED = 1. out_*, with OUT_TRANSPOSED = 1: transposed E4M3 codes
//          of backward's out. CODED = 1: up_gate and d_out are FP8 codes of products, with the
//          scales up_scale and in_scale; in_*: statistics of the codes with in_scale (fp8.cuh).
// Launch   256 threads, ceil(rows * F / (512 vectors)) blocks: 2 vectors per thread. Kernels *_fp8:
//          a block for every 128 rows and 64 columns of F; blockIdx.x counts along columns,
//          blockIdx.y along rows.
// Cost     forward reads 2 and writes 1 element per output, backward reads 3 and writes 2, or 3
//          with out; memory-bound: 4 or 6 16-byte loads in flight per thread, about 30 instructions
//          per output element. _fp8: twice as many loads in flight, 40 (forward) or 60
//          instructions; codes in both layouts take as many bytes as BF16. Backward has 16 KiB of
//          shared memory for transposed codes of d_up_gate, and 8 KiB for transposed codes of out.
//          CODED: inputs have half the bytes, in 8-byte loads. Then 30 (forward) or 50 (backward)
//          instructions take as long as the loads.
// Needs    rows * F below 2^32 vectors. _fp8: rows a multiple of 4, F of 16, rows at most 65535 *
//          128; turned = turned_columns(rows), an argument in backward, which has few registers.
#include "pointwise/activation.cuh"
#include "common.cuh"
#include "fp8.cuh"

#ifndef GELU  // compiled for another entry
#define GELU 0
#define CODED 0
#define OUT 0
#define ABS_MAX 0
#endif
#ifndef CODES
#define CODES 0
#endif

using Gate = GateOf<GELU>::Type;
constexpr int THREADS = 256, VECTORS = 2;
constexpr int N = Vec<T>::N;
// The format of results when inputs are of type Element.
template <class Element> struct ResultOf { using Type = Element; };
template <> struct ResultOf<e4m3> { using Type = bf16; };
using V = ResultOf<U>::Type;
constexpr int TILES_ON_SM = sizeof(V) == 2 ? 3 : 2;  // blocks that share the registers of an SM

// out = up * (gate * s) for COUNT elements. EXACT: see share.
template <int COUNT, bool EXACT, class Result, class In>
__device__ __forceinline__ void activate(Result& out, const In& up, const In& gate) {
#pragma unroll
    for (int k = 0; k < COUNT; k += 2) {
        float two[2];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const float g = to_f32(gate.at(k + j));
            two[j] = to_f32(up.at(k + j)) * (g * share<Gate, EXACT>(g));
        }
        out.set_two(k, two[0], two[1]);
    }
}

// d_up and d_gate for COUNT elements. out: the same as activate()'s, from the same sigmoids.
template <int COUNT, bool EXACT, class Result, class Gradient, class In>
__device__ __forceinline__ void gradients(Result& d_up, Result& d_gate, Result& out,
                                          const Gradient& d_out, const In& up, const In& gate) {
#pragma unroll
    for (int k = 0; k < COUNT; k += 2) {
        float of_up[2], of_gate[2], again[2];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const float g = to_f32(gate.at(k + j)), s = share<Gate, EXACT>(g), active = g * s;
            const float d = to_f32(d_out.at(k + j)), u = to_f32(up.at(k + j));
            of_up[j] = active * d;
            of_gate[j] = Gate::slope(g, s, active) * u * d;
            again[j] = u * active;
        }
        d_up.set_two(k, of_up[0], of_up[1]);
        d_gate.set_two(k, of_gate[0], of_gate[1]);
        out.set_two(k, again[0], again[1]);
    }
}

// Element offsets of output vector i of this thread: in out, and in up_gate.
struct Place {
    bool inside;
    i64 out, up;
    __device__ __forceinline__ Place(int i, i64 rows, int F) {
        const u32 index = (blockIdx.x * VECTORS + i) * THREADS + threadIdx.x;
        const u32 row = index / (u32)(F / N);
        inside = row < rows;
        out = (i64)index * N;
        up = out + (i64)row * F;
    }
};

extern "C" __global__ void __launch_bounds__(THREADS)
swiglu_forward(T* __restrict__ out, const T* __restrict__ up_gate, i64 rows, i32 F,
               f32* abs_max) {
    start_next_kernel();
    wait_for_earlier_kernels();
    u32 largest = 0;
    uint4 up[VECTORS], gate[VECTORS];
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        const Place place(i, rows, F);
        if (place.inside) {
            up[i] = load_packed_stream(up_gate + place.up);
            gate[i] = load_packed_stream(up_gate + place.up + F);
        }
    }
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        const Place place(i, rows, F);
        if (!place.inside) { break; }
        const Vec<T> up_i = unpack<T>(up[i]), gate_i = unpack<T>(gate[i]);
        Vec<T> result;
        activate<N, sizeof(T) == 4>(result, up_i, gate_i);
        store_vec(out + place.out, result);
        largest = max(largest, abs_max_bits(result));
    }
    finish_abs_max<ABS_MAX>(abs_max, largest);
}

// No __restrict__ on tensors that may overlap: every thread reads its elements before it writes.
// For 4 blocks on an SM: if the compiler could unpack all inputs early, it would use two registers
// too many with ABS_MAX, and ten too many with OUT.
extern "C" __global__ void __launch_bounds__(THREADS, 4)
swiglu_backward(T* d_up_gate, const T* d_out, const T* up_gate, i64 rows, i32 F, f32* abs_max,
                T* out) {
    u32 largest = 0;
    uint4 d[VECTORS], up[VECTORS], gate[VECTORS];
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        const Place place(i, rows, F);
        if (place.inside) {
            d[i] = load_packed_stream(d_out + place.out);
            up[i] = load_packed_stream(up_gate + place.up);
            gate[i] = load_packed_stream(up_gate + place.up + F);
        }
    }
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        const Place place(i, rows, F);
        if (!place.inside) { break; }
        if constexpr (OUT || GELU) { forget(d[i]), forget(up[i]), forget(gate[i]); }
        const Vec<T> d_i = unpack<T>(d[i]), up_i = unpack<T>(up[i]), gate_i = unpack<T>(gate[i]);
        Vec<T> d_up, d_gate, out_i;
        gradients<N, sizeof(T) == 4>(d_up, d_gate, out_i, d_i, up_i, gate_i);
        if (d_up_gate != nullptr) {
            store_vec(d_up_gate + place.up, d_up);
            store_vec(d_up_gate + place.up + F, d_gate);
        }
        if constexpr (OUT) { store_vec(out + place.out, out_i); }
        largest = max(largest, max(abs_max_bits(d_up), abs_max_bits(d_gate)));
    }
    finish_abs_max<ABS_MAX>(abs_max, largest);
}

extern "C" __global__ void __launch_bounds__(THREADS, TILES_ON_SM)
swiglu_forward_fp8(T* __restrict__ out, const U* __restrict__ up_gate, i64 rows, i32 F,
                   f32* abs_max, Q* __restrict__ codes, Q* __restrict__ transposed,
                   const f32* __restrict__ scale, i32* saturated, const f32* __restrict__ in_scale,
                   const f32* __restrict__ in_largest, f32* in_abs_max, i32* in_saturated) {
#if CODES || TRANSPOSED || CODED
    __shared__ OctetTile tile;
    const OctetPlace place(rows, F);
    OctetOf<U>::Type up(in_scale), gate(in_scale);
    up.load(up_gate + place.row * 2 * F + place.column, 2 * F, place.there);
    gate.load(up_gate + place.row * 2 * F + F + place.column, 2 * F, place.there);
    look_at_codes(in_largest, in_abs_max, in_saturated, up, gate);
    Fp8Encoder<Q, CODES || TRANSPOSED> encoder(scale);
    u32 largest = 0;
    uint2 result[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        Pack<V, 8> out_i;
        activate<8, sizeof(V) == 4>(out_i, up.row(i), gate.row(i));
        forget(out_i);
        if (out != nullptr && place.inside) {
            out_i.store(reinterpret_cast<V*>(out) + (place.row + i) * F + place.column);
        }
        largest = max(largest, abs_max_bits(out_i));
        result[i] = encoder.encode(out_i);
    }
    if constexpr (CODES) {
        tile.store_rows(codes, place.row, place.column, F, result, place.inside);
    }
    if constexpr (TRANSPOSED) {
        tile.put(result);
        __syncthreads();
        tile.store(transposed, place.first_row, place.first_column, turned_columns(rows), F);
    }
    encoder.finish(saturated);
    finish_abs_max<ABS_MAX>(abs_max, largest);
#endif
}

// With OUT, and on GPUs other than Hopper, there are too few registers for 3 blocks on an SM. The
// inputs of 2 blocks are 96 KiB, twice the bytes in flight that full memory bandwidth needs.
constexpr int BACKWARD_TILES_ON_SM = OUT || !ON_HOPPER ? 2 : TILES_ON_SM;
// Measured with CODED: streamed stores make backward faster and forward slower.
constexpr bool STREAMED = ON_HOPPER && CODED;
extern "C" __global__ void __launch_bounds__(THREADS, BACKWARD_TILES_ON_SM)
swiglu_backward_fp8(T* d_up_gate, const D* d_out, const U* up_gate, i64 rows, i64 turned, i32 F,
                    f32* abs_max, Q* __restrict__ codes, Q* __restrict__ transposed,
                    const f32* __restrict__ scale, i32* saturated, T* out,
                    O* __restrict__ out_transposed, const f32* __restrict__ out_scale,
                    i32* out_saturated, const f32* __restrict__ up_scale,
                    const f32* __restrict__ in_scale, const f32* __restrict__ in_largest,
                    f32* in_abs_max, i32* in_saturated) {
#if CODES || TRANSPOSED || OUT_TRANSPOSED || CODED
    __shared__ OctetTile up_tile, gate_tile, out_tile;
    const OctetPlace place(rows, F);
    const i64 narrow = place.row * F + place.column, wide = narrow + place.row * F;
    OctetOf<D>::Type d(in_scale);
    OctetOf<U>::Type up(up_scale), gate(up_scale);
    d.load(d_out + narrow, F, place.there);
    up.load(up_gate + wide, 2 * F, place.there);
    gate.load(up_gate + wide + F, 2 * F, place.there);
    look_at_codes(in_largest, in_abs_max, in_saturated, d);
    Fp8Encoder<Q, CODES || TRANSPOSED> encoder(scale);
    Fp8Encoder<O, OUT_TRANSPOSED> out_encoder(out_scale);
    u32 largest = 0;
    uint2 up_result[4], gate_result[4], out_result[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        Pack<V, 8> d_up, d_gate, out_i;
        gradients<8, sizeof(V) == 4>(d_up, d_gate, out_i, d.row(i), up.row(i), gate.row(i));
        forget(d_up), forget(d_gate), forget(out_i);
        forget(F);  // else the compiler keeps the addresses of all rows in registers
        if constexpr (OUT) {
            V* const to = reinterpret_cast<V*>(out) + (place.row + i) * F + place.column;
            if (place.inside) { out_i.store(to); }
        }
        if (d_up_gate != nullptr && place.inside) {
            V* const to = reinterpret_cast<V*>(d_up_gate) + (place.row + i) * 2 * F + place.column;
            d_up.store(to);
            d_gate.store(to + F);
        }
        largest = max(largest, max(abs_max_bits(d_up), abs_max_bits(d_gate)));
        up_result[i] = encoder.encode(d_up);
        gate_result[i] = encoder.encode(d_gate);
        out_result[i] = out_encoder.encode(out_i);
    }
    const int wide_column = place.column + F;
    if constexpr (OUT_TRANSPOSED) { out_tile.put(out_result); }
    if constexpr (CODES) {
        OctetTile::store_rows<STREAMED>(codes, place.row, place.column, 2 * F, up_result,
                                        place.inside);
        OctetTile::store_rows<STREAMED>(codes, place.row, wide_column, 2 * F, gate_result,
                                        place.inside);
    }
    if constexpr (TRANSPOSED) {
        up_tile.put(up_result);
        gate_tile.put(gate_result);
    }
    if constexpr (TRANSPOSED || OUT_TRANSPOSED) { __syncthreads(); }
    if constexpr (TRANSPOSED) {
        up_tile.store<STREAMED>(transposed, place.first_row, place.first_column, turned, F);
        gate_tile.store<STREAMED>(transposed, place.first_row, place.first_column + F, turned,
                                  2 * F);
    }
    if constexpr (OUT_TRANSPOSED) {
        out_tile.store<STREAMED>(out_transposed, place.first_row, place.first_column, turned, F);
    }
    encoder.finish(saturated);
    out_encoder.finish(out_saturated);
    finish_abs_max<ABS_MAX>(abs_max, largest);
#endif
}

// -- gradient of rows with weights, for experts
//
//   d = T(weight * d_out) takes the place of d_out in the formulas above
//   d_weight = the dot product of d_out and out in the row      weighted = weight * out
//   out is forward's result again; row r has weights[order[r]] and d_weights[order[r]]
//
// Data     d_up_gate, d_out, up_gate, abs_max, codes, scale, saturated: as above, but no transposed
//          codes; d_up_gate may be null with codes. order: I32 (rows). weights, d_weights: F32
//          (rows). weighted: T (rows, F), or null. F a multiple of 8.
// Launch   256 threads, a warp a row.
// Cost     d_out and up_gate read, d_up_gate, weighted and codes written once.

// No __restrict__ on tensors that may overlap: a lane reads its elements before it writes.
extern "C" __global__ void __launch_bounds__(THREADS)
weighted_swiglu_backward(T* d_up_gate, f32* __restrict__ d_weights, T* __restrict__ weighted,
                         const T* __restrict__ d_out, const T* up_gate, const i32* __restrict__ order,
                         const f32* __restrict__ weights, i64 rows, i32 F, f32* abs_max,
                         Q* __restrict__ codes, Q* transposed, const f32* __restrict__ scale,
                         i32* saturated) {
    constexpr int WIDTH = 8;  // columns that a lane handles at a time
    const int lane = threadIdx.x % 32;
    const i64 row = ((i64)blockIdx.x * THREADS + threadIdx.x) / 32;
    Fp8Encoder<Q, CODES> encoder(scale);
    u32 largest = 0;
    if (row < rows) {
        const i32 place = order[row];
        const float weight = weights[place];
        float dot = 0.0f;
#pragma unroll 2
        for (int c = lane * WIDTH; c < F; c += 32 * WIDTH) {
            const i64 narrow = row * F + c, wide = narrow + row * F;
            Pack<T, WIDTH> d, up, gate, of_out, of_up, of_gate, out;
            d.load(d_out + narrow);
            up.load(up_gate + wide);
            gate.load(up_gate + wide + F);
#pragma unroll
            for (int i = 0; i < WIDTH; i += 2) {
                of_out.set_two(i, d.get(i) * weight, d.get(i + 1) * weight);
            }
            gradients<WIDTH, sizeof(T) == 4>(of_up, of_gate, out, of_out, up, gate);
#pragma unroll
            for (int i = 0; i < WIDTH; i += 2) {
                const float low = out.get(i), high = out.get(i + 1);
                dot += d.get(i) * low;
                dot += d.get(i + 1) * high;
                out.set_two(i, low * weight, high * weight);
            }
            if (weighted) { out.store(weighted + narrow); }
            if (d_up_gate) {
                of_up.store(d_up_gate + wide);
                of_gate.store(d_up_gate + wide + F);
            }
            largest = max(largest, max(abs_max_bits(of_up), abs_max_bits(of_gate)));
            if constexpr (CODES) {
                *reinterpret_cast<uint2*>(codes + wide) = encoder.encode(of_up);
                *reinterpret_cast<uint2*>(codes + wide + F) = encoder.encode(of_gate);
            }
        }
        dot = warp_sum(dot);
        if (lane == 0) { d_weights[place] = dot; }
    }
    encoder.finish(saturated);
    finish_abs_max<ABS_MAX>(abs_max, largest);
}

// -- gated activation of clamped pairs, and its gradient
//
//   out = (u + 1) * (g * s)      g = min(gate, limit), u = up clamped to [-limit, limit],
//                                s = sigmoid(alpha g)
//   d_up = d_out * (g * s)       d_gate = d_out * (u + 1) * s * (1 + alpha g (1 - s))
//
// The gradient of gate or up is 0 where that input is clamped.
//
// Data     pairs, d_pairs: (rows, 2F), each gate beside its up. out, d_out: (rows, F). All of T,
//          16-byte aligned. n: elements of out, a multiple of one 16-byte vector. d_pairs may be
//          pairs.
// Launch   256 threads, a 16-byte vector of out each.
// Cost     forward reads 2 and writes 1 element per output, backward reads 3 and writes 2.
//          Memory-bound.
// Needs    limit above 0.

// Comparisons keep NaN, which fminf would replace.
struct Parts {
    float gate, up, share;
    bool gate_cut, up_cut;

    __device__ __forceinline__ Parts(float g, float u, float alpha, float limit) {
        gate_cut = g > limit, up_cut = fabsf(u) > limit;
        gate = gate_cut ? limit : g;
        up = up_cut ? copysignf(limit, u) : u;
        share = sigmoid(alpha * gate);
    }
};

extern "C" __global__ void __launch_bounds__(THREADS)
clamped_swiglu_forward(T* __restrict__ out, const T* __restrict__ pairs, i64 n, f32 alpha, f32 limit) {
    const i64 i = ((i64)blockIdx.x * THREADS + threadIdx.x) * N;
    if (i >= n) { return; }
    Pack<T, 2 * N> x;
    x.load(pairs + 2 * i);
    Vec<T> result;
#pragma unroll
    for (int k = 0; k < N; ++k) {
        const Parts p(x.get(2 * k), x.get(2 * k + 1), alpha, limit);
        result[k] = from_f32<T>((p.up + 1.0f) * (p.gate * p.share));
    }
    store_vec(out + i, result);
}

extern "C" __global__ void __launch_bounds__(THREADS)
clamped_swiglu_backward(T* d_pairs, const T* __restrict__ d_out, const T* pairs, i64 n, f32 alpha,
                        f32 limit) {
    const i64 i = ((i64)blockIdx.x * THREADS + threadIdx.x) * N;
    if (i >= n) { return; }
    Pack<T, 2 * N> x;
    x.load(pairs + 2 * i);
    const Vec<T> d = load_vec(d_out + i);
#pragma unroll
    for (int k = 0; k < N; ++k) {
        const Parts p(x.get(2 * k), x.get(2 * k + 1), alpha, limit);
        const float of_out = to_f32(d[k]), slope = p.share * (1.0f + alpha * p.gate * (1.0f - p.share));
        x.set(2 * k, from_f32<T>(p.gate_cut ? 0.0f : of_out * (p.up + 1.0f) * slope));
        x.set(2 * k + 1, from_f32<T>(p.up_cut ? 0.0f : of_out * (p.gate * p.share)));
    }
    x.store(d_pairs + 2 * i);
}
