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
// Fragments of m16n8k32 (.s8) are the same registers in the same places, each of four neighbouring
// bytes instead of two elements: a[0] is row g, inner 4t .. 4t + 3, a[2] inner 4t + 16 .. 4t + 19,
// and so on.
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

// As ldmatrix_x4, each matrix transposed: elements 2t, 2t + 1 of its column g.
__device__ __forceinline__ void ldmatrix_x4_trans(unsigned int (&r)[4], SharedAddress row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(row)
                 : "memory");
}

// d += a b, BF16 products summed in F32; fragments as above.
__device__ __forceinline__ void mma_m16n8k16_bf16(float (&d)[4], const unsigned int (&a)[4],
                                                  unsigned int b0, unsigned int b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// d += a b of signed bytes, summed in 32 bits, which wrap around; fragments as above.
__device__ __forceinline__ void mma_m16n8k32_s8(int (&d)[4], const unsigned int (&a)[4],
                                                unsigned int b0, unsigned int b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Copy 16 bytes from global to shared memory in the background, past L1; zeros if not valid (the
// address must then still be one that may be read). Both 16-byte aligned.
__device__ __forceinline__ void cp_async_16(SharedAddress to, const void* from, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to),
                 "l"(__cvta_generic_to_global(from)), "r"(valid ? 16 : 0)
                 : "memory");
}

// The same through L1, for BYTES = 4, 8, or 16 bytes, aligned to that.
template <int BYTES>
__device__ __forceinline__ void cp_async_cached(SharedAddress to, const void* from, bool valid) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to),
                 "l"(__cvta_generic_to_global(from)), "n"(BYTES), "r"(valid ? BYTES : 0)
                 : "memory");
}

// End the group of this thread's copies since the last one.
__device__ __forceinline__ void cp_async_commit() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}

// Wait until all but this thread's newest PENDING groups have arrived. Other threads see them after
// a barrier.
template <int PENDING> __device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// 2^x by the special function unit: relative error below 2^-22, results below 2^-126 are 0.
__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// -- Thread-block clusters (compute capability 9.0 and later) ------------------------------------

// This block's place in its cluster.
__device__ __forceinline__ unsigned int cluster_rank() {
    unsigned int rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// A barrier of all threads of the cluster in two halves: what a thread wrote before it arrived is
// seen by every thread that has waited.
__device__ __forceinline__ void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// The two floats at `p`, an 8-byte aligned shared variable, of block `rank` of the cluster.
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

// -- Time ----------------------------------------------------------------------------------------

// Nanoseconds since some time in the past, the same for the whole GPU.
__device__ __forceinline__ unsigned long long global_time() {
    unsigned long long ns;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns)::"memory");
    return ns;
}

// -- Registers -----------------------------------------------------------------------------------

// Makes the compiler forget what it derived from x, so that it unpacks x again where it is used next
// and does not keep the unpacked elements in registers meanwhile.
__device__ __forceinline__ void forget(uint4& x) {
    asm volatile("" : "+r"(x.x), "+r"(x.y), "+r"(x.z), "+r"(x.w));
}
__device__ __forceinline__ void forget(uint2& x) { asm volatile("" : "+r"(x.x), "+r"(x.y)); }
__device__ __forceinline__ void forget(int& x) { asm volatile("" : "+r"(x)); }
