// cooperative_sm90.cuh -- products for Hopper whose tiles go to other warps through shared memory.
//
// Tiles, their ring and their order are those of product_sm90.cuh, and so is what is said there of
// names and of TILE_COLUMNS.
#pragma once
#include "product_sm90.cuh"

// Makes results codes, in the threads that multiply: x becomes the code of x * factor.
template <class Format> struct Rounding {
    float factor;
    volatile u32* hot;  // in shared memory: not 0 once a code of the block may be +-MAX
    float largest = 0.0f;  // of all |x|; NaN if one is

    __device__ __forceinline__ u32 four(float a, float b, float c, float d) {
        const float most = larger(larger(fabsf(a), fabsf(b)), larger(fabsf(c), fabsf(d)));
        largest = larger(largest, most);  // one step of the chain for four elements
        return to_fp8<Format>(a * factor, b * factor, c * factor, d * factor);
    }
    // Before others see the codes. Values above 0.928 of MAX may be rounded to it.
    __device__ __forceinline__ void mark() const {
        if (largest * factor > 0.9f * Fp8<Format>::MAX) { *hot = 1; }
    }
};

// Leaves what llmq/base/operand.py says of ProductCodes: newest is their largest. All threads of
// `warps` warps of the grid call it once, those with largest, of Rounding, and those with the count
// of codes that are +-MAX. all: both, and warps that have come; the last one leaves zeros, as at first.
template <class Format>
__device__ __forceinline__ void finish_codes(float largest, u32 count, i32* all, u32 warps,
                                             float scale, float* newest, float* abs_max,
                                             i32* saturated) {
    const u32 most = __reduce_max_sync(~0u, abs_bits(largest));
    const u32 sum = __reduce_add_sync(~0u, count);
    if (threadIdx.x % 32 != 0) { return; }
    u32* const words = reinterpret_cast<u32*>(all);
    if (most != 0) { atomicMax(words, most); }
    if (sum != 0) { atomicAdd(words + 1, sum); }
    __threadfence();
    if (atomicAdd(words + 2, 1u) != warps - 1) { return; }
    __threadfence();
    const float seen = __uint_as_float(atomicExch(words, 0u));
    const u32 counted = atomicExch(words + 1, 0u);
    words[2] = 0;
    *newest = seen;
    if (abs_max == nullptr) { return; }
    store_abs_max(abs_max, seen);
    if (seen > Fp8<Format>::MAX * scale) { atomicAdd(saturated, (i32)counted); }
}

// A box of codes: bytes from its start to 16-byte word w of a row, of four. Any eight rows one after
// the other have one word in different banks, and so have rows r and r + 4 all of theirs.
__device__ __forceinline__ u32 word_of_codes(u32 row, u32 w) {
    const u32 pair = row >> 1, moved = pair & 3 | (pair & 2) << 1;
    return pair * LINE + (((row & 1) << 2 | w) ^ moved) * 16;
}
// The codes of the first and of the second eight columns of a word.
__device__ __forceinline__ uint2 first_octet(const uint4& word) {
    return make_uint2(__byte_perm(word.x, word.y, 0x5410), __byte_perm(word.z, word.w, 0x5410));
}
__device__ __forceinline__ uint2 second_octet(const uint4& word) {
    return make_uint2(__byte_perm(word.x, word.y, 0x7632), __byte_perm(word.z, word.w, 0x7632));
}

