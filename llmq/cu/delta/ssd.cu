// ssd.cu -- Mamba-2's state space (SSD), forward and backward, in chunks of 64 tokens; and token by
// token, for generation. SSD is the delta rule (delta_rule.cu) without the correction.
//
//   S = S * exp(decay) + k (beta * v)^T;  out = S^T q + skip * v
//
//   prepare        of each chunk alone: scores = lower((q k^T) * D * beta) + diagonal(skip), and
//                  factors: L * beta, from keys to the state behind; E, from the state in front to
//                  queries
//   scan           from chunk to chunk: out = E * (q S) + scores v, the next S = G * S + (L * beta *
//                  k)^T v
//   states         scan without out: stores the states in front of chunks
//   scan_backward  from the last chunk to the first: d_v = L * beta * (k dS) + scores^T d_out, and
//                  gradients of the states behind chunks, dS = G * dS + (E * q)^T d_out
//   gradients      of each chunk alone: for decays, betas and skips, and for q and k the parts of 8
//                  value heads each
//   sum            adds these parts of the gradients of q and k
//   recurrence     token by token
//
//   The reference has the formulas. D: the decays from one token to another of its document, else 0;
//   a state begins with 0 where a document does.
//
// Data     qkv, d_qkv: T (B, seq_len, 2 Hk DK + Hv DV), query, then key, then value heads; value head
//          h has the keys of head h * Hk / Hv. out, d_out: T (B, seq_len, Hv DV). gates, d_gates:
//          F32 (B, seq_len, 2, Hv), decays (logarithms), betas. skip: T (Hv); skip_partial: F32 (B,
//          chunks, Hv), its gradient's parts. Of each chunk, T (B, Hv, chunks, ..): scores (64, 64);
//          states, d_states (DV, DK); and F32 factors (2, 64). state, d_state: F32 (B, Hv, DK, DV)
//          or null, read and overwritten. starts: I32 (B, seq_len), the first position of each
//          token's document, or null: then all tokens see the state if `carried`.
// Launch   dynamic shared memory as llmq/ops/delta/ssd.py says, less than 99 KiB. prepare,
//          gradients: 256 threads for 8 value heads of a key head, grid (Hk * such parts of a key
//          head, B, chunks); sum: 256 threads, 16 bytes each. scan, states, scan_backward: 2 DV
//          threads, grid (1, Hv, B), the state in registers as in the delta rule's scans;
//          recurrence: 128 threads, grid (DV / 32, Hv, B).
// Cost     products on the tensor cores, FMAs for a token and a value head: prepare 64 DK / 8, scan
//          and scan_backward 2 DK DV + 64 DV, states DK DV, gradients 2 DK DV + 64 DV.
// Needs    sm_80. DK a multiple of 32 up to 128, DV 32 or 64. Hv a multiple of Hk. No atomics: every element is
//          summed by one thread, or one warp, in a fixed order.
// Same name  llmq/ops/delta/ssd.py  llmq/ref/delta/ssd.py  tests/ops/delta/test_ssd.py
#include "delta/delta_chunk.cuh"

constexpr int HEADS = 8;  // value heads of a block of prepare and gradients
enum Known { BEHIND, FRONT };  // a token's factors: to the state behind, from the state in front

__device__ __forceinline__ i64 of_known(const Place& at, int chunk) {
    return at.of_chunk(chunk) * 2 * CHUNK;
}
__device__ __forceinline__ float from_front(const Chunk& chunk, int token) {
    return chunk.begin[token] < 0 ? exponential(chunk.sums[token]) : 0.0f;
}

