// row_weights.cuh -- the weights of rows, the last argument of kernels compiled with WEIGHTED = 1.
#pragma once

#include "common.cuh"

#ifndef WEIGHTED
#define WEIGHTED 0
#endif
#if WEIGHTED
#define WEIGHTS_ARG , const f32* __restrict__ weights
#define WEIGHT_OF(row) weights[row]
#else
#define WEIGHTS_ARG
#define WEIGHT_OF(row) 1.0f
#endif
