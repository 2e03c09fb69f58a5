// attention_mma.cuh -- attention of one thread block on the tensor cores: BF16 in, F32 sums.
//
// A thread block owns OWN rows of one head of one sequence, each warp 16 M of these rows. The block
// walks over the other side in steps of STEP rows. Scores never leave registers: the accumulator of
// own x step, rounded to BF16, is the left operand of the next product. Backward uses the same code
// in both directions: blocks that own keys compute transposed scores, so that dK, dV and dQ are all
// sums over steps in registers. There are no atomics, and the order is fixed.
#pragma once
#include "attention/attention_tiles.cuh"

namespace mma {

// Set scores to `value` for keys after the query and, with PAST, for keys before the first key that
// the query sees. own, step: row numbers of the tile's corner.
template <bool OWN_KEYS, bool PAST, int M, int N>
__device__ __forceinline__ void mask(float (&scores)[M][N][4], int own, int step, int lane,
                                     float value, const Sight& sight) {
#pragma unroll
    for (int m = 0; m < M; ++m) {
#pragma unroll
        for (int n = 0; n < N; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int row = own + m * 16 + (i >> 1) * 8 + (lane >> 2);
                const int column = step + n * 8 + (lane & 3) * 2 + (i & 1);
                const int query = OWN_KEYS ? column : row, key = OWN_KEYS ? row : column;
                const bool hidden = PAST && key < sight.first_key(query);
                if (hidden || key > query) { scores[m][n][i] = value; }
            }
        }
    }
}

// x = 0 where p = 0.
template <int M, int N>
__device__ __forceinline__ void clear_with(float (&x)[M][N][4], const float (&p)[M][N][4]) {
#pragma unroll
    for (int m = 0; m < M; ++m) {
#pragma unroll
        for (int n = 0; n < N; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) { x[m][n][i] = p[m][n][i] == 0.0f ? 0.0f : x[m][n][i]; }
        }
    }
}

// True if this thread's part of a tile of ROWS rows has an element that is not finite. CLEAR: zero
// its 16 bytes, and set the row's place in `spoiled` to NaN.
template <bool CLEAR, int ROWS, int THREADS>
__device__ __forceinline__ bool not_finite(float (&spoiled)[ROWS], char* tile) {
    bool any = false;
#pragma unroll
    for (int i = 0; i < pieces(ROWS * UNITS, THREADS); ++i) {
        const int unit = i * THREADS + (int)threadIdx.x, row = unit / UNITS;
        if (ROWS * UNITS % THREADS && unit >= ROWS * UNITS) { break; }
        uint4* const at = reinterpret_cast<uint4*>(tile + row * ROW_BYTES + unit % UNITS * 16);
        const u32 word[4] = {at->x, at->y, at->z, at->w};
        bool bad = false;
#pragma unroll
        for (u32 pair : word) {  // an exponent of ones: infinite or NaN
            bad |= (pair & 0x7F80u) == 0x7F80u || (pair & 0x7F800000u) == 0x7F800000u;
        }
        if (CLEAR && bad) {
            *at = make_uint4(0, 0, 0, 0);
            spoiled[row] = __int_as_float(0x7FC00000);
        }
        any |= bad;
    }
    return any;
}

// In tiles where some queries do not see some keys, zero times NaN would carry a hidden value into
// a sum. Elements that are not finite become zeros in the step's tile, and their rows NaN in
// `spoiled`. The kernel adds `spoiled` to the scores of queries that see the row. Returns true, for
// all threads, if there is such a row; `spoiled` is valid only then. There are barriers inside.
template <int ROWS, int THREADS>
__device__ __forceinline__ bool spoil(float (&spoiled)[ROWS], char* tile) {
    if (!__syncthreads_or(not_finite<false, ROWS, THREADS>(spoiled, tile))) { return false; }
    not_finite<true, ROWS, THREADS>(spoiled, tile);
    __syncthreads();
    return true;
}

