// matmul_swiglu_backward.cu -- the down product's input gradient for Hopper, and behind it the
// gradient of SwiGLU or GeGLU.
//
//   d_out = bf16(scale_a * scale_b * (a @ b) + h @ tail)
//   d_up_gate, out = swiglu_backward(d_out, up_gate)        as in swiglu.cu, with the same bits
//
// The product is that of product_sm90.cuh. While two warpgroups multiply a tile of d_out, another one
// computes what follows from the one before: one warp on each scheduler of the multiprocessor, with
// all registers that the others do not need, so that a warp has enough independent instructions. A
// warp has 32 rows of each box, a thread 4 rows and 8 columns at a time: a row's codes are 8 bytes, and
// those of a column 4, which go through shared memory, from where three warps copy whole lines. What
// is read of up_gate is loaded a step ahead, into registers.
//
// Data     d_up_gate, up_gate: bf16 (M, 2F), [up | gate] in every row; d_up_gate may be up_gate.
//          a: A (M, K), b: bf16 (K, F), fp8 codes B (F, K). h: bf16 (M, R), tail: bf16 (R, F).
//          scale_a, scale_b: F32 (1), of fp8 codes. RANK: R rounded up to 16; 0: there are none.
//          abs_max, codes, transposed, scale, saturated, out, out_*: as in swiglu.cu. TENSOR: whether
//          d_up_gate is written, else it is null.
// Launch   an even number of blocks of 512 threads, not more than there are multiprocessors;
//          dynamic shared memory (ops/matmul_swiglu_backward.py).
// Cost     2 M F (K + R) FLOPs; reads 4 F bytes a row, and writes as many with codes in both
//          layouts: bound by memory where K is below about 2000 (fp8).
// Needs    compute capability 9.0; M % 16 == 0, F % 64 == 0; rows that are multiples of 16 bytes.
// Same name  llmq/ops/matmul_swiglu_backward.py  llmq/ref/matmul_swiglu_backward.py
//            tests/ops/test_matmul_swiglu_backward.py
#include "activation.cuh"
#include "common.cuh"
#include "fp8.cuh"
#include "product_sm90.cuh"

#ifndef DEPTH
#define DEPTH 1
#endif
#ifndef SKIP
#define SKIP 0
#endif
#ifndef ROWS
#define ROWS 2
#endif
#ifndef JOIN
#define JOIN 0
#endif

template <bool> struct Choice { using Type = Silu; };
template <> struct Choice<true> { using Type = Gelu; };
using Gate = Choice<GELU>::Type;
using Product = SharedProduct<A, B, sizeof(A) == 2, RANK, true, false, RING, 4>;
constexpr bool HAS_CODES = CODES || TRANSPOSED, TURNS = TRANSPOSED || OUT_TRANSPOSED;

constexpr int W = 8, PAIRS = W / 2;  // columns of a thread; its registers of BF16 in a row
constexpr int WARPS = 4, PARTS = 2;  // of the epilogue; of a warp's rows of a box: 16 each
constexpr int COPIERS = 3;           // warps that store transposed codes
constexpr int TURNED_BYTES = BOX * TILE_ROWS, TURNED = 2 * TRANSPOSED + OUT_TRANSPOSED;  // tiles of them

// One row of a thread's columns, packed.
struct Strip {
    u32 pair[PAIRS];
};
__device__ __forceinline__ float lower(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float upper(u32 pair) { return __uint_as_float(pair & 0xFFFF0000u); }
__device__ __forceinline__ float element(const Strip& x, int i) {
    return i % 2 ? upper(x.pair[i / 2]) : lower(x.pair[i / 2]);
}
__device__ __forceinline__ u32 rounded(float a, float b) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(a, b);
    return *reinterpret_cast<const u32*>(&pair);
}
using StripWord = uint4;
using CodeWord = uint2;

__device__ __forceinline__ Strip load_strip(const bf16* p) {
    const StripWord x = __ldcs(reinterpret_cast<const StripWord*>(p));
    return *reinterpret_cast<const Strip*>(&x);
}
__device__ __forceinline__ void store_strip(bf16* p, const Strip& x) {
    *reinterpret_cast<StripWord*>(p) = *reinterpret_cast<const StripWord*>(&x);
}
__device__ __forceinline__ void forget(Strip& x) { forget(reinterpret_cast<StripWord&>(x)); }

