// delta_chunk.cuh -- code shared by the kernels of the gated delta rule and of state spaces: a
// block's position, factors of a chunk of 64 tokens, tiles that a scan prefetches, and sums of
// gradients.
#pragma once
#include "delta/delta_tiles.cuh"

constexpr int CHUNK = 64, STAGES = 4;  // tokens of a chunk; tiles of a Ring
constexpr int SLICE = DV % 64 ? 32 : 64;  // columns of v in a block of a scan
constexpr int THREADS = 256, SCAN_THREADS = SLICE / 16 * 32;
// Blocks per multiprocessor, which bound registers. Two blocks of `gradients` fit on Hopper (9.0).
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
constexpr int GRADIENT_BLOCKS = sizeof(T) == 2 ? 2 : 1;
#else
constexpr int GRADIENT_BLOCKS = 1;
#endif
constexpr int PREPARE_BLOCKS = sizeof(T) == 2 ? 2 * GRADIENT_BLOCKS : 1;
constexpr int FACTORS = 6;  // factors of each token of a chunk, in this order:
enum Factor { TO_KEY, FROM_QUERY, SUMS, FROM_STATE, KEY_LENGTH, QUERY_LENGTH };

// The place of a block: a value head of a sequence, and how its rows lie in tensors.
struct Place {
    i64 batch;
    int head, key_head, key_heads, value_heads, seq_len, chunks;

    __device__ __forceinline__ Place(int head, int seq_len, int key_heads, int value_heads)
        : Place(blockIdx.z, head, head * key_heads / value_heads, seq_len, key_heads, value_heads) {}
    __device__ __forceinline__ Place(int batch, int head, int key_head, int seq_len, int key_heads,
                                     int value_heads)
        : batch(batch), head(head), key_head(key_head), key_heads(key_heads),
          value_heads(value_heads), seq_len(seq_len), chunks((seq_len + CHUNK - 1) / CHUNK) {}
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
    __device__ __forceinline__ i64 out(int t) const {
        return (token(t) * value_heads + head) * DV;
    }
    __device__ __forceinline__ i64 gate(int t) const { return token(t) * 2 * value_heads + head; }
    __device__ __forceinline__ i64 of_head() const { return batch * value_heads + head; }
    __device__ __forceinline__ i64 of_chunk(int chunk) const { return of_head() * chunks + chunk; }
};

// e^x; with T = BF16 one instruction computes it, within 2^-20 where the result matters.
__device__ __forceinline__ float exponential(float x) {
    return sizeof(T) == 2 ? exp2_approx(LOG2E * x) : expf(x);
}

// Type of sums of decays: F64 for F32 tensors, because differences of neighbouring sums lose digits
// if decays are strong. e^LEAST_DECAY is 0 in F32; stronger decays are cut to LEAST_DECAY.
constexpr float LEAST_DECAY = -128.0f;
template <class E> struct SumOf { using Type = float; };
template <> struct SumOf<float> { using Type = double; };

// A chunk's tokens, in shared memory. begin: first token in the chunk of each token's document, or
// -1 if the document begins before the chunk. sums: each token's sum of decays since begin.
struct Chunk {
    using Sum = SumOf<T>::Type;
    int begin[CHUNK];
    Sum sums[CHUNK];
    float beta[CHUNK];

    // One warp reads all tokens.
    __device__ __forceinline__ void read(const Place& at, int first, const float* __restrict__ gates,
                                         const int* __restrict__ starts, int carried) {
        float decays[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int i = lane_id() + 32 * half, t = first + i;
            const bool there = t < at.seq_len;
            const int known = there ? t : at.seq_len - 1;
            const int start = starts ? __ldg(starts + at.token(known)) : carried ? -1 : 0;
            begin[i] = max(start - first, -1);
            beta[i] = there ? gates[at.gate(t) + at.value_heads] : 0.0f;
            const float decay = there && start != t ? gates[at.gate(t)] : 0.0f;
            decays[half] = decay < LEAST_DECAY ? LEAST_DECAY : decay;  // NaN stays
        }
        Sum before = 0;  // the first half's sum
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int i = lane_id() + 32 * half, from = max(begin[i], 0);
            Sum total = decays[half];
#pragma unroll
            for (int n = 1; n < 32; n *= 2) {
                const Sum nearer = __shfl_up_sync(0xFFFFFFFFu, total, n);
                if (lane_id() >= n && i - n >= from) { total += nearer; }
            }
            if (half && from < 32) { total += before; }
            before = __shfl_sync(0xFFFFFFFFu, total, 31);
            sums[i] = total;
        }
    }
    // Product of decays from token j to token i; 0 in different documents or for j > i.
    __device__ __forceinline__ float decays(int i, int j) const {
        return j <= i && j >= begin[i] ? exponential(sums[i] - sums[j]) : 0.0f;
    }
};

