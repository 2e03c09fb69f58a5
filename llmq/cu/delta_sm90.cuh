// delta_sm90.cuh -- scans of the gated delta rule on Hopper, by products of a warpgroup: delta_rule.cu.
//
// Such a product reads a tile once for all of its four warps, and runs while they do something else:
// copy the next chunk, write the last one's results, scale the state. BF16, a SLICE of 64.
#pragma once
#include "delta_chunk.cuh"

// A tile of 64 rows as such products take it (ptx.cuh): its columns lie in boxes of 64, of which a row
// is 128 bytes. Its 16-byte units change places by the row.
struct Boxes {
    static constexpr int LINE = 128, BOX_BYTES = CHUNK * LINE;
    SharedAddress at;
    __device__ __forceinline__ SharedAddress address(int row, int column) const {
        return at + column / 64 * BOX_BYTES + row * LINE +
               ((column / 8 % 8 ^ row % 8) << 4) + column % 8 * 2;
    }
};

// Starts sums += a[0 .. K - 1] (16 rows of each warp) times a tile whose rows are the inner dimension, or
// (turned) the columns. They may not be touched until it has been waited for.
template <bool TURNED, int K, int N>
__device__ __forceinline__ void start_product(Sums (&sums)[N], const Left<T> (&a)[K],
                                              const Boxes& tile) {
    auto& flat = reinterpret_cast<float (&)[8 * N]>(sums);
#pragma unroll
    for (int k = 0; k < K; ++k) {
        const Descriptor b = TURNED ? k_inside(tile.at) + (k / 4 * (Boxes::BOX_BYTES / 16) + k % 4 * 2)
                                    : k_outside(tile.at, Boxes::BOX_BYTES) + k * Boxes::LINE;
        wgmma_left<16 * N, !TURNED>(flat, a[k].r, b, 1);
    }
    wgmma_commit();
}
// Until at most PENDING of the products run, of which this one is none.
template <int PENDING, int N> __device__ __forceinline__ void finish_product(Sums (&sums)[N]) {
    wgmma_wait<PENDING>();
    arrived(reinterpret_cast<float (&)[8 * N]>(sums));
}
template <int N>
__device__ __forceinline__ void round_left(Left<T> (&a)[N], const Sums (&sums)[N]) {
#pragma unroll
    for (int n = 0; n < N; ++n) { a[n] = to_left<T>(sums[n]); }
}

// All tiles of a turn and its factors to keys and from queries, while those of the turn before are used.
// Sources as those of a Ring.
template <class Sources> struct Buffers {
    const Sources& sources;
    SharedAddress memory;
    float (*known)[2 * CHUNK];
    int turns;

    static __device__ __forceinline__ constexpr int place(int step) {
        int bytes = 0;
        for (int s = 0; s < step; ++s) { bytes += CHUNK * 2 * Sources::COLUMNS[s]; }
        return bytes;
    }
    template <int STEP> __device__ __forceinline__ Boxes tile(int turn) const {
        return {memory + turn % 2 * place(Sources::STEPS) + place(STEP)};
    }
    template <int STEP = 0> __device__ __forceinline__ void fetch(int turn) {
        if constexpr (STEP < Sources::STEPS) {
            if (turn >= turns) { return; }
            constexpr int UNITS = Sources::COLUMNS[STEP] / 8;
            const Tile<T> from = sources.template of<STEP>(turn);
            const Boxes to = tile<STEP>(turn);
#pragma unroll 4
            for (int n = 0; n < CHUNK * UNITS / SCAN_THREADS; ++n) {
                const int i = threadIdx.x + n * SCAN_THREADS;
                const int row = i / UNITS, column = i % UNITS * 8;
                const bool valid = row < from.rows;
                cp_async_16(to.address(row, column),
                            from.at + (valid ? row * from.pitch : 0) + column, valid);
            }
            fetch<STEP + 1>(turn);
        } else if (threadIdx.x < 2 * CHUNK / 4) {
            cp_async_16(shared_address(known[turn % 2] + threadIdx.x * 4),
                        sources.known(turn) + threadIdx.x * 4, true);
        }
    }
    // All threads are through with the turn before, and have what they fetched.
    __device__ __forceinline__ void begin() {
        cp_async_commit();
        cp_async_wait<0>();
        stores_begin();  // products see what was copied
        __syncthreads();
    }
};

// A tile of results for each of two turns in front, then buffers.
template <class Sources>
__device__ __forceinline__ Buffers<Sources> buffers_behind(const T* tiles, const Sources& sources,
                                                           float (*known)[2 * CHUNK], int turns) {
    const SharedAddress end = shared_address(tiles + 2 * CHUNK * TILE);
    return {sources, (end + 1023) & ~(SharedAddress)1023, known, turns};
}