// Of ROWS rows together, so that there are many independent instructions.
__device__ __forceinline__ void gradients(Strip (&d_up)[ROWS], Strip (&d_gate)[ROWS],
                                          Strip (&out)[ROWS], const Strip (&d)[ROWS],
                                          const Strip* up, const Strip* gate) {
    float g[ROWS * W], s[ROWS * W];
#pragma unroll
    for (int i = 0; i < ROWS * W; ++i) { g[i] = element(gate[i / W], i % W); }
    shares<Gate, true>(s, g);
#pragma unroll
    for (int j = 0; j < ROWS * PAIRS; ++j) {
        const int row = j / PAIRS, pair = j % PAIRS;
        float x[2], y[2], z[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float gate_e = g[2 * j + i], s_e = s[2 * j + i], share = gate_e * s_e;
            const float d_e = element(d[row], 2 * pair + i), up_e = element(up[row], 2 * pair + i);
            x[i] = share * d_e;
            y[i] = Gate::slope(gate_e, s_e) * up_e * d_e;
            z[i] = up_e * share;
        }
        d_up[row].pair[pair] = rounded(x[0], x[1]);
        d_gate[row].pair[pair] = rounded(y[0], y[1]);
        out[row].pair[pair] = rounded(z[0], z[1]);
    }
}

// A pair of the largest absolute values, as the numbers' bits, of even and odd columns.
__device__ __forceinline__ u32 largest_pair(const Strip& x) {
    u32 pair = 0;
#pragma unroll
    for (int j = 0; j < PAIRS; ++j) { pair = __vmaxu2(pair, x.pair[j] & 0x7FFF7FFFu); }
    return pair;
}
__device__ __forceinline__ u32 larger_half(u32 pair) { return max(pair >> 16, pair & 0xFFFFu); }

// How Strips become codes. Format: any type if there are none.
template <class Format> struct StripEncoder {
    float factor;
    u32 limit;  // the upper half of the limit's bits: x is above it if the bits of |x| are
    u32 count = 0;

    __device__ __forceinline__ explicit StripEncoder(const float* scale) {
        if constexpr (sizeof(Format) == 1) {
            factor = 1.0f / *scale;
            limit = __float_as_uint(Fp8<Format>::MAX * *scale) >> 16;
        }
    }
    __device__ __forceinline__ CodeWord encode(const Strip& x) const {
        u32 four[W / 4] = {};
        if constexpr (sizeof(Format) == 1) {
#pragma unroll
            for (int j = 0; j < W; j += 4) {
                four[j / 4] = to_fp8<Format>(element(x, j) * factor, element(x, j + 1) * factor,
                                             element(x, j + 2) * factor, element(x, j + 3) * factor);
            }
        }
        return *reinterpret_cast<CodeWord*>(four);
    }
    // What is saturated, if the largest is; it turns the strips, so that all indices are constants.
    __device__ __forceinline__ void count_beyond(Strip (&rows)[ROWS]) {
        u32 x[ROWS * PAIRS];
#pragma unroll
        for (int i = 0; i < ROWS * PAIRS; ++i) { x[i] = rows[i / PAIRS].pair[i % PAIRS]; }
#pragma unroll 1
        for (int k = 0; k < ROWS * PAIRS; ++k) {
            const u32 low = x[0] & 0x7FFFu, high = x[0] >> 16 & 0x7FFFu;
            count += (low > limit && low <= 0x7F80u) + (high > limit && high <= 0x7F80u);
#pragma unroll
            for (int i = 0; i < ROWS * PAIRS - 1; ++i) { x[i] = x[i + 1]; }
        }
    }
    __device__ __forceinline__ void finish(i32* saturated) {
        if constexpr (sizeof(Format) == 1) {
            const u32 sum = __reduce_add_sync(~0u, count);
            if (threadIdx.x % 32 == 0 && sum != 0) { atomicAdd(saturated, (i32)sum); }
        }
    }
};
template <bool, class Format> struct Wanted { using Type = Format; };
template <class Format> struct Wanted<false, Format> { using Type = float; };

