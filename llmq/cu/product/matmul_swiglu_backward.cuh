// matmul_swiglu_backward.cuh -- the product that gives the gradient of SwiGLU's or GeGLU's result,
// followed by the activation's backward.
//
//   d_out = bf16(x)
//   d_up_gate, out = swiglu_backward(d_out, up_gate)        as in swiglu.cu, with the same bits
//
// Seven warps process a tile of d_out in units of 16 rows and 64 columns, a thread 4 rows and 8
// columns, while two warpgroups multiply the next tile. A unit's part of up_gate is loaded one unit
// ahead, into registers, in lines of 128 bytes. A box's transposed codes are gathered in shared
// memory and copied in whole lines, because part of a line costs as much cache time as a line. With
// each unit of a box, a warp copies an eighth of the codes of the box before.
//
// Data     N is F. d_up_gate, up_gate: bf16 (M, 2F), [up | gate] in every row; d_up_gate may be up_gate.
//          abs_max, codes, transposed, scale, saturated, out, and the arguments for out's codes: as
//          in swiglu.cu. D_UP_GATE = 1: d_up_gate is written; else it is null.
// Cost     Reads 4 F bytes a row, and writes as many with codes in both layouts: memory-bound if K
//          is below about 2000 (fp8).
// Needs    M % 16 == 0, F % 64 == 0.
#pragma once
#include "pointwise/activation.cuh"
#include "product/smem_tiles.cuh"
#include "fp8.cuh"

using Gate = GateOf<GELU>::Type;

constexpr int WARPS = 7;  // warps of the epilogue
constexpr int UNIT_ROWS = 16;
// Bytes of a box's transposed codes of up, gate or out: a line of 128 bytes for each column, in
// which unit u's 16 bytes lie at place u ^ (column / 8). Two boxes take turns.
constexpr int TRANSPOSED_BYTES = BOX * LINE, BUFFERS = 2;
constexpr int TURNED = 2 * TRANSPOSED + OUT_TRANSPOSED;  // number of matrices with transposed codes
constexpr int BARRIER_BYTES = 512;  // more than the barriers need

struct Shape : Boxes {
    static constexpr int UNITS_OF_BOX = TILE_ROWS / UNIT_ROWS;
    static constexpr int BARRIERS = TURNED ? 2 * BUFFERS : 0;
};
using Product = Cooperative<Mainloop, WARPS, Shape>;
using Encoder = OctetEncoder<Q, CODES || TRANSPOSED, ABS_MAX>;
using OutEncoder = OctetEncoder<O, OUT_TRANSPOSED, false>;
constexpr int UNITS_OF_BOX = Product::UNITS_OF_BOX, UNITS = Product::BOXES * UNITS_OF_BOX;

// A unit: 16 rows of a box of a tile. A lane has four rows and eight columns. row, column: the
// lane's first.
struct Unit {
    int box, part, line, octet;  // line: the lane's first; octet: its eighth of the line
    int row, column;
    bool inside;  // true for all or no lanes: M is a multiple of 16, F of 64
    i64 place;    // offset in up_gate of the lane's first element
    __device__ __forceinline__ Unit(const Tile& tile, int unit, int M, int F) {
        const int lane = threadIdx.x % 32;
        box = unit / UNITS_OF_BOX, part = unit % UNITS_OF_BOX;
        line = part * UNIT_ROWS + lane / 8 * 4, octet = lane % 8;
        row = tile.row + line, column = tile.column + box * BOX + 8 * octet;
        inside = __all_sync(~0u, row < M && column < F);  // so that nothing diverges
        place = (i64)row * 2 * F + column;
    }
};

// A lane's codes of a unit.
struct Codes {
    uint2 up[4], gate[4], out[4];
};

// A box whose transposed codes are in shared memory. turn: the box's number in this block.
struct TransposedBox {
    u32 turn;
    int row, column;  // the box's first
    __device__ __forceinline__ u32 buffer() const { return turn % BUFFERS; }
    __device__ __forceinline__ u32 parity() const { return turn / BUFFERS & 1; }
};

// Work of a warp of the epilogue.
struct Epilogue {
    bf16* d_up_gate;
    const bf16* up_gate;
    bf16* out;
    Q *codes, *transposed;
    f32* abs_max;
    const f32* scale;
    i32* saturated;
    O* out_transposed;
    const f32* out_scale;
    i32* out_saturated;
    int M, F;
    unsigned char *dynamic, *lines;  // dynamic shared memory; its part for transposed codes
    SharedAddress coded, drained;  // barriers of each buffer: it is full; it has been copied
    Encoder encoder;
    OutEncoder out_encoder;
    uint4 up[4], gate[4];  // the next unit's operands, a row each

