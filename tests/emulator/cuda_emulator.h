// cuda_emulator.h -- run a CUDA C kernel on the CPU: one fiber per CUDA thread, block after block.
//
// A kernel file is compiled by g++ after this header (tests/emulator/device.py writes the program), and
// linked with cuda_emulator.cpp, which is compiled once: whatever depends on no kernel belongs there.
// Threads of a block run one at a time and give way only at barriers and warp operations, lowest
// lane first in even blocks, highest first in odd ones, so that a missing barrier shows up as poison or as
// a wrong result in one of the two. Shared memory is 0xFF (NaN) at the start of every block.
// A barrier that some thread never reaches ends the launch with a message.
//
// For writers of emulator/ptx.cuh (C++ versions of the functions in llmq/cu/ptx.cuh):
//   emulator::lane(), emulator::warp()            the running thread's place
//   emulator::warp_exchange<Out>(mask, in, fn)    every lane of mask hands in `in` (any type) and gets its
//                                                 Out; fn(const In* const* in, Out* const* out) runs once, when
//                                                 all have arrived, with arrays of 32 pointers by lane (null
//                                                 outside mask). Enough for mma, ldmatrix, votes, shuffles.
//   emulator::barrier_sync(id, count)             named barrier 1..15 of `count` threads (bar.sync id, count)
//   emulator::barrier_arrive(id, count)           bar.arrive
//   emulator::give_way()                          let other threads run; for polling loops (mbarrier try_wait)
//   emulator::check(condition, "message")         end the launch with this message unless condition
//   emulator::block_rank(), cluster_size()        %cluster_ctarank, %cluster_nctarank (kernels with
//                                                 __cluster_dims__(n); only the x dimension)
//   emulator::cluster_sync()                      barrier.cluster arrive + wait
//   emulator::map_shared(pointer, rank)           mapa: the same shared variable in another block of
//                                                 the cluster, for loads and stores by the running thread
//                                                 until its next barrier or warp operation
// Asynchronous copies may simply copy at once; commit and wait are then no-ops.
// __cvta_generic_to_shared returns the full 64-bit address: keep it in size_t, not unsigned.
#pragma once
#include <math.h>
#include <stdint.h>
#include <time.h>

#include <algorithm>
#include <cassert>
#include <climits>
#include <cmath>
#include <cstring>
#include <type_traits>
#include <utility>
#include <vector>

#include <cuda_bf16.h>
#include <cuda_fp8.h>
#include <vector_functions.h>

#ifndef __x86_64__
#include <ucontext.h>
#endif

