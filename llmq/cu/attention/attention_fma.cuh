// attention_fma.cuh -- attention of one thread block with plain multiply-adds: F32 throughout.
//
// The structure is that of attention_mma.cuh: a block owns OWN rows and walks over the other side
// in steps of STEP rows. 256 threads as 16 x 16: thread (row, column) has rows row + 16 i of the
// owned side and columns column + 16 j of the step or of the head. The 16 threads of a row are in
// one warp, so that their exchanges through shared memory need no block barrier.
//
// Rows in shared memory are HEAD_DIM + 4 elements apart: an odd number of 16-byte units, so that
// 16-byte reads of eight rows do not meet in a bank.
#pragma once

namespace simt {

// Rows of tiles have D elements: a head's, then zeros.
constexpr int D = pieces(HEAD_DIM, 16) * 16, PITCH = D + 4, COLUMNS = D / 16;

__device__ __forceinline__ bool in_head(int column) { return D == HEAD_DIM || column < HEAD_DIM; }

// Copy ROWS rows of a head, `pitch` elements apart in global memory; zeros from row `limit` on.
template <int ROWS, int THREADS>
__device__ __forceinline__ void load_rows(float* to, const float* from, i64 pitch, int first,
                                          int limit) {
    for (int unit = threadIdx.x; unit < ROWS * D / 4; unit += THREADS) {
        const int row = unit / (D / 4), column = unit % (D / 4) * 4;
        Vec<float> x = {};
        if (first + row < limit) {
            const float* const p = from + (i64)(first + row) * pitch + column;
            if constexpr (D == HEAD_DIM) {
                x = load_vec(p);
            } else {
#pragma unroll
                for (int k = 0; k < 4; ++k) { x[k] = in_head(column + k) ? p[k] : 0.0f; }
            }
        }
        store_vec(to + row * PITCH + column, x);
    }
}

// sum[i][j] = dot product of row i of a and row j of b. a, b: the thread's first rows of two tiles.
template <int R, int C>
__device__ __forceinline__ void multiply_rows(float (&sum)[R][C], const float* a, const float* b) {
#pragma unroll
    for (int i = 0; i < R; ++i) {
#pragma unroll
        for (int j = 0; j < C; ++j) { sum[i][j] = 0.0f; }
    }
#pragma unroll 4
    for (int d = 0; d < D; d += 4) {
        Vec<float> left[R], right[C];
#pragma unroll
        for (int i = 0; i < R; ++i) { left[i] = load_vec(a + i * 16 * PITCH + d); }
#pragma unroll
        for (int j = 0; j < C; ++j) { right[j] = load_vec(b + j * 16 * PITCH + d); }
#pragma unroll
        for (int i = 0; i < R; ++i) {
#pragma unroll
            for (int j = 0; j < C; ++j) {
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    sum[i][j] = fmaf(left[i][e], right[j][e], sum[i][j]);
                }
            }
        }
    }
}

// sum += a b. a: (own x STEP), spread over the threads of a row, which exchange it in the shared
// tile `scores`, from the thread's first row on. b: the thread's first column of a tile of STEP
// rows.
template <int R, int C>
__device__ __forceinline__ void multiply_columns(float (&sum)[R][COLUMNS], const float (&a)[R][C],
                                                 float* scores, const float* b, int column) {
    constexpr int SCORE_PITCH = 16 * C + 4;
    __syncwarp();  // the last use of `scores` is over
#pragma unroll
    for (int i = 0; i < R; ++i) {
#pragma unroll
        for (int j = 0; j < C; ++j) { scores[i * 16 * SCORE_PITCH + column + 16 * j] = a[i][j]; }
    }
    __syncwarp();
#pragma unroll 2
    for (int k = 0; k < 16 * C; k += 4) {
        Vec<float> left[R];
#pragma unroll
        for (int i = 0; i < R; ++i) { left[i] = load_vec(scores + i * 16 * SCORE_PITCH + k); }
#pragma unroll
        for (int e = 0; e < 4; ++e) {
#pragma unroll
            for (int j = 0; j < COLUMNS; ++j) {
                const float right = b[(k + e) * PITCH + 16 * j];
#pragma unroll
                for (int i = 0; i < R; ++i) { sum[i][j] = fmaf(left[i][e], right, sum[i][j]); }
            }
        }
    }
}

