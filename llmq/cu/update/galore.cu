// galore.cu -- GaLore's kernels beside its products: eigenvectors of small symmetric matrices, and
// the replacement of a projection.
//
//   eigen   rows of s = eigenvectors of s by falling eigenvalues; with `roots` each eigenvector is
//           divided by the root of its eigenvalue, which is raised to at least 2^-40 of the largest
//           eigenvalue; zeros if s is zero
//   renew   projection = x, unless skip_update is set
//
// Data     s, v: F32, square matrices of `side` rows, one after another; s symmetric, v scratch.
//          projection D: F32 or BF16, x F32, n elements.
// Launch   eigen: 1024 threads, a block for each matrix, 8 * (side + 1) bytes of shared memory.
//          renew: 256 threads, one for each element.
// Cost     eigen: Jacobi's rotations, at most 12 sweeps of side^2 / 2 rotations. Each round of
//          side / 2 rotations reads and writes 3 * side^2 numbers; a matrix of 136 rows takes
//          milliseconds, of 1,032 rows seconds; each multiprocessor works on one matrix at a time.
// Needs    skip_update final on the same stream. The result of a matrix with NaN is undefined.
#include "common.cuh"

constexpr int SWEEPS = 12;
constexpr float NEGLIGIBLE = 0x1p-21f;  // ratio of an element to the geometric mean of the diagonal
constexpr float LEAST = 0x1p-40f;       // least ratio of an eigenvalue to the largest eigenvalue

// Pair i of a round. A round puts every number below `even` into one pair; over even - 1 rounds
// each two numbers meet once.
__device__ __forceinline__ int2 pair_of(int round, int i, int even) {
    const int turn = even - 1;
    const int p = i == 0 ? turn : (round + i) % turn, q = (round + turn - i) % turn;
    return make_int2(min(p, q), max(p, q));
}

extern "C" __global__ void __launch_bounds__(1024)
galore_eigen(f32* __restrict__ s, f32* __restrict__ v, i32 roots, i32 side) {
    extern __shared__ float shared[];
    const int even = side + side % 2, pairs = even / 2;
    float* const cosines = shared;  // one for each pair of a round; later the eigenvalues
    float* const sines = shared + pairs;
    int* const order = reinterpret_cast<int*>(shared + even);
    s += (i64)blockIdx.x * side * side, v += (i64)blockIdx.x * side * side;
    for (int i = threadIdx.x; i < side * side; i += blockDim.x) { v[i] = i % (side + 1) == 0; }
    for (int sweep = 0; sweep < SWEEPS; ++sweep) {
        int rotated = 0;
        for (int round = 0; round < even - 1; ++round) {
            __syncthreads();
            for (int i = threadIdx.x; i < pairs; i += blockDim.x) {
                const int2 at = pair_of(round, i, even);
                float cosine = 1.0f, sine = 0.0f;
                if (at.y < side) {
                    const float a = s[at.x * side + at.x], d = s[at.y * side + at.y];
                    const float b = s[at.x * side + at.y];
                    if (fabsf(b) > NEGLIGIBLE * sqrtf(fabsf(a)) * sqrtf(fabsf(d))) {
                        const float half = (d - a) / (2.0f * b);
                        const float root = fabsf(half) + sqrtf(1.0f + half * half);
                        const float tangent = copysignf(1.0f / root, half);
                        cosine = rsqrtf(1.0f + tangent * tangent);
                        sine = tangent * cosine;
                        rotated = 1;
                    }
                }
                cosines[i] = cosine, sines[i] = sine;
            }
            __syncthreads();
            for (int k = threadIdx.x; k < pairs * side; k += blockDim.x) {  // rows of s and v
                const int i = k / side, j = k % side;
                const int2 at = pair_of(round, i, even);
                const float c = cosines[i], t = sines[i];
                if (t == 0.0f) { continue; }
                float* const first = s + at.x * side + j, * const second = s + at.y * side + j;
                const float x = *first, y = *second;
                *first = c * x - t * y, *second = t * x + c * y;
                float* const left = v + at.x * side + j, * const right = v + at.y * side + j;
                const float l = *left, r = *right;
                *left = c * l - t * r, *right = t * l + c * r;
            }
            __syncthreads();
            for (int k = threadIdx.x; k < pairs * side; k += blockDim.x) {  // columns of s
                const int i = k % pairs, j = k / pairs;
                const int2 at = pair_of(round, i, even);
                const float c = cosines[i], t = sines[i];
                if (t == 0.0f) { continue; }
                float* const row = s + j * side;
                const float x = row[at.x], y = row[at.y];
                row[at.x] = c * x - t * y, row[at.y] = t * x + c * y;
            }
        }
        if (!__syncthreads_or(rotated)) { break; }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < side; i += blockDim.x) {
        shared[i] = s[i * side + i];
        order[i] = i;  // this order stays if eigenvalues are NaN, which compare false
    }
    __syncthreads();
    float largest = 0.0f;
    for (int i = 0; i < side; ++i) { largest = fmaxf(largest, shared[i]); }
    for (int i = threadIdx.x; i < side; i += blockDim.x) {
        int before = 0;
        for (int j = 0; j < side; ++j) {
            before += shared[j] > shared[i] || (shared[j] == shared[i] && j < i);
        }
        order[before] = i;
    }
    __syncthreads();
    for (int k = threadIdx.x; k < side * side; k += blockDim.x) {
        const int from = order[k / side];
        float factor = 1.0f;
        if (roots) {
            factor = largest > 0.0f ? rsqrtf(fmaxf(shared[from], LEAST * largest)) : 0.0f;
        }
        s[k] = v[from * side + k % side] * factor;
    }
}

extern "C" __global__ void __launch_bounds__(256)
galore_renew(D* __restrict__ projection, const f32* __restrict__ x,
             const StepScalars* __restrict__ scalars, i64 n) {
    const i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n && !scalars->skip_update) { projection[i] = from_f32<D>(x[i]); }
}
