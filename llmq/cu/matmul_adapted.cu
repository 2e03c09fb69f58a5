// matmul_adapted.cu -- a matrix product for Hopper, with the adapters' product in it.
//
//   out = scale_a * scale_b * (a @ b^T) + h @ tail^T + bias + addend
//
// h and tail are the last tiles of the sum over K, so that out is written once and rounded once.
// Fp8 products are added as the tensor cores do it ("fast accumulation"): same bits as cuBLASLt's.
//
// The product is that of turns_sm90.cuh.
//
// Data     out: bf16 (M, N), a: A (M, K), b: B (N, K), of bf16 with TRANSPOSED (K, N). h: bf16
//          (M, R), tail: bf16 (N, R), with TRANSPOSED (R, N). scale_a, scale_b: F32 (1), of fp8
//          codes. RANK: R rounded up to 16; 0: there are no h and tail. bias: bf16 (N), with BIAS.
//          addend: as out, other memory, with ADDEND. TILE_WIDTH: of a tile, 192 or 224, which changes
//          no bit.
// Launch   an even number of blocks of THREADS threads, not more than there are multiprocessors;
//          SHARED bytes of dynamic shared memory (ops/matmul_adapted.py).
// Cost     2 M N (K + R) FLOPs. A cluster reads 256 rows of a and TILE_WIDTH of b for each of its tiles.
//          What is added comes through the chunk that the result leaves from, a part at a time: in
//          turns the other warpgroup multiplies meanwhile.
// Needs    compute capability 9.0; rows of all matrices that are multiples of 16 bytes.
// Same name  llmq/ops/matmul_adapted.py  llmq/ref/matmul_adapted.py
//            tests/ops/test_matmul_adapted.py
// Source   PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions", "Tensor copies", "mbarrier".
constexpr int TILE_COLUMNS = TILE_WIDTH;
#include "turns_sm90.cuh"

constexpr bool B_OUTSIDE = sizeof(B) == 2 && TRANSPOSED;
constexpr int CHUNKS = IN_TURNS ? 1 : 2;
using Product = TurnsProduct<A, B, B_OUTSIDE, RANK, TRANSPOSED, IN_TURNS ? 5 : 4,
                             CHUNKS * CHUNK_BYTES>;

// What a warp does with its rows of a tile: 16 of each half from first_row on, 64 columns at a time
// through its chunks. Of 224 columns the last 64 begin in those before, and are there twice, the same.
// arrived: the warp's barrier, whose phase is even before and after.
struct Stored {
    const TensorMap *out, *addend;
    const bf16* bias;
    int N;

    __device__ __forceinline__ void begin(const Tile&, int) const {}

    __device__ __forceinline__ void operator()(const Tile& tile, const Sums& d, int first_row,
                                               SharedAddress chunks, SharedAddress arrived) const {
        static_assert(HALVES_OF_TILE * TILE_BOXES % 2 == 0 && TILE_BOXES * HALVES_OF_TILE % CHUNKS == 0);
        const u32 lane = threadIdx.x % 32;
        const u32 line = lane & 15, octet = lane >> 4;  // of 16-byte words, for stmatrix
        const int left = N - tile.column;
        const volatile u32* mine = reinterpret_cast<const u32*>(bias) + tile.column / 2 + lane % 4;
#pragma unroll
        for (int c = 0; c < HALVES_OF_TILE * TILE_BOXES; ++c) {
            const int half = c / TILE_BOXES, first = min(c % TILE_BOXES * BOX, TILE_COLUMNS - BOX);
            const SharedAddress chunk = chunks + c % CHUNKS * CHUNK_BYTES;
            u32 more[BOX / 8];  // bias of two of every 8 columns
            if constexpr (BIAS) {
#pragma unroll
                for (int i = 0; i < BOX / 8; ++i) {
                    // Volatile: there are no registers for those of all boxes at once.
                    const int column = first + 8 * i;
                    more[i] = column < left ? mine[column / 2] : 0;
                }
            }
            const int x = tile.column + first, y = tile.row + TILE_ROWS / 2 * half + first_row;
            if (lane == 0) {
                stores_have_read<CHUNKS - 1>();
                if constexpr (ADDEND) {
                    barrier_expect(arrived, CHUNK_BYTES);
                    load_box(chunk, addend, x, y, arrived);
                }
            }
            __syncwarp();
            if constexpr (ADDEND) { barrier_wait(arrived, c & 1); }
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const SharedAddress word = chunk + line * LINE + ((2 * j + octet ^ line & 7) << 4);
                u32 pairs[4];
                if constexpr (ADDEND) { ldmatrix_x4(pairs, word); }
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float* sum = d[half] + first / 2 + 8 * j + 2 * i;
                    float low = sum[0], high = sum[1];
                    if constexpr (BIAS) {
                        low += lower_half(more[2 * j + i / 2]);
                        high += __uint_as_float(more[2 * j + i / 2] & 0xffff0000u);
                    }
                    if constexpr (ADDEND) {
                        low += lower_half(pairs[i]);
                        high += upper_half(pairs[i]);
                    }
                    pairs[i] = to_pair(low, high);
                }
                stmatrix_x4(word, pairs[0], pairs[1], pairs[2], pairs[3]);
            }
            stores_begin();
            __syncwarp();
            if (lane == 0) { store_box(out, x, y, chunk); }
        }
    }
};

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(Product::THREADS, 1)
matmul_adapted(const __grid_constant__ TensorMap out, const __grid_constant__ TensorMap a,
               const __grid_constant__ TensorMap b, const __grid_constant__ TensorMap h,
               const __grid_constant__ TensorMap tail, const float* scale_a, const float* scale_b,
               const bf16* bias, const __grid_constant__ TensorMap addend, int M, int N, int K) {
    extern __shared__ unsigned char shared[];
    const Product product(shared, K);
    if (threadIdx.x == 0) { product.init(); }
    cluster_arrive();
    cluster_wait();
    const Work work(M, N, TILE_COLUMNS, K * (int)sizeof(A));
    const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
    if (warpgroup == 0) {
        product.load_tiles(work, &a, &b, &h, &tail);
    } else {
        const float scale = Product::SCALED ? *scale_a * *scale_b : 1.0f;
        const Stored stored{&out, &addend, bias, N};
        product.multiply_tiles(work, warpgroup - 1, scale, stored);
        if (threadIdx.x % 32 == 0) { stores_are_done(); }
    }
    cluster_arrive();
    cluster_wait();  // a block may not end while the other one still arrives at its barriers
}
