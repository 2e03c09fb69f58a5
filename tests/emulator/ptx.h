// ptx.h -- what emulator/ptx.cuh is made of, as far as it is the same for all kernels: included ahead
// of them by cuda_emulator.h, compiled once (ptx.cpp) but for the templates.
#pragma once

using SharedAddress = size_t;

namespace ptx {

using emulator::check;
using emulator::warp_exchange;

// -- Matrices in a warp's registers ---------------------------------------------------------------

struct Registers4 {
    unsigned r[4];
};

// row: this lane's; transposed: ldmatrix's .trans.
Registers4 load_matrices(SharedAddress row, bool transposed);

// One lane's part of the operands of mma.m16n8k16.
struct MmaIn {
    unsigned a[4], b[2];
    float c[4];
};
struct MmaOut {
    float d[4];
};

MmaOut multiply_matrices(const MmaIn& in);

// One lane's part of the operands of mma.m16n8k8 of TF32.
struct MmaTf32In {
    float a[4], b[2], c[4];
};

MmaOut multiply_tf32(const MmaTf32In& in);

// One lane's part of the operands of mma.m16n8k32 of signed bytes.
struct MmaBytesIn {
    unsigned a[4], b[2];
    int c[4];
};
struct MmaBytesOut {
    int d[4];
};

MmaBytesOut multiply_bytes(const MmaBytesIn& in);

// The same of fp8 codes, summed in float: a lane's numbers in the order of its codes.
struct MmaCodesIn {
    float a[16], b[8], c[4];
};
MmaOut multiply_codes(const MmaCodesIn& in);

void store_matrices(SharedAddress row, const Registers4& matrices, bool transposed);

// -- Fences between what threads write to shared memory and what copies and products see there ------

// The running thread has written 16 bytes; it makes a fence; a copy or product of its meets them.
void written(SharedAddress address);
void fence_writes();
void check_fence(SharedAddress address, unsigned rank = emulator::block_rank());

// -- Copies in the background ---------------------------------------------------------------------

void copy_in_background(SharedAddress to, const void* from, bool valid, int size);
void copies_commit();
void copies_wait(size_t pending);

// -- Barriers in shared memory ---------------------------------------------------------------------

void barrier_init(SharedAddress address, unsigned arrivals);
void arrive(SharedAddress address, unsigned rank, unsigned bytes = 0);

void wait_at(SharedAddress barrier, unsigned parity);

// -- Copies of boxes -------------------------------------------------------------------------------

static inline SharedAddress swizzled(SharedAddress address) {
    return address ^ (address >> 7 & 7) << 4;
}

}  // namespace ptx

struct TensorMap {
    char* matrix;
    long long rows, columns, size, box_rows;  // size: of an element
    long long unused[11];
    int width() const { return 128 / size; }
    bool has(long long x, long long y) const { return x >= 0 && x < columns && y >= 0 && y < rows; }
    char* at(long long x, long long y) const { return matrix + (y * columns + x) * size; }
};

namespace ptx {

void start_load(SharedAddress to, const TensorMap* map, int x, int y, SharedAddress barrier,
                unsigned rank);
void start_load(SharedAddress to, const void* from, unsigned bytes, SharedAddress barrier);
void start_store(const TensorMap* map, int x, int y, SharedAddress from);
void finish_stores(size_t pending = 0);

}  // namespace ptx

// -- Products of a warpgroup ----------------------------------------------------------------------

struct Descriptor {
    SharedAddress address;
    unsigned chunk;  // of K outside
    Descriptor operator+(int steps) const { return {address + 16 * steps, chunk}; }
};

namespace ptx {

// The two rows of a left operand in registers that a thread's results are of.
struct LeftRows {
    float x[2][16];
};
LeftRows gather_left(const Registers4& a);

struct Product {
    float* d;
    Descriptor a, b;
    int add;
    void (*compute)(const Product&);
    bool in_registers = false;  // of a
    LeftRows left;
};
void products_begin();
void add_product(const Product& product);
void products_commit();
void finish_products(size_t pending);

template <class T> static float element(SharedAddress address) {
    return (float)*(const T*)swizzled(address);
}
static inline SharedAddress row_of(const Descriptor& tile, int row) {
    return tile.address + row / 8 * 1024 + row % 8 * 128;
}

template <int COLUMNS, class Left, class Right, bool K_OUTSIDE, bool LEFT_OUTSIDE = false>
static void compute(const Product& p) {
    constexpr int INNER = 32 / sizeof(Left);
    const unsigned warp = emulator::warp() % 4, g = emulator::lane() / 4, t = emulator::lane() % 4;
    float a[2][INNER], b[INNER];
    for (int half = 0; half < 2; ++half) {
        for (int k = 0; k < INNER; ++k) {
            const int row = 16 * warp + g + 8 * half;
            a[half][k] = p.in_registers ? p.left.x[half][k % 16]
                                        : element<Left>(row_of(p.a, LEFT_OUTSIDE ? k : row) +
                                                        (LEFT_OUTSIDE ? row : k) * sizeof(Left));
        }
    }
    for (int j = 0; j < COLUMNS / 8; ++j) {
        for (int i = 0; i < 2; ++i) {
            const int column = 8 * j + 2 * t + i;
            for (int k = 0; k < INNER; ++k) {
                if (K_OUTSIDE) {
                    const Descriptor chunk{p.b.address + column / 64 * p.b.chunk, 0};
                    b[k] = element<Right>(row_of(chunk, k) + column % 64 * sizeof(Right));
                } else {
                    b[k] = element<Right>(row_of(p.b, column) + k * sizeof(Right));
                }
            }
            for (int half = 0; half < 2; ++half) {
                float& d = p.d[4 * j + 2 * half + i];
                float sum = p.add ? d : 0.0f;
                for (int k = 0; k < INNER; ++k) { sum += a[half][k] * b[k]; }
                d = sum;
            }
        }
    }
}

// That operands in shared memory may be read: by one thread of the warpgroup.
template <int COLUMNS, class Element, bool K_OUTSIDE, bool LEFT_OUTSIDE = false>
static void check_operands(const Product& p) {
    if (emulator::current->index.x % 128 != 0) { return; }
    for (int i = 0; i < 32; i += 16) {
        for (int row = 0; row < 64 && !p.in_registers && !LEFT_OUTSIDE; ++row) {
            check_fence(swizzled(row_of(p.a, row) + i));
        }
        for (int row = 0; row < COLUMNS && !K_OUTSIDE; ++row) {
            check_fence(swizzled(row_of(p.b, row) + i));
        }
    }
    for (int k = 0; k < 16 && LEFT_OUTSIDE; ++k) {
        for (int i = 0; i < 128; i += 16) { check_fence(swizzled(row_of(p.a, k) + i)); }
    }
    for (int k = 0; k < 16 && K_OUTSIDE; ++k) {
        for (int column = 0; column < COLUMNS; column += 8) {
            const Descriptor chunk{p.b.address + column / 64 * p.b.chunk, 0};
            check_fence(swizzled(row_of(chunk, k) + column % 64 * sizeof(Element)));
        }
    }
}

// -- Registers of a warpgroup ----------------------------------------------------------------------

void set_registers(unsigned count, bool more);

// -- A cluster's beginning and end: what was left behind, or null -----------------------------------

void begin_cluster();
const char* end_cluster();

unsigned long long time();

}  // namespace ptx
