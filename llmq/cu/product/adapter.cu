// adapter.cu -- low-rank adapters of spans of a matrix's rows: expands the spans' B to one sparse
// matrix, and collects B from it.
//
//   expand    whole[r, k * rank + c] = T(scale_k * b[i, c])   for each row r of span k, the i-th of
//             elsewhere 0                                     all spans' rows
//   collect   b[i, c] = T(scale_k * whole[r, k * rank + c])
//   norms     norms[r] = sqrt(sum over j of (w[r, j] + scale_k * sum over c of b[i, c]
//             * a[k * rank + c, j])^2), elsewhere 0
//   columns   out[n, r] = x[n, r] * magnitudes[r] / norms[r] + bias[r]; the factor is 1 where
//   norms[r]
//             is 0. If y is given, out[n, r] = x[n, r] * y[n, r] / norms[r], 0 where norms[r] is 0
//
// Data     declared in llmq/ops/product/adapter.py. Spans ascend; unused spans are empty. Spans
//          repeat every `period` rows.
// Launch   256 threads. expand: eight elements of whole each. collect: an element of b each. norms:
//          a block for 16 rows. columns: a 16-byte vector each.
// Cost     the result is written once; only operand elements with a counterpart are read. norms: w
//          is read once, with `rank` multiplications for each element.
// Needs    columns >= rank * spans, a multiple of 8; fewer than 2^35 elements of whole. columns: whole
//          vectors in a row; out may be x.
#include "common.cuh"
#include "ptx.cuh"

constexpr int MAX_SPANS = 4, OCTET = 8;  // OCTET: number of columns of a thread

struct Spans {
    i64 start[MAX_SPANS], stop[MAX_SPANS];

    __device__ __forceinline__ i64 count() const {
        i64 rows = 0;
#pragma unroll
        for (int k = 0; k < MAX_SPANS; ++k) { rows += stop[k] - start[k]; }
        return rows;
    }
};

extern "C" __global__ void __launch_bounds__(256)
adapter_expand(T* __restrict__ whole, const T* __restrict__ b, f32 scale0, f32 scale1, f32 scale2,
               f32 scale3, i32 rank, i32 columns, i64 rows, i64 period, i64 start0, i64 stop0,
               i64 start1, i64 stop1, i64 start2, i64 stop2, i64 start3, i64 stop3) {
    const Spans spans = {{start0, start1, start2, start3}, {stop0, stop1, stop2, stop3}};
    const f32 scales[MAX_SPANS] = {scale0, scale1, scale2, scale3};
    const u32 i = blockIdx.x * blockDim.x + threadIdx.x, octets = columns / OCTET;
    if (i / octets >= rows) { return; }
    const i64 row = i / octets % period;
    const T* from = nullptr;  // the row's elements of b, for columns of whole from `begin` on
    int begin = 0;
    f32 scale = 0.0f;
    i64 before = i / octets / period * spans.count();  // rows of earlier spans
#pragma unroll
    for (int k = 0; k < MAX_SPANS; ++k) {
        if (row >= spans.start[k] && row < spans.stop[k]) {
            from = b + (before + row - spans.start[k]) * rank;
            begin = k * rank;
            scale = scales[k];
        }
        before += spans.stop[k] - spans.start[k];
    }
    Pack<T, OCTET> out;
#pragma unroll
    for (int j = 0; j < OCTET; ++j) {
        const int c = (int)(i % octets) * OCTET + j - begin;
        const bool inside = from != nullptr && c >= 0 && c < rank;
        out.set(j, from_f32<T>(inside ? scale * to_f32(from[c]) : 0.0f));
    }
    T* const to = whole + (i64)i * OCTET;
#pragma unroll
    for (int k = 0; k < OCTET / Vec<T>::N; ++k) {
        store_vec(to + k * Vec<T>::N, out.part[k]);  // stays in L2: a product reads whole next
    }
}

