// delta_gradients.cuh -- gradients of the gated delta rule's inputs, of each chunk alone: delta_rule.cu.
#pragma once
#include "delta_chunk.cuh"

// Adds products of this thread's elements of sums and of factors: of rows g and g + 8.
__device__ __forceinline__ void add_dots(float (&dot)[2], const Sums& sums, const Left<T>& factors) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        dot[i % 2] = fmaf(sums[i / 2][i % 2 * 2], factors.get(i).x, dot[i % 2]);
        dot[i % 2] = fmaf(sums[i / 2][i % 2 * 2 + 1], factors.get(i).y, dot[i % 2]);
    }
}

// Those of the four lanes that share a row together, to 16 rows' places.
__device__ __forceinline__ void put_dots(float* to, float (&dot)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        dot[r] += __shfl_xor_sync(0xFFFFFFFFu, dot[r], 1);
        dot[r] += __shfl_xor_sync(0xFFFFFFFFu, dot[r], 2);
        if (lane_id() % 4 == 0) { to[lane_row() + 8 * r] = dot[r]; }
    }
}

constexpr bool COPIED = sizeof(T) == 2;  // tiles to shared memory; of F32, registers hold less

// The gradient of 16 rows of queries or keys: this warp's DK / 2 columns. In registers; of F32, whose
// factors take these, at `to`, where it will be written: rows from `rows` on are always 0.
struct Gradient {
    static constexpr int TILES = DK / 32;
    T* const to;
    const int pitch, rows;
    Sums S[COPIED ? TILES : 1];

    __device__ __forceinline__ Gradient(T* to, int pitch, int rows)
        : to(to), pitch(pitch), rows(rows) {
        each([](int, Sums& sums) {
#pragma unroll
            for (int i = 0; i < 8; ++i) { sums[i / 4][i % 4] = 0.0f; }
        });
    }
    // Calls use(c, sums) for 16 columns after the other.
    template <class Use> __device__ __forceinline__ void each(Use use) {
        if constexpr (COPIED) {
#pragma unroll
            for (int c = 0; c < TILES; ++c) { use(c, S[c]); }
        } else {
#pragma unroll 1
            for (int c = 0; c < TILES; ++c) {
                to_sums(S[0], load_left(to + 16 * c, pitch, rows), 1.0f);
                use(c, S[0]);
                put(to + 16 * c, pitch, rows, S[0]);
            }
        }
    }
};

// x += a() right(c), y += b() right(c), of columns c. F32 reads right factors twice.
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

// Adds a right(c) to columns c of x, and its products with those of `factors` to dot. F32: sums that are
// kept together in x cannot be told apart again without losing digits.
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

// The sum over a state behind the last chunk and its gradient of their products, this thread's share.
__device__ __forceinline__ float both_states(const float* state, const T* d_states) {
    float sum = 0.0f;
    for (int n = threadIdx.x; n < DK * DV; n += THREADS) {
        sum = fmaf(state[n % DK * DV + n / DK], to_f32(d_states[n]), sum);
    }
    return sum;
}

constexpr int WIDE = DK > DV ? DK : DV, SQUARE = CHUNK + 8;  // elements of rows in shared memory

