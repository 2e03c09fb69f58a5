// ptx.cuh -- the functions of llmq/cu/ptx.cuh in C++, for the emulator; layouts as explained there.
// A kernel includes it inside of an unnamed namespace; ptx.h comes before that.
#pragma once

static inline SharedAddress shared_address(const void* p) { return (SharedAddress)p; }

static inline void ldmatrix_x4(unsigned (&r)[4], SharedAddress row) {
    const auto out = ptx::load_matrices(row, false);
    std::copy(out.r, out.r + 4, r);
}

static inline void ldmatrix_x4_trans(unsigned (&r)[4], SharedAddress row) {
    const auto out = ptx::load_matrices(row, true);
    std::copy(out.r, out.r + 4, r);
}

static inline void start_next_kernel() {}
static inline void wait_for_earlier_kernels() {}

static inline uint4 load_shared(SharedAddress from) {
    ptx::check(from % 16 == 0, "ld.shared: an address is not a multiple of 16");
    return *(const uint4*)from;
}

static inline float2 load_shared_pair(SharedAddress from) {
    ptx::check(from % 8 == 0, "ld.shared: an address is not a multiple of 8");
    return *(const float2*)from;
}

static inline float lookup_shared(SharedAddress table, unsigned word, int i) {
    ptx::check(table % 256 == 0, "lookup_shared: the table is not aligned to 256 bytes");
    return *(const float*)(table + (word >> 8 * i & 255));
}

static inline float load_here(const float* from) { return *from; }

static inline void store_shared(SharedAddress to, const uint4& x) {
    ptx::check(to % 16 == 0, "st.shared: an address is not a multiple of 16");
    *(uint4*)to = x;
    ptx::written(to);
}

static inline void mma_m16n8k16_bf16(float (&d)[4], const unsigned (&a)[4], unsigned b0,
                                     unsigned b1) {
    const ptx::MmaIn in{{a[0], a[1], a[2], a[3]}, {b0, b1}, {d[0], d[1], d[2], d[3]}};
    const auto out = ptx::multiply_matrices(in);
    std::copy(out.d, out.d + 4, d);
}

static inline unsigned fma_pair(unsigned a, unsigned b, unsigned c) {
    const auto upper = [](unsigned pair) { return __uint_as_float(pair & 0xFFFF0000u); };
    const auto lower = [](unsigned pair) { return __uint_as_float(pair << 16); };
    return to_pair(fmaf(lower(a), lower(b), lower(c)), fmaf(upper(a), upper(b), upper(c)));
}

static inline void mma_m16n8k8_tf32(float (&d)[4], const float (&a)[4], float b0, float b1) {
    const ptx::MmaTf32In in{{a[0], a[1], a[2], a[3]}, {b0, b1}, {d[0], d[1], d[2], d[3]}};
    const auto out = ptx::multiply_tf32(in);
    std::copy(out.d, out.d + 4, d);
}

