// ptx.cuh -- all inline PTX. tests/emulator/ptx.cuh holds the same functions in C++.
//
// Fragments of m16n8k16 (PTX ISA, "Matrix Fragments for mma.m16n8k16", .bf16), with lane = 4 g + t;
// each 32-bit register holds two neighbouring elements, the lower index in the lower half:
//   A (16 x 16, rows x inner)     a[0]: row g,     inner 2t, 2t + 1
//                                 a[1]: row g + 8, inner 2t, 2t + 1
//                                 a[2]: row g,     inner 2t + 8, 2t + 9
//                                 a[3]: row g + 8, inner 2t + 8, 2t + 9
//   B (16 x 8, inner x columns)   b0: inner 2t, 2t + 1, column g
//                                 b1: inner 2t + 8, 2t + 9, column g
//   C, D (16 x 8)                 d[0], d[1]: row g,     columns 2t, 2t + 1
//                                 d[2], d[3]: row g + 8, columns 2t, 2t + 1
//
// Fragments of m16n8k32 (.s8, .e4m3, .e5m2) have the same registers in the same places, but each
// register holds four neighbouring bytes: a[0] is row g, inner 4t .. 4t + 3, a[2] is inner 4t + 16
// .. 4t + 19, and so on.
#pragma once

// An address within shared memory, in bytes.
using SharedAddress = unsigned int;

__device__ __forceinline__ SharedAddress shared_address(const void* p) {
    return static_cast<SharedAddress>(__cvta_generic_to_shared(p));
}

// Four 8 x 8 matrices of 16-bit elements. Lane 8 i + r gives the address of row r of matrix i
// (16 bytes, aligned). Register i of lane 4 g + t gets elements 2t, 2t + 1 of row g of matrix i.
__device__ __forceinline__ void ldmatrix_x4(unsigned int (&r)[4], SharedAddress row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(row)
                 : "memory");
}

// Like ldmatrix_x4, but register i gets elements 2t, 2t + 1 of column g of matrix i.
__device__ __forceinline__ void ldmatrix_x4_trans(unsigned int (&r)[4], SharedAddress row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(row)
                 : "memory");
}

// Programmatic dependent launch, for kernels declared so (llmq/runtime/kernel.py): the stream's
// next kernel may begin as soon as all blocks of this kernel have called start_next_kernel. A
// kernel must not touch memory of earlier kernels before all its threads have called
// wait_for_earlier_kernels. Compute capability 9.0 and later; elsewhere kernels run one by one.
__device__ __forceinline__ void start_next_kernel() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ __forceinline__ void wait_for_earlier_kernels() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Load 16 bytes from shared memory, aligned to 16 bytes.
__device__ __forceinline__ uint4 load_shared(SharedAddress from) {
    uint4 x;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "r"(from)
                 : "memory");
    return x;
}

// Load 8 bytes from shared memory, aligned to 8 bytes.
__device__ __forceinline__ float2 load_shared_pair(SharedAddress from) {
    float2 x;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(from) : "memory");
    return x;
}

// Load the F32 at byte offset (byte i of word) of a table in shared memory, aligned to 256 bytes.
__device__ __forceinline__ float lookup_shared(SharedAddress table, unsigned int word, int i) {
    float x;
    asm("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(__byte_perm(word, table, 0x7650 + i)));
    return x;
}

// Load from any memory; the compiler does not move it across other assembly.
__device__ __forceinline__ float load_here(const float* from) {
    float x;
    asm volatile("ld.f32 %0, [%1];" : "=f"(x) : "l"(from));
    return x;
}

// Store 16 bytes to shared memory, aligned to 16 bytes.
__device__ __forceinline__ void store_shared(SharedAddress to, const uint4& x) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x.x), "r"(x.y),
                 "r"(x.z), "r"(x.w)
                 : "memory");
}

// d += a b: BF16 factors, F32 sums; fragments as above.
__device__ __forceinline__ void mma_m16n8k16_bf16(float (&d)[4], const unsigned int (&a)[4],
                                                  unsigned int b0, unsigned int b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// a b + c for two BF16 in each word, rounded once.
__device__ __forceinline__ unsigned int fma_pair(unsigned int a, unsigned int b, unsigned int c) {
    unsigned int x;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(x) : "r"(a), "r"(b), "r"(c));
    return x;
}

