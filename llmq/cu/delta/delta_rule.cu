// delta_rule.cu -- the gated delta rule, forward and backward, in chunks of 64 tokens; and token by
// token, for generation.
//
//   S = S * exp(decay);  change = beta * (v - S^T k);  S = S + k change^T;  out = S^T q / sqrt(DK)
//
//   prepare        of each chunk alone: inverse = (1 + lower(beta * (k k^T) * D))^-1,
//                  u = inverse (beta * v), w = inverse (beta * E * k), scores = lower((q k^T) * D)
//   scan           from chunk to chunk: change = u - w S, out, the next S
//   states         scan without out: stores the states in front of chunks, and the changes
//   scan_backward  from the last chunk to the first: gradients of the states behind chunks and of
//                  the changes
//   gradients      of each chunk alone: of q, k, v, decays and betas
//   recurrence     token by token
//
//   The reference has the formulas. q and k are divided by their lengths, scores and out by
//   sqrt(DK): kernels multiply sums by these factors and leave q and k unchanged. D: decay from one
//   token to another of the same document, else 0; E: decay from the state in front to a token. A
//   document begins with a state of 0.
//
// Data     declared in llmq/ops/delta/delta_rule.py. qkv: query, key, then value heads; value head
//          h has the keys of head h * Hk / Hv. gates: decays (logarithms), betas. inverse: blocks
//          of 16 x 16 above the diagonal hold anything. factors: named in delta_chunk.cuh. state,
//          d_state: overwritten, or null. starts: first position of each token's document, or
//          null: then all tokens see the state if `carried`.
// Launch   dynamic shared memory as llmq/ops/delta/delta_rule.py says, less than 100 KB on GPUs
//          that have no more. prepare: 256 threads, grid (Hv, B, chunks), last chunk first;
//          gradients: 256 threads, grid (Hk, B, chunks), a loop over each key head's value heads.
//          These orders reuse L2: scans begin with tiles just written, gradients with a scan's
//          last. scan, states, scan_backward: two threads for each of 64 columns of v (32 if DV is
//          no multiple of 64), grid (DV / 64, Hv, B); recurrence: 128 threads, grid (DV / 32, Hv,
//          B). A scan's warp holds 16 columns of v of a state in registers, F32, transposed:
//          rounded to T, the registers are the left factor of the warp's next product, and no warp
//          waits for another's state. .._sm90 (delta_sm90.cuh): 192 threads, grid (2, Hv, B) in
//          clusters of 2.
// Cost     products on the tensor cores, FMAs for a token and a value head: prepare 64 (DK + DV) +
//          128 DK, states 2 DK DV, scan 3 DK DV + 64 DV, scan_backward 3 DK DV + 64 DV,
//          gradients 3 DK DV + 64 (3 DV + 4 DK). All tensors are read and written once, but tensors
//          that a scan's blocks share DV / 64 times (once on Hopper).
// Needs    sm_80; .._sm90: sm_90a, BF16, DK 64 or 128, DV 128, seq_len a multiple of 64 or B = 1. DK, DV
//          multiples of 32 up to 128. Hv a multiple of Hk. No atomics: every element is summed by one
//          thread, or one warp, in a fixed order.
#include "delta/delta_chunk.cuh"
#include "delta/delta_gradients.cuh"
#include "delta/delta_sm90.cuh"

constexpr int SYSTEM = CHUNK + 8;  // floats of a row in shared memory
constexpr int LANE_KEYS = DK / 32;
constexpr float EPS = 1e-6f;  // added to squared lengths of queries and keys

__device__ __forceinline__ float query_scale() { return 1.0f / sqrtf((float)DK); }

