// fp8.cuh -- results that a kernel also writes as FP8 codes, row-major, transposed, or both.
//
//   code = fp8(v * factor), factor = 1 / scale; v: the element as rounded to the BF16 or F32
//   tensor, so that codes equal those of quantizing the tensor. fp8() is to_fp8 in common.cuh.
//   saturated += number of |v| > MAX * scale (NaN does not count)
//
// Included after the type variables and constants of a launch are defined: no name in here may be
// one of those, so template parameters have long names.
#pragma once
#include "common.cuh"
#include "ptx.cuh"

// A thread's encoder of one tensor. With IS_WANTED = false all codes are zero, and Format may be
// any type.
template <class Format, bool IS_WANTED> struct Fp8Encoder {
    float factor, limit;
    u32 count = 0;  // saturated elements of this thread

    Fp8Encoder() = default;
    // Waits for the scale: construct the encoder after other loads have begun.
    __device__ __forceinline__ explicit Fp8Encoder(const float* scale) {
        if constexpr (IS_WANTED) { use(*scale); }
    }
    __device__ __forceinline__ void use(float scale) {
        factor = 1.0f / scale;
        limit = Fp8<Format>::MAX * scale;
    }

    // The codes of one 16-byte vector, in the elements' order.
    __device__ __forceinline__ uint2 encode(const Vec<bf16>& x) {
        count_saturated(x);
        return make_uint2(four(to_f32(x[0]), to_f32(x[1]), to_f32(x[2]), to_f32(x[3])),
                          four(to_f32(x[4]), to_f32(x[5]), to_f32(x[6]), to_f32(x[7])));
    }
    __device__ __forceinline__ u32 encode(const Vec<float>& x) {
        count_saturated(x);
        return four(x[0], x[1], x[2], x[3]);
    }
    // The codes of a vector that is read by pairs. largest: the vector's abs_max_bits. Takes fewer
    // instructions than encode, but spills where registers are few, as in kernels of OctetTile.
    __device__ __forceinline__ uint2 encode_pairs(const Vec<bf16>& x, u32 largest) {
        const uint2 codes = make_uint2(four(x, 0), four(x, 4));
        count_saturated_pairs(x, largest);
        return codes;
    }
    __device__ __forceinline__ u32 encode_pairs(const Vec<float>& x, u32 largest) {
        const u32 codes = four(x, 0);
        count_saturated_pairs(x, largest);
        return codes;
    }
    // The codes of eight neighbouring elements.
    __device__ __forceinline__ uint2 encode(const Pack<bf16, 8>& x) { return encode(x.part[0]); }
    __device__ __forceinline__ uint2 encode(const Pack<float, 8>& x) {
        const u32 low = encode(x.part[0]);
        return make_uint2(low, encode(x.part[1]));
    }

    // Codes of four neighbouring elements, without counting saturation.
    __device__ __forceinline__ u32 four(float a, float b, float c, float d) const {
        if constexpr (IS_WANTED) {
            return to_fp8<Format>(a * factor, b * factor, c * factor, d * factor);
        }
        return 0;
    }

    // All threads of a warp call finish once, at the end. If the count is 0, nothing is added.
    __device__ __forceinline__ void finish(i32* saturated) {
        if constexpr (IS_WANTED) {
            const u32 sum = __reduce_add_sync(0xFFFFFFFFu, count);
            if ((threadIdx.x & 31) == 0 && sum != 0) { atomicAdd(saturated, (i32)sum); }
        }
    }

private:
    template <class Element>
    __device__ __forceinline__ u32 four(const Vec<Element>& x, int first) const {
        const float2 low = x.two(first), high = x.two(first + 2);
        return four(low.x, low.y, high.x, high.y);
    }

    // One comparison rules out saturation, which is rare; abs_bits are ordered like the numbers.
    template <class Element>
    __device__ __forceinline__ void count_saturated(const Vec<Element>& x) {
        if constexpr (IS_WANTED) {
            if (abs_max_bits(x) > __float_as_uint(limit)) {
#pragma unroll
                for (int k = 0; k < Vec<Element>::N; ++k) { count += fabsf(to_f32(x[k])) > limit; }
            }
        }
    }
    template <class Element>
    __device__ __forceinline__ void count_saturated_pairs(const Vec<Element>& x, u32 largest) {
        if constexpr (IS_WANTED) {
            if (largest > __float_as_uint(limit)) {
#pragma unroll
                for (int k = 0; k < Vec<Element>::N; k += 2) {
                    const float2 two = x.two(k);
                    count += (fabsf(two.x) > limit) + (fabsf(two.y) > limit);
                }
            }
        }
    }
};

