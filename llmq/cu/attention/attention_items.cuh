// attention_items.cuh -- the tiles of attention_backward.cu, and the threads that load them.
//
// Tiles of keys come before tiles of queries; the parts of query heads follow each other. A counter
// decides which block takes a tile: this file gives only the order of tiles.
#pragma once
#include "common.cuh"
#include "ptx.cuh"

constexpr int D = HEAD_DIM;
constexpr int ROWS = 64, LINE = 128, BOX_BYTES = ROWS * LINE;  // a box: 64 rows, 64 columns
constexpr int BOXES = D / 64, TILE_BYTES = BOXES * BOX_BYTES;  // a tile: 64 rows of a head
constexpr int OWN_BYTES = 4 * TILE_BYTES;                      // two tensors, two warpgroups each
constexpr int STAGE_BYTES = 2 * TILE_BYTES, STATISTICS_BYTES = 2 * ROWS * 4;
constexpr int WARPS = 8;                             // warps that multiply
constexpr int LOADER_REGISTERS = D == 64 ? 40 : 24;  // a thread has 168 at launch
static_assert(D == 64 || D == 128, "there are no registers for larger heads");
static_assert(STAGES >= 3, "one is held until the next one's scores are there, one may be skipped");

struct Ring {
    u32 stage = 0, parity;
    __device__ __forceinline__ explicit Ring(u32 parity) : parity(parity) {}
    __device__ __forceinline__ void next() {
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
};

struct Sizes {
    int seq_len, num_heads, num_kv_heads, batches, part_heads;
    float scale, scale_log2;
    __device__ __forceinline__ int blocks() const { return (u32)seq_len / ROWS; }
    __device__ __forceinline__ int tiles() const { return (blocks() + 1) / 2; }
    __device__ __forceinline__ int group() const { return num_heads / num_kv_heads; }
    __device__ __forceinline__ int parts() const {
        return (u32)(group() + part_heads - 1) / part_heads;
    }
    __device__ __forceinline__ int key_items() const {
        return tiles() * batches * num_kv_heads * parts();
    }
    __device__ __forceinline__ int items() const {
        return key_items() + tiles() * batches * num_heads;
    }
};

// A tile's place, and over which blocks of 64 rows of the other side its block walks.
struct alignas(16) Item {
    int kind;         // QUERIES, KEYS, or NOTHING, when all tiles are taken
    int batch, head;  // batch: the sequence; head: the first query head that the tile uses
    int to;           // head of d_qkv for dQ or dK; dV's is num_kv_heads further
    int block;        // number of the first warpgroup's 64 rows; the second has the next block
    int first, end, heads;
};
enum { QUERIES, KEYS, NOTHING };

__device__ __forceinline__ Item item_of(int number, const Sizes& sizes) {
    const int tiles = sizes.tiles(), key_items = sizes.key_items();
    if (number >= sizes.items()) { return {NOTHING}; }
    const bool keys = number < key_items;
    if (!keys) { number -= key_items; }
    // Tiles of one head are neighbours, so that they share reads in L2, the longest first.
    const int strip = number / tiles, tile = number % tiles;
    const int block = 2 * (keys ? tile : tiles - 1 - tile);
    const int strips = keys ? sizes.num_kv_heads : sizes.num_heads;
    const int batch = strip / strips % sizes.batches, head = strip % strips;
    if (keys) {
        const int group = sizes.group(), to = sizes.num_heads + head;
        const int before = strip / (strips * sizes.batches) * sizes.part_heads;  // query heads
        const int heads = min(sizes.part_heads, group - before);
        return {KEYS, batch, head * group + before, to, block, block, sizes.blocks(), heads};
    }
    return {QUERIES, batch, head, head, block, 0, min(block + 2, sizes.blocks()), 1};
}

// A block's shared memory: addresses of tiles and of barriers.
struct Memory {
    SharedAddress own, stages, statistics, full, empty, own_full, own_empty, read, items;