// Replace `system`, whose part below the diagonal is read, by (1 + system)^-1. The first 32 columns
// of the last 32 rows go to the last columns of the first rows (solved_at). Diagonal blocks come
// from substitution, lower blocks from products: with inverted diagonal blocks a and b, block x
// becomes -b x a. All threads call this function and wait for each other afterwards.
__device__ __forceinline__ void invert(float* system) {
    constexpr bool EXACT = sizeof(T) == 4;
    const int warp = warp_id(), column = lane_id() % 16;
    const Tile<float, true> tile = {system, SYSTEM, CHUNK};
    if (warp < 2) {  // two diagonal blocks, a column in each lane, and the block below
        const int from = warp * 32, row = from + 16;
        float* const block = system + (from + lane_id() / 16 * 16) * (SYSTEM + 1);
        float x[16];
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            float sum = 0.0f;
#pragma unroll
            for (int j = 0; j < i; ++j) { sum = fmaf(block[i * SYSTEM + j], x[j], sum); }
            x[i] = i == column ? 1.0f : -sum;
        }
        __syncwarp();
#pragma unroll
        for (int i = 0; i < 16; ++i) { block[i * SYSTEM + column] = x[i]; }
        __syncwarp();
        Sums of = {}, y = {};
        multiply<EXACT>(of, left<false>(tile, row, row), right<false>(tile, row, from));
        multiply<EXACT>(y, negative(to_left<float>(of)), right<false>(tile, from, from));
        __syncwarp();
        put_tile<false>(system, SYSTEM, row, from, y);
    }
    __syncthreads();
    if (warp < 4) {
        const int row = 32 + warp / 2 * 16, side = warp % 2;
        Sums x[2] = {}, y = {};
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            if (k > warp / 2) { continue; }  // above the diagonal
            const Left<float> a = left<false>(tile, row, 32 + 16 * k);
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                multiply<EXACT>(x[n], a, right<false>(tile, 32 + 16 * k, 16 * n));
            }
        }
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            if (k < side) { continue; }
            const Right<float> b = right<false>(tile, 16 * k, 16 * side);
            multiply<EXACT>(y, negative(to_left<float>(x[k])), b);
        }
        put_tile<false>(system, SYSTEM, row - 32, 32 + 16 * side, y);
    }
}
__device__ __forceinline__ const float* solved_at(const float* solved, int row, int column) {
    const bool moved = row >= 32 && column < 32;
    return solved + row * SYSTEM + column + (moved ? 32 - 32 * SYSTEM : 0);
}

// Write (solved, its columns times factors) times a tile to `to`: 64 rows of WIDTH elements. A warp
// computes half the columns of 16 rows, from row 16 m on.
template <int WIDTH>
__device__ __forceinline__ void apply(T* to, const float* solved, const Tile<T>& tile,
                                      const float* factors, int m) {
    const int column = warp_id() % 2 * (WIDTH / 2);
    Sums sums[WIDTH / 32] = {};
#pragma unroll 1
    for (int k = 0; k <= m; ++k) {
        const float* const from = solved_at(solved, 16 * m, 16 * k) + lane_row() * SYSTEM + lane_column();
        Left<T> a;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float2 x = load_two(from + i % 2 * 8 * SYSTEM + i / 2 * 8);
            const float2 f = load_two(factors + 16 * k + lane_column() + i / 2 * 8);
            a.set(i, x.x * f.x, x.y * f.y);
        }
#pragma unroll
        for (int n = 0; n < WIDTH / 32; ++n) {
            multiply(sums[n], a, right<false>(tile, 16 * k, column + 16 * n));
        }
    }
