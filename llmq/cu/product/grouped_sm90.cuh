// grouped_sm90.cuh -- the tiles of products for Hopper whose rows are sorted by expert.
//
// Work and Tile play the roles of those in product_sm90.cuh. Each expert's rows have pairs of tiles
// of their own, multiplied by the expert's matrix. If the last pair has at most 128 rows, both
// blocks take these rows, with neighbouring columns; so an expert wastes half a tile on average,
// not a whole tile. Right has all matrices below each other, `apart` rows each; the tail likewise,
// `tail_apart` rows each. A block counts the tiles in front of each expert once, and looks up its
// tiles in these counts. Tiles of an expert go down the rows first, so that rows and matrix stay in
// L2.
//
// With GROUPED = 2 products sum over rows: each expert has all tiles of its matrix.
#pragma once

#if GROUPED == 1
constexpr int MOST_EXPERTS = 512;

struct Work {
    const i32 *starts, *before;  // before: tiles in front of each expert, in shared memory
    int experts, columns, tiles, width, apart, tail_apart, cluster, clusters;
    u32 rank;

    // All threads of the block call this. starts: (experts + 1). all_columns: columns of a result.
    __device__ __forceinline__ Work(const i32* starts, int experts, int all_columns, int width,
                                    int apart, int tail_apart)
        : starts(starts),
          experts(experts),
          columns((all_columns + width - 1) / width),
          width(width),
          apart(apart),
          tail_apart(tail_apart),
          cluster(blockIdx.x / 2),
          clusters(gridDim.x / 2),
          rank(cluster_rank()) {
        __shared__ i32 counted[MOST_EXPERTS + 1];
        if (threadIdx.x < 32) { count(counted); }
        __syncthreads();
        before = counted;
        tiles = counted[experts];
    }

    // Number of pairs of tiles, one above the other, that `rows` rows take.
    static __device__ __forceinline__ int pairs(int rows) {
        return (rows + TILE_ROWS - 1) / (2 * TILE_ROWS);
    }

private:
    __device__ __forceinline__ void count(i32* to) const {
        const int lane = threadIdx.x;
        int all = 0;
        for (int first = 0; first < experts; first += 32) {
            const int e = first + lane, rows = e < experts ? starts[e + 1] - starts[e] : 0;
            const bool beside = rows > pairs(rows) * 2 * TILE_ROWS;
            const int own = pairs(rows) * columns + (beside ? (columns + 1) / 2 : 0);
            int sum = own;
#pragma unroll
            for (int distance = 1; distance < 32; distance *= 2) {
                const int other = __shfl_up_sync(~0u, sum, distance);
                if (lane >= distance) { sum += other; }
            }
            if (e < experts) { to[e] = all + sum - own; }
            all += __shfl_sync(~0u, sum, 31);
        }
        if (lane == 0) { to[experts] = all; }
    }
};

// end: end of the expert's rows; a tile may reach beyond. beside: the other block has the same
// rows.
struct Tile {
    int row, column, right, tail, expert, end;
    bool beside;

    __device__ __forceinline__ Tile(int t, const Work& work) {
        expert = 0;  // the last expert with at most this many tiles before it
#pragma unroll
        for (int step = MOST_EXPERTS / 2; step > 0; step /= 2) {
            const int e = expert + step;
            if (e < work.experts && work.before[e] <= t) { expert = e; }
        }
        const int rest = t - work.before[expert], start = work.starts[expert];
        end = work.starts[expert + 1];
        right = expert * work.apart, tail = expert * work.tail_apart;
        const int pairs = Work::pairs(end - start), last = rest - pairs * work.columns;
        beside = last >= 0;
        if (beside) {
            row = start + pairs * 2 * TILE_ROWS;
            column = (last * 2 + work.rank) * work.width;
        } else {
            row = start + (rest % pairs * 2 + work.rank) * TILE_ROWS;
            column = rest / pairs * work.width;
        }
    }
};
#else
struct Work {
    const i32* starts;
    int pairs, columns, tiles, width, last_width, cluster, clusters;
    u32 rank;

    // starts: (experts + 1). rows, all_columns: size of a matrix. last_width: columns of the last
    // tile of a row.
    __device__ __forceinline__ Work(const i32* starts, int experts, int rows, int all_columns,
                                    int width)
        : starts(starts),
          pairs((rows + 2 * TILE_ROWS - 1) / (2 * TILE_ROWS)),
          columns((all_columns + width - 1) / width),
          tiles(experts * pairs * columns),
          width(width),
          last_width(all_columns - (columns - 1) * width),
          cluster(blockIdx.x / 2),
          clusters(gridDim.x / 2),
          rank(cluster_rank()) {}
};

// first, count: the rows to sum over. boxes: number of boxes of columns.
struct Tile {
    static constexpr int right = 0, tail = 0;
    int row, column, boxes, expert, first, count;

    __device__ __forceinline__ Tile(int t, const Work& work) {
        const int of_expert = work.pairs * work.columns;
        expert = t / of_expert;
        // Tiles are rotated by expert, or one cluster might get all experts' narrow tiles.
        const int rest = (t + expert * 7) % of_expert;
        row = (rest % work.pairs * 2 + work.rank) * TILE_ROWS;
        column = rest / work.pairs;
        boxes = ((column + 1 < work.columns ? work.width : work.last_width) + BOX - 1) / BOX;
        column *= work.width;
        first = work.starts[expert];
        count = work.starts[expert + 1] - first;
    }
};
#endif