// A product whose tiles are worked on by other warpgroups than those that multiply them.
//
// Tiles have 192 columns. One thread loads. Two warpgroups multiply a tile together, 64 rows each;
// they scale it, round it to Rounded, put it into shared memory, and go on with the next one.
// EPILOGUES further warps take the tile from there, a unit of a box each, in turns: UNITS_OF_BOX are
// 128 lines. EPILOGUES: 4, a warpgroup, or 7, all that are left.
//
// A box is 128 lines of 128 bytes, swizzled as ptx.cuh says, a line for each row: of columns 64 b to
// 64 b + 63 in box b. PAIRED: right has two blocks of rows, and a tile is 96 rows of the first one
// and those 96 of the second one that are `apart` rows further; box b has columns 32 b to 32 b + 31
// of the first ones, and then those of the second ones.
//
// HELPED: units of the last tile are taken by the warps that multiply, too; these have more registers.
// IN_PARTS: the tensor cores' sums of some steps are added up in F32. BARRIERS: of an epilogue, for
// UNITS_OF_BOX arrivals each, from `more` on.
//
// Of codes a line is 64 bytes, which lie as word_of_codes says: word w has the octets of columns w
// and w + 4 of these eight, two codes of the one and two of the other in turns.
struct Boxes {  // what most have
    using Rounded = bf16;
    static constexpr bool PAIRED = false, HELPED = false, IN_PARTS = false;
    static constexpr int UNITS_OF_BOX = 4, BARRIERS = 0;
};
template <class Base, int EPILOGUES, class Policy = Boxes> struct Cooperative : Base, Policy {
    using Base::TAILS, Base::SCALED, Base::full, Base::steps;
    using typename Base::Ring;
    using typename Policy::Rounded;
    using Policy::PAIRED, Policy::HELPED, Policy::IN_PARTS, Policy::UNITS_OF_BOX, Policy::BARRIERS;
    static constexpr bool MAKES_CODES = sizeof(Rounded) == 1;
    static constexpr int BOX_LINE = MAKES_CODES ? LINE / 2 : LINE;
    static constexpr int BOXES = TILE_COLUMNS / BOX, BOX_BYTES = TILE_ROWS * BOX_LINE;
    static constexpr int WIDTH = PAIRED ? TILE_COLUMNS / 2 : TILE_COLUMNS;
    static constexpr int THREADS = 512;
    // Of a thread, where two sums of each element do not fit into what all could have alike.
    static constexpr int LOADER_REGISTERS = 24, PRODUCT_REGISTERS = 216, EPILOGUE_REGISTERS = 56;

    SharedAddress boxes, ready, taken, more;  // ready, taken: a barrier of each box

    __device__ __forceinline__ Cooperative(void* shared, int K)
        : Base(shared, K, BOXES * BOX_BYTES),
          boxes(Base::results),
          ready(Base::others),
          taken(ready + 8 * BOXES),
          more(taken + 8 * BOXES) {}

    // By one thread of the block; all threads of the cluster meet after that.
    __device__ __forceinline__ void init() const {
        Base::init(4);
        for (int i = 0; i < BOXES; ++i) {
            barrier_init(ready + 8 * i, 8);  // the warps that multiply
            barrier_init(taken + 8 * i, UNITS_OF_BOX);
        }
        for (int i = 0; i < BARRIERS; ++i) { barrier_init(more + 8 * i, UNITS_OF_BOX); }
        if constexpr (MAKES_CODES) { *hot() = 0; }
        barriers_ready();
    }

    // See Rounding.
    static __device__ __forceinline__ volatile u32* hot() {
        __shared__ u32 word;
        return &word;
    }

    // All that a block does. epilogue.take(product, work, me) is what warp `me` of the epilogue does;
    // HELPED: epilogue.help(product, work), what one does that has multiplied. IN_PARTS:
    // epilogue.part_steps, at least 2. Codes: what *epilogue.up_factor makes of x, and in the end of
    // all warps but the first one epilogue.finish(the largest |x|).
    template <class Epilogue>
    __device__ __forceinline__ void run(const Work& work, const Operands& operands,
                                        Epilogue& epilogue) const {
        if constexpr (EPILOGUES == 4) {
            const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
            if (warpgroup == 0) {
                if constexpr (HELPED) { give_registers<LOADER_REGISTERS>(); }
                load(work, operands);
            } else if (warpgroup < 3) {
                if constexpr (HELPED) { take_registers<PRODUCT_REGISTERS>(); }
                multiply_tiles(work, operands, epilogue, warpgroup - 1);
                if constexpr (HELPED) { epilogue.help(*this, work); }
            } else {
                if constexpr (HELPED) { give_registers<EPILOGUE_REGISTERS>(); }
                epilogue.take(*this, work, __shfl_sync(~0u, threadIdx.x / 32 % 4, 0));
            }
            return;
        }
        const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), warpgroup = warp / 4;
        float largest = 0.0f;
        if (warpgroup == 1 || warpgroup == 2) {
            largest = multiply_tiles(work, operands, epilogue, warpgroup - 1);
        } else if (warp == 0) {
            load(work, operands);
        } else {
            epilogue.take(*this, work, warp < 4 ? warp - 1 : warp - 9);
        }
        if constexpr (MAKES_CODES) {
            if (warp != 0) { epilogue.finish(largest); }
        }
    }

    __device__ __forceinline__ void load(const Work& work, const Operands& operands) const {
        if (threadIdx.x == 0) {
            Base::load(work, operands, PAIRED ? operands.N : TILE_COLUMNS / 2);
        }
    }

    // Warpgroup `me`, 0 or 1, of the two that multiply. Returns the largest |x| of codes.
    template <class Epilogue>
    __device__ __forceinline__ float multiply_tiles(const Work& work, const Operands& operands,
                                                    const Epilogue& epilogue, int me) const {
        Rounding<Rounded> rounding{1.0f, hot()};
        if constexpr (MAKES_CODES) { rounding.factor = *epilogue.up_factor; }
        const float scale = Base::scale(operands);  // of the sum without tails
        Ring ring(0);
        u32 free_parity = 1;  // the boxes are free at first
        for (int t = work.cluster; t < work.tiles; t += work.clusters) {
            float d[1][SUMS];
            if constexpr (IN_PARTS) {
                float more[1][SUMS];
#pragma unroll
                for (int i = 0; i < SUMS; ++i) { d[0][i] = 0.0f; }
                // One warpgroup adds while the other one has products on their way.
                const int part = epilogue.part_steps;
                int count = me == 0 ? part : part / 2;
#pragma unroll 1
                for (int left = steps; left > 0; left -= count, count = part) {
                    count = min(count, left);
                    finish_steps(more, ring, me, count);
#pragma unroll
                    for (int i = 0; i < SUMS; ++i) { d[0][i] += more[0][i]; }
                }
            } else {
                finish_steps(d, ring, me, steps);
            }
            if constexpr (TAILS > 0) {
                if constexpr (SCALED) {
#pragma unroll
                    for (int i = 0; i < SUMS; ++i) { d[0][i] *= scale; }
                }
#pragma unroll
                for (int k = 0; k < TAILS; ++k, ring.next()) {
                    barrier_wait(full + 8 * ring.stage, ring.parity);
                    Base::multiply_tail(d, ring, 64 * me, k);
                }
            }
            if constexpr (MAKES_CODES) {
                hand_over_codes(d[0], 64 * me, scale, free_parity, rounding);
            } else {
                hand_over(d[0], 64 * me, scale, free_parity);
            }
            free_parity ^= 1;
        }
        return rounding.largest;
    }

    // d = the sum of so many steps, of a warpgroup's rows.
    __device__ __forceinline__ void finish_steps(float (&d)[1][SUMS], Ring& ring, int me,
                                                 int count) const {
        const SharedAddress before = Base::multiply_steps(d, ring, 64 * me, count);
        wgmma_wait<0>();
        Base::release(before);
    }

    // A warp's 16 rows of a tile into the boxes.
    __device__ __forceinline__ void hand_over(const float (&d)[SUMS], int first_row, float scale,
                                              u32 free_parity) const {
        int thread = threadIdx.x % 128;
        forget(thread);  // or addresses would be held, for which there are no registers, over all tiles
        const u32 warp = thread / 32, lane = thread % 32;
        const u32 row = lane & 15, octet = lane >> 4;  // of 16-byte words, for stmatrix
        const SharedAddress line = boxes + (first_row + 16 * warp + row) * LINE;
#pragma unroll
        for (int b = 0; b < BOXES; ++b) {
            barrier_wait(taken + 8 * b, free_parity);
#pragma unroll
            for (int j = 0; j < 4; ++j) {  // 16 columns
                const int first = PAIRED ? 4 * b + 2 * (j % 2) + 12 * (j / 2) : 8 * b + 2 * j;
                u32 pairs[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float* x = d + 4 * first + 2 * i;
                    const float factor = SCALED && TAILS == 0 ? scale : 1.0f;
                    pairs[i] = to_pair(x[0] * factor, x[1] * factor);
                }
                stmatrix_x4(line + b * BOX_BYTES + ((2 * j + octet ^ row & 7) << 4), pairs[0],
                            pairs[1], pairs[2], pairs[3]);
            }
            __syncwarp();
            if (lane == 0) { barrier_arrive(ready + 8 * b); }
        }
    }

    // As hand_over, but codes.
    __device__ __forceinline__ void hand_over_codes(const float (&d)[SUMS], int first_row, float scale,
                                                    u32 free_parity,
                                                    Rounding<Rounded>& rounding) const {
        static_assert(TAILS == 0, "what is added to codes is not scaled with them");
        int thread = threadIdx.x % 128;
        forget(thread);  // as in hand_over
        const u32 row = first_row + thread / 32 * 16 + thread % 16, word = thread % 32 / 16;
#pragma unroll
        for (int b = 0; b < BOXES; ++b) {
            barrier_wait(taken + 8 * b, free_parity);
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                u32 four[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int w = 2 * j + i / 2, below = 2 * (i % 2);
                    const float* const x = d + 4 * (PAIRED ? 4 * b + w : 8 * b + w) + below;
                    const float* const y = x + 4 * (PAIRED ? TILE_COLUMNS / 16 : 4);
                    four[i] = rounding.four(x[0] * scale, x[1] * scale, y[0] * scale, y[1] * scale);
                }
                stmatrix_x4(boxes + b * BOX_BYTES + word_of_codes(row, 2 * j + word), four[0],
                            four[1], four[2], four[3]);
            }
            rounding.mark();
            __syncwarp();
            if (thread % 32 == 0) { barrier_arrive(ready + 8 * b); }
        }
    }

    // Warp `me` of the EPILOGUES ones: work_on(tile, b, line, its address) for each of its units, 32
    // lines of box b from that one, of which it reads nothing afterwards. HELPED: of the last tile it
    // takes its first unit alone, the others are the multiplying warps' (take_last).
    template <class WorkOn>
    __device__ __forceinline__ void take_boxes(const Work& work, int me, WorkOn& work_on) const {
        static_assert(UNITS_OF_BOX == PARTS, "units of other sizes are taken by the file's own code");
        u32 unit = me, parity = 0;
        for (int t = work.cluster; t < work.tiles; t += work.clusters) {
            const Tile tile(t, work);
            const bool alone = !HELPED || t + work.clusters < work.tiles;
#pragma unroll 1
            for (; unit < UNITS; unit += alone ? EPILOGUES : UNITS) {
                const u32 b = unit / PARTS, line = unit % PARTS * 32;
                barrier_wait(ready + 8 * b, parity);
                work_on(tile, b, line, boxes + b * BOX_BYTES + line * BOX_LINE);
                __syncwarp();
                if (threadIdx.x % 32 == 0) { barrier_arrive(taken + 8 * b); }
            }
            unit -= UNITS;
            parity ^= 1;
        }
    }

    // By a warp that has multiplied all tiles: one unit of the last one.
    template <class WorkOn>
    __device__ __forceinline__ void take_last(const Work& work, u32 unit, WorkOn& work_on) const {
        static_assert(UNITS == EPILOGUES + 8, "a unit for each warp");
        if (work.cluster >= work.tiles) { return; }
        const int before = (work.tiles - 1 - work.cluster) / work.clusters;  // tiles
        const Tile tile(work.cluster + before * work.clusters, work);
        const u32 b = unit / PARTS, line = unit % PARTS * 32;
        barrier_wait(ready + 8 * b, before & 1);
        work_on(tile, b, line, boxes + b * BOX_BYTES + line * BOX_LINE);
    }