// Codes of 64 columns and 128 rows, transposed, in shared memory: a line for each column, in which
// 16 bytes, of 16 rows, lie in place w ^ (column / 8) instead of w. four: of the lane's 4 rows.
__device__ __forceinline__ void put_turned(unsigned char* tile, int sixteen, int octet, int word,
                                           const CodeWord (&rows)[4]) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
        u32 turned[4];
        transpose_bytes(turned, {j ? rows[0].y : rows[0].x, j ? rows[1].y : rows[1].x,
                                 j ? rows[2].y : rows[2].x, j ? rows[3].y : rows[3].x});
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int place = (8 * octet + 4 * j + i) * LINE + ((sixteen ^ octet) << 4) + 4 * word;
            *reinterpret_cast<u32*>(tile + place) = turned[i];
        }
    }
}
// To transposed (columns, rows), from this row and column of it, by the copying warps.
template <class Format>
__device__ __forceinline__ void copy_turned(Format* transposed, const unsigned char* tile, int row,
                                            int column, int rows) {
    const int thread = threadIdx.x - 32, k = thread % 8;
    if (row + 16 * k >= rows) { return; }
    Format* const to = transposed + (i64)column * rows + row + 16 * k;
#pragma unroll 2
    for (int c = thread / 8; c < BOX; c += COPIERS * 4) {
        *reinterpret_cast<uint4*>(to + (i64)c * rows) =
            *reinterpret_cast<const uint4*>(tile + c * LINE + ((k ^ c / 8) << 4));
    }
}

// The epilogue of a tile: what lies in shared memory behind the product's.
struct Shared {
    unsigned char *boxes, *turned;
    SharedAddress turned_full, turned_empty;
    __device__ __forceinline__ Shared(unsigned char* shared, const Product& product) {
        boxes = shared + (product.boxes - shared_address(shared));
        turned = boxes + Product::BOXES * Product::BOX_BYTES + 512;  // behind the product's barriers
        turned_full = shared_address(turned) - 16;
        turned_empty = turned_full + 8;
    }
};

