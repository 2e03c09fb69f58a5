// matmul_fused.cu -- llmq's own products, each fused with the operation that follows, in one
// launch.
//
//   x = alpha * scale_a * scale_b * (a @ b^T) + h @ tail^T        then epilogue(x)
//
// ENTRY is the kernel's name. ENTRY.cuh describes the result and defines `Epilogue`; `Product`,
// which shares out tiles among warps (pingpong_sm90.cuh, cooperative_sm90.cuh); PARAMETERS of the
// kernel beside the operands; and ARGUMENTS of an Epilogue. product_sm90.cuh has the order of tiles
// and the main loop.
//
// Data     declared in llmq/ops/product/matmul_fused.py. B_K_OUTSIDE = 1: b is (K, N);
//          TAIL_K_OUTSIDE = 1: tail is (R, N). RANK: R rounded up to 16; 0: no tail. Products of
//          fp8 codes are added as the tensor cores do ("fast accumulation"), with the bits of
//          cuBLASLt. alpha: read with HAS_ALPHA = 1.
// Launch   an even number of blocks of Product::THREADS threads, at most the number of
//          multiprocessors and of tiles; dynamic shared memory for RING_STAGES pairs of tiles, the
//          epilogue, and barriers (ops/product/matmul_fused.py). TILE_WIDTH: columns of a tile.
// Cost     2 M N (K + R) FLOPs. A cluster reads 256 rows of a and TILE_WIDTH of b for each of its tiles.
// Needs    compute capability 9.0; rows of all matrices that are multiples of 16 bytes.
// Source   PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions", "Tensor copies", "mbarrier".
#include "common.cuh"

constexpr int TILE_COLUMNS = TILE_WIDTH;
#include "product/cooperative_sm90.cuh"
#define OPERAND(X) const __grid_constant__ TensorMap

using Mainloop = Sm90Mainloop<A, B, B_K_OUTSIDE, RANK, TAIL_K_OUTSIDE, RING_STAGES>;
#include "product/ENTRY.cuh"

#ifndef WORK  // default: all rows have the same matrix
#define WORK M, N, Product::WIDTH, K * (int)sizeof(A)
#endif

extern "C" __global__ void __cluster_dims__(2, 1, 1)
__launch_bounds__(Product::THREADS, 1)
ENTRY(OPERAND(A) a, OPERAND(B) b, OPERAND(bf16) h, OPERAND(bf16) tail, const f32* scale_a,
      const f32* scale_b, i32 M, i32 N, i32 K, f32 alpha, PARAMETERS) {
    extern __shared__ unsigned char dynamic[];
    const Product product(dynamic, K);
    if (threadIdx.x == 0) { product.init(); }
    cluster_arrive();
    cluster_wait();
    Epilogue epilogue{ARGUMENTS};
    product.run(Work(WORK), Operands{&a, &b, &h, &tail, scale_a, scale_b, alpha, N}, epilogue);
    cluster_arrive();
    cluster_wait();  // a block may not end while the other one still arrives at its barriers
}
