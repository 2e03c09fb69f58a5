// quantize.cu -- FP8 with one scale for the whole tensor: row-major, transposed, or both at once.
//
//   m = max(abs_max, 1e-10)     q[r, c] = q_t[c, r] = fp8(x[r, c] * (MAX / m))     scale = m / MAX
//
// so that x = q * scale up to rounding. MAX is the largest finite value of Q; fp8() rounds to
// nearest even and clamps to +-MAX, NaN becomes 0x7F. Where abs_max is infinite or NaN, scale is 1
// and x is encoded as it is.
//
// Data     x: T (rows, cols), read once. q: Q (rows, cols). q_t: Q (cols, rows). All 16-byte
//          aligned. scale, abs_max: F32 (1). quantize_transpose: q may be null.
// Launch   256 threads. quantize: ceil(n / 8192) blocks, n = rows * cols. quantize_transpose: one
//          for every tile of 128 rows and 64 columns, grid (ceil(cols / 64), ceil(rows / 128)).
// Cost     memory-bound, about 8 instructions per element; every access to global memory is 16
//          bytes. A tile reads lines of 128 bytes (BF16), writes 64 bytes of each row of q, 128 of
//          each row of q_t. It is turned in 8 KiB of shared memory without bank conflicts.
// Needs    rows and cols multiples of 16; rows at most 65535 * 128.
// Same name  llmq/ops/quantize.py  llmq/ref/quantize.py  tests/ops/test_quantize.py
#include "common.cuh"

constexpr int THREADS = 256, OCTETS = 4;           // of a thread of quantize, 8 elements each
constexpr int TILE_ROWS = 128, TILE_COLUMNS = 64;  // of quantize_transpose
constexpr float LEAST_ABS_MAX = 1e-10f;            // LEAST_ABS_MAX in llmq/ref/quantize.py

// What x is multiplied by. One thread of the grid writes the scale.
__device__ __forceinline__ float scale_factor(f32* scale, const f32* abs_max) {
    const bool finite = isfinite(*abs_max);
    const float m = fmaxf(*abs_max, LEAST_ABS_MAX);
    if (blockIdx.x + blockIdx.y + threadIdx.x == 0) { *scale = finite ? m / Fp8<Q>::MAX : 1.0f; }
    return finite ? Fp8<Q>::MAX / m : 1.0f;
}

// Eight neighbours as they were loaded: BF16 stays packed, so that many fit in the registers.
struct Octet {
    static constexpr int PARTS = 8 / Vec<T>::N;
    uint4 part[PARTS];

    // Zeros if not inside.
    __device__ __forceinline__ void load(const T* p, bool inside) {
#pragma unroll
        for (int i = 0; i < PARTS; ++i) {
            part[i] = make_uint4(0, 0, 0, 0);
            if (inside) { part[i] = load_packed_stream(p + i * Vec<T>::N); }
        }
    }
    __device__ __forceinline__ uint2 quantized(float factor) const {
        float v[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) { v[i] = get(i) * factor; }
        return make_uint2(to_fp8<Q>(v[0], v[1], v[2], v[3]), to_fp8<Q>(v[4], v[5], v[6], v[7]));
    }
    __device__ __forceinline__ float get(int i) const {
        const uint4& p = part[i / Vec<T>::N];
        const int byte = i % Vec<T>::N * (int)sizeof(T);
        const u32 word = byte < 4 ? p.x : byte < 8 ? p.y : byte < 12 ? p.z : p.w;
        if constexpr (sizeof(T) == 4) { return __uint_as_float(word); }
        return __uint_as_float(byte % 4 ? word & 0xFFFF0000u : word << 16);  // BF16
    }
};

// Lanes 2i and 2i + 1 hold neighbouring octets `a` of one place and `b` of another: the even lane
// gets all 16 bytes of the first place, the odd lane those of the second.
__device__ __forceinline__ uint4 join_pair(uint2 a, uint2 b) {
    const bool odd = threadIdx.x & 1;
    const uint2 kept = odd ? b : a, given = odd ? a : b;
    const u32 x = __shfl_xor_sync(0xFFFFFFFFu, given.x, 1);
    const u32 y = __shfl_xor_sync(0xFFFFFFFFu, given.y, 1);
    return odd ? make_uint4(x, y, kept.x, kept.y) : make_uint4(kept.x, kept.y, x, y);
}