// Add `spoiled` of the step's rows to all scores except -inf.
template <int M, int N>
__device__ __forceinline__ void add_spoiled(float (&scores)[M][N][4], const float (&spoiled)[8 * N],
                                            int lane) {
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#pragma unroll
            for (int m = 0; m < M; ++m) {
                if (scores[m][n][i] != -INFINITY) {
                    scores[m][n][i] += spoiled[n * 8 + (lane & 3) * 2 + (i & 1)];
                }
            }
        }
    }
}

// Replace scores such that scores * scale are soft-capped.
template <int M, int N> __device__ __forceinline__ void cap(float (&scores)[M][N][4], float scale) {
#pragma unroll
    for (int m = 0; m < M; ++m) {
#pragma unroll
        for (int n = 0; n < N; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                scores[m][n][i] = capped(scores[m][n][i] * scale) * (1.0f / scale);
            }
        }
    }
}

// A step of the online softmax: scores become probabilities relative to the new maximum.
template <int M, int N>
__device__ __forceinline__ void softmax_step(float (&scores)[M][N][4], float (&sum)[M][OWN_D / 8][4],
                                             float (&row_max)[M][2], float (&row_sum)[M][2],
                                             float scale_log2) {
#pragma unroll
    for (int m = 0; m < M; ++m) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float top = row_max[m][r];
#pragma unroll
            for (int n = 0; n < N; ++n) {
                top = fmaxf(top, fmaxf(scores[m][n][2 * r], scores[m][n][2 * r + 1]));
            }
            top = fmaxf(top, __shfl_xor_sync(0xFFFFFFFFu, top, 1));
            top = fmaxf(top, __shfl_xor_sync(0xFFFFFFFFu, top, 2));
            const float base = MASKED && top == -INFINITY ? 0.0f : top;  // nothing is seen so far
            const float shift = -base * scale_log2;
            const float correction = exp2_approx((row_max[m][r] - base) * scale_log2);
            const bool changed = top > row_max[m][r];
            row_max[m][r] = top;
            float total = 0.0f;
#pragma unroll
            for (int n = 0; n < N; ++n) {
#pragma unroll
                for (int i = 2 * r; i < 2 * r + 2; ++i) {
                    scores[m][n][i] = exp2_approx(fmaf(scores[m][n][i], scale_log2, shift));
                    total += scores[m][n][i];
                }
            }
            row_sum[m][r] = fmaf(row_sum[m][r], correction, total);  // over this lane's columns
            if (__any_sync(0xFFFFFFFFu, changed)) {                  // rare after the first steps
#pragma unroll
                for (int n = 0; n < OWN_D / 8; ++n) {
                    sum[m][n][2 * r] *= correction;
                    sum[m][n][2 * r + 1] *= correction;
                }
            }
        }
    }
}

