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
#include "product_sm90.cuh"

template <bool> struct Choice { using Type = Silu; };
template <> struct Choice<true> { using Type = Gelu; };
using Gate = Choice<GELU>::Type;

#ifndef QUICK
#define QUICK 0
#endif
#ifndef ROWS_
#define ROWS_ 1
#endif
#ifndef STREAM
#define STREAM 0
#endif
#ifndef WARPS_
#define WARPS_ 7
#endif
#ifndef COPY
#define COPY 0
#endif
#ifndef STAGES_
#define STAGES_ 3
#endif
#ifndef BOXED_
#define BOXED_ 2
#endif
#ifndef BUFFERS
#define BUFFERS 2
#endif

constexpr int STAGES = STAGES_;
constexpr int WARPS = WARPS_;  // of the epilogue
constexpr int ROWS = ROWS_;    // of a thread's four, computed together
// A unit of a warp's work: rows and columns of a box.
constexpr bool BOXED = BOXED_ && TRANSPOSED;
constexpr bool SLICED = BOXED_ == 2 && TRANSPOSED;  // the warps copy, a box behind, and no other one
constexpr bool OWN = TRANSPOSED && !BOXED;  // transposed codes of a unit, not of a box
constexpr int UNIT_COLUMNS = OWN ? 32 : 64, UNIT_ROWS = 1024 / UNIT_COLUMNS;
constexpr int OCTETS = UNIT_COLUMNS / 8, PARTS = TILE_ROWS / UNIT_ROWS, UNITS_OF_BOX = 8;
// A unit's transposed codes, in shared memory: eight columns of 32 rows are so far apart that words
// of four rows lie in different banks.
constexpr int OCTET_BYTES = 8 * 32 + 32, TURNED_BYTES = 4 * OCTET_BYTES;
// BOXED: those of a box, a line of 128 bytes for each column, whose 16-byte word w lies in place
// w ^ (column / 8). A warp beside those of the epilogue copies whole lines.
constexpr int TURNED_BOX = BOX * LINE;

using Product =
    SharedProduct<A, B, sizeof(A) == 2, RANK, true, false, STAGES, WARPS, bf16, UNITS_OF_BOX>;
using Encoder = OctetEncoder<Q, CODES || TRANSPOSED, ABS_MAX>;
constexpr int UNITS = Product::BOXES * UNITS_OF_BOX;

template <class Words> __device__ __forceinline__ void store_words(void* to, const Words& x) {
#if STREAM
    __stcs(static_cast<Words*>(to), x);
#else
    *static_cast<Words*>(to) = x;
#endif
}

// A unit: of a tile its box, and rows and columns of that. row, column: of the lane's first element,
// which has four rows and eight columns.
struct Unit {
    int box, line, octet;  // line: of the box, the lane's first; octet: of the line's eight
    int row, column;
    bool inside;  // M is a multiple of 16 and F one of 64
    i64 place;    // in up_gate, of the lane's first element
    __device__ __forceinline__ Unit(const Tile& tile, int unit, int M, int F) {
        const int lane = threadIdx.x % 32;
        const int part = OWN ? unit / 2 % PARTS : unit % PARTS;
        box = unit / UNITS_OF_BOX;
        line = part * UNIT_ROWS + lane / OCTETS * 4;
        octet = lane % OCTETS + (OWN ? unit % 2 * OCTETS : 0);
        row = tile.row + line;
        column = tile.column + box * BOX + 8 * octet;
        inside = row < M && column < F;
        place = (i64)row * 2 * F + column;
    }
};

// What a warp of the epilogue does.
struct Gradients {
    bf16* d_up_gate;
    const bf16* up_gate;
    bf16* out;
    Q *codes, *transposed;
    int M, F;
    unsigned char* turned;  // the warp's, of up and then of gate
    SharedAddress slot;     // COPY: the lane's 16 bytes of up's first row
    SharedAddress coded, drained;  // BOXED: barriers of transposed codes of boxes
    Encoder encoder;
    uint4 up[4], gate[4];  // of the unit that comes next, a row each

    __device__ __forceinline__ void load(const Unit& unit, int row) {
        const bf16* const from = up_gate + unit.place + (i64)row * 2 * F;
#if COPY
        cp_async_16(slot + 1024 * row, from, true);
        cp_async_16(slot + 1024 * row + 512, from + F, true);
        return;
#endif
        up[row] = __ldcs(reinterpret_cast<const uint4*>(from));
        gate[row] = __ldcs(reinterpret_cast<const uint4*>(from + F));
    }

