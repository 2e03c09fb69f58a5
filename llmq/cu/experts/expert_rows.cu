// expert_rows.cu -- rows sorted by the experts that they go to, and the experts' results per row.
//
// Row s has top_k choices, s * top_k + k. A stable counting sort orders the choices by expert:
// order[r] is the choice at place r, place the inverse of order, and starts[e] the place of expert
// e's first choice:
//
//   rows_count             counts the choices of each expert in each block of CHUNK choices
//   rows_scan              counts become the first place of each block's choices for each expert
//   rows_place             each block places its choices; its warps take 32 at a time
//   rows_gather            out[place[s, k]] = x[s]
//   rows_combine           out[s] = sum over k of weights[s, k] * y[place[s, k]] [+ addend[s]]
//   rows_combine_backward  at r = place[s, k]: d_weights[s, k] = dot product of d_y[r] and y[r],
//                          d_y[r] *= weights[s, k], weighted[r] = weights[s, k] * y[r]
//   rows_sum               d_sum[e] = or += the sum of weights[order[r]] * x[r], r in [starts[e],
//                          starts[e + 1])
//
// Data     declared in llmq/ops/experts/expert_rows.py. addend may be out, weighted may be y.
// Launch   256 threads. count, place: a block for each `chunk` = 2048 choices. scan: one block of
//          1024. gather: a warp for 2 KiB of a row. combine: a warp for 256 columns of a row.
//          combine_backward: a warp for each choice. sum: (C / 256, E) blocks.
// Cost     gather: x read and out written once. combine: y read once, four rows
//          in flight together. combine_backward: y and d_y read, d_y and weighted written once.
// Needs    0 <= chosen < E <= 512; top_k at most 32. scalars' seed, step and micro_step, if the
//          kernel adds to a BF16 sum.
#include "common.cuh"

constexpr u32 ALL = 0xFFFFFFFFu;
constexpr int THREADS = 256, WARPS = THREADS / 32, SCAN_THREADS = 1024;
constexpr int MOST = 512;                     // most experts
constexpr int CHUNK = 2048, OWN = CHUNK / WARPS;  // choices per block and per warp
constexpr int WIDTH = 8, SLICE = 32 * WIDTH;  // columns per lane and per warp

extern "C" __global__ void __launch_bounds__(THREADS)
rows_count(i32* __restrict__ counts, const i32* __restrict__ chosen, i32 n, i32 E, i32 chunk) {
    __shared__ i32 count[MOST];
    for (int e = threadIdx.x; e < E; e += THREADS) { count[e] = 0; }
    __syncthreads();
    const i64 first = (i64)blockIdx.x * CHUNK;
#pragma unroll
    for (int i = threadIdx.x; i < CHUNK; i += THREADS) {
        if (first + i < n) { atomicAdd(&count[chosen[first + i]], 1); }
    }
    __syncthreads();
    for (int e = threadIdx.x; e < E; e += THREADS) { counts[(i64)blockIdx.x * E + e] = count[e]; }
}

// One thread for each expert.
extern "C" __global__ void __launch_bounds__(SCAN_THREADS)
rows_scan(i32* __restrict__ starts, i32* __restrict__ counts, i32 blocks, i32 E) {
    __shared__ i32 of_warp[32];
    const int e = threadIdx.x, lane = e % 32, warp = e / 32;
    const bool there = e < E;
    i32 total = 0;
    if (there) {
#pragma unroll 8
        for (int b = 0; b < blocks; ++b) { total += counts[(i64)b * E + e]; }
    }
    i32 sum = total;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        const i32 other = __shfl_up_sync(ALL, sum, distance);
        if (lane >= distance) { sum += other; }
    }
    if (lane == 31) { of_warp[warp] = sum; }
    __syncthreads();
    for (int w = 0; w < warp; ++w) { sum += of_warp[w]; }
    if (!there) { return; }
    i32 next = sum - total;
    starts[e] = next;
    if (e == E - 1) { starts[E] = sum; }
