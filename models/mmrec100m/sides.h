// Two stacks of a model at work side by side on one device: what each has of it. Specialised for a backend.
//
// A backend's Sides is made of its main backend and has
//   of(side)               the backend of a stack: side 0 or 1; the main one may be one of them
//   run(waits, f)          f(0) and f(1) side by side, each with of(side) alone, after what the main backend has been
//   asked
//                          for and before what it is asked for next. waits: whether they make the host wait; else they
//                          are only enqueued, on a device, and may be recorded. Throws what they throw.
#pragma once

namespace mmrec::models {

template <class Backend>
class Sides;

}  // namespace mmrec::models