    // All tiles of this block; warp `me` of WARPS has every WARPS-th unit.
    __device__ __forceinline__ void take(const Work& work, const Product& product,
                                         const unsigned char* boxes, int me) {
        u32 parity = 0, boxes_before = 0;
        int unit = me;
        Tile tile(work.cluster, work);
        int before_row = M, before_column = 0;  // of the last box of the tile before
        Unit now(tile, unit, M, F);
        if (now.inside) {
#pragma unroll
            for (int i = 0; i < 4; ++i) { load(now, i); }
        }
        for (int t = work.cluster; t < work.tiles; t += work.clusters, parity ^= 1, boxes_before += Product::BOXES) {
            const Tile next(t + work.clusters < work.tiles ? t + work.clusters : t, work);
#pragma unroll 1
            for (; unit < UNITS; unit += WARPS) {
                const bool wraps = unit + WARPS >= UNITS;
                const Unit then(wraps ? next : tile, unit + WARPS - (wraps ? UNITS : 0), M, F);
                barrier_wait(product.ready + 8 * now.box, parity);
                work_on(now, then, boxes + now.box * Product::BOX_BYTES,
                        product.taken + 8 * now.box, boxes_before + now.box,
                        now.box ? tile.row : before_row,
                        now.box ? tile.column + (now.box - 1) * BOX : before_column);
                now = then;
            }
            unit -= UNITS;
            before_row = tile.row, before_column = tile.column + (Product::BOXES - 1) * BOX;
            tile = next;
        }
        if constexpr (SLICED) {
            if (boxes_before == 0) { return; }
            barrier_wait(coded + 8 * ((boxes_before - 1) % BUFFERS), (boxes_before - 1) / BUFFERS & 1);
            for (int slice = me; slice < UNITS_OF_BOX; slice += WARPS) {
                copy_slice(boxes_before - 1, slice, before_row, before_column);
            }
        }
    }

    // Eight columns of up and of gate of a box at row and column: eight lanes have a line.
    __device__ __forceinline__ void copy_slice(u32 turn, int slice, int row, int column) const {
        const int lane = threadIdx.x % 32, word = lane % 8, c = slice * 8 + lane / 8;
        const unsigned char* const from =
            turned + turn % BUFFERS * 2 * TURNED_BOX + c * LINE + (word ^ slice) * 16;
        row += 16 * word;
        if (row >= M || column >= F) { return; }
        Q* const to = transposed + (i64)(column + c) * M + row;
        uint4 x[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            x[i] = *reinterpret_cast<const uint4*>(from + i / 2 * TURNED_BOX + i % 2 * 4 * LINE);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            store_words(to + (i64)(i / 2 * F + i % 2 * 4) * M, x[i]);
        }
    }

    // The warp that copies transposed codes of boxes: eight lanes have a line of 128 bytes.
    __device__ __forceinline__ void copy_boxes(const Work& work) const {
        const int lane = threadIdx.x % 32, word = lane % 8;
        u32 turn = 0;
        for (int t = work.cluster; t < work.tiles; t += work.clusters) {
            const Tile tile(t, work);
            const int row = tile.row + 16 * word;
#pragma unroll 1
            for (int box = 0; box < Product::BOXES; ++box, ++turn) {
                const u32 buffer = turn % BUFFERS;
                const int column = tile.column + box * BOX + lane / 8;
                const unsigned char* const from =
                    turned + buffer * 2 * TURNED_BOX + lane / 8 * LINE;
                Q* const to = transposed + (i64)column * M + row;
                const bool inside = row < M && column < F;
                barrier_wait(coded + 8 * buffer, turn / BUFFERS & 1);
#pragma unroll
                for (int gate_too = 0; gate_too < 2; ++gate_too) {
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        uint4 x[8];
#pragma unroll
                        for (int i = 0; i < 8; ++i) {
                            const int four = half * 8 + i;  // of columns
                            x[i] = *reinterpret_cast<const uint4*>(
                                from + gate_too * TURNED_BOX + four * 4 * LINE +
                                (word ^ four / 2) * 16);
                        }
                        if (gate_too && half) {
                            __syncwarp();
                            if (lane == 0) { barrier_arrive(drained + 8 * buffer); }
                        }
                        if (!inside) { continue; }
#pragma unroll
                        for (int i = 0; i < 8; ++i) {
                            store_words(to + (i64)(gate_too * F + (half * 8 + i) * 4) * M, x[i]);
                        }
                    }
                }
            }
        }
    }

