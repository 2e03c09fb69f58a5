// matmul_swiglu.cu -- the up product of a gated MLP for Hopper, with the activation behind it.
//
//   up_gate = scale_a * scale_b * (a @ b^T) + h @ tail^T
//   out     = up * (gate * s)        s = sigmoid(gate), or with GELU = 1 GELU's (activation.cuh)
//
// The product is that of product_sm90.cuh: a tile is 96 columns of up and those of gate. Two
// warpgroups compute the activation of a tile while two others multiply the next one. up_gate is
// rounded first, so that all bits are those of the product and of swiglu.cu behind it: to BF16, or
// with CODED = 1 to codes, of which the activation is computed then.
//
// Data     a: A (M, K), b: A (2F, K), h: bf16 (M, R), tail: bf16 (2F, R); RANK: R rounded up to 16;
//          0: there are no h and tail. scale_a, scale_b: F32 (1), of fp8 codes. up_gate: bf16 (M,
//          2F), with UP_GATE = 1, out: bf16 (M, F), with OUT = 1; else they may be null. abs_max: F32
//          (1), with ABS_MAX = 1 raised to the largest |out|; else not touched. codes, transposed,
//          scale, saturated as in fp8.cuh, of out; codes with CODES = 1, transposed with
//          TRANSPOSED = 1. CODED: up_gate is E4M3, without h; up_...: as ProductCodes in
//          llmq/base/operand.py, up_found I32 (4).
// Launch   an even number of blocks of 512 threads, not more than there are multiprocessors, nor
//          tiles; SHARED bytes of dynamic shared memory (ops/matmul_swiglu.py).
// Cost     4 M F (K + R) FLOPs, and about 25 instructions for each element of out, which hide behind
//          the product where K is long enough. Only results are written.
// Needs    compute capability 9.0; M and F multiples of 16; rows of multiples of 16 bytes.
// Same name  llmq/ops/matmul_swiglu.py  llmq/ref/matmul_swiglu.py
//            tests/ops/test_matmul_swiglu.py
// Source   PTX ISA, as matmul_adapted.cu.
#include "activation.cuh"
#include "common.cuh"
#include "fp8.cuh"

constexpr int TILE_COLUMNS = 192;
#include "shared_sm90.cuh"

constexpr int STAGES = 4, EPILOGUES = 7;
template <bool> struct Choice { using Type = Silu; };
template <> struct Choice<true> { using Type = Gelu; };
using Gate = Choice<GELU>::Type;
#if CODED
using Rounded = e4m3;
using Octet = uint2;  // eight neighbours
#else
using Rounded = bf16;
using Octet = uint4;
#endif
using Product = SharedProduct<A, A, false, RANK, false, true, STAGES, EPILOGUES, Rounded>;
using Encoder = OctetEncoder<Q, CODES || TRANSPOSED, ABS_MAX>;
constexpr bool ACTIVATES = OUT || CODES || TRANSPOSED || ABS_MAX;  // or up_gate alone is wanted

// What an epilogue's thread does with its units: of each 4 rows and 8 columns of out.
struct Activation {
    Rounded* up_gate;
    bf16* out;
    Q *codes, *transposed;
    int M, F;
    Encoder encoder;
    float up_scale;           // of CODED, as all that follows
    const volatile u32* hot;  // of Rounding
    u32 count = 0;            // codes that are +-MAX,
    bool counts = false;      // if there may be some

    __device__ __forceinline__ void operator()(const Tile& tile, int b, int first_line,
                                               SharedAddress lines) {
        const int octet = threadIdx.x % 4, line = threadIdx.x % 32 / 4 * 4;
        const int row = tile.row + first_line + line, column = tile.column + 32 * b + 8 * octet;
        if (row >= M || column >= F) { return; }  // M and F are multiples of 16
        if constexpr (CODED) { counts = *hot != 0; }
        uint2 four[4];
#pragma unroll 1
        for (int i = 0; i < 4; i += 2) {
            Octet up[2], gate[2];
            uint4 result[2];
#pragma unroll
            for (int j = 0; j < 2; ++j) { load(up[j], gate[j], lines, line + i + j, octet); }
            const i64 place = (i64)(row + i) * F + column;
            if constexpr (UP_GATE) { keep(place + (i64)(row + i) * F, up, gate); }
            if constexpr (!ACTIVATES) { continue; }
            activate(result, up, gate);
            four[0] = four[2], four[1] = four[3];  // four[i] would need the loop unrolled
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const i64 to = place + (i64)j * F;
                if constexpr (OUT) { *reinterpret_cast<uint4*>(out + to) = result[j]; }
                four[2 + j] = encoder.encode(result[j]);
                if constexpr (CODES) { *reinterpret_cast<uint2*>(codes + to) = four[2 + j]; }
            }
        }
        if constexpr (TRANSPOSED) { store_transposed(transposed + (i64)column * M + row, four); }
    }

private:
    // A row's columns of up and of gate.
