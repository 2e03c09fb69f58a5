// embedding.cu -- token and position embeddings, and gradients without floating-point atomics.
//
//   forward             out[i] = weight[tokens[i]] * scale
//                                + position_weight[i % seq_len - starts[i]]
//   sort                order = token indices by (id % buckets, id / buckets), equal ids in order
//   backward, finish    d_weight[id - first_id] += scale * sum of d_out[i] over the i with
//                       tokens[i] == id, for ids of its rows but `padding`
//   backward_positions  d_position[t] = or += sum over b of d_out[b, t]
//   backward_documents  d_position[p] = or += sum of d_out[b, t] where t - starts[b, t] == p
//
// The sort: block b collects the tokens with id % buckets == b in order, without waiting for other
// blocks: the block itself counts the tokens with a smaller remainder, which is its place in
// `order`. Then it sorts its tokens by id / buckets, 4 bits a pass, stably. The low bits spread the
// frequent ids, which tokenizers number consecutively. The sums: a warp adds up 32 neighbours in
// `order`, for 256 channels. It adds a run of equal ids inside these 32 to the weight gradient at
// once. A run that crosses their border leaves F32 partial sums, (chunks, 2, C): slot 0 for a run
// that comes from the chunk before, slot 1 for a run that starts here. finish adds these sums. A
// single id repeated n times is thus as balanced as n different ids.
//
// Data     declared in llmq/ops/pointwise/embedding.py. starts: position in the sequence at which
//          each token's document starts, or null.
// Launch   forward: 256 threads, a warp per token. sort: 1024 threads, `buckets` blocks, a power
//          of 2. backward: 256 threads, a warp per chunk of 32 and slice of 256 channels, slices
//          side by side. finish: 256 threads, (chunks / 4, slices) blocks. positions: 256 threads,
//          8 channels each. documents: 256 threads, a warp per position and slice.
// Cost     forward: 2 n C elements. backward: d_out read once, rows of distinct ids read and
//          written, n C / 4 bytes of partial sums at most; the sort reads the ids from L2, about
//          20 us at 32k.
// Needs    0 <= id < vocab.
#include "common.cuh"

constexpr int THREADS = 256, SORT_THREADS = 1024, SORT_WARPS = SORT_THREADS / 32;
constexpr int CHUNK = 32;                    // sorted tokens per warp
constexpr int FINISH_CHUNKS = 4;             // chunks per block that finishes runs
constexpr int WIDTH = 8, SLICE = 32 * WIDTH;  // channels per thread and per warp
constexpr int DIGIT_BITS = 4, DIGITS = 1 << DIGIT_BITS;
constexpr u32 ALL = 0xFFFFFFFFu;

extern "C" __global__ void __launch_bounds__(THREADS)
embedding_forward(T* __restrict__ out, const i32* __restrict__ tokens, const T* __restrict__ weight,
                  const T* __restrict__ position_weight, i64 n, i32 seq_len, i32 C,
                  const i32* __restrict__ starts, f32 scale) {
    constexpr int UNROLL = 4;
    const i64 i = (i64)blockIdx.x * (THREADS / 32) + threadIdx.x / 32;
    if (i >= n) { return; }
    const T* const row = weight + (i64)max(tokens[i], 0) * C;  // -1: sampling failed
    const i64 p = i % seq_len - (starts ? starts[i] : 0);
    const T* const position = position_weight ? position_weight + p * C : nullptr;
    for (int start = threadIdx.x % 32 * WIDTH; start < C; start += UNROLL * SLICE) {
        Pack<T, WIDTH> x[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            const int c = start + u * SLICE;
            if (c < C) { x[u].load(row + c); }
        }
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            const int c = start + u * SLICE;
            if (c >= C) { break; }
            if (scale != 1.0f) {
#pragma unroll
                for (int k = 0; k < WIDTH; ++k) { x[u].set(k, from_f32<T>(x[u].get(k) * scale)); }
            }
            if (position) {
                Pack<T, WIDTH> p;
                p.load(position + c);
#pragma unroll
                for (int k = 0; k < WIDTH; ++k) {
                    x[u].set(k, from_f32<T>(x[u].get(k) + p.get(k)));
                }
            }
            x[u].store(out + i * C + c);
        }
    }
}

