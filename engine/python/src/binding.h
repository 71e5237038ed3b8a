// What the files of the extension module share. The module is a thin skin over the public headers. It converts Python's
// values, releases the GIL while something is computed, and keeps one object from being used by two threads at once.
// Code that needs no C++ is Python (engine/python/mmrec).
#pragma once

#include <fmt/format.h>
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

// When the interpreter ends, no thread may be inside the extension. Python then ends a thread that asks for the GIL, in
// the midst of C++, and the process aborts. So calls are counted, and mmrec/_streams.py waits for their end. Calls
// under way throw at their next check (src/module.cpp).

/// Thrown in other threads while the interpreter ends. In Python it is SystemExit, which ends a thread silently.
struct InterpreterEnds : std::exception {
  const char* what() const noexcept override { return "the interpreter is ending"; }
};

/// A call that may release the GIL or run Python's code: nb::call_guard<Call>().
class Call {
 public:
  /// Throws InterpreterEnds, as the classes below do, unless in the thread that ends the interpreter.
  Call();
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;
  ~Call();
};

/// Releases the GIL while something is computed.
class NoGil {
 public:
  NoGil() = default;
  NoGil(const NoGil&) = delete;
  NoGil& operator=(const NoGil&) = delete;
  /// Never returns if the interpreter has ended meanwhile: there is no GIL any more.
  ~NoGil();

 private:
  nb::gil_scoped_release release_;
};

/// Returns compute(), which runs without the GIL.
template <class Compute>
auto without_gil(Compute&& compute) {
  const NoGil released;
  return compute();
}

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

/// Allows one call of an object at a time. A race in C++ becomes an error in Python.
class Busy {
 public:
  /// Throws std::logic_error naming `what` if a call is under way, in another thread or around this one.
  Busy(std::atomic<bool>& flag, const char* what);
  Busy(const Busy&) = delete;
  Busy& operator=(const Busy&) = delete;
  ~Busy() { flag_.store(false, std::memory_order_release); }

 private:
  std::atomic<bool>& flag_;
};

/// Checks for signals every 50 ms while the GIL is released, so that Ctrl-C ends a long call.
class SignalWatch {
 public:
  /// Throws the Python exception (KeyboardInterrupt) of a signal's handler, and InterpreterEnds. Cheap if called often.
  void check();

 private:
  std::chrono::steady_clock::time_point next_ = std::chrono::steady_clock::now() + std::chrono::milliseconds(50);
};

/// Throws ValueError of "name: text", formatted. Needs no GIL.
template <class... Args>
[[noreturn]] void refuse(std::string_view name, fmt::format_string<Args...> text, Args&&... args) {
  throw std::invalid_argument(fmt::format("{}: {}", name, fmt::format(text, std::forward<Args>(args)...)));
}
/// Throws TypeError likewise.
template <class... Args>
[[noreturn]] void refuse_type(std::string_view name, fmt::format_string<Args...> text, Args&&... args) {
  throw nb::type_error(fmt::format("{}: {}", name, fmt::format(text, std::forward<Args>(args)...)).c_str());
}

/// Token ids and the shape in which they came.
struct Tokens {
  std::vector<int> ids;
  std::vector<std::size_t> shape;
};
/// From a list of ints, or anything that NumPy converts to an array of integers. Copies them: another thread of Python
/// may write to them while the GIL is released. Throws TypeError, and ValueError for ids beyond 32 bits.
Tokens tokens_of(nb::handle value, const char* what);
/// The same for one row. Throws ValueError for more dimensions than one.
std::vector<int> row_of(nb::handle value, const char* what);

/// A C-contiguous NumPy array that owns its numbers, float32 or int32.
template <class T>
nb::object array_of(std::vector<T> values, const std::vector<std::size_t>& shape);
/// The same with one axis.
template <class T>
nb::object array_of(std::vector<T> values) {
  const std::size_t size = values.size();
  return array_of(std::move(values), {size});
}

/// Tokens and log-probs of samples, as two arrays of that shape.
std::pair<nb::object, nb::object> arrays_of(std::span<const Sample> samples, const std::vector<std::size_t>& shape);

/// From an int or an integer of NumPy, but not a bool. Throws TypeError naming `what`, and ValueError naming the range.
template <class T>
T integer_of(nb::handle value, const char* what);

