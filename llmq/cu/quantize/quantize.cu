// quantize.cu -- FP8 with one scale for the whole tensor: row-major, transposed, or both at once;
// and the transpose of FP8 codes.
//
//   scale = max(abs_max, 1e-10) / MAX          q[r, c] = q_t[c, r] = fp8(x[r, c] * (1 / scale))
//
// Thus x = q * scale up to rounding. MAX is the largest finite value of Q; fp8() rounds to nearest
// even and clamps to +-MAX; NaN becomes 0x7F. If abs_max is infinite or NaN, scale and all codes
// are NaN. quantize_scaled takes the scale as an input, see fp8.cuh; equal scales give equal codes.
// transpose_codes: q_t[c, r] = q[r, c]. dequantize: out[i] = q[i] * scale.
//
// Data     declared in llmq/ops/quantize/quantize.py. Transposed codes end with zeros up to a
//          multiple of 16. Either codes or transposed may be null. quantize_scaled with ABS_MAX = 1
//          raises abs_max to the largest |x|.
// Launch   256 threads. quantize: ceil(n / 8192) blocks, n = rows * cols. quantize_transpose and
//          quantize_scaled: a block for every OctetTile of fp8.cuh, 128 rows and 64 columns, grid
//          (across, down). transpose_codes: tiles of 128 rows and 128 columns, times the number of
//          matrices below each other. dequantize: 16 elements per thread, ceil(n / 4096) blocks.
// Cost     memory-bound, about 8 instructions per element; every access to global memory is 16
//          bytes. A tile reads lines of 128 bytes (BF16), writes 64 bytes of each row of q and 128
//          bytes of each row of q_t. 8 KiB of shared memory transpose the tile without bank
//          conflicts; transpose_codes reads and writes lines of 128 bytes through 16 KiB.
// Needs    rows a multiple of 4, cols of 16; rows at most 65535 * 128.
#include "common.cuh"
#include "fp8.cuh"

constexpr int THREADS = 256, OCTETS = 4;  // octets: 8 elements each, per thread of quantize
constexpr float LEAST_ABS_MAX = 1e-10f;   // equal to llmq/ref/quantize/quantize.py's

#ifndef ABS_MAX  // in compilations of other entries
#define ABS_MAX 0
#endif

// Returns 1 / scale, which x is multiplied by; one thread of the grid writes the scale.
__device__ __forceinline__ float scale_factor(f32* scale, const f32* abs_max) {
    const float m = *abs_max;
    const float value = isfinite(m) ? fmaxf(m, LEAST_ABS_MAX) / Fp8<Q>::MAX : m - m;  // or NaN
    if (blockIdx.x + blockIdx.y + threadIdx.x == 0) { *scale = value; }
    return 1.0f / value;
}

template <class Eight> __device__ __forceinline__ uint2 quantized(const Eight& x, float factor) {
    float v[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) { v[i] = x.get(i) * factor; }
    return make_uint2(to_fp8<Q>(v[0], v[1], v[2], v[3]), to_fp8<Q>(v[4], v[5], v[6], v[7]));
}

// Eight neighbours as loaded: BF16 stays packed, so that many fit in the registers.
struct Octet {
    static constexpr int PARTS = 8 / Vec<T>::N;
    uint4 part[PARTS];

    // Loads zeros unless `inside`.
    __device__ __forceinline__ void load(const T* p, bool inside) {
#pragma unroll
        for (int i = 0; i < PARTS; ++i) {
            part[i] = make_uint4(0, 0, 0, 0);
            if (inside) { part[i] = load_packed_stream(p + i * Vec<T>::N); }
        }
    }
    __device__ __forceinline__ float get(int i) const {
        const uint4& p = part[i / Vec<T>::N];
        const int byte = i % Vec<T>::N * (int)sizeof(T);
        const u32 word = byte < 4 ? p.x : byte < 8 ? p.y : byte < 12 ? p.z : p.w;
        if constexpr (sizeof(T) == 4) { return __uint_as_float(word); }
        return __uint_as_float(byte % 4 ? word & 0xFFFF0000u : word << 16);  // BF16
    }
};

__device__ __forceinline__ void store_16(Q* p, uint4 x) { *reinterpret_cast<uint4*>(p) = x; }

