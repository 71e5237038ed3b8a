// What the files of the extension module share. The module is a thin skin over the public headers: it turns Python's
// values into theirs and back, lets the GIL go while something is computed, and keeps one object from being used by two
// threads at once. What needs no C++ is written in Python beside it (engine/python/mmrec).
#pragma once

#include <nanobind/nanobind.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <filesystem>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "mmrec/generate.h"
#include "mmrec/generator.h"
#include "mmrec/model.h"
#include "mmrec/scorer.h"
#include "mmrec/session.h"
#include "mmrec/tokenizer.h"

namespace mmrec::python {

namespace nb = nanobind;

// When the interpreter ends, no thread may be inside the extension: Python ends a thread that asks for the GIL then, in
// the midst of C++, which aborts the process. So calls are counted, mmrec/_streams.py waits for their end, and those
// under way throw as soon as they look (src/ending.cpp).

/// Thrown in other threads while the interpreter ends. SystemExit in Python, which ends a thread silently.
struct InterpreterEnds : std::exception {
  const char* what() const noexcept override { return "the interpreter is ending"; }
};

/// A call that may let the GIL go or run Python's code: nb::call_guard<Call>().
class Call {
 public:
  /// Throws InterpreterEnds, as the classes below do, unless in the thread that ends the interpreter.
  Call();
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;
  ~Call();
};

/// Lets the GIL go while something is computed.
class NoGil {
 public:
  NoGil() = default;
  NoGil(const NoGil&) = delete;
  NoGil& operator=(const NoGil&) = delete;
  /// Never returns where the interpreter has ended meanwhile: there is no GIL to be had.
  ~NoGil();

 private:
  nb::gil_scoped_release release_;
};

/// Takes the GIL for a callback. Throws InterpreterEnds.
class Gil {
 public:
  Gil() = default;

 private:
  struct Check {
    Check();
  };
  Check check_;
  nb::gil_scoped_acquire acquire_;
};

/// Keeps an object to one call at a time: what would be a race in C++ is an error in Python.
class Busy {
 public:
  /// Throws std::logic_error naming `what` where a call is under way, of another thread or around this one.
  Busy(std::atomic<bool>& flag, const char* what);
  Busy(const Busy&) = delete;
  Busy& operator=(const Busy&) = delete;
  ~Busy() { flag_.store(false, std::memory_order_release); }

 private:
  std::atomic<bool>& flag_;
};

/// Looks for signals now and then while the GIL is gone, so that Ctrl-C ends a long call.
class SignalWatch {
 public:
  /// Throws the Python exception (KeyboardInterrupt) that a signal's handler raised, and InterpreterEnds. Cheap
  /// when called often.
  void check();

 private:
  std::chrono::steady_clock::time_point next_ = std::chrono::steady_clock::now() + std::chrono::milliseconds(50);
};

/// Token ids and the shape in which they came.
struct Tokens {
  std::vector<int> ids;
  std::vector<std::size_t> shape;
};
/// Of a list of ints or whatever NumPy makes an array of integers of. They are copied, since another thread of Python's
/// may write to them while the GIL is gone. Throws TypeError, and ValueError for ids beyond 32 bits.
Tokens tokens_of(nb::handle value, const char* what);
/// The same of one row. Throws ValueError for more dimensions than one.
std::vector<int> row_of(nb::handle value, const char* what);

/// A NumPy array that owns its numbers. Shapes are C-contiguous.
nb::object array_of(std::vector<float> values, const std::vector<std::size_t>& shape);
nb::object array_of(std::vector<int> values, const std::vector<std::size_t>& shape);

/// An int, or what NumPy has for one; a bool is none. Throws TypeError naming `what`, and ValueError naming the range.
template <class T>
T integer_of(nb::handle value, const char* what);

/// A copy of what a bytes, bytearray, memoryview or array holds side by side. Throws TypeError.
std::vector<std::byte> bytes_of(nb::handle value, const char* what);

/// UTF-8 of a str, or a bytes' own; it lives as long as `value`. Throws TypeError.
std::string_view text_of(nb::handle value, const char* what);
/// os.fspath of a str, bytes or os.PathLike.
std::filesystem::path path_of(nb::handle value);
/// A C++ Python path: pathlib.Path.
nb::object python_path(const std::filesystem::path& path);
/// The bundled model's folder, as mmrec.bundled_model() says.
std::filesystem::path bundled_model();

/// Python objects that functions of the engine hold, which may go where the GIL is not held. The owner shows them to
/// the garbage collector: a callback may refer to the owner.
class Callables {
 public:
  /// For a function; taken out when the last copy of the function goes. Requires: the GIL.
  std::shared_ptr<nb::object> keep(nb::object object);
  int visit(visitproc visit, void* argument) const;
  void clear();

