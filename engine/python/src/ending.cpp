// The end of the interpreter, when no call of another thread may be under way (binding.h).
#include <nanobind/nanobind.h>
#include <pthread.h>

#include <thread>

#include "engine/python/src/binding.h"

namespace mmrec::python {
namespace {

struct Ending {
  std::atomic<int> calls = 0;
  std::atomic<bool> has_begun = false;
  std::atomic<bool> is_over = false;  // the wait for calls has ended
  std::thread::id thread;             // the one that ends the interpreter
};

Ending& ending() {
  static auto* const the_one = new Ending;  // threads look at it until the process is gone
  return *the_one;
}

bool is_elsewhere(bool stage) { return stage && std::this_thread::get_id() != ending().thread; }

void expect_interpreter() {
  if (is_elsewhere(ending().has_begun)) throw InterpreterEnds();
}

/// Tells calls to end, and waits for them at most this many seconds.
void end_calls(double seconds) {
  Ending& end = ending();
  end.thread = std::this_thread::get_id();
  end.has_begun = true;
  const nb::gil_scoped_release release;
  const auto until = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  while (end.calls > 0 && std::chrono::steady_clock::now() < until) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  end.is_over = true;
}

}  // namespace

Call::Call() {
  expect_interpreter();
  ++ending().calls;
}
Call::~Call() { --ending().calls; }

NoGil::~NoGil() {
  while (is_elsewhere(ending().is_over)) std::this_thread::sleep_for(std::chrono::hours(1));
}

Gil::Check::Check() { expect_interpreter(); }

void SignalWatch::check() {
  expect_interpreter();
  const auto now = std::chrono::steady_clock::now();
  if (now < next_) return;
  next_ = now + std::chrono::milliseconds(50);
  const nb::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) nb::raise_python_error();
}

std::shared_ptr<nb::object> Callables::keep(nb::object object) {
  const auto at = all_->insert(all_->end(), std::move(object));
  return {&*at, [all = all_, at](nb::object*) {
            if (is_elsewhere(ending().is_over)) return;
            const nb::gil_scoped_acquire gil;
            const nb::object goes = std::move(*at);  // outlives its place: its destructor may erase others
            all->erase(at);
          }};
}

int Callables::visit(visitproc visit, void* arg) const {
  for (const nb::object& object : *all_) Py_VISIT(object.ptr());
  return 0;
}

void Callables::clear() {
  std::vector<nb::object> old;
  for (nb::object& object : *all_) old.push_back(std::exchange(object, nb::none()));
}

void bind_ending(nb::module_& m) {
  pthread_atfork(nullptr, nullptr, [] { ending().calls = 0; });  // the other threads are not in the child
  m.def("_end_calls", end_calls, nb::arg("seconds"));
}

}  // namespace mmrec::python
