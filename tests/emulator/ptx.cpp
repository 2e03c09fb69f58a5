// ptx.cpp -- what ptx.h declares, compiled once as cuda_emulator.cpp is.
#include "cuda_emulator.h"

#include <time.h>

#include <span>

namespace ptx {

// -- Matrices in a warp's registers ---------------------------------------------------------------

Registers4 load_matrices(SharedAddress row, bool transposed) {
    check(row % 16 == 0, "ldmatrix: a row's address is not a multiple of 16");
    using In = SharedAddress;
    return warp_exchange<Registers4>(~0u, row, [=](const In* const* in, Registers4* const* out) {
        for (int lane = 0; lane < 32; ++lane) {
            const int g = lane / 4, t = lane % 4;
            for (int i = 0; i < 4; ++i) {
                unsigned pair = 0;
                for (int j = 0; j < 2; ++j) {
                    const int r = transposed ? 2 * t + j : g, c = transposed ? g : 2 * t + j;
                    const auto* elements = reinterpret_cast<const uint16_t*>(*in[8 * i + r]);
                    pair |= (unsigned)elements[c] << 16 * j;
                }
                out[lane]->r[i] = pair;
            }
        }
    });
}

static inline float bf16_half(unsigned pair, int high) {
    return __uint_as_float((high ? pair >> 16 : pair & 0xFFFF) << 16);
}

static void multiply_all(const MmaIn* const* in, MmaOut* const* out) {
    float a[16][16], b[16][8];
    for (int lane = 0; lane < 32; ++lane) {
        const int g = lane / 4, t = lane % 4;
        for (int j = 0; j < 2; ++j) {
            for (int i = 0; i < 4; ++i) {
                a[g + 8 * (i % 2)][2 * t + 8 * (i / 2) + j] = bf16_half(in[lane]->a[i], j);
            }
            for (int i = 0; i < 2; ++i) { b[2 * t + 8 * i + j][g] = bf16_half(in[lane]->b[i], j); }
        }
    }
    for (int lane = 0; lane < 32; ++lane) {
        const int g = lane / 4, t = lane % 4;
        for (int i = 0; i < 4; ++i) {
            float sum = in[lane]->c[i];
            for (int k = 0; k < 16; ++k) { sum += a[g + 8 * (i / 2)][k] * b[k][2 * t + i % 2]; }
            out[lane]->d[i] = sum;
        }
    }
}

MmaOut multiply_matrices(const MmaIn& in) { return warp_exchange<MmaOut>(~0u, in, multiply_all); }

static inline float as_tf32(float x) {
    return __uint_as_float(__float_as_uint(x) & 0xFFFFE000u);
}

static void multiply_all_tf32(const MmaTf32In* const* in, MmaOut* const* out) {
    float a[16][8], b[8][8];
    for (int lane = 0; lane < 32; ++lane) {
        const int g = lane / 4, t = lane % 4;
        for (int i = 0; i < 4; ++i) { a[g + 8 * (i % 2)][t + 4 * (i / 2)] = as_tf32(in[lane]->a[i]); }
        for (int i = 0; i < 2; ++i) { b[t + 4 * i][g] = as_tf32(in[lane]->b[i]); }
    }
    for (int lane = 0; lane < 32; ++lane) {
        const int g = lane / 4, t = lane % 4;
        for (int i = 0; i < 4; ++i) {
            // Sums are cut, not rounded, as the tensor cores do it.
            double sum = in[lane]->c[i];
            for (int k = 0; k < 8; ++k) { sum += (double)a[g + 8 * (i / 2)][k] * b[k][2 * t + i % 2]; }
            float cut = (float)sum;
            if (std::fabs((double)cut) > std::fabs(sum)) { cut = std::nextafter(cut, 0.0f); }
            out[lane]->d[i] = cut;
        }
    }
}

MmaOut multiply_tf32(const MmaTf32In& in) {
    return warp_exchange<MmaOut>(~0u, in, multiply_all_tf32);
}

static inline int byte_of(unsigned word, int j) { return (signed char)(word >> 8 * j); }

static void multiply_all_bytes(const MmaBytesIn* const* in, MmaBytesOut* const* out) {
    int a[16][32], b[32][8];
    for (int lane = 0; lane < 32; ++lane) {
        const int g = lane / 4, t = lane % 4;
        for (int j = 0; j < 4; ++j) {
            for (int i = 0; i < 4; ++i) {
                a[g + 8 * (i % 2)][4 * t + 16 * (i / 2) + j] = byte_of(in[lane]->a[i], j);
            }
            for (int i = 0; i < 2; ++i) { b[4 * t + 16 * i + j][g] = byte_of(in[lane]->b[i], j); }
        }
    }
    for (int lane = 0; lane < 32; ++lane) {
        const int g = lane / 4, t = lane % 4;
        for (int i = 0; i < 4; ++i) {
            unsigned sum = in[lane]->c[i];  // wraps around
            for (int k = 0; k < 32; ++k) { sum += a[g + 8 * (i / 2)][k] * b[k][2 * t + i % 2]; }
            out[lane]->d[i] = sum;
        }
    }
}

MmaBytesOut multiply_bytes(const MmaBytesIn& in) {
    return warp_exchange<MmaBytesOut>(~0u, in, multiply_all_bytes);
}

static void multiply_all_codes(const MmaCodesIn* const* in, MmaOut* const* out) {
    float a[16][32], b[32][8];
    for (int lane = 0; lane < 32; ++lane) {
        const int g = lane / 4, t = lane % 4;
        for (int j = 0; j < 4; ++j) {
            for (int i = 0; i < 4; ++i) {
                a[g + 8 * (i % 2)][4 * t + 16 * (i / 2) + j] = in[lane]->a[4 * i + j];
            }
            for (int i = 0; i < 2; ++i) { b[4 * t + 16 * i + j][g] = in[lane]->b[4 * i + j]; }
        }
    }
    for (int lane = 0; lane < 32; ++lane) {
        const int g = lane / 4, t = lane % 4;
        for (int i = 0; i < 4; ++i) {
            float sum = in[lane]->c[i];
            for (int k = 0; k < 32; ++k) { sum += a[g + 8 * (i / 2)][k] * b[k][2 * t + i % 2]; }
            out[lane]->d[i] = sum;
        }
    }
}

MmaOut multiply_codes(const MmaCodesIn& in) {
    return warp_exchange<MmaOut>(~0u, in, multiply_all_codes);
}

// -- Fences between what threads write to shared memory and what copies and products see there ------

// Of 16 bytes: when and by which thread of the cluster they were last written, 0: not by a thread.
struct Write {
    unsigned time, thread;
};
static std::vector<Write> writes;     // by block of the cluster and place in dynamic shared memory
static std::vector<unsigned> fences;  // by thread of the cluster: when its last one was
static unsigned now;

static inline unsigned this_thread() { return emulator::current - emulator::block->thread.data(); }

template <class T> static T& mine(std::vector<T>& all) {
    const size_t thread = this_thread() + emulator::block_rank() * emulator::block->threads;
    if (thread >= all.size()) { all.resize(thread + 1); }
    return all[thread];
}

static Write* write_at(SharedAddress address, unsigned rank) {
    const size_t place = (address - (SharedAddress)emulator::dynamic_shared) / 16;
    constexpr size_t PLACES = emulator::MAX_DYNAMIC / 16;
    const size_t index = rank * PLACES + place;
    return place < PLACES && index < writes.size() ? &writes[index] : nullptr;
}

void written(SharedAddress address) {
    const unsigned rank = emulator::block_rank();
    if (!write_at(address, rank)) { writes.resize((rank + 1) * (emulator::MAX_DYNAMIC / 16)); }
    if (Write* write = write_at(address, rank)) {
        *write = {++now, this_thread() + rank * emulator::block->threads};
    }
}

void fence_writes() { mine(fences) = ++now; }

// Whether the writer, or the running thread later, has made a fence.
void check_fence(SharedAddress address, unsigned rank) {
    const Write* write = write_at(address, rank);
    if (!write || !write->time || mine(fences) > write->time) { return; }
    check(write->thread < fences.size() && fences[write->thread] > write->time,
          "a copy or product meets what a thread wrote to shared memory, without a fence between");
}

static void check_fences(SharedAddress address, unsigned bytes, unsigned rank, bool overwrites) {
    for (unsigned i = 0; i < bytes; i += 16) {
        check_fence(address + i, rank);
        Write* write = write_at(address + i, rank);
        if (write && overwrites) { write->time = 0; }
    }
}

void store_matrices(SharedAddress row, const Registers4& matrices, bool transposed) {
    struct In {
        SharedAddress row;
        Registers4 matrices;
    };
    const In in{row, matrices};
    written(row);
    warp_exchange<int>(~0u, in, [=](const In* const* in, int* const*) {
        for (int lane = 0; lane < 32; ++lane) {
            const int g = lane / 4, t = lane % 4;
            for (int i = 0; i < 4; ++i) {
                for (int j = 0; j < 2; ++j) {
                    const SharedAddress row = in[8 * i + (transposed ? 2 * t + j : g)]->row;
                    check(row % 16 == 0, "stmatrix: a row's address is not a multiple of 16");
                    ((uint16_t*)row)[transposed ? g : 2 * t + j] = in[lane]->matrices.r[i] >> 16 * j;
                }
            }
        }
    });
}

// -- Copies in the background ---------------------------------------------------------------------

// They land when their thread waits for them, as late as the hardware may: a missing
// wait shows up as poison.
struct Copy {
    SharedAddress to;
    unsigned char bytes[16];
    int size;
};
struct CopyQueue {
    std::vector<std::vector<Copy>> groups;  // committed, oldest first
    std::vector<Copy> open;
};
static std::vector<CopyQueue> copy_queues;

static inline CopyQueue& copy_queue() {
    const emulator::Block& block = *emulator::block;
    const size_t thread = emulator::current - block.thread.data() + block.rank * block.threads;
    if (thread >= copy_queues.size()) { copy_queues.resize(thread + 1); }
    return copy_queues[thread];
}

void copy_in_background(SharedAddress to, const void* from, bool valid, int size) {
    check(to % size == 0 && (size_t)from % size == 0, "cp.async: an address is not aligned");
    Copy copy{to, {}, size};
    if (valid) { std::memcpy(copy.bytes, from, size); }
    std::memset((void*)to, 0xFF, size);  // NaN, for threads that still read what was there before
    copy_queue().open.push_back(copy);
}

void copies_commit() {
    auto& queue = copy_queue();
    queue.groups.push_back(std::move(queue.open));
    queue.open.clear();
}

void copies_wait(size_t pending) {
    auto& groups = copy_queue().groups;
    while (groups.size() > pending) {
        for (const Copy& copy : groups[0]) { std::memcpy((void*)copy.to, copy.bytes, copy.size); }
        groups.erase(groups.begin());
    }
}

// -- Barriers in shared memory. Threads sleep until their phase ends ------------------------------

struct Barrier {
    int bytes;  // that are expected and have not arrived
    unsigned short count, pending : 15, parity : 1;
    bool waits() const { return pending || bytes; }
};
static_assert(sizeof(Barrier) == 8);

struct Sleeper {
    unsigned rank, thread;
    SharedAddress barrier;
};
static std::vector<Sleeper> sleepers;

static Barrier& barrier_at(SharedAddress address, unsigned rank) {
    check(address % 8 == 0, "a barrier's address is not a multiple of 8");
    Barrier& barrier = *emulator::map_shared((Barrier*)address, rank);
    check(barrier.count != 0xFFFF, "a barrier that nobody initialized");
    return barrier;
}

// After a change: whether the phase has ended.
static void look_at(SharedAddress address, unsigned rank) {
    Barrier& barrier = barrier_at(address, rank);
    if (barrier.waits()) { return; }
    barrier.pending = barrier.count;
    barrier.parity ^= 1;
    std::erase_if(sleepers, [=](const Sleeper& s) {
        const bool woken = s.rank == rank && s.barrier == address;
        if (woken) { emulator::wake(rank, s.thread); }
        return woken;
    });
}

void arrive(SharedAddress address, unsigned rank, unsigned bytes) {
    Barrier& barrier = barrier_at(address, rank);
    check(barrier.pending > 0, "more arrivals at a barrier than it counts");
    barrier.bytes += bytes;
    --barrier.pending;
    look_at(address, rank);
}

void barrier_init(SharedAddress address, unsigned arrivals) {
    *(Barrier*)address = {0, (unsigned short)arrivals, (unsigned short)arrivals, 0};
}

// -- Copies of boxes. They land when somebody waits for their barrier: as late as the hardware may --

struct Load {
    SharedAddress to, barrier;
    unsigned rank;
    const TensorMap* map;  // null: `bytes` in a row
    int x, y;
    const void* from;
    unsigned bytes;
};
static std::vector<Load> loads;

static void land(const Load& load) {
    if (!load.map) {
        std::memcpy((void*)load.to, load.from, load.bytes);
        barrier_at(load.barrier, load.rank).bytes -= load.bytes;
        look_at(load.barrier, load.rank);
        return;
    }
    const TensorMap& map = *load.map;
    for (int r = 0; r < map.box_rows; ++r) {
        for (int c = 0; c < map.width(); ++c) {
            char* to = emulator::map_shared(
                (char*)swizzled(load.to + 128 * r + c * map.size), load.rank);
            if (map.has(load.x + c, load.y + r)) {
                std::memcpy(to, map.at(load.x + c, load.y + r), map.size);
            } else {
                std::memset(to, 0, map.size);
            }
        }
    }
    barrier_at(load.barrier, load.rank).bytes -= 128 * map.box_rows;
    look_at(load.barrier, load.rank);
}

static void start(const Load& load) {
    check_fences(load.to, load.bytes, load.rank, true);
    std::memset(emulator::map_shared((char*)load.to, load.rank), emulator::POISON, load.bytes);
    const bool awaited = std::any_of(sleepers.begin(), sleepers.end(), [&](const Sleeper& s) {
        return s.rank == load.rank && s.barrier == load.barrier;
    });
    if (awaited) { land(load); } else { loads.push_back(load); }
}

void start_load(SharedAddress to, const TensorMap* map, int x, int y, SharedAddress barrier,
                unsigned rank) {
    check(to % 128 == 0, "a box's address is not a multiple of 128");
    start({to, barrier, rank, map, x, y, nullptr, (unsigned)(128 * map->box_rows)});
}

void start_load(SharedAddress to, const void* from, unsigned bytes, SharedAddress barrier) {
    check(to % 16 == 0 && (size_t)from % 16 == 0 && bytes % 16 == 0,
          "cp.async.bulk: addresses and size must be multiples of 16");
    start({to, barrier, emulator::block_rank(), nullptr, 0, 0, from, bytes});
}

void wait_at(SharedAddress address, unsigned parity) {
    const unsigned rank = emulator::block_rank();
    if (barrier_at(address, rank).parity != parity) { return; }
    sleepers.push_back({rank, this_thread(), address});
    std::vector<Load> landing;
    std::erase_if(loads, [&](const Load& load) {
        const bool here = load.rank == rank && load.barrier == address;
        if (here) { landing.push_back(load); }
        return here;
    });
    for (const Load& load : landing) { land(load); }
    if (barrier_at(address, rank).parity == parity) {
        emulator::wait_for("a barrier in shared memory");
    }
}

// Stores read shared memory when their thread waits for that.
struct Store {
    const TensorMap* map;
    int x, y;
    SharedAddress from;
};
static std::vector<std::vector<Store>> stores;  // by thread of the cluster

void start_store(const TensorMap* map, int x, int y, SharedAddress from) {
    check(from % 128 == 0, "a box's address is not a multiple of 128");
    check_fences(from, 128 * map->box_rows, emulator::block_rank(), false);
    mine(stores).push_back({map, x, y, from});
}

void finish_stores(size_t pending) {
    auto& started = mine(stores);
    while (started.size() > pending) {
        const Store store = started.front();
        started.erase(started.begin());
        for (int r = 0; r < store.map->box_rows; ++r) {
            for (int c = 0; c < store.map->width(); ++c) {
                if (!store.map->has(store.x + c, store.y + r)) { continue; }
                std::memcpy(store.map->at(store.x + c, store.y + r),
                            (char*)swizzled(store.from + 128 * r + c * store.map->size),
                            store.map->size);
            }
        }
    }
}

// -- Products of a warpgroup. A group is all threads' (PTX: "a new wgmma-group per warpgroup"), so that
// -- it is computed, as late as the hardware may, when the first of them waits for it -----------------

struct ProductQueue {
    std::vector<std::vector<Product>> groups;  // committed, oldest first
    std::vector<Product> open;
    bool begun = false;   // since registers were last waited for
    size_t finished = 0;  // groups
    size_t awaits = 0;    // so many of all threads
    size_t committed() const { return finished + groups.size(); }
};
static std::vector<ProductQueue> product_queues;

// Those of the running thread's warpgroup. Others may come while it sleeps, elsewhere in memory.
static std::span<ProductQueue> queues_of_warpgroup() {
    const size_t first = emulator::block_rank() * emulator::block->threads + this_thread() / 128 * 128;
    if (product_queues.size() < first + 128) { product_queues.resize(first + 128); }
    return {&product_queues[first], 128};
}

// Whether all threads of the warpgroup have committed so many; the one that comes next is asked first.
static bool all_committed(size_t count) {
    const auto queues = queues_of_warpgroup();
    for (unsigned i = 1, me = this_thread() % 128; i < 128; ++i) {
        const unsigned other = emulator::block->reversed ? me + 128 - i : me + i;
        if (queues[other % 128].committed() < count) { return false; }
    }
    return true;
}

LeftRows gather_left(const Registers4& a) {
    return warp_exchange<LeftRows>(~0u, a, [](const Registers4* const* in, LeftRows* const* out) {
        for (int lane = 0; lane < 32; ++lane) {
            for (int t = 0; t < 4; ++t) {
                for (int i = 0; i < 4; ++i) {
                    for (int j = 0; j < 2; ++j) {
                        out[lane]->x[i % 2][2 * t + 8 * (i / 2) + j] =
                            bf16_half(in[lane / 4 * 4 + t]->r[i], j);
                    }
                }
            }
        }
    });
}

void products_begin() { mine(product_queues).begun = true; }

void add_product(const Product& product) {
    auto& queue = mine(product_queues);
    check(queue.begun, "a product without wgmma.fence behind other uses of registers");
    queue.open.push_back(product);
}

void products_commit() {
    auto& own = queues_of_warpgroup()[this_thread() % 128];
    own.groups.push_back(std::move(own.open));
    own.open.clear();
    const size_t committed = own.committed();
    if (!all_committed(committed)) { return; }
    const unsigned first = this_thread() / 128 * 128;
    bool woken = false;
    for (unsigned i = 0; ProductQueue& queue : queues_of_warpgroup()) {
        if (queue.awaits == committed) { emulator::wake(emulator::block_rank(), first + i), woken = true; }
        ++i;
    }
    // They go on in their order.
    if (woken) { emulator::give_way_to(first + (emulator::block->reversed ? 127 : 0)); }
}

void finish_products(size_t pending) {
    auto& own = queues_of_warpgroup()[this_thread() % 128];
    own.begun = false;
    const size_t until = own.committed() - std::min(own.groups.size(), pending);
    if (!all_committed(until)) {
        own.awaits = until;
        emulator::wait_for("the products of its warpgroup");
        mine(product_queues).awaits = 0;
    }
    emulator::Thread* const me = emulator::current;
    const unsigned first = this_thread() / 128 * 128;
    for (unsigned i = 0; ProductQueue& queue : queues_of_warpgroup()) {
        emulator::current = &emulator::block->thread[first + i++];
        for (; queue.finished < until; ++queue.finished) {
            for (const Product& product : queue.groups[0]) { product.compute(product); }
            queue.groups.erase(queue.groups.begin());
        }
    }
    emulator::current = me;
}

// -- Registers of a launch, one block a multiprocessor ---------------------------------------------

struct Registers {
    unsigned count = 0;  // of a thread; 0: as many as the launch gave
};
static std::vector<Registers> registers;  // by thread of the cluster

static unsigned at_launch() { return std::min(65536 / emulator::block->threads / 8 * 8, 255u / 8 * 8); }

void set_registers(unsigned count, bool more) {
    check(count % 8 == 0 && count >= 24 && count <= 256, "setmaxnreg: 24 to 256, in steps of 8");
    auto& mine_now = mine(registers).count;
    const unsigned before = mine_now ? mine_now : at_launch();
    check(more ? count >= before : count <= before, "setmaxnreg: fewer, or more, than there are");
    mine_now = count;
}

static const char* wrong_registers() {
    for (const emulator::Block& b : emulator::cluster) {
        unsigned sum = 0;
        for (unsigned i = 0; i < b.threads; ++i) {
            const size_t first = b.rank * b.threads, at = first + i;
            const auto of = [&](size_t t) { return t < registers.size() ? registers[t].count : 0; };
            if (of(at) != of(first + i / 128 * 128)) {
                return "setmaxnreg: not by all threads of a warpgroup";
            }
            sum += of(at) ? of(at) : at_launch();
        }
        if (sum > at_launch() * b.threads) { return "setmaxnreg: more registers than at launch"; }
    }
    return nullptr;
}

// -- A cluster's beginning and end -----------------------------------------------------------------

void begin_cluster() {
    writes.clear();
    fences.clear();
    registers.clear();
    copy_queues.clear();
    sleepers.clear();
    loads.clear();
    stores.clear();
    product_queues.clear();
    now = 0;
}

const char* end_cluster() {
    if (!loads.empty()) { return "a copy to shared memory that nobody has waited for"; }
    for (const auto& of_thread : stores) {
        if (!of_thread.empty()) { return "a store of a box that its thread has not waited for"; }
    }
    for (const ProductQueue& queue : product_queues) {
        for (const auto& group : queue.groups) {
            if (!group.empty()) { return "a product that its thread has not waited for"; }
        }
        if (!queue.open.empty()) { return "a product in no group"; }
    }
    return registers.empty() ? nullptr : wrong_registers();
}

unsigned long long time() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000ull + now.tv_nsec;
}

}  // namespace ptx