extern "C" __global__ void __launch_bounds__(THREADS)
quantize(Q* __restrict__ q, f32* __restrict__ scale, const T* __restrict__ x,
         const f32* __restrict__ abs_max, i64 n) {
    constexpr int STEP = THREADS * 8;  // from one octet of this thread to the next
    const i64 first = (i64)blockIdx.x * OCTETS * STEP + threadIdx.x * 8;
    Octet loaded[OCTETS];
#pragma unroll
    for (int i = 0; i < OCTETS; ++i) { loaded[i].load(x + first + i * STEP, first + i * STEP < n); }
    const float factor = scale_factor(scale, abs_max);
    const int odd = threadIdx.x & 1;
#pragma unroll
    for (int i = 0; i < OCTETS; i += 2) {
        const uint4 joined =
            join_pair(quantized(loaded[i], factor), quantized(loaded[i + 1], factor));
        const i64 at = first + (i + odd) * STEP - odd * 8;
        if (at < n) { store_16(q + at, joined); }
    }
}

// Write a thread's codes to q and, transposed, to q_t; either may be null. All threads of a block
// call this.
__device__ __forceinline__ void store_tile(Q* q, Q* q_t, const uint2 (&codes)[4],
                                           const OctetPlace& place, i64 rows, i32 cols) {
    __shared__ OctetTile tile;
    if (q != nullptr) {
        OctetTile::store_rows(q, place.row, place.column, cols, codes, place.inside);
    }
    if (q_t != nullptr) {
        tile.put(codes);
        __syncthreads();
        tile.store(q_t, place.first_row, place.first_column, turned_columns(rows), cols);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
quantize_transpose(Q* __restrict__ q, Q* __restrict__ q_t, f32* __restrict__ scale,
                   const T* __restrict__ x, const f32* __restrict__ abs_max, i64 rows, i32 cols) {
    const OctetPlace place(rows, cols);
    OctetRows<T> loaded;
    loaded.load(x + place.row * cols + place.column, cols, place.there);
    const float factor = scale_factor(scale, abs_max);
    uint2 codes[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) { codes[i] = quantized(loaded.row(i), factor); }
    store_tile(q, q_t, codes, place, rows, cols);
}

extern "C" __global__ void __launch_bounds__(THREADS)
quantize_scaled(const T* __restrict__ x, i64 rows, i32 cols, f32* abs_max, Q* __restrict__ codes,
                Q* __restrict__ transposed, const f32* __restrict__ scale, i32* saturated) {
    const OctetPlace place(rows, cols);
    OctetRows<T> loaded;
    loaded.load(x + place.row * cols + place.column, cols, place.there);
    Fp8Encoder<Q, true> encoder(scale);
    u32 largest = 0;
    uint2 result[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const Pack<T, 8> eight = loaded.row(i);
        largest = max(largest, abs_max_bits(eight));
        result[i] = encoder.encode(eight);
    }
    store_tile(codes, transposed, result, place, rows, cols);
    encoder.finish(saturated);
    finish_abs_max<ABS_MAX>(abs_max, largest);
}

// Goes from the last rows to the first: a norm that has just written q leaves q's last rows in the
// L2 cache.
extern "C" __global__ void __launch_bounds__(THREADS)
transpose_codes(Q* __restrict__ q_t, const Q* __restrict__ q, i64 rows, i32 cols) {
    __shared__ CodesTile tile;
    const i64 tile_row = (i64)(gridDim.y - 1 - blockIdx.y) * CodesTile::SIZE;
    const int tile_column = blockIdx.x * CodesTile::SIZE;
    q += blockIdx.z * rows * cols, q_t += blockIdx.z * turned_columns(rows) * cols;
    const i64 row = tile_row + CodesTile::row();
    const int column = tile_column + CodesTile::column();
    uint4 loaded[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        loaded[i] = make_uint4(0, 0, 0, 0);
        if (row < rows && column < cols) {
            loaded[i] = load_packed_stream(q + (row + i) * cols + column);
        }
    }
    tile.put(loaded);
    __syncthreads();
    tile.store(q_t, tile_row, tile_column, turned_columns(rows), cols);
}

extern "C" __global__ void __launch_bounds__(THREADS)
dequantize(T* __restrict__ out, const Q* __restrict__ q, const f32* __restrict__ scale, i64 n) {
    const i64 first = ((i64)blockIdx.x * THREADS + threadIdx.x) * 16;
    if (first >= n) { return; }
    const Pack<Q, 16> in = {load_vec_stream(q + first)};
    const float factor = *scale;
    Pack<T, 16> result;
#pragma unroll
    for (int k = 0; k < 16; ++k) { result.set(k, from_f32<T>(float(in.at(k)) * factor)); }
    result.store(out + first);
}
