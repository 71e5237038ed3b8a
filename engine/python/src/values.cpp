// Converts Python's values and the engine's: tokens, arrays, texts, paths.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <limits>

#include "engine/python/src/binding.h"

using namespace std::string_literals;

namespace mmrec::python {
namespace {

constexpr long kMaxId = std::numeric_limits<int>::max();
constexpr long kMinId = std::numeric_limits<int>::min();

[[noreturn]] void refuse_range(const char* what) {
  refuse(what, "found an integer that is no token id (beyond 32 bits)");
}

/// Ids of a list of ints; false where it holds anything else.
bool append_list(nb::handle value, std::vector<int>& ids, const char* what) {
  if (!nb::isinstance<nb::list>(value)) return false;
  const nb::list list = nb::borrow<nb::list>(value);
  const std::size_t size = list.size();
  ids.reserve(size);
  for (std::size_t i = 0; i < size; ++i) {
    const nb::object item = list[i];
    if (!PyLong_CheckExact(item.ptr())) return false;
    int overflow = 0;
    const long id = PyLong_AsLongAndOverflow(item.ptr(), &overflow);
    if (overflow != 0 || id < kMinId || id > kMaxId) refuse_range(what);
    ids.push_back(static_cast<int>(id));
  }
  return true;
}

}  // namespace

Busy::Busy(std::atomic<bool>& flag, const char* what) : flag_(flag) {
  if (flag_.exchange(true, std::memory_order_acquire)) {
    throw std::logic_error(std::string(what) + " is in use, by another thread or by the call that this one is part of");
  }
}

void refuse(std::string_view name, std::string_view what) {
  throw std::invalid_argument(std::string(name).append(": ").append(what));
}

void refuse_type(std::string_view name, std::string_view what) {
  throw nb::type_error(std::string(name).append(": ").append(what).c_str());
}

Tokens tokens_of(nb::handle value, const char* what) {
  Tokens tokens;
  if (append_list(value, tokens.ids, what)) {
    tokens.shape = {tokens.ids.size()};
    return tokens;
  }
  tokens.ids.clear();
  nb::ndarray<const std::int32_t, nb::c_contig, nb::device::cpu> array;
  if (!nb::try_cast(nb::borrow(value), array, false)) {
    const nb::module_ numpy = nb::module_::import_("numpy");
    nb::object made = numpy.attr("asarray")(value);
    const std::string kind = nb::str(made.attr("dtype").attr("kind")).c_str();
    const bool empty = nb::cast<std::size_t>(made.attr("size")) == 0;
    if (kind != "i" && kind != "u" && !(empty && kind == "f")) {
      refuse_type(what, "found "s + nb::str(made.attr("dtype").attr("name")).c_str() + ", expected integers");
    }
    if (!empty && nb::cast<std::size_t>(made.attr("dtype").attr("itemsize")) >= sizeof(std::int32_t)) {
      const nb::object least = made.attr("min")();
      const nb::object most = made.attr("max")();
      if (least < nb::int_(kMinId) || most > nb::int_(kMaxId)) refuse_range(what);
    }
    made = numpy.attr("ascontiguousarray")(made, "int32").attr("reshape")(made.attr("shape"));
    array = nb::cast<nb::ndarray<const std::int32_t, nb::c_contig, nb::device::cpu>>(made, false);
  }
  for (std::size_t i = 0; i < array.ndim(); ++i) tokens.shape.push_back(array.shape(i));
  tokens.ids.assign(array.data(), array.data() + array.size());
  return tokens;
}

std::vector<int> row_of(nb::handle value, const char* what) {
  Tokens tokens = tokens_of(value, what);
  if (tokens.shape.size() != 1) {
    refuse(what, "found " + std::to_string(tokens.shape.size()) + " dimensions, expected 1: the ids of one sequence");
  }
  return std::move(tokens.ids);
}

template <class T>
nb::object array_of(std::vector<T> values, const std::vector<std::size_t>& shape) {
  auto kept = std::make_unique<std::vector<T>>(std::move(values));
  T* data = kept->data();
  static T nothing{};
  const nb::capsule owner(kept.get(), [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  kept.release();
  return nb::cast(nb::ndarray<nb::numpy, T>(data != nullptr ? data : &nothing, shape.size(), shape.data(), owner));
}
template nb::object array_of(std::vector<float>, const std::vector<std::size_t>&);
template nb::object array_of(std::vector<int>, const std::vector<std::size_t>&);

std::pair<nb::object, nb::object> arrays_of(std::span<const Sample> samples, const std::vector<std::size_t>& shape) {
  std::vector<int> tokens;
  std::vector<float> logprobs;
  for (const Sample& sample : samples) {
    tokens.push_back(sample.token);
    logprobs.push_back(sample.logprob);
  }
  return {array_of(std::move(tokens), shape), array_of(std::move(logprobs), shape)};
}

template <class T>
T integer_of(nb::handle value, const char* what) {
  if (PyBool_Check(value.ptr()) || PyIndex_Check(value.ptr()) == 0) {
    refuse_type(what, "found "s + nb::repr(value).c_str() + ", expected an integer");
  }
  const nb::object integer = nb::steal(PyNumber_Index(value.ptr()));
  if (!integer.is_valid()) nb::raise_python_error();
  T result{};
  if (!nb::try_cast(integer, result)) {
    using Limits = std::numeric_limits<T>;
    refuse(what, "found "s + nb::repr(integer).c_str() + ", expected " + std::to_string(Limits::min()) + ".." +
                     std::to_string(Limits::max()));
  }
  return result;
}
template int integer_of(nb::handle, const char*);
template std::int64_t integer_of(nb::handle, const char*);
template std::uint64_t integer_of(nb::handle, const char*);

std::vector<std::byte> bytes_of(nb::handle value, const char* what) {
  Py_buffer view;
  if (PyObject_CheckBuffer(value.ptr()) == 0 || PyObject_GetBuffer(value.ptr(), &view, PyBUF_SIMPLE) != 0) {
    PyErr_Clear();
    refuse_type(what,
                "expected bytes, or a buffer of bytes side by side (found "s + nb::repr(value.type()).c_str() + ")");
  }
  const auto* data = static_cast<const std::byte*>(view.buf);
  const std::unique_ptr<Py_buffer, decltype(&PyBuffer_Release)> held(&view, PyBuffer_Release);
  return {data, data + view.len};
}

std::string_view text_of(nb::handle value, const char* what) {
  if (nb::isinstance<nb::str>(value)) {
    Py_ssize_t size = 0;
    const char* data = PyUnicode_AsUTF8AndSize(value.ptr(), &size);
    if (data == nullptr) nb::raise_python_error();
    return {data, static_cast<std::size_t>(size)};
  }
  if (nb::isinstance<nb::bytes>(value)) {
    const nb::bytes bytes = nb::borrow<nb::bytes>(value);
    return {bytes.c_str(), bytes.size()};
  }
  refuse_type(what, "expected str or bytes");
}

std::filesystem::path path_of(nb::handle value) {
  const nb::object bytes = nb::module_::import_("os").attr("fsencode")(value);
  const nb::bytes name = nb::borrow<nb::bytes>(bytes);
  return std::string(name.c_str(), name.size());
}

nb::object python_path(const std::filesystem::path& path) {
  const std::string name = path.string();
  const nb::object text = nb::module_::import_("os").attr("fsdecode")(nb::bytes(name.data(), name.size()));
  return nb::module_::import_("pathlib").attr("Path")(text);
}

std::filesystem::path model_path(nb::handle value) {
  return path_of(value.is_none() ? result("bundled_model")() : nb::borrow(value));
}

nb::object result(const char* name) { return nb::module_::import_("mmrec._results").attr(name); }

nb::object python_stats(const PrefillStats& stats) {
  return result("PrefillStats")(stats.layer_tokens, stats.token_sweeps, stats.windows, stats.fallbacks);
}

}  // namespace mmrec::python