#pragma unroll
    for (int n = 0; n < WIDTH / 32; ++n) {
        put(to + 16 * m * WIDTH + column + 16 * n, WIDTH, 16, sums[n]);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, PREPARE_BLOCKS)
    delta_rule_prepare(T* __restrict__ u, T* __restrict__ w, T* __restrict__ inverse,
                       T* __restrict__ scores, float* __restrict__ factors,
                       const T* __restrict__ qkv, const float* __restrict__ gates,
                       const int* __restrict__ starts, int seq_len, int key_heads, int value_heads,
                       int carried) {
    extern __shared__ uint4 memory[];
    __shared__ Chunk chunk;
    __shared__ float k_length[CHUNK], q_length[CHUNK], of_w[CHUNK];
    float* const system = reinterpret_cast<float*>(memory);
    T* const k_memory = reinterpret_cast<T*>(system + CHUNK * SYSTEM);
    T* const rests = k_memory + CHUNK * (DK + 8);  // first queries, then values
    const int index = gridDim.z - 1 - blockIdx.z;
    const int first = index * CHUNK, rows = min(CHUNK, seq_len - first), i = threadIdx.x;
    const int m = warp_id() / 2 * 16, column = warp_id() % 2 * 32;
    const Place at(blockIdx.y, blockIdx.x, blockIdx.x * key_heads / value_heads, seq_len, key_heads,
                   value_heads);
    const int columns = at.columns();
    const i64 of_chunk = at.of_chunk(index);
    const Tile<T> k = stage<CHUNK, DK, THREADS>(k_memory, qkv + at.key(first), columns, rows);
    const Tile<T> q = stage<CHUNK, DK, THREADS>(rests, qkv + at.query(first), columns, rows);
    cp_async_commit();
    if (warp_id() == 0) { chunk.read(at, first, gates, starts, carried); }
    cp_async_wait<0>();
    __syncthreads();
    const auto put_lengths = [&](float* to, const Sums& squares, float scale) {
        each_diagonal(squares, [&](int r, float x) {
            to[r] = sizeof(T) == 2 ? scale * rsqrtf(x + EPS) : scale / sqrtf(x + EPS);
        });
    };
    Sums kk[2] = {}, qk[2] = {};
#pragma unroll 1
    for (int row = m; column > m && row < CHUNK; row += CHUNK / 2) {  // two warps are above the diagonal
        Sums qq = {};
#pragma unroll 2
        for (int d = 0; d < DK; d += 16) {
            const Left<T> query = left<false>(q, row, d);
            multiply(qq, query, turned(query));
        }
        put_lengths(q_length + row, qq, query_scale());
    }
#pragma unroll 2
    for (int d = 0; d < DK && column <= m; d += 16) {
        const Left<T> key = left<false>(k, m, d), query = left<false>(q, m, d);
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            if (column + 16 * n > m) { continue; }
            const Right<T> b = right<true>(k, d, column + 16 * n);
            multiply(kk[n], key, b);
            multiply(qk[n], query, b);
        }
    }
#pragma unroll
    for (int n = 0; n < 2; ++n) {
        if (column + 16 * n == m) { put_lengths(k_length + m, kk[n], 1.0f); }
    }
    __syncthreads();
    const Tile<T> v = stage<CHUNK, DV, THREADS>(rests, qkv + at.value(first), columns, rows);
    cp_async_commit();
#pragma unroll
    for (int n = 0; n < 2; ++n) {
        const int c = column + 16 * n;
        if (c <= m) {
            scale_pairs(kk[n], qk[n], chunk, 1.0f, k_length, q_length, m, c);
            put_tile<false>(system, SYSTEM, m, c, kk[n]);
        }
        if (scores) { put(scores + (of_chunk * CHUNK + m) * CHUNK + c, CHUNK, 16, qk[n]); }
    }
    __syncthreads();
    if (i >= THREADS - CHUNK) {  // warps that do not invert
        const int t = i - (THREADS - CHUNK);
        const float sum = chunk.sums[t];
        const float from_state = chunk.begin[t] < 0 ? exponential(sum) : 0.0f;
        float* const to = factors + of_factors(at, index) + t;
        of_w[t] = chunk.beta[t] * (from_state * k_length[t]);
        to[TO_KEY * CHUNK] = chunk.decays(CHUNK - 1, t) * k_length[t];
        to[FROM_QUERY * CHUNK] = from_state * q_length[t];
        to[SUMS * CHUNK] = sum;
        to[FROM_STATE * CHUNK] = from_state;
        to[KEY_LENGTH * CHUNK] = k_length[t];
        to[QUERY_LENGTH * CHUNK] = q_length[t];
    }
    invert(system);
    cp_async_wait<0>();
    __syncthreads();
    // A warp whose rows take many products for u takes few for w.
    apply<DV>(u + of_chunk * CHUNK * DV, system, v, chunk.beta, m / 16);
    apply<DK>(w + of_chunk * CHUNK * DK, system, k, of_w, 3 - m / 16);
    if (inverse) {
        T* const to = inverse + of_chunk * CHUNK * CHUNK;
        for (int n = Vec<T>::N * i; n < CHUNK * CHUNK; n += Vec<T>::N * THREADS) {
            const int row = n / CHUNK, c = n % CHUNK;
            if (c / 16 > row / 16) { continue; }  // never read
            Vec<T> x;
#pragma unroll
            for (int e = 0; e < Vec<T>::N; e += 2) {
                const float2 two = load_two(solved_at(system, row, c) + e);
                x.set_two(e, two.x, two.y);
            }
            store_vec(to + n, x);
        }
    }
}

