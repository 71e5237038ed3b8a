// A recorded sequence of ops that is replayed by one call.
#pragma once

#include <functional>
#include <memory>

struct CUgraphExec_st;

namespace mmrec::kernels {

class Cuda;

/// What `ops` enqueued on the backend's stream, ready to be enqueued again with the same arguments. The buffers that it
/// reads and writes must outlive it. Move-only.
class Graph {
 public:
  Graph() = default;
  /// Records without running. `ops` may call ops alone: no allocation, upload, download or synchronisation, and each of
  /// them must have run before (a kernel's first launch may load its code, which cannot be recorded). Throws what `ops`
  /// throws, and std::system_error.
  Graph(Cuda& cuda, const std::function<void()>& ops);

  void launch(Cuda& cuda) const;

 private:
  struct Destroy {
    void operator()(CUgraphExec_st* executable) const;
  };
  std::unique_ptr<CUgraphExec_st, Destroy> executable_;
};

}  // namespace mmrec::kernels