private:
    // A unit, while what `then` needs is loaded.
    __device__ __forceinline__ void work_on(const Unit& unit, const Unit& then,
                                            const unsigned char* box, SharedAddress taken,
                                            u32 turn, int before_row, int before_column) {
        const unsigned char* const lines = box + unit.line * LINE;
#if COPY
        cp_async_commit();
        cp_async_wait<0>();
#pragma unroll
        for (int i = 0; i < 4; ++i) { up[i] = load_shared(slot + 1024 * i), gate[i] = load_shared(slot + 1024 * i + 512); }
        if (then.inside) {
#pragma unroll
            for (int i = 0; i < 4; ++i) { load(then, i); }
        }
#endif
        uint2 up_codes[4], gate_codes[4];
#pragma unroll
        for (int first = 0; first < 4; first += ROWS) {
            uint4 d[ROWS], d_up[ROWS], d_gate[ROWS], again[ROWS];
#pragma unroll
            for (int i = 0; i < ROWS; ++i) {
                const int row = first + i, word = unit.octet ^ (unit.line + row) & 7;
                d[i] = *reinterpret_cast<const uint4*>(lines + row * LINE + (word << 4));
                forget(up[row]), forget(gate[row]);
            }
            compute(d_up, d_gate, again, d, up + first, gate + first);
            if (!COPY && then.inside) {
#pragma unroll
                for (int i = 0; i < ROWS; ++i) { load(then, first + i); }
            }
            if (!unit.inside) { continue; }
#pragma unroll
            for (int i = 0; i < ROWS; ++i) { forget(d_up[i]), forget(d_gate[i]); }
            encoder.see(d_up, d_gate);
#pragma unroll
            for (int i = 0; i < ROWS; ++i) {
                const int row = first + i;
                const i64 place = unit.place + (i64)row * 2 * F;
                up_codes[row] = encoder.codes(d_up[i]);
                gate_codes[row] = encoder.codes(d_gate[i]);
                if constexpr (TENSOR) {
                    store_words(d_up_gate + place, d_up[i]);
                    store_words(d_up_gate + place + F, d_gate[i]);
                }
                if constexpr (CODES) {
                    store_words(codes + place, up_codes[row]);
                    store_words(codes + place + F, gate_codes[row]);
                }
                if constexpr (OUT) {
                    store_words(out + place - (i64)(unit.row + row) * F, again[i]);
                }
            }
        }
        if constexpr (BOXED) {
            const u32 buffer = turn % BUFFERS;
            __syncwarp();
            if (threadIdx.x % 32 == 0) { barrier_arrive(taken); }
            barrier_wait(drained + 8 * buffer, turn / BUFFERS & 1 ^ 1);
            unsigned char* const to = turned + buffer * 2 * TURNED_BOX;
            put_in_box(to, unit, up_codes);
            put_in_box(to + TURNED_BOX, unit, gate_codes);
            __syncwarp();
            if (threadIdx.x % 32 == 0) { barrier_arrive(coded + 8 * buffer); }
            if constexpr (SLICED) {
                if (turn == 0) { return; }
                const u32 last = (turn - 1) % BUFFERS;
                barrier_wait(coded + 8 * last, (turn - 1) / BUFFERS & 1);
                copy_slice(turn - 1, unit.line / 16, before_row, before_column);
                __syncwarp();
                if (threadIdx.x % 32 == 0) { barrier_arrive(drained + 8 * last); }
            }
            return;
        }
        if constexpr (OWN) {
            put_turned(turned, up_codes);
            put_turned(turned + TURNED_BYTES, gate_codes);
        }
        __syncwarp();
        if (threadIdx.x % 32 == 0) { barrier_arrive(taken); }
        if constexpr (OWN) {
            copy_turned(unit);
            __syncwarp();
        }
    }

    static __device__ __forceinline__ void put_in_box(unsigned char* tile, const Unit& unit,
                                                      const uint2 (&rows)[4]) {
        u32 words[2][4];
        transpose_bytes(words[0], {rows[0].x, rows[1].x, rows[2].x, rows[3].x});
        transpose_bytes(words[1], {rows[0].y, rows[1].y, rows[2].y, rows[3].y});
        unsigned char* const mine =
            tile + unit.octet * 8 * LINE + (unit.line / 16 ^ unit.octet) * 16 + unit.line % 16;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            *reinterpret_cast<u32*>(mine + LINE * i) = words[i / 4][i % 4];
        }
    }

    // The lane's codes into the warp's transposed ones: a line of 32 bytes for each column.
    static __device__ __forceinline__ void put_turned(unsigned char* tile, const uint2 (&rows)[4]) {
        const int lane = threadIdx.x % 32;
        unsigned char* const mine = tile + lane % 4 * OCTET_BYTES + lane / 4 * 4;
        u32 words[2][4];
        transpose_bytes(words[0], {rows[0].x, rows[1].x, rows[2].x, rows[3].x});
        transpose_bytes(words[1], {rows[0].y, rows[1].y, rows[2].y, rows[3].y});
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            *reinterpret_cast<u32*>(mine + 32 * i) = words[i / 4][i % 4];
        }
    }

    // From there to transposed (2F, M): two lanes have the 32 bytes of a column.
    __device__ __forceinline__ void copy_turned(const Unit& unit) const {
        const int lane = threadIdx.x % 32, c = lane / 2, half = lane % 2;
        const int row = unit.row - lane / 4 * 4 + 16 * half;
        const int column = unit.column - lane % 4 * 8 + c;
        const unsigned char* const from = turned + c / 8 * OCTET_BYTES + c % 8 * 32 + 16 * half;
        if (row >= M || column >= F) { return; }
        Q* to = transposed + (i64)column * M + row;
        Q* const gates = to + (i64)F * M;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const unsigned char* const two = from + 2 * i * OCTET_BYTES;
            store_words(to + (i64)16 * i * M, *reinterpret_cast<const uint4*>(two));
            store_words(gates + (i64)16 * i * M,
                        *reinterpret_cast<const uint4*>(two + TURNED_BYTES));
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
#pragma unroll
        for (int i = 0; i < ROWS * 8; ++i) { g[i] = element(gate[i / 8], i % 8); }
#if QUICK
        quick_shares<Gate>(s, g);
#else
        u32 lowest = 0;  // as most_of orders negative numbers
#pragma unroll
        for (int i = 0; i < ROWS; ++i) { lowest = max_halves(lowest, most_of(gate[i])); }
        shares<Gate, false>(s, g);
        if (max(lowest << 16, lowest) >= Gate::FAR << 16) { shares<Gate, true>(s, g); }
#endif
#pragma unroll
        for (int row = 0; row < ROWS; ++row) {
            u32 x[4], y[4], z[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                float of_up[2], of_gate[2], of_out[2];
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const int k = 8 * row + 2 * j + i;
                    const float d_k = element(d[row], 2 * j + i), up_k = element(up[row], 2 * j + i);
                    const float active = g[k] * s[k];
#if QUICK
                    const float slope = Gate::quick_slope(g[k], s[k], active);
#else
                    const float slope = Gate::slope(g[k], s[k]);
#endif
                    of_up[i] = active * d_k;
                    of_gate[i] = slope * up_k * d_k;
                    of_out[i] = up_k * active;
                }
                x[j] = to_pair(of_up[0], of_up[1]);
                y[j] = to_pair(of_gate[0], of_gate[1]);
                z[j] = to_pair(of_out[0], of_out[1]);
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
    const SharedAddress coded = product.taken + 8 * Product::BOXES, drained = coded + 8 * BUFFERS;
    if (threadIdx.x == 0) {
        if constexpr (BOXED) {
            for (int i = 0; i < BUFFERS; ++i) {
                barrier_init(coded + 8 * i, UNITS_OF_BOX);
                barrier_init(drained + 8 * i, SLICED ? UNITS_OF_BOX : 1);
            }
        }
        product.init();
    }
    cluster_arrive();
    cluster_wait();
    const Work work(M, F, Product::WIDTH, K * (int)sizeof(A));
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), warpgroup = warp / 4;
    if (warpgroup == 1 || warpgroup == 2) {
        product.multiply_tiles(work, warpgroup - 1, Product::SCALED ? *scale_a * *scale_b : 1.0f);
    } else if (warp == 0) {
        if (threadIdx.x == 0) { product.load(work, &a, &b, &h, &tail, TILE_COLUMNS / 2); }
    } else {
        const int me = warp < 4 ? warp - 1 : warp - 9;
        if (me < WARPS + (BOXED && !SLICED)) {
            unsigned char* const boxes = dynamic + (product.boxes - shared_address(dynamic));
            unsigned char* const turned =
                boxes + Product::BOXES * Product::BOX_BYTES + 512 +
                (BOXED ? 0 : me * 2 * TURNED_BYTES);
            const SharedAddress slot = shared_address(boxes) + Product::BOXES * Product::BOX_BYTES + 512 +
                (BOXED ? BUFFERS * 2 * TURNED_BOX : OWN ? WARPS * 2 * TURNED_BYTES : 0) + me * 4096 + threadIdx.x % 32 * 16;
            Gradients gradients{d_up_gate, up_gate, out, codes, transposed, M, F, turned, slot,
                                coded, drained, Encoder(scale)};
            if (BOXED && !SLICED && me == WARPS) {
                gradients.copy_boxes(work);
            } else {
                gradients.take(work, product, boxes, me);
                gradients.encoder.finish(saturated, abs_max);
            }
        }
    }
    cluster_arrive();
    cluster_wait();  // a block may not end while the other one still arrives at its barriers
}