template <bool OUT, class Sources>
__device__ __forceinline__ void scan(T* out, T* states, T* changes, float* state,
                                     const Sources& sources) {
    extern __shared__ uint4 memory[];
    alignas(16) __shared__ float known[2][2 * CHUNK];
    T* const tile = reinterpret_cast<T*>(memory);
    const Place& at = sources.at;
    const auto finish = [&](int c) {
        OUT ? put_out(out, at, c, tile) : put_changes(changes, at, c, tile);
    };
    Ring<Sources> ring{sources, reinterpret_cast<char*>(tile + CHUNK * TILE), known, at.chunks};
    static_assert(decltype(ring)::KNOWN == 2);
    ring.start();
    State here(ring.memory);
    here.read(state);
    for (int c = 0; c < at.chunks; ++c) {
        const float whole = __ldg(sources.known(c) + FROM_STATE * CHUNK + CHUNK - 1);
        const Tokens to_key{known[c % 2] + TO_KEY * CHUNK};
        Sums change[4] = {};
        const Tile<T> u = ring.template next<0>(c);
        if (c) { finish(c - 1); }
        if (!OUT) { here.put_into(states + at.of_chunk(c) * DK * DV); }
#pragma unroll
        for (int n = 0; n < 4; ++n) { to_sums(change[n], left<true>(u, here.value, 16 * n), -1.0f); }
        here.read_by(change, ring.template next<1>(c));
        multiply_by(change, -1.0f);
        if constexpr (OUT) {
            const Tokens from_query{known[c % 2] + FROM_QUERY * CHUNK};
            const Tile<T> queries = ring.template next<2>(c);
            Sums read[4] = {};
            if constexpr (State::IN_REGISTERS) { here.read_by(read, queries); }
            const Tile<T> scores = ring.template next<3>(c);
            if constexpr (State::IN_REGISTERS) {
#pragma unroll
                for (int n = 0; n < 4; ++n) { from_query.scale(read[n], 16 * n); }
                multiply_lower<true>(read, [&](int k) { return to_left<T>(change[k]); }, scores);
            }
#pragma unroll
            for (int n = 0; n < 4; ++n) {
                if constexpr (!State::IN_REGISTERS) {  // 16 tokens at a time: registers are few
                    here.each_tile([&](int k, Sums& sums) {
                        multiply(read[n], to_left<T>(sums), right<true>(queries, k * 16, n * 16));
                    });
                    from_query.scale(read[n], 16 * n);
#pragma unroll
                    for (int k = 0; k <= n; ++k) {
                        multiply(read[n], to_left<T>(change[k]), right<true>(scores, 16 * k, 16 * n));
                    }
                }
                put_tile<true>(tile, TILE, here.value, 16 * n, read[n]);
            }
        } else {
#pragma unroll
            for (int n = 0; n < 4; ++n) {
                put_tile<true>(tile, TILE, here.value, 16 * n, change[n]);
            }
        }
        const Tile<T> keys = ring.template next<OUT ? 4 : 2>(c);
        here.times(whole);
#pragma unroll
        for (int k = 0; k < 4; ++k) { to_key.scale(change[k], 16 * k); }
        here.add([&](int k) { return to_left<T>(change[k]); }, keys);
    }
    __syncthreads();
    finish(at.chunks - 1);
    here.write(state);
}