#if CODED
    __device__ __forceinline__ void load(uint2& up, uint2& gate, SharedAddress lines, int line,
                                         int octet) {
        const uint4 word = load_shared(lines + word_of_codes(line, octet));
        up = first_octet(word), gate = second_octet(word);
        if (__builtin_expect(counts, 0)) {
            count += largest_codes<Rounded>(up) + largest_codes<Rounded>(gate);
        }
    }
    __device__ __forceinline__ void numbers(float (&x)[8], const uint2& octet) const {
        decode<Rounded>(x, octet, up_scale);
    }
#else
    __device__ __forceinline__ void load(uint4& up, uint4& gate, SharedAddress lines, int line,
                                         int octet) const {
        up = load_shared(lines + line * LINE + ((octet ^ line & 7) << 4));
        gate = load_shared(lines + line * LINE + ((octet + 4 ^ line & 7) << 4));
    }
    __device__ __forceinline__ void numbers(float (&x)[8], const uint4& octet) const {
        const u32 pair[4] = {octet.x, octet.y, octet.z, octet.w};
#pragma unroll
        for (int k = 0; k < 8; k += 2) {
            x[k] = lower_half(pair[k / 2]), x[k + 1] = upper_half(pair[k / 2]);
        }
    }
#endif

    // Two rows of up_gate, of which nothing is read soon.
    __device__ __forceinline__ void keep(i64 place, const Octet (&up)[2],
                                         const Octet (&gate)[2]) const {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            Rounded* to = up_gate + place + (i64)j * 2 * F;
            __stcs(reinterpret_cast<Octet*>(to), up[j]);
            __stcs(reinterpret_cast<Octet*>(to + F), gate[j]);
        }
    }

    __device__ __forceinline__ void activate(uint4 (&result)[2], const Octet (&up)[2],
                                             const Octet (&gate)[2]) const {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            float g[8], s[8], u[8];
            numbers(g, gate[j]), numbers(u, up[j]);
#pragma unroll
            for (int k = 0; k < 8; ++k) { s[k] = share<Gate, false>(g[k]); }
            result[j] = make_uint4(to_pair(u[0] * (g[0] * s[0]), u[1] * (g[1] * s[1])),
                                   to_pair(u[2] * (g[2] * s[2]), u[3] * (g[3] * s[3])),
                                   to_pair(u[4] * (g[4] * s[4]), u[5] * (g[5] * s[5])),
                                   to_pair(u[6] * (g[6] * s[6]), u[7] * (g[7] * s[7])));
        }
    }

    // Four rows of eight columns: lanes that have the same columns write 32 bytes of each.
    __device__ __forceinline__ void store_transposed(Q* to, const uint2 (&four)[4]) const {
        u32 turned[2][4];
        transpose_bytes(turned[0], {four[0].x, four[1].x, four[2].x, four[3].x});
        transpose_bytes(turned[1], {four[0].y, four[1].y, four[2].y, four[3].y});
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            __stcs(reinterpret_cast<u32*>(to + (i64)i * M), turned[i / 4][i % 4]);
        }
    }
};

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(Product::THREADS, 1)
matmul_swiglu(U* up_gate, bf16* out, const __grid_constant__ TensorMap a,
              const __grid_constant__ TensorMap b, const __grid_constant__ TensorMap h,
              const __grid_constant__ TensorMap tail, const float* scale_a, const float* scale_b,
              int M, int F, int K, float* abs_max, Q* codes, Q* transposed, const float* scale,
              int* saturated, const float* up_scale, const float* up_factor, float* up_largest,
              int* up_found, float* up_abs_max, int* up_saturated) {
    extern __shared__ unsigned char shared[];
    __shared__ u32 hot;
    const Product product(shared, K);
    if (threadIdx.x == 0) {
        product.init();
        if constexpr (CODED) { hot = 0; }
    }
    cluster_arrive();
    cluster_wait();
    const Work work(M, F, Product::WIDTH, K * (int)sizeof(A));
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), warpgroup = warp / 4;
    float largest = 0.0f;
    u32 count = 0;
    if (warpgroup == 1 || warpgroup == 2) {
        const float sum_scale = Product::SCALED ? *scale_a * *scale_b : 1.0f;
        largest = product.multiply_tiles(work, warpgroup - 1, sum_scale,
                                         {CODED ? *up_factor : 1.0f, &hot});
    } else if (warp == 0) {
        if (threadIdx.x == 0) { product.load(work, &a, &b, &h, &tail, F); }
    } else {
        Activation activation{
            reinterpret_cast<Rounded*>(up_gate), out, codes, transposed, M, F, Encoder(scale),
            CODED ? *up_scale : 1.0f, &hot};
        product.take_boxes(work, warp < 4 ? warp - 1 : warp - 9, activation);
        activation.encoder.finish(saturated, abs_max);
        count = activation.count;
    }
    if constexpr (CODED) {
        if (warp != 0) {
            finish_codes<e4m3>(largest, count, up_found, gridDim.x * (Product::THREADS / 32 - 1),
                               *up_scale, up_largest, up_abs_max, up_saturated);
        }
    }
    cluster_arrive();
    cluster_wait();  // a block may not end while the other one still arrives at its barriers
}
