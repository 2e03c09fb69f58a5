// exp_codes.cu -- what codes of exponentials of logits need beside them to be a gradient.
//
//   shift    = bf16(x . weight[target])                 of a masked row: of column 0
//   sum      = the sum of the row's sums + exp(target_logit - shift)
//   lse      = shift + log sum         loss = lse - target_logit, 0 of masked rows
//   factor   = (1 + z_loss * lse) / sum, 0 of masked rows
//   own      = factor * exp(target_logit - shift) - 1: the gradient of the target's logit
//
// So that the gradient of a row's logits is factor * e, and own where e has 0, the target's. It stands
// in no memory. What is multiplied by weight, which sums over the columns, is put right afterwards:
// d = factor * d + own * weight[target] (exp_codes_input). For the gradient of weight, which sums over
// rows, exp_codes_turn multiplies the codes while it transposes them.
//
// Where a tile's sum is above LARGEST, one of its codes may have been clamped: such a row gets another
// shift, with which its sum is AGAIN, and its bit in `masks`. exp_codes_gather puts the row's x into a
// list, of which exp_codes_again (matmul_exp_codes.cu) makes codes once more. A loss of more than 88,
// of which F32 has no exponential, is infinite.
//
// Data     codes: e5m2 (rows, columns), as matmul_exp_codes.cu writes it; turned: e5m2 (columns, rows).
//          losses, lse, factors, own, shift, target_logits: F32 (rows). sums: F32 (tiles, rows). x: e4m3
//          (rows, K), weight: e4m3 (columns, K), scale_x, scale_weight: F32 (1). d: bf16 (rows, K).
//          targets: I32 (rows); negative: masked. masks: I32 (ceil(rows / 32)), a bit for each row.
//          listed: I32 (1 + rows): how many there are, and which; listed_x: e4m3 (rows, K).
// Launch   256 threads. shift, input: a warp for each row. finish, gather: a block for 32 rows. turn: a
//          block for 128 rows and 128 columns, grid (across, down).
// Cost     shift reads x and as many rows of weight; finish sums; input reads and writes d, and reads
//          a row of weight for each of its rows; turn reads codes and writes as many.
// Needs    K, columns and rows multiples of 16, target < columns.
// Same name  llmq/ops/exp_codes.py  llmq/ref/exp_codes.py  tests/ops/test_exp_codes.py
#include "common.cuh"
#include "fp8.cuh"
#include "ptx.cuh"

constexpr int THREADS = 256, ROW_WARPS = THREADS / 32, BLOCK_ROWS = 32;
constexpr float LOG2E = 1.4426950408889634f, INFINITE = 3.0e38f;

