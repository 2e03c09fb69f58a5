// paged.cu -- attention of a few tokens of many sequences to keys and values in blocks of one pool.
//
//   store:   rows lengths[s] + [0, new[s]) of the caches = keys and values of qkv
//   attend:  out = softmax(scale q k^T) v of the keys that query i of sequence s, at position
//            p = lengths[s] + i, sees: positions max(0, p - window + 1) to p
//   decode:  store and attend of few tokens, whose keys are divided over blocks
//
// Data     qkv: T (S, n, Hq + 2 Hkv, HEAD_DIM), rotated; out: T (S, n, Hq, VALUE_DIM), 0 from query
//          new[s] on. k_cache, v_cache: C (blocks, BLOCK_SIZE, Hkv, HEAD_DIM); position p of
//          sequence s is row p % BLOCK_SIZE of block table[s][p / BLOCK_SIZE]. LATENT: v_cache is
//          null, and values are the first VALUE_DIM channels of keys; else VALUE_DIM is HEAD_DIM.
//          C, the caches' type: T, or E4M3 codes relative to a power of two for each row of a head.
//          scales: these powers, BF16 (blocks, BLOCK_SIZE, Hkv, 2), for keys and for values; null
//          if C is T. sinks: T (Hq), each head's score for attending to nothing, or null.
//          partial: F32 (S, n, Hq, splits, VALUE_DIM), weighted sums of values over SPLIT
//          positions. stats: F32 (S, n, Hq, splits, 2), the split's largest score times log2(e),
//          and its sum of probabilities. arrived: I32 (S tiles, Hkv), zeros before and after the
//          kernel. T: BF16 (tensor cores; probabilities are rounded before products) or F32. Sums
//          and stats are F32.
// Launch   store: 256 threads, one for each 16 bytes of new keys, grid (blocks, S). attend, decode:
//          128 threads and dynamic shared memory (llmq/ops/attention/paged.py); a block has ROWS
//          pairs of query and head that share a key/value head. attend: grid (Hkv, S tiles).
//          decode: grid (x, Hkv, S tiles), any x: each block takes every x-th split, and the one
//          that arrives last adds their results.
// Cost     memory: keys and values once for each tile of ROWS pairs. Blocks for idle sequences, and
//          for splits beyond a sequence's end, end at once.
// Needs    sm_80; HEAD_DIM and VALUE_DIM multiples of 8, up to 512, with LATENT up to 576; above 256,
//          and with LATENT, ROWS is 16. A result depends only on its own sequence: steps and splits
//          begin at multiples of STEP and SPLIT, all entries add splits one after the other, and
//          keys that a query does not see change no bit. decode: several blocks may store the same
//          keys; with stores = 0 no block stores.
#ifndef SOFTCAP
#define SOFTCAP 0  // none
#endif
#include "attention/paged_tiles.cuh"
#include "common.cuh"
#include "ptx.cuh"

constexpr float CAP = (SOFTCAP ? SOFTCAP : 1) * LOG2E;  // limit of scores times log2(e)

// Factors of two sums that are added, because each sum is relative to its own largest score.
struct Factors {
    float old, added;
};
__device__ __forceinline__ Factors merge(float& top, float& total, float more_top,
                                         float more_total) {
    const float largest = fmaxf(top, more_top), base = largest == -INFINITY ? 0.0f : largest;
    const Factors f = {exp2_approx(top - base), exp2_approx(more_top - base)};
    total = fmaf(more_total, f.added, total * f.old);
    top = largest;
    return f;
}

// A block's pairs of query and head: rows first_row + [0, ROWS) among a sequence's pairs whose
// heads share one key/value head.
struct Block {
    const C *k, *v;     // caches, from the key/value head on
    const u32* scales;  // pairs of scales of keys and values, from the key/value head on
    int kv_heads;
    const int* table;
    i64 pitch;  // elements from a position of a cache's block to the next
    T *queries, *stages, *probs;
    float *scores, *factors;  // factors: two for each row
    float scale;              // scale of scores, times log2(e)
    int length, count, first_row, group, window, first_head;
    i64 first_token;
    int position[TURNS];  // positions of rows threadIdx.x / 8 + 16 turn

