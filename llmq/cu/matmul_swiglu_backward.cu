// matmul_swiglu_backward.cu -- the down product's input gradient for Hopper, and behind it the
// gradient of SwiGLU or GeGLU.
//
//   d_out = bf16(scale_a * scale_b * (a @ b) + h @ tail)
//   d_up_gate, out = swiglu_backward(d_out, up_gate)        as in swiglu.cu, with the same bits
//
// The product is that of product_sm90.cuh. While two warpgroups multiply a tile of d_out, another
// one computes what follows from the one before: one warp on each scheduler, with
// all registers that the others do not need, so that a warp has enough independent instructions. A
// warp has 32 rows of each box, a thread 4 rows and 8 columns at a time: a row's codes are 8 bytes,
// and those of a column 4, which go through shared memory, from where three warps copy whole lines.
// What is read of up_gate is loaded 16 rows ahead, into registers.
//
// Data     d_up_gate, up_gate: bf16 (M, 2F), [up | gate] in every row; d_up_gate may be up_gate.
//          a: A (M, K), b: bf16 (K, F), fp8 codes B (F, K). h: bf16 (M, R), tail: bf16 (R, F).
//          scale_a, scale_b: F32 (1), of fp8 codes. RANK: R rounded up to 16; 0: there are none.
//          abs_max, codes, transposed, scale, saturated, out: as in swiglu.cu. TENSOR: whether
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

constexpr int TILE_COLUMNS = 192;
#include "product_sm90.cuh"

template <bool> struct Choice { using Type = Silu; };
template <> struct Choice<true> { using Type = Gelu; };
using Gate = Choice<GELU>::Type;

constexpr int STAGES = 4;
constexpr int WARPS = 4, PARTS = 2;  // of the epilogue; of a warp's rows of a box
constexpr int LINES = 16;            // rows of a part: a thread has 4 of them
constexpr int ROWS = 2;              // computed together, for many independent instructions
constexpr int COPIERS = 3;           // warps that store transposed codes
constexpr int TURNED_BYTES = BOX * TILE_ROWS;  // a box's codes, transposed
constexpr int EPILOGUE_REGISTERS = 200, OTHER_REGISTERS = 56;

using Product = SharedProduct<A, B, sizeof(A) == 2, RANK, true, false, STAGES, WARPS>;
using Encoder = OctetEncoder<Q, CODES || TRANSPOSED, ABS_MAX>;

// Codes of 64 columns and 128 rows, transposed, in shared memory: a line for each column, in which
// 16 bytes, of 16 rows, lie in place w ^ (column / 8) instead of w. rows: of the lane's four.
__device__ __forceinline__ void put_turned(unsigned char* tile, int sixteen, int octet, int four,
                                           const uint2 (&rows)[4]) {
    u32 turned[2][4];
    transpose_bytes(turned[0], {rows[0].x, rows[1].x, rows[2].x, rows[3].x});
    transpose_bytes(turned[1], {rows[0].y, rows[1].y, rows[2].y, rows[3].y});
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const int place = (8 * octet + i) * LINE + ((sixteen ^ octet) << 4) + 4 * four;
        *reinterpret_cast<u32*>(tile + place) = turned[i / 4][i % 4];
    }
}

// To transposed (columns, rows), from this row and column of it, by the copying warps.
__device__ __forceinline__ void copy_turned(Q* transposed, const unsigned char* tile, int row,
                                            int column, int rows) {
    const int thread = threadIdx.x - 32, k = thread % 8;
    if (row + 16 * k >= rows) { return; }
    Q* const to = transposed + (i64)column * rows + row + 16 * k;
#pragma unroll 2
    for (int c = thread / 8; c < BOX; c += COPIERS * 4) {
        *reinterpret_cast<uint4*>(to + (i64)c * rows) =
            *reinterpret_cast<const uint4*>(tile + c * LINE + ((k ^ c / 8) << 4));
    }
}

// What lies in shared memory: the boxes, and behind the product's barriers two, and tiles of
// transposed codes: of up and of gate.
struct Shared {
    unsigned char *boxes, *up, *gate;
    SharedAddress full, empty;
    __device__ __forceinline__ Shared(unsigned char* dynamic, const Product& product) {
        boxes = dynamic + (product.boxes - shared_address(dynamic));
        up = boxes + Product::BOXES * Product::BOX_BYTES + 512;
        gate = up + TURNED_BYTES;
        full = shared_address(up) - 16;
        empty = full + 8;
    }
};