// F32: the gradient of a token's decay as a sum of what passes it, of which nothing is taken away again:
// what later tokens read of earlier ones, and of the state in front, and what earlier ones leave behind.
//
// What tokens read of those in front of them: 16 rows, 32 columns of pairs. squares: gradients of
// products of queries and keys, and of keys.
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
// That of this thread's token, without the state that passes it. All threads call it; pairs are lost.
__device__ __forceinline__ float crossing_of(T* pairs, const float (&front)[2][CHUNK],
                                             const float (&behind)[2][CHUNK]) {
    const int t = threadIdx.x;
    if (t < CHUNK) {  // a row: sums of all before a column
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

// What the kernel does, on `memory`.
__device__ __forceinline__ void gradients(uint4* memory, T* d_qkv, float* d_gates, const T* d_out,
                                          const T* changes, const T* d_changes, const T* states,
                                          const T* d_states, const float* state, const T* inverse,
                                          const float* factors, const T* qkv, const float* gates,
                                          const int* starts, int seq_len, int key_heads,
                                          int value_heads, int carried) {
    __shared__ Chunk chunk;
    __shared__ float lengths[2][CHUNK], dots[COPIED ? 2 : 3][2][CHUNK], of_change[CHUNK], reduced[32];
    __shared__ float queried[CHUNK];  // products of q and d_q of the heads before
    __shared__ Scale<T> by[3][CHUNK];
    enum { OF_KEY, OF_QUERY, OF_REST };  // lengths, by
    enum Dot { OF_VALUE, DOT_QUERY, OF_BEHIND };
    T* const rests = reinterpret_cast<T*>(memory);  // (64, DV), first values, then queries
    T* const squares[2] = {rests + CHUNK * (WIDE + 8), rests + CHUNK * (WIDE + 8 + SQUARE)};
    T* const big[2] = {squares[1] + CHUNK * SQUARE, squares[1] + CHUNK * (SQUARE + WIDE + 8)};
    T* const change_memory = big[1] + CHUNK * (WIDE + 8);
    const int first = blockIdx.x * CHUNK, rows = min(CHUNK, seq_len - first);
    const int group = value_heads / key_heads, half = warp_id() % 2, m = 16 * (warp_id() / 2);
    const int i = threadIdx.x, k_column = half * (DK / 2), v_column = half * (DV / 2);
    const Place of_key(blockIdx.y * group, blockIdx.y, seq_len, key_heads, value_heads);
    const auto begin = [&](i64 row) {
        if constexpr (COPIED) { return Gradient(nullptr, 0, 0); }
        T* const own = d_qkv + row + (i64)m * of_key.columns() + k_column;
        return Gradient(own, of_key.columns(), rows - m);
    };
    Gradient d_q = begin(of_key.query(first)), d_k = begin(of_key.key(first));
    Tile<T> k, q;
    if (i < CHUNK) { queried[i] = 0.0f; }
    for (int h = 0; h < group; ++h) {
        const Place at(blockIdx.y * group + h, blockIdx.y, seq_len, key_heads, value_heads);
        const i64 of_chunk = at.of_chunk(blockIdx.x);
        const int stride = value_heads * DV;
        const T *const S = states + of_chunk * DK * DV, *const dS = d_states + of_chunk * DK * DV;
        const auto slice_memory = [&](int n) {  // 2 (16, DK); two of three are where d_change was
            return n % 3 == 2 ? change_memory + CHUNK * (DV + 8) : big[0] + n % 3 * 2 * 16 * (DK + 8);
        };
        const auto slice = [&](int n) {
            T* const to = slice_memory(n);
            if (n < DV / 16) {
                stage<16, DK, THREADS>(to, S + n * 16 * DK, DK, 16);
                stage<16, DK, THREADS>(to + 16 * (DK + 8), dS + n * 16 * DK, DK, 16);
            }
            cp_async_commit();
        };
        __syncthreads();
        const Tile<T> solved = stage<CHUNK, CHUNK, THREADS>(
            squares[1], inverse + of_chunk * CHUNK * CHUNK, CHUNK, CHUNK);
        const Tile<T> d_change = stage<CHUNK, DV, THREADS>(
            big[0], d_changes + of_chunk * CHUNK * DV, DV, CHUNK);
        const Tile<T> v =
            stage<CHUNK, DV, THREADS>(rests, qkv + at.value(first), at.columns(), rows);
        cp_async_commit();
        const Tile<T> d_o =
            stage<CHUNK, DV, THREADS>(big[1], d_out + at.out(first), stride, rows);
        const Tile<T> change =
            stage<CHUNK, DV, THREADS>(change_memory, changes + of_chunk * CHUNK * DV, DV, CHUNK);
        cp_async_commit();
        if (warp_id() == 0) { chunk.read(at, first, gates, starts, carried); }
        const float* const known = factors + of_factors(at, blockIdx.x) + i;
        float of_rest = 0.0f;
        if (i < CHUNK) {
            const float length = known[KEY_LENGTH * CHUNK];
            lengths[OF_KEY][i] = length, lengths[OF_QUERY][i] = known[QUERY_LENGTH * CHUNK];
            by[OF_KEY][i].set(known[TO_KEY * CHUNK]);
            by[OF_QUERY][i].set(known[FROM_QUERY * CHUNK]);
            of_rest = -known[FROM_STATE * CHUNK] * length;
        }
        cp_async_wait<1>();
        __syncthreads();
        if (i < CHUNK) { by[OF_REST][i].set(chunk.beta[i] * of_rest); }
        {
            const float beta[2] = {chunk.beta[m + lane_row()], chunk.beta[m + lane_row() + 8]};
            float of_value[2] = {};
            constexpr int TOGETHER = COPIED && DV % 64 == 0 ? 2 : 1;  // tiles
#pragma unroll 1
            for (int c = v_column; c < v_column + DV / 2; c += 16 * TOGETHER) {
                Sums d_rest[TOGETHER] = {};
#pragma unroll 1
                for (int n = m; n < CHUNK; n += 16) {
                    const Left<T> a = left<true>(solved, m, n);
#pragma unroll
                    for (int t = 0; t < TOGETHER; ++t) {
                        multiply(d_rest[t], a, right<false>(d_change, n, c + 16 * t));
                    }
                }
#pragma unroll
                for (int t = 0; t < TOGETHER; ++t) {
                    const int column = c + 16 * t;
                    add_dots(of_value, d_rest[t], left<false>(v, m, column));
                    __syncwarp();  // values have been read
                    put_tile<false>(rests, DV + 8, m, column, d_rest[t]);
#pragma unroll
                    for (int n = 0; n < 8; ++n) { d_rest[t][n / 4][n % 4] *= beta[n / 2 % 2]; }
                    put(d_qkv + at.value(first) + (i64)m * at.columns() + column, at.columns(),
                        rows - m, d_rest[t]);
                }
            }
            put_dots(dots[OF_VALUE][half] + m, of_value);
        }
        __syncthreads();
        const Tile<T> rest = {rests, DV + 8, CHUNK};
        slice(0);
        slice(1);
        cp_async_wait<2>();
        __syncthreads();
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
                    each_sum(by_system, m, c, [&](int row, int column, float x) {
                        if (row == column) { of_change[row] = x; }
                    });
                }
                scale_pairs(by_system, by_scores, chunk, -1.0f, lengths[OF_KEY], lengths[OF_QUERY], m,
                            c);
                put_tile<false>(squares[0], SQUARE, m, c, by_scores);
                put_tile<false>(squares[1], SQUARE, m, c, by_system);
            }
        }
        const bool last = blockIdx.x == at.chunks - 1;
        // Products of the gradient of the state behind with that state, which is read a turn ahead; F32:
        // with the one in front.
        float both = 0.0f, from_front[2] = {}, to_behind[2] = {};
        const bool reads = COPIED && !last && i * Vec<T>::N < 16 * DK;
        const auto next = [&](int n) { return pack(load_vec(S + (DV + n * 16) * DK + i * Vec<T>::N)); };
        uint4 behind;
        if (reads) { behind = next(0); }
        if constexpr (!COPIED) {
            k = {qkv + at.key(first), at.columns(), rows};
            q = {qkv + at.query(first), at.columns(), rows};
        }
#pragma unroll 1
        for (int n = 0; n < DV / 16; ++n) {
            cp_async_wait<1>();
            __syncthreads();
            slice(n + 2);
            const T* const here = slice_memory(n);
            const int pitch = COPIED ? DK + 8 : DK;
            const Tile<T> s = {COPIED ? here : S + n * 16 * DK, pitch, 16};
            const Tile<T> d_s = {COPIED ? here + 16 * (DK + 8) : dS + n * 16 * DK, pitch, 16};
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
            const auto add_both = [&](const Vec<T>& x, int element) {
                const Vec<T> y = load_vec(d_s.at + element / DK * pitch + element % DK);
#pragma unroll
                for (int e = 0; e < Vec<T>::N; ++e) { both = fmaf(to_f32(x[e]), to_f32(y[e]), both); }
            };
            if (reads) {
                add_both(unpack<T>(behind), i * Vec<T>::N);
                if (n + 1 < DV / 16) { behind = next(n + 1); }
            }
            for (int e = i * Vec<T>::N; !COPIED && e < 16 * DK; e += THREADS * Vec<T>::N) {
                add_both(load_vec(s.at + e), e);
            }
        }
        float crossing = 0.0f;
        if constexpr (!COPIED) {
            put_dots(dots[OF_VALUE][half] + m, from_front);
            put_dots(dots[OF_BEHIND][half] + m, to_behind);
            put_pairs(big[0], squares, q, k, m, 32 * half);
            __syncthreads();
            crossing = crossing_of(big[0], dots[OF_VALUE], dots[OF_BEHIND]);
            both *= known[FROM_STATE * CHUNK + CHUNK - 1 - i];
        }
        __syncthreads();
        int from = first;
        forget(from);  // or addresses would stay in registers from head to head
        k = stage<CHUNK, DK, THREADS>(big[1], qkv + at.key(from), at.columns(), rows);
        q = stage<CHUNK, DK, THREADS>(rests, qkv + at.query(from), at.columns(), rows);
        cp_async_commit();
        if (COPIED && last && state) { both = both_states(state + at.of_head() * DK * DV, dS); }
        const float of_last = block_sum(both, reduced);
        cp_async_wait<0>();
        __syncthreads();
        const Tile<T> scores = {squares[0], SQUARE, CHUNK}, system = {squares[1], SQUARE, CHUNK};
#pragma unroll 1
        for (int n = 0; n <= m; n += 16) {
            multiply_both(
                d_q, [&] { return left<false>(scores, m, n); },  //
                d_k, [&] { return left<false>(system, m, n); },
                [&](int c) { return right<false>(k, n, k_column + 16 * c); });
        }
#pragma unroll 1
        for (int n = m; n < CHUNK; n += 16) {
            const Left<T> a = left<true>(scores, m, n);
            d_k.each([&](int c, Sums& sums) {
                multiply(sums, a, right<false>(q, n, k_column + 16 * c));
            });
            const Left<T> b = left<true>(system, m, n);
            d_k.each([&](int c, Sums& sums) {
                multiply(sums, b, right<false>(k, n, k_column + 16 * c));
            });
        }
        float of_q[2] = {};
        d_q.each([&](int c, Sums& sums) {
            add_dots(of_q, sums, left<false>(q, m, k_column + 16 * c));
        });
        put_dots(dots[DOT_QUERY][half] + m, of_q);
        __syncthreads();
        // The gradient of the sum of decays up to token i, and of all those behind it that have it.
        float total = 0.0f;
        if (i < CHUNK) {
            const float now = dots[DOT_QUERY][0][i] + dots[DOT_QUERY][1][i];
            const float of_value = dots[OF_VALUE][0][i] + dots[OF_VALUE][1][i];
            total = now - queried[i] - chunk.beta[i] * of_value + (i == CHUNK - 1 ? of_last : 0.0f);
            queried[i] = now;
#pragma unroll
            for (int n = 1; COPIED && n < 32; n *= 2) {
                const float behind = __shfl_down_sync(0xFFFFFFFFu, total, n);
                if (i % 32 + n < 32 && chunk.begin[i + n] <= i) { total += behind; }
            }
            if (i == 32) { reduced[0] = total; }
        }
        __syncthreads();
        if (i < rows) {
            if (i < 32 && chunk.begin[32] <= i) { total += reduced[0]; }
            if (!COPIED) { total = crossing + of_last; }
            const float beta = chunk.beta[i];
            d_gates[at.gate(first + i)] = chunk.begin[i] == i ? 0.0f : total;
            d_gates[at.gate(first + i) + value_heads] = beta > 0.0f ? of_change[i] / beta : 0.0f;
        }
    }
    float of_k[2] = {};
    d_k.each([&](int c, Sums& sums) {
        add_dots(of_k, sums, left<false>(k, m, k_column + 16 * c));
    });
    put_dots(dots[OF_VALUE][half] + m, of_k);
    __syncthreads();
    const Place at(blockIdx.y * group, blockIdx.y, seq_len, key_heads, value_heads);
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
    finish(d_k, k, dots[OF_VALUE], lengths[OF_KEY], 1.0f, own + at.key(first));
}