 private:
  std::shared_ptr<std::list<nb::object>> all_ = std::make_shared<std::list<nb::object>>();  // used with the GIL
};

/// nb::type_slots of a class with a member `callables`.
template <class Class>
const PyType_Slot* collected() {
  static const PyType_Slot slots[] = {
      {Py_tp_traverse, reinterpret_cast<void*>(+[](PyObject* self, visitproc visit, void* arg) {
         Py_VISIT(Py_TYPE(self));
         return nb::inst_ready(self) ? nb::inst_ptr<Class>(self)->callables.visit(visit, arg) : 0;
       })},
      {Py_tp_clear, reinterpret_cast<void*>(+[](PyObject* self) {
         if (nb::inst_ready(self)) nb::inst_ptr<Class>(self)->callables.clear();
         return 0;
       })},
      {0, nullptr}};
  return slots;
}

/// A Model that knows where it came from, so that it can be pickled by path.
struct PyModel {
  Model model;
  std::filesystem::path path;
  nb::dict options;  // what Model.load was given, without on_warning
};

/// Python's Session.
struct PySession {
  std::shared_ptr<Session> session;
  std::vector<int> eos_token_ids;  // its model's
  std::atomic<bool> busy = false;

  PySession(std::shared_ptr<Session> made, std::vector<int> eos)
      : session(std::move(made)), eos_token_ids(std::move(eos)) {}
};

/// Python's Tokenizer, pickled by path.
struct PyTokenizer {
  Tokenizer tokenizer;
  std::filesystem::path path;
};

/// The models of a Model, or of an iterable of them. Throws std::invalid_argument for none.
std::vector<Model> models_of(nb::handle models);

/// Sets `value` to the entry of that name, if there is one, and removes it. Throws TypeError for another type, and
/// ValueError for an integer out of range, naming it.
template <class T>
void take_into(nb::dict& options, const char* name, T& value);
/// Takes and removes an entry of `options`.
nb::object take(nb::dict& options, const char* name);
/// Session options by name: threads, prefill, sweep_tolerance, max_sweeps. Those that are taken are removed.
SessionOptions take_session_options(nb::dict& options);
/// Sampler options by name, as in mmrec/sampler_options.h, removed likewise.
SamplerOptions take_sampler_options(nb::dict& options);
/// TypeError for what is left, naming `call`.
void expect_no_more(const nb::dict& options, const char* call);

/// Options of generating as read from keyword arguments, and the Python callables that they hold.
struct PyGenerateOptions {
  GenerateOptions options;
  std::vector<int> context;  // what options.context refers to
  std::optional<std::vector<int>> eos_token_ids;
};
/// Takes all that concerns generating. Callbacks take the GIL when they are called; `callables` keeps them.
std::unique_ptr<PyGenerateOptions> take_generate_options(nb::dict& options, Callables& callables);
/// Fills in the end of sequence where none was said: the model's, else the tokenizer's.
void default_eos(PyGenerateOptions& options, const std::vector<int>& of_model, const Tokenizer& tokenizer);
/// mmrec.GenerateResult.
nb::object python_result(GenerateResult result, int top_logprobs);
/// mmrec.PrefillStats.
nb::object python_stats(const PrefillStats& stats);

/// A callable that answers on_progress: asks `callable` where it is not None (None and True go on), and looks for
/// signals.
std::function<bool(std::int64_t, std::int64_t)> watched(nb::object callable);
/// Whether a callback's answer lets the work go on: everything but False does.
bool goes_on(nb::handle answer);

void bind_ending(nb::module_& m);
void bind_errors(nb::module_& m);
void bind_model(nb::module_& m);
void bind_session(nb::module_& m);
void bind_tokenizer(nb::module_& m);
void bind_generator(nb::module_& m);
void bind_scorer(nb::module_& m);
void bind_ops(nb::module_& m);

/// Raises TypeError when `name` is pickled, saying what to do instead.
template <class Class>
void refuse_pickling(Class& type, const char* message) {
  type.def("__reduce__", [message](nb::handle) -> nb::object { throw nb::type_error(message); });
}

}  // namespace mmrec::python