// Products of 16 queries, from m on, with 32 keys, from `column` on. Later keys than the queries
// are left out.
__device__ __forceinline__ void multiply_pairs(Sums (&sums)[2], const Tile<T>& q, const Tile<T>& k,
                                               int m, int column) {
#pragma unroll 1
    for (int d = 0; d < DK && column <= m; d += 16) {
        const Left<T> query = left<false>(q, m, d);
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            if (column + 16 * n <= m) { multiply(sums[n], query, right<true>(k, d, column + 16 * n)); }
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    ssd_prepare(T* __restrict__ scores, float* __restrict__ factors, const T* __restrict__ qkv,
                const float* __restrict__ gates, const T* __restrict__ skip,
                const int* __restrict__ starts, int seq_len, int key_heads, int value_heads,
                int carried) {
    extern __shared__ uint4 memory[];
    __shared__ Chunk chunk;
    T* const k_memory = reinterpret_cast<T*>(memory);
    const int index = gridDim.z - 1 - blockIdx.z, first = index * CHUNK;
    const int rows = min(CHUNK, seq_len - first), group = value_heads / key_heads;
    const int parts = gridDim.x / key_heads, key_head = blockIdx.x / parts;
    const int m = warp_id() / 2 * 16, column = warp_id() % 2 * 32;
    const int begin = blockIdx.x % parts * HEADS, stop = min(begin + HEADS, group);
    const auto head = [&](int h) {
        return Place(blockIdx.y, key_head * group + h, key_head, seq_len, key_heads, value_heads);
    };
    const Place at = head(begin);
    const Tile<T> k = stage<CHUNK, DK, THREADS>(k_memory, qkv + at.key(first), at.columns(), rows);
    const Tile<T> q = stage<CHUNK, DK, THREADS>(k_memory + CHUNK * (DK + 8), qkv + at.query(first),
                                                at.columns(), rows);
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
    Sums pairs[2] = {};
    multiply_pairs(pairs, q, k, m, column);
    for (int h = begin; h < stop; ++h) {
        const Place own = head(h);
        if (warp_id() == 0) { chunk.read(own, first, gates, starts, carried); }
        __syncthreads();
        const float skipped = to_f32(skip[own.head]);
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            const int c = column + 16 * n;
            Sums result;
#pragma unroll
            for (int e = 0; e < 8; ++e) {
                const int i = m + lane_row() + e / 2 % 2 * 8;
                const int j = c + e / 4 * 8 + lane_column() + e % 2;
                const float factor = chunk.decays(i, j) * chunk.beta[j];
                result[e / 4][e % 4] = fmaf(pairs[n][e / 4][e % 4], factor, i == j ? skipped : 0.0f);
            }
            put(scores + (own.of_chunk(index) * CHUNK + m) * CHUNK + c, CHUNK, 16, result);
        }
        const int t = threadIdx.x;
        if (t < CHUNK) {
            float* const to = factors + of_known(own, index) + t;
            to[BEHIND * CHUNK] = chunk.decays(CHUNK - 1, t) * chunk.beta[t];
            to[FRONT * CHUNK] = from_front(chunk, t);
        }
        __syncthreads();
    }
}

// The tiles of a scan in the order of use: values (BACK: gradients of out); with OUT, queries
// (BACK: keys), which read the state, and scores; then keys (BACK: queries), which are added to the
// state.
template <bool BACK, bool OUT> struct Scanned2 {
    static constexpr int STEPS = OUT ? 4 : 2;
    static constexpr int COLUMNS[4] = {SLICE, DK, CHUNK, DK};
    const Place& at;
    const T *d_out, *qkv, *scores;
    const float* factors;

    __device__ __forceinline__ int chunk(int turn) const { return BACK ? at.chunks - 1 - turn : turn; }
    __device__ __forceinline__ const float* known(int turn) const {
        return factors + of_known(at, chunk(turn));
    }
    template <int STEP> __device__ __forceinline__ Tile<T> of(int turn) const {
        constexpr bool READS = OUT && STEP == 1;
        const int c = chunk(turn), first = c * CHUNK, rows = min(CHUNK, at.seq_len - first);
        if constexpr (STEP == 0) {
            const int column = blockIdx.x * SLICE;
            if constexpr (BACK) {
                return {d_out + at.out(first) + column, at.value_heads * DV, rows};
            }
            return {qkv + at.value(first) + column, at.columns(), rows};
        }
        if constexpr (OUT && STEP == 2) {
            return {scores + at.of_chunk(c) * CHUNK * CHUNK, CHUNK, CHUNK};
        }
        return {qkv + (READS == BACK ? at.key(first) : at.query(first)), at.columns(), rows};
    }
};

// The body of a scan. states: the state before each chunk, or null. out: rows of `pitch` elements.
template <bool BACK, bool OUT>
__device__ __forceinline__ void walk(T* out, i64 pitch, T* states, float* state,
                                     const Scanned2<BACK, OUT>& sources) {
    extern __shared__ uint4 memory[];
    using Tiles = Ring<Scanned2<BACK, OUT>>;
    alignas(16) __shared__ float known[Tiles::KNOWN][2 * CHUNK];
    T* const tile = reinterpret_cast<T*>(memory);
    const Place& at = sources.at;
    const auto finish = [&](int turn) {
        const int first = sources.chunk(turn) * CHUNK;
        if (OUT) { copy_out(out + first * pitch, pitch, at.seq_len - first, tile); }
    };
    Tiles ring{sources, reinterpret_cast<char*>(tile + CHUNK * TILE), known, at.chunks};
    ring.start();
    State here(ring.memory);
    here.read(state);
    for (int turn = 0; turn < at.chunks; ++turn) {
        const float whole = __ldg(sources.known(turn) + FRONT * CHUNK + CHUNK - 1);
        const Tokens reads{known[turn % Tiles::KNOWN] + (BACK ? BEHIND : FRONT) * CHUNK};
        const Tokens added{known[turn % Tiles::KNOWN] + (BACK ? FRONT : BEHIND) * CHUNK};
        const Tile<T> own = ring.template next<0>(turn);
        if (turn) { finish(turn - 1); }
        if (BACK || !OUT) { here.put_into(states + at.of_chunk(sources.chunk(turn)) * DK * DV); }
        Left<T> x[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) { x[k] = left<true>(own, here.value, 16 * k); }
        if constexpr (OUT) {
            Sums read[4] = {};
            here.read_by(read, ring.template next<1>(turn));
#pragma unroll
            for (int n = 0; n < 4; ++n) { reads.scale(read[n], 16 * n); }
            multiply_lower<!BACK>(read, [&](int k) { return x[k]; }, ring.template next<2>(turn));
#pragma unroll
            for (int n = 0; n < 4; ++n) { put_tile<true>(tile, TILE, here.value, 16 * n, read[n]); }
        }
        const Tile<T> rows = ring.template next<OUT ? 3 : 1>(turn);
        here.times(whole);
        here.add([&](int k) { return added.scaled(x[k], 16 * k); }, rows);
    }
    __syncthreads();
    finish(at.chunks - 1);
    here.write(state);
}

extern "C" __global__ void __launch_bounds__(SCAN_THREADS, 1)
    ssd_scan(T* __restrict__ out, float* __restrict__ state, const T* __restrict__ qkv,
             const T* __restrict__ scores, const float* __restrict__ factors, int seq_len,
             int key_heads, int value_heads) {
    const Place at(blockIdx.y, seq_len, key_heads, value_heads);
    float* const carried = state ? state + at.of_head() * DK * DV : nullptr;
    const Scanned2<false, true> sources{at, nullptr, qkv, scores, factors};
    walk<false, true>(out + at.out(0) + blockIdx.x * SLICE, value_heads * DV, nullptr, carried, sources);
}

extern "C" __global__ void __launch_bounds__(SCAN_THREADS, 1)
    ssd_states(T* __restrict__ states, float* __restrict__ state, const T* __restrict__ qkv,
               const float* __restrict__ factors, int seq_len, int key_heads, int value_heads) {
    const Place at(blockIdx.y, seq_len, key_heads, value_heads);
    float* const carried = state ? state + at.of_head() * DK * DV : nullptr;
    const Scanned2<false, false> sources{at, nullptr, qkv, nullptr, factors};
    walk<false, false>(nullptr, 0, states, carried, sources);
}

extern "C" __global__ void __launch_bounds__(SCAN_THREADS, 1)
    ssd_scan_backward(T* __restrict__ d_qkv, T* __restrict__ d_states, float* __restrict__ d_state,
                      const T* __restrict__ d_out, const T* __restrict__ qkv,
                      const T* __restrict__ scores, const float* __restrict__ factors, int seq_len,
                      int key_heads, int value_heads) {
    const Place at(blockIdx.y, seq_len, key_heads, value_heads);
    float* const carried = d_state ? d_state + at.of_head() * DK * DV : nullptr;
    const Scanned2<true, true> sources{at, d_out, qkv, scores, factors};
    walk<true, true>(d_qkv + at.value(0) + blockIdx.x * SLICE, at.columns(), d_states, carried, sources);
}

// Let p = x (16 rows, DV) times `state` (DV, DK), times `factor`. Adds p times `more` to the
// gradient of 16 rows, and the dot products of p and `others`, rows of the same tokens, to dot.
// factor, more: of the thread's rows g and g + 8.
__device__ __forceinline__ void add_product(Gradient& to, const Tile<T>& x, const Tile<T>& state,
                                            const Tile<T>& others, int m, int column,
                                            const float (&factor)[2], const float (&more)[2],
                                            float (&dot)[2]) {
    to.each([&](int c, Sums& sums) {
        Sums own = {};
#pragma unroll COPIED ? 2 : 1
        for (int n = 0; n < DV; n += 16) {
            multiply(own, left<false>(x, m, n), right<false>(state, n, column + 16 * c));
        }
#pragma unroll
        for (int e = 0; e < 8; ++e) { own[e / 4][e % 4] *= factor[e / 2 % 2]; }
        add_dots(dot, own, left<false>(others, m, column + 16 * c));
#pragma unroll
        for (int e = 0; e < 8; ++e) {
            sums[e / 4][e % 4] = fmaf(own[e / 4][e % 4], more[e / 2 % 2], sums[e / 4][e % 4]);
        }
    });
}

// Sums from which a head's gradients of gates are made. rows, columns: over pairs, for the later
// and the earlier token (columns: separately for each 16 later tokens). front: reads of the state
// in front. behind: terms of the state behind.
struct GateSums {
    float rows[2][CHUNK], columns[4][CHUNK], front[2][CHUNK], behind[2][CHUNK], diagonal[CHUNK];
    float states[THREADS / 32];
};

// One warp computes the gradients of a head's gates and skip.
__device__ __forceinline__ void put_gates(const GateSums& of, const Chunk& chunk, const Place& at,
                                          int first, float* d_gates, float* d_skip) {
    const int rows = min(CHUNK, at.seq_len - first);
    float of_last = 0.0f, behind = 0.0f, of_second = 0.0f;
#pragma unroll
    for (int w = 0; w < THREADS / 32; ++w) { of_last += of.states[w]; }
#pragma unroll
    for (int t = lane_id(); t < CHUNK; t += 32) {
        behind = fmaf(chunk.beta[t], of.behind[0][t] + of.behind[1][t], behind);
    }
    of_last = fmaf(of_last, from_front(chunk, CHUNK - 1), warp_sum(behind));
    const float skipped = warp_sum(of.diagonal[lane_id()] + of.diagonal[lane_id() + 32]);
    if (lane_id() == 0) { *d_skip = skipped; }
#pragma unroll
    for (int part = 1; part >= 0; --part) {
        const int t = lane_id() + 32 * part;
        float d_beta = of.behind[0][t] + of.behind[1][t];
#pragma unroll
        for (int n = 0; n < 4; ++n) { d_beta += of.columns[n][t]; }
        float total = of.rows[0][t] + of.rows[1][t] - chunk.beta[t] * d_beta;
        total += of.front[0][t] + of.front[1][t] + (t == CHUNK - 1 ? of_last : 0.0f);
        // Add the totals of later tokens of the document, whose sums of decays include this token.
#pragma unroll
        for (int n = 1; n < 32; n *= 2) {
            const float later = __shfl_down_sync(0xFFFFFFFFu, total, n);
            if (lane_id() + n < 32 && chunk.begin[t + n] <= t) { total += later; }
        }
        if (part == 0 && chunk.begin[32] <= t) { total += of_second; }
        of_second = from_lane(total, 0);
        if (t < rows) {
            float* const to = d_gates + at.gate(first + t);
            to[0] = chunk.begin[t] == t ? 0.0f : total;
            to[at.value_heads] = d_beta;
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    ssd_gradients(T* __restrict__ d_keys, float* __restrict__ d_gates,
                  float* __restrict__ skip_partial, const T* __restrict__ d_out,
                  const T* __restrict__ states, const T* __restrict__ d_states,
                  const T* __restrict__ qkv, const float* __restrict__ gates,
                  const int* __restrict__ starts, int seq_len, int key_heads, int value_heads,
                  int carried) {
    extern __shared__ uint4 memory[];
    __shared__ Chunk chunk;
    __shared__ GateSums of_gates;
    constexpr int KEYS = CHUNK * (DK + 8), VALUES = CHUNK * (DV + 8), STATE = DV * (DK + 8);
    T* const keys = reinterpret_cast<T*>(memory);
    T *const values = keys + (COPIED ? 2 * KEYS : 0), *const slices = values + 2 * VALUES;
    const int index = blockIdx.z, first = index * CHUNK, rows = min(CHUNK, seq_len - first);
    const int group = value_heads / key_heads, half = warp_id() % 2, m = 16 * (warp_id() / 2);
    const int parts = gridDim.x / key_heads, key_head = blockIdx.x / parts;
    const int part = blockIdx.x % parts, stop = min((part + 1) * HEADS, group);
    const int column = half * (DK / 2);  // first of this warp's channels of queries and keys
    const auto head = [&](int h) {
        return Place(blockIdx.y, key_head * group + h, key_head, seq_len, key_heads, value_heads);
    };
    const Place shared = head(part * HEADS);
    const int columns = shared.columns();
    const Tile<T> k = stage<CHUNK, DK, THREADS>(keys, qkv + shared.key(first), columns, rows);
    const Tile<T> q = stage<CHUNK, DK, THREADS>(keys + KEYS, qkv + shared.query(first), columns, rows);
    cp_async_commit();
    const int pitch = 2 * key_heads * DK;  // a row: gradients of all queries, then of all keys
    const i64 own_row = ((i64)part * gridDim.y + blockIdx.y) * seq_len + first + m;
    T* const to = d_keys + own_row * pitch + key_head * DK + column;
    Gradient d_q(to, pitch, rows - m), d_k(to + key_heads * DK, pitch, rows - m);
    cp_async_wait<0>();
    __syncthreads();
    Sums pairs[2] = {}, d_pairs[2] = {};
    multiply_pairs(pairs, q, k, m, 32 * half);
    for (int h = part * HEADS; h < stop; ++h) {
        const Place at = head(h);
        const i64 of_state = at.of_chunk(index) * DK * DV;
        const Tile<T> v = stage<CHUNK, DV, THREADS, true>(values, qkv + at.value(first), columns, rows);
        const Tile<T> d_o = stage<CHUNK, DV, THREADS, true>(values + VALUES, d_out + at.out(first),
                                                            value_heads * DV, rows);
        cp_async_commit();
        const Tile<T> s = stage<DV, DK, THREADS, true>(slices, states + of_state, DK, DV);
        const Tile<T> d_s = stage<DV, DK, THREADS, true>(slices + STATE, d_states + of_state, DK, DV);
        cp_async_commit();
        if (warp_id() == 0) { chunk.read(at, first, gates, starts, carried); }
        cp_async_wait<1>();
        __syncthreads();
        float by_row[2] = {};
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            const int c = 32 * half + 16 * n;
            float by_column[4] = {};
            if (c <= m) {
                Sums x = {};
#pragma unroll COPIED ? 4 : 1
                for (int d = 0; d < DV; d += 16) {
                    multiply(x, left<false>(d_o, m, d), right<true>(v, d, c));
                }
                if (c == m) {
                    each_diagonal(x, [&](int r, float d) { of_gates.diagonal[m + r] = d; });
                }
#pragma unroll
                for (int e = 0; e < 8; ++e) {
                    const int i = m + lane_row() + e / 2 % 2 * 8;
                    const int j = c + e / 4 * 8 + lane_column() + e % 2;
                    const float decayed = x[e / 4][e % 4] * chunk.decays(i, j), beta = chunk.beta[j];
                    const float product = decayed * pairs[n][e / 4][e % 4];
                    d_pairs[n][e / 4][e % 4] = fmaf(decayed, beta, d_pairs[n][e / 4][e % 4]);
                    by_row[e / 2 % 2] = fmaf(product, beta, by_row[e / 2 % 2]);
                    by_column[e / 4 * 2 + e % 2] += product;
                }
            }
#pragma unroll
            for (int e = 0; e < 4; ++e) {
#pragma unroll
                for (int lanes = 4; lanes < 32; lanes *= 2) {
                    by_column[e] += __shfl_xor_sync(0xFFFFFFFFu, by_column[e], lanes);
                }
                if (lane_row() == 0) {
                    of_gates.columns[m / 16][c + e / 2 * 8 + lane_column() + e % 2] = by_column[e];
                }
            }
        }
        put_dots(of_gates.rows[half] + m, by_row);
        float front[2], behind[2], beta[2], by_front[2] = {}, by_behind[2] = {};
        const float one[2] = {1.0f, 1.0f};
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int i = m + lane_row() + 8 * r;
            front[r] = from_front(chunk, i), behind[r] = chunk.decays(CHUNK - 1, i);
            beta[r] = chunk.beta[i];
        }
        cp_async_wait<0>();
        __syncthreads();
        add_product(d_q, d_o, s, q, m, column, front, one, by_front);
        add_product(d_k, v, d_s, k, m, column, behind, beta, by_behind);
        put_dots(of_gates.front[half] + m, by_front);
        put_dots(of_gates.behind[half] + m, by_behind);
        float of_state_sum = 0.0f;
        for (int i = threadIdx.x; i < DV * DK; i += THREADS) {
            const int place = i / DK * s.pitch + i % DK;
            of_state_sum = fmaf(to_f32(s.at[place]), to_f32(d_s.at[place]), of_state_sum);
        }
        of_state_sum = warp_sum(of_state_sum);
        if (lane_id() == 0) { of_gates.states[threadIdx.x / 32] = of_state_sum; }
        __syncthreads();
        if (warp_id() == 0) {
            const i64 place = (at.batch * at.chunks + index) * value_heads + at.head;
            put_gates(of_gates, chunk, at, first, d_gates, skip_partial + place);
        }
    }
    __syncthreads();
    constexpr int SQUARE = CHUNK + 8;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
        put_tile<false>(values, SQUARE, m, 32 * half + 16 * n, d_pairs[n]);
    }
    __syncthreads();
    const Tile<T> square = {values, SQUARE, CHUNK};
    const auto add = [&](Gradient& to, const Left<T>& a, const Tile<T>& of, int n) {
        to.each([&](int c, Sums& sums) {
            multiply(sums, a, right<false>(of, n, column + 16 * c));
        });
    };
#pragma unroll 1
    for (int n = 0; n <= m; n += 16) { add(d_q, left<false>(square, m, n), k, n); }
#pragma unroll 1
    for (int n = m; n < CHUNK; n += 16) { add(d_k, left<true>(square, m, n), q, n); }
    if constexpr (COPIED) {
        d_q.each([&](int c, Sums& sums) { put(d_q.to + 16 * c, pitch, rows - m, sums); });
        d_k.each([&](int c, Sums& sums) { put(d_k.to + 16 * c, pitch, rows - m, sums); });
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    ssd_sum(T* __restrict__ d_qkv, const T* __restrict__ d_keys, i64 rows, int parts, int keys,
            int columns) {
    const i64 place = ((i64)blockIdx.x * THREADS + threadIdx.x) * Vec<T>::N;
    if (place >= rows * keys) { return; }
    float sums[Vec<T>::N] = {};
    for (int p = 0; p < parts; ++p) {
        const Vec<T> x = load_vec(d_keys + p * rows * keys + place);
#pragma unroll
        for (int e = 0; e < Vec<T>::N; e += 2) {
            const float2 two = x.two(e);
            sums[e] += two.x, sums[e + 1] += two.y;
        }
    }
    Vec<T> total;
#pragma unroll
    for (int e = 0; e < Vec<T>::N; e += 2) { total.set_two(e, sums[e], sums[e + 1]); }
    store_vec(d_qkv + place / keys * columns + place % keys, total);
}

constexpr int RECURRENCE_THREADS = 128, PARTS = RECURRENCE_THREADS / 32;

// A warp has DK / 4 rows of the state in registers, one column in each lane.
extern "C" __global__ void __launch_bounds__(RECURRENCE_THREADS)
    ssd_recurrence(T* __restrict__ out, float* __restrict__ state, const T* __restrict__ qkv,
                   const float* __restrict__ gates, const T* __restrict__ skip, int seq_len,
                   int key_heads, int value_heads) {
    constexpr int OWN = DK / PARTS;
    __shared__ float sums[PARTS][32];
    const Place at(blockIdx.y, seq_len, key_heads, value_heads);
    const int column = blockIdx.x * 32 + lane_id(), from = warp_id() * OWN;
    float* const there = state + at.of_head() * DK * DV + column;
    const float skipped = to_f32(skip[at.head]);
    float S[OWN];
#pragma unroll
    for (int n = 0; n < OWN; ++n) { S[n] = there[(i64)(from + n) * DV]; }
    for (int t = 0; t < seq_len; ++t) {
        const float decay = expf(gates[at.gate(t)]), v = to_f32(qkv[at.value(t) + column]);
        const float change = gates[at.gate(t) + value_heads] * v;
        const T *const q = qkv + at.query(t) + from, *const k = qkv + at.key(t) + from;
        float result = 0.0f;
#pragma unroll
        for (int n = 0; n < OWN; ++n) {
            S[n] = fmaf(to_f32(k[n]), change, S[n] * decay);
            result = fmaf(S[n], to_f32(q[n]), result);
        }
        sums[warp_id()][lane_id()] = result;
        __syncthreads();
        if (warp_id() == 0) {
            result = skipped * v;
#pragma unroll
            for (int w = 0; w < PARTS; ++w) { result += sums[w][lane_id()]; }
            out[at.out(t) + column] = from_f32<T>(result);
        }
        __syncthreads();
    }
#pragma unroll
    for (int n = 0; n < OWN; ++n) { there[(i64)(from + n) * DV] = S[n]; }
}
