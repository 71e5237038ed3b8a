// A stream that goes with its owner, and a place in the work of a stream for others of the same device, or for the
// host, to wait for.
#pragma once

#include <memory>

struct CUevent_st;
struct CUstream_st;

namespace mmrec::kernels {

struct DestroyStream {
  void operator()(CUstream_st* stream) const;
};
using OwnedStream = std::unique_ptr<CUstream_st, DestroyStream>;
/// Makes the device the calling thread's current one, and a stream on it that does not wait for the default stream.
OwnedStream new_stream(int device);

/// Move-only. Made on the current device.
class Mark {
 public:
  Mark();
  /// Behind what is on the stream.
  void set(CUstream_st* stream);
  /// Makes the stream wait for what was before the place. Requires: set().
  void await(CUstream_st* stream) const;
  /// Waits for it on the host; not at all before the first set().
  void await() const;

 private:
  struct Destroy {
    void operator()(CUevent_st* event) const;
  };
  std::unique_ptr<CUevent_st, Destroy> event_;
};

}  // namespace mmrec::kernels