    __device__ __forceinline__ Block(const T* qkv, const C* k_cache, const C* v_cache,
                                     const bf16* scales_of, const int* tables, const int* lengths, const int* new_tokens,
                                     int n, int max_blocks, int num_heads, int num_kv_heads,
                                     int window, float scale, int kv_head, int tile, char* shared,
                                     float* factors)
        : factors(factors), scale(scale * LOG2E), window(window) {
        group = num_heads / num_kv_heads;
        const int tiles = (n * group + ROWS - 1) / ROWS, sequence = tile / tiles;
        first_row = tile % tiles * ROWS;
        first_head = kv_head * group;
        first_token = (i64)sequence * n;
        length = lengths[sequence];
        count = min(ROWS, new_tokens[sequence] * group - first_row);
        pitch = (i64)num_kv_heads * HEAD_DIM;
        k = k_cache + kv_head * HEAD_DIM, v = v_cache + kv_head * HEAD_DIM;
        scales = reinterpret_cast<const u32*>(scales_of) + kv_head, kv_heads = num_kv_heads;
        table = tables + (i64)sequence * max_blocks;
        queries = reinterpret_cast<T*>(shared);
        stages = queries + ROWS * PITCH;
        scores = reinterpret_cast<float*>(stages + STAGES * TILES * TILE);
        probs = reinterpret_cast<T*>(scores + ROWS * SCORES);
        if (count <= 0) { return; }
#pragma unroll
        for (int turn = 0; turn < TURNS; ++turn) {
            position[turn] = position_of(threadIdx.x / 8 + 16 * turn);
        }
        const i64 row_pitch = (i64)(num_heads + 2 * num_kv_heads) * HEAD_DIM;
        for (int i = threadIdx.x; i < ROWS * UNITS; i += THREADS) {
            const int row = i / UNITS, column = i % UNITS * VECTOR;
            const T* from = qkv + token(row) * row_pitch + head(row) * HEAD_DIM + column;
            Vec<T> x = {};
            if (row < count && column < HEAD_DIM) { x = load_vec(from); }
            store_vec(queries + row * PITCH + column, x);
        }
    }
    __device__ __forceinline__ int position_of(int row) const {
        return length + (first_row + row) / group;
    }
    __device__ __forceinline__ i64 token(int row) const {
        return first_token + (first_row + row) / group;
    }
    __device__ __forceinline__ int head(int row) const {
        return first_head + (first_row + row) % group;
    }
    // The first key that a query at position `at` sees.
    __device__ __forceinline__ int first_key(int at) const { return max(0, at - window + 1); }
    __device__ __forceinline__ int first_split() const { return first_key(position_of(0)) / SPLIT; }
    __device__ __forceinline__ int last_split() const { return position_of(count - 1) / SPLIT; }

