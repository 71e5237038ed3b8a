#include "streams.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "faults.h"

namespace {

using Work = std::function<void()>;

/// Work in the order it was enqueued, numbered 0, 1, ….
struct Queue {
  std::deque<Work> work;
  std::uint64_t done = 0;
  bool blocking = true;  // the null stream waits for it

  std::uint64_t end() const { return done + work.size(); }
  void run_until(std::uint64_t end) {
    while (done < end) {
      const Work next = std::move(work.front());
      work.pop_front();
      ++done;
      next();
    }
  }
};

/// A capture in progress; every stream that has joined it points here.
struct Capture {
  CUstream_st* origin = nullptr;
  bool forbids_device_calls = false;
  bool invalidated = false;
  std::vector<Work> nodes;  // in the order of enqueueing, which keeps all dependencies
  std::vector<CUstream_st*> streams;
};

/// Queues of all streams. A thread may run another's work, when one of its events waits for it.
std::recursive_mutex queues_mutex;
std::vector<std::shared_ptr<Queue>>& queues() {
  static auto* all = new std::vector<std::shared_ptr<Queue>>;
  return *all;
}

thread_local int captures_that_forbid_device_calls = 0;

}  // namespace

struct CUstream_st {
  int device = mmrec::cuda_emulation::current_device();
  std::shared_ptr<Queue> queue = std::make_shared<Queue>();
  std::shared_ptr<Capture> capture;
  std::size_t recorded = 0;  // captured operations
  std::size_t joined = 0;    // how many of them the origin has waited for
  struct Wait {
    std::size_t at = 0;  // number of this stream's operation that waited
    CUstream_st* stream = nullptr;
    std::size_t captured = 0;  // of that stream's operations
  };
  std::vector<Wait> waits = {};  // for streams of the capture
};
struct CUevent_st {
  int device = mmrec::cuda_emulation::current_device();
  std::shared_ptr<Queue> queue;  // null: never recorded, or recorded on the null stream: has happened
  std::uint64_t end = 0;         // the work of the queue that comes before
  std::weak_ptr<Capture> capture;
  CUstream_st* captured_stream = nullptr;
  std::size_t captured = 0;  // of the stream's operations
};
struct CUgraph_st {
  std::vector<Work> nodes;
};
struct CUgraphExec_st : CUgraph_st {};

namespace mmrec::cuda_emulation {

bool is_capturing(const CUstream_st* stream) { return stream != nullptr && stream->capture != nullptr; }
int device_of(const CUstream_st* stream) { return stream == nullptr ? current_device() : stream->device; }
bool capture_forbids_device_calls() { return captures_that_forbid_device_calls != 0; }

void enqueue(CUstream_st* stream, Work work) {
  if (is_capturing(stream)) {
    stream->capture->nodes.push_back(std::move(work));
    ++stream->recorded;
    return;
  }
  const std::lock_guard lock(queues_mutex);
  if (stream != nullptr) {
    stream->queue->work.push_back(std::move(work));
    return;
  }
  for (const auto& queue : queues()) {
    if (queue->blocking) queue->run_until(queue->end());
  }
  work();
}

void finish(CUstream_st* stream) {
  if (stream == nullptr) return;
  const std::lock_guard lock(queues_mutex);
  stream->queue->run_until(stream->queue->end());
}

void finish_all() {
  const std::lock_guard lock(queues_mutex);
  for (const auto& queue : queues()) queue->run_until(queue->end());
}

namespace {

template <class Object>
cudaError_t make(Object** made, Object value) {
  MMREC_FAULT_POINT();
  *made = new Object(std::move(value));
  count_object(1);
  return cudaSuccess;
}
template <class Object>
cudaError_t destroy(Object* object) {
  if (object != nullptr) count_object(-1);
  delete object;
  return lasting_fault();
}

/// The origin has waited for so many of the stream's operations, and so for what these have waited for.
void join(CUstream_st& stream, std::size_t captured) {
  if (captured <= stream.joined) return;
  stream.joined = captured;
  for (const CUstream_st::Wait& wait : stream.waits) {
    if (wait.at <= captured) join(*wait.stream, wait.captured);
  }
}

/// Waiting for a stream or event that is captured invalidates the capture.
cudaError_t refuse(Capture& capture) {
  capture.invalidated = true;
  return set_error(cudaErrorStreamCaptureUnsupported);
}

}  // namespace
}  // namespace mmrec::cuda_emulation

