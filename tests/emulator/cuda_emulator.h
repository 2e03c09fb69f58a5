// cuda_emulator.h -- run a CUDA C kernel on the CPU: one fiber per CUDA thread, block after block.
//
// A kernel file is compiled by g++ after this header (tests/emulator/device.py writes the program).
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
#include <stdio.h>
#include <sys/mman.h>
#include <time.h>

#include <algorithm>
#include <cassert>
#include <climits>
#include <cmath>
#include <cstring>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <cuda_bf16.h>
#include <cuda_fp8.h>
#include <vector_functions.h>

#ifndef __x86_64__
#include <ucontext.h>
#endif

// Linker-made bounds of the section that holds every __shared__ variable.
extern "C" {
extern char __start_emulator_shared[] __attribute__((weak, visibility("hidden")));
extern char __stop_emulator_shared[] __attribute__((weak, visibility("hidden")));
}

namespace emulator {

constexpr int WARP = 32, MAX_THREADS = 1024, MAX_CLUSTER = 16, NAMED_BARRIERS = 16;
constexpr size_t STACK_BYTES = 256 << 10, GUARD_BYTES = 4 << 10, MAX_DYNAMIC = 228 << 10;
constexpr unsigned char POISON = 0xFF, CANARY = 0xA5;

// -- switching between fibers --------------------------------------------------------------------

#ifdef __x86_64__
using Context = void*;  // stack pointer; what a call must preserve lies on the stack
extern "C" __attribute__((visibility("hidden"))) void emulator_switch(void** save, void* load);
asm(R"(
    .text
    .p2align 4
    .type emulator_switch, @function
emulator_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
    .size emulator_switch, . - emulator_switch
)");

static inline void switch_context(Context* save, Context* load) { emulator_switch(save, *load); }

static void make_context(Context* context, char* stack, void (*entry)()) {
    void** top = reinterpret_cast<void**>(stack + STACK_BYTES) - 8;  // 6 registers, entry, padding
    std::memset(top, 0, 64);
    top[6] = reinterpret_cast<void*>(entry);
    *context = top;
}
#else
using Context = ucontext_t;

static inline void switch_context(Context* save, Context* load) { swapcontext(save, load); }

static void make_context(Context* context, char* stack, void (*entry)()) {
    getcontext(context);
    context->uc_stack.ss_sp = stack;
    context->uc_stack.ss_size = STACK_BYTES;
    context->uc_link = nullptr;
    makecontext(context, entry, 0);
}
#endif

// -- state of the running launch -----------------------------------------------------------------

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
    bool at_cluster_barrier_all = false;
    unsigned at_cluster_barrier;
    std::vector<char> saved_static, saved_dynamic;  // its shared memory while another block runs
};

static Thread* current;
static Block* block;
static std::vector<Block> cluster;
static dim3 grid_dim, block_dim;
static Context main_context;
static const char* failure;
static char failure_text[400];
static size_t dynamic_bytes;
static unsigned long long idle_switches;
static void (*kernel_call)(void** args);
static void** kernel_args;
alignas(1024) static char dynamic_shared[MAX_DYNAMIC + 64];

static inline unsigned lane() { return current->lane; }
static inline unsigned warp() { return current->warp; }
static inline unsigned block_rank() { return block->rank; }
static inline unsigned cluster_size() { return (unsigned)cluster.size(); }

[[noreturn]] static void stop() {
    Context dead;
    switch_context(&dead, &main_context);
    __builtin_unreachable();
}

[[noreturn]] static void fail(const char* message) {
    snprintf(failure_text, sizeof failure_text, "%s (block %u,%u,%u thread %u,%u,%u)", message, block->index.x,
             block->index.y, block->index.z, current->index.x, current->index.y, current->index.z);
    failure = failure_text;
    stop();
}

static inline void check(bool condition, const char* message) {
    if (!condition) { fail(message); }
}

// The next thread that can run, its own warp first; null when there is none.
static Thread* next_ready() {
    const unsigned warps = (unsigned)block->warp.size(), first = current ? current->warp : 0;
    for (unsigned i = 0; i < warps; ++i) {
        const unsigned w = block->reversed ? (first + warps - i) % warps : (first + i) % warps;
        const unsigned ready = block->warp[w].ready;
        if (ready) {
            const unsigned l = block->reversed ? 31 - __builtin_clz(ready) : __builtin_ctz(ready);
            return &block->thread[w * WARP + l];
        }
    }
    return nullptr;
}

// Leave the running thread; returns when something makes it ready and its turn comes.
static void switch_away() {
    Thread* me = current;
    Thread* next = next_ready();
    if (next == me) { return; }
    if (next == nullptr) {
        switch_context(&me->context, &main_context);  // the launch loop looks at the whole cluster
        return;
    }
    current = next;
    switch_context(&me->context, &next->context);
}