    // Start copying keys and values first + [0, STEP); zeros stand for those from `end` on.
    __device__ __forceinline__ void load(int stage, int first, int end) const {
        T* const keys = stages + stage * TILES * TILE;
        if (CODED) {
            decode(keys, first, end);
            return;
        }
#pragma unroll TOGETHER
        for (int i = 0; i < COPIES; ++i) {
            const int index = i * THREADS + threadIdx.x, row = index / UNITS, key = first + row;
            const int column = index % UNITS * VECTOR;
            if (STEP * UNITS % THREADS != 0 && row >= STEP) { continue; }
            const bool valid = key < end && column < HEAD_DIM;
            i64 from = 0;
            if (valid) {
                const i64 row_of_pool = (i64)__ldg(table + key / BLOCK_SIZE) * BLOCK_SIZE;
                from = (row_of_pool + key % BLOCK_SIZE) * pitch + column;
            }
            const SharedAddress to = shared_address(keys + row * PITCH + column);
            cp_async_16(to, k + from, valid);
            if (!LATENT) { cp_async_16(to + TILE * (int)sizeof(T), v + from, valid); }
        }
        cp_async_commit();
    }
    // Like `load`, for codes: loads and decodes a few vectors at a time.
    __device__ __forceinline__ void decode(T* keys, int first, int end) const {
        constexpr int MANY = COPIES < 4 ? COPIES : 4;
#pragma unroll 1
        for (int start = 0; start < COPIES; start += MANY) {
            Codes codes[MANY][TILES];
            u32 scale[MANY];
#pragma unroll
            for (int i = 0; i < MANY; ++i) {
                const int index = (start + i) * THREADS + threadIdx.x, key = first + index / UNITS;
                const int column = index % UNITS * VECTOR;
                const bool valid = index / UNITS < STEP && key < end && column < HEAD_DIM;
                i64 row = 0;
                if (valid) { row = (i64)__ldg(table + key / BLOCK_SIZE) * BLOCK_SIZE + key % BLOCK_SIZE; }
                codes[i][0] = load_codes(k + row * pitch + column, valid);
                if (!LATENT) { codes[i][TILES - 1] = load_codes(v + row * pitch + column, valid); }
                scale[i] = valid ? __ldcg(scales + row * kv_heads) : 0;
            }
#pragma unroll
            for (int i = 0; i < MANY; ++i) {
                const int index = (start + i) * THREADS + threadIdx.x, row = index / UNITS;
                if (row >= STEP) { continue; }
                T* const to = keys + row * PITCH + index % UNITS * VECTOR;
                store_vec(to, decoded(codes[i][0], __byte_perm(scale[i], 0, 0x1010)));
                if (!LATENT) {
                    const u32 of_value = __byte_perm(scale[i], 0, 0x3232);
                    store_vec(to + TILE, decoded(codes[i][TILES - 1], of_value));
                }
            }
        }
    }
    // Probabilities of the scores of keys first + [0, STEP), relative to the largest score so far.
    __device__ __forceinline__ void soften(float (&top)[TURNS], float (&total)[TURNS],
                                           int first) const {
#pragma unroll
        for (int turn = 0; turn < TURNS; ++turn) {
            const int row = threadIdx.x / 8 + 16 * turn, lane = threadIdx.x % 8;
            const int at = position[turn], least = first_key(at);
            float s[STEP / 8], largest = -INFINITY, sum = 0.0f;
#pragma unroll
            for (int c = 0; c < STEP / 8; ++c) {
                const int key = first + c * 8 + lane;
                s[c] = scores[row * SCORES + c * 8 + lane] * scale;
                if (SOFTCAP) { s[c] = CAP * tanhf(s[c] * (1.0f / CAP)); }
                if (key > at || key < least) { s[c] = -INFINITY; }
                largest = fmaxf(largest, s[c]);
            }
#pragma unroll
            for (int mask = 4; mask > 0; mask >>= 1) {
                largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, mask));
            }
            largest = fmaxf(largest, top[turn]);
            const float base = largest == -INFINITY ? 0.0f : largest;
#pragma unroll
            for (int c = 0; c < STEP / 8; ++c) {
                const float p = exp2_approx(s[c] - base);
                sum += p;
                probs[row * PROBS + c * 8 + lane] = from_f32<T>(p);
            }
#pragma unroll
            for (int mask = 4; mask > 0; mask >>= 1) {
                sum += __shfl_xor_sync(0xFFFFFFFFu, sum, mask);
            }
            const float old = exp2_approx(top[turn] - base);
            top[turn] = largest;
            total[turn] = fmaf(total[turn], old, sum);
            if (lane == 0) { factors[2 * row] = old; }
        }
    }
    // The sums and statistics of the rows over the keys of a split.
    __device__ __forceinline__ void run(Sums& sum, float (&top)[TURNS], float (&total)[TURNS],
                                        int split) const {
#pragma unroll
        for (int q = 0; q < Products<T>::QUADS; ++q) {
#pragma unroll
            for (int i = 0; i < 4; ++i) { sum[q][i] = 0.0f; }
        }
#pragma unroll
        for (int turn = 0; turn < TURNS; ++turn) { top[turn] = -INFINITY, total[turn] = 0.0f; }
        const int end = min((split + 1) * SPLIT, position_of(count - 1) + 1);
        int stage = 0, key = max(split * SPLIT, first_key(position_of(0)) / STEP * STEP);
        __syncthreads();  // all warps have read the stages of the last split
        load(stage, key, end);
        for (; key < end; key += STEP, stage ^= STAGES - 1) {
            const T* const keys = stages + stage * TILES * TILE;
            const T* const values = keys + (LATENT ? 0 : TILE);
            cp_async_wait<0>();
            __syncthreads();
            if (STAGES == 2 && key + STEP < end) { load(stage ^ 1, key + STEP, end); }
            Products<T>::score(scores, queries, keys);
            __syncthreads();
            soften(top, total, key);
            __syncthreads();
#pragma unroll
            for (int q = 0; q < Products<T>::QUADS; ++q) {
#pragma unroll
                for (int i = 0; i < 4; ++i) { sum[q][i] *= factors[2 * Products<T>::row(q, i)]; }
            }
            Products<T>::add(sum, probs, values);
            if (STAGES == 1 && key + STEP < end) {
                __syncthreads();  // all warps have used the values
                load(0, key + STEP, end);
            }
        }
    }
};