using namespace mmrec::cuda_emulation;

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  if (const cudaError_t code = make(stream, CUstream_st{}); code != cudaSuccess) return code;
  (*stream)->queue->blocking = (flags & cudaStreamNonBlocking) == 0;
  const std::lock_guard lock(queues_mutex);
  queues().push_back((*stream)->queue);
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  finish(stream);
  const std::lock_guard lock(queues_mutex);
  std::erase(queues(), stream->queue);
  return destroy(stream);
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  if (is_capturing(stream)) return refuse(*stream->capture);
  finish(stream);
  MMREC_FAULT_POINT();
  return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t stream) { return cudaStreamSynchronize(stream); }
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  MMREC_FAULT_POINT();
  if (const std::shared_ptr<Capture> capture = event->capture.lock()) {
    if (stream->capture == nullptr) {
      stream->capture = capture;
      stream->recorded = stream->joined = 0;
      stream->waits.clear();
      capture->streams.push_back(stream);
    }
    if (stream->capture != capture) return set_error(cudaErrorStreamCaptureUnsupported);
    if (stream == capture->origin) {
      join(*event->captured_stream, event->captured);
    } else {
      ++stream->recorded;  // there is something now that the origin must wait for
      if (event->captured_stream != capture->origin) {
        stream->waits.push_back({stream->recorded, event->captured_stream, event->captured});
      }
    }
    return cudaSuccess;
  }
  if (event->queue == nullptr) return cudaSuccess;
  enqueue(stream, [queue = event->queue, end = event->end] { queue->run_until(end); });
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) { return make(event, CUevent_st{}); }
cudaError_t cudaEventDestroy(cudaEvent_t event) { return destroy(event); }
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  MMREC_FAULT_POINT();
  if (device_of(stream) != event->device) return set_error(cudaErrorInvalidDevice);
  event->capture.reset();
  event->queue.reset();
  if (is_capturing(stream)) {
    event->capture = stream->capture;
    event->captured_stream = stream;
    event->captured = stream->recorded;
    return cudaSuccess;
  }
  if (stream == nullptr) {
    enqueue(stream, [] {});  // waits for the other streams
  } else {
    const std::lock_guard lock(queues_mutex);
    event->queue = stream->queue;
    event->end = stream->queue->end();
  }
  return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  if (const std::shared_ptr<Capture> capture = event->capture.lock()) return refuse(*capture);
  const std::lock_guard lock(queues_mutex);
  if (event->queue != nullptr) event->queue->run_until(event->end);
  MMREC_FAULT_POINT();
  return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  MMREC_FAULT_POINT();
  if (stream == nullptr || is_capturing(stream)) return set_error(cudaErrorInvalidValue);
  stream->capture = std::make_shared<Capture>();
  stream->capture->origin = stream;
  stream->capture->forbids_device_calls = mode != cudaStreamCaptureModeRelaxed;
  stream->capture->streams.push_back(stream);
  if (stream->capture->forbids_device_calls) ++captures_that_forbid_device_calls;
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  *graph = nullptr;
  const std::shared_ptr<Capture> capture = stream->capture;
  if (capture == nullptr || capture->origin != stream) return set_error(cudaErrorInvalidValue);
  if (capture->forbids_device_calls) --captures_that_forbid_device_calls;
  bool joined = true;
  for (CUstream_st* s : capture->streams) {
    joined = joined && (s == stream || s->joined == s->recorded);
    s->capture.reset();
  }
  if (capture->invalidated) return set_error(cudaErrorStreamCaptureInvalidated);
  if (!joined) return set_error(cudaErrorStreamCaptureUnjoined);
  return make(graph, CUgraph_st{std::move(capture->nodes)});
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long) {
  return make(executable, CUgraphExec_st{*graph});
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
  MMREC_FAULT_POINT();
  if (device_of(stream) != current_device()) return set_error(cudaErrorInvalidDevice);
  for (const Work& node : executable->nodes) enqueue(stream, node);
  return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) { return destroy(executable); }
cudaError_t cudaGraphDestroy(cudaGraph_t graph) { return destroy(graph); }