// d += a b for F32, whose lower 13 bits the tensor cores drop (TF32). m16n8k8: D as above. Lane 4 g
// + t has rows g, g + 8 of A's column t, then of column t + 4, and rows t, t + 4 of B's column g.
__device__ __forceinline__ void mma_m16n8k8_tf32(float (&d)[4], const float (&a)[4], float b0,
                                                 float b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])),
          "r"(__float_as_uint(a[3])), "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)));
}

// d += a b for signed bytes, with sums in 32 bits, which wrap around; fragments as above.
__device__ __forceinline__ void mma_m16n8k32_s8(int (&d)[4], const unsigned int (&a)[4],
                                                unsigned int b0, unsigned int b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// d = a b, or with ADD d += a b, for fp8 codes. Sums are as exact as the card's tensor cores: F32
// on some, 14 significant bits on others. Compute capability 8.9 and later; slow on 9.0.
#define PTX_MMA_FP8(FORMATS)                                                                   \
    if constexpr (ADD) {                                                                       \
        asm volatile("mma.sync.aligned.m16n8k32.row.col.f32." FORMATS ".f32 "                  \
                     "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"         \
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                          \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));          \
    } else {                                                                                   \
        asm volatile("mma.sync.aligned.m16n8k32.row.col.f32." FORMATS ".f32 "                  \
                     "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};"     \
                     : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])                          \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.0f)); \
    }
template <class Left, class Right, bool ADD>
__device__ __forceinline__ void mma_m16n8k32_fp8(float (&d)[4], const unsigned int (&a)[4],
                                                 unsigned int b0, unsigned int b1) {
    if constexpr (Fp8<Left>::FORMAT == __NV_E5M2) {
        PTX_MMA_FP8("e5m2.e4m3")
    } else if constexpr (Fp8<Right>::FORMAT == __NV_E5M2) {
        PTX_MMA_FP8("e4m3.e5m2")
    } else {
        PTX_MMA_FP8("e4m3.e4m3")
    }
}
#undef PTX_MMA_FP8

// d += a b for E4M3 codes, with sums in half precision: d[0] has columns 2t (lower half) and 2t + 1
// of row g, d[1] the same columns of row g + 8. Compute capability 8.9 and later.
__device__ __forceinline__ void mma_m16n8k32_half(unsigned int (&d)[2], const unsigned int (&a)[4],
                                                  unsigned int b0, unsigned int b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.f16.e4m3.e4m3.f16 "
        "{%0, %1}, {%2, %3, %4, %5}, {%6, %7}, {%0, %1};"
        : "+r"(d[0]), "+r"(d[1])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Copy 16 bytes from global to shared memory in the background, past L1; zeros if not valid (`from`
// must still be a readable address). Both addresses are 16-byte aligned. ONCE: no later load needs
// the bytes, so that L2 may evict them first.
template <bool ONCE = false>
__device__ __forceinline__ void cp_async_16(SharedAddress to, const void* from, bool valid) {
    const auto source = __cvta_generic_to_global(from);
    if constexpr (ONCE) {
        asm volatile(
            "{ .reg .b64 first; createpolicy.fractional.L2::evict_first.b64 first, 1.0;\n"
            "cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, first; }" ::"r"(to),
            "l"(source), "r"(valid ? 16 : 0)
            : "memory");
    } else {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(source),
                     "r"(valid ? 16 : 0)
                     : "memory");
    }
}

// Like cp_async_16, but through L1, for BYTES = 4, 8 or 16 bytes, aligned to BYTES.
template <int BYTES>
__device__ __forceinline__ void cp_async_cached(SharedAddress to, const void* from, bool valid) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to),
                 "l"(__cvta_generic_to_global(from)), "n"(BYTES), "r"(valid ? BYTES : 0)
                 : "memory");
}

// End a group: all of this thread's copies since the last group.
__device__ __forceinline__ void cp_async_commit() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}