// Call f(row, column, q, i) for each sum of this thread.
template <class F> __device__ __forceinline__ void each(F f) {
#pragma unroll
    for (int q = 0; q < Products<T>::QUADS; ++q) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int column = Products<T>::column(q, i);
            if (column < VALUE_DIM) { f(Products<T>::row(q, i), column, q, i); }
        }
    }
}

extern "C" __global__ void __launch_bounds__(256)
    paged_store(C* __restrict__ k_cache, C* __restrict__ v_cache, const T* qkv,
                const int* __restrict__ table, const int* __restrict__ lengths,
                const int* __restrict__ new_tokens, int n, int max_blocks, int block_size,
                int num_heads, int num_kv_heads, bf16* __restrict__ scales) {
    start_next_kernel();
    wait_for_earlier_kernels();
    const int columns = num_kv_heads * HEAD_DIM, vectors = columns / VECTOR;
    const int index = blockIdx.x * 256 + threadIdx.x, sequence = blockIdx.y;
    const int i = index / vectors, column = index % vectors * VECTOR;
    if (i >= new_tokens[sequence]) { return; }
    const int at = lengths[sequence] + i;
    const i64 block = table[(i64)sequence * max_blocks + at / block_size];
    const i64 to = (block * block_size + at % block_size) * num_kv_heads + column / HEAD_DIM;
    const T* row = qkv + ((i64)sequence * n + i) * (num_heads * HEAD_DIM + 2 * columns);
    const T* keys = row + (num_heads + column / HEAD_DIM) * HEAD_DIM;
    put(k_cache + to * HEAD_DIM, scales + 2 * to, keys, column % HEAD_DIM);
    if (v_cache) {
        put(v_cache + to * HEAD_DIM, scales + 2 * to + 1, keys + columns, column % HEAD_DIM);
    }
}

// Statistics of a block's rows before the first key; a sink counts like a key.
__device__ __forceinline__ void begin(float (&top)[TURNS], float (&total)[TURNS], const Block& block,
                                      const T* sinks) {
#pragma unroll
    for (int turn = 0; turn < TURNS; ++turn) {
        const int row = threadIdx.x / 8 + 16 * turn;
        top[turn] = sinks ? to_f32(sinks[block.head(row)]) * LOG2E : -INFINITY;
        total[turn] = sinks ? 1.0f : 0.0f;
    }
}

// Add `more`, sums and statistics of a split, to the sums and statistics of earlier splits.
__device__ __forceinline__ void add(Sums& sum, float (&top)[TURNS], float (&total)[TURNS],
                                    const Sums& more, const float (&more_top)[TURNS],
                                    const float (&more_total)[TURNS], float* factors) {
    __syncthreads();  // all warps have read the last step's factors
#pragma unroll
    for (int turn = 0; turn < TURNS; ++turn) {
        const Factors f = merge(top[turn], total[turn], more_top[turn], more_total[turn]);
        const int row = threadIdx.x / 8 + 16 * turn;
        if (threadIdx.x % 8 == 0) { factors[2 * row] = f.old, factors[2 * row + 1] = f.added; }
    }
    __syncthreads();
    each([&](int row, int column, int q, int i) {
        const float old = factors[2 * row], added = factors[2 * row + 1];
        sum[q][i] = fmaf(more[q][i], added, sum[q][i] * old);
    });
}