// Offset of a chunk's factors in global memory.
__device__ __forceinline__ i64 of_factors(const Place& at, int chunk) {
    return at.of_chunk(chunk) * FACTORS * CHUNK;
}

// Tiles of 64 rows, STEPS for each turn of a loop. Tiles arrive in shared memory STAGES - 1 steps
// before their use; a turn's factors TO_KEY and FROM_QUERY arrive with its first tile. Sources has
// COLUMNS of each step, the tile of<STEP>(turn) in global memory, and the factors known(turn).
template <class Sources> struct Ring {
    static constexpr int STEPS = Sources::STEPS;
    static constexpr int STAGE_BYTES = CHUNK * ((DK > CHUNK ? DK : CHUNK) + 8) * 2;
    const Sources& sources;
    char* memory;
    // Number of turns whose factors are in use or under way: 2, or 3 if a turn has two steps.
    static constexpr int KNOWN = 1 + (STEPS + STAGES - 2) / STEPS;
    float (*known)[2 * CHUNK];  // factors of KNOWN turns
    int turns, slot = 0;

    template <int AHEAD = 0> __device__ __forceinline__ void start() {
        if constexpr (AHEAD < STAGES - 1) {
            issue<AHEAD>(0, AHEAD);
            start<AHEAD + 1>();
        }
    }
    // Start copying the tile AHEAD steps after the turn's first, which a later turn may use.
    template <int AHEAD> __device__ __forceinline__ void issue(int turn, int to) {
        constexpr int STEP = AHEAD % STEPS;
        turn += AHEAD / STEPS;
        if (turn < turns) {
            const Tile<T> from = sources.template of<STEP>(turn);
            stage<CHUNK, Sources::COLUMNS[STEP], SCAN_THREADS>(memory + to * STAGE_BYTES, from.at,
                                                               from.pitch, from.rows);
            if (STEP == 0 && threadIdx.x < 2 * CHUNK / 4) {
                cp_async_16(shared_address(known[turn % KNOWN] + threadIdx.x * 4),
                            sources.known(turn) + threadIdx.x * 4, true);
            }
        }
        cp_async_commit();
    }
    // Returns the tile of this step. All threads call it, after their last use of the step before.
    template <int STEP> __device__ __forceinline__ Tile<T> next(int turn) {
        cp_async_wait<STAGES - 2>();
        __syncthreads();
        issue<STEP + STAGES - 1>(turn, slot ? slot - 1 : STAGES - 1);
        const char* const here = memory + slot * STAGE_BYTES;
        slot = slot == STAGES - 1 ? 0 : slot + 1;
        if constexpr (sizeof(T) == 2) {
            return {reinterpret_cast<const T*>(here), Sources::COLUMNS[STEP] + 8, CHUNK};
        } else {
            return sources.template of<STEP>(turn);
        }
    }
};

// Tiles of a scan: OWN has the block's columns of u or d_out; all blocks of a head read the others.
enum Kind { OWN, OF_W, KEYS, QUERIES, OF_SCORES };

// The tiles of a scan in the order of use, chunk by chunk; BACK begins with the last chunk.
template <bool BACK, Kind... KINDS> struct Scanned {
    static constexpr int STEPS = sizeof...(KINDS);
    static constexpr Kind KIND[STEPS] = {KINDS...};
    static constexpr int COLUMNS[STEPS] = {
        (KINDS == OWN ? SLICE : KINDS == OF_SCORES ? CHUNK : DK)...};
    const Place& at;
    const T *own, *qkv, *w, *scores;
    const float* factors;

    __device__ __forceinline__ int chunk(int turn) const { return BACK ? at.chunks - 1 - turn : turn; }
    __device__ __forceinline__ const float* known(int turn) const {
        return factors + of_factors(at, chunk(turn));
    }
    template <int STEP> __device__ __forceinline__ Tile<T> of(int turn) const {
        constexpr Kind OF = KIND[STEP];
        const int c = chunk(turn), first = c * CHUNK, rows = min(CHUNK, at.seq_len - first);
        const i64 row = at.of_chunk(c) * CHUNK;
        if constexpr (OF == OWN && BACK) {
            return {own + at.out(first) + blockIdx.x * SLICE, at.value_heads * DV, rows};
        }
        if constexpr (OF == OWN) { return {own + row * DV + blockIdx.x * SLICE, DV, CHUNK}; }
        if constexpr (OF == OF_W) { return {w + row * DK, DK, CHUNK}; }
        if constexpr (OF == OF_SCORES) { return {scores + row * CHUNK, CHUNK, CHUNK}; }
        return {qkv + (OF == KEYS ? at.key(first) : at.query(first)), at.columns(), rows};
    }
};