namespace emulator {

constexpr int WARP = 32, MAX_THREADS = 1024, MAX_CLUSTER = 16, NAMED_BARRIERS = 16;
constexpr size_t MAX_DYNAMIC = 228 << 10;
constexpr unsigned char POISON = 0xFF;

// -- state of the running launch -----------------------------------------------------------------

#ifdef __x86_64__
using Context = void*;  // stack pointer; what a call must preserve lies on the stack
#else
using Context = ucontext_t;
#endif

struct Barrier {
    unsigned arrived = 0;           // threads, arrivals without waiting included
    unsigned waiting[MAX_THREADS / WARP] = {};  // lanes, by warp
    int value[2] = {};              // reductions: __syncthreads_count / _and / _or
    int result[2] = {};
};

struct Warp {
    unsigned ready = 0, exited = 0, exists = 0;  // lanes
    unsigned mask[WARP] = {};                    // what each waiting lane waits for
    unsigned arrived[WARP] = {};                 // lanes that wait with lane i's mask, at the mask's lowest lane
    const void* in[WARP] = {};
    void* out[WARP] = {};
};

struct Thread {
    uint3 index;
    unsigned lane, warp;
    Context context;
    const char* waits_for;  // null: can run
};

struct Block {
    uint3 index;
    unsigned rank;
    bool reversed;  // highest lane first
    unsigned threads, exited;
    std::vector<Thread> thread;
    std::vector<Warp> warp;
    Barrier barrier[NAMED_BARRIERS];
    unsigned at_cluster_barrier;
    std::vector<char> saved_static, saved_dynamic;  // its shared memory while another block runs
};

extern Thread* current;
extern Block* block;
extern std::vector<Block> cluster;
extern dim3 grid_dim, block_dim;
alignas(1024) extern char dynamic_shared[MAX_DYNAMIC + 64];

static inline unsigned lane() { return current->lane; }
static inline unsigned warp() { return current->warp; }
static inline unsigned block_rank() { return block->rank; }
static inline unsigned cluster_size() { return (unsigned)cluster.size(); }

[[noreturn]] void fail(const char* message);
static inline void check(bool condition, const char* message) {
    if (!condition) { fail(message); }
}

// Leave the running thread until something makes it ready and its turn comes. what: see describe_deadlock.
void wait_for(const char* what);
void give_way();  // let other threads run; the running one stays ready
void give_way_to(unsigned thread);

// Whoever waits by wait_for("a barrier in shared memory") is woken by this.
static inline void wake(unsigned rank, unsigned thread) {
    cluster[rank].warp[thread / WARP].ready |= 1u << thread % WARP;
}

// -- barriers ------------------------------------------------------------------------------------

void barrier_sync(unsigned id, unsigned count);
void barrier_arrive(unsigned id, unsigned count);
void sync_threads();
const int* sync_threads_sum(int a, int b);  // the sums of `a` and `b` over the block

// -- operations of a warp ------------------------------------------------------------------------

// What the lanes of a warp operation hand in and get; null for lanes that take no part.
struct Exchange {
    unsigned mask;
    const void* in[WARP];
    void* out[WARP];
};

// Whether the running thread is the last of the operation's: it fills `all`, combines, and calls
// end_exchange. The others return when that is done.
bool begin_exchange(unsigned mask, const void* in, void* out, Exchange& all);
void end_exchange(const Exchange& all);

template <class Out, class In, class Combine>
static inline Out warp_exchange(unsigned mask, const In& in, Combine combine) {
    Out out;
    Exchange all;
    if (begin_exchange(mask, &in, &out, all)) {
        combine(reinterpret_cast<const In* const*>(all.in), reinterpret_cast<Out* const*>(all.out));
        end_exchange(all);
    }
    return out;
}

template <class T> struct ShuffleIn {
    T value;
    unsigned source;
};

template <class T> static inline T shuffle(unsigned mask, T value, unsigned source) {
    static_assert(sizeof(T) <= 8, "shuffles move 4 or 8 bytes");
    const ShuffleIn<T> in{value, source};
    return warp_exchange<T>(mask, in, [](const ShuffleIn<T>* const* ins, T* const* outs) {
        for (int i = 0; i < WARP; ++i) {
            if (!ins[i]) { continue; }
            const ShuffleIn<T>* from = ins[ins[i]->source];
            if (from) {
                *outs[i] = from->value;
            } else {
                std::memset((void*)outs[i], POISON, sizeof(T));  // undefined: the source takes no part
            }
        }
    });
}

unsigned ballot(unsigned mask, bool predicate);

// `fold(a, b)` over the lanes of mask, lowest first; every lane gets the result.
template <class T, class Fold> static inline T reduce(unsigned mask, T value, Fold fold) {
    return warp_exchange<T>(mask, value, [fold](const T* const* ins, T* const* outs) {
        bool any = false;
        T total{};
        for (int i = 0; i < WARP; ++i) {
            if (!ins[i]) { continue; }
            total = any ? fold(total, *ins[i]) : *ins[i];
            any = true;
        }
        for (int i = 0; i < WARP; ++i) {
            if (outs[i]) { *outs[i] = total; }
        }
    });
}

static inline unsigned existing(unsigned mask) { return mask & block->warp[current->warp].exists; }

// -- shared memory and clusters ------------------------------------------------------------------

void cluster_sync();
void* address_in_block(void* shared, unsigned rank);
template <class T> static inline T* map_shared(T* pointer, unsigned rank) {
    return (T*)address_in_block((void*)pointer, rank);
}

// -- launching -----------------------------------------------------------------------------------

// The fibers' stacks, which all kernels' programs share; zero before the first launch.
struct Stacks {
    char* memory;
    size_t count;  // of those that can be used
};

// geometry: grid x y z, block x y z, cluster size. Returns null, or what went wrong.
const char* launch(const unsigned* geometry, size_t dynamic, void (*call)(void**), void** args, Stacks& stacks);

template <class... P, size_t... I>
static inline void call_with(void (*kernel)(P...), void** args, std::index_sequence<I...>) {
    kernel(*static_cast<std::remove_cv_t<P>*>(args[I])...);
}

template <class... P> static inline void call_with(void (*kernel)(P...), void** args) {
    call_with(kernel, args, std::index_sequence_for<P...>());
}

// args: a pointer to each argument's value, as cuLaunchKernel takes them.
template <auto kernel> static void call(void** args) { call_with(kernel, args); }

// -- a kernel's parameters in words, to be compared with its Python declaration --------------------

struct Parameter {
    const char* kind;
    int bits;  // of the element
    bool pointer, constant;
};

template <class P> static constexpr Parameter parameter() {
    using E = std::remove_pointer_t<P>;
    using T = std::remove_cv_t<E>;
    const char* kind = std::is_same_v<T, __nv_bfloat16> ? "bfloat"
                       : std::is_floating_point_v<T>    ? "float"
                       : std::is_integral_v<T>          ? "int"
                                                        : "struct";
    return {kind, 8 * (int)sizeof(T), std::is_pointer_v<P>, std::is_pointer_v<P> && std::is_const_v<E>};
}

const char* describe(const Parameter* parameters, int count);

template <class... P> static inline const char* describe(void (*)(P...)) {
    static constexpr Parameter parameters[] = {parameter<std::remove_cv_t<P>>()...};
    return describe(parameters, sizeof...(P));
}

}  // namespace emulator

