// Instructions that CUDA C++ has no portable spelling for, one thin function each, by subject. Everything in inline
// assembly or behind an intrinsic of a data type's header lives in this folder and nowhere else, so the rest of the
// device code is plain C++. Include this file, which the emulated device replaces, and none of the others.
#pragma once

#include "kernels/cuda/isa/barrier.cuh"
#include "kernels/cuda/isa/cluster.cuh"
#include "kernels/cuda/isa/copy.cuh"
#include "kernels/cuda/isa/math.cuh"
#include "kernels/cuda/isa/memory.cuh"
#include "kernels/cuda/isa/mma.cuh"
