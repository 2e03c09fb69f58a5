// delta_rule.cu -- the gated delta rule, forward and backward, in chunks of 64 tokens; and by
// tokens, for texts that go on.
//
//   S = S * exp(decay);  change = beta * (v - S^T k);  S = S + k change^T;  out = S^T q / sqrt(DK)
//
//   solve          inverse = (1 + lower(beta * (k k^T) * D))^-1, scores = lower((q k^T) * D)
//   scan           from chunk to chunk: out, or the states in front of chunks and the changes
//   scan_backward  from the last chunk to the first: gradients of the states behind chunks, and of
//                  what the triangular system is solved for
//   gradients      of each chunk alone: of q, k, v, decays and betas
//   recurrence     token by token
//
//   The reference has the formulas. q and k are divided by their lengths, and scores and out have
//   1 / sqrt(DK). D: the decays from one token to another of its document, else 0. A state begins
//   with 0 where a document does.
//
// Data     qkv, d_qkv: T (B, seq_len, 2 Hk DK + Hv DV), query, then key, then value heads; value
//          head h has the keys of head h * Hk / Hv. out, d_out: T (B, seq_len, Hv DV). gates,
//          d_gates: F32 (B, seq_len, 2, Hv), decays (logarithms), betas. inverse, scores: F32 (B, Hv,
//          chunks, 64, 64). states, d_states: F32 (B, Hv, chunks, DK, DV). changes, d_rests: F32
//          (B, seq_len, Hv, DV). state, d_state: F32 (B, Hv, DK, DV) or null, read and
//          overwritten. starts: I32 (B, seq_len), the first position of each
//          one's document, or null: then all see the state if carried.
// Launch   256 threads, dynamic shared memory as llmq/ops/delta_rule.py says. solve: grid (chunks,
//          Hv, B); scan, scan_backward, recurrence: (DV / 32, Hv, B), 32 columns of the state in
//          shared memory (recurrence: 128 threads); gradients: (chunks, Hk, B), over the value heads
//          of each.
// Cost     for a token and a value head, in F32 FMAs: solve 128 DK + 1400, scan 2 DK DV + 64 DV and
//          DK DV + 64 DV more for out, scan_backward 3 DK DV + 64 DV, gradients 3 DK DV +
//          128 DV + 384 DK. All tensors are read and written once, keys DV / 32 times.
// Needs    DK, DV multiples of 32 up to 128. Hv a multiple of Hk. No atomics: every element is
//          summed by one thread, or one warp, in a fixed order.
// Same name  llmq/ops/delta_rule.py  llmq/ref/delta_rule.py  tests/ops/test_delta_rule.py
#include "delta_chunk.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
    delta_rule_solve(float* __restrict__ inverse, float* __restrict__ scores,
                     const T* __restrict__ qkv, const float* __restrict__ gates,
                     const int* __restrict__ starts, int seq_len, int key_heads, int value_heads,
                     int carried) {
    extern __shared__ uint4 memory[];
    __shared__ Chunk chunk;
    float* const k = reinterpret_cast<float*>(memory);
    float* const q = k + CHUNK * PADDED;
    float* const system = q + CHUNK * PADDED;  // (64, 65)
    const Place at(blockIdx.y, seq_len, key_heads, value_heads);
    const int first = blockIdx.x * CHUNK, rows = min(CHUNK, seq_len - first);
    chunk.load(at, first, gates, starts, carried);
    load_units<PADDED>(k, qkv + at.key(first), at.columns(), rows, 1.0f);
    if (scores) { load_units<PADDED>(q, qkv + at.query(first), at.columns(), rows, query_scale()); }
    __syncthreads();
    const i64 square = at.of_chunk(blockIdx.x) * CHUNK * CHUNK;
    float kk[ROWS][2] = {}, qk[ROWS][2] = {};
#pragma unroll 4
    for (int d = 0; d < DK; ++d) {
        const float other[2] = {k[lane_id() * PADDED + d], k[(lane_id() + 32) * PADDED + d]};
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            const int i = warp_id() * ROWS + r;
            const float own = k[i * PADDED + d], query = scores ? q[i * PADDED + d] : 0.0f;
#pragma unroll
            for (int m = 0; m < 2; ++m) {
                kk[r][m] = fmaf(own, other[m], kk[r][m]);
                qk[r][m] = fmaf(query, other[m], qk[r][m]);
            }
        }
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        const int i = warp_id() * ROWS + r;
#pragma unroll
        for (int m = 0; m < 2; ++m) {
            const int j = lane_id() + 32 * m;
            const float decay = chunk.decays(i, j);
            system[i * (CHUNK + 1) + j] = j < i ? chunk.beta[i] * kk[r][m] * decay : 0.0f;
            if (scores) { scores[square + i * CHUNK + j] = i < rows ? qk[r][m] * decay : 0.0f; }
        }
    }
    __syncthreads();
    if (threadIdx.x < CHUNK) {  // a column each, from its diagonal down
        const int c = threadIdx.x;
        for (int i = 0; i < CHUNK; ++i) {
            float sum = 0.0f;
            for (int j = c; j < i; ++j) {
                sum = fmaf(system[i * (CHUNK + 1) + j], k[j * CHUNK + c], sum);
            }
            k[i * CHUNK + c] = i == c ? 1.0f : i < c ? 0.0f : -sum;
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < CHUNK * CHUNK; i += THREADS) { inverse[square + i] = k[i]; }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    delta_rule_scan(T* __restrict__ out, float* __restrict__ states, float* __restrict__ changes,
                    float* __restrict__ state, const T* __restrict__ qkv,
                    const float* __restrict__ gates, const float* __restrict__ inverse,
                    const float* __restrict__ scores, const int* __restrict__ starts, int seq_len,
                    int key_heads, int value_heads) {
    extern __shared__ uint4 memory[];
    __shared__ Chunk chunk;
    float* const units = reinterpret_cast<float*>(memory);  // (64, DK)
    float* const square = units + CHUNK * DK;
    float* const S = square + CHUNK * CHUNK;
    float* const change = S + DK * SLICE;  // (64, 32)
    const Place at(blockIdx.y, seq_len, key_heads, value_heads);
    const int column = blockIdx.x * SLICE + lane_id();
    const i64 whole_state = at.of_head() * DK * DV;
    each_key([&](int n, int own, i64 of_all) {
        S[own] = state ? state[whole_state + of_all] : 0.0f;
    });
    for (int c = 0; c < at.chunks; ++c) {
        const int first = c * CHUNK, rows = min(CHUNK, seq_len - first);
        const i64 of_square = at.of_chunk(c) * CHUNK * CHUNK;
        chunk.load(at, first, gates, starts, state != nullptr);
        load_units<DK>(units, qkv + at.key(first), at.columns(), rows, 1.0f);
        load_square(square, inverse + of_square);
        __syncthreads();
        if (changes) {
            const i64 there = at.of_chunk(c) * DK * DV;
            each_key([&](int n, int own, i64 of_all) { states[there + of_all] = S[own]; });
        }
        float x[ROWS] = {};
        add_rows<DK>(x, units, S, DK);
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            const int i = warp_id() * ROWS + r;
            const float v = i < rows ? to_f32(qkv[at.value(first + i) + column]) : 0.0f;
            x[r] = chunk.beta[i] * (v - chunk.from_state[i] * x[r]);
        }
        put_rows(change, x);
        __syncthreads();
        float y[ROWS] = {};
        add_rows<CHUNK>(y, square, change, (warp_id() + 1) * ROWS);
        __syncthreads();
        put_rows(change, y);
        if (changes) {
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                const int i = warp_id() * ROWS + r;
                if (i < rows) { changes[at.out(first + i) + column] = y[r]; }
            }
        }
        __syncthreads();
        float next[WARP_KEYS] = {};
        add_columns<DK>(next, units, warp_id() * WARP_KEYS, change, 0,
                        [&](int i) { return chunk.to_state[i]; });
        __syncthreads();
        if (out) {
            load_units<DK>(units, qkv + at.query(first), at.columns(), rows, query_scale());
            load_square(square, scores + of_square);
            __syncthreads();
            float z[ROWS] = {};
            add_rows<DK>(z, units, S, DK);
#pragma unroll
            for (int r = 0; r < ROWS; ++r) { z[r] *= chunk.from_state[warp_id() * ROWS + r]; }
            add_rows<CHUNK>(z, square, change, (warp_id() + 1) * ROWS);
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                const int i = warp_id() * ROWS + r;
                if (i < rows) { out[at.out(first + i) + column] = from_f32<T>(z[r]); }
            }
            __syncthreads();
        }
        each_key([&](int n, int own, i64 of_all) { S[own] = fmaf(chunk.whole(), S[own], next[n]); });
    }
    if (state) {
        each_key([&](int n, int own, i64 of_all) { state[whole_state + of_all] = S[own]; });
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    delta_rule_scan_backward(float* __restrict__ d_rests, float* __restrict__ d_states,
                             float* __restrict__ d_state, const T* __restrict__ d_out,
                             const T* __restrict__ qkv, const float* __restrict__ gates,
                             const float* __restrict__ inverse, const float* __restrict__ scores,
                             const int* __restrict__ starts, int seq_len, int key_heads,
                             int value_heads, int carried) {
    extern __shared__ uint4 memory[];
    __shared__ Chunk chunk;
    float* const units = reinterpret_cast<float*>(memory);  // (64, DK)
    float* const square = units + CHUNK * DK;
    float* const dS = square + CHUNK * CHUNK;
    float* const d_o = dS + DK * SLICE;  // (64, 32)
    float* const d_x = d_o + CHUNK * SLICE;
    const Place at(blockIdx.y, seq_len, key_heads, value_heads);
    const int column = blockIdx.x * SLICE + lane_id();
    const i64 whole_state = at.of_head() * DK * DV;
    each_key([&](int n, int own, i64 of_all) {
        dS[own] = d_state ? d_state[whole_state + of_all] : 0.0f;
    });
    const auto one = [](int i) { return 1.0f; };
    for (int c = at.chunks - 1; c >= 0; --c) {
        const int first = c * CHUNK, rows = min(CHUNK, seq_len - first);
        const i64 of_square = at.of_chunk(c) * CHUNK * CHUNK;
        chunk.load(at, first, gates, starts, carried);
        load_units<DK>(units, qkv + at.key(first), at.columns(), rows, 1.0f);
        load_square(square, scores + of_square);
        load_slice<SLICE>(d_o, d_out + at.out(first) + blockIdx.x * SLICE, value_heads * DV, rows);
        const i64 there = at.of_chunk(c) * DK * DV;
        each_key([&](int n, int own, i64 of_all) { d_states[there + of_all] = dS[own]; });
        __syncthreads();
        float x[ROWS] = {};
        add_rows<DK>(x, units, dS, DK);
#pragma unroll
        for (int r = 0; r < ROWS; ++r) { x[r] *= chunk.to_state[warp_id() * ROWS + r]; }
        add_columns<CHUNK>(x, square, warp_id() * ROWS, d_o, warp_id() * ROWS, one);
        put_rows(d_x, x);
        __syncthreads();
        load_square(square, inverse + of_square);
        __syncthreads();
        float y[ROWS] = {};
        add_columns<CHUNK>(y, square, warp_id() * ROWS, d_x, warp_id() * ROWS, one);
        __syncthreads();
        put_rows(d_x, y);
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            const int i = warp_id() * ROWS + r;
            if (i < rows) { d_rests[at.out(first + i) + column] = y[r]; }
        }
        __syncthreads();
        float next[WARP_KEYS] = {};
        add_columns<DK>(next, units, warp_id() * WARP_KEYS, d_x, 0,
                        [&](int i) { return -chunk.beta[i] * chunk.from_state[i]; });
        __syncthreads();
        load_units<DK>(units, qkv + at.query(first), at.columns(), rows, query_scale());
        __syncthreads();
        add_columns<DK>(next, units, warp_id() * WARP_KEYS, d_o, 0,
                        [&](int i) { return chunk.from_state[i]; });
        each_key([&](int n, int own, i64 of_all) {
            dS[own] = fmaf(chunk.whole(), dS[own], next[n]);
        });
    }
    if (d_state) {
        each_key([&](int n, int own, i64 of_all) { d_state[whole_state + of_all] = dS[own]; });
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    delta_rule_gradients(T* __restrict__ d_qkv, float* __restrict__ d_gates,
                         const T* __restrict__ d_out, const float* __restrict__ changes,
                         const float* __restrict__ d_rests, const float* __restrict__ states,
                         const float* __restrict__ d_states, const T* __restrict__ qkv,
                         const float* __restrict__ gates, const int* __restrict__ starts,
                         int seq_len, int key_heads, int value_heads, int carried) {
    extern __shared__ uint4 memory[];
    __shared__ Chunk chunk;
    __shared__ float q_length[CHUNK], k_length[CHUNK], of_rows[CHUNK], of_columns[CHUNK];
    __shared__ float reduced[32];
    float* const k = reinterpret_cast<float*>(memory);  // (64, PADDED)
    float* const q = k + CHUNK * PADDED;
    float* const d_scores = q + CHUNK * PADDED;  // (64, 64)
    float* const d_system = d_scores + CHUNK * CHUNK;
    constexpr int WIDE = SLICE + 1;
    float* const slices = k;  // 3 of (64, 33)
    const int first = blockIdx.x * CHUNK, rows = min(CHUNK, seq_len - first);
    const int group = value_heads / key_heads, lane = lane_id(), own = warp_id() * ROWS;
    float d_q[ROWS][LANE_KEYS] = {}, d_k[ROWS][LANE_KEYS] = {};
    for (int h = 0; h < group; ++h) {
        const Place at(blockIdx.y * group + h, seq_len, key_heads, value_heads);
        chunk.load(at, first, gates, starts, carried);
        const int stride = value_heads * DV;
        float by_scores[ROWS][2] = {}, by_system[ROWS][2] = {}, d_beta[ROWS] = {};
        for (int n = 0; n < DV; n += SLICE) {
            __syncthreads();
            load_slice<WIDE>(slices, d_out + at.out(first) + n, stride, rows);
            load_slice<WIDE>(slices + CHUNK * WIDE, d_rests + at.out(first) + n, stride, rows);
            load_slice<WIDE>(slices + 2 * CHUNK * WIDE, changes + at.out(first) + n, stride, rows);
            __syncthreads();
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                const int i = own + r;
                if (i < rows) {
                    const float d_rest = slices[(CHUNK + i) * WIDE + lane];
                    const i64 there = at.value(first + i) + n + lane;
                    d_beta[r] = fmaf(d_rest, to_f32(qkv[there]), d_beta[r]);
                    d_qkv[there] = from_f32<T>(chunk.beta[i] * d_rest);
                }
            }
#pragma unroll 2
            for (int j = 0; j < SLICE; ++j) {
                const float change[2] = {slices[(2 * CHUNK + lane) * WIDE + j],
                                         slices[(2 * CHUNK + lane + 32) * WIDE + j]};
#pragma unroll
                for (int r = 0; r < ROWS; ++r) {
                    const float d_o = slices[(own + r) * WIDE + j];
                    const float d_rest = slices[(CHUNK + own + r) * WIDE + j];
#pragma unroll
                    for (int m = 0; m < 2; ++m) {
                        by_scores[r][m] = fmaf(d_o, change[m], by_scores[r][m]);
                        by_system[r][m] = fmaf(d_rest, change[m], by_system[r][m]);
                    }
                }
            }
        }
        __syncthreads();
        load_units<PADDED>(k, qkv + at.key(first), at.columns(), rows, 1.0f, k_length);
        load_units<PADDED>(q, qkv + at.query(first), at.columns(), rows, query_scale(), q_length);
        __syncthreads();
        float kk[ROWS][2] = {}, qk[ROWS][2] = {}, by_columns[2] = {};
#pragma unroll 2
        for (int d = 0; d < DK; ++d) {
            const float other[2] = {k[lane * PADDED + d], k[(lane + 32) * PADDED + d]};
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                const float key = k[(own + r) * PADDED + d], query = q[(own + r) * PADDED + d];
#pragma unroll
                for (int m = 0; m < 2; ++m) {
                    kk[r][m] = fmaf(key, other[m], kk[r][m]);
                    qk[r][m] = fmaf(query, other[m], qk[r][m]);
                }
            }
        }
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            const int i = own + r;
            float of_row = 0.0f;
#pragma unroll
            for (int m = 0; m < 2; ++m) {
                const int j = lane + 32 * m;
                const float decay = chunk.decays(i, j), lower = j < i ? decay : 0.0f;
                const float d_score = by_scores[r][m] * decay;
                const float d_system_ = -by_system[r][m] * lower;
                d_beta[r] = fmaf(d_system_, kk[r][m], d_beta[r]);
                const float weighted = chunk.beta[i] * d_system_;
                d_scores[i * CHUNK + j] = d_score;
                d_system[i * CHUNK + j] = weighted;
                const float inner = j < i ? fmaf(d_score, qk[r][m], weighted * kk[r][m]) : 0.0f;
                of_row += inner;
                by_columns[m] += inner;
            }
            of_row = warp_sum(of_row);
            d_beta[r] = warp_sum(d_beta[r]);
            if (lane == 0) { of_rows[i] = of_row; }
        }
        __syncthreads();
        for (int j = 0; j < CHUNK; ++j) {
            float key[LANE_KEYS], query[LANE_KEYS];
#pragma unroll
            for (int m = 0; m < LANE_KEYS; ++m) {
                key[m] = k[j * PADDED + lane + 32 * m];
                query[m] = q[j * PADDED + lane + 32 * m];
            }
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                const float row_score = d_scores[(own + r) * CHUNK + j];
                const float score = d_scores[j * CHUNK + own + r];
                const float system =
                    d_system[j * CHUNK + own + r] + d_system[(own + r) * CHUNK + j];
#pragma unroll
                for (int m = 0; m < LANE_KEYS; ++m) {
                    d_q[r][m] = fmaf(row_score, key[m], d_q[r][m]);
                    d_k[r][m] = fmaf(score, query[m], fmaf(system, key[m], d_k[r][m]));
                }
            }
        }
        __syncthreads();  // d_scores and d_system were read: their memory is free
        d_scores[warp_id() * CHUNK + lane] = by_columns[0];
        d_scores[warp_id() * CHUNK + lane + 32] = by_columns[1];
        __syncthreads();
        if (threadIdx.x < CHUNK) {
            float sum = 0.0f;
#pragma unroll
            for (int w = 0; w < THREADS / 32; ++w) { sum += d_scores[w * CHUNK + threadIdx.x]; }
            of_columns[threadIdx.x] = sum;
        }
        const i64 there = at.of_chunk(blockIdx.x) * DK * DV;
        float y[ROWS][LANE_KEYS];
        times_state<T, false>(y, d_scores, d_out + at.out(first), stride, rows, states + there,
                              nullptr);
        float d_sums[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            const float factor = chunk.from_state[own + r];
            float dot = 0.0f;
#pragma unroll
            for (int m = 0; m < LANE_KEYS; ++m) {
                const float of_query = factor * y[r][m];
                dot = fmaf(of_query, q[(own + r) * PADDED + lane + 32 * m], dot);
                d_q[r][m] += of_query;
            }
            d_sums[r] = warp_sum(dot);
        }
        times_state<float, false>(y, d_scores, d_rests + at.out(first), stride, rows,
                                  states + there, nullptr);
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            const float factor = chunk.from_state[own + r], beta = chunk.beta[own + r];
            float dot = 0.0f;