static inline void set_ready(unsigned w, unsigned lanes) { block->warp[w].ready |= lanes; }

// Whoever waits by wait_for("a barrier in shared memory") is woken by this.
static inline void wake(unsigned rank, unsigned thread) {
    cluster[rank].warp[thread / WARP].ready |= 1u << thread % WARP;
}

static inline void wait_for(const char* what) {
    block->warp[current->warp].ready &= ~(1u << current->lane);
    current->waits_for = what;
    switch_away();
    current->waits_for = nullptr;
}

// The next thread after the running one, in the order of their numbers, that can run.
static Thread* next_after_current() {
    const unsigned warps = (unsigned)block->warp.size();
    const unsigned above = current->lane == 31 ? 0 : ~0u << (current->lane + 1);
    for (unsigned i = 0; i <= warps; ++i) {
        const unsigned w = (current->warp + i) % warps;
        unsigned ready = block->warp[w].ready & (i == 0 ? above : i == warps ? ~above : ~0u);
        if (ready) { return &block->thread[w * WARP + __builtin_ctz(ready)]; }
    }
    return nullptr;
}

static inline void give_way() {
    check(++idle_switches < 20'000'000, "a thread polls for something that does not come");
    Thread *me = current, *next = next_after_current();
    if (next != me) {
        current = next;
        switch_context(&me->context, &next->context);
    } else if (cluster.size() > 1) {
        switch_context(&me->context, &main_context);
    }
}

// -- barriers ------------------------------------------------------------------------------------

static void open_barrier(Barrier& b) {
    for (unsigned w = 0; w < block->warp.size(); ++w) {
        set_ready(w, b.waiting[w]);
        b.waiting[w] = 0;
    }
    b.arrived = 0;
    b.result[0] = b.value[0];
    b.result[1] = b.value[1];
    b.value[0] = b.value[1] = 0;
}

static void barrier_wait(Barrier& b, unsigned count, const char* what) {
    if (++b.arrived == count) {
        open_barrier(b);
        return;
    }
    check(b.arrived < count, "more threads at a barrier than it counts");
    b.waiting[current->warp] |= 1u << current->lane;
    wait_for(what);
}

static inline void barrier_sync(unsigned id, unsigned count) {
    check(id > 0 && id < NAMED_BARRIERS, "named barriers are 1 to 15");
    check(count % WARP == 0, "a named barrier counts whole warps");
    barrier_wait(block->barrier[id], count, "a named barrier");
}

static inline void barrier_arrive(unsigned id, unsigned count) {
    check(id > 0 && id < NAMED_BARRIERS, "named barriers are 1 to 15");
    Barrier& b = block->barrier[id];
    if (++b.arrived == count) { open_barrier(b); }
}

static inline void sync_threads() {
    barrier_wait(block->barrier[0], block->threads - block->exited, "__syncthreads");
}

// Sums of `a` and `b` over the block.
static inline const int* sync_threads_sum(int a, int b) {
    Barrier& barrier = block->barrier[0];
    barrier.value[0] += a;
    barrier.value[1] += b;
    sync_threads();
    return barrier.result;
}

// -- operations of a warp ------------------------------------------------------------------------