extern "C" __global__ void __launch_bounds__(256)
adapter_collect(T* __restrict__ b, const T* __restrict__ whole, f32 scale0, f32 scale1, f32 scale2,
                f32 scale3, i32 rank, i32 columns, i64 rows, i64 period, i64 start0, i64 stop0,
                i64 start1, i64 stop1, i64 start2, i64 stop2, i64 start3, i64 stop3) {
    const Spans spans = {{start0, start1, start2, start3}, {stop0, stop1, stop2, stop3}};
    const f32 scales[MAX_SPANS] = {scale0, scale1, scale2, scale3};
    const i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    // row: row of b; then the row within one period; then the row after the spans passed so far.
    i64 row = i / rank;
    const i64 first = row / spans.count() * period;
    if (first >= rows) { return; }
    row %= spans.count();
    const int column = (int)(i % rank);
#pragma unroll
    for (int k = 0; k < MAX_SPANS; ++k) {
        const i64 count = spans.stop[k] - spans.start[k];
        if (row >= 0 && row < count) {
            const i64 at = (first + spans.start[k] + row) * columns + k * rank + column;
            b[i] = from_f32<T>(scales[k] * to_f32(whole[at]));
        }
        row -= count;
    }
}

constexpr int NORM_ROWS = 16;  // rows of a block, for which a is read once

// On sm_89 the assembler limits F32 kernels to 64 registers, and spills, without an explicit bound.
constexpr int NORM_BLOCKS = sizeof(T) == 4 ? 2 : 0;  // blocks per multiprocessor; 0: no bound

extern "C" __global__ void __launch_bounds__(256, NORM_BLOCKS)
adapter_norms(f32* __restrict__ norms, const T* __restrict__ w, const T* __restrict__ a,
              const T* __restrict__ b, f32 scale0, f32 scale1, f32 scale2, f32 scale3, i32 rank,
              i64 rows, i32 K, i64 start0, i64 stop0, i64 start1, i64 stop1, i64 start2, i64 stop2,
              i64 start3, i64 stop3) {
    constexpr int STAGE = 16;  // elements of a row of b that are in shared memory at a time
    const Spans spans = {{start0, start1, start2, start3}, {stop0, stop1, stop2, stop3}};
    const f32 scales[MAX_SPANS] = {scale0, scale1, scale2, scale3};
    __shared__ f32 of_b[STAGE][NORM_ROWS], shared[32];
    const i64 first = (i64)blockIdx.x * NORM_ROWS;
    f32 sums[NORM_ROWS] = {};
    for (int top = 0; top < K; top += blockDim.x) {
        const int j = top + threadIdx.x;
        f32 values[NORM_ROWS];
#pragma unroll
        for (int i = 0; i < NORM_ROWS; ++i) {
            values[i] = j < K && first + i < rows ? to_f32(w[(first + i) * K + j]) : 0.0f;
        }
        i64 before = 0;
#pragma unroll
        for (int k = 0; k < MAX_SPANS; ++k) {
            const i64 start = spans.start[k], stop = spans.stop[k];
            if (first < stop && first + NORM_ROWS > start) {
                for (int c0 = 0; c0 < rank; c0 += STAGE) {
                    __syncthreads();
                    const int i = threadIdx.x % NORM_ROWS, c = c0 + threadIdx.x / NORM_ROWS;
                    const i64 row = first + i;
                    const bool inside = row >= start && row < stop && c < rank;
                    of_b[threadIdx.x / NORM_ROWS][i] =
                        inside ? scales[k] * to_f32(b[(before + row - start) * rank + c]) : 0.0f;
                    __syncthreads();
                    for (int s = 0; s < min(STAGE, rank - c0) && j < K; ++s) {
                        const f32 x = to_f32(a[((i64)k * rank + c0 + s) * K + j]);
#pragma unroll
                        for (int i = 0; i < NORM_ROWS; ++i) {
                            values[i] = fmaf(of_b[s][i], x, values[i]);
                        }
                    }
                }
            }
            before += stop - start;
        }
#pragma unroll
        for (int i = 0; i < NORM_ROWS; ++i) { sums[i] = fmaf(values[i], values[i], sums[i]); }
    }
#pragma unroll
    for (int i = 0; i < NORM_ROWS; ++i) {
        const f32 sum = block_sum(sums[i], shared);
        bool inside = false;
#pragma unroll
        for (int k = 0; k < MAX_SPANS; ++k) {
            inside = inside || (first + i >= spans.start[k] && first + i < spans.stop[k]);
        }
        if (threadIdx.x == 0 && first + i < rows) { norms[first + i] = inside ? sqrtf(sum) : 0.0f; }
    }
}

