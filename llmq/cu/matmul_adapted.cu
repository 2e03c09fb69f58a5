// matmul_adapted.cu -- a matrix product for Hopper, with the adapters' product in it.
//
//   out = scale_a * scale_b * (a @ b^T) + h @ tail^T + bias + addend
//
// h and tail are the last tiles of the sum over K, so that out is written once and rounded once.
// Fp8 products are added as the tensor cores do it ("fast accumulation"): same bits as cuBLASLt's.
//
// Tiles, their ring and their order are those of product_sm90.cuh. Three warpgroups: one thread of the
// first loads, the two others take tiles of `out` in turns ("ping-pong"), so that one multiplies while
// the other one stores. Of wider tiles a thread could not hold its part: the two take 64 rows each.
//
// Data     out: bf16 (M, N), a: A (M, K), b: B (N, K), of bf16 with TRANSPOSED (K, N). h: bf16
//          (M, R), tail: bf16 (N, R), with TRANSPOSED (R, N). scale_a, scale_b: F32 (1), of fp8
//          codes. RANK: R rounded up to 16; 0: there are no h and tail. bias: bf16 (N), with BIAS.
//          addend: as out, other memory, with ADDEND. TILE_WIDTH: of a tile, 192, 224 or 256, which
//          changes no bit.
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
#include "product_sm90.cuh"

constexpr bool IN_TURNS = TILE_WIDTH == 192;
constexpr int LOADER_REGISTERS = IN_TURNS ? 24 : 40;  // of a thread
constexpr int STAGES = IN_TURNS ? 5 : 4, CHUNKS = IN_TURNS ? 1 : 2;  // CHUNKS: of a warp
constexpr int CONSUMERS = 2, WARPS = 4 * CONSUMERS, THREADS = 128 * (1 + CONSUMERS);
constexpr int HALVES_OF_TILE = IN_TURNS ? 2 : 1;  // that a warpgroup has, of 64 rows
constexpr int TAKERS = IN_TURNS ? CONSUMERS : 1;  // of tiles, one after the other
constexpr int CHUNK_BYTES = 16 * LINE;            // of out: 16 rows of 64 elements, a warp's own
constexpr bool HALVES = sizeof(A) == 2;  // BF16 operands
constexpr int STEP_K = LINE / sizeof(A);
constexpr int TAILS = (RANK + TAIL_K - 1) / TAIL_K;  // pairs of tiles of h and tail

