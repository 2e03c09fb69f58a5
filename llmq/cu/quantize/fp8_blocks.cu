// fp8_blocks.cu -- E4M3 codes of weights with a scale for each block of 128 rows and 128 columns.
//
//   scales[i, j] = max |x| in block (i, j) / 448        codes = x / scale        x ~ code * scale
//
// Data     x, out: T (rows, columns); codes: E4M3 (rows, columns). All 16-byte aligned. scales: F32
//          (ceil(rows / 128), ceil(columns / 128)). Blocks at the lower and right edge may be
//          smaller. Decoding: several modules, one after another in memory, each with its scales.
// Launch   256 threads. Encoding: a block for each block of the matrix, grid (across, down).
//          Decoding: 16 elements per thread, ceil(rows * columns / 4096) blocks, times modules.
// Cost     inputs read and outputs written once; all accesses but of scales have 16 bytes.
// Needs    columns a multiple of 16.
#include "common.cuh"

constexpr int THREADS = 256, BLOCK = 128, COUNT = 8, DECODED = 16;
constexpr int ACROSS = BLOCK / COUNT, DOWN = THREADS / ACROSS;  // threads across and down
constexpr float LEAST_ABS_MAX = 1e-10f;  // equal to llmq/ref/quantize/quantize.py's

extern "C" __global__ void __launch_bounds__(THREADS)
fp8_blocks_encode(e4m3* __restrict__ codes, f32* __restrict__ scales, const T* __restrict__ x,
                  i64 rows, i64 columns) {
    __shared__ float shared[32];
    const i64 column = (i64)blockIdx.x * BLOCK + threadIdx.x % ACROSS * COUNT;
    const i64 row = (i64)blockIdx.y * BLOCK + threadIdx.x / ACROSS;
    float v[BLOCK / DOWN][COUNT], largest = 0.0f;
#pragma unroll
    for (int i = 0; i < BLOCK / DOWN; ++i) {
        const bool inside = column < columns && row + i * DOWN < rows;
        largest = fmaxf(largest, load_block<1>(v[i], x + (row + i * DOWN) * columns + column, inside));
    }
    largest = block_max(largest, shared);
    const float scale = fmaxf(largest, LEAST_ABS_MAX) / Fp8<e4m3>::MAX, factor = 1.0f / scale;
    if (threadIdx.x == 0) { scales[(i64)blockIdx.y * gridDim.x + blockIdx.x] = scale; }
#pragma unroll
    for (int i = 0; i < BLOCK / DOWN; ++i) {
        if (column >= columns || row + i * DOWN >= rows) { continue; }
        u32 words[2];
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            words[k] = to_fp8<e4m3>(v[i][4 * k] * factor, v[i][4 * k + 1] * factor,
                                    v[i][4 * k + 2] * factor, v[i][4 * k + 3] * factor);
        }
        e4m3* out = codes + (row + i * DOWN) * columns + column;
        *reinterpret_cast<uint2*>(out) = make_uint2(words[0], words[1]);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
fp8_blocks_decode(T* __restrict__ out, const e4m3* __restrict__ codes,
                  const f32* __restrict__ scales, i64 rows, i64 columns) {
    const i64 first = ((i64)blockIdx.x * THREADS + threadIdx.x) * DECODED, n = rows * columns;
    if (first >= n) { return; }
    const i64 down = (rows + BLOCK - 1) / BLOCK, across = (columns + BLOCK - 1) / BLOCK;
    const i64 row = first / columns, column = first - row * columns;
    const float scale =
        scales[(blockIdx.y * down + row / BLOCK) * across + column / BLOCK];
    const Pack<e4m3, DECODED> in = {load_vec_stream(codes + blockIdx.y * n + first)};
    Pack<T, DECODED> result;
#pragma unroll
    for (int k = 0; k < DECODED; ++k) { result.set(k, from_f32<T>(float(in.at(k)) * scale)); }
    result.store(out + blockIdx.y * n + first);
}
