// Keyword arguments as options: of sessions, of the sampler, of generating. Callbacks among them take the GIL.
#include <nanobind/nanobind.h>

#include <type_traits>

#include "engine/python/src/binding.h"

namespace mmrec::python {
namespace {

/// The callable of that name; null where it is absent or None.
std::shared_ptr<nb::object> take_callable(nb::dict& options, const char* name, Callables& callables) {
  nb::object given = take(options, name);
  if (!given.is_valid() || given.is_none()) return nullptr;
  if (PyCallable_Check(given.ptr()) == 0) {
    throw nb::type_error((std::string(name) + ": expected a callable or None").c_str());
  }
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

template <class T>
void take_into(nb::dict& options, const char* name, T& value) {
  const nb::object given = take(options, name);
  if (!given.is_valid()) return;
  if constexpr (std::is_integral_v<T> && !std::is_same_v<T, bool>) {
    value = integer_of<T>(given, name);
  } else if ((std::is_floating_point_v<T> && PyBool_Check(given.ptr())) || !nb::try_cast(given, value)) {
    const std::string found = nb::repr(given).c_str();
    throw nb::type_error((std::string(name) + ": found " + found + ", expected " +
                          (std::is_same_v<T, bool> ? "True or False" : "a number"))
                             .c_str());
  }
}
template void take_into(nb::dict&, const char*, int&);
template void take_into(nb::dict&, const char*, bool&);

SessionOptions take_session_options(nb::dict& options) {
  SessionOptions result;
  take_into(options, "threads", result.threads);
  take_into(options, "sweep_tolerance", result.sweep_tolerance);
  take_into(options, "max_sweeps", result.max_sweeps);
  if (const nb::object prefill = take(options, "prefill"); prefill.is_valid()) {
    const std::string_view name = text_of(prefill, "prefill");
    if (name == "auto") {
      result.prefill = PrefillMode::kAuto;
    } else if (name == "sweeps") {
      result.prefill = PrefillMode::kSweeps;
    } else if (name == "steps") {
      result.prefill = PrefillMode::kSteps;
    } else {
      throw std::invalid_argument("prefill: found '" + std::string(name) + "', expected auto, sweeps or steps");
    }
  }
  return result;
}

SamplerOptions take_sampler_options(nb::dict& options) {
  SamplerOptions result;
  take_into(options, "temperature", result.temperature);
  take_into(options, "top_k", result.top_k);
  take_into(options, "top_p", result.top_p);
  take_into(options, "min_p", result.min_p);
  take_into(options, "repetition_penalty", result.repetition_penalty);
  take_into(options, "repetition_window", result.repetition_window);
  take_into(options, "vocab_limit", result.vocab_limit);
  take_into(options, "seed", result.seed);
  return result;
}

void expect_no_more(const nb::dict& options, const char* call) {
  for (const auto [name, value] : options) {
    throw nb::type_error(
        (std::string(call) + "() got an unexpected keyword argument '" + nb::str(name).c_str() + "'").c_str());
  }
}

std::unique_ptr<PyGenerateOptions> take_generate_options(nb::dict& options, Callables& callables) {
  auto result = std::make_unique<PyGenerateOptions>();
  GenerateOptions& to = result->options;
  to.sampler = take_sampler_options(options);
  take_into(options, "sequence", to.sequence);
  take_into(options, "max_tokens", to.max_tokens);
  take_into(options, "logprobs", to.logprobs);
  take_into(options, "top_logprobs", to.top_logprobs);
  if (const nb::object stop = take(options, "stop"); stop.is_valid() && !stop.is_none()) {
    if (nb::isinstance<nb::str>(stop)) {
      to.stop.emplace_back(text_of(stop, "stop"));
    } else {
      for (const nb::handle one : stop) to.stop.emplace_back(text_of(one, "stop"));
    }
  }
  if (const nb::object eos = take(options, "eos_token_ids"); eos.is_valid() && !eos.is_none()) {
    result->eos_token_ids = row_of(eos, "eos_token_ids");
  }
  if (const nb::object context = take(options, "context"); context.is_valid() && !context.is_none()) {
    result->context = row_of(context, "context");
    to.context = result->context;
  }
  if (const auto on_text = take_callable(options, "on_text", callables)) {
    to.on_text = [on_text](std::string_view text) {
      const Gil gil;
      return goes_on((*on_text)(nb::str(text.data(), text.size())));
    };
  }
  if (const auto on_token = take_callable(options, "on_token", callables)) {
    to.on_token = [on_token](int token, float logprob) {
      const Gil gil;
      return goes_on((*on_token)(token, logprob));
    };
  }
  return result;
}

void default_eos(PyGenerateOptions& options, const std::vector<int>& of_model, const Tokenizer& tokenizer) {
  if (options.eos_token_ids) {
    options.options.eos_token_ids = *options.eos_token_ids;
  } else if (!of_model.empty()) {
    options.options.eos_token_ids = of_model;
  } else if (tokenizer.eos_id() >= 0) {
    options.options.eos_token_ids = {tokenizer.eos_id()};
  }
}

nb::object python_result(GenerateResult result, int top_logprobs) {
  const std::size_t count = result.tokens.size();
  nb::object top_tokens = nb::none();
  nb::object top_values = nb::none();
  if (top_logprobs > 0) {
    const std::size_t each = count == 0 ? 0 : result.top_logprobs.size() / count;
    std::vector<int> ids;
    std::vector<float> values;
    for (const Sample& sample : result.top_logprobs) {
      ids.push_back(sample.token);
      values.push_back(sample.logprob);
    }
    top_tokens = array_of(std::move(ids), {count, each});
    top_values = array_of(std::move(values), {count, each});
  }
  const std::size_t logprobs = result.logprobs.size();
  const std::string_view reason = to_string(result.finish_reason);
  return nb::module_::import_("mmrec._results")
      .attr("GenerateResult")(nb::str(result.text.data(), result.text.size()),
                              array_of(std::move(result.tokens), {count}),
                              array_of(std::move(result.logprobs), {logprobs}), top_tokens, top_values,
                              nb::str(reason.data(), reason.size()), nb::str(result.error.c_str()));
}

}  // namespace mmrec::python