// A warp's rows of a tile, 16 of each half from first_row on, 64 columns at a time through its chunks.
// Of 224 columns the last 64 begin in those before, and are there twice, the same. arrived: the
// warp's barrier, whose phase is even before and after.
__device__ __forceinline__ void store(const TensorMap* out, const float (&d)[HALVES_OF_TILE][SUMS],
                                      const Tile& tile, int first_row, SharedAddress chunks,
                                      const bf16* bias, const TensorMap* addend,
                                      SharedAddress arrived, int N) {
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
                    low += __uint_as_float(more[2 * j + i / 2] << 16);
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

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(THREADS, 1)
matmul_adapted(const __grid_constant__ TensorMap out, const __grid_constant__ TensorMap a,
               const __grid_constant__ TensorMap b, const __grid_constant__ TensorMap h,
               const __grid_constant__ TensorMap tail, const float* scale_a, const float* scale_b,
               const bf16* bias, const __grid_constant__ TensorMap addend, int M, int N, int K) {
    extern __shared__ unsigned char shared[];
    const SharedAddress stages = (shared_address(shared) + 1023) & ~(SharedAddress)1023;
    const SharedAddress chunks = stages + STAGES * STAGE_BYTES;
    const SharedAddress full = chunks + WARPS * CHUNKS * CHUNK_BYTES;
    const SharedAddress empty = full + 8 * STAGES, turn = empty + 8 * STAGES;
    const SharedAddress arrived = turn + 8 * CONSUMERS;
    const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(full + 8 * i, 1);
            barrier_init(empty + 8 * i, 2 * CONSUMERS / TAKERS);  // those of both blocks
        }
        for (int i = 0; i < CONSUMERS; ++i) { barrier_init(turn + 8 * i, 128); }
        for (int i = 0; i < WARPS; ++i) { barrier_init(arrived + 8 * i, 1); }
        barriers_ready();
    }
    cluster_arrive();
    cluster_wait();
    const Work work(M, N, TILE_COLUMNS, K * (int)sizeof(A));
    const int steps = (K + STEP_K - 1) / STEP_K;
    constexpr bool B_OUTSIDE = HALVES && TRANSPOSED;
    if (warpgroup == 0) {
        give_registers<LOADER_REGISTERS>();
        if (threadIdx.x == 0) {
            Ring<STAGES> ring(STAGES);  // the first wait for an empty stage is over at once
            for (int t = work.cluster; t < work.tiles; t += work.clusters) {
                const Tile tile(t, work);
#pragma unroll 1
                for (int k = 0; k < steps + TAILS; ++k, ring.next()) {
                    const SharedAddress stage = stages + ring.stage * STAGE_BYTES;
                    const SharedAddress arrived = full + 8 * ring.stage;
                    barrier_wait(empty + 8 * ring.stage, ring.parity);
                    if (k < steps) {
                        load_pair<B_OUTSIDE>(stage, arrived, &a, &b, k * STEP_K, tile, work.rank);
                    } else {
                        load_pair<TRANSPOSED>(stage, arrived, &h, &tail, (k - steps) * TAIL_K, tile,
                                              work.rank);
                    }
                }
            }
        }
    } else {
        take_registers<252 - LOADER_REGISTERS / 2>();
        const int me = warpgroup - 1, thread = threadIdx.x % 128;
        const float scale = HALVES ? 1.0f : *scale_a * *scale_b;
        const int taker = IN_TURNS ? me : 0, first_row = IN_TURNS ? 0 : 64 * me;
        const SharedAddress chunk = chunks + (me * 4 + thread / 32) * CHUNKS * CHUNK_BYTES;
        u32 turn_parity = me ^ 1;  // the first one may begin
        int done = taker * (steps + TAILS);
        for (int t = work.cluster + taker * work.clusters; t < work.tiles;
             t += TAKERS * work.clusters) {
            const Tile tile(t, work);
            float d[HALVES_OF_TILE][SUMS];
            Ring<STAGES> ring(done);
            SharedAddress before = empty;
            if constexpr (IN_TURNS) {
                barrier_wait(turn + 8 * me, turn_parity);  // else a wait may be for a later phase
                turn_parity ^= 1;
            }
#pragma unroll 1
            for (int k = 0; k < steps; ++k, ring.next()) {
                barrier_wait(full + 8 * ring.stage, ring.parity);
                multiply<A, B, B_OUTSIDE>(d, stages + ring.stage * STAGE_BYTES, first_row, SLICES, k);
                wgmma_wait<1>();
                if (k > 0 && thread < 2) { barrier_arrive_at(before, thread); }
                before = empty + 8 * ring.stage;
            }
            Ring<STAGES> last = ring;
#pragma unroll
            for (int k = 0; k < TAILS; ++k, last.next()) {
                barrier_wait(full + 8 * last.stage, last.parity);
            }
            if constexpr (IN_TURNS) {
                barrier_arrive(turn + 8 * (me ^ 1));  // the other one multiplies while this one scales
            }
            done += TAKERS * (steps + TAILS);
            wgmma_wait<0>();
            if (thread < 2) { barrier_arrive_at(before, thread); }
            if (!HALVES) {
#pragma unroll
                for (int i = 0; i < HALVES_OF_TILE * SUMS; ++i) { d[i / SUMS][i % SUMS] *= scale; }
            }
#pragma unroll
            for (int k = 0; k < TAILS; ++k, ring.next()) {
                const int slices = (RANK - k * TAIL_K + 15) / 16;
                multiply<bf16, bf16, TRANSPOSED>(d, stages + ring.stage * STAGE_BYTES, first_row,
                                                 slices, 1);
                wgmma_wait<0>();
                if (thread < 2) { barrier_arrive_at(empty + 8 * ring.stage, thread); }
            }
            store(&out, d, tile, first_row + thread / 32 * 16, chunk, bias, &addend,
                  arrived + 8 * (me * 4 + thread / 32), N);
        }
        if (thread % 32 == 0) { stores_are_done(); }
    }
    cluster_arrive();
    cluster_wait();  // a block may not end while the other one still arrives at its barriers
}