extern "C" __global__ void __launch_bounds__(THREADS)
exp_codes_shift(f32* __restrict__ shift, const e4m3* __restrict__ x, const e4m3* __restrict__ weight,
                const f32* __restrict__ scale_x, const f32* __restrict__ scale_weight,
                const i32* __restrict__ targets, i32 rows, i32 K) {
    const int row = blockIdx.x * ROW_WARPS + threadIdx.x / 32;
    if (row >= rows) { return; }
    const e4m3* const of_x = x + (i64)row * K;
    const e4m3* const of_weight = weight + (i64)max(targets[row], 0) * K;
    float sum = 0.0f;
    for (int i = threadIdx.x % 32 * 16; i < K; i += 32 * 16) {
        const uint4 a = *reinterpret_cast<const uint4*>(of_x + i);
        const uint4 b = *reinterpret_cast<const uint4*>(of_weight + i);
        const u32 left[4] = {a.x, a.y, a.z, a.w}, right[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
        for (int k = 0; k < 8; ++k) {
            const float2 two = from_fp8<e4m3>(left[k / 2] >> k % 2 * 16 & 0xFFFF);
            const float2 by = from_fp8<e4m3>(right[k / 2] >> k % 2 * 16 & 0xFFFF);
            sum = fmaf(two.x, by.x, fmaf(two.y, by.y, sum));
        }
    }
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) {
        shift[row] = to_f32(__float2bfloat16(sum * (*scale_x * *scale_weight)));
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
exp_codes_finish(f32* __restrict__ losses, f32* __restrict__ lse, f32* __restrict__ factors,
                 f32* __restrict__ own, i32* __restrict__ masks, f32* shift,
                 const f32* __restrict__ sums, const f32* __restrict__ target_logits,
                 const i32* __restrict__ targets, i32 rows, i32 tiles, f32 z_loss, f32 largest,
                 f32 again) {
    __shared__ float parts[ROW_WARPS][BLOCK_ROWS], most[ROW_WARPS][BLOCK_ROWS];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int row = blockIdx.x * BLOCK_ROWS + lane;
    float part = 0.0f, above = 0.0f;
    if (row < rows) {
#pragma unroll 4
        for (int t = warp; t < tiles; t += ROW_WARPS) {
            const float x = sums[(i64)t * rows + row];
            part += x;
            above = fmaxf(above, x);
        }
    }
    parts[warp][lane] = part, most[warp][lane] = above;
    __syncthreads();
    if (warp != 0) { return; }
    bool clamped = false;
    if (row < rows) {
        float others = 0.0f;
        above = 0.0f;
#pragma unroll
        for (int w = 0; w < ROW_WARPS; ++w) {
            others += parts[w][lane];
            above = fmaxf(above, most[w][lane]);
        }
        const int target = targets[row];
        const float before = shift[row], logit = target < 0 ? 0.0f : target_logits[row];
        const float of_target = target < 0 ? 0.0f : exp2_approx((logit - before) * LOG2E);
        const float sum = others + of_target, row_lse = before + logf(sum);
        lse[row] = row_lse;
        float loss = 0.0f, factor = 0.0f, d_target = 0.0f;
        if (target >= 0) {
            clamped = above > largest && sum <= INFINITE;
            if (clamped) { shift[row] = row_lse - logf(again); }
            const float more = z_loss * row_lse;
            loss = row_lse - logit;
            factor = (1.0f + more) / (clamped ? again : sum);
            d_target = (more * of_target - others) / sum;
        }
        losses[row] = loss, factors[row] = factor, own[row] = d_target;
    }
    const u32 mask = __ballot_sync(~0u, clamped);
    if (lane == 0) { masks[blockIdx.x] = (i32)mask; }
}

extern "C" __global__ void __launch_bounds__(THREADS)
exp_codes_gather(i32* __restrict__ listed, e4m3* __restrict__ listed_x,
                 const i32* __restrict__ masks, const e4m3* __restrict__ x, i32 rows, i32 K) {
    __shared__ int shared[32];
    const u32 mask = masks[blockIdx.x];
    if (blockIdx.x > 0 && mask == 0) { return; }
    // The first block counts all, and no other one before itself.
    const int words = blockIdx.x == 0 ? gridDim.x : blockIdx.x;
    int before = 0;
    for (int i = threadIdx.x; i < words; i += THREADS) { before += __popc(masks[i]); }
    before = block_sum(before, shared);
    if (blockIdx.x == 0) {
        if (threadIdx.x == 0) { listed[0] = before; }
        before = 0;
    }
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int i = warp; i < BLOCK_ROWS; i += ROW_WARPS) {
        if ((mask >> i & 1) == 0) { continue; }
        const int row = blockIdx.x * BLOCK_ROWS + i;
        const int index = before + __popc(mask & (1u << i) - 1);
        if (lane == 0) { listed[1 + index] = row; }
        for (int k = lane * 16; k < K; k += 32 * 16) {
            *reinterpret_cast<uint4*>(listed_x + (i64)index * K + k) =
                *reinterpret_cast<const uint4*>(x + (i64)row * K + k);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
exp_codes_input(bf16* __restrict__ d, const f32* __restrict__ factors, const f32* __restrict__ own,
                const e4m3* __restrict__ weight, const f32* __restrict__ scale_weight,
                const i32* __restrict__ targets, i32 rows, i32 K) {
    const int row = blockIdx.x * ROW_WARPS + threadIdx.x / 32;
    if (row >= rows) { return; }
    const int target = targets[row];
    const bool counts = target >= 0;  // or nothing is left, also not of a NaN
    const float factor = factors[row], by = own[row] * *scale_weight;
    const e4m3* const of_weight = weight + (i64)max(target, 0) * K;
    for (int i = threadIdx.x % 32 * 8; i < K; i += 32 * 8) {
        bf16* const place = d + (i64)row * K + i;
        Vec<bf16> y = load_vec(place);
        const uint2 codes = *reinterpret_cast<const uint2*>(of_weight + i);
#pragma unroll
        for (int k = 0; k < 8; k += 2) {
            const float2 w = from_fp8<e4m3>((k < 4 ? codes.x : codes.y) >> k % 4 * 8 & 0xFFFF);
            const float a = fmaf(by, w.x, to_f32(y[k]) * factor);
            const float b = fmaf(by, w.y, to_f32(y[k + 1]) * factor);
            y.set_two(k, counts ? a : 0.0f, counts ? b : 0.0f);
        }
        store_vec(place, y);
    }
}

// Four codes of one row, times a power of two or any other factor. E5M2 is the upper byte of a half.
__device__ __forceinline__ u32 scaled(u32 codes, __half2 factor) {
    const u32 halves[2] = {__byte_perm(codes, 0, 0x1404), __byte_perm(codes, 0, 0x3424)};
    u32 result = 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const __half2 product = __hmul2(*reinterpret_cast<const __half2*>(&halves[i]), factor);
        const __half2_raw raw = *reinterpret_cast<const __half2_raw*>(&product);
        result |= (u32)__nv_cvt_halfraw2_to_fp8x2(raw, __NV_SATFINITE, __NV_E5M2) << 16 * i;
    }
    return result;
}

// As transpose_codes of quantize.cu, of codes that are multiplied before.
extern "C" __global__ void __launch_bounds__(THREADS)
exp_codes_turn(e5m2* __restrict__ turned, const e5m2* __restrict__ codes,
               const f32* __restrict__ factors, const f32* __restrict__ own,
               const i32* __restrict__ targets, i32 rows, i32 columns, f32 over_scale) {
    constexpr float LARGEST_HALF = 65504.0f;
    __shared__ CodesTile tile;
    const i64 tile_row = (i64)(gridDim.y - 1 - blockIdx.y) * CodesTile::SIZE;
    const int tile_column = blockIdx.x * CodesTile::SIZE;
    const i64 row = tile_row + CodesTile::row();
    const int column = tile_column + CodesTile::column();
    uint4 loaded[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) { loaded[i] = make_uint4(0, 0, 0, 0); }
    float4 factor = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    int4 target = make_int4(-1, -1, -1, -1);
    if (row < rows && column < columns) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            loaded[i] = load_packed_stream(codes + (row + i) * columns + column);
        }
        factor = *reinterpret_cast<const float4*>(factors + row);
        target = *reinterpret_cast<const int4*>(targets + row);
    }
    const float of_row[4] = {factor.x, factor.y, factor.z, factor.w};
    const int target_of[4] = {target.x, target.y, target.z, target.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float by = of_row[i] * over_scale;
        const __half2 factor = __float2half2_rn(by > LARGEST_HALF ? LARGEST_HALF : by);
        uint4& x = loaded[i];
        x = make_uint4(scaled(x.x, factor), scaled(x.y, factor), scaled(x.z, factor),
                       scaled(x.w, factor));
        const u32 place = target_of[i] - column;
        if (place < 16) {
            const u32 code = to_fp8<e5m2>(own[row + i] * over_scale, 0.0f, 0.0f, 0.0f) & 0xFF;
            const u32 at = code << place % 4 * 8;  // where there is a 0
            x = make_uint4(x.x | (place / 4 == 0 ? at : 0), x.y | (place / 4 == 1 ? at : 0),
                           x.z | (place / 4 == 2 ? at : 0), x.w | (place / 4 == 3 ? at : 0));
        }
    }
    tile.put(loaded);
    __syncthreads();
    tile.store(turned, tile_row, tile_column, rows, columns);
}