// Wait until all but this thread's newest PENDING groups have arrived. Other threads see the copies
// after a barrier.
template <int PENDING> __device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Wait until `threads` threads (whole warps) have come to barrier `id`, from 1 to 15. After the
// barrier all of them see each other's earlier writes to shared memory.
__device__ __forceinline__ void barrier_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// 2^x by the special function unit: relative error below 2^-22, results below 2^-126 are 0.
__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// 1 / x by the special function unit: relative error below 2^-22.
__device__ __forceinline__ float reciprocal_approx(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// The larger lower 16 bits and the larger upper 16 bits of two words, unsigned.
__device__ __forceinline__ unsigned int max_halves(unsigned int a, unsigned int b) {
#if __CUDA_ARCH__ >= 900
    unsigned int larger;
    asm("max.u16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
    return larger;
#else
    return max(a & 0xFFFF0000u, b & 0xFFFF0000u) | max(a & 0xFFFF, b & 0xFFFF);
#endif
}

// The larger magnitudes of two words' lower BF16 and of their upper BF16; NaN wins.
__device__ __forceinline__ unsigned int larger_magnitudes(unsigned int a, unsigned int b) {
#if __CUDA_ARCH__ >= 900
    unsigned int x;
    asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(x) : "r"(a), "r"(b));
    return x;
#else
    return max_halves(a & 0x7FFF7FFF, b & 0x7FFF7FFF);  // bits of a NaN are above all others
#endif
}

// The larger number, or NaN if a or b is NaN. Compute capability 8.0 and later.
__device__ __forceinline__ float larger(float a, float b) {
    float x;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(x) : "f"(a), "f"(b));
    return x;
}

// -- Thread-block clusters (compute capability 9.0 and later) ------------------------------------

// This block's place in its cluster.
__device__ __forceinline__ unsigned int cluster_rank() {
    unsigned int rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// A barrier of all threads of the cluster in two halves. Threads that have waited see all writes of
// threads before they arrived.
__device__ __forceinline__ void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Load the two floats at `p`, an 8-byte aligned shared variable, from block `rank` of the cluster.
__device__ __forceinline__ float2 load_cluster(const float2* p, unsigned int rank) {
    SharedAddress address;
    float2 x;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
                 : "=r"(address)
                 : "r"(shared_address(p)), "r"(rank));
    asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];"
                 : "=f"(x.x), "=f"(x.y)
                 : "r"(address)
                 : "memory");
    return x;
}

// -- Barriers in shared memory (mbarrier; compute capability 9.0 and later) -----------------------
//
// A phase of a barrier ends when all arrivals, and all bytes of copies that arrivals expect, have
// come. Phases are numbered from 0; a phase's parity is the parity of its number.

