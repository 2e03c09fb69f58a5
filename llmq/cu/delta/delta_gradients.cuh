// delta_gradients.cuh -- gradients of the gated delta rule's inputs, for each chunk alone. The
// kernel is in delta_rule.cu.
#pragma once
#include "delta/delta_chunk.cuh"

// x += a() right_of(c) and y += b() right_of(c), for each 16 columns c. F32 reads right factors
// twice.
template <class A, class B, class C>
__device__ __forceinline__ void multiply_both(Gradient& x, A a, Gradient& y, B b, C right_of) {
    if constexpr (COPIED) {
        const Left<T> of_x = a(), of_y = b();
#pragma unroll
        for (int c = 0; c < Gradient::TILES; ++c) {
            const Right<T> factor = right_of(c);
            multiply(x.S[c], of_x, factor);
            multiply(y.S[c], of_y, factor);
        }
    } else {
        const Left<T> of_x = a();
        x.each([&](int c, Sums& sums) { multiply(sums, of_x, right_of(c)); });
        const Left<T> of_y = b();
        y.each([&](int c, Sums& sums) { multiply(sums, of_y, right_of(c)); });
    }
}

// Adds p = a right_of(c) to columns c of x, and dot products of the rows of p and `factors` to dot.
// p has sums of its own: subtracting the old x from the new would lose digits in F32.
template <class B>
__device__ __forceinline__ void multiply_dot(Gradient& x, const Left<T>& a, B right_of,
                                             const Tile<T>& factors, int row, int column,
                                             float (&dot)[2]) {
    x.each([&](int c, Sums& sums) {
        Sums own = {};
        multiply(own, a, right_of(c));
        add_dots(dot, own, left<false>(factors, row, column + 16 * c));
#pragma unroll
        for (int i = 0; i < 8; ++i) { sums[i / 4][i % 4] += own[i / 4][i % 4]; }
    });
}

constexpr int WIDE = DK > DV ? DK : DV, SQUARE = CHUNK + 8;  // elements of rows in shared memory
constexpr int AHEAD = STATE_ROWS == 32 ? 1 : 2;  // slices of STATE_ROWS rows loaded ahead of use
// True if keys and the next head's values are loaded while other tiles are in use.
constexpr bool EARLY = COPIED && STATE_ROWS == 32 && DV % 64 == 0;
// With little shared memory (SIDES = 1) warps have uneven shares of rows, and the next head waits
// for the last head's gates.
constexpr int SIDES = EARLY ? 2 : 1;

// In F32 the gradient of a token's decay is a sum without subtractions, over all terms that pass
// the token: reads of earlier tokens and of the state in front by later tokens, and contributions
// of earlier tokens to the state behind.
//
// Store the terms of token pairs, in which row reads column: 16 rows, 32 columns. squares:
// gradients of products of queries with keys, and of keys with keys.
__device__ __forceinline__ void put_pairs(T* pairs, T* const (&squares)[2], const Tile<T>& q,
                                          const Tile<T>& k, int row, int column) {
#pragma unroll 1
    for (int c = column; c < column + 32 && c <= row; c += 16) {
        Sums of_q = {}, of_k = {};
#pragma unroll 1
        for (int d = 0; d < DK; d += 16) {
            const Right<T> key = right<true>(k, d, c);
            multiply(of_q, left<false>(q, row, d), key);
            multiply(of_k, left<false>(k, row, d), key);
        }
        each_sum(of_q, row, c, [&](int i, int j, float& x) { x *= to_f32(squares[0][i * SQUARE + j]); });
        each_sum(of_k, row, c, [&](int i, int j, float& x) { x *= to_f32(squares[1][i * SQUARE + j]); });
#pragma unroll
        for (int i = 0; i < 8; ++i) { of_k[i / 4][i % 4] += of_q[i / 4][i % 4]; }
        put_tile<false>(pairs, SQUARE, row, c, of_k);
    }
}
// The gradient of the decay of this thread's token, without the term of the state that passes the
// token. All threads call this function, which overwrites `pairs`.
__device__ __forceinline__ float crossing_of(T* pairs, const float (&front)[2][CHUNK],
                                             const float (&behind)[2][CHUNK]) {
    const int t = threadIdx.x;
    if (t < CHUNK) {  // replace row t by sums over the columns before each
        float sum = 0.0f;
        for (int j = 0; j <= t; ++j) {
            const float x = to_f32(pairs[t * SQUARE + j]);
            pairs[t * SQUARE + j] = from_f32<T>(sum);
            sum += x;
        }
    }
    __syncthreads();
    float total = 0.0f;
    if (t < CHUNK) {
        for (int i = t; i < CHUNK; ++i) {
            total += to_f32(pairs[i * SQUARE + t]) + (front[0][i] + front[1][i]);
        }
        for (int j = 0; j < t; ++j) { total += behind[0][j] + behind[1][j]; }
    }
    return total;
}