// -- the language's built-in names ---------------------------------------------------------------

#undef __shared__
#undef __constant__
#undef __noinline__
#define __shared__ static __attribute__((section("emulator_shared")))
#define __constant__ static const
#define __noinline__ __attribute__((noinline))
#define threadIdx (static_cast<const uint3&>(emulator::current->index))
#define blockIdx (static_cast<const uint3&>(emulator::block->index))
#define blockDim (static_cast<const dim3&>(emulator::block_dim))
#define gridDim (static_cast<const dim3&>(emulator::grid_dim))
#define warpSize 32

static inline void __syncthreads() { emulator::sync_threads(); }
static inline int __syncthreads_count(int p) { return emulator::sync_threads_sum(p != 0, 0)[0]; }
static inline int __syncthreads_or(int p) { return __syncthreads_count(p) != 0; }
static inline int __syncthreads_and(int p) { return emulator::sync_threads_sum(0, p == 0)[1] == 0; }
static inline unsigned __ballot_sync(unsigned mask, int p) { return emulator::ballot(mask, p != 0); }
static inline void __syncwarp(unsigned mask = ~0u) { emulator::ballot(mask, true); }
static inline int __any_sync(unsigned mask, int p) { return __ballot_sync(mask, p) != 0; }
static inline int __all_sync(unsigned mask, int p) { return __ballot_sync(mask, p) == emulator::existing(mask); }
static inline unsigned __activemask() { return emulator::block->warp[emulator::warp()].exists; }

template <class T> static inline T __shfl_sync(unsigned mask, T x, int source, int width = 32) {
    const int base = emulator::lane() & ~(width - 1);
    return emulator::shuffle(mask, x, base + (source & (width - 1)));
}
template <class T> static inline T __shfl_xor_sync(unsigned mask, T x, int bits, int width = 32) {
    const int me = emulator::lane(), source = me ^ bits, end = (me & ~(width - 1)) + width;
    return emulator::shuffle(mask, x, source < end ? source : me);
}
template <class T> static inline T __shfl_down_sync(unsigned mask, T x, unsigned delta, int width = 32) {
    const unsigned me = emulator::lane(), end = (me & ~(width - 1)) + width;
    return emulator::shuffle(mask, x, me + delta < end ? me + delta : me);
}
template <class T> static inline T __shfl_up_sync(unsigned mask, T x, unsigned delta, int width = 32) {
    const unsigned me = emulator::lane(), start = me & ~(width - 1);
    return emulator::shuffle(mask, x, me >= start + delta ? me - delta : me);
}
template <class T> static inline unsigned __match_any_sync(unsigned mask, T x) {
    return emulator::warp_exchange<unsigned>(mask, x, [](const T* const* ins, unsigned* const* outs) {
        for (int i = 0; i < 32; ++i) {
            if (!ins[i]) { continue; }
            *outs[i] = 0;
            for (int j = 0; j < 32; ++j) { *outs[i] |= (ins[j] && *ins[j] == *ins[i]) ? 1u << j : 0; }
        }
    });
}
template <class T> static inline T __reduce_add_sync(unsigned mask, T x) {
    return emulator::reduce(mask, x, [](T a, T b) { return a + b; });
}
template <class T> static inline T __reduce_max_sync(unsigned mask, T x) {
    return emulator::reduce(mask, x, [](T a, T b) { return a > b ? a : b; });
}
template <class T> static inline T __reduce_min_sync(unsigned mask, T x) {
    return emulator::reduce(mask, x, [](T a, T b) { return a < b ? a : b; });
}
static inline unsigned __reduce_or_sync(unsigned mask, unsigned x) {
    return emulator::reduce(mask, x, [](unsigned a, unsigned b) { return a | b; });
}
static inline unsigned __reduce_and_sync(unsigned mask, unsigned x) {
    return emulator::reduce(mask, x, [](unsigned a, unsigned b) { return a & b; });
}