extern "C" __global__ void __launch_bounds__(256)
adapter_columns(T* out, const T* x, const T* __restrict__ y, const f32* __restrict__ norms,
                const f32* __restrict__ magnitudes, const T* __restrict__ bias, i64 rows,
                i32 columns) {
    constexpr int N = Vec<T>::N;
    const i64 i = ((i64)blockIdx.x * blockDim.x + threadIdx.x) * N;
    if (i >= rows * columns) { return; }
    const int column = (int)(i % columns);
    Vec<T> value = load_vec(x + i);
    const Vec<T> other = load_vec(y == nullptr ? x + i : y + i);
#pragma unroll
    for (int k = 0; k < N; ++k) {
        const f32 norm = norms[column + k];
        f32 factor = y == nullptr ? 1.0f : 0.0f;
        if (norm > 0.0f) { factor = (magnitudes == nullptr ? 1.0f : magnitudes[column + k]) / norm; }
        f32 product = to_f32(value[k]) * factor;
        if (y != nullptr) { product *= to_f32(other[k]); }
        if (bias != nullptr) { product += to_f32(bias[column + k]); }
        value[k] = from_f32<T>(product);
    }
    store_vec(out + i, value);
}

// -- gradients of low-rank adapters' h and B, in one pass over d_out.
//
//   d_h[r, k RANK + j] = T(scale * sum over columns c of span k of d_out[r, c] * b[c', j])
//   d_b[c', j]         = or += scale * sum over rows r of d_out[r, c] * h[r, k RANK + j]
//
// where c' counts the columns of all spans. Each block has some rows and some columns of one span.
// Tiles of d_out are copied to shared memory once and read there twice: as rows, for d_h, and
// transposed, for d_b. A warp has rows of its own; with RANK_WARPS = 2 two warps share rows, with
// half of the ranks each. Sums for d_h stay in registers to the end; sums for d_b are added among
// warps after every CHUNK columns. Both kinds of sums are partial: the second kernel adds them in a
// fixed order.
//
// Data     d_out: (rows, N), h and d_h: (rows, h_columns), b: (columns of all spans, RANK), BF16,
//          16-byte aligned. d_b: as b, G (bf16, f32). h_partial: F32 (splits of all spans, rows,
//          RANKS), b_partial: F32 (groups of rows, columns of all spans, RANKS). RANKS is a
//          multiple of 8; elements of ranks from RANK on are undefined. Spans ascend; unused spans
//          are empty. end0..2: the number of the split at which each span's splits end.
// Launch   partials: 256 threads; (splits, groups) blocks of split_columns columns and BLOCK_ROWS
//          rows; dynamic shared memory as ops/product/adapter.py counts it. finish: 256 threads, one
//          for each element of d_h; further blocks have one thread for each element of d_b.
// Cost     d_out is read once; partial sums are written and read once. The tensor cores do 4 RANK
//          operations for each element of d_out.
// Needs    N and spans multiples of 8, h_columns too; split_columns a multiple of CHUNK. No empty
//          split. Compute capability 8.0.
#ifndef RANK  // compiled for another entry
#define RANK 8
#define BLOCK_ROWS 128
#define CHUNK 64
#define RANK_WARPS 1
#define STAGES 2
#endif

constexpr int WARPS = 8, THREADS = 32 * WARPS;
constexpr int ROW_WARPS = WARPS / RANK_WARPS;
constexpr int N8 = (RANK + 8 * RANK_WARPS - 1) / (8 * RANK_WARPS);  // groups of 8 ranks of a warp
constexpr int RANKS = 8 * N8 * RANK_WARPS;
constexpr int STEP_ROWS = 128, STEPS = BLOCK_ROWS / STEP_ROWS;  // steps of a chunk, a stage each
constexpr int STEP_M16 = STEP_ROWS / (16 * ROW_WARPS), M16 = STEPS * STEP_M16;  // pieces of a warp
constexpr int K16 = CHUNK / 16;
// 16-byte units of a row in shared memory: UNITS for d_out; RANK_UNITS for h and b, whose ranks are
// read 16 at a time.
constexpr int UNITS = CHUNK / 8, RANK_UNITS = RANKS <= 16 ? 2 : RANKS <= 32 ? 4 : 8;
constexpr int B_SLOTS = (STAGES - 1) / STEPS + 1;  // chunks whose b is in use or under way
constexpr int STAGE_BYTES = STEP_ROWS * UNITS * 16, H_BYTES = BLOCK_ROWS * RANK_UNITS * 16;
constexpr int SLOT_BYTES = CHUNK * RANK_UNITS * 16;
constexpr bool ALIGNED = RANK % 8 == 0;  // rows of b and spans of h are 16-byte aligned
static_assert(BLOCK_ROWS % STEP_ROWS == 0 && STEP_M16 >= 1, "a step is of all warps");
static_assert(WARPS / ROW_WARPS * CHUNK * 8 == 2 * THREADS, "a thread sums two elements of d_b");

