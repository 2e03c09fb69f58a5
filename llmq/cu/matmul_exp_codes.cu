// matmul_exp_codes.cu -- the fp8 product of logits for Hopper, with codes of their exponentials behind it.
//
//   l = bf16(scale_a * scale_b * (a @ b^T))    e = e5m2(exp(l - shift of the row))
//
// 0 in columns >= vocab and in the target's, whose logit is kept instead: its probability may be all
// of the row's, and two bits of it are not enough. Codes are rounded to nearest even and clamped.
//
// As matmul_exp.cu, but that a thread leaves 64 codes of its row in shared memory, from where lanes
// of a warp take whole lines of eight rows at a time and store them.
//
// exp_codes_again: row i of a stands for row rows[1 + i] of everything else, and there are rows[0] of
// them; nothing but e and sums is written. Blocks end at once where there are none.
//
// exp_codes_most: of the same rows the largest l of each tile in place of its sum, and nothing else.
//
// Data     e: e5m2 (M, N). sums: F32 (ceil(N / 192), M), of e over the columns of a tile, before it
//          is rounded. target_logits: F32 (M), written where a row has a target. a: e4m3 (M, K), b:
//          e4m3 (N, K). scale_a, scale_b: F32 (1). shift: F32 (M). targets: I32 (M), negative: none.
// Launch   an even number of blocks of 512 threads, not more than there are multiprocessors, nor
//          tiles; SHARED bytes of dynamic shared memory (ops/matmul_exp_codes.py).
// Cost     2 M N K FLOPs. About 5 instructions and one exponential for each element, which hide
//          behind the product. Stored is half of what the library would store of logits.
// Needs    compute capability 9.0; N and K multiples of 16; targets < vocab <= N.
// Same name  llmq/ops/matmul_exp_codes.py  llmq/ref/matmul_exp_codes.py
//            tests/ops/test_matmul_exp_codes.py
// Source   PTX ISA, as matmul_adapted.cu.
#include "common.cuh"

constexpr int TILE_COLUMNS = 192;
#include "shared_sm90.cuh"

constexpr int STAGES = 4, WARPS = 4;  // WARPS: of the epilogue
using Product = SharedProduct<A, B, false, 0, false, false, STAGES, WARPS>;

// Codes and sums of all rows, or of listed ones; or of these the largest logits instead of sums.
enum Way { ALL, AGAIN, MOST };