#pragma unroll
            for (int m = 0; m < LANE_KEYS; ++m) {
                const float of_key = factor * y[r][m];
                dot = fmaf(of_key, k[(own + r) * PADDED + lane + 32 * m], dot);
                d_k[r][m] = fmaf(-beta, of_key, d_k[r][m]);
            }
            dot = warp_sum(dot);
            d_sums[r] = fmaf(-beta, dot, d_sums[r]);
            d_beta[r] -= dot;
        }
        float both = times_state<float, true>(y, d_scores, changes + at.out(first), stride, rows,
                                              d_states + there, states + there);
        float to_last = 0.0f;  // of this warp's rows
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            const int i = own + r;
            const float factor = chunk.to_state[i];
            float dot = 0.0f;
#pragma unroll
            for (int m = 0; m < LANE_KEYS; ++m) {
                const float of_key = factor * y[r][m];
                dot = fmaf(of_key, k[i * PADDED + lane + 32 * m], dot);
                d_k[r][m] += of_key;
            }
            dot = warp_sum(dot);
            to_last += dot;
            if (lane == 0) {
                of_rows[i] += d_sums[r] - dot;
                if (i < rows) { d_gates[at.gate(first + i) + value_heads] = d_beta[r]; }
            }
        }
        const float last = fmaf(chunk.whole(), both, lane == 0 ? to_last : 0.0f);
        const float of_last = block_sum(last, reduced);
        __syncthreads();
        if (threadIdx.x < CHUNK) {
            const int i = threadIdx.x;
            of_columns[i] = of_rows[i] - of_columns[i] + (i == CHUNK - 1 ? of_last : 0.0f);
        }
        __syncthreads();
        if (threadIdx.x < rows) {
            const int j = threadIdx.x;
            float d_decay = 0.0f;
            for (int i = CHUNK - 1; i >= j; --i) {
                if (chunk.begin[i] <= j) { d_decay += of_columns[i]; }
            }
            d_gates[at.gate(first + j)] = chunk.begin[j] == j ? 0.0f : d_decay;
        }
    }
    const Place at(blockIdx.y * group, seq_len, key_heads, value_heads);
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        const int i = own + r;
        float of_query = 0.0f, of_key = 0.0f;