__device__ __forceinline__ void barrier_init(SharedAddress barrier, unsigned int arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// Call after barrier_init, before copies or other blocks of the cluster use the barriers.
__device__ __forceinline__ void barriers_ready() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void barrier_arrive(SharedAddress barrier) {
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Arrives, and makes the phase wait for `bytes` bytes of copies.
__device__ __forceinline__ void barrier_expect(SharedAddress barrier, unsigned int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}
// Arrives at the same barrier of block `rank` of the cluster. .release.cluster would wait for all
// the thread's stores, and is not needed: an arrival says that finished products have read tiles.
__device__ __forceinline__ void barrier_arrive_at(SharedAddress barrier, unsigned int rank) {
    asm volatile(
        "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [there];\n}\n" ::"r"(barrier),
        "r"(rank)
        : "memory");
}
// Waits until the phase with this parity has ended. The phase before it must have ended.
__device__ __forceinline__ void barrier_wait(SharedAddress barrier, unsigned int parity) {
    asm volatile(
        "{\n.reg .pred done;\nAGAIN_%=:\n"
        "mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n@!done bra AGAIN_%=;\n}\n" ::"r"(
            barrier),
        "r"(parity)
        : "memory");
}

// -- Counts in memory that other blocks add to ----------------------------------------------------

// Waits until *count is `value`, and sees what other threads wrote before they added to the count.
// One piece of assembly: a loop in C++ would make the compiler wait for all products under way.
__device__ __forceinline__ void wait_for_count(const int* count, int value) {
    asm volatile(
        "{\n.reg .pred other;\n.reg .b32 now;\nAGAIN_%=:\nld.acquire.gpu.global.s32 now, [%0];\n"
        "setp.ne.s32 other, now, %1;\n@other bra AGAIN_%=;\n}\n" ::"l"(count),
        "r"(value)
        : "memory");
}

// -- Copies of boxes of a matrix (TMA; compute capability 9.0 and later) --------------------------
//
// A map describes a row-major matrix and the copied box, whose rows have up to 128 bytes. In shared
// memory rows lie 128 bytes apart, "swizzled": 16-byte word w of row r stands at word w ^ r % 8. A
// box's elements outside the matrix are loaded as zeros and not stored. x, y: the box's first
// column and row. One thread copies.

struct alignas(64) TensorMap {
    unsigned long long words[16];
};

__device__ __forceinline__ void load_box(SharedAddress to, const TensorMap* map, int x, int y,
                                         SharedAddress barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%2, %3}], [%4];" ::"r"(to),
        "l"(map), "r"(x), "r"(y), "r"(barrier)
        : "memory");
}
// Load a box to the same place in each block of the mask `blocks`, with that block's barrier.
__device__ __forceinline__ void load_box_for(SharedAddress to, const TensorMap* map, int x, int y,
                                             SharedAddress barrier, unsigned short blocks) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
        ".multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
        "l"(map), "r"(x), "r"(y), "r"(barrier), "h"(blocks)
        : "memory");
}
// Copy `bytes` contiguous bytes to shared memory; addresses and `bytes` are multiples of 16.
__device__ __forceinline__ void load_bytes(SharedAddress to, const void* from, unsigned int bytes,
                                           SharedAddress barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
            to),
        "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(barrier)
        : "memory");
}
// Store a box. Call stores_begin before, which makes writes to shared memory visible to the copy.
__device__ __forceinline__ void store_box(const TensorMap* map, int x, int y, SharedAddress from) {
    asm volatile(
        "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];\n"
        "cp.async.bulk.commit_group;" ::"l"(map),
        "r"(x), "r"(y), "r"(from)
        : "memory");
}
__device__ __forceinline__ void stores_begin() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
// Wait until all but the newest PENDING stores have read shared memory; until all have written.
template <int PENDING = 0> __device__ __forceinline__ void stores_have_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}
__device__ __forceinline__ void stores_are_done() {
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// Start fetching the 128-byte line that holds *p into the L2 cache.
__device__ __forceinline__ void prefetch_line(const void* p) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
}

// -- Products of a warpgroup (wgmma; compute capability 9.0 only) ---------------------------------
//
// Operands lie in shared memory as load_box writes them, in one of two ways. K inside: a row is 128
// bytes of the inner dimension; 8 rows, 1024 bytes, repeat. K outside: a row of the box is one inner
// index with 64 outer elements; 8 rows repeat, and the next 64 outer elements are `chunk` bytes
// further. Adding 1 to a descriptor moves it by 16 bytes.

using Descriptor = unsigned long long;

__device__ __forceinline__ Descriptor k_inside(SharedAddress tile) {
    return (Descriptor)((tile & 0x3FFFF) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}
__device__ __forceinline__ Descriptor k_outside(SharedAddress tile, unsigned int chunk) {
    return (Descriptor)((tile & 0x3FFFF) >> 4) | (Descriptor)(chunk >> 4) << 16 | 64ull << 32 |
           1ull << 62;
}

#define PTX_8(i)                                                                               \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
        "+f"(d[i + 6]), "+f"(d[i + 7])
#define PTX_32(i) PTX_8(i), PTX_8(i + 8), PTX_8(i + 16), PTX_8(i + 24)
#define PTX_NAMES_32                                                                           \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, "         \
    "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define PTX_NAMES_64                                                                           \
    PTX_NAMES_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, "    \
    "%46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define PTX_NAMES_96                                                                           \
    PTX_NAMES_64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, "    \
    "%78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define PTX_NAMES_112                                                                          \
    PTX_NAMES_96 ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, "      \
    "%108, %109, %110, %111"
// d (64, columns) = a (64, inner) b (inner, columns) [+ d], over 32 bytes of the inner dimension.
// In lane 4 g + t of the warpgroup's warp w, d[4 j + i] is row 16 w + g + 8 (i / 2), column
// 8 j + 2 t + i % 2. WIDTH: "n" and the columns. A, B, ADD: operands' names, after d's.
#define PTX_WGMMA(WIDTH, NAMES, A, B, ADD, FORMATS, TRANSPOSED, ...)                           \
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, " ADD ", 0;\n"                          \
                 "wgmma.mma_async.sync.aligned.m64" WIDTH FORMATS " {" NAMES "}, " A ", " B     \
                 ", add, 1, 1" TRANSPOSED ";\n}\n"                                             \
                 : __VA_ARGS__                                                                 \
                 : "l"(a), "l"(b), "r"(add))