extern "C" __global__ void __launch_bounds__(SCAN_THREADS, 0)
    delta_rule_scan(T* __restrict__ out, float* __restrict__ state, const T* __restrict__ qkv,
                    const T* __restrict__ u, const T* __restrict__ w, const T* __restrict__ scores,
                    const float* __restrict__ factors, int seq_len, int key_heads,
                    int value_heads) {
    const Place at(blockIdx.y, seq_len, key_heads, value_heads);
    float* const carried = state ? state + at.of_head() * DK * DV : nullptr;
    const Scanned<false, OWN, OF_W, QUERIES, OF_SCORES, KEYS> sources{at, u, qkv, w, scores, factors};
    scan<true>(out, nullptr, nullptr, carried, sources);
}

extern "C" __global__ void __launch_bounds__(SCAN_THREADS, 0)
    delta_rule_states(T* __restrict__ states, T* __restrict__ changes, float* __restrict__ state,
                      const T* __restrict__ qkv, const T* __restrict__ u, const T* __restrict__ w,
                      const float* __restrict__ factors, int seq_len, int key_heads,
                      int value_heads) {
    const Place at(blockIdx.y, seq_len, key_heads, value_heads);
    float* const carried = state ? state + at.of_head() * DK * DV : nullptr;
    const Scanned<false, OWN, OF_W, KEYS> sources{at, u, qkv, w, nullptr, factors};
    scan<false>(nullptr, states, changes, carried, sources);
}

extern "C" __global__ void __launch_bounds__(SCAN_THREADS, 0)
    delta_rule_scan_backward(T* __restrict__ d_changes, T* __restrict__ d_states,
                             float* __restrict__ d_state, const T* __restrict__ d_out,
                             const T* __restrict__ qkv, const T* __restrict__ w,
                             const T* __restrict__ scores, const float* __restrict__ factors,
                             int seq_len, int key_heads, int value_heads) {
    const Place at(blockIdx.y, seq_len, key_heads, value_heads);
    const Scanned<true, OWN, KEYS, OF_SCORES, QUERIES, OF_W> sources{at, d_out, qkv, w, scores, factors};
    float* const carried = d_state ? d_state + at.of_head() * DK * DV : nullptr;
    extern __shared__ uint4 memory[];
    alignas(16) __shared__ float known[2][2 * CHUNK];
    T* const tile = reinterpret_cast<T*>(memory);
    const auto finish = [&](int c) { put_changes(d_changes, at, c, tile); };
    Ring<decltype(sources)> ring{sources, reinterpret_cast<char*>(tile + CHUNK * TILE), known,
                                 at.chunks};
    static_assert(decltype(ring)::KNOWN == 2);
    ring.start();
    State here(ring.memory);  // the gradient of the state
    here.read(carried);
    for (int turn = 0; turn < at.chunks; ++turn) {
        const int c = at.chunks - 1 - turn;
        const float whole = __ldg(sources.known(turn) + FROM_STATE * CHUNK + CHUNK - 1);
        const Tokens to_key{known[turn % 2] + TO_KEY * CHUNK};
        const Tokens from_query{known[turn % 2] + FROM_QUERY * CHUNK};
        Left<T> d_o[4];
        const Tile<T> o = ring.next<0>(turn);
        if (turn) { finish(c + 1); }
        here.put_into(d_states + at.of_chunk(c) * DK * DV);
#pragma unroll
        for (int k = 0; k < 4; ++k) { d_o[k] = left<true>(o, here.value, 16 * k); }
        const auto of_out = [&](int k) { return d_o[k]; };
        Sums d_change[4] = {};
        here.read_by(d_change, ring.next<1>(turn));
#pragma unroll
        for (int n = 0; n < 4; ++n) { to_key.scale(d_change[n], 16 * n); }
        multiply_lower<false>(d_change, of_out, ring.next<2>(turn));
#pragma unroll
        for (int n = 0; n < 4; ++n) { put_tile<true>(tile, TILE, here.value, 16 * n, d_change[n]); }
        const Tile<T> queries = ring.next<3>(turn);
        here.times(whole);
        here.add([&](int k) { return from_query.scaled(d_o[k], 16 * k); }, queries);
        here.add([&](int k) { return negative(to_left<T>(d_change[k])); }, ring.next<4>(turn));
    }
    __syncthreads();
    finish(0);
    here.write(carried);
}