// OWN queries against all keys up to the last of them. One key tile and one value tile: values
// arrive while the scores are computed, the next keys while the probabilities are used.
template <int OWN, int STEP, int THREADS>
__device__ __forceinline__ void forward(bf16* out, float* lse, const bf16* qkv, int seq_len,
                                        int num_heads, int num_kv_heads, const Sight& sight,
                                        float scale, char* shared) {
    constexpr int M = OWN * SHARING / (THREADS / 2), N = STEP / 8;
    static_assert(M * THREADS / 2 == OWN * SHARING && STEP % 16 == 0,
                  "a warp owns multiples of 16 rows");
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, part = warp % SHARING;
    const int head = blockIdx.y, batch = blockIdx.z;
    const int tile = gridDim.x - 1 - blockIdx.x;  // the longest tiles first
    const int own = tile * OWN, warp_row = warp / SHARING * 16 * M, warp_own = own + warp_row;
    const int pitch = (num_heads + 2 * num_kv_heads) * HEAD_DIM;
    const bf16* q = qkv + (i64)batch * seq_len * pitch + head * HEAD_DIM;
    const bf16* k =
        qkv + (i64)batch * seq_len * pitch + (num_heads + head / (num_heads / num_kv_heads)) * HEAD_DIM;
    const bf16* v = k + num_kv_heads * HEAD_DIM;
    const SharedAddress q_tile = shared_address(shared), k_tile = q_tile + OWN * ROW_BYTES;
    const SharedAddress v_tile = k_tile + STEP * ROW_BYTES;
    const float scale_log2 = scale * LOG2E;

    float sum[M][OWN_D / 8][4] = {}, row_max[M][2], row_sum[M][2] = {};
#pragma unroll
    for (int m = 0; m < M; ++m) { row_max[m][0] = row_max[m][1] = -INFINITY; }

    // All queries of the warp see the keys from warp_all to their own position; some queries see
    // keys from warp_first on. `all` and `begin` are the same bounds for the block's queries.
    const int warp_first = sight.first_key(warp_own);
    const int warp_all = sight.first_key(warp_own + 16 * M - 1);
    const int begin = sight.first_key(own) / STEP * STEP, all = sight.first_key(own + OWN - 1);
    const int score_column = SCORE_PARTS > 1 ? part * SCORE_D * 2 : 0;  // in bytes
    __shared__ float spoiled[STEP];
    load_rows<OWN, THREADS>(q_tile, q, pitch, own, seq_len);
    load_rows<STEP, THREADS>(k_tile, k, pitch, begin, seq_len);
    cp_async_commit();
    const int end = min(own + OWN, seq_len);
    for (int step = begin; step < end; step += STEP) {
        // A warp computes scores only if its queries see some of the step's keys.
        const bool active = step < warp_own + 16 * M && (!MASKED || step + STEP > warp_first);
        cp_async_wait<0>();
        __syncthreads();  // the keys have arrived, and all warps have used the last values
        if (MASKED && threadIdx.x < STEP) { spoiled[threadIdx.x] = 0.0f; }
        load_rows<STEP, THREADS>(v_tile, v, pitch, step, seq_len);
        cp_async_commit();
        float scores[M][N][4];
        if (active) {
            int again = lane;
            if (MASKED && M > 1) { forget(again); }  // else registers would spill
            multiply_rows<M, N>(
                scores, q_tile + warp_row * ROW_BYTES + score_column + left_offset(again),
                k_tile + score_column + right_rows_offset(again));
            add_parts<0, THREADS>(scores);
            if (SOFTCAP) { cap(scores, scale); }
            if (MASKED && step < warp_all) {
                mask<false, true>(scores, warp_own, step, lane, -INFINITY, sight);
            } else if (step + STEP - 1 > warp_own) {
                mask<false, false>(scores, warp_own, step, lane, -INFINITY, sight);
            }
        }
        cp_async_wait<0>();
        __syncthreads();  // the values have arrived, and all warps have used the keys
        if (step + STEP < end) {
            load_rows<STEP, THREADS>(k_tile, k, pitch, step + STEP, seq_len);
            cp_async_commit();
        }
        if (MASKED && (step < all || step + STEP - 1 > own)) {
            const bool bad = spoil<STEP, THREADS>(spoiled, shared + (OWN + STEP) * ROW_BYTES);
            if (bad && active) { add_spoiled<M, N>(scores, spoiled, lane); }
        }
        if (active) {
            softmax_step<M, N>(scores, sum, row_max, row_sum, scale_log2);
            int again = lane;
            if (MASKED && M > 1) { forget(again); }
            multiply_columns<M, N>(sum, scores,
                                   v_tile + part * OWN_D * 2 + right_columns_offset(again));
        }
    }

    float factor[M][2];
#pragma unroll
    for (int m = 0; m < M; ++m) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float total = row_sum[m][r];
            total += __shfl_xor_sync(0xFFFFFFFFu, total, 1);
            total += __shfl_xor_sync(0xFFFFFFFFu, total, 2);
            factor[m][r] = 1.0f / total;
            const int row = warp_own + m * 16 + r * 8 + (lane >> 2);
            if ((lane & 3) == 0 && part == 0 && row < seq_len) {
                lse[((i64)batch * num_heads + head) * seq_len + row] =
                    fmaf(row_max[m][r], scale, logf(total));
            }
        }
    }
    const int out_pitch = num_heads * HEAD_DIM;
    if (SHARING > 1) { __syncthreads(); }  // no warp reads the queries any more
    store_rows<M>(out + ((i64)batch * seq_len + warp_own) * out_pitch + head * HEAD_DIM, out_pitch,
                  seq_len - warp_own, sum, factor, shared + warp_row * ROW_BYTES, part * OWN_UNITS,
                  lane);
}