struct Span {
    i64 start, stop;  // columns of d_out
    i64 before;       // columns of earlier spans
    int number, split;  // the span's number; this block's split within the span
};

// Byte offset of a unit of a row with COUNT units. A unit of eight rows lies in different banks.
template <int COUNT> __device__ __forceinline__ int place_of(int row, int unit) {
    return (row * COUNT + (unit ^ row * COUNT / 8 % COUNT)) * 16;
}

__device__ __forceinline__ Span find_span(i32 split_columns, const i64 (&start)[MAX_SPANS],
                                          const i64 (&stop)[MAX_SPANS]) {
    Span span = {0, 0, 0, 0, 0};
    int split = blockIdx.x;
    i64 before = 0;
#pragma unroll
    for (int k = 0; k < MAX_SPANS; ++k) {
        const i64 columns = stop[k] - start[k];
        const int splits = (int)((columns + split_columns - 1) / split_columns);
        if (split >= 0 && split < splits) { span = {start[k], stop[k], before, k, split}; }
        split -= splits;
        before += columns;
    }
    return span;
}

// Start copying STEP_ROWS rows of CHUNK columns, from (first, column) on; zeros from row `rows` and
// column `stop` on.
__device__ __forceinline__ void load_tile(SharedAddress to, const bf16* d_out, i64 first, i64 rows,
                                          i64 column, i64 stop, i64 N) {
    constexpr int AT_ONCE = THREADS / UNITS;
    const int unit = threadIdx.x % UNITS, row = threadIdx.x / UNITS;
    const bool inside = column + unit * 8 < stop;
#pragma unroll
    for (int i = 0; i < STEP_ROWS; i += AT_ONCE) {
        const bool valid = inside && first + row + i < rows;
        const bf16* p = d_out + (valid ? (first + row + i) * N + column + unit * 8 : 0);
        cp_async_16(to + place_of<UNITS>(row + i, unit), p, valid);
    }
}

// Copy COUNT rows of RANK elements, `stride` apart, to shared memory; zeros from row `valid` on.
template <int COUNT>
__device__ __forceinline__ void load_ranks(char* to, const bf16* from, i64 stride, i64 valid) {
    if constexpr (ALIGNED) {
        constexpr int EIGHTS = RANK / 8;
        for (int i = threadIdx.x; i < COUNT * EIGHTS; i += THREADS) {
            const int row = i / EIGHTS, unit = i % EIGHTS;
            const bf16* p = from + (row < valid ? row * stride + unit * 8 : 0);
            cp_async_16(shared_address(to) + place_of<RANK_UNITS>(row, unit), p, row < valid);
        }
    } else {
        for (int i = threadIdx.x; i < COUNT * RANK; i += THREADS) {
            const int row = i / RANK, rank = i % RANK;
            bf16* p = reinterpret_cast<bf16*>(to + place_of<RANK_UNITS>(row, rank / 8)) + rank % 8;
            *p = row < valid ? from[row * stride + rank] : __float2bfloat16(0.0f);
        }
    }
}

// Load a right operand for each 8 of this warp's ranks. The inner dimension is 16 rows of shared
// memory, from `row` on.
__device__ __forceinline__ void load_right(u32 (&right)[N8][2], SharedAddress from, int row,
                                           int first_unit) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int n = 0; n < N8; n += 2) {
        u32 r[4];
        const int unit = first_unit + n + (lane >> 4);
        ldmatrix_x4_trans(r, from + place_of<RANK_UNITS>(row + (lane & 15), unit));
        right[n][0] = r[0];
        right[n][1] = r[1];
        if (n + 1 < N8) {
            right[n + 1][0] = r[2];
            right[n + 1][1] = r[3];
        }
    }
}