#pragma unroll 8
    for (int b = 0; b < blocks; ++b) {
        i32* const count = counts + (i64)b * E + e;
        const i32 here = *count;
        *count = next;
        next += here;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
rows_place(i32* __restrict__ order, i32* __restrict__ place, const i32* __restrict__ chosen,
           const i32* __restrict__ counts, i32 n, i32 E, i32 chunk) {
    __shared__ i32 next[WARPS][MOST];  // number of a warp's choices by expert, then their places
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const i64 first = (i64)blockIdx.x * CHUNK + warp * OWN;
    for (int e = lane; e < E; e += 32) { next[warp][e] = 0; }
    __syncwarp();
    i32 mine[OWN / 32];
#pragma unroll
    for (int i = 0; i < OWN / 32; ++i) {
        const i64 at = first + 32 * i + lane;
        mine[i] = at < n ? chosen[at] : -1;
        if (at < n) { atomicAdd(&next[warp][mine[i]], 1); }
    }
    __syncthreads();
    for (int e = threadIdx.x; e < E; e += THREADS) {
        i32 at = counts[(i64)blockIdx.x * E + e];
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
            const i32 here = next[w][e];
            next[w][e] = at;
            at += here;
        }
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < OWN / 32; ++i) {
        const u32 peers = __match_any_sync(ALL, mine[i]);
        const int rank = __popc(peers & ((1u << lane) - 1));
        const bool valid = mine[i] >= 0;
        const i32 to = valid ? next[warp][mine[i]] + rank : 0;
        __syncwarp();
        if (valid && rank == 0) { next[warp][mine[i]] += __popc(peers); }
        __syncwarp();
        if (valid) {
            const i32 choice = (i32)(first + 32 * i + lane);
            order[to] = choice;
            place[choice] = to;
        }
    }
}

// A warp reads 2 KiB of a row once, and writes these bytes to all of the row's places.
extern "C" __global__ void __launch_bounds__(THREADS)
rows_gather(Q* __restrict__ out, const Q* __restrict__ x, const i32* __restrict__ place, i32 rows,
            i32 C, i32 top_k) {
    constexpr int UNITS = 4;  // units of 16 bytes per lane
    const int units = C * (int)sizeof(Q) / 16, pieces = (units + 32 * UNITS - 1) / (32 * UNITS);
    const i64 warp = (i64)blockIdx.x * WARPS + threadIdx.x / 32, s = warp / pieces;
    if (s >= rows) { return; }
    const int first = warp % pieces * 32 * UNITS + threadIdx.x % 32;
    const uint4* const row = reinterpret_cast<const uint4*>(x) + s * units;
    uint4 part[UNITS];
#pragma unroll
    for (int u = 0; u < UNITS; ++u) {
        if (first + u * 32 < units) { part[u] = row[first + u * 32]; }
    }
#pragma unroll 4
    for (int k = 0; k < top_k; ++k) {
        uint4* const to = reinterpret_cast<uint4*>(out) + (i64)place[s * top_k + k] * units;
#pragma unroll
        for (int u = 0; u < UNITS; ++u) {
            if (first + u * 32 < units) { to[first + u * 32] = part[u]; }
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
rows_combine(T* out, const T* __restrict__ y, const i32* __restrict__ place,
             const f32* __restrict__ weights, const T* addend, i32 rows, i32 C, i32 top_k) {
    constexpr int AT_ONCE = 4;  // rows whose loads are in flight together
    const int lane = threadIdx.x % 32, slices = (C + SLICE - 1) / SLICE;
    const i64 item = (i64)blockIdx.x * WARPS + threadIdx.x / 32, s = item / slices;
    const int c = (int)(item % slices) * SLICE + lane * WIDTH;
    if (s >= rows) { return; }
    const i32 at = lane < top_k ? place[s * top_k + lane] : 0;
    const float weight = weights && lane < top_k ? weights[s * top_k + lane] : 1.0f;
    float sum[WIDTH];
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) { sum[i] = -0.0f; }  // adding -0 changes no number
    for (int first = 0; first < top_k; first += AT_ONCE) {
        Pack<T, WIDTH> part[AT_ONCE];
#pragma unroll
        for (int u = 0; u < AT_ONCE; ++u) {
            const i64 from = __shfl_sync(ALL, at, first + u & 31);
            if (first + u < top_k && c < C) { part[u].load(y + from * C + c); }
        }
#pragma unroll
        for (int u = 0; u < AT_ONCE; ++u) {
            const float w = __shfl_sync(ALL, weight, first + u & 31);
            if (first + u < top_k && c < C) {
#pragma unroll
                for (int i = 0; i < WIDTH; ++i) {
                    sum[i] += weights ? w * part[u].get(i) : part[u].get(i);
                }
            }
        }
    }
    if (c >= C) { return; }
    Pack<T, WIDTH> result;
    if (addend) {
        result.load(addend + s * C + c);
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) { sum[i] += result.get(i); }
    }
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) { result.set(i, from_f32<T>(sum[i])); }
    result.store(out + s * C + c);
}