// WIDTH channels of one row, packed.
template <class X> struct Channels {
    static constexpr int N = Vec<X>::N;
    uint4 part[WIDTH / N];

    __device__ __forceinline__ void load(const X* p) {
#pragma unroll
        for (int i = 0; i < WIDTH / N; ++i) { part[i] = load_packed_stream(p + i * N); }
    }
    __device__ __forceinline__ void add_to(float (&sum)[WIDTH]) const {
#pragma unroll
        for (int i = 0; i < WIDTH / N; ++i) {
            const Vec<X> x = unpack<X>(part[i]);
#pragma unroll
            for (int k = 0; k < N; ++k) { sum[i * N + k] += to_f32(x[k]); }
        }
    }
    // p = these channels, the gradient's old values, + scale * x. first: p's index in the gradient.
    __device__ __forceinline__ void store_sum(X* p, i64 first, const float (&x)[WIDTH], float scale,
                                              u32 seed) {
#pragma unroll
        for (int i = 0; i < WIDTH / N; ++i) {
            Vec<X> sums = unpack<X>(part[i]);
#pragma unroll
            for (int k = 0; k < N; ++k) {
                const float sum = scale * x[i * N + k];
                sums[k] = add_gradient(sums[k], sum, gradient_bits(seed, first >> 3, i * N + k));
            }
            store_vec_stream(p + i * N, sums);
        }
    }
};

__device__ __forceinline__ u32 lanes_below() { return (1u << threadIdx.x % 32) - 1; }

// Lanes with the same digit as this one, among those in `active`.
__device__ __forceinline__ u32 same_digit(u32 digit, u32 active) {
    u32 peers = active;
#pragma unroll
    for (int bit = 0; bit < DIGIT_BITS; ++bit) {
        const u32 ones = __ballot_sync(ALL, digit >> bit & 1);
        peers &= digit >> bit & 1 ? ones : ~ones;
    }
    return peers;
}

// Returns the exclusive prefix sum of x over the block's threads; total gets the sum of all x.
__device__ __forceinline__ i32 block_scan(i32 x, i32* shared, i32* total) {
    const int lane = threadIdx.x % 32;
    i32 sum = x;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        const i32 other = __shfl_up_sync(ALL, sum, distance);
        if (lane >= distance) { sum += other; }
    }
    __syncthreads();  // threads may still read `shared` for an earlier call
    if (lane == 31) { shared[threadIdx.x / 32] = sum; }
    __syncthreads();
    i32 before = 0, all = 0;
#pragma unroll
    for (int w = 0; w < SORT_WARPS; ++w) {
        if (w < threadIdx.x / 32) { before += shared[w]; }
        all += shared[w];
    }
    *total = all;
    return before + sum - x;
}

// One stable pass over `count` token indices, by the digit of id / buckets at `shift`.
__device__ __forceinline__ void sort_pass(i32* to, const i32* from, const i32* __restrict__ tokens,
                                          int count, int shift, i32 (*counters)[SORT_WARPS],
                                          i32* shared) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int share = (count + SORT_THREADS - 1) / SORT_THREADS * 32;
    const int first = warp * share, last = min(count, first + share);
    i32* const counter = &counters[0][0];
    if (threadIdx.x < DIGITS * SORT_WARPS) { counter[threadIdx.x] = 0; }
    __syncthreads();
    for (int start = first; start < last; start += 32) {
        const bool active = start + lane < last;
        const u32 digit = active ? tokens[from[start + lane]] >> shift & (DIGITS - 1) : 0;
        const u32 peers = same_digit(digit, __ballot_sync(ALL, active));
        if (active && !(peers & lanes_below())) { counters[digit][warp] += __popc(peers); }
        __syncwarp();
    }
    __syncthreads();
    const bool counts = threadIdx.x < DIGITS * SORT_WARPS;
    i32 total;
    const i32 place = block_scan(counts ? counter[threadIdx.x] : 0, shared, &total);
    if (counts) { counter[threadIdx.x] = place; }
    __syncthreads();
    for (int start = first; start < last; start += 32) {
        const bool active = start + lane < last;
        const i32 index = active ? from[start + lane] : 0;
        const u32 digit = active ? tokens[index] >> shift & (DIGITS - 1) : 0;
        const u32 peers = same_digit(digit, __ballot_sync(ALL, active));
        const int rank = __popc(peers & lanes_below());
        if (active) { to[counters[digit][warp] + rank] = index; }
        __syncwarp();
        if (active && rank == 0) { counters[digit][warp] += __popc(peers); }
        __syncwarp();
    }
    __syncthreads();
}

