// A recorded sequence of ops that is replayed by one call.
#pragma once

#include <functional>

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
  Graph(Graph&& other) noexcept;
  Graph& operator=(Graph&& other) noexcept;
  ~Graph();

  void launch(Cuda& cuda) const;

 private:
  CUgraphExec_st* executable_ = nullptr;
};

}  // namespace mmrec::kernels