template <class Out, class In, class Combine>
static inline Out warp_exchange(unsigned mask, const In& in, Combine combine) {
    Out out;
    Warp& w = block->warp[current->warp];
    const unsigned me = 1u << current->lane;
    mask &= w.exists;
    check(mask & me, "a warp operation whose mask leaves out the calling lane");
    check(!(mask & w.exited), "a warp operation whose mask names a thread that has returned");
    w.in[current->lane] = &in;
    w.out[current->lane] = &out;
    unsigned& arrived = w.arrived[__builtin_ctz(mask)];
    if (arrived == 0) { w.mask[__builtin_ctz(mask)] = mask; }
    check(w.mask[__builtin_ctz(mask)] == mask, "lanes of one warp operation disagree on its mask");
    arrived |= me;
    if (arrived != mask) {
        wait_for("a warp operation");
        return out;
    }
    arrived = 0;
    const In* ins[WARP];
    Out* outs[WARP];
    for (int i = 0; i < WARP; ++i) {
        const bool takes_part = mask >> i & 1;
        ins[i] = takes_part ? static_cast<const In*>(w.in[i]) : nullptr;
        outs[i] = takes_part ? static_cast<Out*>(w.out[i]) : nullptr;
    }
    combine(ins, outs);
    w.ready |= mask;
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

static inline unsigned ballot(unsigned mask, bool predicate) {
    return warp_exchange<unsigned>(mask, predicate, [](const bool* const* ins, unsigned* const* outs) {
        unsigned votes = 0;
        for (int i = 0; i < WARP; ++i) { votes |= (ins[i] && *ins[i]) ? 1u << i : 0; }
        for (int i = 0; i < WARP; ++i) {
            if (outs[i]) { *outs[i] = votes; }
        }
    });
}

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

static inline size_t static_bytes() { return __stop_emulator_shared - __start_emulator_shared; }

// Blocks of a cluster share one copy of each __shared__ variable: the running block's is in place,
// the others' are put aside.
static void put_aside(Block& b) {
    b.saved_static.assign(__start_emulator_shared, __stop_emulator_shared);
    b.saved_dynamic.assign(dynamic_shared, dynamic_shared + dynamic_bytes);
}

static void put_in_place(Block& b) {
    std::copy(b.saved_static.begin(), b.saved_static.end(), __start_emulator_shared);
    std::copy(b.saved_dynamic.begin(), b.saved_dynamic.end(), dynamic_shared);
}

static inline void cluster_sync() {
    ++block->at_cluster_barrier;
    wait_for("the cluster's barrier");
}

template <class T> static inline T* map_shared(T* pointer, unsigned rank) {
    check(rank < cluster.size(), "map_shared: no such block in the cluster");
    if (rank == block->rank) { return pointer; }
    char* address = (char*)pointer;
    const ptrdiff_t in_static = address - __start_emulator_shared, in_dynamic = address - dynamic_shared;
    if (in_static >= 0 && in_static < (ptrdiff_t)static_bytes()) {
        return (T*)(cluster[rank].saved_static.data() + in_static);
    }
    check(in_dynamic >= 0 && in_dynamic < (ptrdiff_t)dynamic_bytes, "map_shared: not a shared variable");
    return (T*)(cluster[rank].saved_dynamic.data() + in_dynamic);
}

// -- launching -----------------------------------------------------------------------------------

static void fiber_main() {
    kernel_call(kernel_args);
    Warp& w = block->warp[current->warp];
    w.ready &= ~(1u << current->lane);
    w.exited |= 1u << current->lane;
    ++block->exited;
    Barrier& b = block->barrier[0];  // waits for the threads that have not returned
    if (b.arrived && b.arrived == block->threads - block->exited) { open_barrier(b); }
    Thread* next = next_ready();
    if (next == nullptr) { stop(); }
    current = next;
    Context dead;
    switch_context(&dead, &next->context);
    __builtin_unreachable();
}

static void start_block(Block& b, uint3 index, unsigned rank, char* stacks) {
    const unsigned threads = block_dim.x * block_dim.y * block_dim.z;
    b.index = index;
    b.rank = rank;
    b.threads = threads;
    b.exited = b.at_cluster_barrier = 0;
    b.thread.resize(threads);
    b.warp.assign((threads + WARP - 1) / WARP, Warp{});
    for (Barrier& barrier : b.barrier) { barrier = Barrier{}; }
    for (unsigned i = 0; i < threads; ++i) {
        Thread& t = b.thread[i];
        t.index = make_uint3(i % block_dim.x, i / block_dim.x % block_dim.y, i / (block_dim.x * block_dim.y));
        t.lane = i % WARP;
        t.warp = i / WARP;
        t.waits_for = nullptr;
        b.warp[t.warp].ready |= 1u << t.lane;
        b.warp[t.warp].exists |= 1u << t.lane;
        make_context(&t.context, stacks + i * (STACK_BYTES + GUARD_BYTES) + GUARD_BYTES, fiber_main);
    }
    b.saved_static.assign(static_bytes(), (char)POISON);
    b.saved_dynamic.assign(dynamic_bytes, (char)POISON);
}

// What the threads of a stuck cluster wait for.
static void describe_deadlock() {
    int n = snprintf(failure_text, sizeof failure_text, "deadlock in block %u,%u,%u:", block->index.x,
                     block->index.y, block->index.z);
    for (Block& b : cluster) {
        const char* kinds[] = {"__syncthreads", "a named barrier", "a warp operation", "the cluster's barrier",
                               "a barrier in shared memory"};
        for (const char* kind : kinds) {
            unsigned count = 0, first = 0;
            for (unsigned i = 0; i < b.threads; ++i) {
                const Thread& t = b.thread[i];
                if (t.waits_for && !strcmp(t.waits_for, kind) && count++ == 0) { first = i; }
            }
            if (count && n < (int)sizeof failure_text - 100) {
                n += snprintf(failure_text + n, sizeof failure_text - n, " %u threads wait at %s (first %u);",
                              count, kind, first);
            }
        }
        if (n < (int)sizeof failure_text - 100) {
            n += snprintf(failure_text + n, sizeof failure_text - n, " %u of %u have returned", b.exited, b.threads);
        }
    }
    failure = failure_text;
}

static void run_cluster() {
    std::memset(dynamic_shared + dynamic_bytes, CANARY, 64);
    bool all_done = false;
    while (!all_done && !failure) {
        all_done = true;
        bool progress = false;
        unsigned at_barrier = 0, alive = 0;
        for (Block& b : cluster) {
            block = &b;
            current = nullptr;
            if (Thread* next = next_ready()) {
                put_in_place(b);
                current = next;
                switch_context(&main_context, &next->context);
                put_aside(b);
                progress = true;
                if (failure) { return; }
            }
            alive += b.threads - b.exited;
            at_barrier += b.at_cluster_barrier;
        }
        all_done = alive == 0;
        if (alive && at_barrier == alive) {
            for (Block& b : cluster) {
                b.at_cluster_barrier = 0;
                for (Warp& w : b.warp) { w.ready = w.exists & ~w.exited; }
            }
        } else if (!all_done && !progress) {
            describe_deadlock();
        }
    }
    for (int i = 0; i < 64; ++i) {
        if ((unsigned char)dynamic_shared[dynamic_bytes + i] != CANARY) {
            failure = "the kernel writes behind its dynamic shared memory";
        }
    }
}

// geometry: grid x y z, block x y z, cluster size. Returns null, or what went wrong.
static const char* launch(const unsigned* geometry, size_t dynamic, void (*call)(void**), void** args) {
    grid_dim = dim3(geometry[0], geometry[1], geometry[2]);
    block_dim = dim3(geometry[3], geometry[4], geometry[5]);
    const unsigned threads = block_dim.x * block_dim.y * block_dim.z, size = geometry[6];
    kernel_call = call;
    kernel_args = args;
    dynamic_bytes = dynamic;
    failure = nullptr;
    idle_switches = 0;
    cluster.resize(size);
    const size_t pitch = STACK_BYTES + GUARD_BYTES, bytes = (size_t)threads * size * pitch;
    char* stacks = (char*)mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                               -1, 0);
    if (stacks == MAP_FAILED) { return "no memory for the fibers' stacks"; }
    for (size_t i = 0; i < (size_t)threads * size; ++i) { mprotect(stacks + i * pitch, GUARD_BYTES, PROT_NONE); }
    unsigned number = 0;
    for (unsigned z = 0; z < grid_dim.z; ++z) {
        for (unsigned y = 0; y < grid_dim.y; ++y) {
            for (unsigned x = 0; x < grid_dim.x && !failure; x += size, ++number) {
                for (unsigned rank = 0; rank < size; ++rank) {
                    cluster[rank].reversed = number & 1;
                    start_block(cluster[rank], make_uint3(x + rank, y, z), rank, stacks + rank * threads * pitch);
                }
                run_cluster();
            }
        }
    }
    munmap(stacks, bytes);
    return failure;
}

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

