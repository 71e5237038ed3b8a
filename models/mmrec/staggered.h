// A long sequence's chunk in parts that overlap, on a backend that has a specialisation (mmrec/cuda/staggered.h).
#pragma once

#include "models/mmrec/stack.h"

namespace mmrec::models {

/// It has, like this one, which takes nothing,
///   takes(chunk)               whether it is to run a chunk
///   run(chunk, normed, done)   runs it and gives the path of its parts; normed [rows, D] receives rmsnorm(x; norm)
template <class Backend, class A>
class Staggered {
 public:
  Staggered(const Config& /*config*/, const ModelView<typename Backend::Space>& /*model*/, Backend& /*main*/,
            const ChunkPlan& /*plan*/, const SlotLayout& /*slot*/) {}
  bool takes(const Chunk& /*chunk*/) const { return false; }
  Path run(const Chunk& /*chunk*/, kernels::MatrixView<A, typename Backend::Space> /*normed*/, Done& /*done*/) {
    return Path::kReference;
  }
};

}  // namespace mmrec::models
