// gemm_sm90.cu -- an fp8 matrix product for Hopper, which tools/gemm_gate.py times against cuBLASLt.
//
//   out (M, N) BF16 = scale_a * scale_b * (a (M, K) @ b (N, K)^T), E4M3 codes, fast accumulation
//
// Three warpgroups: one thread of the first keeps STAGES pairs of tiles on their way (TMA), the two
// others take tiles of `out` in turns ("ping-pong"), so that one multiplies while the other one
// stores. Clusters of two blocks have neighbouring rows of `a` and the same tile of `b`, of which
// each loads a half for both. The grid is persistent; tiles go through GROUP columns of tiles at a
// time, so that what neighbours read is in L2.
//
// Launch  132 blocks (any even number) of 384 threads, SHARED bytes of dynamic shared memory.
// Needs   compute capability 9.0a; K a multiple of 128; maps of a with boxes (128, 128), of b with
//         (BN / 2, 128), of out with (16, 64), all swizzled by 128 bytes.
// Bits    those of cuBLASLt with fast accumulation: sums over K are in the same order.
// Source  PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions", "Tensor copies", "mbarrier".
using u32 = unsigned int;
using u64 = unsigned long long;

constexpr int BM = 128, BN = 192, BK = 128, STAGES = 5;
constexpr int A_BYTES = BM * BK, B_BYTES = BN * BK, STAGE_BYTES = A_BYTES + B_BYTES;
constexpr int CHUNK_BYTES = 16 * 128;  // of out: 16 rows of 64 elements, a warp's own
constexpr int CONSUMERS = 2, WARPS = 4 * CONSUMERS;

struct alignas(64) TensorMap {
    u64 words[16];
};

// -- PTX -----------------------------------------------------------------------------------------

__device__ __forceinline__ void barrier_init(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void barrier_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}
__device__ __forceinline__ void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// At the same barrier of block `rank` of the cluster. Not .release.cluster, which would wait for all
// stores of the thread: what is released has been read by the tensor cores, and waited for.
__device__ __forceinline__ void barrier_arrive_at(u32 barrier, u32 rank) {
    asm volatile(
        "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [there];\n}\n" ::"r"(barrier), "r"(rank)
        : "memory");
}
__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
    asm volatile(
        "{\n.reg .pred done;\nAGAIN_%=:\n"
        "mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n@!done bra AGAIN_%=;\n}\n" ::"r"(barrier),
        "r"(parity)
        : "memory");
}
__device__ __forceinline__ void load_tile(u32 to, const TensorMap* map, int x, int y, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%2, %3}], [%4];" ::"r"(to), "l"(map), "r"(x), "r"(y), "r"(barrier)
        : "memory");
}
// To the same place, and with the same barrier, of every block of the cluster in `blocks`.
__device__ __forceinline__ void load_tile_for(u32 to, const TensorMap* map, int x, int y,
                                              u32 barrier, unsigned short blocks) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
        ".multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to), "l"(map), "r"(x), "r"(y),
        "r"(barrier), "h"(blocks)
        : "memory");
}
__device__ __forceinline__ void store_tile(const TensorMap* map, int x, int y, u32 from) {
    asm volatile(
        "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];\n"
        "cp.async.bulk.commit_group;" ::"l"(map), "r"(x), "r"(y), "r"(from)
        : "memory");
}
__device__ __forceinline__ void stores_have_read() {
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
__device__ __forceinline__ void stores_are_done() {
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}
// Of a tile whose lines of 128 bytes are swizzled: eight lines, 1024 bytes, repeat.
__device__ __forceinline__ u64 descriptor(u32 address) {
    return (u64)((address & 0x3FFFF) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}
// d (64, 192) = a (64, 32) b (192, 32)^T [+ d]. Lane 4 g + t of warp w has d[4 j + i], of row
// 16 w + g + 8 (i / 2) and column 8 j + 2 t + i % 2. WGMMA_* are lists that the host writes.
__device__ __forceinline__ void multiply(float (&d)[96], u64 a, u64 b, int add) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %98, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n192k32.f32.e4m3.e4m3 {" WGMMA_NUMBERS
        "}, %96, %97, add, 1, 1;\n}\n"
        : WGMMA_OPERANDS
        : "l"(a), "l"(b), "r"(add));
}
__device__ __forceinline__ void products_begin() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void products_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int PENDING> __device__ __forceinline__ void products_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
__device__ __forceinline__ u32 pack(float low, float high) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}
// The inverse of ldmatrix: four 8 x 8 matrices, lane 8 i + r gives the address of row r of matrix i.
__device__ __forceinline__ void stmatrix_x4(u32 row, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row),
                 "r"(a), "r"(b), "r"(c), "r"(d)
                 : "memory");
}
__device__ __forceinline__ void cluster_barrier() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::
                     : "memory");
}

// -- The product ---------------------------------------------------------------------------------