extern "C" __global__ void __launch_bounds__(THREADS, GRADIENT_BLOCKS)
    delta_rule_gradients(T* __restrict__ d_qkv, float* __restrict__ d_gates,
                         const T* __restrict__ d_out, const T* __restrict__ changes,
                         const T* __restrict__ d_changes, const T* __restrict__ states,
                         const T* __restrict__ d_states, const T* __restrict__ inverse,
                         const float* __restrict__ factors, const T* __restrict__ qkv,
                         const float* __restrict__ gates, const int* __restrict__ starts,
                         int seq_len, int key_heads, int value_heads, int carried) {
    extern __shared__ uint4 memory[];
    gradients(memory, d_qkv, d_gates, d_out, changes, d_changes, states, d_states, inverse, factors,
              qkv, gates, starts, seq_len, key_heads, value_heads, carried);
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
    const int column = blockIdx.x * 32 + lane_id(), from = warp_id() * OWN;
    float* const there = state + at.of_head() * DK * DV + column;
    float S[OWN];
#pragma unroll
    for (int n = 0; n < OWN; ++n) { S[n] = there[(i64)(from + n) * DV]; }
    for (int t = 0; t < seq_len; ++t) {
        __syncthreads();
        if (warp_id() < 2) {  // warp 0 has the query, warp 1 the key
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

#if __CUDA_ARCH__ < 900
#undef __cluster_dims__
#define __cluster_dims__(...)  // GPUs before Hopper have no clusters
#endif

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(CHAIN_THREADS, 1)
    delta_rule_scan_sm90(const __grid_constant__ TensorMap out, float* __restrict__ state,
                         const __grid_constant__ TensorMap qkv, const __grid_constant__ TensorMap u,
                         const __grid_constant__ TensorMap w,
                         const __grid_constant__ TensorMap scores,
                         const float* __restrict__ factors, int seq_len, int key_heads,
                         int value_heads) {
    walk<OUT>(&out, nullptr, &u, &qkv, &w, &scores, factors, state, seq_len, key_heads, value_heads);
}

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(CHAIN_THREADS, 1)
    delta_rule_states_sm90(const __grid_constant__ TensorMap states,
                           const __grid_constant__ TensorMap changes, float* __restrict__ state,
                           const __grid_constant__ TensorMap qkv,
                           const __grid_constant__ TensorMap u, const __grid_constant__ TensorMap w,
                           const float* __restrict__ factors, int seq_len, int key_heads,
                           int value_heads) {
    walk<STATES>(&changes, &states, &u, &qkv, &w, nullptr, factors, state, seq_len, key_heads,
                 value_heads);
}

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(CHAIN_THREADS, 1)
    delta_rule_scan_backward_sm90(const __grid_constant__ TensorMap d_changes,
                                  const __grid_constant__ TensorMap d_states,
                                  float* __restrict__ d_state,
                                  const __grid_constant__ TensorMap d_out,
                                  const __grid_constant__ TensorMap qkv,
                                  const __grid_constant__ TensorMap w,
                                  const __grid_constant__ TensorMap scores,
                                  const float* __restrict__ factors, int seq_len, int key_heads,
                                  int value_heads) {
    walk<BACKWARD>(&d_changes, &d_states, &d_out, &qkv, &w, &scores, factors, d_state, seq_len,
                   key_heads, value_heads);
}