extern "C" __global__ void __launch_bounds__(THREADS)
rows_combine_backward(T* __restrict__ d_y, f32* __restrict__ d_weights, T* weighted, const T* y,
                      const i32* __restrict__ place, const f32* __restrict__ weights, i32 rows, i32 C,
                      i32 top_k) {
    const int lane = threadIdx.x % 32;
    const i64 choice = (i64)blockIdx.x * WARPS + threadIdx.x / 32;
    if (choice >= (i64)rows * top_k) { return; }
    const i64 row = (i64)place[choice] * C;
    const float weight = weights[choice];
    float dot = 0.0f;
#pragma unroll 2
    for (int c = lane * WIDTH; c < C; c += SLICE) {
        Pack<T, WIDTH> d, value;
        d.load(d_y + row + c);
        value.load(y + row + c);
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) {
            dot += d.get(i) * value.get(i);
            d.set(i, from_f32<T>(d.get(i) * weight));
            value.set(i, from_f32<T>(value.get(i) * weight));
        }
        d.store(d_y + row + c);
        if (weighted) { value.store(weighted + row + c); }
    }
    dot = warp_sum(dot);
    if (lane == 0) { d_weights[choice] = dot; }
}

extern "C" __global__ void __launch_bounds__(THREADS)
rows_sum(G* d_sum, const T* __restrict__ x, const f32* __restrict__ weights,
         const i32* __restrict__ order, const StepScalars* __restrict__ scalars,
         const i32* __restrict__ starts, i32 C, i32 E, i32 accumulate, u32 salt) {
    __shared__ float partial[WARPS][SLICE];  // each warp's sums, of every eighth row
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, e = blockIdx.y;
    const int first = blockIdx.x * SLICE, column = first + lane * WIDTH;
    const int start = starts[e], end = starts[e + 1];
    if (start == end && accumulate) { return; }
    float sum[WIDTH] = {};
    if (column < C) {
#pragma unroll 4
        for (int r = start + warp; r < end; r += WARPS) {
            Pack<T, WIDTH> part;
            part.load(x + (i64)r * C + column);
            const float weight = weights ? weights[order[r]] : 1.0f;
#pragma unroll
            for (int i = 0; i < WIDTH; ++i) { sum[i] = fmaf(weight, part.get(i), sum[i]); }
        }
    }
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) { partial[warp][lane * WIDTH + i] = sum[i]; }
    __syncthreads();
    const int c = first + threadIdx.x;
    if (c < C) {
        float total = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) { total += partial[w][threadIdx.x]; }
        store_gradient(d_sum, (i64)e * C + c, total, accumulate, gradient_seed(scalars, salt));
    }
}