// The kernel's body. memory: dynamic shared memory.
__device__ __forceinline__ void gradients(uint4* memory, T* d_qkv, float* d_gates, const T* d_out,
                                          const T* changes, const T* d_changes, const T* states,
                                          const T* d_states, const T* inverse, const float* factors,
                                          const T* qkv, const float* gates, const int* starts,
                                          int seq_len, int key_heads, int value_heads, int carried) {
    __shared__ Chunk chunks[SIDES];
    __shared__ float lengths[2][CHUNK], dots[COPIED ? 1 : 3][2][CHUNK], of_change[CHUNK];
    __shared__ float of_value[2 * SIDES][CHUNK];
    __shared__ float reduced[THREADS / 32];
    __shared__ float queried[CHUNK];  // dots of q and d_q over earlier heads; F32: crossing_of
    __shared__ Scale<T> by[3][CHUNK];
    enum { OF_KEY, OF_QUERY, OF_REST };  // lengths, by
    enum Dot { DOT_QUERY, IN_FRONT, BEHIND };  // these two: F32
    T* const rests = reinterpret_cast<T*>(memory);  // (64, DV), then queries; first values, if not EARLY
    T* const squares[2] = {rests + CHUNK * (WIDE + 8), rests + CHUNK * (WIDE + 8 + SQUARE)};
    constexpr int BIG = CHUNK * (WIDE + 8);
    T* const big = squares[1] + CHUNK * SQUARE;
    T* const change_memory = big + 2 * BIG;
    T* const last_slice = change_memory + CHUNK * (DV + 8);  // where values are, if EARLY
    // place: a head's gradients of changes, then slices of states, then keys. other: the other
    // buffer.
    const auto place = [&](int h) { return big + (EARLY ? h % 2 * BIG : 0); };
    const auto other = [&](int h) { return big + (EARLY ? (h + 1) % 2 * BIG : BIG); };
    const int index = blockIdx.z;
    const int first = index * CHUNK, rows = min(CHUNK, seq_len - first);
    const int group = value_heads / key_heads, half = warp_id() % 2, m = 16 * (warp_id() / 2);
    const int i = threadIdx.x, k_column = half * (DK / 2), v_column = half * (DV / 2);
    const Place of_key(blockIdx.y, blockIdx.x * group, blockIdx.x, seq_len, key_heads, value_heads);
    const auto begin = [&](i64 row) {
        if constexpr (COPIED) { return Gradient(nullptr, 0, 0); }
        T* const own = d_qkv + row + (i64)m * of_key.columns() + k_column;
        return Gradient(own, of_key.columns(), rows - m);
    };
    Gradient d_q = begin(of_key.query(first)), d_k = begin(of_key.key(first));
    Tile<T> k, q;
    if (i < CHUNK) { queried[i] = 0.0f; }
    Tile<T> d_change, change, v, solved;
    const auto head = [&](int h) {
        return Place(blockIdx.y, blockIdx.x * group + h, blockIdx.x, seq_len, key_heads, value_heads);
    };
    const auto stage_values = [&](int h) {
        const Place at = head(h);
        v = stage<CHUNK, DV, THREADS, true>(EARLY ? last_slice : rests, qkv + at.value(first),
                                      at.columns(), rows);
    };
    // Start copying head h's tiles, one head ahead of their use.
    const auto stage_changes = [&](int h) {
        if (h < group) {
            const i64 from = head(h).of_chunk(index) * CHUNK * DV;
            d_change = stage<CHUNK, DV, THREADS, true>(place(h), d_changes + from, DV, CHUNK);
            change = stage<CHUNK, DV, THREADS, true>(change_memory, changes + from, DV, CHUNK);
            if (EARLY) { stage_values(h); }
        }
        cp_async_commit();
    };
    const auto stage_solved = [&](int h) {
        if (h < group) {
            const i64 from = head(h).of_chunk(index) * CHUNK * CHUNK;
            solved = stage<CHUNK, CHUNK, THREADS, true>(squares[1], inverse + from, CHUNK, CHUNK);
        }
        cp_async_commit();
    };
    stage_changes(0);
    stage_solved(0);
    for (int h = 0; h < group; ++h) {
        const Place at = head(h);
        const i64 of_chunk = at.of_chunk(index);
        const int stride = value_heads * DV;
        const T *const S = states + of_chunk * DK * DV, *const dS = d_states + of_chunk * DK * DV;
        Chunk& chunk = chunks[h % SIDES];
        const auto slice_memory = [&](int n) {  // 2 (STATE_ROWS, DK)
            const int nth = n % (AHEAD + 1);
            return nth == AHEAD ? last_slice : place(h) + nth * 2 * STATE_ROWS * (DK + 8);
        };
        int from = first;
        const auto stage_keys = [&] {
            forget(from);  // else addresses would stay in registers from head to head
            k = stage<CHUNK, DK, THREADS>(other(h + 1), qkv + at.key(from), at.columns(), rows);
        };
        const auto slice = [&](int n) {
            T* const to = slice_memory(n);
            if (n < DV / STATE_ROWS) {
                const int from = n * STATE_ROWS * DK;
                stage<STATE_ROWS, DK, THREADS, true>(to, S + from, DK, STATE_ROWS);
                stage<STATE_ROWS, DK, THREADS, true>(to + STATE_ROWS * (DK + 8), dS + from, DK, STATE_ROWS);
            } else if (EARLY) {
                stage_keys();
            }
            cp_async_commit();
        };
        if (!EARLY) { stage_values(h); }
        cp_async_commit();
        const Tile<T> d_o =
            stage<CHUNK, DV, THREADS, true>(other(h), d_out + at.out(first), stride, rows);
        cp_async_commit();
        // Threads of other warps than the one that still computes the last head's gradients of
        // gates.
        const float* const known = factors + of_factors(at, index);
        const int token = i - CHUNK;
        float of_rest = 0.0f;
        if (warp_id() == 1) { chunk.read(at, first, gates, starts, carried); }
        if (token >= 0 && token < CHUNK) {
            const float length = known[KEY_LENGTH * CHUNK + token];
            lengths[OF_KEY][token] = length;
            lengths[OF_QUERY][token] = known[QUERY_LENGTH * CHUNK + token];
            by[OF_KEY][token].set(known[TO_KEY * CHUNK + token]);
            by[OF_QUERY][token].set(known[FROM_QUERY * CHUNK + token]);
            of_rest = -known[FROM_STATE * CHUNK + token] * length;
        }
        cp_async_wait<1>();
        __syncthreads();
        if (token >= 0 && token < CHUNK) { by[OF_REST][token].set(chunk.beta[token] * of_rest); }
        forget(from);
#pragma unroll 1
        for (int side = 0; side < SIDES; ++side) {  // rows with many products, then rows with few
            const int row = side ? CHUNK - 16 - m : m;
            float dot[2] = {};
            constexpr int TOGETHER = COPIED && DV % 64 == 0 ? 2 : 1, STEP = 16 * TOGETHER;  // tiles
#pragma unroll 1
            for (int c = v_column + side * STEP; c < v_column + DV / 2; c += SIDES * STEP) {
                Sums d_rest[TOGETHER] = {};
#pragma unroll 1
                for (int n = row; n < CHUNK; n += 16) {
                    const Left<T> a = left<true>(solved, row, n);
#pragma unroll
                    for (int t = 0; t < TOGETHER; ++t) {
                        multiply(d_rest[t], a, right<false>(d_change, n, c + 16 * t));
                    }
                }
#pragma unroll
                for (int t = 0; t < TOGETHER; ++t) {
                    const int column = c + 16 * t;
                    add_dots(dot, d_rest[t], left<false>(v, row, column));
                    if (!EARLY) { __syncwarp(); }  // values have been read
                    put_tile<false>(rests, DV + 8, row, column, d_rest[t]);
#pragma unroll
                    for (int n = 0; n < 8; ++n) {
                        d_rest[t][n / 4][n % 4] *= chunk.beta[row + lane_row() + n / 2 % 2 * 8];
                    }
                    put(d_qkv + at.value(from + row) + column, at.columns(), rows - row, d_rest[t]);
                }
            }
            put_dots(of_value[2 * side + half] + row, dot);
        }
        // This thread's share of the dot product of the state behind and its gradient. The state
        // behind is the decayed state in front plus the terms of changes; F32 takes only the
        // decayed state.
        float both = 0.0f;
        const int seen = chunk.begin[CHUNK - 1];  // the first token that the state behind sees
        if (COPIED) {  // terms of changes; their whole gradients include the scores' part
            Sums products = {};
#pragma unroll
            for (int c = v_column; c < v_column + DV / 2; c += 16) {
                multiply(products, left<false>(change, m, c), right<true>(d_change, c, m));
            }
            each_diagonal(products, [&](int r, float x) { both += m + r >= seen ? x : 0.0f; });
        }
        cp_async_wait<0>();
        __syncthreads();
        const Tile<T> rest = {rests, DV + 8, CHUNK};
        for (int n = 0; n < AHEAD; ++n) { slice(n); }
        {
#pragma unroll 1
            for (int c = 32 * half; c < 32 * half + 32 && c <= m; c += 16) {
                Sums by_scores = {}, by_system = {};
#pragma unroll COPIED ? 4 : 1
                for (int n = 0; n < DV; n += 16) {
                    const Right<T> x = right<true>(change, n, c);
                    multiply(by_scores, left<false>(d_o, m, n), x);
                    multiply(by_system, left<false>(rest, m, n), x);
                }
                if (c == m) {
                    each_diagonal(by_system, [&](int r, float x) { of_change[m + r] = x; });
                }
                scale_pairs(by_system, by_scores, chunk, -1.0f, lengths[OF_KEY], lengths[OF_QUERY], m,
                            c);
                put_tile<false>(squares[0], SQUARE, m, c, by_scores);
                put_tile<false>(squares[1], SQUARE, m, c, by_system);
            }
        }
        float from_front[2] = {}, to_behind[2] = {};
        Sums products = {};  // 16 x 16 columns of v, over a warp's 16 channels of keys
        if constexpr (!COPIED) {
            k = {qkv + at.key(first), at.columns(), rows};
            q = {qkv + at.query(first), at.columns(), rows};
        }
#pragma unroll 1
        for (int n = 0; n < DV / 16; ++n) {
            constexpr int TURNS = STATE_ROWS / 16;  // of a slice
            if (n % TURNS == 0) {
                cp_async_wait<AHEAD - 1>();
                __syncthreads();
                slice(n / TURNS + AHEAD);
            }
            const T* const here = slice_memory(n / TURNS) + n % TURNS * 16 * (DK + 8);
            const int pitch = COPIED ? DK + 8 : DK;
            const Tile<T> s = {COPIED ? here : S + n * 16 * DK, pitch, 16};
            const Tile<T> d_s = {COPIED ? here + STATE_ROWS * (DK + 8) : dS + n * 16 * DK, pitch, 16};
            const auto scaled = [&](const Tile<T>& tile, int what) {
                const Scale<T>* const of = by[what] + m + lane_row();
                return times_rows(left<false>(tile, m, 16 * n), of[0], of[8]);
            };
            const Left<T> x = scaled(change, OF_KEY);
            const auto of_s = [&](int c) { return right<false>(s, 0, k_column + 16 * c); };
            const auto of_d_s = [&](int c) { return right<false>(d_s, 0, k_column + 16 * c); };
            const auto of_o = [&] { return scaled(d_o, OF_QUERY); };
            const auto of_r = [&] { return scaled(rest, OF_REST); };
            if constexpr (COPIED) {
                d_k.each([&](int c, Sums& sums) { multiply(sums, x, of_d_s(c)); });
                multiply_both(d_q, of_o, d_k, of_r, of_s);
            } else {
                multiply_dot(d_k, x, of_d_s, k, m, k_column, to_behind);
                multiply_dot(d_q, of_o(), of_s, q, m, k_column, from_front);
                multiply_dot(d_k, of_r(), of_s, k, m, k_column, from_front);
            }
            if (warp_id() * 16 < DK) {
                multiply(products, left<false>(s, 0, warp_id() * 16),
                         right<true>(d_s, warp_id() * 16, 0));
            }
        }
        if constexpr (!COPIED) {
            put_dots(dots[IN_FRONT][half] + m, from_front);
            put_dots(dots[BEHIND][half] + m, to_behind);
            put_pairs(big, squares, q, k, m, 32 * half);
            __syncthreads();
            const float crossing = crossing_of(big, dots[IN_FRONT], dots[BEHIND]);
            if (i < CHUNK) { queried[i] = crossing; }
        }
        const float whole = known[FROM_STATE * CHUNK + CHUNK - 1];
        each_diagonal(products, [&](int, float x) { both = fmaf(x, whole, both); });
        cp_async_wait<0>();
        __syncthreads();
        if (!EARLY) { stage_keys(); }
        cp_async_commit();
        forget(from);
        q = stage<CHUNK, DK, THREADS>(rests, qkv + at.query(from), at.columns(), rows);
        cp_async_commit();
        stage_changes(h + 1);
        if (!EARLY) {
            cp_async_wait<2>();
            __syncthreads();
        }
        const Tile<T> scores = {squares[0], SQUARE, CHUNK}, system = {squares[1], SQUARE, CHUNK};
        // Together the two loops below take equally many products for all values of m.
        const auto add = [&](Gradient& to, const Left<T>& a, const Tile<T>& rows, int n) {
            to.each([&](int c, Sums& sums) {
                multiply(sums, a, right<false>(rows, n, k_column + 16 * c));
            });
        };
#pragma unroll 1
        for (int n = 0; n <= m; n += 16) { add(d_k, left<false>(system, m, n), k, n); }
#pragma unroll 1
        for (int n = m; n < CHUNK; n += 16) { add(d_k, left<true>(system, m, n), k, n); }
        cp_async_wait<1>();
        __syncthreads();
        stage_solved(h + 1);
        const auto with_queries = [&](float (&dot)[2]) {
            d_q.each([&](int c, Sums& sums) {
                add_dots(dot, sums, left<false>(q, m, k_column + 16 * c));
            });
        };
        float before[2] = {}, of_q[2] = {};
        if (COPIED) { with_queries(before); }
#pragma unroll 1
        for (int n = 0; n <= m; n += 16) { add(d_q, left<false>(scores, m, n), k, n); }
#pragma unroll 1
        for (int n = m; n < CHUNK; n += 16) { add(d_k, left<true>(scores, m, n), q, n); }
        with_queries(of_q);
        if (COPIED) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                if (m + lane_row() + 8 * r >= seen) { both += before[r] - of_q[r]; }
            }
        }
        if (index == at.chunks - 1 && !carried) { both = 0.0f; }  // no gradient comes from behind
        both = warp_sum(both);
        if (i % 32 == 0) { reduced[i / 32] = both; }
        put_dots(dots[DOT_QUERY][half] + m, of_q);
        __syncthreads();
        // The gradient of a token's decay sums the gradients of the decay sums at this token and at
        // later tokens of its document. One warp computes it while others go on to the next head.
        if (warp_id() == 0) {
            float of_last = 0.0f, of_second = 0.0f;  // of_second: token 32's
#pragma unroll
            for (int w = 0; w < THREADS / 32; ++w) { of_last += reduced[w]; }
#pragma unroll
            for (int part = 1; part >= 0; --part) {
                const int t = i + 32 * part;
                float total = queried[t] + of_last;
                if constexpr (COPIED) {
                    const float now = dots[DOT_QUERY][0][t] + dots[DOT_QUERY][1][t];
                    float of_values = 0.0f;
#pragma unroll
                    for (int n = 0; n < 2 * SIDES; ++n) { of_values += of_value[n][t]; }
                    total = now - queried[t] - chunk.beta[t] * of_values;
                    total += t == CHUNK - 1 ? of_last : 0.0f;
                    queried[t] = now;
#pragma unroll
                    for (int n = 1; n < 32; n *= 2) {
                        const float behind = __shfl_down_sync(0xFFFFFFFFu, total, n);
                        if (i + n < 32 && chunk.begin[t + n] <= t) { total += behind; }
                    }
                    if (part == 0 && chunk.begin[32] <= t) { total += of_second; }
                    of_second = from_lane(total, 0);
                }
                if (t < rows) {
                    const float beta = chunk.beta[t];
                    float* const to = d_gates + at.gate(first + t);
                    to[0] = chunk.begin[t] == t ? 0.0f : total;
                    const float by_beta = COPIED ? __fdividef(of_change[t], beta) : of_change[t] / beta;
                    to[value_heads] = beta > 0.0f ? by_beta : 0.0f;
                }
            }
        }
        if (!EARLY) { __syncthreads(); }
    }
    auto& key_dots = *reinterpret_cast<float (*)[2][CHUNK]>(squares[0]);
    float of_k[2] = {};
    d_k.each([&](int c, Sums& sums) {
        add_dots(of_k, sums, left<false>(k, m, k_column + 16 * c));
    });
    put_dots(key_dots[half] + m, of_k);
    __syncthreads();
    const Place at = head(0);
    T* const own = d_qkv + (i64)m * at.columns() + k_column;
    const auto finish = [&](Gradient& gradient, const Tile<T>& of, const float (&dot)[2][CHUNK],
                            const float* length, float scale, T* to) {
        float factor[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = m + lane_row() + 8 * r;
            const float inverse_length = length[row] * scale;
            factor[r] = -inverse_length * inverse_length * (dot[0][row] + dot[1][row]);
        }
        gradient.each([&](int c, Sums& sums) {
            const Left<T> unit = left<false>(of, m, k_column + 16 * c);
#pragma unroll
            for (int n = 0; n < 8; ++n) {
                const float2 x = unit.get(n / 4 * 2 + n / 2 % 2);
                float& sum = sums[n / 4][n % 4];
                sum = fmaf(n % 2 ? x.y : x.x, factor[n / 2 % 2], sum);
            }
            if (COPIED) { put(to + 16 * c, at.columns(), rows - m, sums); }
        });
    };
    finish(d_q, q, dots[DOT_QUERY], lengths[OF_QUERY], sqrtf((float)DK), own + at.query(first));
    finish(d_k, k, key_dots, lengths[OF_KEY], 1.0f, own + at.key(first));
}