#pragma unroll
        for (int m = 0; m < LANE_KEYS; ++m) {
            const int d = i * PADDED + lane + 32 * m;
            of_query = fmaf(q[d], d_q[r][m], of_query);  // scale and 1 / scale
            of_key = fmaf(k[d], d_k[r][m], of_key);
        }
        of_query = warp_sum(of_query), of_key = warp_sum(of_key);
        if (i < rows) {
#pragma unroll
            for (int m = 0; m < LANE_KEYS; ++m) {
                const int d = i * PADDED + lane + 32 * m;
                const float unit = q[d] * sqrtf((float)DK);
                const float query = fmaf(-unit, of_query, d_q[r][m] * query_scale());
                const float key = fmaf(-k[d], of_key, d_k[r][m]);
                d_qkv[at.query(first + i) + lane + 32 * m] = from_f32<T>(q_length[i] * query);
                d_qkv[at.key(first + i) + lane + 32 * m] = from_f32<T>(k_length[i] * key);
            }
        }
    }
}

constexpr int RECURRENCE_THREADS = 128, PARTS = RECURRENCE_THREADS / 32;

// A warp has DK / 4 rows of the state in registers, one column in each lane.
extern "C" __global__ void __launch_bounds__(RECURRENCE_THREADS)
    delta_rule_recurrence(T* __restrict__ out, float* __restrict__ state,
                          const T* __restrict__ qkv, const float* __restrict__ gates, int seq_len,
                          int key_heads, int value_heads) {
    constexpr int OWN = DK / PARTS;
    __shared__ float sums[2][PARTS][32], units[2][DK];
    const Place at(blockIdx.y, seq_len, key_heads, value_heads);
    const int column = blockIdx.x * SLICE + lane_id(), from = warp_id() * OWN;
    float* const there = state + at.of_head() * DK * DV + column;
    float S[OWN];
#pragma unroll
    for (int n = 0; n < OWN; ++n) { S[n] = there[(i64)(from + n) * DV]; }
    for (int t = 0; t < seq_len; ++t) {
        __syncthreads();
        if (warp_id() < 2) {  // the query, the key
            const T* row = qkv + (warp_id() ? at.key(t) : at.query(t));
            float x[LANE_KEYS], squares = 0.0f;
#pragma unroll
            for (int m = 0; m < LANE_KEYS; ++m) {
                x[m] = to_f32(row[lane_id() + 32 * m]);
                squares = fmaf(x[m], x[m], squares);
            }
            const float length = 1.0f / sqrtf(warp_sum(squares) + EPS);
#pragma unroll
            for (int m = 0; m < LANE_KEYS; ++m) {
                units[warp_id()][lane_id() + 32 * m] = x[m] * length;
            }
        }
        __syncthreads();
        const float decay = expf(gates[at.gate(t)]), beta = gates[at.gate(t) + value_heads];
        float seen = 0.0f;
#pragma unroll
        for (int n = 0; n < OWN; ++n) {
            S[n] *= decay;
            seen = fmaf(S[n], units[1][from + n], seen);
        }
        sums[0][warp_id()][lane_id()] = seen;
        __syncthreads();
        seen = 0.0f;
#pragma unroll
        for (int w = 0; w < PARTS; ++w) { seen += sums[0][w][lane_id()]; }
        const float change = beta * (to_f32(qkv[at.value(t) + column]) - seen);
        float result = 0.0f;
#pragma unroll
        for (int n = 0; n < OWN; ++n) {
            S[n] = fmaf(units[1][from + n], change, S[n]);
            result = fmaf(S[n], units[0][from + n], result);
        }
        sums[1][warp_id()][lane_id()] = result;
        __syncthreads();
        if (warp_id() == 0) {
            result = 0.0f;
#pragma unroll
            for (int w = 0; w < PARTS; ++w) { result += sums[1][w][lane_id()]; }
            out[at.out(t) + column] = from_f32<T>(result * query_scale());
        }
    }
#pragma unroll
    for (int n = 0; n < OWN; ++n) { there[(i64)(from + n) * DV] = S[n]; }
}