// Transpose 4 x 4 bytes. row[i]: the four bytes of row i. column[j] gets the four bytes of column
// j.
__device__ __forceinline__ void transpose_bytes(u32 (&column)[4], const u32 (&row)[4]) {
    const u32 left01 = __byte_perm(row[0], row[1], 0x5140);   // columns 0, 0, 1, 1
    const u32 right01 = __byte_perm(row[0], row[1], 0x7362);  // columns 2, 2, 3, 3
    const u32 left23 = __byte_perm(row[2], row[3], 0x5140);
    const u32 right23 = __byte_perm(row[2], row[3], 0x7362);
    column[0] = __byte_perm(left01, left23, 0x5410);
    column[1] = __byte_perm(left01, left23, 0x7632);
    column[2] = __byte_perm(right01, right23, 0x5410);
    column[3] = __byte_perm(right01, right23, 0x7632);
}

// Lanes 2i and 2i + 1 hold neighbouring octets: `a` at one place, `b` at another. The even lane
// gets all 16 bytes of the first place, the odd lane all 16 bytes of the second.
__device__ __forceinline__ uint4 join_pair(uint2 a, uint2 b) {
    const bool odd = threadIdx.x & 1;
    const uint2 kept = odd ? b : a, given = odd ? a : b;
    const u32 x = __shfl_xor_sync(0xFFFFFFFFu, given.x, 1);
    const u32 y = __shfl_xor_sync(0xFFFFFFFFu, given.y, 1);
    return odd ? make_uint4(x, y, kept.x, kept.y) : make_uint4(kept.x, kept.y, x, y);
}

// -- For kernels that work element by element ----------------------------------------------------

// Number of columns of transposed codes of `rows` rows: `rows` rounded up to 16. The extra codes
// are zeros, which add nothing to products.
__device__ __forceinline__ i64 turned_columns(i64 rows) { return (rows + 15) & ~15ll; }

// Store 16 bytes of codes. IS_STREAMED: the L2 cache evicts the codes first.
template <bool IS_STREAMED> __device__ __forceinline__ void store_codes(void* place, uint4 codes) {
    if constexpr (IS_STREAMED) {
        __stcs(static_cast<uint4*>(place), codes);
    } else {
        *static_cast<uint4*>(place) = codes;
    }
}

// A block of 256 threads makes the codes of 128 rows and 64 columns: a thread has 4 rows and 8
// columns from row(), column() on; a warp has 16 rows. The tile has a line of 128 bytes for each
// column, in which the 16 bytes of warp w lie at place w ^ (column / 8). In this layout 32 lanes
// write 4 bytes each, and 8 lanes read 16 bytes each, in different banks.
struct OctetTile {
    static constexpr int LINES = 128, COLUMNS = 64, PLACES = LINES / 16;  // LINES: number of rows
    uint4 line[COLUMNS][PLACES];

    static __device__ __forceinline__ int row() {
        return (threadIdx.x >> 5) * 16 + (threadIdx.x >> 3 & 3) * 4;
    }
    static __device__ __forceinline__ int column() { return (threadIdx.x & 7) * 8; }

    // Store this thread's codes row-major, to (row, column) of codes (any rows, columns). All
    // threads of a warp call this function; columns % 16 == 0.
    template <bool IS_STREAMED = false, class Format>
    static __device__ __forceinline__ void store_rows(Format* codes, i64 row, int column,
                                                      int columns, const uint2 (&four)[4],
                                                      bool inside) {
        const int odd = threadIdx.x & 1;
#pragma unroll
        for (int i = 0; i < 4; i += 2) {
            const uint4 joined = join_pair(four[i], four[i + 1]);
            Format* place = codes + (row + i + odd) * columns + column - odd * 8;
            if (inside) { store_codes<IS_STREAMED>(place, joined); }
        }
    }