extern "C" __global__ void __launch_bounds__(SORT_THREADS, 1)
embedding_sort(i32* order, i32* spare, const i32* __restrict__ tokens, i32 n, i32 vocab,
               i32 buckets) {
    static_assert(DIGITS * SORT_WARPS <= SORT_THREADS, "one counter per thread");
    constexpr int UNROLL = 8;
    __shared__ i32 counters[DIGITS][SORT_WARPS];
    __shared__ i32 shared[SORT_WARPS];
    const int lane = threadIdx.x % 32, bucket_bits = __popc(buckets - 1);
    const i32 bucket = blockIdx.x;
    const int share = (n + SORT_THREADS - 1) / SORT_THREADS * 32;
    const int first = threadIdx.x / 32 * share, last = min(n, first + share);
    i32 smaller = 0, mine = 0;
#pragma unroll 8
    for (int i = first + lane; i < last; i += 32) {
        const i32 remainder = tokens[i] & (buckets - 1);
        smaller += remainder < bucket;
        mine += remainder == bucket;
    }
    i32 base, count;
    block_scan(smaller, shared, &base);
    const i32 before = block_scan(mine, shared, &count);
    // Lane 0's prefix counts the bucket's tokens in the warps before this one.
    int next = __shfl_sync(ALL, before, 0);
    int passes = 0;
    for (u32 largest = (vocab - 1) >> bucket_bits; largest; largest >>= DIGIT_BITS) { ++passes; }
    i32* from = (passes % 2 ? spare : order) + base;
    i32* to = (passes % 2 ? order : spare) + base;
    for (int start = first; start < last; start += UNROLL * 32) {
        bool inside[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            const int i = start + u * 32 + lane;
            inside[u] = i < last ? (tokens[i] & (buckets - 1)) == bucket : false;
        }
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            const u32 members = __ballot_sync(ALL, inside[u]);
            if (inside[u]) { from[next + __popc(members & lanes_below())] = start + u * 32 + lane; }
            next += __popc(members);
        }
    }
    __syncthreads();
    for (int pass = 0; pass < passes; ++pass) {
        sort_pass(to, from, tokens, count, bucket_bits + pass * DIGIT_BITS, counters, shared);
        i32* const swap = from;
        from = to;
        to = swap;
    }
}

// Whether an id has a gradient: it is one of the `rows` ids from first_id on, and not padding.
__device__ __forceinline__ bool has_row(i32 id, i32 padding, i32 first_id, i32 rows) {
    return id != padding && (u32)(id - first_id) < (u32)rows;
}