// A place in the ring of stages. parity: of the barrier's phase that is waited for.
struct Ring {
    u32 stage, parity;
    __device__ __forceinline__ Ring(u32 steps) : stage(steps % STAGES), parity(steps / STAGES & 1) {}
    __device__ __forceinline__ void next() {
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
};

// The tile that a cluster computes as its t-th; its two blocks have rows below each other.
struct Tile {
    int row, column;
    __device__ __forceinline__ Tile(int t, int pairs, int columns, u32 rank) {
        const int group = t / (GROUP * pairs), first = group * GROUP;
        const int width = min(GROUP, columns - first), rest = t - group * GROUP * pairs;
        row = (rest / width * 2 + rank) * BM;
        column = (first + rest % width) * BN;
    }
};

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(128 * (1 + CONSUMERS), 1)
gemm(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b,
     const __grid_constant__ TensorMap out, const float* scale_a, const float* scale_b, int M,
     int N, int K) {
    extern __shared__ unsigned char shared[];
    const u32 stages = ((u32)__cvta_generic_to_shared(shared) + 1023) & ~1023u;
    const u32 chunks = stages + STAGES * STAGE_BYTES, full = chunks + WARPS * CHUNK_BYTES;
    const u32 empty = full + 8 * STAGES, turn = empty + 8 * STAGES;
    const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
    u32 rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(full + 8 * i, 1);
            barrier_init(empty + 8 * i, 2);  // one consumer of each block
        }
        for (int i = 0; i < CONSUMERS; ++i) { barrier_init(turn + 8 * i, 128); }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    cluster_barrier();
    const int columns = (N + BN - 1) / BN, pairs = (M + 2 * BM - 1) / (2 * BM);
    const int tiles = columns * pairs, steps = K / BK;
    const int cluster = blockIdx.x / 2, clusters = gridDim.x / 2;
    if (warpgroup == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (threadIdx.x == 0) {
            Ring ring(STAGES);  // the first wait for an empty stage is over at once
            for (int t = cluster; t < tiles; t += clusters) {
                const Tile tile(t, pairs, columns, rank);
                for (int k = 0; k < steps; ++k, ring.next()) {
                    const u32 stage = stages + ring.stage * STAGE_BYTES;
                    const u32 arrived = full + 8 * ring.stage;
                    barrier_wait(empty + 8 * ring.stage, ring.parity);
                    barrier_expect(arrived, STAGE_BYTES);
                    load_tile(stage, &a, k * BK, tile.row, arrived);
                    load_tile_for(stage + A_BYTES + rank * (B_BYTES / 2), &b, k * BK,
                                  tile.column + rank * (BN / 2), arrived, 3);
                }
            }
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
        const int me = warpgroup - 1, thread = threadIdx.x % 128;
        const int warp = thread / 32, lane = thread % 32;
        const float scale = *scale_a * *scale_b;
        const u32 chunk = chunks + (me * 4 + warp) * CHUNK_BYTES;
        const u32 line = lane & 15, octet = lane >> 4;  // of 16-byte words, for stmatrix
        u32 turn_parity = me ^ 1;                       // the first one may begin
        int done = me * steps;
        for (int t = cluster + me * clusters; t < tiles; t += CONSUMERS * clusters) {
            const Tile tile(t, pairs, columns, rank);
            float d[2][96];
            Ring ring(done);
            u32 before = 0;
            barrier_wait(turn + 8 * me, turn_parity);  // else a wait may be for a later phase
            turn_parity ^= 1;
            for (int k = 0; k < steps; ++k, ring.next()) {
                barrier_wait(full + 8 * ring.stage, ring.parity);
                const u32 stage = stages + ring.stage * STAGE_BYTES;
                const u64 top = descriptor(stage), low = descriptor(stage + 64 * BK);
                const u64 right = descriptor(stage + A_BYTES);
                products_begin();
#pragma unroll
                for (int i = 0; i < BK / 32; ++i) {  // 32 bytes further: 2 in a descriptor
                    multiply(d[0], top + 2 * i, right + 2 * i, (k | i) != 0);
                    multiply(d[1], low + 2 * i, right + 2 * i, (k | i) != 0);
                }
                products_commit();
                products_wait<1>();
                if (k > 0 && thread < 2) { barrier_arrive_at(empty + 8 * before, thread); }
                before = ring.stage;
            }
            barrier_arrive(turn + 8 * (me ^ 1));
            done += CONSUMERS * steps;
            products_wait<0>();
            if (thread < 2) { barrier_arrive_at(empty + 8 * before, thread); }
#pragma unroll
            for (int c = 0; c < 6; ++c) {  // 64 columns of a half
                const float* part = d[c / 3] + 32 * (c % 3);
                if (lane == 0) { stores_have_read(); }
                __syncwarp();
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const float* x = part + 8 * j;
                    stmatrix_x4(chunk + line * 128 + ((2 * j + octet ^ line & 7) << 4),
                                pack(x[0] * scale, x[1] * scale), pack(x[2] * scale, x[3] * scale),
                                pack(x[4] * scale, x[5] * scale), pack(x[6] * scale, x[7] * scale));
                }
                asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
                __syncwarp();
                if (lane == 0) {
                    store_tile(&out, tile.column + 64 * (c % 3),
                               tile.row + 64 * (c / 3) + 16 * warp, chunk);
                }
            }
        }
        if (lane == 0) { stores_are_done(); }
    }
    cluster_barrier();  // a block may not end while the other one still arrives at its barriers
}