// The warps that store transposed codes.
__device__ __forceinline__ void copy_boxes(const Work& work, const Shared& shared, Q* transposed,
                                           int M, int F) {
    u32 parity = 0;
    for (int t = work.cluster; t < work.tiles; t += work.clusters) {
        const Tile tile(t, work);
#pragma unroll 1
        for (int box = 0; box < Product::BOXES; ++box, parity ^= 1) {
            const int column = tile.column + box * BOX;
            barrier_wait(shared.full, parity);
            if (column < F) {
                copy_turned(transposed, shared.up, tile.row, column, M);
                copy_turned(transposed, shared.gate, tile.row, column + F, M);
            }
            __syncwarp();
            if (threadIdx.x % 32 == 0) { barrier_arrive(shared.empty); }
        }
    }
}

// What a thread of the epilogue does.
struct Gradients {
    bf16* d_up_gate;
    const bf16* up_gate;
    bf16* out;
    Q* codes;
    int M, F;
    Encoder encoder;
    uint4 up[4], gate[4];  // of the part that comes next, a row each

    static __device__ __forceinline__ int octet() { return threadIdx.x % 8; }
    static __device__ __forceinline__ int four() { return threadIdx.x % 32 / 8; }

    // A warp's rows of a box: their place in up_gate, of the thread's first element.
    struct Part {
        int row, column;  // of the warp's first
        bool inside;      // M and F are multiples of what a part has
        i64 place;
        __device__ __forceinline__ Part(const Tile& tile, int box, int part, int M, int F) {
            row = tile.row + (threadIdx.x / 32 % WARPS * PARTS + part) * LINES;
            column = tile.column + box * BOX;
            inside = row < M && column < F;
            row += 4 * four();
            column += 8 * octet();
            place = (i64)row * 2 * F + column;
        }
    };

    __device__ __forceinline__ void load(const Part& part, int row) {
        const bf16* const from = up_gate + part.place + (i64)row * 2 * F;
        up[row] = __ldcs(reinterpret_cast<const uint4*>(from));
        gate[row] = __ldcs(reinterpret_cast<const uint4*>(from + F));
    }

    // All tiles of this block.
    __device__ __forceinline__ void take(const Work& work, const Product& product,
                                         const Shared& shared) {
        u32 parity = 0, turned_parity = 1;
        Tile tile(work.cluster, work);
        const Part first(tile, 0, 0, M, F);
        if (first.inside) {
#pragma unroll
            for (int i = 0; i < 4; ++i) { load(first, i); }
        }
        for (int t = work.cluster; t < work.tiles; t += work.clusters, parity ^= 1) {
            const Tile next(t + work.clusters < work.tiles ? t + work.clusters : t, work);
#pragma unroll 1
            for (int box = 0; box < Product::BOXES; ++box, turned_parity ^= 1) {
                barrier_wait(product.ready + 8 * box, parity);
                if constexpr (TRANSPOSED) { barrier_wait(shared.empty, turned_parity); }
#pragma unroll 1
                for (int part = 0; part < PARTS; ++part) {
                    const bool is_last = part + 1 == PARTS, wraps = is_last && box + 1 == Product::BOXES;
                    const Part then(wraps ? next : tile, wraps ? 0 : box + is_last,
                                    is_last ? 0 : part + 1, M, F);
                    work_on(Part(tile, box, part, M, F), then, shared,
                            shared.boxes + box * Product::BOX_BYTES, part);
                }
                __syncwarp();
                if (threadIdx.x % 32 == 0) {
                    barrier_arrive(product.taken + 8 * box);
                    if constexpr (TRANSPOSED) { barrier_arrive(shared.full); }
                }
            }
            tile = next;
        }
    }

private:
    // part, while what `then` needs is loaded.
    __device__ __forceinline__ void work_on(const Part& part, const Part& then,
                                            const Shared& shared, const unsigned char* box,
                                            int index) {
        const int sixteen = threadIdx.x / 32 % WARPS * PARTS + index;  // of the box's rows
        const unsigned char* const lines = box + (sixteen * LINES + 4 * four()) * LINE;
        uint2 up_codes[4], gate_codes[4];
#pragma unroll
        for (int first = 0; first < 4; first += ROWS) {
            uint4 d[ROWS], d_up[ROWS], d_gate[ROWS], again[ROWS];
#pragma unroll
            for (int i = 0; i < ROWS; ++i) {
                const int row = first + i, swizzled = octet() ^ (4 * four() + row) & 7;
                d[i] = *reinterpret_cast<const uint4*>(lines + row * LINE + (swizzled << 4));
                forget(up[row]), forget(gate[row]);
            }
            compute(d_up, d_gate, again, d, up + first, gate + first);
            if (then.inside) {
#pragma unroll
                for (int i = 0; i < ROWS; ++i) { load(then, first + i); }
            }
            if (!part.inside) { continue; }
#pragma unroll
            for (int i = 0; i < ROWS; ++i) {
                const int row = first + i;
                const i64 place = part.place + (i64)row * 2 * F;
                forget(d_up[i]), forget(d_gate[i]);
                up_codes[row] = encoder.encode(d_up[i]);
                gate_codes[row] = encoder.encode(d_gate[i]);
                if constexpr (TENSOR) {
                    *reinterpret_cast<uint4*>(d_up_gate + place) = d_up[i];
                    *reinterpret_cast<uint4*>(d_up_gate + place + F) = d_gate[i];
                }
                if constexpr (CODES) {
                    *reinterpret_cast<uint2*>(codes + place) = up_codes[row];
                    *reinterpret_cast<uint2*>(codes + place + F) = gate_codes[row];
                }
                if constexpr (OUT) {
                    *reinterpret_cast<uint4*>(out + place - (i64)(part.row + row) * F) = again[i];
                }
            }
        }
        if (!part.inside) { return; }
        if constexpr (TRANSPOSED) {
            put_turned(shared.up, sixteen, octet(), four(), up_codes);
            put_turned(shared.gate, sixteen, octet(), four(), gate_codes);
        }
    }

