// delta_chunk.cuh -- what the kernels of the gated delta rule share: where a block is, what is known of
// a chunk of 64 tokens, and products of its rows in shared memory, as F32 FMAs. 256 threads.
//
// A warp computes 8 rows of a chunk; its lanes have neighbouring columns.
#pragma once
#include "common.cuh"

constexpr int CHUNK = 64, SLICE = 32, THREADS = 256;
constexpr int ROWS = 8;  // of a chunk, that a warp computes
constexpr int PADDED = DK + 1;  // floats of a row that lanes read the same column of
constexpr int LANE_KEYS = DK / 32, WARP_KEYS = DK / 8;
constexpr float EPS = 1e-6f;

__device__ __forceinline__ int lane_id() { return threadIdx.x % 32; }
__device__ __forceinline__ int warp_id() { return threadIdx.x / 32; }

// The place of a block: a value head of a sequence, and how its rows lie in tensors.
struct Place {
    i64 batch;
    int head, key_head, key_heads, value_heads, seq_len, chunks;

    __device__ __forceinline__ Place(int head, int seq_len, int key_heads, int value_heads)
        : batch(blockIdx.z), head(head), key_head(head / (value_heads / key_heads)),
          key_heads(key_heads), value_heads(value_heads), seq_len(seq_len),
          chunks((seq_len + CHUNK - 1) / CHUNK) {}
    __device__ __forceinline__ i64 token(int t) const { return batch * seq_len + t; }
    __device__ __forceinline__ int columns() const {
        return 2 * key_heads * DK + value_heads * DV;
    }
    __device__ __forceinline__ i64 query(int t) const {
        return token(t) * columns() + key_head * DK;
    }
    __device__ __forceinline__ i64 key(int t) const { return query(t) + key_heads * DK; }
    __device__ __forceinline__ i64 value(int t) const {
        return token(t) * columns() + 2 * key_heads * DK + head * DV;
    }
    __device__ __forceinline__ i64 out(int t) const {  // of changes too
        return (token(t) * value_heads + head) * DV;
    }
    __device__ __forceinline__ i64 gate(int t) const { return token(t) * 2 * value_heads + head; }
    __device__ __forceinline__ i64 of_head() const { return batch * value_heads + head; }
    __device__ __forceinline__ i64 of_chunk(int chunk) const { return of_head() * chunks + chunk; }
};

// A chunk's tokens, in shared memory. begin: the first of each one's document in
// the chunk, -1: in front of it. sums: of decays since then.
struct Chunk {
    int begin[CHUNK];
    float sums[CHUNK], beta[CHUNK], from_state[CHUNK];
    float to_state[CHUNK];  // the decays themselves, before their sums are known

    // All threads call it; they may read when it returns.
    __device__ __forceinline__ void load(const Place& at, int first,
                                         const float* __restrict__ gates,
                                         const int* __restrict__ starts, int carried) {
        const int i = threadIdx.x;
        __syncthreads();
        if (i < CHUNK) {
            const int t = first + i;
            const bool there = t < at.seq_len;
            const int known = there ? t : at.seq_len - 1;
            const int start = starts ? __ldg(starts + at.token(known)) : carried ? -1 : 0;
            begin[i] = max(start - first, -1);
            to_state[i] = there && start != t ? gates[at.gate(t)] : 0.0f;
            beta[i] = there ? gates[at.gate(t) + at.value_heads] : 0.0f;
        }
        __syncthreads();
        if (i < CHUNK) {
            float sum = 0.0f;
            for (int j = max(begin[i], 0); j <= i; ++j) { sum += to_state[j]; }
            sums[i] = sum;
            from_state[i] = begin[i] < 0 ? expf(sum) : 0.0f;
        }
        __syncthreads();
        if (i < CHUNK) { to_state[i] = decays(CHUNK - 1, i); }
        __syncthreads();
    }
    // From token j to token i.
    __device__ __forceinline__ float decays(int i, int j) const {
        return j <= i && j >= begin[i] ? expf(sums[i] - sums[j]) : 0.0f;
    }
    __device__ __forceinline__ float whole() const { return from_state[CHUNK - 1]; }
};

// Rows of queries or keys of a chunk to shared memory, of length 1 times scale; 0 behind the end.
template <int STRIDE>
__device__ __forceinline__ void load_units(float* to, const T* from, int row_stride, int rows,
                                           float scale, float* lengths = nullptr) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        const int i = warp_id() * ROWS + r;
        float x[LANE_KEYS], squares = 0.0f;
#pragma unroll
        for (int m = 0; m < LANE_KEYS; ++m) {
            x[m] = i < rows ? to_f32(from[(i64)i * row_stride + lane_id() + 32 * m]) : 0.0f;
            squares = fmaf(x[m], x[m], squares);
        }
        const float length = 1.0f / sqrtf(warp_sum(squares) + EPS);
        if (lengths && lane_id() == 0) { lengths[i] = length; }
#pragma unroll
        for (int m = 0; m < LANE_KEYS; ++m) {
            to[i * STRIDE + lane_id() + 32 * m] = x[m] * length * scale;
        }
    }
}

