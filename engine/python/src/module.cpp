// The extension module mmrec._mmrec: binds everything, in the order of dependence.
#include <nanobind/stl/string_view.h>

#include "engine/python/src/binding.h"
#include "mmrec/version.h"

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
  mmrec::python::bind_ending(m);
  mmrec::python::bind_errors(m);
  mmrec::python::bind_tokenizer(m);
  mmrec::python::bind_session(m);
  mmrec::python::bind_model(m);
  mmrec::python::bind_generator(m);
  mmrec::python::bind_scorer(m);
  mmrec::python::bind_ops(m);
}