private:
    static constexpr int PARTS = TILE_ROWS / 32, UNITS = BOXES * PARTS;  // of a tile
};

// -- For epilogues: eight neighbours of BF16, two in each of four words ---------------------------

// Of the bits, as unsigned numbers: of all lower, and of all upper halves.
__device__ __forceinline__ u32 most_of(const uint4& x) {
    return max_halves(max_halves(x.x, x.y), max_halves(x.z, x.w));
}

// Gives the codes that Fp8Encoder of fp8.cuh gives, and with IS_MEASURED the largest abs_bits.
template <class Format, bool IS_WANTED, bool IS_MEASURED> struct OctetEncoder {
    float factor;
    u32 limit;        // twice the upper half of the largest number that is not saturated
    u32 count = 0, largest = 0;  // largest: of lower and of upper halves

    __device__ __forceinline__ void begin(const float* scale) {
        if constexpr (IS_WANTED) {
            factor = 1.0f / *scale;
            limit = (__float_as_uint(Fp8<Format>::MAX * *scale) >> 16) * 0x10001u;
        }
    }

    __device__ __forceinline__ uint2 encode(const uint4& x) {
        if constexpr (IS_WANTED || IS_MEASURED) {
            const u32 pairs[4] = {x.x & ABS, x.y & ABS, x.z & ABS, x.w & ABS};
            const u32 most = most_of(make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]));
            if constexpr (IS_MEASURED) { largest = max_halves(largest, most); }
            if constexpr (IS_WANTED) {
                if (__builtin_expect(max_halves(most, limit) != limit, 0)) {
#pragma unroll
                    for (int k = 0; k < 4; ++k) {
                        count += is_saturated(pairs[k] & 0xFFFF) + is_saturated(pairs[k] >> 16);
                    }
                }
                return make_uint2(four(x.x, x.y), four(x.z, x.w));
            }
        }
        return make_uint2(0, 0);
    }

    // encode in two steps: of two octets what is saturated and the largest, and of each its codes.
    __device__ __forceinline__ void see(const uint4& x, const uint4& y) {
        if constexpr (IS_WANTED || IS_MEASURED) {
            const u32 most = larger_magnitudes(magnitude(x), magnitude(y)) & ABS;
            if constexpr (IS_MEASURED) { largest = max_halves(largest, most); }
            if constexpr (IS_WANTED) {
                if (__builtin_expect(max_halves(most, limit) != limit, 0)) {
                    count_saturated(x), count_saturated(y);
                }
            }
        }
    }
    static __device__ __forceinline__ u32 magnitude(const uint4& x) {
        return larger_magnitudes(larger_magnitudes(x.x, x.y), larger_magnitudes(x.z, x.w));
    }
    __device__ __forceinline__ void count_saturated(const uint4& x) {
        const u32 pairs[4] = {x.x & ABS, x.y & ABS, x.z & ABS, x.w & ABS};
#pragma unroll 1
        for (int k = 0; k < 4; ++k) {
            const u32 pair = k == 0 ? pairs[0] : k == 1 ? pairs[1] : k == 2 ? pairs[2] : pairs[3];
            count += is_saturated(pair & 0xFFFF) + is_saturated(pair >> 16);
        }
    }
    __device__ __forceinline__ uint2 codes(const uint4& x) const {
        if constexpr (IS_WANTED) { return make_uint2(four(x.x, x.y), four(x.z, x.w)); }
        return make_uint2(0, 0);
    }

    // All threads of a warp call it once, at the end.
    __device__ __forceinline__ void finish(i32* saturated, float* abs_max) const {
        if constexpr (IS_WANTED) {
            const u32 sum = __reduce_add_sync(~0u, count);
            if (threadIdx.x % 32 == 0 && sum != 0) { atomicAdd(saturated, (i32)sum); }
        }
        if constexpr (IS_MEASURED) {
            const u32 most = __reduce_max_sync(~0u, max(largest << 16, largest & 0xFFFF0000u));
            if (threadIdx.x % 32 == 0) { store_abs_max(abs_max, __uint_as_float(most)); }
        }
    }

private:
    static constexpr u32 ABS = 0x7FFF7FFF;
    __device__ __forceinline__ bool is_saturated(u32 half) const {
        return half > (limit & 0xFFFF) && half <= 0x7F80;  // a NaN is not
    }
    __device__ __forceinline__ u32 four(u32 first, u32 second) const {
        return to_fp8<Format>(lower_half(first) * factor, upper_half(first) * factor,
                              lower_half(second) * factor, upper_half(second) * factor);
    }
};