// The warps that store transposed codes.
__device__ __forceinline__ void copy_boxes(const Work& work, const Shared& shared, Q* transposed,
                                           e4m3* out_transposed, int M, int F) {
    u32 parity = 0;
    for (int t = work.cluster; t < work.tiles; t += work.clusters) {
        const Tile tile(t, work);
#pragma unroll 1
        for (int box = 0; box < Product::BOXES; ++box, parity ^= 1) {
            const int column = tile.column + box * BOX;
            barrier_wait(shared.turned_full, parity);
            if (column < F) {
                if constexpr (TRANSPOSED) {
                    copy_turned(transposed, shared.turned, tile.row, column, M);
                    copy_turned(transposed, shared.turned + TURNED_BYTES, tile.row, column + F, M);
                }
                if constexpr (OUT_TRANSPOSED) {
                    copy_turned(out_transposed, shared.turned + (TURNED - 1) * TURNED_BYTES, tile.row,
                                column, M);
                }
            }
            __syncwarp();
            if (threadIdx.x % 32 == 0) { barrier_arrive(shared.turned_empty); }
        }
    }
}

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(Product::THREADS, 1)
matmul_swiglu_backward(bf16* d_up_gate, const __grid_constant__ TensorMap a,
                       const __grid_constant__ TensorMap b, const __grid_constant__ TensorMap h,
                       const __grid_constant__ TensorMap tail, const f32* scale_a,
                       const f32* scale_b, const bf16* up_gate, i32 M, i32 F, i32 K, f32* abs_max,
                       Q* codes, Q* transposed, const f32* scale, i32* saturated, bf16* out,
                       e4m3* out_transposed, const f32* out_scale, i32* out_saturated) {
    extern __shared__ unsigned char dynamic[];
    const Product product(dynamic, K);
    const Shared shared(dynamic, product);
    if (threadIdx.x == 0) {
        barrier_init(shared.turned_full, WARPS);
        barrier_init(shared.turned_empty, COPIERS);
        product.init();
    }
    cluster_arrive();
    cluster_wait();
    const Work work(M, F, Product::WIDTH);
    const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
    if (warpgroup == 0) {
        give_registers<56>();
        if (threadIdx.x == 0) {
            product.load(work, &a, &b, &h, &tail, TILE_COLUMNS / 2);
        } else if (TURNS && SKIP != 1 && SKIP != 3 && threadIdx.x >= 32) {
            copy_boxes(work, shared, transposed, out_transposed, M, F);
        }
    } else if (warpgroup < 3) {
        product.multiply_tiles(work, warpgroup - 1, Product::SCALED ? *scale_a * *scale_b : 1.0f);
    } else {
        take_registers<200>();
        const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
        const int octet = lane % 8, four = lane / 8;
        StripEncoder<typename Wanted<HAS_CODES, Q>::Type> encoder(scale);
        StripEncoder<typename Wanted<OUT_TRANSPOSED, e4m3>::Type> out_encoder(out_scale);
        u32 largest = 0;
        Strip up[DEPTH][4], gate[DEPTH][4];
        const int line = warp * 32 + four * 4;  // the first row of the first part
        const auto is_inside = [&](const Tile& tile, int box, int part) {
            return tile.row + warp * 32 + part * 16 < M && tile.column + box * BOX < F;
        };
        const auto place = [&](const Tile& tile, int box, int part) {  // in up_gate
            return (i64)(tile.row + line + part * 16) * 2 * F + tile.column + box * BOX + octet * W;
        };
        Tile tile(work.cluster, work);
#pragma unroll
        for (int part = 0; part < DEPTH; ++part) {
            if (work.cluster < work.tiles && is_inside(tile, 0, part)) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const bf16* from = up_gate + place(tile, 0, part) + (i64)i * 2 * F;
                    up[part][i] = load_strip(from);
                    gate[part][i] = load_strip(from + F);
                }
            }
        }
        u32 parity = 0, turned_parity = 1;
        for (int t = work.cluster; t < work.tiles; t += work.clusters, parity ^= 1) {
            const Tile next(t + work.clusters < work.tiles ? t + work.clusters : t, work);
#pragma unroll 1
            for (int box = 0; box < Product::BOXES; ++box) {
                barrier_wait(product.ready + 8 * box, parity);
                if (TURNS && SKIP != 1 && SKIP != 3) { barrier_wait(shared.turned_empty, turned_parity); }
                turned_parity ^= 1;
#pragma unroll DEPTH
                for (int part = 0; part < PARTS; ++part) {
                    const int slot = DEPTH == 2 ? part : 0;
                    // What is loaded meanwhile.
                    int box_then = box, part_then = part;
                    bool wraps = false;
                    if (DEPTH == 2 || ++part_then == PARTS) {
                        part_then = DEPTH == 2 ? part : 0;
                        wraps = ++box_then == Product::BOXES;
                        if (wraps) { box_then = 0; }
                    }
                    Tile then = tile;
                    if (wraps) { then = next; }
                    const bool loads = is_inside(then, box_then, part_then);
                    const bf16* const from = up_gate + place(then, box_then, part_then);
                    const bool inside = is_inside(tile, box, part);
                    const i64 wide = place(tile, box, part);
                    const unsigned char* lines = shared.boxes + box * Product::BOX_BYTES;
                    CodeWord up_codes[4], gate_codes[4], out_codes[4];
#pragma unroll
                    for (int first = 0; first < 4; first += ROWS) {
                        Strip d[ROWS], d_up[ROWS], d_gate[ROWS], again[ROWS];
#pragma unroll
                        for (int i = 0; i < ROWS; ++i) {
                            const int row = line + part * 16 + first + i;
                            const StripWord word = *reinterpret_cast<const StripWord*>(
                                lines + row * LINE + ((octet ^ row & 7) << 4));
                            d[i] = *reinterpret_cast<const Strip*>(&word);
                            forget(up[slot][first + i]), forget(gate[slot][first + i]);
#if SKIP == 3
                            up[slot][first + i] = gate[slot][first + i] = d[i];
#endif
                        }
#if SKIP == 1
                        for (int i = 0; i < ROWS; ++i) { d_up[i] = d[i], d_gate[i] = d[i], again[i] = d[i]; }
#elif SKIP == 2
                        for (int i = 0; i < ROWS; ++i) {
                            d_up[i] = up[slot][first + i], d_gate[i] = gate[slot][first + i], again[i] = d[i];
                        }
#else
                        gradients(d_up, d_gate, again, d, up[slot] + first, gate[slot] + first);
#endif
                        if (SKIP != 1 && SKIP != 3 && loads) {
#pragma unroll
                            for (int i = first; i < first + ROWS; ++i) {
                                up[slot][i] = load_strip(from + (i64)i * 2 * F);
                                gate[slot][i] = load_strip(from + (i64)i * 2 * F + F);
                            }
                        }
                        u32 pair = 0, again_pair = 0;
#pragma unroll
                        for (int i = 0; i < ROWS; ++i) {
                            forget(d_up[i]), forget(d_gate[i]);
                            pair = __vmaxu2(pair, __vmaxu2(largest_pair(d_up[i]), largest_pair(d_gate[i])));
                            if constexpr (OUT_TRANSPOSED) {
                                again_pair = __vmaxu2(again_pair, largest_pair(again[i]));
                            }
                        }
                        if (inside) { largest = __vmaxu2(largest, pair); }
#pragma unroll
                        for (int i = 0; i < ROWS; ++i) {
                            const int k = first + i;
#if SKIP == 0 || SKIP == 3
                            if constexpr (HAS_CODES) {
                                up_codes[k] = encoder.encode(d_up[i]);
                                gate_codes[k] = encoder.encode(d_gate[i]);
                            }
                            if constexpr (OUT_TRANSPOSED) { out_codes[k] = out_encoder.encode(again[i]); }
#else
                            up_codes[k] = *reinterpret_cast<CodeWord*>(&d_up[i]);
                            gate_codes[k] = *reinterpret_cast<CodeWord*>(&d_gate[i]);
                            out_codes[k] = *reinterpret_cast<CodeWord*>(&again[i]);
#endif
#if SKIP == 3
                            largest ^= up_codes[k].x ^ up_codes[k].y ^ gate_codes[k].x ^ gate_codes[k].y;
#endif
                            if (inside && SKIP != 1 && SKIP != 3) {
                                const i64 at = wide + (i64)k * 2 * F;
                                if constexpr (TENSOR) {
                                    store_strip(d_up_gate + at, d_up[i]);
                                    store_strip(d_up_gate + at + F, d_gate[i]);
                                }
                                if constexpr (OUT) {
                                    store_strip(out + at - (i64)(tile.row + line + part * 16 + k) * F, again[i]);
                                }
                                if constexpr (CODES && !JOIN) {
                                    *reinterpret_cast<CodeWord*>(codes + at) = up_codes[k];
                                    *reinterpret_cast<CodeWord*>(codes + at + F) = gate_codes[k];
                                }
                            }
                            if (CODES && JOIN && k % 2 == 1 && SKIP != 1 && SKIP != 3) {
                                const uint4 x = join_pair(up_codes[k - 1], up_codes[k]);
                                const uint4 y = join_pair(gate_codes[k - 1], gate_codes[k]);
                                if (inside) {
                                    Q* const to = codes + wide + (i64)(k - 1 + (lane & 1)) * 2 * F - (lane & 1) * 8;
                                    *reinterpret_cast<uint4*>(to) = x;
                                    *reinterpret_cast<uint4*>(to + F) = y;
                                }
                            }
                        }
#if SKIP == 0 || SKIP == 3
                        if (HAS_CODES && inside && larger_half(pair) > encoder.limit) {
                            encoder.count_beyond(d_up);
                            encoder.count_beyond(d_gate);
                        }
                        if (OUT_TRANSPOSED && inside && larger_half(again_pair) > out_encoder.limit) {
                            out_encoder.count_beyond(again);
                        }
#endif
                    }
                    if constexpr (TURNS && SKIP != 1) {
                        const int sixteen = warp * 2 + part;
                        if constexpr (TRANSPOSED) {
                            put_turned(shared.turned, sixteen, octet, four, up_codes);
                            put_turned(shared.turned + TURNED_BYTES, sixteen, octet, four, gate_codes);
                        }
                        if constexpr (OUT_TRANSPOSED) {
                            put_turned(shared.turned + (TURNED - 1) * TURNED_BYTES, sixteen, octet,
                                       four, out_codes);
                        }
                    }
                }
                __syncwarp();
                if (lane == 0) {
                    barrier_arrive(product.taken + 8 * box);
                    if (TURNS && SKIP != 1 && SKIP != 3) { barrier_arrive(shared.turned_full); }
                }
            }
            tile = next;
        }
        encoder.finish(saturated);
        out_encoder.finish(out_saturated);
        if constexpr (ABS_MAX) {
            largest = __reduce_max_sync(~0u, larger_half(largest));
            if (lane == 0) { store_abs_max(abs_max, __uint_as_float(largest << 16)); }
        }
    }
    cluster_arrive();
    cluster_wait();  // a block may not end while the other one still arrives at its barriers
}