constexpr int TILE = SLICE + 8;  // elements of a row of out or changes in shared memory

// Factors of this lane's tokens among 64. Tokens are columns of sums, and inner indices of a left
// factor.
struct Tokens {
    const float* factors;

    __device__ __forceinline__ float2 at(int token) const {
        return load_two(factors + token + lane_column());
    }
    // Multiply the columns of 16 tokens, from `token` on, by their factors.
    __device__ __forceinline__ void scale(Sums& d, int token) const {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float2 f = at(token + 8 * i);
            d[i][0] *= f.x, d[i][1] *= f.y, d[i][2] *= f.x, d[i][3] *= f.y;
        }
    }
    template <class E>
    __device__ __forceinline__ Left<E> scaled(const Left<E>& a, int token) const {
        const float2 two[2] = {at(token), at(token + 8)};
        return times_inner(a, two);
    }
};

// Calls use(element, its index in a (DK, DV) matrix) for sums of 16 channels of keys, from 16 n on, and
// this warp's 16 columns of v.
template <class Use> __device__ __forceinline__ void each_place(Sums& sums, int n, Use use) {
    each_sum(sums, blockIdx.x * SLICE + warp_id() * 16, 16 * n,
             [&](int v, int channel, float& x) { use(x, channel * DV + v); });
}

// A warp's part of a state, transposed: 16 columns of v, from `value` of the block's SLICE on, and
// all channels of keys. BF16 states lie in registers. F32 factors need twice as many registers, so
// that F32 states lie in shared memory, DK * SLICE elements for a block; a thread uses only its
// own.
struct State {
    static constexpr int TILES = DK / 16;
    static constexpr bool IN_REGISTERS = sizeof(T) == 2;
    const int value = warp_id() * 16;
    float* const own;
    Sums S[IN_REGISTERS ? TILES : 1];

    __device__ __forceinline__ explicit State(void* memory)
        : own(reinterpret_cast<float*>(memory) + threadIdx.x) {}
    // Calls use(n, sums) for each 16 channels in order.
    template <class Use> __device__ __forceinline__ void each_tile(Use use) {
        if constexpr (IN_REGISTERS) {
#pragma unroll
            for (int n = 0; n < TILES; ++n) { use(n, S[n]); }
        } else {
#pragma unroll 1
            for (int n = 0; n < TILES; ++n) {
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    S[0][i / 4][i % 4] = own[(n * 8 + i) * SCAN_THREADS];
                }
                use(n, S[0]);
                __syncwarp();  // delays loads of the next tile, because registers are few
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    own[(n * 8 + i) * SCAN_THREADS] = S[0][i / 4][i % 4];
                }
            }
        }
    }
    // state: F32 (DK, DV), or null for 0.
    __device__ __forceinline__ void read(const float* state) {
        each([&](float& x, int place) { x = state ? state[place] : 0.0f; });
    }
    __device__ __forceinline__ void write(float* state) {
        if (state) {
            each([&](float& x, int place) { state[place] = x; });
        }
    }
    template <class Use> __device__ __forceinline__ void each(Use use) {
        each_tile([&](int n, Sums& sums) { each_place(sums, n, use); });
    }
    // Write the state to states (DV, DK) as T.
    __device__ __forceinline__ void put_into(T* states) {
        T* const to = states + (i64)(blockIdx.x * SLICE + value) * DK;
        each_tile([&](int n, Sums& sums) { put(to + n * 16, DK, 16, sums); });
    }
    __device__ __forceinline__ void times(float factor) {
        each_tile([&](int, Sums& sums) { multiply_by(sums, factor); });
    }
    // S += get(k) (16 columns of v, tokens from 16 k on) times a tile of 64 tokens' rows.
    template <class Get> __device__ __forceinline__ void add(Get get, const Tile<T>& rows) {
        if constexpr (IN_REGISTERS) {
            multiply_all<4>(S, get,
                            [&](int k, int n) { return right<false>(rows, k * 16, n * 16); });
        } else {
            each_tile([&](int n, Sums& sums) {
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    Left<T> a = get(k);  // computed anew each time, because registers are few
                    arrived(reinterpret_cast<float (&)[sizeof(a) / 4]>(a));
                    multiply(sums, a, right<false>(rows, k * 16, n * 16));
                }
            });
        }
    }
    // sums += S, rounded to T, times a tile of 64 tokens' rows, transposed.
    __device__ __forceinline__ void read_by(Sums (&sums)[4], const Tile<T>& rows) {
        if constexpr (IN_REGISTERS) {
            multiply_all<TILES>(
                sums, [&](int k) { return to_left<T>(S[k]); },
                [&](int k, int n) { return right<true>(rows, k * 16, n * 16); });
        } else {
            each_tile([&](int k, Sums& own) {
                const Left<T> a = to_left<T>(own);
#pragma unroll
                for (int n = 0; n < 4; ++n) {
                    multiply(sums[n], a, right<true>(rows, k * 16, n * 16));
                }
            });
        }
    }
};