// Gradient of OWN keys and values (or one of the two), or of OWN queries, in tile `tile` of `head`,
// a key/value head or a query head. With probabilities P, dP = dO V^T, dS = P * (dP - delta):
//   dV = P^T dO,   dK = scale dS^T Q               dQ = scale dS K
// The block owns rows a, b and walks over rows x, y: (K, V | Q, dO) or (Q, dO | K, V). With
// BACKWARD_STAGES = 2 there are two tiles each of x and y: the next step's tiles arrive during this
// step.
template <int OWN, int STEP, int THREADS, Part PART>
__device__ __forceinline__ void backward(bf16* d_qkv, const bf16* d_out, const float* lse,
                                         const float* delta, const bf16* qkv, int seq_len,
                                         int num_heads, int num_kv_heads, int tile, int head,
                                         int batch, const Sight& sight, float scale, char* shared) {
    constexpr bool OWN_KEYS = PART != Part::QUERIES;
    constexpr bool WANT_X = PART != Part::ONLY_V;
    constexpr bool WANT_Y = PART == Part::KEYS || PART == Part::ONLY_V;
    constexpr int M = OWN * SHARING / (THREADS / 2), N = STEP / 8, STAGES = BACKWARD_STAGES;
    constexpr int STAGE_BYTES = 2 * STEP * ROW_BYTES + 2 * STEP * 4;
    static_assert(M * THREADS / 2 == OWN * SHARING && STEP % 16 == 0,
                  "a warp owns multiples of 16 rows");
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, part = warp % SHARING;
    const int own = tile * OWN, warp_row = warp / SHARING * 16 * M, warp_own = own + warp_row;
    const int group = num_heads / num_kv_heads;
    const int kv_head = OWN_KEYS ? head : head / group, q_head = OWN_KEYS ? head * group : head;
    const int pitch = (num_heads + 2 * num_kv_heads) * HEAD_DIM, out_pitch = num_heads * HEAD_DIM;
    const i64 sequence = (i64)batch * seq_len;
    const bf16* q = qkv + sequence * pitch + q_head * HEAD_DIM;
    const bf16* k = qkv + sequence * pitch + (num_heads + kv_head) * HEAD_DIM;
    const bf16* v = k + num_kv_heads * HEAD_DIM;
    const bf16* d_o = d_out + sequence * out_pitch + q_head * HEAD_DIM;
    const i64 statistics = ((i64)batch * num_heads + q_head) * seq_len;  // row of the first query
    const SharedAddress a_tile = shared_address(shared), b_tile = a_tile + OWN * ROW_BYTES;
    const SharedAddress stages = b_tile + OWN * ROW_BYTES;
    const int score_column = SCORE_PARTS > 1 ? part * SCORE_D * 2 : 0;  // in bytes
    const SharedAddress left = warp_row * ROW_BYTES + score_column + left_offset(lane);
    const float scale_log2 = scale * LOG2E;

    // first: the first step in which some query sees some key. end: the row after such steps.
    const int last_key = min(own + OWN, seq_len) - 1;
    const int first = (OWN_KEYS ? own : sight.first_key(own)) / STEP;
    const int end = OWN_KEYS ? sight.end_of_queries(last_key) : last_key + 1;
    const int steps = (pieces(end, STEP) - first) * (OWN_KEYS ? group : 1);
    // All own queries see the keys from `all` to their own positions.
    const int warp_last = warp_own + 16 * M - 1;
    const int all = OWN_KEYS ? 0 : sight.first_key(own + OWN - 1);
    const int warp_all = OWN_KEYS ? 0 : sight.first_key(warp_last);
    const int warp_first = OWN_KEYS ? 0 : sight.first_key(warp_own);
    __shared__ float spoiled[STEP];
    int next_row = first * STEP, next_head = 0;  // row and the group's head of the next load
    auto load_step = [&](int stage) {
        const SharedAddress x = stages + stage * STAGE_BYTES, y = x + STEP * ROW_BYTES;
        load_rows<STEP, THREADS>(x, OWN_KEYS ? q + next_head * HEAD_DIM : k, pitch, next_row, seq_len);
        load_rows<STEP, THREADS>(y, OWN_KEYS ? d_o + next_head * HEAD_DIM : v,
                                 OWN_KEYS ? out_pitch : pitch, next_row, seq_len);
        if (OWN_KEYS && threadIdx.x < 2 * STEP) {
            const int query = next_row + (int)threadIdx.x % STEP;
            const bool valid = query < seq_len;
            const f32* const from = (threadIdx.x < STEP ? lse : delta) + statistics;
            cp_async_cached<4>(y + STEP * ROW_BYTES + threadIdx.x * 4,
                               from + (i64)next_head * seq_len + (valid ? query : 0), valid);
        }
        cp_async_commit();
        next_row += STEP;
        if (next_row >= end) {
            next_row = first * STEP;
            ++next_head;
        }
    };

    load_rows<OWN, THREADS>(a_tile, OWN_KEYS ? k : q, pitch, own, seq_len);
    load_rows<OWN, THREADS>(b_tile, OWN_KEYS ? v : d_o, OWN_KEYS ? pitch : out_pitch, own, seq_len);
    if (STAGES == 2) { load_step(0); }

    float row_lse[M][2], row_delta[M][2];  // only used if the block owns queries
    if (!OWN_KEYS) {
#pragma unroll
        for (int m = 0; m < M; ++m) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int row = min(warp_own + m * 16 + r * 8 + (lane >> 2), seq_len - 1);
                row_lse[m][r] = lse[statistics + row] * LOG2E;
                row_delta[m][r] = delta[statistics + row];
            }
        }
    }

    float d_x[M][OWN_D / 8][4] = {}, d_y[M][OWN_D / 8][4] = {};
    int following = first * STEP;
    for (int i = 0; i < steps; ++i) {
        if (STAGES == 1) {
            __syncthreads();  // all warps have used the last step's tiles
            following = next_row;
            load_step(0);
        }
        const int step = following;
        following = next_row;
        const int step_first = OWN_KEYS ? sight.first_key(step) : warp_first;
        const int step_all = OWN_KEYS ? sight.first_key(step + STEP - 1) : warp_all;
        cp_async_wait<0>();
        __syncthreads();  // this step's tiles have arrived, and all warps have used the last ones
        if (MASKED && threadIdx.x < STEP) { spoiled[threadIdx.x] = 0.0f; }
        if (STAGES == 2 && i + 1 < steps) { load_step((i + 1) % STAGES); }
        bool active = OWN_KEYS ? step + STEP > warp_own : step < warp_own + 16 * M;
        bool past = false, bad = false;  // past: some queries do not see some earlier keys
        if (MASKED) {
            active &= step_first < (OWN_KEYS ? warp_own + 16 * M : step + STEP);
            past = (OWN_KEYS ? warp_own : step) < step_all;
            const bool diagonal = OWN_KEYS ? step < own + OWN - 1 : step + STEP - 1 > own;
            if (diagonal || (OWN_KEYS ? own < step_all : step < all)) {
                char* const tiles = shared + 2 * OWN * ROW_BYTES + i % STAGES * STAGE_BYTES;
                if (WANT_X) { bad |= spoil<STEP, THREADS>(spoiled, tiles); }
                if (WANT_Y) { bad |= spoil<STEP, THREADS>(spoiled, tiles + STEP * ROW_BYTES); }
            }
        }
        if (!active) { continue; }
        const SharedAddress x = stages + i % STAGES * STAGE_BYTES, y = x + STEP * ROW_BYTES;
        const int columns = part * OWN_D * 2;  // offset of this warp's sums, in bytes
        const float2* step_lse = reinterpret_cast<const float2*>(
            shared + 2 * OWN * ROW_BYTES + i % STAGES * STAGE_BYTES + 2 * STEP * ROW_BYTES);
        const float2* step_delta = step_lse + STEP / 2;

        float p[M][N][4], d_s[M][N][4];
        multiply_rows<M, N>(p, a_tile + left, x + score_column + right_rows_offset(lane));
        add_parts<0, THREADS>(p);
        if (SOFTCAP) { cap(p, scale); }
        if (MASKED && bad) { add_spoiled<M, N>(p, spoiled, lane); }
#pragma unroll
        for (int n = 0; n < N; ++n) {
            const float2 l = OWN_KEYS ? step_lse[n * 4 + (lane & 3)] : make_float2(0.0f, 0.0f);
#pragma unroll
            for (int m = 0; m < M; ++m) {
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const float shift = OWN_KEYS ? (e & 1 ? l.y : l.x) * LOG2E : row_lse[m][e >> 1];
                    p[m][n][e] = exp2_approx(fmaf(p[m][n][e], scale_log2, -shift));
                }
            }
        }
        const bool cut = past || (OWN_KEYS ? step < warp_last : step + STEP - 1 > warp_own);
        if (MASKED && past) {
            mask<OWN_KEYS, true>(p, warp_own, step, lane, 0.0f, sight);  // clears NaN too
        } else if (cut) {
            mask<OWN_KEYS, false>(p, warp_own, step, lane, 0.0f, sight);
        }
        if (WANT_Y) { multiply_columns<M, N>(d_y, p, y + columns + right_columns_offset(lane)); }
        if (!WANT_X) { continue; }
        multiply_rows<M, N>(d_s, b_tile + left, y + score_column + right_rows_offset(lane));
        add_parts<1, THREADS>(d_s);
