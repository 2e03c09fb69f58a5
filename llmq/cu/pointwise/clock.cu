// clock.cu -- the time between two points of a stream.
//
//   start: at = now                  stop: total += now - at
//
// Data     at: nanoseconds. total: milliseconds.
// Launch   one thread.
// Cost     a launch, about a microsecond, which the measured time includes. The timer's resolution
//          depends on the GPU: up to a microsecond.
// Needs    stop: start before it on the same stream.
#include "common.cuh"
#include "ptx.cuh"

extern "C" __global__ void clock_start(i64* __restrict__ at) { at[0] = (i64)global_time(); }

extern "C" __global__ void clock_stop(f64* __restrict__ total, const i64* __restrict__ at) {
    total[0] += 1e-6 * (f64)((i64)global_time() - at[0]);
}