    // Process all tiles of this block; warp `me` of WARPS has every WARPS-th unit.
    __device__ __forceinline__ void take(const Product& product, const Work& work, int me) {
        const unsigned char* const boxes = dynamic + (product.boxes - shared_address(dynamic));
        lines = dynamic + (product.boxes - shared_address(dynamic)) +
                Product::BOXES * Product::BOX_BYTES + BARRIER_BYTES;
        coded = product.more, drained = coded + 8 * BUFFERS;
        encoder.begin(scale), out_encoder.begin(out_scale);
        u32 parity = 0;
        int unit = me;
        Tile tile(work.cluster, work);
        TransposedBox first{0, tile.row, tile.column};  // the tile's first box
        TransposedBox before{0, M, F};                  // the last tile's last box
        Unit now(tile, unit, M, F);
        load(now);
        for (int t = work.cluster; t < work.tiles; t += work.clusters, parity ^= 1) {
            const Tile next(t + work.clusters < work.tiles ? t + work.clusters : t, work);
#pragma unroll 1
            for (; unit < UNITS; unit += WARPS) {
                const bool wraps = unit + WARPS >= UNITS;
                const Unit then(wraps ? next : tile, unit + WARPS - (wraps ? UNITS : 0), M, F);
                barrier_wait(product.ready + 8 * now.box, parity);
                Codes codes_of;
                if (now.inside) {
                    work_on(now, then, boxes + now.box * Product::BOX_BYTES, codes_of);
                } else {
                    load(then);
                }
                arrive(product.taken + 8 * now.box);
                if constexpr (TURNED > 0) {
                    put_transposed(now, first.turn + now.box, codes_of);
                    const TransposedBox last =
                        now.box == 0 ? before
                                     : TransposedBox{first.turn + now.box - 1, tile.row,
                                              tile.column + (now.box - 1) * BOX};
                    if (first.turn + now.box > 0) { copy_transposed(last, now.part); }
                }
                now = then;
            }
            unit -= UNITS;
            before = {first.turn + Product::BOXES - 1, tile.row,
                      tile.column + (Product::BOXES - 1) * BOX};
            first.turn += Product::BOXES;
            tile = next;
        }
        if constexpr (TURNED > 0) {
            if (first.turn > 0) {
                for (int part = me; part < UNITS_OF_BOX; part += WARPS) { copy_transposed(before, part); }
            }
        }
        encoder.finish(saturated, abs_max), out_encoder.finish(out_saturated, nullptr);
    }

private:
    __device__ __forceinline__ void wait(SharedAddress barrier, u32 parity) const {
        barrier_wait(barrier, parity);
    }
    __device__ __forceinline__ void arrive(SharedAddress barrier) const {
        __syncwarp();
        if (threadIdx.x % 32 == 0) { barrier_arrive(barrier); }
    }

    __device__ __forceinline__ void load(const Unit& unit) {
        if (unit.inside) {
#pragma unroll
            for (int i = 0; i < 4; ++i) { load(unit, i); }
        }
    }
    __device__ __forceinline__ void load(const Unit& unit, int row) {
        const bf16* const from = up_gate + unit.place + (i64)row * 2 * F;
        up[row] = __ldcs(reinterpret_cast<const uint4*>(from));
        gate[row] = __ldcs(reinterpret_cast<const uint4*>(from + F));
    }

    // Compute a unit inside the matrix, while loading operands of unit `then`.
    __device__ __forceinline__ void work_on(const Unit& unit, const Unit& then,
                                            const unsigned char* box, Codes& to) {
        const unsigned char* const rows = box + unit.line * LINE;
#pragma unroll
        for (int row = 0; row < 4; ++row) {
            const int word = unit.octet ^ (unit.line + row) & 7;
            const uint4 d = *reinterpret_cast<const uint4*>(rows + row * LINE + (word << 4));
            forget(up[row]), forget(gate[row]);
            uint4 d_up, d_gate, again;
            compute(d_up, d_gate, again, d, up[row], gate[row]);
            if (then.inside) { load(then, row); }
            forget(d_up), forget(d_gate);
            encoder.see(d_up, d_gate);
            const i64 place = unit.place + (i64)row * 2 * F;
            to.up[row] = encoder.codes(d_up);
            to.gate[row] = encoder.codes(d_gate);
            if constexpr (D_UP_GATE) {
                store(d_up_gate + place, d_up);
                store(d_up_gate + place + F, d_gate);
            }
            if constexpr (CODES) {
                store(codes + place, to.up[row]);
                store(codes + place + F, to.gate[row]);
            }
            out_encoder.see(again);
            if constexpr (OUT_TRANSPOSED) { to.out[row] = out_encoder.codes(again); }
            if constexpr (OUT) { store(out + place - (i64)(unit.row + row) * F, again); }
        }
    }

    template <class Words> static __device__ __forceinline__ void store(void* to, const Words& x) {
        *static_cast<Words*>(to) = x;
    }