/// A copy of the contiguous bytes of a bytes, bytearray, memoryview or array. Throws TypeError.
std::vector<std::byte> bytes_of(nb::handle value, const char* what);

/// UTF-8 of a str, or the bytes of a bytes; it lives as long as `value`. Throws TypeError.
std::string_view text_of(nb::handle value, const char* what);
/// os.fsencode of a str, bytes or os.PathLike, or the folder of the bundled model if `value` is None.
std::filesystem::path model_path(nb::handle value);
/// A class or function of mmrec/_results.py.
nb::object result(const char* name);

/// Python objects that functions of the engine hold and may drop without the GIL. The owner shows them to the garbage
/// collector, because a callback may refer to the owner.
class Callables {
 public:
  /// For a function; released with the last copy of the function. Requires: the GIL.
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
  nb::dict options;  // those of Model.load, without on_warning
};

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

/// Takes and removes an entry of `options`.
nb::object take(nb::dict& options, const char* name);
/// The same; invalid if the entry is None.
nb::object take_given(nb::dict& options, const char* name);
/// Sets `value` to the entry of that name, if there is one, and removes the entry. None leaves a std::optional alone.
/// Throws TypeError for another type, and ValueError for an integer out of range, naming it.
template <class T>
void take_into(nb::dict& options, const char* name, T& value);
/// The place of a text among `names`. Throws TypeError, and ValueError naming them.
std::size_t place_of(nb::handle value, const char* what, std::span<const std::string_view> names);
/// Sets an enum to the entry of that name, a text among `names`, if there is one, and removes the entry. None leaves a
/// std::optional alone. Throws as place_of().
template <class T>
void take_choice(nb::dict& options, const char* name, std::span<const std::string_view> names, T& value) {
  if (const nb::object given = take(options, name); given.is_valid())
    value = static_cast<T>(place_of(given, name, names));
}
template <class T>
void take_choice(nb::dict& options, const char* name, std::span<const std::string_view> names,
                 std::optional<T>& value) {
  if (const nb::object given = take_given(options, name); given.is_valid())
    value = static_cast<T>(place_of(given, name, names));
}
/// Session options by name: threads, prefill, sweep_tolerance, max_sweeps. Those that are taken are removed.
SessionOptions take_session_options(nb::dict& options);
/// Sampler options by name, as in mmrec/sampler_options.h, removed likewise.
SamplerOptions take_sampler_options(nb::dict& options);
/// What Python code needs of kSamplerOptions: a tuple (name, default, off, help) for each; help is None for an option
/// that programs do not have.
nb::object sampler_options();
/// Throws TypeError, naming `call`, if an option is left.
void expect_no_more(const nb::dict& options, const char* call);

/// Options of generating as read from keyword arguments, and the Python callables that they hold.
struct PyGenerateOptions {
  GenerateOptions options;
  std::vector<int> context;  // options.context refers to it
};
/// Takes all options of generating. Callbacks take the GIL when they are called; `callables` keeps them. The default
/// end of sequence is the model's, else the tokenizer's.
PyGenerateOptions take_generate_options(nb::dict& options, Callables& callables, const std::vector<int>& eos_of_model,
                                        const Tokenizer& tokenizer);
/// mmrec.GenerateResult.
nb::object python_result(GenerateResult result, int top_logprobs);
/// mmrec.PrefillStats.
nb::object python_stats(const PrefillStats& stats);

/// Calls a callback with the GIL. Returns whether its answer lets the work go on: every answer but False does.
template <class... Args>
bool ask(const nb::object& callback, Args&&... args) {
  const Gil gil;
  return callback(std::forward<Args>(args)...).ptr() != Py_False;
}

void bind_model(nb::module_& m);
void bind_session(nb::module_& m);
void bind_tokenizer(nb::module_& m);
void bind_generator(nb::module_& m);
void bind_scorer(nb::module_& m);
void bind_ops(nb::module_& m);

/// Makes pickling a TypeError of this message.
template <class Class>
void refuse_pickling(Class& type, const char* message) {
  type.def("__reduce__", [message](nb::handle) -> nb::object { throw nb::type_error(message); });
}

}  // namespace mmrec::python