static inline void __threadfence() {}
static inline void __threadfence_block() {}
static inline void __threadfence_system() {}
static inline void __nanosleep(unsigned) { emulator::give_way(); }
[[noreturn]] static inline void __trap() { emulator::fail("the kernel called __trap"); }
static inline size_t __cvta_generic_to_shared(const void* p) { return (size_t)p; }

// The second argument's type never decides: atomicAdd(float*, 1) adds a float.
template <class T> using Same = std::type_identity_t<T>;
template <class T, class F> static inline T emulator_atomic(T* p, F f) {
    const T old = *p;
    *p = f(old);
    return old;
}
template <class T> static inline T atomicAdd(T* p, Same<T> x) { return emulator_atomic(p, [x](T a) { return T(a + x); }); }
template <class T> static inline T atomicSub(T* p, Same<T> x) { return emulator_atomic(p, [x](T a) { return T(a - x); }); }
template <class T> static inline T atomicMax(T* p, Same<T> x) { return emulator_atomic(p, [x](T a) { return a > x ? a : x; }); }
template <class T> static inline T atomicMin(T* p, Same<T> x) { return emulator_atomic(p, [x](T a) { return a < x ? a : x; }); }
template <class T> static inline T atomicOr(T* p, Same<T> x) { return emulator_atomic(p, [x](T a) { return a | x; }); }
template <class T> static inline T atomicAnd(T* p, Same<T> x) { return emulator_atomic(p, [x](T a) { return a & x; }); }
template <class T> static inline T atomicXor(T* p, Same<T> x) { return emulator_atomic(p, [x](T a) { return a ^ x; }); }
template <class T> static inline T atomicExch(T* p, Same<T> x) { return emulator_atomic(p, [x](T) { return x; }); }
template <class T> static inline T atomicCAS(T* p, Same<T> expected, Same<T> x) {
    return emulator_atomic(p, [=](T a) { return a == expected ? x : a; });
}
static inline unsigned atomicInc(unsigned* p, unsigned last) {
    return emulator_atomic(p, [last](unsigned a) { return a >= last ? 0 : a + 1; });
}

template <class T> static inline T __ldg(const T* p) { return *p; }
template <class T> static inline T __ldcs(const T* p) { return *p; }
template <class T> static inline T __ldcg(const T* p) { return *p; }
template <class T> static inline T __ldca(const T* p) { return *p; }
template <class T> static inline T __ldlu(const T* p) { return *p; }
template <class T> static inline T __ldcv(const T* p) { return *p; }
template <class T> static inline void __stcs(T* p, Same<T> x) { *p = x; }
template <class T> static inline void __stcg(T* p, Same<T> x) { *p = x; }
template <class T> static inline void __stwb(T* p, Same<T> x) { *p = x; }
template <class T> static inline void __stwt(T* p, Same<T> x) { *p = x; }

// -- arithmetic ----------------------------------------------------------------------------------

template <class A, class B> static inline std::common_type_t<A, B> max(A a, B b) {
    using T = std::common_type_t<A, B>;
    if constexpr (std::is_floating_point_v<T>) { return std::fmax(T(a), T(b)); } else { return T(a) > T(b) ? T(a) : T(b); }
}
template <class A, class B> static inline std::common_type_t<A, B> min(A a, B b) {
    using T = std::common_type_t<A, B>;
    if constexpr (std::is_floating_point_v<T>) { return std::fmin(T(a), T(b)); } else { return T(a) < T(b) ? T(a) : T(b); }
}

template <class To, class From> static inline To emulator_bits(From x) {
    static_assert(sizeof(To) == sizeof(From));
    To y;
    std::memcpy(&y, &x, sizeof y);
    return y;
}
static inline int __float_as_int(float x) { return emulator_bits<int>(x); }
static inline unsigned __float_as_uint(float x) { return emulator_bits<unsigned>(x); }
static inline float __int_as_float(int x) { return emulator_bits<float>(x); }
static inline float __uint_as_float(unsigned x) { return emulator_bits<float>(x); }
static inline long long __double_as_longlong(double x) { return emulator_bits<long long>(x); }
static inline double __longlong_as_double(long long x) { return emulator_bits<double>(x); }

