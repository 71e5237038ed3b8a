// Keyword arguments as options: of sessions, of the sampler, of generating. Callbacks among them take the GIL.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>

#include <array>
#include <charconv>
#include <type_traits>

#include "engine/python/src/binding.h"

namespace mmrec::python {
namespace {

/// The callable of that name; null if it is absent or None.
std::shared_ptr<nb::object> take_callable(nb::dict& options, const char* name, Callables& callables) {
  nb::object given = take_given(options, name);
  if (!given.is_valid()) return nullptr;
  if (PyCallable_Check(given.ptr()) == 0) refuse_type(name, "expected a callable or None");
  return callables.keep(std::move(given));
}

}  // namespace

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
    refuse_type(name, std::string("found ") + nb::repr(given).c_str() + ", expected " +
                          (kIsBool ? "True or False" : "a number"));
  }
}
template void take_into(nb::dict&, const char*, int&);
template void take_into(nb::dict&, const char*, bool&);
template void take_into(nb::dict&, const char*, std::optional<bool>&);

std::optional<std::size_t> take_choice(nb::dict& options, const char* name, std::span<const std::string_view> names) {
  const nb::object given = take(options, name);
  if (!given.is_valid()) return std::nullopt;
  const std::string_view found = text_of(given, name);
  std::string expected;
  for (std::size_t i = 0; i < names.size(); ++i) {
    if (found == names[i]) return i;
    expected.append(i == 0 ? "" : i + 1 == names.size() ? " or " : ", ").append(names[i]);
  }
  refuse(name, "found '" + std::string(found) + "', expected " + expected);
}

SessionOptions take_session_options(nb::dict& options) {
  SessionOptions result;
  take_into(options, "threads", result.threads);
  take_into(options, "sweep_tolerance", result.sweep_tolerance);
  take_into(options, "max_sweeps", result.max_sweeps);
  if (const auto mode = take_choice(options, "prefill", kPrefillModeNames))
    result.prefill = static_cast<PrefillMode>(*mode);
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
      std::array<char, 32> digits{};  // the fewest that give the float back: 0.8, not 0.800000011920929
      std::to_chars(digits.data(), digits.data() + digits.size() - 1, of);
      return nb::float_(nb::str(digits.data()));
    });
    const nb::object off = option.off ? value.type()(*option.off) : nb::none();
    all.append(nb::make_tuple(option.name, value, off, option.in_programs() ? nb::cast(option.help) : nb::none()));
  }
  return nb::tuple(all);
}

void expect_no_more(const nb::dict& options, const char* call) {
  for (const auto [name, value] : options) {
    throw nb::type_error(
        (std::string(call) + "() got an unexpected keyword argument '" + nb::str(name).c_str() + "'").c_str());
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
    if (nb::isinstance<nb::str>(stop)) {
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