static inline void mma_m16n8k32_s8(int (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    const ptx::MmaBytesIn in{{a[0], a[1], a[2], a[3]}, {b0, b1}, {d[0], d[1], d[2], d[3]}};
    const auto out = ptx::multiply_bytes(in);
    std::copy(out.d, out.d + 4, d);
}

template <class Left, class Right, bool ADD>
static inline void mma_m16n8k32_fp8(float (&d)[4], const unsigned (&a)[4], unsigned b0,
                                    unsigned b1) {
    const auto number = []<class X>(X, unsigned word, int j) {
        X code;
        code.__x = (unsigned char)(word >> 8 * j);
        return (float)code;
    };
    ptx::MmaCodesIn in{};
    for (int i = 0; i < 16; ++i) { in.a[i] = number(Left(), a[i / 4], i % 4); }
    for (int i = 0; i < 8; ++i) { in.b[i] = number(Right(), i < 4 ? b0 : b1, i % 4); }
    if (ADD) { std::copy(d, d + 4, in.c); }
    const auto out = ptx::multiply_codes(in);
    std::copy(out.d, out.d + 4, d);
}

static inline void mma_m16n8k32_half(unsigned (&d)[2], const unsigned (&a)[4], unsigned b0,
                                     unsigned b1) {
    const float2 low = from_halves(d[0]), high = from_halves(d[1]);
    float sum[4] = {low.x, low.y, high.x, high.y};
    mma_m16n8k32_fp8<e4m3, e4m3, true>(sum, a, b0, b1);
    for (int i = 0; i < 2; ++i) {
        const __half2_raw pair = (__half2_raw)__floats2half2_rn(sum[2 * i], sum[2 * i + 1]);
        d[i] = pair.x | (unsigned)pair.y << 16;
    }
}

template <bool ONCE = false>
static inline void cp_async_16(SharedAddress to, const void* from, bool valid) {
    ptx::copy_in_background(to, from, valid, 16);
}

template <int BYTES>
static inline void cp_async_cached(SharedAddress to, const void* from, bool valid) {
    ptx::copy_in_background(to, from, valid, BYTES);
}

static inline void cp_async_commit() { ptx::copies_commit(); }

template <int PENDING> static inline void cp_async_wait() { ptx::copies_wait(PENDING); }

static inline void barrier_sync(int id, int threads) { emulator::barrier_sync(id, threads); }

static inline float exp2_approx(float x) {
    const float y = exp2f(x);
    return y < 0x1p-126f ? 0.0f : y;
}

static inline float reciprocal_approx(float x) {
    const float y = 1.0f / x;
    return std::fabs(y) < 0x1p-126f ? 0.0f : y;
}

static inline unsigned max_halves(unsigned a, unsigned b) {
    return std::max(a >> 16, b >> 16) << 16 | std::max(a & 0xFFFF, b & 0xFFFF);
}

static inline unsigned larger_magnitudes(unsigned a, unsigned b) {
    return max_halves(a & 0x7FFF7FFF, b & 0x7FFF7FFF);
}

static inline float larger(float a, float b) { return a > b || a != a ? a : b; }

// -- Thread-block clusters: both halves of the barrier happen in the second one --------------------

static inline unsigned cluster_rank() { return emulator::block_rank(); }
static inline void cluster_arrive() {}
static inline void cluster_wait() { emulator::cluster_sync(); }
static inline float2 load_cluster(const float2* p, unsigned rank) {
    return *emulator::map_shared(p, rank);
}

// -- Barriers in shared memory ---------------------------------------------------------------------

static inline void barrier_init(SharedAddress barrier, unsigned arrivals) {
    ptx::barrier_init(barrier, arrivals);
}
static inline void barriers_ready() {}
static inline void barrier_arrive(SharedAddress barrier) {
    ptx::arrive(barrier, emulator::block_rank());
}
static inline void barrier_expect(SharedAddress barrier, unsigned bytes) {
    ptx::arrive(barrier, emulator::block_rank(), bytes);
}
static inline void barrier_arrive_at(SharedAddress barrier, unsigned rank) {
    ptx::arrive(barrier, rank);
}
static inline void barrier_wait(SharedAddress barrier, unsigned parity) {
    ptx::wait_at(barrier, parity);
}

// -- Counts in memory ------------------------------------------------------------------------------

static inline void wait_for_count(const int* count, int value) {
    while (*(const volatile int*)count != value) { emulator::give_way(); }
}

// -- Copies of boxes -------------------------------------------------------------------------------

static inline void load_box(SharedAddress to, const TensorMap* map, int x, int y,
                            SharedAddress barrier) {
    ptx::start_load(to, map, x, y, barrier, emulator::block_rank());
}
static inline void load_box_for(SharedAddress to, const TensorMap* map, int x, int y,
                                SharedAddress barrier, unsigned short blocks) {
    for (unsigned rank = 0; blocks >> rank; ++rank) {
        if (blocks >> rank & 1) { ptx::start_load(to, map, x, y, barrier, rank); }
    }
}
static inline void load_bytes(SharedAddress to, const void* from, unsigned bytes,
                              SharedAddress barrier) {
    ptx::start_load(to, from, bytes, barrier);
}
static inline void store_box(const TensorMap* map, int x, int y, SharedAddress from) {
    ptx::start_store(map, x, y, from);
}
static inline void stores_begin() { ptx::fence_writes(); }
template <int PENDING = 0> static inline void stores_have_read() { ptx::finish_stores(PENDING); }
static inline void stores_are_done() { ptx::finish_stores(); }

static inline void prefetch_line(const void*) {}

// -- Products of a warpgroup ----------------------------------------------------------------------

static inline Descriptor k_inside(SharedAddress tile) { return {tile, 0}; }
static inline Descriptor k_outside(SharedAddress tile, unsigned chunk) { return {tile, chunk}; }

template <int COLUMNS, class Left, class Right, bool K_OUTSIDE, bool LEFT_OUTSIDE = false>
static inline void wgmma(float (&d)[COLUMNS / 2], Descriptor a, Descriptor b, int add) {
    static_assert(sizeof(Left) == sizeof(Right) && (!K_OUTSIDE || sizeof(Right) == 2));
    static_assert(!LEFT_OUTSIDE || (K_OUTSIDE && COLUMNS <= 192));
    const ptx::Product product{d, a, b, add,
                               ptx::compute<COLUMNS, Left, Right, K_OUTSIDE, LEFT_OUTSIDE>};
    ptx::check_operands<COLUMNS, Right, K_OUTSIDE, LEFT_OUTSIDE>(product);
    ptx::add_product(product);
}
template <int COLUMNS, bool K_OUTSIDE>
static inline void wgmma_left(float (&d)[COLUMNS / 2], const unsigned (&a)[4], Descriptor b,
                              int add) {
    ptx::Product product{d, {}, b, add, ptx::compute<COLUMNS, __nv_bfloat16, __nv_bfloat16, K_OUTSIDE>};
    product.left = ptx::gather_left({{a[0], a[1], a[2], a[3]}});
    product.in_registers = true;
    ptx::check_operands<COLUMNS, __nv_bfloat16, K_OUTSIDE>(product);
    ptx::add_product(product);
}
static inline void wgmma_begin() { ptx::products_begin(); }
static inline void wgmma_commit() { ptx::products_commit(); }
template <int PENDING> static inline void wgmma_wait() { ptx::finish_products(PENDING); }

template <int COUNT> static inline void arrived(float (&)[COUNT]) {}

static inline void stmatrix_x4(SharedAddress row, unsigned a, unsigned b, unsigned c, unsigned d) {
    ptx::store_matrices(row, {{a, b, c, d}}, false);
}

static inline void stmatrix_x4_trans(SharedAddress row, unsigned a, unsigned b, unsigned c,
                                     unsigned d) {
    ptx::store_matrices(row, {{a, b, c, d}}, true);
}

template <int COUNT> static inline void give_registers() { ptx::set_registers(COUNT, false); }
template <int COUNT> static inline void take_registers() { ptx::set_registers(COUNT, true); }

static inline unsigned long long global_time() { return ptx::time(); }

static inline void forget(uint4&) {}
static inline void forget(uint2&) {}
static inline void forget(float&) {}
static inline void forget(int&) {}
static inline void forget(unsigned&) {}
static inline void forget(SharedAddress&) {}