    // Put this thread's codes into the tile. A barrier must follow.
    __device__ __forceinline__ void put(const uint2 (&four)[4]) {
        const int warp = threadIdx.x >> 5, four_rows = threadIdx.x >> 3 & 3;
        const int octet = threadIdx.x & 7;
        u32 turned[2][4];
        transpose_bytes(turned[0], {four[0].x, four[1].x, four[2].x, four[3].x});
        transpose_bytes(turned[1], {four[0].y, four[1].y, four[2].y, four[3].y});
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            uint4* place = &line[octet * 8 + i][warp ^ octet];
            reinterpret_cast<u32*>(place)[four_rows] = turned[i / 4][i % 4];
        }
    }

    // Store the part of the tile that lies inside transposed (columns, turned), with turned =
    // turned_columns(rows), from the tile's first row and column on. Threads without rows must have
    // put codes of zeros.
    template <bool IS_STREAMED = false, class Format>
    __device__ __forceinline__ void store(Format* transposed, i64 first_row, int first_column,
                                          i64 turned, int columns) const {
#pragma unroll
        for (int i = 0; i < COLUMNS * PLACES / 256; ++i) {
            const u32 index = i * 256 + threadIdx.x, c = index / PLACES, k = index % PLACES;
            const i64 row = first_row + k * 16, column = first_column + (int)c;
            if (row < turned && column < columns) {
                store_codes<IS_STREAMED>(transposed + column * turned + row, line[c][k ^ (c / 8)]);
            }
        }
    }
};

// Transposes existing codes. Like OctetTile, but with 128 columns, of which a thread has 4 rows of
// 16, and with places w ^ (column / 16). A barrier must separate put from store.
struct CodesTile {
    static constexpr int SIZE = 128, PLACES = SIZE / 16;
    uint4 line[SIZE][PLACES];

    static __device__ __forceinline__ int row() { return OctetTile::row(); }
    static __device__ __forceinline__ int column() { return (threadIdx.x & 7) * 16; }

    __device__ __forceinline__ void put(const uint4 (&four)[4]) {
        const int warp = threadIdx.x >> 5, four_rows = threadIdx.x >> 3 & 3;
        const int group = threadIdx.x & 7;
        u32 turned[4][4];
        transpose_bytes(turned[0], {four[0].x, four[1].x, four[2].x, four[3].x});
        transpose_bytes(turned[1], {four[0].y, four[1].y, four[2].y, four[3].y});
        transpose_bytes(turned[2], {four[0].z, four[1].z, four[2].z, four[3].z});
        transpose_bytes(turned[3], {four[0].w, four[1].w, four[2].w, four[3].w});
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            uint4* place = &line[group * 16 + i][warp ^ group];
            reinterpret_cast<u32*>(place)[four_rows] = turned[i / 4][i % 4];
        }
    }

    // Store the part of the tile that lies inside transposed (columns, turned), like
    // OctetTile::store.
    template <class Format>
    __device__ __forceinline__ void store(Format* transposed, i64 first_row, int first_column,
                                          i64 turned, int columns) const {
#pragma unroll
        for (int i = 0; i < SIZE * PLACES / 256; ++i) {
            const u32 index = i * 256 + threadIdx.x, c = index / PLACES, k = index % PLACES;
            const i64 row = first_row + k * 16, column = first_column + c;
            if (row < turned && column < columns) {
                store_codes<false>(transposed + column * turned + row, line[c][k ^ (c / 16)]);
            }
        }
    }
};

// A thread's place in a matrix (rows, columns) that is cut into OctetTiles, in a grid (across,
// down). rows % 4 == 0, columns % 16 == 0: all of a thread's 4 rows and 8 columns are inside, or
// none.
struct OctetPlace {
    i64 first_row, row;
    int first_column, column, there;  // there: number of rows inside, 4 or 0
    bool inside;
    __device__ __forceinline__ OctetPlace(i64 rows, int columns) {
        first_row = (i64)blockIdx.y * OctetTile::LINES;
        first_column = blockIdx.x * OctetTile::COLUMNS;
        row = first_row + OctetTile::row();
        column = first_column + OctetTile::column();
        inside = row < rows && column < columns;
        there = inside ? 4 : 0;
    }
};

