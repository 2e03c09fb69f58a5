// cuda_emulator.cpp -- the part of the emulator that depends on no kernel: fibers, barriers, launches.
// Compiled once and linked to each kernel's program, which has its own copy of all variables.
#include "cuda_emulator.h"

#include <stdio.h>
#include <sys/mman.h>

#include <span>
#include <string>

// Linker-made bounds of the section that holds every __shared__ variable.
extern "C" {
extern char __start_emulator_shared[] __attribute__((weak, visibility("hidden")));
extern char __stop_emulator_shared[] __attribute__((weak, visibility("hidden")));
}

namespace emulator {

constexpr size_t STACK_BYTES = 256 << 10, GUARD_BYTES = 4 << 10;
constexpr unsigned char CANARY = 0xA5;

Thread* current;
Block* block;
std::vector<Block> cluster;
dim3 grid_dim, block_dim;
alignas(1024) char dynamic_shared[MAX_DYNAMIC + 64];

static Context main_context;
static const char* failure;
static char failure_text[400];
static size_t dynamic_bytes;
static unsigned long long idle_switches;
static void (*kernel_call)(void** args);
static void** kernel_args;

// -- switching between fibers --------------------------------------------------------------------

#ifdef __x86_64__
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
static inline void switch_context(Context* save, Context* load) { swapcontext(save, load); }

static void make_context(Context* context, char* stack, void (*entry)()) {
    getcontext(context);
    context->uc_stack.ss_sp = stack;
    context->uc_stack.ss_size = STACK_BYTES;
    context->uc_link = nullptr;
    makecontext(context, entry, 0);
}
#endif

// -- one thread gives way to another ---------------------------------------------------------------

[[noreturn]] static void stop() {
    Context dead;
    switch_context(&dead, &main_context);
    __builtin_unreachable();
}

[[noreturn]] void fail(const char* message) {
    snprintf(failure_text, sizeof failure_text, "%s (block %u,%u,%u thread %u,%u,%u)", message, block->index.x,
             block->index.y, block->index.z, current->index.x, current->index.y, current->index.z);
    failure = failure_text;
    stop();
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

void wait_for(const char* what) {
    block->warp[current->warp].ready &= ~(1u << current->lane);
    current->waits_for = what;
    switch_away();
    current->waits_for = nullptr;
}

// Another thread of the block goes on, if it can; the running one in its turn.
void give_way_to(unsigned thread) {
    Thread *me = current, *next = &block->thread[thread];
    if (next == me || !(block->warp[next->warp].ready >> next->lane & 1)) { return; }
    current = next;
    switch_context(&me->context, &next->context);
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

void give_way() {
    check(++idle_switches < 20'000'000, "a thread polls for something that does not come");
    Thread *me = current, *next = next_after_current();
    if (next != me) {
        current = next;
        switch_context(&me->context, &next->context);
    } else if (cluster.size() > 1) {
        switch_context(&me->context, &main_context);
    }
}

// -- barriers and operations of a warp ---------------------------------------------------------------

static void open_barrier(Barrier& b) {
    for (unsigned w = 0; w < block->warp.size(); ++w) {
        block->warp[w].ready |= b.waiting[w];
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

void barrier_sync(unsigned id, unsigned count) {
    check(id > 0 && id < NAMED_BARRIERS, "named barriers are 1 to 15");
    check(count % WARP == 0, "a named barrier counts whole warps");
    barrier_wait(block->barrier[id], count, "a named barrier");
}

void barrier_arrive(unsigned id, unsigned count) {
    check(id > 0 && id < NAMED_BARRIERS, "named barriers are 1 to 15");
    Barrier& b = block->barrier[id];
    if (++b.arrived == count) { open_barrier(b); }
}

void sync_threads() {
    barrier_wait(block->barrier[0], block->threads - block->exited, "__syncthreads");
}

const int* sync_threads_sum(int a, int b) {
    Barrier& barrier = block->barrier[0];
    barrier.value[0] += a;
    barrier.value[1] += b;
    sync_threads();
    return barrier.result;
}

bool begin_exchange(unsigned mask, const void* in, void* out, Exchange& all) {
    Warp& w = block->warp[current->warp];
    const unsigned me = 1u << current->lane;
    mask &= w.exists;
    check(mask & me, "a warp operation whose mask leaves out the calling lane");
    check(!(mask & w.exited), "a warp operation whose mask names a thread that has returned");
    w.in[current->lane] = in;
    w.out[current->lane] = out;
    unsigned& arrived = w.arrived[__builtin_ctz(mask)];
    if (arrived == 0) { w.mask[__builtin_ctz(mask)] = mask; }
    check(w.mask[__builtin_ctz(mask)] == mask, "lanes of one warp operation disagree on its mask");
    arrived |= me;
    if (arrived != mask) {
        wait_for("a warp operation");
        return false;
    }
    arrived = 0;
    all.mask = mask;
    for (int i = 0; i < WARP; ++i) {
        const bool takes_part = mask >> i & 1;
        all.in[i] = takes_part ? w.in[i] : nullptr;
        all.out[i] = takes_part ? w.out[i] : nullptr;
    }
    return true;
}

void end_exchange(const Exchange& all) { block->warp[current->warp].ready |= all.mask; }

unsigned ballot(unsigned mask, bool predicate) {
    return warp_exchange<unsigned>(mask, predicate, [](const bool* const* ins, unsigned* const* outs) {
        unsigned votes = 0;
        for (int i = 0; i < WARP; ++i) { votes |= (ins[i] && *ins[i]) ? 1u << i : 0; }
        for (int i = 0; i < WARP; ++i) {
            if (outs[i]) { *outs[i] = votes; }
        }
    });
}

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


void cluster_sync() {
    ++block->at_cluster_barrier;
    wait_for("the cluster's barrier");
}

void* address_in_block(void* shared, unsigned rank) {
    check(rank < cluster.size(), "map_shared: no such block in the cluster");
    if (rank == block->rank) { return shared; }
    const char* address = (const char*)shared;
    const ptrdiff_t in_static = address - __start_emulator_shared, in_dynamic = address - dynamic_shared;
    if (in_static >= 0 && in_static < (ptrdiff_t)static_bytes()) {
        return cluster[rank].saved_static.data() + in_static;
    }
    check(in_dynamic >= 0 && in_dynamic < (ptrdiff_t)dynamic_bytes, "map_shared: not a shared variable");
    return cluster[rank].saved_dynamic.data() + in_dynamic;
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
                               "a barrier in shared memory", "the products of its warpgroup"};
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
    ptx::begin_cluster();
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
    if (!failure) { failure = ptx::end_cluster(); }
}

// Each stack lies behind a page that nobody may touch.
static bool make_stacks(Stacks& stacks, size_t count) {
    const size_t pitch = STACK_BYTES + GUARD_BYTES;
    if (stacks.memory == nullptr) {
        void* memory = mmap(nullptr, pitch * MAX_THREADS * MAX_CLUSTER, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED) { return false; }
        stacks.memory = (char*)memory;
    }
    if (count > MAX_THREADS * MAX_CLUSTER) { return false; }
    for (; stacks.count < count; ++stacks.count) {
        if (mprotect(stacks.memory + stacks.count * pitch, GUARD_BYTES, PROT_NONE)) { return false; }
    }
    return true;
}

const char* launch(const unsigned* geometry, size_t dynamic, void (*call)(void**), void** args, Stacks& stacks) {
    grid_dim = dim3(geometry[0], geometry[1], geometry[2]);
    block_dim = dim3(geometry[3], geometry[4], geometry[5]);
    const unsigned threads = block_dim.x * block_dim.y * block_dim.z, size = geometry[6];
    kernel_call = call;
    kernel_args = args;
    dynamic_bytes = dynamic;
    failure = nullptr;
    idle_switches = 0;
    cluster.resize(size);
    if (!make_stacks(stacks, (size_t)threads * size)) { return "no memory for the fibers' stacks"; }
    const size_t of_block = threads * (STACK_BYTES + GUARD_BYTES);
    unsigned number = 0;
    for (unsigned z = 0; z < grid_dim.z; ++z) {
        for (unsigned y = 0; y < grid_dim.y; ++y) {
            for (unsigned x = 0; x < grid_dim.x && !failure; x += size, ++number) {
                for (unsigned rank = 0; rank < size; ++rank) {
                    cluster[rank].reversed = number & 1;
                    start_block(cluster[rank], make_uint3(x + rank, y, z), rank, stacks.memory + rank * of_block);
                }
                run_cluster();
            }
        }
    }
    return failure;
}

const char* describe(const Parameter* parameters, int count) {
    static std::string text;
    text.clear();
    for (const Parameter& p : std::span(parameters, count)) {
        text += text.empty() ? "" : ", ";
        text += p.constant ? "const " : "";
        text += p.kind + std::to_string(p.bits) + (p.pointer ? "*" : "");
    }
    return text.c_str();
}

}  // namespace emulator
