// Converts Python's values and the engine's: tokens, arrays, texts, paths, and keyword arguments as options. Callbacks
// among these take the GIL.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>

#include <algorithm>
#include <limits>
#include <type_traits>

#include "engine/python/src/binding.h"

namespace mmrec::python {
namespace {

/// Ids of a list of ints; false where it holds anything else.
bool append_list(nb::handle value, std::vector<int>& ids, const char* what) {
  if (!nb::isinstance<nb::list>(value)) return false;
  const auto list = nb::borrow<nb::list>(value);
  const std::size_t size = list.size();
  ids.reserve(size);
  for (std::size_t i = 0; i < size; ++i) {
    const nb::object item = list[i];
    if (!PyLong_CheckExact(item.ptr())) return false;
    int overflow = 0;
    const long id = PyLong_AsLongAndOverflow(item.ptr(), &overflow);
    if (overflow != 0 || id < std::numeric_limits<int>::min() || id > std::numeric_limits<int>::max()) {
      refuse(what, "found an integer that is no token id (beyond 32 bits)");
    }
    ids.push_back(static_cast<int>(id));
  }
  return true;
}

/// The callable of that name; null if it is absent or None.
std::shared_ptr<nb::object> take_callable(nb::dict& options, const char* name, Callables& callables) {
  nb::object given = take_given(options, name);
  if (!given.is_valid()) return nullptr;
  if (PyCallable_Check(given.ptr()) == 0) refuse_type(name, "expected a callable or None");
  return callables.keep(std::move(given));
}

}  // namespace

Busy::Busy(std::atomic<bool>& flag, const char* what) : flag_(flag) {
  if (flag_.exchange(true, std::memory_order_acquire)) {
    throw std::logic_error(
        fmt::format("{} is in use, by another thread or by the call that this one is part of", what));
  }
}

Tokens tokens_of(nb::handle value, const char* what) {
  Tokens tokens;
  if (append_list(value, tokens.ids, what)) {
    tokens.shape = {tokens.ids.size()};
    return tokens;
  }
  tokens.ids.clear();
  using Ids = nb::ndarray<const std::int32_t, nb::c_contig, nb::device::cpu>;
  Ids array;
  if (!nb::try_cast(nb::borrow(value), array, false)) array = nb::cast<Ids>(result("ids_of")(value, what), false);
  for (std::size_t i = 0; i < array.ndim(); ++i) tokens.shape.push_back(array.shape(i));
  tokens.ids.assign(array.data(), array.data() + array.size());
  return tokens;
}

std::vector<int> row_of(nb::handle value, const char* what) {
  Tokens tokens = tokens_of(value, what);
  if (tokens.shape.size() != 1) {
    refuse(what, "found {} dimensions, expected 1: the ids of one sequence", tokens.shape.size());
  }
  return std::move(tokens.ids);
}

template <class T>
nb::object array_of(std::vector<T> values, const std::vector<std::size_t>& shape) {
  auto kept = std::make_unique<std::vector<T>>(std::move(values));
  T* data = kept->data();
  static T nothing{};
  const nb::capsule owner(kept.get(), [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  (void)kept.release();
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
    refuse_type(what, "found {}, expected an integer", nb::repr(value).c_str());
  }
  const nb::object integer = nb::steal(PyNumber_Index(value.ptr()));
  if (!integer.is_valid()) nb::raise_python_error();
  T result{};
  if (!nb::try_cast(integer, result)) {
    using Limits = std::numeric_limits<T>;
    refuse(what, "found {}, expected {}..{}", nb::repr(integer).c_str(), Limits::min(), Limits::max());
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
    refuse_type(what, "expected bytes, or a buffer of bytes side by side (found {})", nb::repr(value.type()).c_str());
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
    const auto bytes = nb::borrow<nb::bytes>(value);
    return {bytes.c_str(), bytes.size()};
  }
  refuse_type(what, "expected str or bytes");
}

std::filesystem::path model_path(nb::handle value) {
  const nb::object given = value.is_none() ? result("bundled_model")() : nb::borrow(value);
  const auto name = nb::borrow<nb::bytes>(nb::module_::import_("os").attr("fsencode")(given));
  std::string path(name.c_str(), name.size());
  if (path.find('\0') != std::string::npos) refuse("path", "found a null byte, expected none");
  return path;
}

nb::object result(const char* name) { return nb::module_::import_("mmrec._results").attr(name); }

nb::object python_stats(const PrefillStats& stats) {
  return result("PrefillStats")(stats.layer_tokens, stats.token_sweeps, stats.windows, stats.fallbacks);
}

nb::object take(nb::dict& options, const char* name) {
  const nb::str key(name);
  if (!options.contains(key)) return {};
  nb::object value = options[key];
  nb::del(options[key]);
  return value;
}

nb::object take_given(nb::dict& options, const char* name) {
  nb::object value = take(options, name);
  return value.is_valid() && value.is_none() ? nb::object() : value;
}

template <class T>
void take_into(nb::dict& options, const char* name, T& value) {
  constexpr bool kIsBool = std::is_same_v<T, bool> || std::is_same_v<T, std::optional<bool>>;
  const nb::object given = take(options, name);
  if (!given.is_valid()) return;
  if constexpr (std::is_integral_v<T> && !kIsBool) {
    value = integer_of<T>(given, name);
  } else if ((std::is_floating_point_v<T> && PyBool_Check(given.ptr())) || !nb::try_cast(given, value)) {
    refuse_type(name, "found {}, expected {}", nb::repr(given).c_str(), kIsBool ? "True or False" : "a number");
  }
}
template void take_into(nb::dict&, const char*, int&);
template void take_into(nb::dict&, const char*, bool&);
template void take_into(nb::dict&, const char*, std::optional<bool>&);

std::size_t place_of(nb::handle value, const char* what, std::span<const std::string_view> names) {
  const std::string_view found = text_of(value, what);
  if (const auto at = std::ranges::find(names, found); at != names.end()) {
    return static_cast<std::size_t>(at - names.begin());
  }
  refuse(what, "found '{}', expected {} or {}", found, fmt::join(names.first(names.size() - 1), ", "), names.back());
}

SessionOptions take_session_options(nb::dict& options) {
  SessionOptions result;
  take_into(options, "threads", result.threads);
  take_into(options, "sweep_tolerance", result.sweep_tolerance);
  take_into(options, "max_sweeps", result.max_sweeps);
  take_choice(options, "prefill", kPrefillModeNames, result.prefill);
  return result;
}

SamplerOptions take_sampler_options(nb::dict& options) {
  SamplerOptions result;
  for (const SamplerOption& option : kSamplerOptions) {
    option.visit(result, [&](auto& value) { take_into(options, option.name.data(), value); });
  }
  return result;
}

nb::object sampler_options() {
  const SamplerOptions defaults;
  nb::list all;
  for (const SamplerOption& option : kSamplerOptions) {
    const nb::object value = option.visit(defaults, []<class T>(const T& of) -> nb::object {
      if constexpr (!std::is_same_v<T, float>) return nb::int_(of);
      // By the fewest digits that give the float back: 0.8, not 0.800000011920929.
      return nb::float_(nb::str(fmt::format("{}", of).c_str()));
    });
    const nb::object off = option.off ? value.type()(*option.off) : nb::none();
    all.append(nb::make_tuple(option.name, value, off, option.in_programs() ? nb::cast(option.help) : nb::none()));
  }
  return nb::tuple(all);
}

void expect_no_more(const nb::dict& options, const char* call) {
  for (const auto [name, value] : options) {
    throw nb::type_error(
        fmt::format("{}() got an unexpected keyword argument '{}'", call, nb::str(name).c_str()).c_str());
  }
}

PyGenerateOptions take_generate_options(nb::dict& options, Callables& callables, const std::vector<int>& eos_of_model,
                                        const Tokenizer& tokenizer) {
  PyGenerateOptions result;
  GenerateOptions& to = result.options;
  to.sampler = take_sampler_options(options);
  take_into(options, "sequence", to.sequence);
  take_into(options, "max_tokens", to.max_tokens);
  take_into(options, "logprobs", to.logprobs);
  take_into(options, "top_logprobs", to.top_logprobs);
  if (const nb::object stop = take_given(options, "stop"); stop.is_valid()) {
    if (nb::isinstance<nb::str>(stop) || nb::isinstance<nb::bytes>(stop)) {
      to.stop.emplace_back(text_of(stop, "stop"));
    } else {
      for (const nb::handle one : stop) to.stop.emplace_back(text_of(one, "stop"));
    }
  }
  if (const nb::object eos = take_given(options, "eos_token_ids"); eos.is_valid()) {
    to.eos_token_ids = row_of(eos, "eos_token_ids");
  } else if (!eos_of_model.empty()) {
    to.eos_token_ids = eos_of_model;
  } else if (tokenizer.eos_id() >= 0) {
    to.eos_token_ids = {tokenizer.eos_id()};
  }
  if (const nb::object context = take_given(options, "context"); context.is_valid()) {
    result.context = row_of(context, "context");
    to.context = result.context;
  }
  if (const auto on_text = take_callable(options, "on_text", callables)) {
    to.on_text = [on_text](std::string_view text) { return ask(*on_text, text); };
  }
  if (const auto on_token = take_callable(options, "on_token", callables)) {
    to.on_token = [on_token](int token, float logprob) { return ask(*on_token, token, logprob); };
  }
  return result;
}

nb::object python_result(GenerateResult result, int top_logprobs) {
  const std::size_t count = result.tokens.size();
  std::pair<nb::object, nb::object> top{nb::none(), nb::none()};
  if (top_logprobs > 0) {
    const std::size_t each = count == 0 ? 0 : result.top_logprobs.size() / count;
    top = arrays_of(result.top_logprobs, {count, each});
  }
  return python::result("GenerateResult")(result.text, array_of(std::move(result.tokens)),
                                          array_of(std::move(result.logprobs)), top.first, top.second,
                                          to_string(result.finish_reason), result.error);
}

}  // namespace mmrec::python