// A thread's loaded elements. BF16 stays packed, so that many elements fit into registers.
template <class Element> struct OctetRows {
    static constexpr int PARTS = 8 / Vec<Element>::N;
    uint4 part[4][PARTS];

    // Load row i from p + i * stride; rows with i >= there become zeros.
    __device__ __forceinline__ void load(const Element* p, i64 stride, int there) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#pragma unroll
            for (int k = 0; k < PARTS; ++k) {
                part[i][k] = make_uint4(0, 0, 0, 0);
                if (i < there) {
                    part[i][k] = load_packed_stream(p + i * stride + k * Vec<Element>::N);
                }
            }
        }
    }
    __device__ __forceinline__ Pack<Element, 8> row(int i) {
        Pack<Element, 8> out;
#pragma unroll
        for (int k = 0; k < PARTS; ++k) {
            forget(part[i][k]);  // else the compiler may unpack early, into twice the registers
            out.part[k] = unpack<Element>(part[i][k]);
        }
        return out;
    }
};

// Decode eight codes: x = code * scale.
template <class Format>
__device__ __forceinline__ void decode(float (&x)[8], const uint2& codes, float scale) {
#pragma unroll
    for (int k = 0; k < 8; k += 2) {
        const float2 two = from_fp8<Format>((k < 4 ? codes.x : codes.y) >> k % 4 * 8);
        x[k] = two.x * scale;
        x[k + 1] = two.y * scale;
    }
}
// Number of codes that are +-MAX.
template <class Format> __device__ __forceinline__ u32 largest_codes(const uint2& codes) {
    const u32 word[2] = {codes.x & 0x7F7F7F7Fu, codes.y & 0x7F7F7F7Fu};
    u32 count = 0;
#pragma unroll
    for (int k = 0; k < 8; ++k) {
        count += (word[k / 4] >> k % 4 * 8 & 0xFFu) == Fp8<Format>::MAX_CODE;
    }
    return count;
}

// A thread's loaded codes of a product's result; elements are code * scale.
template <class Format> struct OctetCodes {
    struct Eight {
        float v[8];
        __device__ __forceinline__ float at(int i) const { return v[i]; }
    };
    uint2 four[4];
    float scale;

    __device__ __forceinline__ explicit OctetCodes(const float* scale) : scale(*scale) {}

    // Load row i from p + i * stride, a multiple of 8 bytes; rows with i >= there become zeros.
    __device__ __forceinline__ void load(const Format* p, i64 stride, int there) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            four[i] = make_uint2(0, 0);
            if (i < there) { four[i] = __ldcs(reinterpret_cast<const uint2*>(p + i * stride)); }
        }
    }
    __device__ __forceinline__ Eight row(int i) {
        forget(four[i]);
        Eight out;
        decode<Format>(out.v, four[i], scale);
        return out;
    }
    // Number of elements that are +-MAX.
    __device__ __forceinline__ u32 largest_codes() const {
        u32 count = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) { count += ::largest_codes<Format>(four[i]); }
        return count;
    }
};

// OctetRows or OctetCodes, depending on the element type. Both are constructed from a scale.
template <class Element> struct OctetOf {
    struct Type : OctetRows<Element> {
        __device__ __forceinline__ explicit Type(const float*) {}
    };
};
template <> struct OctetOf<e4m3> { using Type = OctetCodes<e4m3>; };
template <> struct OctetOf<e5m2> { using Type = OctetCodes<e5m2>; };

// Record statistics of a product's codes, which the product itself cannot record; see ProductCodes
// in llmq/base/operand.py. All threads of all blocks call this, with one or more OctetCodes of the
// same tensor. Records nothing if abs_max is null, or for OctetRows.
template <class... Rows>
__device__ __forceinline__ void look_at_codes(const float*, float*, i32*, const Rows&...) {}
template <class Format, class... More>
__device__ __forceinline__ void look_at_codes(const float* largest, float* abs_max, i32* saturated,
                                              const OctetCodes<Format>& first, const More&... more) {
    if (abs_max == nullptr) { return; }
    const float seen = *largest;
    if (seen > Fp8<Format>::MAX * first.scale) {
        const u32 count = (first.largest_codes() + ... + more.largest_codes());
        const u32 sum = __reduce_add_sync(0xFFFFFFFFu, count);
        if ((threadIdx.x & 31) == 0 && sum != 0) { atomicAdd(saturated, (i32)sum); }
    }
    if (blockIdx.x + blockIdx.y + threadIdx.x == 0) { store_abs_max(abs_max, seen); }
}