extern "C" __global__ void __launch_bounds__(THREADS, 3)
embedding_backward(G* __restrict__ d_weight, f32* __restrict__ partial, const T* __restrict__ d_out,
                   const i32* __restrict__ tokens, const i32* __restrict__ order,
                   const StepScalars* __restrict__ scalars, i32 n, i32 C, f32 scale, i32 padding,
                   i32 first_id, i32 rows, u32 salt) {
    constexpr int UNROLL = 2;  // two loads each; more would cost occupancy
    const int slices = (C + SLICE - 1) / SLICE;
    const i64 warp = (i64)blockIdx.x * (THREADS / 32) + threadIdx.x / 32;
    const i64 chunk = warp / slices, first = chunk * CHUNK;
    if (first >= n) { return; }
    const int lane = threadIdx.x % 32, c = (int)(warp % slices) * SLICE + lane * WIDTH;
    const int count = (int)min((i64)CHUNK, n - first);
    const i32 index = lane < count ? order[first + lane] : 0;
    const i32 id = lane < count ? tokens[index] : -1;
    const i32 id_before = first > 0 ? tokens[order[first - 1]] : -1;
    const i32 id_after = first + CHUNK < n ? tokens[order[first + CHUNK]] : -1;
    const u32 seed = gradient_seed(scalars, salt);

    // Bit j: a run ends with token j. The first run may come from the chunk before.
    const i32 next_id = __shfl_down_sync(ALL, id, 1);
    const u32 ends = __ballot_sync(ALL, lane < count && id != (lane == 31 ? id_after : next_id));
    const bool from_before = id_before == __shfl_sync(ALL, id, 0);
    // wanted: tokens with a gradient. whole: last tokens of runs that lie inside the chunk.
    const u32 wanted = __ballot_sync(ALL, lane < count && has_row(id, padding, first_id, rows));
    const u32 whole = (from_before ? ends & (ends - 1) : ends) & wanted;

    float sum[WIDTH] = {};
    for (int start = 0; start < count; start += UNROLL) {
        Channels<T> x[UNROLL];
        Channels<G> before[UNROLL];  // old gradients of rows to be written, loaded along with x
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            const int j = start + u;
            const i64 row = __shfl_sync(ALL, index, j);
            const i64 place = (i64)(__shfl_sync(ALL, id, j) - first_id) * C + c;
            if (wanted >> j & 1 && c < C) { x[u].load(d_out + row * C + c); }
            if (whole >> j & 1 && c < C) { before[u].load(d_weight + place); }
        }
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            const int j = start + u;
            const i64 place = (i64)(__shfl_sync(ALL, id, j) - first_id) * C + c;
            if (!(wanted >> j & 1) || c >= C) { continue; }
            x[u].add_to(sum);
            const bool end = ends >> j & 1;
            if (whole >> j & 1) {
                before[u].store_sum(d_weight + place, place, sum, scale, seed);
            } else if (end || j == count - 1) {
                const bool started_before = from_before && (ends & ((1u << j) - 1)) == 0;
                float* const piece = partial + (2 * chunk + !started_before) * C + c;
#pragma unroll
                for (int k = 0; k < WIDTH; k += 4) {
                    *reinterpret_cast<float4*>(piece + k) =
                        make_float4(sum[k], sum[k + 1], sum[k + 2], sum[k + 3]);
                }
            }
            if (end) {
#pragma unroll
                for (int k = 0; k < WIDTH; ++k) { sum[k] = 0.0f; }
            }
        }
    }
}

// The id of the run that starts in this chunk and leaves it; -1 if there is none.
__device__ __forceinline__ i32 run_to_finish(const i32* __restrict__ tokens,
                                             const i32* __restrict__ order, i32 n, i64 chunk) {
    const i64 after = (chunk + 1) * CHUNK;
    if (after >= n) { return -1; }
    const i32 id = tokens[order[after - 1]], id_after = tokens[order[after]];
    const i32 id_before = chunk > 0 ? tokens[order[after - CHUNK - 1]] : -1;
    return id_after == id && id_before != id ? id : -1;
}

extern "C" __global__ void __launch_bounds__(THREADS, 4)
embedding_finish(G* __restrict__ d_weight, const f32* __restrict__ partial,
                 const i32* __restrict__ tokens, const i32* __restrict__ order,
                 const StepScalars* __restrict__ scalars, i32 n, i32 C, f32 scale, i32 padding,
                 i32 first_id, i32 rows, u32 salt) {
    constexpr int WARPS = THREADS / 32;
    __shared__ float shared[WARPS][SLICE];
    __shared__ i32 ids[FINISH_CHUNKS];
    const i64 first_chunk = (i64)blockIdx.x * FINISH_CHUNKS;
    if (threadIdx.x < FINISH_CHUNKS) {
        ids[threadIdx.x] = run_to_finish(tokens, order, n, first_chunk + threadIdx.x);
    }
    const u32 seed = gradient_seed(scalars, salt);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int c = blockIdx.y * SLICE + lane * WIDTH;
    __syncthreads();
    for (int i = 0; i < FINISH_CHUNKS; ++i) {
        const i32 id = ids[i];
        if (id < 0 || !has_row(id, padding, first_id, rows)) { continue; }
        const i64 chunk = first_chunk + i;
        int pieces = 1;  // the run's partial sums: one in each chunk that it enters
        for (;;) {
            const i64 start = (chunk + pieces + lane) * CHUNK;
            const bool same = start < n ? tokens[order[start]] == id : false;
            const u32 others = ~__ballot_sync(ALL, same);
            if (others) {
                pieces += __ffs(others) - 1;
                break;
            }
            pieces += 32;
        }
        const int share = (pieces + WARPS - 1) / WARPS, last = min(pieces, (warp + 1) * share);
        float sum[WIDTH] = {};
        if (c < C) {
#pragma unroll 4
            for (int p = warp * share; p < last; ++p) {
                Pack<float, WIDTH> piece;
                piece.load(partial + (2 * (chunk + p) + (p == 0)) * C + c);
#pragma unroll
                for (int k = 0; k < WIDTH; ++k) { sum[k] += piece.get(k); }
            }
        }
        __syncthreads();  // threads may still read the sums of the run before
#pragma unroll
        for (int k = 0; k < WIDTH; ++k) { shared[warp][lane * WIDTH + k] = sum[k]; }
        __syncthreads();
        if (warp > 0 || c >= C) { continue; }
#pragma unroll
        for (int k = 0; k < WIDTH; ++k) {
            sum[k] = 0.0f;
            for (int w = 0; w < WARPS; ++w) { sum[k] += shared[w][lane * WIDTH + k]; }
            sum[k] *= scale;
        }
        add_gradients<G, WIDTH>(d_weight, (i64)(id - first_id) * C + c, sum, seed);
    }
}