static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
static inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
static inline int __clzll(long long x) { return x ? __builtin_clzll(x) : 64; }
static inline int __ffs(int x) { return __builtin_ffs(x); }
static inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((uint64_t)a * b >> 32); }
static inline int __mulhi(int a, int b) { return (int)((int64_t)a * b >> 32); }
static inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return (unsigned long long)((unsigned __int128)a * b >> 64);
}
static inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    const uint64_t bytes = (uint64_t)b << 32 | a;
    unsigned out = 0;
    for (int i = 0; i < 4; ++i) { out |= (unsigned)(bytes >> (selector >> 4 * i & 7) * 8 & 0xFF) << 8 * i; }
    return out;
}
static inline unsigned __vmaxu2(unsigned a, unsigned b) {
    return max(a & 0xFFFFu, b & 0xFFFFu) | max(a & 0xFFFF0000u, b & 0xFFFF0000u);
}
static inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned n) {
    return (unsigned)(((uint64_t)high << 32 | low) << (n & 31) >> 32);
}
static inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned n) {
    return (unsigned)(((uint64_t)high << 32 | low) >> (n & 31));
}

static inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
static inline double rsqrt(double x) { return 1.0 / sqrt(x); }
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fsub_rn(float a, float b) { return a - b; }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
static inline float __fsqrt_rn(float x) { return sqrtf(x); }
static inline float __frcp_rn(float x) { return 1.0f / x; }
static inline float __frsqrt_rn(float x) { return 1.0f / sqrtf(x); }
static inline double __dadd_rn(double a, double b) { return a + b; }
static inline double __dmul_rn(double a, double b) { return a * b; }
static inline float __fdividef(float a, float b) { return a / b; }
// glibc declares functions of these names.
#define __expf(x) expf(x)
#define __exp10f(x) powf(10.0f, x)
#define __logf(x) logf(x)
#define __log2f(x) log2f(x)
#define __powf(x, y) powf(x, y)
#define __sinf(x) sinf(x)
#define __cosf(x) cosf(x)
#define __tanhf(x) tanhf(x)
static inline float __saturatef(float x) { return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f; }
static inline float cospif(float x) { return (float)cos(M_PI * x); }
static inline float sinpif(float x) { return (float)sin(M_PI * x); }
static inline void sincospif(float x, float* s, float* c) { *s = sinpif(x), *c = cospif(x); }
static inline int __float2int_rn(float x) { return (int)nearbyintf(x); }
static inline int __float2int_rz(float x) { return (int)x; }
static inline int __float2int_rd(float x) { return (int)floorf(x); }
static inline int __float2int_ru(float x) { return (int)ceilf(x); }
static inline unsigned __float2uint_rn(float x) { return (unsigned)nearbyintf(x); }
static inline unsigned __float2uint_rz(float x) { return (unsigned)x; }
static inline float __int2float_rn(int x) { return (float)x; }
static inline float __uint2float_rn(unsigned x) { return (float)x; }
static inline long long __float2ll_rn(float x) { return std::llrint(x); }
static inline float __ull2float_rn(unsigned long long x) { return (float)x; }
static inline float __double2float_rn(double x) { return (float)x; }

// bf16 functions that NVIDIA's header declares for the GPU only. Rounded once, as there.
static inline __nv_bfloat16 __hfma(__nv_bfloat16 a, __nv_bfloat16 b, __nv_bfloat16 c) {
    return __double2bfloat16((double)__bfloat162float(a) * __bfloat162float(b) + __bfloat162float(c));
}
static inline __nv_bfloat162 __hfma2(__nv_bfloat162 a, __nv_bfloat162 b, __nv_bfloat162 c) {
    return __nv_bfloat162(__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y));
}

#include "ptx.h"

// One entry point, as tests/emulator/device.py finds it.
#define EMULATOR_ENTRY(kernel)                                                                     \
    extern "C" __attribute__((visibility("default"))) const char* launch_##kernel(                 \
        const unsigned* geometry_, size_t dynamic_, void** args_, emulator::Stacks* stacks_) {     \
        return emulator::launch(geometry_, dynamic_, emulator::call<::kernel>, args_, *stacks_);   \
    }                                                                                              \
    extern "C" __attribute__((visibility("default"))) const char* parameters_##kernel() {          \
        return emulator::describe(::kernel);                                                       \
    }