__device__ __forceinline__ float sum_of_16(float x) {
#pragma unroll
    for (int mask = 8; mask > 0; mask >>= 1) { x += __shfl_xor_sync(0xFFFFFFFFu, x, mask); }
    return x;
}

__device__ __forceinline__ float max_of_16(float x) {
#pragma unroll
    for (int mask = 8; mask > 0; mask >>= 1) {
        x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, mask));
    }
    return x;
}

// Like mma::not_finite (attention_mma.cuh), for one number instead of 16 bytes at a time.
template <bool CLEAR, int ROWS, int THREADS>
__device__ __forceinline__ bool not_finite(float (&spoiled)[ROWS], float* tile) {
    bool any = false;
    for (int i = threadIdx.x; i < ROWS * D; i += THREADS) {
        float& x = tile[i / D * PITCH + i % D];
        const bool bad = (__float_as_uint(x) & 0x7F800000u) == 0x7F800000u;
        if (CLEAR && bad) {
            x = 0.0f;
            spoiled[i / D] = __int_as_float(0x7FC00000);
        }
        any |= bad;
    }
    return any;
}

template <int ROWS, int THREADS>
__device__ __forceinline__ void spoil(float (&spoiled)[ROWS], float* tile) {
    if (!__syncthreads_or(not_finite<false, ROWS, THREADS>(spoiled, tile))) { return; }
    not_finite<true, ROWS, THREADS>(spoiled, tile);
    __syncthreads();
}

template <int OWN, int STEP, int THREADS>
__device__ __forceinline__ void forward(float* out, float* lse, const float* qkv, int seq_len,
                                        int num_heads, int num_kv_heads, const Sight& sight,
                                        float scale, char* shared) {
    constexpr int R = OWN / 16, C = STEP / 16;
    static_assert(THREADS == 256, "16 x 16 threads");
    const int row = threadIdx.x / 16, column = threadIdx.x % 16;
    const int head = blockIdx.y, batch = blockIdx.z;
    const int tile = gridDim.x - 1 - blockIdx.x;  // the longest tiles first
    const int own = tile * OWN;
    const i64 pitch = (i64)(num_heads + 2 * num_kv_heads) * HEAD_DIM;
    const float* q = qkv + (i64)batch * seq_len * pitch + head * HEAD_DIM;
    const float* k =
        qkv + (i64)batch * seq_len * pitch + (num_heads + head / (num_heads / num_kv_heads)) * HEAD_DIM;
    const float* v = k + num_kv_heads * HEAD_DIM;
    float* q_tile = reinterpret_cast<float*>(shared);
    float *k_tile = q_tile + OWN * PITCH, *v_tile = k_tile + STEP * PITCH;
    float* scores = v_tile + STEP * PITCH + row * (STEP + 4);

    float sum[R][COLUMNS] = {}, row_max[R], row_sum[R] = {};
#pragma unroll
    for (int i = 0; i < R; ++i) { row_max[i] = -INFINITY; }
    __shared__ float spoiled[STEP];
    load_rows<OWN, THREADS>(q_tile, q, pitch, own, seq_len);
    const int begin = sight.first_key(own) / STEP * STEP, end = min(own + OWN, seq_len);
    const int all = sight.first_key(own + OWN - 1);
    for (int step = begin; step < end; step += STEP) {
        __syncthreads();
        load_rows<STEP, THREADS>(k_tile, k, pitch, step, seq_len);
        load_rows<STEP, THREADS>(v_tile, v, pitch, step, seq_len);
        if (MASKED && threadIdx.x < STEP) { spoiled[threadIdx.x] = 0.0f; }
        __syncthreads();
        const bool partial = MASKED && (step < all || step + STEP - 1 > own);
        if (partial) { spoil<STEP, THREADS>(spoiled, v_tile); }
        float p[R][C];
        multiply_rows<R, C>(p, q_tile + row * PITCH, k_tile + column * PITCH);
#pragma unroll
        for (int i = 0; i < R; ++i) {
            float top = row_max[i];
            const int first = sight.first_key(own + row + 16 * i);
#pragma unroll
            for (int j = 0; j < C; ++j) {
                const int key = step + column + 16 * j;
                const bool future = key > own + row + 16 * i;
                const bool unseen = future || (MASKED && key < first);
                if (partial) { p[i][j] += spoiled[column + 16 * j]; }
                const float score = SOFTCAP ? capped(p[i][j] * scale) : p[i][j] * scale;
                p[i][j] = unseen ? -INFINITY : score;
                top = fmaxf(top, p[i][j]);
            }
            top = max_of_16(top);
            const float base = MASKED && top == -INFINITY ? 0.0f : top;  // nothing is seen so far
            const float correction = expf(row_max[i] - base);
            row_max[i] = top;
            row_sum[i] *= correction;
#pragma unroll
            for (int j = 0; j < C; ++j) {
                p[i][j] = expf(p[i][j] - base);
                row_sum[i] += p[i][j];  // over this thread's columns
            }
#pragma unroll
            for (int j = 0; j < COLUMNS; ++j) { sum[i][j] *= correction; }
        }
        multiply_columns<R, C>(sum, p, scores, v_tile + column, column);
    }
#pragma unroll
    for (int i = 0; i < R; ++i) {
        const int query = own + row + 16 * i;
        const float total = sum_of_16(row_sum[i]);
        if (query < seq_len) {
            float* to = out + (((i64)batch * seq_len + query) * num_heads + head) * HEAD_DIM + column;
#pragma unroll
            for (int j = 0; j < COLUMNS; ++j) {
                if (in_head(column + 16 * j)) { to[16 * j] = sum[i][j] / total; }
            }
            if (column == 0) {
                lse[((i64)batch * num_heads + head) * seq_len + query] = row_max[i] + logf(total);
            }
        }
    }
}