// 8 channels of the gradient of positions; i: index of the first of them in the gradient.
__device__ __forceinline__ void store_position(G* d_position, i64 i, const float (&sum)[WIDTH],
                                               bool accumulate, u32 seed) {
    if (accumulate) {
        add_gradients<G, WIDTH>(d_position, i, sum, seed);
    } else {
        Pack<G, WIDTH> result;
#pragma unroll
        for (int k = 0; k < WIDTH; ++k) { result.set(k, from_f32<G>(sum[k])); }
        result.store(d_position + i);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
embedding_backward_positions(G* __restrict__ d_position, const T* __restrict__ d_out,
                             const StepScalars* __restrict__ scalars, i32 positions, i32 batch,
                             i32 seq_len, i32 C, i32 accumulate, u32 salt) {
    constexpr int UNROLL = 8;
    const i64 i = ((i64)blockIdx.x * THREADS + threadIdx.x) * WIDTH;
    const i64 sequence = (i64)seq_len * C;
    if (i >= (i64)positions * C) { return; }
    float sum[WIDTH] = {};
    if (i < sequence) {
        for (int start = 0; start < batch; start += UNROLL) {
            Channels<T> x[UNROLL];
#pragma unroll
            for (int u = 0; u < UNROLL; ++u) {
                if (start + u < batch) { x[u].load(d_out + (start + u) * sequence + i); }
            }
#pragma unroll
            for (int u = 0; u < UNROLL; ++u) {
                if (start + u < batch) { x[u].add_to(sum); }
            }
        }
    }
    store_position(d_position, i, sum, accumulate, gradient_seed(scalars, salt));
}

extern "C" __global__ void __launch_bounds__(THREADS)
embedding_backward_documents(G* __restrict__ d_position, const T* __restrict__ d_out,
                             const i32* __restrict__ starts,
                             const StepScalars* __restrict__ scalars, i32 positions, i32 batch,
                             i32 seq_len, i32 C, i32 accumulate, u32 salt) {
    const int slices = (C + SLICE - 1) / SLICE, lane = threadIdx.x % 32;
    const i64 warp = (i64)blockIdx.x * (THREADS / 32) + threadIdx.x / 32;
    const i32 position = warp / slices, c = warp % slices * SLICE + lane * WIDTH;
    if (position >= positions) { return; }
    float sum[WIDTH] = {};
    for (int b = 0; b < batch; ++b) {
        const i32* const row = starts + (i64)b * seq_len;
        for (int first = position; first < seq_len; first += 32) {  // t >= its document position
            const int t = first + lane;
            u32 same = __ballot_sync(ALL, t < seq_len && t - row[min(t, seq_len - 1)] == position);
            for (; same; same &= same - 1) {
                const i64 token = (i64)b * seq_len + first + __ffs(same) - 1;
                Channels<T> x;
                if (c < C) {
                    x.load(d_out + token * C + c);
                    x.add_to(sum);
                }
            }
        }
    }
    if (c < C) {
        store_position(d_position, (i64)position * C + c, sum, accumulate,
                       gradient_seed(scalars, salt));
    }
}