    __device__ __forceinline__ explicit Memory(const void* shared) {
        SharedAddress start = shared_address(shared);
        forget(start);  // else addresses would stay in registers, which are too few
        own = (start + 1023) & ~(SharedAddress)1023;
        stages = own + 2 * OWN_BYTES;
        statistics = stages + STAGES * STAGE_BYTES;
        items = statistics + STAGES * STATISTICS_BYTES;
        full = items + 2 * sizeof(Item);
        empty = full + 8 * STAGES;
        own_full = empty + 8 * STAGES;
        own_empty = own_full + 16;
        read = own_empty + 16;
    }
};

// The tile of a turn, stored by the thread that takes tiles.
__device__ __forceinline__ Item item_at(const Memory& memory, u32 turn) {
    const SharedAddress from = memory.items + (turn & 1) * sizeof(Item);
    const uint4 a = load_shared(from), b = load_shared(from + 16);
    return {(int)a.x, (int)a.y, (int)a.z, (int)a.w, (int)b.x, (int)b.y, (int)b.z, (int)b.w};
}

// -- The threads that load ------------------------------------------------------------------------

// Load the boxes of 64 rows of a head.
__device__ __forceinline__ void load_tile(SharedAddress to, const TensorMap* map, int column,
                                          int row, SharedAddress arrived) {
#pragma unroll
    for (int i = 0; i < BOXES; ++i) {
        load_box(to + i * BOX_BYTES, map, column + 64 * i, row, arrived);
    }
}

// Takes tiles, stores their items in shared memory, and loads the tiles' own rows.
__device__ __forceinline__ void load_own(const void* shared, Sizes sizes, i32* taken,
                                         const TensorMap* qkv, const TensorMap* d_out) {
    int number = atomicAdd(taken, 1);
#pragma unroll 1
    for (u32 turn = 0;; ++turn) {
        const Memory memory(shared);
        const u32 slot = turn & 1;
        const SharedAddress arrived = memory.own_full + 8 * slot;
        const Item item = item_of(number, sizes);
        barrier_wait(memory.own_empty + 8 * slot, turn >> 1 & 1 ^ 1);  // at first the slot is empty
        const SharedAddress to = memory.items + slot * sizeof(Item);
        store_shared(to, make_uint4(item.kind, item.batch, item.head, item.to));
        store_shared(to + 16, make_uint4(item.block, item.first, item.end, item.heads));
        if (item.kind == NOTHING) {
            barrier_arrive(arrived);
            return;
        }
        number = atomicAdd(taken, 1);  // early: the next turn needs the number
        forget(sizes.num_kv_heads);
        forget(sizes.seq_len);
        const int column = item.to * D;
        const int other = item.kind == KEYS ? column + sizes.num_kv_heads * D : column;
        const int present = min(2, sizes.blocks() - item.block);
        barrier_expect(arrived, present * 2 * TILE_BYTES);
#pragma unroll 1
        for (int i = 0; i < present; ++i) {
            const int row = item.batch * sizes.seq_len + (item.block + i) * ROWS;
            const SharedAddress tile = memory.own + slot * OWN_BYTES + i * TILE_BYTES;
            load_tile(tile, qkv, column, row, arrived);
            load_tile(tile + 2 * TILE_BYTES, item.kind == KEYS ? qkv : d_out, other, row, arrived);
        }
    }
}

// Loads the steps that the tiles' warpgroups walk over.
__device__ __forceinline__ void load_steps(const void* shared, Sizes sizes, const float* statistics,
                                           const TensorMap* qkv, const TensorMap* d_out) {
    Ring ring(1);  // the first wait for an empty stage is over at once
#pragma unroll 1
    for (u32 turn = 0;; ++turn) {
        const Memory memory(shared);
        barrier_wait(memory.own_full + 8 * (turn & 1), turn >> 1 & 1);
        const Item item = item_at(memory, turn);
        barrier_arrive(memory.own_empty + 8 * (turn & 1));
        if (item.kind == NOTHING) { return; }
        const bool keys = item.kind == KEYS;
        forget(sizes.num_heads);
        forget(sizes.num_kv_heads);
        forget(sizes.seq_len);
        // head: the head in qkv. block counts over all sequences; ahead + block: its statistics.
        int head = keys ? item.head : sizes.num_heads + item.head / sizes.group();
        const int before = item.batch * sizes.blocks(), length = item.end - item.first;
        int block = before + item.first;
        int ahead = (item.batch * (sizes.num_heads - 1) + item.head) * sizes.blocks();
#pragma unroll 1
        for (int left = item.heads * length; left > 0; --left, ring.next()) {
            forget(sizes.num_kv_heads);
            const Memory memory(shared);
            const SharedAddress x = memory.stages + ring.stage * STAGE_BYTES;
            const SharedAddress arrived = memory.full + 8 * ring.stage;
            barrier_wait(memory.empty + 8 * ring.stage, ring.parity);
            barrier_expect(arrived, STAGE_BYTES + (keys ? STATISTICS_BYTES : 0));
            load_tile(x, qkv, head * D, block * ROWS, arrived);
            if (keys) {
                load_tile(x + TILE_BYTES, d_out, head * D, block * ROWS, arrived);
                load_bytes(memory.statistics + ring.stage * STATISTICS_BYTES,
                           statistics + (i64)(ahead + block) * (2 * ROWS), STATISTICS_BYTES,
                           arrived);
            } else {
                load_tile(x + TILE_BYTES, qkv, (head + sizes.num_kv_heads) * D, block * ROWS,
                          arrived);
            }
            if (++block == before + item.end) {  // the next head of the group
                block -= length;
                ahead += sizes.blocks();
                ++head;
            }
        }
    }
}
