// smem_tiles.cuh -- a product's tile in shared memory, from which the product's epilogue reads.
//
// A box is 128 lines of 128 bytes, swizzled as ptx.cuh says, a line for each row: box b has columns
// 64 b to 64 b + 63. PAIRED: half of a tile's columns belong to rows of `right`, the other half to
// the rows `apart` further on; box b has columns 32 b to 32 b + 31 of the first half, then the same
// columns of the second half. A unit is the part of a box that one warp takes.
//
// The product in cooperative_sm90.cuh fills boxes.
#pragma once
#include "common.cuh"
#include "ptx.cuh"

constexpr int TILE_ROWS = 128, LINE = 128;  // LINE: bytes
constexpr int BOX = 64;                     // columns of a box of BF16

// An epilogue's policy; most epilogues use this one. UNITS_OF_BOX: number of units in a box.
// HELPED, IN_PARTS, BARRIERS: see cooperative_sm90.cuh.
struct Boxes {
    static constexpr bool PAIRED = false, HELPED = false, IN_PARTS = false;
    static constexpr int UNITS_OF_BOX = 4, BARRIERS = 0;
};

// -- For epilogues: eight neighbours of BF16, two in each of four words ---------------------------

// The largest lower half and the largest upper half of the words, as unsigned numbers.
__device__ __forceinline__ u32 most_of(const uint4& x) {
    return max_halves(max_halves(x.x, x.y), max_halves(x.z, x.w));
}

// Computes the same codes as Fp8Encoder in fp8.cuh, and with IS_MEASURED the largest abs_bits.
template <class Format, bool IS_WANTED, bool IS_MEASURED> struct OctetEncoder {
    float factor;
    u32 limit;        // both halves: BF16 bits of the largest number that does not saturate
    u32 count = 0, largest = 0;  // count: saturated elements; largest: in lower and upper halves

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

    // encode in two steps: see counts saturated elements and notes the largest, in one octet or
    // two; then come the codes of each octet. If any lane has a saturated element, all lanes count,
    // which is cheaper than divergence.
    __device__ __forceinline__ void see(const uint4& x) { look(magnitude(x), x); }
    __device__ __forceinline__ void see(const uint4& x, const uint4& y) {
        look(larger_magnitudes(magnitude(x), magnitude(y)), x, &y);
    }
    __device__ __forceinline__ void look(u32 most, const uint4& x, const uint4* y = nullptr) {
        if constexpr (IS_WANTED || IS_MEASURED) {
            most &= ABS;
            if constexpr (IS_MEASURED) { largest = max_halves(largest, most); }
            if constexpr (IS_WANTED) {
                if (__builtin_expect(__any_sync(~0u, max_halves(most, limit) != limit), 0)) {
                    count_saturated(x);
                    if (y != nullptr) { count_saturated(*y); }
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

    // All threads of a warp call finish once, at the end.
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
        return half > (limit & 0xFFFF) && half <= 0x7F80;  // NaN does not count
    }
    __device__ __forceinline__ u32 four(u32 first, u32 second) const {
        return to_fp8<Format>(lower_half(first) * factor, upper_half(first) * factor,
                              lower_half(second) * factor, upper_half(second) * factor);
    }
};