    // Put the lane's codes into the box's buffer, once the box two turns before has been copied
    // out.
    __device__ __forceinline__ void put_transposed(const Unit& unit, u32 turn, const Codes& of) const {
        const u32 buffer = turn % BUFFERS;
        wait(drained + 8 * buffer, turn / BUFFERS & 1 ^ 1);
        unsigned char* const mine = lines + buffer * TURNED * TRANSPOSED_BYTES + unit.octet * 8 * LINE +
                                    (unit.part ^ unit.octet) * 16 + unit.line % 16;
        if constexpr (TRANSPOSED) {
            put_octets(mine, of.up);
            put_octets(mine + TRANSPOSED_BYTES, of.gate);
        }
        if constexpr (OUT_TRANSPOSED) { put_octets(mine + 2 * TRANSPOSED * TRANSPOSED_BYTES, of.out); }
        arrive(coded + 8 * buffer);
    }

    // Put codes of four rows and eight columns: four bytes into each of eight lines.
    static __device__ __forceinline__ void put_octets(unsigned char* to, const uint2 (&rows)[4]) {
        u32 words[2][4];
        transpose_bytes(words[0], {rows[0].x, rows[1].x, rows[2].x, rows[3].x});
        transpose_bytes(words[1], {rows[0].y, rows[1].y, rows[2].y, rows[3].y});
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            *reinterpret_cast<u32*>(to + LINE * i) = words[i / 4][i % 4];
        }
    }

    // Copy a box's columns of octet `part`: up's and gate's to transposed (2F, M), out's to
    // out_transposed (F, M). Eight lanes share a line.
    __device__ __forceinline__ void copy_transposed(const TransposedBox& box, int part) const {
        wait(coded + 8 * box.buffer(), box.parity());
        const int lane = threadIdx.x % 32, word = lane % 8, c = part * 8 + lane / 8;
        const int row = box.row + 16 * word, column = box.column + c;
        if (row < M && column < F) {
            const unsigned char* const from = lines + box.buffer() * TURNED * TRANSPOSED_BYTES +
                                              c * LINE + (word ^ part) * 16;
            const i64 place = (i64)column * M + row;
            uint4 x[3][2];
#pragma unroll
            for (int i = 0; i < 2 * TURNED; ++i) {
                x[i / 2][i % 2] = *reinterpret_cast<const uint4*>(from + i / 2 * TRANSPOSED_BYTES +
                                                                  i % 2 * 4 * LINE);
            }
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                if constexpr (TRANSPOSED) {
                    store(transposed + place + i * 4 * (i64)M, x[0][i]);
                    store(transposed + place + (F + i * 4) * (i64)M, x[1][i]);
                }
                if constexpr (OUT_TRANSPOSED) {
                    store(out_transposed + place + i * 4 * (i64)M, x[TURNED - 1][i]);
                }
            }
        }
        arrive(drained + 8 * box.buffer());
    }

    static __device__ __forceinline__ u32 pair_of(const uint4& x, int i) {
        return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w;
    }
    static __device__ __forceinline__ float element(const uint4& x, int i) {
        return i % 2 ? upper_half(pair_of(x, i / 2)) : lower_half(pair_of(x, i / 2));
    }

    // Compute d_up and d_gate. again: forward's result, computed again.
    static __device__ __forceinline__ void compute(uint4& d_up, uint4& d_gate, uint4& again,
                                                   const uint4& d, const uint4& up,
                                                   const uint4& gate) {
        u32 x[4], y[4], z[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            float of_up[2], of_gate[2], of_out[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int k = 2 * j + i;
                const float d_k = element(d, k), up_k = element(up, k), g = element(gate, k);
                const float s = share<Gate, false>(g), active = g * s;
                of_up[i] = active * d_k;
                of_gate[i] = Gate::slope(g, s, active) * up_k * d_k;
                of_out[i] = up_k * active;
            }
            x[j] = to_pair(of_up[0], of_up[1]);
            y[j] = to_pair(of_gate[0], of_gate[1]);
            z[j] = to_pair(of_out[0], of_out[1]);
        }
        d_up = make_uint4(x[0], x[1], x[2], x[3]);
        d_gate = make_uint4(y[0], y[1], y[2], y[3]);
        again = make_uint4(z[0], z[1], z[2], z[3]);
    }
};

#define PARAMETERS                                                                                 \
    bf16 *d_up_gate, const bf16 *up_gate, f32 *abs_max, Q *codes, Q *transposed, const f32 *scale, \
        i32 *saturated, bf16 *out, O *out_transposed, const f32 *out_scale, i32 *out_saturated
#define ARGUMENTS                                                                                  \
    d_up_gate, up_gate, out, codes, transposed, abs_max, scale, saturated, out_transposed,         \
        out_scale, out_saturated, M, N, dynamic
