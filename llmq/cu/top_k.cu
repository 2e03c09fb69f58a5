// top_k.cu -- the largest logits of each row, by which a teacher is read.
//
//   told[:k] = the columns v < vocab of the k largest x[v], ascending; of equal ones the first
//   told[k:] = x of these - lse
//
// Data     logits: T (rows, padded_vocab), columns >= vocab are ignored. lse: F32 (rows). told: F32
//          (rows, 2 k), of which columns are the bits of I32.
// Launch   one block of 1024 threads for each row.
// Cost     a row is read 33 times, mostly from the cache: the k-th largest is found bit by bit.
// Needs    k <= vocab. NaN counts as the largest or the smallest.
// Same name  llmq/ops/top_k.py  llmq/ref/top_k.py  tests/ops/test_top_k.py
#include "common.cuh"

constexpr int THREADS = 1024;

// Unsigned numbers in the order of floats.
__device__ __forceinline__ u32 key(T x) {
    const u32 bits = __float_as_uint(to_f32(x));
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

extern "C" __global__ void __launch_bounds__(THREADS)
top_k(f32* __restrict__ told, const T* __restrict__ logits, const f32* __restrict__ lse, i64 rows,
      i32 vocab, i32 padded_vocab, i32 k) {
    __shared__ int shared[32], greater[THREADS], equal[THREADS];
    const T* const row = logits + blockIdx.x * (i64)padded_vocab;
    const int t = threadIdx.x;
    u32 low = 0, high = 0xFFFFFFFFu;  // at least k are not below low, fewer not below high
    while (high - low > 1) {
        const u32 middle = low + (high - low) / 2;
        int count = 0;
        for (int v = t; v < vocab; v += THREADS) { count += key(row[v]) >= middle; }
        (block_sum(count, shared) >= k ? low : high) = middle;
    }
    // Each thread has neighbouring columns, so that theirs follow those of the threads before.
    const int each = (vocab + THREADS - 1) / THREADS, first = t * each;
    const int last = min(first + each, vocab);
    int own_greater = 0, own_equal = 0;
    for (int v = first; v < last; ++v) {
        const u32 x = key(row[v]);
        own_greater += x > low;
        own_equal += x == low;
    }
    greater[t] = own_greater;
    equal[t] = own_equal;
    __syncthreads();
    for (int step = 1; step < THREADS; step *= 2) {
        const int more = t >= step ? greater[t - step] : 0, same = t >= step ? equal[t - step] : 0;
        __syncthreads();
        greater[t] += more;
        equal[t] += same;
        __syncthreads();
    }
    const int room = k - greater[THREADS - 1];  // for those that are equal to the k-th
    int before = greater[t] - own_greater, alike = equal[t] - own_equal;
    for (int v = first; v < last; ++v) {
        const u32 x = key(row[v]);
        if (x > low || (x == low && alike < room)) {
            const i64 place = blockIdx.x * (i64)(2 * k) + before + min(alike, room);
            told[place] = __int_as_float(v);
            told[place + k] = to_f32(row[v]) - lse[blockIdx.x];
        }
        before += x > low;
        alike += x == low;
    }
}