// Store rows of out: sums divided by totals, then zeros after the rows of queries.
__device__ __forceinline__ void finish(T* out, const Sums& sum, const float (&total)[TURNS],
                                       const Block& block, int rows, int num_heads) {
    float* const factors = block.factors;
    __syncthreads();
#pragma unroll
    for (int turn = 0; turn < TURNS; ++turn) {
        if (threadIdx.x % 8 == 0) { factors[threadIdx.x / 8 + 16 * turn] = total[turn]; }
    }
    __syncthreads();
    each([&](int row, int column, int q, int i) {
        if (row < rows) {
            const float x = row < block.count ? sum[q][i] / factors[row] : 0.0f;
            out[(block.token(row) * num_heads + block.head(row)) * VALUE_DIM + column] =
                from_f32<T>(x);
        }
    });
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    paged_attend(T* __restrict__ out, const T* qkv, const C* k_cache, const C* v_cache,
                 const int* __restrict__ table, const int* __restrict__ lengths,
                 const int* __restrict__ new_tokens, int n, int max_blocks, int block_size,
                 int num_heads, int num_kv_heads, int window, float scale,
                 const T* __restrict__ sinks, const bf16* scales) {
    extern __shared__ __align__(128) char shared[];
    __shared__ float factors[2 * ROWS];
    start_next_kernel();
    wait_for_earlier_kernels();
    const Block block(qkv, k_cache, v_cache, scales, table, lengths, new_tokens, n, max_blocks, num_heads,
                      num_kv_heads, window, scale, blockIdx.x, blockIdx.y, shared, factors);
    Sums all = {}, sum;
    float all_top[TURNS], all_total[TURNS], top[TURNS], total[TURNS];
    begin(all_top, all_total, block, sinks);
    const int splits = block.count > 0 ? block.last_split() + 1 : 0;
    for (int split = block.count > 0 ? block.first_split() : 0; split < splits; ++split) {
        block.run(sum, top, total, split);
        add(all, all_top, all_total, sum, top, total, factors);
    }
    finish(out, all, all_total, block, min(ROWS, n * block.group - block.first_row), num_heads);
}

// Put keys and values of a sequence's new tokens, at positions [first, end), into the cache. from:
// keys of the first new token. keys, values: the caches, from the block's key/value head on.
__device__ __forceinline__ void store_new(C* keys, C* values, bf16* scales, const T* from,
                                          i64 row_pitch, int added, const Block& block, int first,
                                          int end) {
    constexpr int VECTORS = HEAD_DIM / VECTOR;
    first = max(first, block.length), end = min(end, block.length + added);
    for (int i = threadIdx.x; i < (end - first) * VECTORS; i += THREADS) {
        const int at = first + i / VECTORS, column = i % VECTORS * VECTOR;
        const i64 row = (i64)block.table[at / BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE;
        const T* x = from + (at - block.length) * row_pitch;
        bf16* const scale = scales + 2 * row * block.kv_heads;
        put(keys + row * block.pitch, scale, x, column);
        if (!LATENT) { put(values + row * block.pitch, scale + 1, x + block.pitch, column); }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    paged_decode(T* __restrict__ out, float* partial, float* stats, int* arrived, const T* qkv,
                 C* k_cache, C* v_cache, const int* __restrict__ table,
                 const int* __restrict__ lengths, const int* __restrict__ new_tokens, int n,
                 int max_blocks, int block_size, int num_heads, int num_kv_heads, int splits,
                 int window, float scale, const T* __restrict__ sinks, int stores, bf16* scales) {
    extern __shared__ __align__(128) char shared[];
    __shared__ float factors[2 * ROWS];
    __shared__ bool is_last;
    start_next_kernel();
    wait_for_earlier_kernels();
    const Block block(qkv, k_cache, v_cache, scales, table, lengths, new_tokens, n, max_blocks, num_heads,
                      num_kv_heads, window, scale, blockIdx.y, blockIdx.z, shared, factors);
    const int rows = min(ROWS, n * block.group - block.first_row);
    const int first = block.count > 0 ? block.first_split() : 0;
    const int count = block.count > 0 ? block.last_split() + 1 - first : 0;
    if (blockIdx.x >= max(count, 1)) { return; }
    C* const keys = k_cache + blockIdx.y * HEAD_DIM;
    C* const values = LATENT ? nullptr : v_cache + blockIdx.y * HEAD_DIM;
    bf16* const of_head = scales + 2 * blockIdx.y;
    const i64 row_pitch = (i64)(num_heads + 2 * num_kv_heads) * HEAD_DIM;
    const int sequence = (int)block.first_token / n, added = stores ? new_tokens[sequence] : 0;
    const T* const from = qkv + block.first_token * row_pitch + (num_heads + blockIdx.y) * HEAD_DIM;
    for (int split = first + blockIdx.x; split < first + count; split += gridDim.x) {
        store_new(keys, values, of_head, from, row_pitch, added, block, split * SPLIT,
                  (split + 1) * SPLIT);
        Sums sum;
        float top[TURNS], total[TURNS];
        block.run(sum, top, total, split);
        if (!LATENT && count == 1) {  // LATENT has too few registers for this
            Sums all = {};
            float all_top[TURNS], all_total[TURNS];
            begin(all_top, all_total, block, sinks);
            add(all, all_top, all_total, sum, top, total, factors);
            finish(out, all, all_total, block, rows, num_heads);
            return;
        }
        // Rows that see no key of the split leave a result that no block reads.
#pragma unroll
        for (int turn = 0; turn < TURNS; ++turn) {
            const int row = threadIdx.x / 8 + 16 * turn;
            if (threadIdx.x % 8 == 0 && row < block.count) {
                const i64 at = (block.token(row) * num_heads + block.head(row)) * splits + split;
                store_two(stats + 2 * at, top[turn], total[turn]);
            }
        }
        each([&](int row, int column, int q, int i) {
            if (row < block.count) {
                const i64 at = (block.token(row) * num_heads + block.head(row)) * splits + split;
                partial[at * VALUE_DIM + column] = sum[q][i];
            }
        });
    }
    if (count > 0) {  // the block that arrives last adds all splits, one after the other
        int* const here = arrived + blockIdx.z * num_kv_heads + blockIdx.y;
        __threadfence();
        __syncthreads();
        if (threadIdx.x == 0) {
            is_last = atomicAdd(here, 1) == min((int)gridDim.x, count) - 1;
            if (is_last) { *here = 0; }
        }
        __syncthreads();
        if (!is_last) { return; }
        __threadfence();
    }
    for (int i = threadIdx.x; i < rows * VALUE_DIM; i += THREADS) {
        const int row = i / VALUE_DIM, column = i % VALUE_DIM, head = block.head(row);
        const i64 to = block.token(row) * num_heads + head;
        float sum = 0.0f, total = 1.0f;
        if (row < block.count) {
            const int at = block.position_of(row);
            float top = sinks ? to_f32(sinks[head]) * LOG2E : -INFINITY;
            total = sinks ? 1.0f : 0.0f;
#pragma unroll 4
            for (int split = block.first_key(at) / SPLIT; split <= at / SPLIT; ++split) {
                const float2* of_row = reinterpret_cast<const float2*>(stats) + to * splits;
                const float2 found = __ldcg(of_row + split);
                const float x = __ldcg(partial + (to * splits + split) * VALUE_DIM + column);
                const Factors f = merge(top, total, found.x, found.y);
                sum = fmaf(x, f.added, sum * f.old);
            }
        }
        out[to * VALUE_DIM + column] = from_f32<T>(sum / total);
    }
}