// Held: only where there is such a scan, it has to hold the state in registers.
template <bool OUT, class Held = State>
__device__ __forceinline__ void scan_warpgroup(T* out, T* states, T* changes, float* state,
                                               const Scanned<OUT>& sources) {
    extern __shared__ uint4 memory[];
    alignas(16) __shared__ float known[2][2 * CHUNK];
    T* const tiles = reinterpret_cast<T*>(memory);
    const Place& at = sources.at;
    auto buffers = buffers_behind(tiles, sources, known, at.chunks);
    const auto finish = [&](int c) {
        const T* const tile = tiles + c % 2 * CHUNK * TILE;
        OUT ? put_out(out, at, c, tile) : put_changes(changes, at, c, tile);
    };
    buffers.fetch(0);
    Held here(nullptr);
    here.read(state);
    for (int c = 0; c < at.chunks; ++c) {
        const float whole = __ldg(sources.known(c) + FROM_STATE * CHUNK + CHUNK - 1);
        const Tokens to_key{known[c % 2] + TO_KEY * CHUNK};
        const Tokens from_query{known[c % 2] + FROM_QUERY * CHUNK};
        T* const tile = tiles + c % 2 * CHUNK * TILE;
        Left<T> a[State::TILES], b[4], to_keys[4];
        round_left(a, here.S);
        buffers.begin();
        Sums change[4], read[4] = {};
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            to_sums(change[n], left<true>(buffers.template tile<0>(c), here.value, 16 * n), -1.0f);
        }
        wgmma_begin();
        start_product<true>(change, a, buffers.template tile<1>(c));
        if constexpr (OUT) { start_product<true>(read, a, buffers.template tile<2>(c)); }
        buffers.fetch(c + 1);
        if (c) { finish(c - 1); }
        if (!OUT) { here.put_into(states + at.of_chunk(c) * DK * DV); }
        here.times(whole);
        finish_product<OUT ? 1 : 0>(change);
#pragma unroll
        for (int n = 0; n < 4; ++n) {
#pragma unroll
            for (int i = 0; i < 8; ++i) { change[n][i / 4][i % 4] = -change[n][i / 4][i % 4]; }
        }
        round_left(b, change);
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            if (!OUT) { put_tile<true>(tile, TILE, here.value, 16 * n, change[n]); }
            to_key.scale(change[n], 16 * n);
        }
        round_left(to_keys, change);
        if constexpr (OUT) {
            finish_product<0>(read);
#pragma unroll
            for (int n = 0; n < 4; ++n) { from_query.scale(read[n], 16 * n); }
            wgmma_begin();
            start_product<true>(read, b, buffers.template tile<3>(c));
        } else {
            wgmma_begin();
        }
        start_product<false>(here.S, to_keys, buffers.template tile<OUT ? 4 : 2>(c));
        if constexpr (OUT) {
            finish_product<1>(read);
#pragma unroll
            for (int n = 0; n < 4; ++n) { put_tile<true>(tile, TILE, here.value, 16 * n, read[n]); }
        }
        finish_product<0>(here.S);
    }
    __syncthreads();
    finish(at.chunks - 1);
    here.write(state);
}

template <class Held = State>
__device__ __forceinline__ void scan_backward_warpgroup(T* d_changes, T* d_states, float* d_state,
                                                        const ScannedBackward& sources) {
    extern __shared__ uint4 memory[];
    alignas(16) __shared__ float known[2][2 * CHUNK];
    T* const tiles = reinterpret_cast<T*>(memory);
    const Place& at = sources.at;
    auto buffers = buffers_behind(tiles, sources, known, at.chunks);
    const auto finish = [&](int turn) {
        put_changes(d_changes, at, at.chunks - 1 - turn, tiles + turn % 2 * CHUNK * TILE);
    };
    buffers.fetch(0);
    Held here(nullptr);  // the gradient of the state
    here.read(d_state);
    for (int turn = 0; turn < at.chunks; ++turn) {
        const float whole = __ldg(sources.known(turn) + FROM_STATE * CHUNK + CHUNK - 1);
        const Tokens to_key{known[turn % 2] + TO_KEY * CHUNK};
        const Tokens from_query{known[turn % 2] + FROM_QUERY * CHUNK};
        Left<T> a[State::TILES], d_o[4], of_queries[4];
        round_left(a, here.S);
        buffers.begin();
        Sums d_change[4] = {};
        wgmma_begin();
        start_product<true>(d_change, a, buffers.tile<1>(turn));
        buffers.fetch(turn + 1);
        if (turn) { finish(turn - 1); }
        here.put_into(d_states + at.of_chunk(at.chunks - 1 - turn) * DK * DV);
        here.times(whole);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            d_o[k] = left<true>(buffers.tile<0>(turn), here.value, 16 * k);
            of_queries[k] = from_query.scaled(d_o[k], 16 * k);
        }
        finish_product<0>(d_change);
#pragma unroll
        for (int n = 0; n < 4; ++n) { to_key.scale(d_change[n], 16 * n); }
        wgmma_begin();
        start_product<false>(d_change, d_o, buffers.tile<2>(turn));
        start_product<false>(here.S, of_queries, buffers.tile<3>(turn));
        finish_product<1>(d_change);
        Left<T> minus[4];
        const float factors[2] = {-1.0f, -1.0f};
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            put_tile<true>(tiles + turn % 2 * CHUNK * TILE, TILE, here.value, 16 * n, d_change[n]);
            minus[n] = times_rows(to_left<T>(d_change[n]), factors);
        }
        wgmma_begin();
        start_product<false>(here.S, minus, buffers.tile<4>(turn));
        finish_product<0>(here.S);
    }
    __syncthreads();
    finish(at.chunks - 1);
    here.write(d_state);
}