template <class P> static std::string describe() {
    if constexpr (std::is_pointer_v<P>) {
        using E = std::remove_pointer_t<P>;
        return std::string(std::is_const_v<E> ? "const " : "") + describe<std::remove_cv_t<E>>() + "*";
    } else {
        const char* kind = std::is_same_v<P, __nv_bfloat16>  ? "bfloat"
                           : std::is_floating_point_v<P>     ? "float"
                           : std::is_integral_v<P>           ? "int"
                                                             : "struct";
        return kind + std::to_string(8 * sizeof(P));
    }
}

template <class... P> static const char* describe(void (*)(P...)) {
    static std::string text;
    text.clear();
    ((text += (text.empty() ? "" : ", ") + describe<std::remove_cv_t<P>>()), ...);
    return text.c_str();
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
static inline float __ull2float_rn(unsigned long long x) { return (float)x; }
static inline float __double2float_rn(double x) { return (float)x; }

// bf16 functions that NVIDIA's header declares for the GPU only. Rounded once, as there.
static inline __nv_bfloat16 __hfma(__nv_bfloat16 a, __nv_bfloat16 b, __nv_bfloat16 c) {
    return __double2bfloat16((double)__bfloat162float(a) * __bfloat162float(b) + __bfloat162float(c));
}
static inline __nv_bfloat162 __hfma2(__nv_bfloat162 a, __nv_bfloat162 b, __nv_bfloat162 c) {
    return __nv_bfloat162(__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y));
}

// One entry point, as tests/emulator/device.py finds it.
#define EMULATOR_ENTRY(kernel)                                                                     \
    extern "C" __attribute__((visibility("default"))) const char* launch_##kernel(                 \
        const unsigned* geometry_, size_t dynamic_, void** args_) {                                \
        return emulator::launch(geometry_, dynamic_, emulator::call<::kernel>, args_);             \
    }                                                                                              \
    extern "C" __attribute__((visibility("default"))) const char* parameters_##kernel() {          \
        return emulator::describe(::kernel);                                                       \
    }
