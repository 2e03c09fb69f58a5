// bytes.cuh -- exact conversion of one-byte codes to BF16: E4M3 (without NaN) and I8.
#pragma once
#include "common.cuh"
#include "ptx.cuh"

// BF16 numbers of bytes 2 i and 2 i + 1 of a word. E4M3: the code's bits, shifted, are the BF16
// bits of 2^-120 times the number.
__device__ __forceinline__ u32 pair_of(__nv_fp8_e4m3, u32 word, int i) {
    const u32 high = __byte_perm(word, 0, i ? 0x3424 : 0x1404);
    return fma_pair((high & 0x80008000u) | (high >> 4 & 0x07F007F0u), 0x7B807B80u, 0x80008000u);
}
// I8: 128 plus the lower seven bits, minus 128, or 256 if the sign bit is set.
__device__ __forceinline__ u32 pair_of(i8, u32 word, int i) {
    const u32 low = __byte_perm(word, 0, i ? 0x4342 : 0x4140);
    return fma_pair((low & 0x007F007Fu) | 0x43004300u, 0x3F803F80u, (low & 0x00800080u) | 0xC300C300u);
}
