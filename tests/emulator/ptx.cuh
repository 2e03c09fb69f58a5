// ptx.cuh -- the functions of llmq/cu/ptx.cuh in C++, for the emulator; layouts as explained there.
#pragma once

using SharedAddress = size_t;

static inline SharedAddress shared_address(const void* p) { return (SharedAddress)p; }

namespace ptx {  // the kernel file is compiled inside of an unnamed namespace

using emulator::check;
using emulator::warp_exchange;

struct Registers4 {
    unsigned r[4];
};

// row: this lane's; transposed: ldmatrix's .trans.
template <bool transposed> static Registers4 load_matrices(SharedAddress row) {
    check(row % 16 == 0, "ldmatrix: a row's address is not a multiple of 16");
    using In = SharedAddress;
    return warp_exchange<Registers4>(~0u, row, [](const In* const* in, Registers4* const* out) {
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

// One lane's part of the operands of mma.m16n8k16.
struct MmaIn {
    unsigned a[4], b[2];
    float c[4];
};
struct MmaOut {
    float d[4];
};

static inline float bf16_half(unsigned pair, int high) {
    return __uint_as_float((high ? pair >> 16 : pair & 0xFFFF) << 16);
}

static void multiply_matrices(const MmaIn* const* in, MmaOut* const* out) {
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

// One lane's part of the operands of mma.m16n8k32 of signed bytes.
struct MmaBytesIn {
    unsigned a[4], b[2];
    int c[4];
};
struct MmaBytesOut {
    int d[4];
};

static inline int byte_of(unsigned word, int j) { return (signed char)(word >> 8 * j); }

static void multiply_bytes(const MmaBytesIn* const* in, MmaBytesOut* const* out) {
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

// Background copies land when their thread waits for them, as late as the hardware may: a missing
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

static void copy_in_background(SharedAddress to, const void* from, bool valid, int size) {
    check(to % size == 0 && (size_t)from % size == 0, "cp.async: an address is not aligned");
    Copy copy{to, {}, size};
    if (valid) { std::memcpy(copy.bytes, from, size); }
    copy_queue().open.push_back(copy);
}

static void copies_wait(size_t pending) {
    auto& groups = copy_queue().groups;
    while (groups.size() > pending) {
        for (const Copy& copy : groups[0]) { std::memcpy((void*)copy.to, copy.bytes, copy.size); }
        groups.erase(groups.begin());
    }
}

}  // namespace ptx

static inline void ldmatrix_x4(unsigned (&r)[4], SharedAddress row) {
    const auto out = ptx::load_matrices<false>(row);
    std::copy(out.r, out.r + 4, r);
}

static inline void ldmatrix_x4_trans(unsigned (&r)[4], SharedAddress row) {
    const auto out = ptx::load_matrices<true>(row);
    std::copy(out.r, out.r + 4, r);
}

static inline void mma_m16n8k16_bf16(float (&d)[4], const unsigned (&a)[4], unsigned b0,
                                     unsigned b1) {
    const ptx::MmaIn in{{a[0], a[1], a[2], a[3]}, {b0, b1}, {d[0], d[1], d[2], d[3]}};
    const auto out = ptx::warp_exchange<ptx::MmaOut>(~0u, in, ptx::multiply_matrices);
    std::copy(out.d, out.d + 4, d);
}

static inline void mma_m16n8k32_s8(int (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    const ptx::MmaBytesIn in{{a[0], a[1], a[2], a[3]}, {b0, b1}, {d[0], d[1], d[2], d[3]}};
    const auto out = ptx::warp_exchange<ptx::MmaBytesOut>(~0u, in, ptx::multiply_bytes);
    std::copy(out.d, out.d + 4, d);
}

static inline void cp_async_16(SharedAddress to, const void* from, bool valid) {
    ptx::copy_in_background(to, from, valid, 16);
}

template <int BYTES>
static inline void cp_async_cached(SharedAddress to, const void* from, bool valid) {
    ptx::copy_in_background(to, from, valid, BYTES);
}

static inline void cp_async_commit() {
    auto& queue = ptx::copy_queue();
    queue.groups.push_back(std::move(queue.open));
    queue.open.clear();
}

template <int PENDING> static inline void cp_async_wait() { ptx::copies_wait(PENDING); }

static inline float exp2_approx(float x) {
    const float y = exp2f(x);
    return y < 0x1p-126f ? 0.0f : y;
}

// -- Thread-block clusters: both halves of the barrier happen in the second one --------------------

static inline unsigned cluster_rank() { return emulator::block_rank(); }
static inline void cluster_arrive() {}
static inline void cluster_wait() { emulator::cluster_sync(); }
static inline float2 load_cluster(const float2* p, unsigned rank) {
    return *emulator::map_shared(p, rank);
}

static inline unsigned long long global_time() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000ull + now.tv_nsec;
}

static inline void forget(uint4&) {}
static inline void forget(uint2&) {}
static inline void forget(int&) {}
