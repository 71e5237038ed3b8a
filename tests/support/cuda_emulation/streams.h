// Streams: queues of work that is done as late as the program's synchronisation allows.
//
// Work on a stream waits until the host waits for the stream, for an event behind it, or for the device; or until
// another stream's work that waits for such an event is done. So a missing event, a missing wait before the host reads
// a result, and pinned memory that is reused too early all show as wrong data.
#pragma once

#include <functional>

struct CUstream_st;
struct CUevent_st;
struct CUgraph_st;
struct CUgraphExec_st;

namespace mmrec::cuda_emulation {

/// Adds `work` to the stream, or to the graph that the stream is being captured into. The null stream does it at once.
void enqueue(CUstream_st* stream, std::function<void()> work);
/// True while what is enqueued on the stream goes into a graph.
bool is_capturing(const CUstream_st* stream);
/// True while this thread captures in a mode that forbids allocating, freeing and waiting for the device.
bool capture_forbids_device_calls();

/// The calling thread's device, and a stream's: where it was made.
int current_device();
int device_of(const CUstream_st* stream);

/// Does all work of one stream, or of all.
void finish(CUstream_st* stream);
void finish_all();

}  // namespace mmrec::cuda_emulation
