// The extension module mmrec._mmrec: what is bound, and in which order.
#include "engine/python/src/binding.h"
#include "mmrec/version.h"

NB_MODULE(_mmrec, m) {
  nanobind::set_leak_warnings(false);  // objects that live until Python ends, or in cycles with callbacks
  m.doc() = "The engine, as the package mmrec sees it: use that.";
  m.attr("__version__") = nanobind::str(mmrec::version().data(), mmrec::version().size());
  nanobind::list backends;
  for (const std::string_view name : mmrec::backends()) backends.append(nanobind::str(name.data(), name.size()));
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
