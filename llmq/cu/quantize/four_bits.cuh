// four_bits.cuh -- the values of 4-bit codes. NF4: a block of elements shares a scale, and a group
// of scales shares a scale. MXFP4: a block of elements shares a power of two.
#pragma once

constexpr int BLOCK = 64, GROUP = 256;  // NF4_BLOCK, NF4_GROUP in llmq/ref/common.py

// The levels of NF4, equal to NF4_LEVELS in llmq/ref/common.py.
__device__ __constant__ float LEVELS[16] = {
    -1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f,
    -0.28444138169288635f, -0.18477343022823334f, -0.09105003625154495f, 0.0f,
    0.07958029955625534f, 0.16093020141124725f, 0.24611230194568634f, 0.33791524171829224f,
    0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f};

// 2^(exponent - 127), which is subnormal for exponent 0.
__device__ __forceinline__ float power_of(u32 exponent) {
    return __uint_as_float(exponent ? exponent << 23 : 0x00400000u);
}

__device__ __forceinline__ float level_of(u32 code) {
    const u32 m = code & 7;
    const float size = m < 2 ? 0.5f * m : 0.25f * ((2 + (m & 1)) << (m >> 1));
    return code & 8 ? -size : size;
}
