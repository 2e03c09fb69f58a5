// matmul_gradient.cu -- a weight's gradient for Hopper: a product that is added to what is stored.
//
//   x = bf16(scale_a * scale_b * (a @ b^T)), of fp8 codes
//   d = accumulate ? round(d + x) : x
//
// d + x is rounded stochastically, by the random number of the element. So the bits are those of the
// product alone and of the sum of gradients behind it (reduce.cu).
//
// The product is that of product_sm90.cuh. While two warpgroups multiply a tile, the warps of another
// one add the one before, from shared memory, to the gradient in device memory, 32 rows of a box at a
// time: 8 lanes have a row's 64 columns, which are a line of memory.
//
// Data     d: bf16 (M, N). Fp8 codes a: A (M, K), b: B (N, K); scale_a, scale_b: F32 (1).
//          part_steps: with EXACT, of how many steps of 128 of K the tensor cores' sums are added up
//          by themselves.
// Launch   an even number of blocks of 512 threads, not more than there are multiprocessors, nor
//          tiles; SHARED bytes of dynamic shared memory (ops/matmul_gradient.py).
// Cost     2 M N K FLOPs. d is written once, and read once if it is added to; about 20 instructions
//          for each element, which hide behind the next tile's product.
// Needs    compute capability 9.0; rows of all matrices that are multiples of 16 bytes; scalars'
//          seed, step and micro_step, if something is added.
// Same name  llmq/ops/matmul_gradient.py  llmq/ref/matmul_gradient.py
//            tests/ops/test_matmul_gradient.py
// Source   PTX ISA, as matmul_adapted.cu.
#include "common.cuh"

constexpr int TILE_COLUMNS = 192;
#include "shared_sm90.cuh"

constexpr int STAGES = 4, WARPS = 4;  // WARPS: of the epilogue
// Of a thread: with EXACT two sums of each element do not fit into what all could have alike.
constexpr int LOADER_REGISTERS = 24, PRODUCT_REGISTERS = 216, EPILOGUE_REGISTERS = 56;
using Product = SharedProduct<A, B, false, 0, false, false, STAGES, WARPS, bf16, 4, EXACT>;

// What a warp of the epilogue does with its 32 rows of a box.
struct Addition {
    bf16* d;
    int M, N;
    bool accumulate;
    u32 seed;

    __device__ __forceinline__ void operator()(const Tile& tile, int b, int first_line,
                                               SharedAddress lines) const {
        constexpr int ROWS = 4;  // of a lane, whose loads are in flight together
        const int lane = threadIdx.x % 32, octet = lane % 8;
        const int column = tile.column + BOX * b + 8 * octet;
        if (column >= N) { return; }
#pragma unroll 1
        for (int first = lane / 8; first < 32; first += 4 * ROWS) {
            const int row = tile.row + first_line + first;
            bf16* const to = d + (i64)row * N + column;
            uint4 before[ROWS];
            if (accumulate) {
#pragma unroll
                for (int i = 0; i < ROWS; ++i) {
                    if (row + 4 * i < M) { before[i] = load_packed_stream(to + (i64)(4 * i) * N); }
                }
            }
#pragma unroll
            for (int i = 0; i < ROWS; ++i) {
                const int line = first + 4 * i;
                const uint4 x = load_shared(lines + line * LINE + ((octet ^ line & 7) << 4));
                if (row + 4 * i < M) { store(to + (i64)(4 * i) * N, unpack<bf16>(before[i]), x); }
            }
        }
    }

private:
    // Eight neighbours.
    __device__ __forceinline__ void store(bf16* to, const Vec<bf16>& before, const uint4& x) const {
        Vec<bf16> sum = unpack<bf16>(x);
        if (accumulate) {
            const u64 index = to - d;  // a multiple of 8
#pragma unroll
            for (int k = 0; k < 8; ++k) {
                sum[k] = add_gradient(before[k], to_f32(sum[k]), seed, index | k);
            }
        }
        store_vec_stream(to, sum);
    }
};

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(Product::THREADS, 1)
matmul_gradient(bf16* d, const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b,
                const f32* scale_a, const f32* scale_b, const StepScalars* scalars, i32 accumulate,
                u32 salt, i32 M, i32 N, i32 K, i32 part_steps) {
    extern __shared__ unsigned char dynamic[];
    const Product product(dynamic, K);
    if (threadIdx.x == 0) { product.init(); }
    cluster_arrive();
    cluster_wait();
    const Work work(M, N, Product::WIDTH, K);
    const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
    if (warpgroup == 0) {
        give_registers<LOADER_REGISTERS>();
        if (threadIdx.x == 0) { product.load(work, &a, &b, &a, &b, TILE_COLUMNS / 2); }
    } else if (warpgroup < 3) {
        take_registers<PRODUCT_REGISTERS>();
        product.multiply_tiles(work, warpgroup - 1, *scale_a * *scale_b, {}, part_steps);
        // The warps of the epilogue have the first units of the last tile, these the other ones.
        const Addition addition{d, M, N, accumulate != 0, gradient_seed(scalars, salt)};
        product.take_last(work, __shfl_sync(~0u, threadIdx.x / 32, 0), addition);
    } else {
        give_registers<EPILOGUE_REGISTERS>();
        const Addition addition{d, M, N, accumulate != 0, gradient_seed(scalars, salt)};
        const int me = __shfl_sync(~0u, threadIdx.x / 32 % WARPS, 0);
        product.take_boxes<true>(work, me, addition);
    }
    cluster_arrive();
    cluster_wait();  // a block may not end while the other one still arrives at its barriers
}