// 32 columns of a chunk's rows of T or F32 to shared memory; 0 behind the end.
template <int STRIDE, class E>
__device__ __forceinline__ void load_slice(float* to, const E* from, int row_stride, int rows) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        const int i = warp_id() * ROWS + r;
        to[i * STRIDE + lane_id()] =
            i < rows ? to_f32(from[(i64)i * row_stride + lane_id()]) : 0.0f;
    }
}

__device__ __forceinline__ void load_square(float* to, const float* __restrict__ from) {
    for (int i = threadIdx.x; i < CHUNK * CHUNK / 4; i += THREADS) {
        reinterpret_cast<float4*>(to)[i] = reinterpret_cast<const float4*>(from)[i];
    }
}

// sums[r] += rows of this warp of a (64, WIDTH) times column `lane` of b (WIDTH, 32), of which the
// first `end` are not 0.
template <int WIDTH>
__device__ __forceinline__ void add_rows(float (&sums)[ROWS], const float* a, const float* b,
                                         int end) {
    for (int k = 0; k < end; k += 4) {
        float y[4];
#pragma unroll
        for (int n = 0; n < 4; ++n) { y[n] = b[(k + n) * SLICE + lane_id()]; }
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            const float4 x =
                *reinterpret_cast<const float4*>(a + (warp_id() * ROWS + r) * WIDTH + k);
            sums[r] = fmaf(x.w, y[3], fmaf(x.z, y[2], fmaf(x.y, y[1], fmaf(x.x, y[0], sums[r]))));
        }
    }
}

// sums[r] += COUNT columns of a (64, WIDTH), from `column` on, times column `lane` of b (64, 32),
// rows [first, 64), each with its factor.
template <int WIDTH, int COUNT, class Factor>
__device__ __forceinline__ void add_columns(float (&sums)[COUNT], const float* a, int column,
                                            const float* b, int first, Factor factor) {
    for (int i = first; i < CHUNK; ++i) {
        const float y = factor(i) * b[i * SLICE + lane_id()];
#pragma unroll
        for (int n = 0; n < COUNT; n += 4) {
            const float4 x = *reinterpret_cast<const float4*>(a + i * WIDTH + column + n);
            sums[n] = fmaf(x.x, y, sums[n]);
            sums[n + 1] = fmaf(x.y, y, sums[n + 1]);
            sums[n + 2] = fmaf(x.z, y, sums[n + 2]);
            sums[n + 3] = fmaf(x.w, y, sums[n + 3]);
        }
    }
}

// Row i of this warp's, of a (64, WIDTH), in shared memory: one column in each lane.
__device__ __forceinline__ void put_rows(float* to, const float (&values)[ROWS]) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) { to[(warp_id() * ROWS + r) * SLICE + lane_id()] = values[r]; }
}

// This thread's elements of 32 columns of a state, in shared memory (DK, 32), and of all of it.
template <class Use> __device__ __forceinline__ void each_key(Use use) {
#pragma unroll
    for (int n = 0; n < WARP_KEYS; ++n) {
        const int d = warp_id() * WARP_KEYS + n;
        use(n, d * SLICE + lane_id(), (i64)d * DV + blockIdx.x * SLICE + lane_id());
    }
}

__device__ __forceinline__ float query_scale() { return 1.0f / sqrtf((float)DK); }

// y[r][m] = sum over DV of rows of this warp of w, with columns lane + 32 m of a state transposed.
// SECOND: also the sum over the state of its products with `second`, of this thread's elements.
template <class E, bool SECOND>
__device__ __forceinline__ float times_state(float (&y)[ROWS][LANE_KEYS], float* memory,
                                             const E* w, int row_stride, int rows,
                                             const float* __restrict__ state,
                                             const float* __restrict__ second) {
    float* const slice = memory;               // (64, 32)
    float* const turned = memory + CHUNK * SLICE;  // (32, PADDED)
    float both = 0.0f;
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
#pragma unroll
        for (int m = 0; m < LANE_KEYS; ++m) { y[r][m] = 0.0f; }
    }
    for (int n = 0; n < DV; n += SLICE) {
        __syncthreads();
        load_slice<SLICE>(slice, w + n, row_stride, rows);
        for (int d = warp_id(); d < DK; d += THREADS / 32) {
            const float x = state[(i64)d * DV + n + lane_id()];
            if (SECOND) { both = fmaf(x, second[(i64)d * DV + n + lane_id()], both); }
            turned[lane_id() * PADDED + d] = x;
        }
        __syncthreads();
#pragma unroll 2
        for (int j = 0; j < SLICE; ++j) {
            float column[LANE_KEYS];
#pragma unroll
            for (int m = 0; m < LANE_KEYS; ++m) {
                column[m] = turned[j * PADDED + lane_id() + 32 * m];
            }
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                const float x = slice[(warp_id() * ROWS + r) * SLICE + j];
#pragma unroll
                for (int m = 0; m < LANE_KEYS; ++m) { y[r][m] = fmaf(x, column[m], y[r][m]); }
            }
        }
    }
    return both;
}