// Multiply a piece of d_out: 16 rows, from `row` of the stage on, of all columns of the chunk.
// right_b, right_h: the right operands of the piece, and of the transposed piece.
__device__ __forceinline__ void multiply_piece(float (&d_h)[N8][4], float (&d_b)[K16][N8][4],
                                               SharedAddress stage, int row,
                                               const u32 (&right_b)[K16][N8][2],
                                               const u32 (&right_h)[N8][2]) {
    const int lane = threadIdx.x & 31;
    u32 left[K16][4], turned[K16][4];
#pragma unroll
    for (int k = 0; k < K16; ++k) {
        const int place = place_of<UNITS>(row + (lane & 15), 2 * k + (lane >> 4));
        ldmatrix_x4(left[k], stage + place);
        ldmatrix_x4_trans(turned[k], stage + place);
    }
#pragma unroll
    for (int k = 0; k < K16; ++k) {
        // The same four 8 x 8 matrices, in the order of the transposed piece.
        const u32 columns[4] = {turned[k][0], turned[k][2], turned[k][1], turned[k][3]};
#pragma unroll
        for (int n = 0; n < N8; ++n) {
            mma_m16n8k16_bf16(d_h[n], left[k], right_b[k][n][0], right_b[k][n][1]);
            mma_m16n8k16_bf16(d_b[k][n], columns, right_h[n][0], right_h[n][1]);
        }
    }
}

// Add the warps' sums of d_b for a chunk, and store the totals from `to` on, the chunk's place in a
// matrix (.., RANKS). columns: number of the chunk's columns that exist.
__device__ __forceinline__ void store_columns(f32* to, float* sums, const float (&d_b)[K16][N8][4],
                                              i64 columns) {
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const int warp = threadIdx.x >> 5;  // warps with the same ranks are neighbours
    const int e = threadIdx.x * 2, group = e / (CHUNK * 8), column = e / 8 % CHUNK, rank = e % 8;
#pragma unroll
    for (int n = 0; n < N8; ++n) {
        if (n > 0) { __syncthreads(); }  // n = 0 needs none: earlier barriers suffice
        float* own = sums + warp * CHUNK * 8 + g * 8 + 2 * t;
#pragma unroll
        for (int k = 0; k < K16; ++k) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                *reinterpret_cast<float2*>(own + (k * 16 + half * 8) * 8) =
                    make_float2(d_b[k][n][2 * half], d_b[k][n][2 * half + 1]);
            }
        }
        __syncthreads();
        const float* first = sums + group * ROW_WARPS * CHUNK * 8 + column * 8 + rank;
        float2 total = make_float2(0.0f, 0.0f);
#pragma unroll
        for (int w = 0; w < ROW_WARPS; ++w) {
            const float2 x = *reinterpret_cast<const float2*>(first + w * CHUNK * 8);
            total.x += x.x;
            total.y += x.y;
        }
        if (column < columns) {
            f32* p = to + (i64)column * RANKS + (group * N8 + n) * 8 + rank;
            *reinterpret_cast<float2*>(p) = total;
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
adapter_backward_partials(f32* __restrict__ h_partial, f32* __restrict__ b_partial,
                          const bf16* __restrict__ d_out, const bf16* __restrict__ h,
                          const bf16* __restrict__ b, i64 rows, i64 N, i32 h_columns,
                          i32 split_columns, i64 start0, i64 stop0, i64 start1, i64 stop1,
                          i64 start2, i64 stop2, i64 start3, i64 stop3) {
    extern __shared__ __align__(128) char shared[];
    char* const own_h = shared + STAGES * STAGE_BYTES;
    char* const slots = own_h + H_BYTES;
    float* const sums = reinterpret_cast<float*>(slots + B_SLOTS * SLOT_BYTES);
    const SharedAddress stages = shared_address(shared);

    const Span span =
        find_span(split_columns, {start0, start1, start2, start3}, {stop0, stop1, stop2, stop3});
    const i64 all = stop0 - start0 + (stop1 - start1) + (stop2 - start2) + (stop3 - start3);
    const i64 first_row = (i64)blockIdx.y * BLOCK_ROWS;
    const i64 first = span.start + (i64)span.split * split_columns;
    const i64 stop = min(span.stop, first + split_columns);
    const int chunks = (int)((stop - first + CHUNK - 1) / CHUNK), steps = chunks * STEPS;
    const i64 first_b = span.before + first - span.start;

    auto load = [&](int step) {
        if (step < steps) {
            const int chunk = step / STEPS, part = step % STEPS;
            const i64 column = first + (i64)chunk * CHUNK;
            load_tile(stages + step % STAGES * STAGE_BYTES, d_out, first_row + part * STEP_ROWS,
                      rows, column, stop, N);
            if (part == 0) {
                load_ranks<CHUNK>(slots + chunk % B_SLOTS * SLOT_BYTES,
                                  b + (first_b + (i64)chunk * CHUNK) * RANK, RANK, stop - column);
            }
        }
        cp_async_commit();  // also without copies, so that group counts match
    };
    load_ranks<BLOCK_ROWS>(own_h, h + first_row * h_columns + span.number * RANK, h_columns,
                           rows - first_row);
#pragma unroll
    for (int i = 0; i < STAGES - 1; ++i) { load(i); }

    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int row_warp = warp % ROW_WARPS, unit = warp / ROW_WARPS * N8;  // unit: of 8 ranks
    float d_h[M16][N8][4] = {};
    int step = 0;
    for (int chunk = 0; chunk < chunks; ++chunk) {
        float d_b[K16][N8][4] = {};
        u32 right_b[K16][N8][2];
#pragma unroll
        for (int part = 0; part < STEPS; ++part) {
            cp_async_wait<STAGES - 2>();
            __syncthreads();  // all copies have arrived, and all warps have used the last stage
            load(step + STAGES - 1);
            if (part == 0) {
                const SharedAddress slot = shared_address(slots) + chunk % B_SLOTS * SLOT_BYTES;
#pragma unroll
                for (int k = 0; k < K16; ++k) { load_right(right_b[k], slot, k * 16, unit); }
            }
            const SharedAddress stage = stages + step % STAGES * STAGE_BYTES;
#pragma unroll
            for (int piece = 0; piece < STEP_M16; ++piece) {
                const int row = (piece * ROW_WARPS + row_warp) * 16;
                u32 right_h[N8][2];
                load_right(right_h, shared_address(own_h), part * STEP_ROWS + row, unit);
                multiply_piece(d_h[part * STEP_M16 + piece], d_b, stage, row, right_b, right_h);
            }
            ++step;
        }
        const i64 done = (i64)chunk * CHUNK;
        store_columns(b_partial + (blockIdx.y * all + first_b + done) * RANKS, sums, d_b,
                      stop - first - done);
    }
    cp_async_wait<0>();

    const int g = lane >> 2, t = lane & 3;
#pragma unroll
    for (int m = 0; m < M16; ++m) {
        const int piece = m / STEP_M16 * STEP_ROWS + (m % STEP_M16 * ROW_WARPS + row_warp) * 16;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const i64 row = first_row + piece + half * 8 + g;
            f32* p = h_partial + (blockIdx.x * rows + row) * RANKS + unit * 8 + 2 * t;
#pragma unroll
            for (int n = 0; n < N8; ++n) {
                if (row < rows) {
                    *reinterpret_cast<float2*>(p + n * 8) =
                        make_float2(d_h[m][n][2 * half], d_h[m][n][2 * half + 1]);
                }
            }
        }
    }
}