#define PTX_64(FORMATS, TRANSPOSED)                                                            \
    PTX_WGMMA("n64", PTX_NAMES_32, "%32", "%33", "%34", FORMATS, TRANSPOSED, PTX_32(0))
#define PTX_128(FORMATS, TRANSPOSED)                                                           \
    PTX_WGMMA("n128", PTX_NAMES_64, "%64", "%65", "%66", FORMATS, TRANSPOSED, PTX_32(0), PTX_32(32))
#define PTX_192(FORMATS, TRANSPOSED)                                                           \
    PTX_WGMMA("n192", PTX_NAMES_96, "%96", "%97", "%98", FORMATS, TRANSPOSED, PTX_32(0),       \
              PTX_32(32), PTX_32(64))
#define PTX_224(FORMATS, TRANSPOSED)                                                           \
    PTX_WGMMA("n224", PTX_NAMES_112, "%112", "%113", "%114", FORMATS, TRANSPOSED, PTX_32(0),   \
              PTX_32(32), PTX_32(64), PTX_8(96), PTX_8(104))
#define PTX_OF_FORMATS(PRODUCT)                                                                \
    if constexpr (sizeof(Left) == 2) {                                                         \
        if constexpr (K_OUTSIDE) {                                                             \
            PRODUCT("k16.f32.bf16.bf16", ", 0, 1");                                            \
        } else {                                                                               \
            PRODUCT("k16.f32.bf16.bf16", ", 0, 0");                                            \
        }                                                                                      \
    } else if constexpr (Fp8<Left>::FORMAT == __NV_E5M2) {                                     \
        PRODUCT("k32.f32.e5m2.e4m3", "");                                                      \
    } else if constexpr (Fp8<Right>::FORMAT == __NV_E5M2) {                                    \
        PRODUCT("k32.f32.e4m3.e5m2", "");                                                      \
    } else {                                                                                   \
        PRODUCT("k32.f32.e4m3.e4m3", "");                                                      \
    }

// COLUMNS: 64, 192 or 224. Left, Right: formats of a and b. K_OUTSIDE: b has K outside, is BF16,
// and steps by 16 rows. LEFT_OUTSIDE: so does a; needs K_OUTSIDE, and 64, 128 or 192 columns.
template <int COLUMNS, class Left, class Right, bool K_OUTSIDE, bool LEFT_OUTSIDE = false>
__device__ __forceinline__ void wgmma(float (&d)[COLUMNS / 2], Descriptor a, Descriptor b, int add) {
    static_assert(COLUMNS == 64 || COLUMNS == (LEFT_OUTSIDE ? 128 : 224) || COLUMNS == 192);
    static_assert(!LEFT_OUTSIDE || K_OUTSIDE);
    if constexpr (LEFT_OUTSIDE && COLUMNS == 64) {
        PTX_64("k16.f32.bf16.bf16", ", 1, 1");
    } else if constexpr (LEFT_OUTSIDE && COLUMNS == 128) {
        PTX_128("k16.f32.bf16.bf16", ", 1, 1");
    } else if constexpr (LEFT_OUTSIDE) {
        PTX_192("k16.f32.bf16.bf16", ", 1, 1");
    } else if constexpr (COLUMNS == 64) {
        PTX_OF_FORMATS(PTX_64)
    } else if constexpr (COLUMNS == 192) {
        PTX_OF_FORMATS(PTX_192)
    } else {
        PTX_OF_FORMATS(PTX_224)
    }
}
#undef PTX_OF_FORMATS

// Like PTX_WGMMA, with BF16 a in four registers: A(i) is the name of the i-th register.
#define PTX_LEFT(WIDTH, NAMES, A, B, ADD, TRANSPOSED, ...)                                     \
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, " ADD ", 0;\n"                          \
                 "wgmma.mma_async.sync.aligned.m64" WIDTH "k16.f32.bf16.bf16 {" NAMES "}, {" A  \
                 "}, " B ", add, 1, 1, " TRANSPOSED ";\n}\n"                                   \
                 : __VA_ARGS__                                                                 \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add))