    static __device__ __forceinline__ u32 pair_of(const uint4& x, int i) {
        return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w;
    }
    static __device__ __forceinline__ float element(const uint4& x, int i) {
        return i % 2 ? upper_half(pair_of(x, i / 2)) : lower_half(pair_of(x, i / 2));
    }

    // again: forward's result.
    static __device__ __forceinline__ void compute(uint4 (&d_up)[ROWS], uint4 (&d_gate)[ROWS],
                                                   uint4 (&again)[ROWS], const uint4 (&d)[ROWS],
                                                   const uint4* up, const uint4* gate) {
        float g[ROWS * 8], s[ROWS * 8];
        u32 lowest = 0;  // as most_of orders negative numbers
#pragma unroll
        for (int i = 0; i < ROWS; ++i) { lowest = max_halves(lowest, most_of(gate[i])); }
#pragma unroll
        for (int i = 0; i < ROWS * 8; ++i) { g[i] = element(gate[i / 8], i % 8); }
        shares<Gate, false>(s, g);
        if (max(lowest << 16, lowest) >= Gate::FAR << 16) { shares<Gate, true>(s, g); }
#pragma unroll
        for (int row = 0; row < ROWS; ++row) {
            u32 x[4], y[4], z[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const int k = 8 * row + 2 * j;
                const float d_0 = element(d[row], 2 * j), d_1 = element(d[row], 2 * j + 1);
                const float up_0 = element(up[row], 2 * j), up_1 = element(up[row], 2 * j + 1);
                const float share_0 = g[k] * s[k], share_1 = g[k + 1] * s[k + 1];
                x[j] = to_pair(share_0 * d_0, share_1 * d_1);
                y[j] = to_pair(Gate::slope(g[k], s[k]) * up_0 * d_0,
                               Gate::slope(g[k + 1], s[k + 1]) * up_1 * d_1);
                z[j] = to_pair(up_0 * share_0, up_1 * share_1);
            }
            d_up[row] = make_uint4(x[0], x[1], x[2], x[3]);
            d_gate[row] = make_uint4(y[0], y[1], y[2], y[3]);
            again[row] = make_uint4(z[0], z[1], z[2], z[3]);
        }
    }
};

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(Product::THREADS, 1)
matmul_swiglu_backward(bf16* d_up_gate, const __grid_constant__ TensorMap a,
                       const __grid_constant__ TensorMap b, const __grid_constant__ TensorMap h,
                       const __grid_constant__ TensorMap tail, const f32* scale_a,
                       const f32* scale_b, const bf16* up_gate, i32 M, i32 F, i32 K, f32* abs_max,
                       Q* codes, Q* transposed, const f32* scale, i32* saturated, bf16* out) {
    extern __shared__ unsigned char dynamic[];
    const Product product(dynamic, K);
    const Shared shared(dynamic, product);
    if (threadIdx.x == 0) {
        barrier_init(shared.full, WARPS);
        barrier_init(shared.empty, COPIERS);
        product.init();
    }
    cluster_arrive();
    cluster_wait();
    const Work work(M, F, Product::WIDTH, K * (int)sizeof(A));
    const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
    if (warpgroup == 0) {
        give_registers<OTHER_REGISTERS>();
        if (threadIdx.x == 0) {
            product.load(work, &a, &b, &h, &tail, TILE_COLUMNS / 2);
        } else if (TRANSPOSED && threadIdx.x >= 32) {
            copy_boxes(work, shared, transposed, M, F);
        }
    } else if (warpgroup < 3) {
        product.multiply_tiles(work, warpgroup - 1, Product::SCALED ? *scale_a * *scale_b : 1.0f);
    } else {
        take_registers<EPILOGUE_REGISTERS>();
        Gradients gradients{d_up_gate, up_gate, out, codes, M, F, Encoder(scale)};
        gradients.take(work, product, shared);
        gradients.encoder.finish(saturated, abs_max);
    }
    cluster_arrive();
    cluster_wait();  // a block may not end while the other one still arrives at its barriers
}