// What a thread of the epilogue does with its row of a tile, box after box. row: of all but a; beyond
// the last one of a it is M.
template <Way WAY> struct Exponentials {
    static constexpr bool LISTED = WAY != ALL;
    e5m2* e;
    f32 *sums, *target_logits;
    const f32* shift;
    const i32 *targets, *rows;
    int M, N, vocab, count;  // count: rows of a
    unsigned char* dynamic;  // shared memory
    float sum, offset;       // of the row: so far in this tile; -shift, of ALL in powers of two
    int row, target;

    __device__ __forceinline__ void operator()(const Tile& tile, int b, int first_line,
                                               SharedAddress lines) {
        const int lane = threadIdx.x % 32, column = tile.column + BOX * b;
        if (b == 0) { begin(tile.row + first_line + lane); }
        if (column < N) {
            unsigned char* const first = dynamic + (lines - shared_address(dynamic));
            unsigned char* const line = first + lane * LINE;
            const u32 place = target - column;
            if constexpr (WAY == MOST) {
                see(line, min(BOX, vocab - column));
            } else if (place < BOX) {
                bf16* const logit = reinterpret_cast<bf16*>(line + word(lane, place / 8)) + place % 8;
                if (!LISTED) { target_logits[row] = to_f32(*logit); }
                *reinterpret_cast<unsigned short*>(logit) = 0xFF80;  // -infinity
            }
            if constexpr (WAY != MOST) {
                if (column + BOX <= vocab) {
                    take<false>(line, column);
                } else {
                    take<true>(line, column);
                }
                __syncwarp();
                store(first, column);
            }
        }
        if (b == Product::BOXES - 1 && row < M) {
            sums[(i64)(tile.column / TILE_COLUMNS) * M + row] = sum;
        }
    }

private:
    // Bytes from the start of the box's line `lane` to word `index` of 16 bytes.
    static __device__ __forceinline__ int word(int lane, int index) {
        return (index ^ lane & 7) << 4;
    }
    // The same of 16 codes: of neighbouring rows in different halves of a line, so that eight lanes
    // meet in no bank, whether each has a row of its own or four of them have one.
    static __device__ __forceinline__ int word_of(int lane, int w) {
        return word(lane, w + (lane & 1) * 4);
    }

    __device__ __forceinline__ void begin(int index) {
        row = index;
        if (LISTED) { row = index < count ? rows[1 + index] : M; }
        if (WAY == MOST) {
            sum = -INFINITY;
            return;
        }
        sum = 0.0f;
        offset = row < M ? -shift[row] : 0.0f;
        if (!LISTED) { offset *= LOG2E; }
        target = row < M ? targets[row] : -1;
    }

    // The first `count` logits of the thread's line.
    __device__ __forceinline__ void see(const unsigned char* line, int count) {
        const int lane = threadIdx.x % 32;
#pragma unroll 1
        for (int k = 0; k < count; ++k) {
            sum = larger(sum, to_f32(reinterpret_cast<const bf16*>(line + word(lane, k / 8))[k % 8]));
        }
    }

    // Codes in place of the logits of the thread's line. IS_LAST: columns may be >= vocab.
    template <bool IS_LAST> __device__ __forceinline__ void take(unsigned char* line, int column) {
        const int lane = threadIdx.x % 32;
        uint4 codes[4];  // all, before one is written
#pragma unroll
        for (int w = 0; w < 4; ++w) {
            const uint4 x = *reinterpret_cast<const uint4*>(line + word(lane, 2 * w));
            const uint4 y = *reinterpret_cast<const uint4*>(line + word(lane, 2 * w + 1));
            const uint2 left = exponentials<IS_LAST>(x, column + 16 * w);
            const uint2 right = exponentials<IS_LAST>(y, column + 16 * w + 8);
            codes[w] = make_uint4(left.x, left.y, right.x, right.y);
            forget(codes[w]);  // or the logits of all words would be held
        }
#pragma unroll
        for (int w = 0; w < 4; ++w) {
            *reinterpret_cast<uint4*>(line + word_of(lane, w)) = codes[w];
        }
    }

    // Of eight logits from this column on.
    template <bool IS_LAST>
    __device__ __forceinline__ uint2 exponentials(const uint4& x, int column) {
        float y[8];
        exponentials_of<IS_LAST, LISTED>(y, sum, x, offset, column, vocab);
        return make_uint2(to_fp8<e5m2>(y[0], y[1], y[2], y[3]), to_fp8<e5m2>(y[4], y[5], y[6], y[7]));
    }

    // The warp's 32 lines of codes: eight rows at a time, four lanes each.
    __device__ __forceinline__ void store(const unsigned char* first, int column) const {
        const int lane = threadIdx.x % 32, w = lane % 4;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int line = 8 * i + lane / 4;
            const int to = __shfl_sync(~0u, row, line);
            const uint4 codes =
                *reinterpret_cast<const uint4*>(first + line * LINE + word_of(line, w));
            if (to < M && column + 16 * w < N) {
                __stcs(reinterpret_cast<uint4*>(e + (i64)to * N + column + 16 * w), codes);
            }
        }
    }
};

template <Way WAY>
__device__ __forceinline__ void run(Exponentials<WAY> exponentials, const TensorMap* a,
                                    const TensorMap* b, float scale, int K) {
    const auto take = [&](const Product& product, const Work& work, int me) {
        product.take_boxes(work, me, exponentials);
    };
    multiply_and_take<Product>(exponentials.dynamic, exponentials.count, exponentials.N, K, a, b,
                               scale, take);
}

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(Product::THREADS, 1)
matmul_exp_codes(e5m2* e, f32* sums, f32* target_logits, const __grid_constant__ TensorMap a,
                 const __grid_constant__ TensorMap b, const f32* scale_a, const f32* scale_b,
                 const f32* shift, const i32* targets, i32 M, i32 N, i32 K, i32 vocab) {
    extern __shared__ unsigned char dynamic[];
    run<ALL>({e, sums, target_logits, shift, targets, nullptr, M, N, vocab, M, dynamic}, &a, &b,
             *scale_a * *scale_b, K);
}

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(Product::THREADS, 1)
exp_codes_again(e5m2* e, f32* sums, const __grid_constant__ TensorMap a,
                const __grid_constant__ TensorMap b, const f32* scale_a, const f32* scale_b,
                const f32* shift, const i32* targets, const i32* rows, i32 M, i32 N, i32 K,
                i32 vocab) {
    extern __shared__ unsigned char dynamic[];
    const int count = rows[0];
    if (count == 0) { return; }
    run<AGAIN>({e, sums, nullptr, shift, targets, rows, M, N, vocab, count, dynamic}, &a, &b,
               *scale_a * *scale_b, K);
}

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(Product::THREADS, 1)
exp_codes_most(f32* most, const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b,
               const f32* scale_a, const f32* scale_b, const i32* rows, i32 M, i32 N, i32 K,
               i32 vocab) {
    extern __shared__ unsigned char dynamic[];
    const int count = rows[0];
    if (count == 0) { return; }
    run<MOST>({nullptr, most, nullptr, nullptr, nullptr, rows, M, N, vocab, count, dynamic}, &a, &b,
              *scale_a * *scale_b, K);
}