#define PTX_LEFT_64(TRANSPOSED)                                                                \
    PTX_LEFT("n64", PTX_NAMES_32, "%32, %33, %34, %35", "%36", "%37", TRANSPOSED, PTX_32(0))
#define PTX_LEFT_128(TRANSPOSED)                                                               \
    PTX_LEFT("n128", PTX_NAMES_64, "%64, %65, %66, %67", "%68", "%69", TRANSPOSED, PTX_32(0),  \
             PTX_32(32))
// Like wgmma, for BF16. COLUMNS: 64 or 128. a: 64 rows and 16 of the inner dimension, 16 rows in
// each warp's registers as in m16n8k16. The registers may change only after a wait for the product.
template <int COLUMNS, bool K_OUTSIDE>
__device__ __forceinline__ void wgmma_left(float (&d)[COLUMNS / 2], const unsigned int (&a)[4],
                                           Descriptor b, int add) {
    static_assert(COLUMNS == 64 || COLUMNS == 128);
    if constexpr (COLUMNS == 64) {
        if constexpr (K_OUTSIDE) {
            PTX_LEFT_64("1");
        } else {
            PTX_LEFT_64("0");
        }
    } else if constexpr (K_OUTSIDE) {
        PTX_LEFT_128("1");
    } else {
        PTX_LEFT_128("0");
    }
}
#undef PTX_LEFT_128
#undef PTX_LEFT_64
#undef PTX_LEFT
#undef PTX_224
#undef PTX_192
#undef PTX_128
#undef PTX_64
#undef PTX_WGMMA
#undef PTX_NAMES_112
#undef PTX_NAMES_96
#undef PTX_NAMES_64
#undef PTX_NAMES_32
#undef PTX_32
#undef PTX_8
// wgmma_begin separates other uses of d from the first product; wgmma_commit ends a group of
// products; wgmma_wait waits until at most PENDING groups run.
__device__ __forceinline__ void wgmma_begin() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int PENDING> __device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Call after wgmma_wait: the compiler then moves no use of d before the wait.
template <int COUNT> __device__ __forceinline__ void arrived(float (&d)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) { asm volatile("" : "+f"(d[i])::"memory"); }
}

// The inverse of ldmatrix_x4: store the registers of all lanes to the matrices' rows.
__device__ __forceinline__ void stmatrix_x4(SharedAddress row, unsigned int a, unsigned int b,
                                            unsigned int c, unsigned int d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row),
                 "r"(a), "r"(b), "r"(c), "r"(d)
                 : "memory");
}

// Like stmatrix_x4, with each matrix transposed.
__device__ __forceinline__ void stmatrix_x4_trans(SharedAddress row, unsigned int a, unsigned int b,
                                                  unsigned int c, unsigned int d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row),
                 "r"(a), "r"(b), "r"(c), "r"(d)
                 : "memory");
}

// Set the warpgroup's number of registers per thread, to fewer or more than at launch.
template <int COUNT> __device__ __forceinline__ void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT> __device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// -- Time ----------------------------------------------------------------------------------------

// Nanoseconds since some time in the past, the same for the whole GPU.
__device__ __forceinline__ unsigned long long global_time() {
    unsigned long long ns;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns)::"memory");
    return ns;
}

// -- Registers -----------------------------------------------------------------------------------

// Makes the compiler forget values derived from x, so that the next use of x unpacks x again, and
// no registers hold unpacked elements meanwhile.
__device__ __forceinline__ void forget(uint4& x) {
    asm volatile("" : "+r"(x.x), "+r"(x.y), "+r"(x.z), "+r"(x.w));
}
__device__ __forceinline__ void forget(uint2& x) { asm volatile("" : "+r"(x.x), "+r"(x.y)); }
__device__ __forceinline__ void forget(float& x) { asm volatile("" : "+f"(x)); }
__device__ __forceinline__ void forget(int& x) { asm volatile("" : "+r"(x)); }
__device__ __forceinline__ void forget(unsigned int& x) { asm volatile("" : "+r"(x)); }
