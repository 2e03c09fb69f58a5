// matmul_swiglu.cu -- the up product of a gated MLP for Hopper, with the activation behind it.
//
//   up_gate = scale_a * scale_b * (a @ b^T) + h @ tail^T
//   out     = up * (gate * s)        s = sigmoid(gate), or with GELU = 1 GELU's (activation.cuh)
//
// The product is that of product_sm90.cuh: a tile is 96 columns of up and those of gate. Two
// warpgroups compute the activation of a tile while two others multiply the next one. up_gate is
// rounded first, so that all bits are those of the product and of swiglu.cu behind it.
//
// Data     a: A (M, K), b: A (2F, K), h: bf16 (M, R), tail: bf16 (2F, R); RANK: R rounded up to 16;
//          0: there are no h and tail. scale_a, scale_b: F32 (1), of fp8 codes. up_gate: bf16 (M,
//          2F) or null, out: bf16 (M, F) or null. abs_max: F32 (1), with ABS_MAX = 1 raised to the
//          largest |out|; else not touched. codes, transposed, scale, saturated as in fp8.cuh, of
//          out; codes with CODES = 1, transposed with TRANSPOSED = 1.
// Launch   an even number of blocks of 512 threads, not more than there are multiprocessors, nor
//          tiles; SHARED bytes of dynamic shared memory (ops/matmul_swiglu.py).
// Cost     4 M F (K + R) FLOPs, and about 30 instructions for each element of out, which hide behind
//          the product where K is long enough. Only results are written.
// Needs    compute capability 9.0; M and F multiples of 16; rows of multiples of 16 bytes.
// Same name  llmq/ops/matmul_swiglu.py  llmq/ref/matmul_swiglu.py
//            tests/ops/test_matmul_swiglu.py
// Source   PTX ISA, as matmul_adapted.cu.
#include "activation.cuh"
#include "common.cuh"
#include "fp8.cuh"
#include "product_sm90.cuh"

constexpr int STAGES = 4, EPILOGUES = 7;
constexpr int ROWS_AT_ONCE = 4;  // of the four that a thread has in a box: how far code is unrolled
template <bool> struct Choice { using Type = Silu; };
template <> struct Choice<true> { using Type = Gelu; };
using Gate = Choice<GELU>::Type;
using Product = SharedProduct<A, A, false, RANK, false, true, STAGES, EPILOGUES>;

// What an epilogue's thread does with its boxes: of each 4 rows and 8 columns of out, from the words
// of 16 bytes of up and gate.
struct Activation {
    bf16 *up_gate, *out;
    Q *codes, *transposed;
    int M, F;
    Fp8Encoder<Q, CODES || TRANSPOSED> encoder;
    u32 largest = 0;

    __device__ __forceinline__ void operator()(const Tile& tile, int b, int first_line,
                                               SharedAddress lines) {
        const int lane = threadIdx.x % 32, octet = lane % 4;
        const int line = lane / 4 * 4;
        const int row = tile.row + first_line + line, column = tile.column + 32 * b + 8 * octet;
        const bool inside = row < M && column < F;  // as M and F are multiples of 16
        const i64 place = (i64)row * F + column;
        bf16* kept = up_gate == nullptr ? nullptr : up_gate + place + (i64)row * F;
        bf16* to = out == nullptr ? nullptr : out + place;
        uint2 four[4];
#pragma unroll ROWS_AT_ONCE
        for (int i = 0; i < 4; ++i) {
            const int r = line + i;
            const SharedAddress word = lines + r * LINE + ((octet ^ r & 7) << 4);
            const uint4 up = load_shared(word), gate = load_shared(word ^ 64);
            const Vec<bf16> up_i = unpack<bf16>(up), gate_i = unpack<bf16>(gate);
            if (kept != nullptr && inside) {
                store_vec(kept, up_i);
                store_vec(kept + F, gate_i);
                kept += 2 * F;
            }
            float g[8], s[8];
#pragma unroll
            for (int k = 0; k < 8; ++k) { g[k] = to_f32(gate_i[k]); }
            shares<Gate>(s, g);
            Pack<bf16, 8> result;
#pragma unroll
            for (int k = 0; k < 8; ++k) {
                result.set(k, from_f32<bf16>(to_f32(up_i[k]) * (g[k] * s[k])));
            }
            if (to != nullptr && inside) {
                store_vec(to, result.part[0]);
                to += F;
            }
            // A loop that is not unrolled cannot have four[i].
            four[0] = four[1], four[1] = four[2], four[2] = four[3];
            if (inside) {
                if constexpr (ABS_MAX) { largest = max(largest, abs_max_bits(result)); }
                four[3] = encoder.encode(result);
                if constexpr (CODES) {
                    *reinterpret_cast<uint2*>(codes + place + (i64)i * F) = four[3];
                }
            }
        }
        if constexpr (TRANSPOSED) {
            if (inside) { store_transposed(transposed + (i64)column * M + row, four); }
        }
    }

    // Four rows of eight columns: lanes that have the same columns write 32 bytes of each.
    __device__ __forceinline__ void store_transposed(Q* to, const uint2 (&four)[4]) const {
        u32 turned[2][4];
        transpose_bytes(turned[0], {four[0].x, four[1].x, four[2].x, four[3].x});
        transpose_bytes(turned[1], {four[0].y, four[1].y, four[2].y, four[3].y});
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            *reinterpret_cast<u32*>(to + (i64)i * M) = turned[i / 4][i % 4];
        }
    }
};

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(Product::THREADS, 1)
matmul_swiglu(bf16* up_gate, bf16* out, const __grid_constant__ TensorMap a,
              const __grid_constant__ TensorMap b, const __grid_constant__ TensorMap h,
              const __grid_constant__ TensorMap tail, const float* scale_a, const float* scale_b,
              int M, int F, int K, float* abs_max, Q* codes, Q* transposed, const float* scale,
              int* saturated) {
    extern __shared__ unsigned char shared[];
    const Product product(shared, K);
    if (threadIdx.x == 0) { product.init(); }
    cluster_arrive();
    cluster_wait();
    const Work work(M, F, Product::WIDTH);
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), warpgroup = warp / 4;
    if (warpgroup == 1 || warpgroup == 2) {
        product.multiply_tiles(work, warpgroup - 1, Product::SCALED ? *scale_a * *scale_b : 1.0f);
    } else if (warp == 0) {
        if (threadIdx.x == 0) { product.load(work, &a, &b, &h, &tail, F); }
    } else {
        Activation activation{up_gate, out, codes, transposed, M, F,
                              Fp8Encoder<Q, CODES || TRANSPOSED>(scale)};
        product.take_boxes(work, warp < 4 ? warp - 1 : warp - 9, activation);
        activation.encoder.finish(saturated);
        if constexpr (ABS_MAX) {
            const u32 largest = __reduce_max_sync(~0u, activation.largest);
            if (threadIdx.x % 32 == 0) { store_abs_max(abs_max, __uint_as_float(largest)); }
        }
    }
    cluster_arrive();
    cluster_wait();  // a block may not end while the other one still arrives at its barriers
}