// Gradients as in mma::backward, in F32.
template <int OWN, int STEP, int THREADS, Part PART>
__device__ __forceinline__ void backward(float* d_qkv, const float* d_out, const float* lse,
                                         const float* delta, const float* qkv, int seq_len,
                                         int num_heads, int num_kv_heads, int tile, int head,
                                         int batch, const Sight& sight, float scale, char* shared) {
    constexpr bool OWN_KEYS = PART != Part::QUERIES;
    constexpr bool WANT_X = PART != Part::ONLY_V;
    constexpr bool WANT_Y = PART == Part::KEYS || PART == Part::ONLY_V;
    constexpr int R = OWN / 16, C = STEP / 16;
    static_assert(THREADS == 256, "16 x 16 threads");
    const int row = threadIdx.x / 16, column = threadIdx.x % 16;
    const int own = tile * OWN, group = num_heads / num_kv_heads;
    const int kv_head = OWN_KEYS ? head : head / group, q_head = OWN_KEYS ? head * group : head;
    const i64 pitch = (i64)(num_heads + 2 * num_kv_heads) * HEAD_DIM, out_pitch = (i64)num_heads * HEAD_DIM;
    const i64 sequence = (i64)batch * seq_len;
    const float* q = qkv + sequence * pitch + q_head * HEAD_DIM;
    const float* k = qkv + sequence * pitch + (num_heads + kv_head) * HEAD_DIM;
    const float* v = k + num_kv_heads * HEAD_DIM;
    const float* d_o = d_out + sequence * out_pitch + q_head * HEAD_DIM;
    const i64 statistics = ((i64)batch * num_heads + q_head) * seq_len;  // row of the first query
    float* a = reinterpret_cast<float*>(shared);
    // Shared memory holds one tile of a step of large heads: y replaces x, which is loaded again.
    constexpr bool ALONE = D > 256;
    float *b = a + OWN * PITCH, *x = b + OWN * PITCH, *y = ALONE ? x : x + STEP * PITCH;
    float* scores = y + STEP * PITCH + row * (STEP + 4);

    load_rows<OWN, THREADS>(a, OWN_KEYS ? k : q, pitch, own, seq_len);
    load_rows<OWN, THREADS>(b, OWN_KEYS ? v : d_o, OWN_KEYS ? pitch : out_pitch, own, seq_len);
    // First and end of the steps' tiles in which a query sees a key.
    const int last_key = min(own + OWN, seq_len) - 1;
    const int first = (OWN_KEYS ? own : sight.first_key(own)) / STEP;
    const int tiles =
        pieces(OWN_KEYS ? sight.end_of_queries(last_key) : last_key + 1, STEP) - first;
    __shared__ float spoiled[STEP];
    const int steps = OWN_KEYS ? group * tiles : tiles;
    float d_x[R][COLUMNS] = {}, d_y[R][COLUMNS] = {};
    for (int n = 0; n < steps; ++n) {
        const int step = (first + n % tiles) * STEP, nth = n / tiles;  // nth head of the group
        bool cut = false;  // some pairs of the step are not seen
        if (MASKED) {
            const int all = sight.first_key(OWN_KEYS ? step + STEP - 1 : own + OWN - 1);
            const bool diagonal = OWN_KEYS ? step < own + OWN - 1 : step + STEP - 1 > own;
            cut = diagonal || (OWN_KEYS ? own : step) < all;
        }
        const auto load_x = [&] {
            load_rows<STEP, THREADS>(x, OWN_KEYS ? q + nth * HEAD_DIM : k, pitch, step, seq_len);
        };
        const auto load_y = [&] {
            load_rows<STEP, THREADS>(y, OWN_KEYS ? d_o + nth * HEAD_DIM : v,
                                     OWN_KEYS ? out_pitch : pitch, step, seq_len);
        };
        __syncthreads();
        load_x();
        if (!ALONE) { load_y(); }
        if (MASKED && threadIdx.x < STEP) { spoiled[threadIdx.x] = 0.0f; }
        __syncthreads();
        if (WANT_X && cut) { spoil<STEP, THREADS>(spoiled, x); }
        if (!ALONE && WANT_Y && cut) { spoil<STEP, THREADS>(spoiled, y); }
        float p[R][C], d_s[R][C];
        multiply_rows<R, C>(p, a + row * PITCH, x + column * PITCH);
        if (ALONE) {
            __syncthreads();
            load_y();
            __syncthreads();
            if (WANT_Y && cut) { spoil<STEP, THREADS>(spoiled, y); }
        }
        multiply_rows<R, C>(d_s, b + row * PITCH, y + column * PITCH);
#pragma unroll
        for (int i = 0; i < R; ++i) {
#pragma unroll
            for (int j = 0; j < C; ++j) {
                const int mine = own + row + 16 * i, other = step + column + 16 * j;
                const int query = OWN_KEYS ? other : mine, key = OWN_KEYS ? mine : other;
                const i64 statistic = statistics + (i64)nth * seq_len + min(query, seq_len - 1);
                const bool seen =
                    key <= query && query < seq_len && key >= sight.first_key(query);
                if (MASKED) { p[i][j] += spoiled[column + 16 * j]; }
                const float score = capped(p[i][j] * scale);
                const float exponent = SOFTCAP ? score - lse[statistic]
                                               : fmaf(p[i][j], scale, -lse[statistic]);
                p[i][j] = seen ? expf(exponent) : 0.0f;
                float gradient = p[i][j] * (d_s[i][j] - delta[statistic]);
                if (SOFTCAP) { gradient *= slope_of(score); }
                d_s[i][j] = MASKED && !seen ? 0.0f : gradient;
            }
        }
        if (WANT_Y) { multiply_columns<R, C>(d_y, p, scores, y + column, column); }
        if (ALONE && WANT_X) {
            __syncthreads();
            load_x();
            __syncthreads();
            if (cut) { spoil<STEP, THREADS>(spoiled, x); }
        }
        if (WANT_X) { multiply_columns<R, C>(d_x, d_s, scores, x + column, column); }
    }
#pragma unroll
    for (int i = 0; i < R; ++i) {
        const int mine = own + row + 16 * i;
        if (mine < seq_len) {
            float* to = d_qkv + (sequence + mine) * pitch + column;
            const int first_column = (OWN_KEYS ? num_heads + kv_head : q_head) * HEAD_DIM;
#pragma unroll
            for (int j = 0; j < COLUMNS; ++j) {
                if (!in_head(column + 16 * j)) { continue; }
                if (WANT_X) { to[first_column + 16 * j] = d_x[i][j] * scale; }
                if (WANT_Y) { to[first_column + num_kv_heads * HEAD_DIM + 16 * j] = d_y[i][j]; }
            }
        }
    }
}

}  // namespace simt