// Copy a tile (64 tokens, SLICE) from shared memory to rows of a tensor, in 16-byte pieces.
__device__ __forceinline__ void copy_out(T* to, i64 pitch, int rows, const T* tile) {
    constexpr int UNITS = SLICE / Vec<T>::N;
    for (int i = threadIdx.x; i < CHUNK * UNITS; i += SCAN_THREADS) {
        const int row = i / UNITS, column = i % UNITS * Vec<T>::N;
        if (row < rows) {
            store_vec(to + row * pitch + column, load_vec(tile + row * TILE + column));
        }
    }
}

// Copy a tile in shared memory to this block's columns of a chunk: put_changes to changes or their
// gradients, the next function to out.
__device__ __forceinline__ void put_changes(T* changes, const Place& at, int c, const T* tile) {
    copy_out(changes + at.of_chunk(c) * CHUNK * DV + blockIdx.x * SLICE, DV, CHUNK, tile);
}
__device__ __forceinline__ void put_out(T* out, const Place& at, int c, const T* tile) {
    const int first = c * CHUNK;
    copy_out(out + at.out(first) + blockIdx.x * SLICE, at.value_heads * DV, at.seq_len - first, tile);
}

// Multiply 16 x 16 products of token pairs by the decays between the two tokens, and divide by the
// lengths. of_k: products of two keys, also times sign and the later token's beta, 0 on and above
// the diagonal. of_q: products of a query and a key.
__device__ __forceinline__ void scale_pairs(Sums& of_k, Sums& of_q, const Chunk& chunk, float sign,
                                            const float* k_length, const float* q_length, int row,
                                            int column) {
    Chunk::Sum sum[4];
    float length[4];
#pragma unroll
    for (int n = 0; n < 4; ++n) {
        const int j = column + n / 2 * 8 + lane_column() + n % 2;
        sum[n] = chunk.sums[j], length[n] = k_length[j];
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int i = row + lane_row() + r * 8, begin = chunk.begin[i];
        const Chunk::Sum sum_i = chunk.sums[i];
        const float by_key = sign * chunk.beta[i] * k_length[i], by_query = q_length[i];
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            const int j = column + n / 2 * 8 + lane_column() + n % 2, e = n % 2 + 2 * r;
            // A branch would let threads diverge.
            const float decay = exponential(sum_i - sum[n]) * length[n];
            const float factor = j <= i && j >= begin ? decay : 0.0f;
            of_k[n / 2][e] = j < i ? of_k[n / 2][e] * (by_key * factor) : 0.0f;
            of_q[n / 2][e] *= by_query * factor;
        }
    }
}

// Adds products of this thread's elements of sums and factors, for rows g and g + 8, to dot.
__device__ __forceinline__ void add_dots(float (&dot)[2], const Sums& sums, const Left<T>& factors) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        dot[i % 2] = fmaf(sums[i / 2][i % 2 * 2], factors.get(i).x, dot[i % 2]);
        dot[i % 2] = fmaf(sums[i / 2][i % 2 * 2 + 1], factors.get(i).y, dot[i % 2]);
    }
}

// Add up the four lanes that share a row, and store 16 rows' dots.
__device__ __forceinline__ void put_dots(float* to, float (&dot)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        dot[r] += __shfl_xor_sync(0xFFFFFFFFu, dot[r], 1);
        dot[r] += __shfl_xor_sync(0xFFFFFFFFu, dot[r], 2);
        if (lane_id() % 4 == 0) { to[lane_row() + 8 * r] = dot[r]; }
    }
}

constexpr bool COPIED = sizeof(T) == 2;  // tiles are copied to shared memory: BF16 only

// The gradient of 16 rows of queries or keys in this warp's DK / 2 columns. BF16: in registers. F32
// factors take the registers, so that F32 gradients lie in `to`, the result's memory. Rows from
// `rows` on are always 0.
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
    // Calls use(c, sums) for each 16 columns in order.
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