__device__ __forceinline__ void store_16(Q* p, uint4 x) { *reinterpret_cast<uint4*>(p) = x; }

extern "C" __global__ void __launch_bounds__(THREADS)
quantize(Q* __restrict__ q, f32* __restrict__ scale, const T* __restrict__ x,
         const f32* __restrict__ abs_max, i64 n) {
    constexpr int STEP = THREADS * 8;  // from an octet of this thread to its next one
    const i64 first = (i64)blockIdx.x * OCTETS * STEP + threadIdx.x * 8;
    Octet loaded[OCTETS];
#pragma unroll
    for (int i = 0; i < OCTETS; ++i) { loaded[i].load(x + first + i * STEP, first + i * STEP < n); }
    const float factor = scale_factor(scale, abs_max);
    const int odd = threadIdx.x & 1;
#pragma unroll
    for (int i = 0; i < OCTETS; i += 2) {
        const uint4 joined =
            join_pair(loaded[i].quantized(factor), loaded[i + 1].quantized(factor));
        const i64 at = first + (i + odd) * STEP - odd * 8;
        if (at < n) { store_16(q + at, joined); }
    }
}

// row[i]: four neighbours of row i. column[j] becomes the four of column j.
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

// A thread quantizes 4 rows of 8 columns, a warp 16 rows of the tile. The tile in shared memory has
// a line of 128 bytes for each column; the 16 bytes of warp w lie in its place w ^ (column / 8). So
// 32 lanes write 4 bytes each, and 8 lanes read 16 bytes each, in different banks.
extern "C" __global__ void __launch_bounds__(THREADS)
quantize_transpose(Q* __restrict__ q, Q* __restrict__ q_t, f32* __restrict__ scale,
                   const T* __restrict__ x, const f32* __restrict__ abs_max, i64 rows, i32 cols) {
    constexpr int PLACES = TILE_ROWS / 16;
    __shared__ uint4 tile[TILE_COLUMNS][PLACES];
    const i64 tile_row = (i64)blockIdx.y * TILE_ROWS;
    const int tile_column = blockIdx.x * TILE_COLUMNS;

    const int warp = threadIdx.x >> 5, four_rows = threadIdx.x >> 3 & 3, octet = threadIdx.x & 7;
    const i64 row = tile_row + warp * 16 + four_rows * 4;
    const int column = tile_column + octet * 8;
    const bool inside = row < rows && column < cols;
    Octet loaded[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) { loaded[i].load(x + (row + i) * cols + column, inside); }
    const float factor = scale_factor(scale, abs_max);
    u32 left[4], right[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const uint2 words = loaded[i].quantized(factor);
        left[i] = words.x;
        right[i] = words.y;
    }
    if (q != nullptr) {
        const int odd = threadIdx.x & 1;
#pragma unroll
        for (int i = 0; i < 4; i += 2) {
            const uint4 joined = join_pair(make_uint2(left[i], right[i]),
                                           make_uint2(left[i + 1], right[i + 1]));
            if (inside) { store_16(q + (row + i + odd) * cols + column - odd * 8, joined); }
        }
    }

    u32 turned[2][4];
    transpose_bytes(turned[0], left);
    transpose_bytes(turned[1], right);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        uint4* place = &tile[octet * 8 + i][warp ^ octet];
        reinterpret_cast<u32*>(place)[four_rows] = turned[i / 4][i % 4];
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < TILE_COLUMNS * PLACES / THREADS; ++i) {
        const u32 index = i * THREADS + threadIdx.x, line = index / PLACES, k = index % PLACES;
        const i64 first_row = tile_row + k * 16, c = tile_column + line;
        if (first_row < rows && c < cols) {
            store_16(q_t + c * rows + first_row, tile[line][k ^ (line / 8)]);
        }
    }
}