// Like forget(uint4) in ptx.cuh: one register holds two BF16 elements until their next use.
template <class Element, int COUNT>
__device__ __forceinline__ void forget(Pack<Element, COUNT>& x) {
#pragma unroll
    for (int k = 0; k < COUNT / Vec<Element>::N; ++k) {
        forget(reinterpret_cast<uint4&>(x.part[k]));
    }
}

// The largest abs_bits of a pack.
template <class Element, int COUNT>
__device__ __forceinline__ u32 abs_max_bits(const Pack<Element, COUNT>& x) {
    u32 largest = 0;
#pragma unroll
    for (int k = 0; k < COUNT / Vec<Element>::N; ++k) {
        largest = max(largest, abs_max_bits(x.part[k]));
    }
    return largest;
}

// -- For kernels that work row by row ------------------------------------------------------------

// Keeps the row packed over a reduction. The compiler would also keep unpacked copies, and an SM
// would have fewer rows in flight.
template <class Element, int W, int COUNT>
__device__ __forceinline__ void forget(Row<Element, W, COUNT>& row) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) { forget(reinterpret_cast<uint4&>(row.v[i])); }
}

// The FP8 results, if IS_WANTED, of a kernel whose threads hold rows as Row in common.cuh.
template <class Format, bool IS_WANTED> struct Fp8Rows {
    Fp8Encoder<Format, IS_WANTED> encoder;
    Format* codes;
    float scale = 1.0f;
    int columns;

    __device__ __forceinline__ Fp8Rows(Format* codes, const float* from, int columns)
        : codes(codes), columns(columns) {
        if constexpr (IS_WANTED) { scale = *from; }
    }

    // Store this thread's part of a row; return the largest abs_bits of this part.
    template <class Element, int W, int COUNT>
    __device__ __forceinline__ u32 emit(const Row<Element, W, COUNT>& x, i64 row, bool active) {
        u32 largest = 0;
        if constexpr (IS_WANTED) {
            forget(scale);  // else the kernel waits for scale before it loads a row
            encoder.use(scale);
        }
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            const int c = x.column(i);
            if (!active || c >= columns) { continue; }
            const u32 bits = abs_max_bits(x.v[i]);
            largest = max(largest, bits);
            if constexpr (IS_WANTED) {
                uint4 packed = pack(x.v[i]);
                forget(packed);  // else all unpack early, into too many registers
                store(codes + row * columns + c, encoder.encode_pairs(unpack<Element>(packed), bits));
            }
        }
        return largest;
    }

    // All threads call finish once, at the end.
    __device__ __forceinline__ void finish(i32* saturated) { encoder.finish(saturated); }

private:
    template <class Word> static __device__ __forceinline__ void store(Format* p, Word word) {
        *reinterpret_cast<Word*>(p) = word;
    }
};

// A row of parameters that all rows use. HELD: the registers of a Row's threads hold it. Else it is
// read from the cache at each use, which leaves registers for FP8 results.
template <class Element, int W, int COUNT, bool HELD> struct RowParameter {
    Row<Element, W, COUNT> held;
    const Element* values;
    int columns;

    __device__ __forceinline__ RowParameter(const Element* values, int columns)
        : values(values), columns(columns) {
        if constexpr (HELD) { held.load(values, columns, true); }
    }
    // Returns vector i as a Vec, or a reference to one. Elements past the row's end are zeros.
    __device__ __forceinline__ decltype(auto) vector(int i) const {
        if constexpr (HELD) {
            return (held.v[i]);
        } else {
            int c = held.column(i);
            forget(c);  // else the compiler would load the row once and hold it
            uint4 loaded = make_uint4(0, 0, 0, 0);
            if (c < columns) { loaded = pack(load_vec(values + c)); }
            return unpack<Element>(loaded);
        }
    }
    // Like forget for a Row: keeps vector i packed.
    __device__ __forceinline__ void forget_vector(int i) {
        if constexpr (HELD) { forget(reinterpret_cast<uint4&>(held.v[i])); }
    }
    __device__ __forceinline__ void forget_all() {
        if constexpr (HELD) { forget(held); }
    }
};
