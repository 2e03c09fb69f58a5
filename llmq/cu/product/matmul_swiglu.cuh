// matmul_swiglu.cuh -- the up product of a gated MLP, followed by the activation.
//
//   up_gate = x
//   out     = up * (gate * s)        s = sigmoid(gate), or with GELU = 1 GELU's (activation.cuh)
//
// A tile is 96 columns of up and the same columns of gate. Seven warps compute a tile's activation
// while two warpgroups multiply the next tile. up_gate is rounded first, so that the result equals
// a separate product followed by swiglu.cu, bit for bit.
//
// Data     b: (2F, K), tail: (2F, R): rows of up, then rows of gate; N is F. up_gate: bf16 (M, 2F),
//          null without UP_GATE = 1. out: bf16 (M, F), null without OUT = 1. abs_max: F32 (1),
//          raised to the largest |out| with ABS_MAX = 1, else unchanged. codes (with CODES = 1),
//          transposed (with TRANSPOSED = 1), scale, saturated: FP8 codes of out, as in fp8.cuh.
// Cost     About 25 instructions for each element of out, which overlap with the product if K is
//          large enough. Only results are written.
// Needs    M and F multiples of 16.
#pragma once
#include "pointwise/activation.cuh"
#include "product/smem_tiles.cuh"
#include "fp8.cuh"

using Gate = GateOf<GELU>::Type;
struct Shape : Boxes {
    static constexpr bool PAIRED = true;
};
using Product = Cooperative<Mainloop, 7, Shape>;
using Encoder = OctetEncoder<Q, CODES || TRANSPOSED, ABS_MAX>;

// An epilogue thread's work on its units of 4 rows and 8 columns of out.
struct Epilogue {
    bf16 *up_gate, *out;
    Q *codes, *transposed;
    f32* abs_max;
    const f32* scale;
    i32* saturated;
    int M, F;
    Encoder encoder;

    __device__ __forceinline__ void begin() { encoder.begin(scale); }
    __device__ __forceinline__ void take(const Product& product, const Work& work, int me) {
        product.take_boxes(work, me, *this);
        encoder.finish(saturated, abs_max);
    }

    __device__ __forceinline__ void operator()(const Tile& tile, int b, int first_line,
                                               SharedAddress lines) {
        const int octet = threadIdx.x % 4, line = threadIdx.x % 32 / 4 * 4;
        const int row = tile.row + first_line + line, column = tile.column + 32 * b + 8 * octet;
        if (row >= M || column >= F) { return; }  // M and F are multiples of 16
        uint2 four[4];
#pragma unroll 1
        for (int i = 0; i < 4; i += 2) {
            uint4 up[2], gate[2], result[2];
#pragma unroll
            for (int j = 0; j < 2; ++j) { load(up[j], gate[j], lines, line + i + j, octet); }
            const i64 place = (i64)(row + i) * F + column;
            if constexpr (UP_GATE) { keep(place + (i64)(row + i) * F, up, gate); }
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
    // Load eight columns of up and of gate in one row.
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

    // Store two rows of up_gate, past the caches.
    __device__ __forceinline__ void keep(i64 place, const uint4 (&up)[2],
                                         const uint4 (&gate)[2]) const {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            bf16* to = up_gate + place + (i64)j * 2 * F;
            __stcs(reinterpret_cast<uint4*>(to), up[j]);
            __stcs(reinterpret_cast<uint4*>(to + F), gate[j]);
        }
    }

    __device__ __forceinline__ void activate(uint4 (&result)[2], const uint4 (&up)[2],
                                             const uint4 (&gate)[2]) const {
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

    // Store codes of four rows and eight columns. Lanes with the same columns write 32 bytes of
    // each.
    __device__ __forceinline__ void store_transposed(Q* to, const uint2 (&four)[4]) const {
        u32 words[2][4];
        transpose_bytes(words[0], {four[0].x, four[1].x, four[2].x, four[3].x});
        transpose_bytes(words[1], {four[0].y, four[1].y, four[2].y, four[3].y});
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            __stcs(reinterpret_cast<u32*>(to + (i64)i * M), words[i / 4][i % 4]);
        }
    }
};

#define PARAMETERS \
    bf16 *up_gate, bf16 *out, f32 *abs_max, Q *codes, Q *transposed, const f32 *scale, i32 *saturated
#define ARGUMENTS up_gate, out, codes, transposed, abs_max, scale, saturated, M, N
