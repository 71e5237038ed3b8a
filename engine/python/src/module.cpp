// The extension module mmrec._mmrec: binds everything, in the order of dependence, and translates the engine's
// exceptions to those that users of Python expect. And the end of the interpreter, when no call of another thread may
// be under way (binding.h).
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <pthread.h>

#include <exception>
#include <new>
#include <string>
#include <system_error>
#include <thread>
#include <typeinfo>

#include "engine/python/src/binding.h"
#include "mmrec/errors.h"
#include "mmrec/version.h"

namespace mmrec::python {
namespace {

/// Raises an error of the module.
void raise(const char* type, const std::exception& error) {
  PyErr_SetString(nb::module_::import_("mmrec._mmrec").attr(type).ptr(), error.what());
}

/// OSError or the subclass of it that errno chooses.
void raise_os_error(const std::system_error& error) {
  const std::string message = error.what();  // its path need not be UTF-8
  const nb::object made =
      result("os_error")(error.code().value(), error.code().message(), nb::bytes(message.data(), message.size()));
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(made.ptr())), made.ptr());
}

void translate(const std::exception_ptr& thrown, void*) {
  try {
    std::rethrow_exception(thrown);
  } catch (const nb::builtin_exception&) {
    throw;
  } catch (const InterpreterEnds& end) {
    PyErr_SetString(PyExc_SystemExit, end.what());
  } catch (const NumericError& error) {
    raise("NumericError", error);
  } catch (const DeviceUnavailable& error) {
    raise("DeviceUnavailable", error);
  } catch (const std::system_error& error) {
    const std::error_category& category = error.code().category();
    if (category == std::generic_category() || category == std::system_category()) {
      raise_os_error(error);
    } else {
      raise("CudaError", error);
    }
  } catch (const std::bad_cast&) {
    PyErr_SetString(PyExc_TypeError, "an argument is of a type that this call does not take");
  } catch (const std::runtime_error& error) {
    raise("ModelError", error);
  }  // nanobind translates the others: std::invalid_argument to ValueError, a plain std::logic_error to RuntimeError
}

void bind_errors(nb::module_& m) {
  const auto add = [&m](const char* name, const char* doc, PyObject* base) {
    PyObject* type = PyErr_NewExceptionWithDoc((std::string("mmrec.") + name).c_str(), doc, base, nullptr);
    if (type == nullptr) nb::raise_python_error();
    m.attr(name) = nb::steal(type);
  };
  add("ModelError",
      "A file or a saved state is malformed, damaged or of another model; the message names file, field, found and "
      "expected.",
      PyExc_RuntimeError);
  add("NumericError", "A NaN or an infinity where a finite number must be; the message names the step.",
      PyExc_ArithmeticError);
  add("DeviceUnavailable", "The device that was asked for cannot be used; the message names the reason.",
      PyExc_RuntimeError);
  add("CudaError", "A call of CUDA failed.", PyExc_RuntimeError);
  nb::register_exception_translator(translate);
}

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

void bind_ending(nb::module_& m) {
  pthread_atfork(nullptr, nullptr, [] { ending().calls = 0; });  // the other threads are not in the child
  m.def("_end_calls", end_calls, nb::arg("seconds"));
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

}  // namespace mmrec::python

NB_MODULE(_mmrec, m) {
  // Threads of the engine take the GIL of the main interpreter, for which a sub-interpreter would wait without end.
  if (PyInterpreterState_GetID(PyInterpreterState_Get()) != 0) {
    throw std::runtime_error("mmrec: found a sub-interpreter, expected Python's main interpreter");
  }
  nanobind::set_leak_warnings(false);  // objects that live until Python ends, or in cycles with callbacks
  m.doc() = "The engine, as the package mmrec sees it: use that.";
  m.attr("__version__") = mmrec::version();
  nanobind::list backends;
  for (const std::string_view name : mmrec::backends()) backends.append(name);
  m.attr("backends") = nanobind::tuple(backends);
  m.attr("sampler_options") = mmrec::python::sampler_options();
  mmrec::python::bind_ending(m);
  mmrec::python::bind_errors(m);
  mmrec::python::bind_tokenizer(m);
  mmrec::python::bind_session(m);
  mmrec::python::bind_model(m);
  mmrec::python::bind_generator(m);
  mmrec::python::bind_scorer(m);
  mmrec::python::bind_ops(m);
}
