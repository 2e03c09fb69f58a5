// ptx.cpp -- what ptx.h declares, compiled once as cuda_emulator.cpp is.
#include "cuda_emulator.h"

#include <time.h>

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

void store_matrices(SharedAddress row, const Registers4& matrices) {
    struct In {
        SharedAddress row;
        Registers4 matrices;
    };
    const In in{row, matrices};
    warp_exchange<int>(~0u, in, [](const In* const* in, int* const*) {
        for (int lane = 0; lane < 32; ++lane) {
            for (int i = 0; i < 4; ++i) {
                const SharedAddress row = in[8 * i + lane / 4]->row;
                check(row % 16 == 0, "stmatrix: a row's address is not a multiple of 16");
                std::memcpy((char*)row + 4 * (lane % 4), &in[lane]->matrices.r[i], 4);
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

static inline unsigned this_thread() { return emulator::current - emulator::block->thread.data(); }

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
    const TensorMap* map;
    int x, y;
};
static std::vector<Load> loads;

static void land(const Load& load) {
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

void start_load(SharedAddress to, const TensorMap* map, int x, int y, SharedAddress barrier,
                unsigned rank) {
    check(to % 128 == 0, "a box's address is not a multiple of 128");
    const int bytes = 128 * map->box_rows;
    std::memset(emulator::map_shared((char*)to, rank), emulator::POISON, bytes);
    const Load load{to, barrier, rank, map, x, y};
    const bool awaited = std::any_of(sleepers.begin(), sleepers.end(), [&](const Sleeper& s) {
        return s.rank == rank && s.barrier == barrier;
    });
    if (awaited) { land(load); } else { loads.push_back(load); }
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

template <class T> static T& mine(std::vector<T>& all) {
    const size_t thread = this_thread() + emulator::block_rank() * emulator::block->threads;
    if (thread >= all.size()) { all.resize(thread + 1); }
    return all[thread];
}

void start_store(const TensorMap* map, int x, int y, SharedAddress from) {
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

// -- Products of a warpgroup. Each thread computes its own elements when it waits for them ---------

struct ProductQueue {
    std::vector<std::vector<Product>> groups;  // committed, oldest first
    std::vector<Product> open;
};
static std::vector<ProductQueue> product_queues;

void add_product(const Product& product) { mine(product_queues).open.push_back(product); }

void products_commit() {
    auto& queue = mine(product_queues);
    queue.groups.push_back(std::move(queue.open));
    queue.open.clear();
}

void finish_products(size_t pending) {
    auto& groups = mine(product_queues).groups;
    while (groups.size() > pending) {
        for (const Product& product : groups[0]) { product.compute(product); }
        groups.erase(groups.begin());
    }
}

unsigned long long time() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000ull + now.tv_nsec;
}

}  // namespace ptx