// The sum of `count` elements that are `stride` apart, added one after the other.
__device__ __forceinline__ float sum_of(const f32* p, i64 stride, int count) {
    float total = 0.0f;
#pragma unroll 8
    for (int i = 0; i < count; ++i) { total += __ldcs(p + i * stride); }
    return total;
}

extern "C" __global__ void __launch_bounds__(256)
adapter_backward_finish(bf16* __restrict__ d_h, G* __restrict__ d_b,
                        const f32* __restrict__ h_partial, const f32* __restrict__ b_partial,
                        const i32* __restrict__ scalars, i32 accumulate, u32 salt, f32 scale,
                        i64 rows, i32 h_columns, i64 b_rows, i32 groups, i32 end0, i32 end1,
                        i32 end2, i32 end3) {
    const i64 h_blocks = (rows * h_columns + blockDim.x - 1) / blockDim.x;
    if (blockIdx.x < h_blocks) {
        const i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
        if (i >= rows * h_columns) { return; }
        const int column = (int)(i % h_columns), k = column / RANK;
        const int ends[MAX_SPANS + 1] = {0, end0, end1, end2, end3};
        int first = 0, end = 0;
#pragma unroll
        for (int n = 0; n < MAX_SPANS; ++n) {
            if (n == k) { first = ends[n], end = ends[n + 1]; }
        }
        const f32* p = h_partial + (first * rows + i / h_columns) * RANKS + column % RANK;
        // Padding columns have no splits, and become zero.
        d_h[i] = from_f32<bf16>(scale * sum_of(p, rows * RANKS, max(end - first, 0)));
        return;
    }
    const i64 i = (blockIdx.x - h_blocks) * blockDim.x + threadIdx.x;
    if (i >= b_rows * RANK) { return; }
    const f32* p = b_partial + i / RANK * RANKS + i % RANK;
    const u32 seed = gradient_seed(reinterpret_cast<const StepScalars*>(scalars), salt);
    store_gradient(d_b, i, scale * sum_of(p, b_rows * RANKS, groups), accumulate, seed);
}