#pragma unroll
        for (int n = 0; n < N; ++n) {
            const float2 d = OWN_KEYS ? step_delta[n * 4 + (lane & 3)] : make_float2(0.0f, 0.0f);
            const float2 l = OWN_KEYS ? step_lse[n * 4 + (lane & 3)] : make_float2(0.0f, 0.0f);
#pragma unroll
            for (int m = 0; m < M; ++m) {
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const float shift = OWN_KEYS ? (e & 1 ? d.y : d.x) : row_delta[m][e >> 1];
                    d_s[m][n][e] = p[m][n][e] * (d_s[m][n][e] - shift);
                    if (SOFTCAP) {  // compute the capped score again: no registers could hold it
                        const float base = OWN_KEYS ? (e & 1 ? l.y : l.x) * LOG2E
                                                    : row_lse[m][e >> 1];
                        const float score = (__log2f(p[m][n][e]) + base) * (1.0f / (LOG2E * CAP));
                        const float share = fmaxf(score, -1.0f);  // -INFINITY where p is 0
                        d_s[m][n][e] = fmaf(-d_s[m][n][e] * share, share, d_s[m][n][e]);
                    }
                }
            }
        }
        if (MASKED && cut) { clear_with(d_s, p); }  // clears NaN too
        multiply_columns<M, N>(d_x, d_s, x + columns + right_columns_offset(lane));
    }

    float factor[M][2];
#pragma unroll
    for (int m = 0; m < M; ++m) { factor[m][0] = factor[m][1] = scale; }
    const int first_head = OWN_KEYS ? num_heads + kv_head : q_head, rows = seq_len - warp_own;
    bf16* to = d_qkv + (sequence + warp_own) * pitch + first_head * HEAD_DIM;
    if (SHARING > 1) { __syncthreads(); }  // no warp reads own rows any more
    if (WANT_X) {
        store_rows<M>(to, pitch, rows, d_x, factor, shared + warp_row * ROW_BYTES,
                      part * OWN_UNITS, lane);
    }
    if (WANT_Y) {
#pragma unroll
        for (int m = 0; m < M; ++m) { factor[m][0] = factor[m][1] = 1.0f; }
        store_rows<M>(to + num_kv_heads * HEAD_DIM, pitch, rows, d_y, factor,
                      shared + (OWN + warp_row) * ROW_BYTES, part * OWN_UNITS, lane);
    }
}

}  // namespace mma
