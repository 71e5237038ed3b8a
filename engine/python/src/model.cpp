// mmrec.Model: loading, its properties, sessions. And mmrec.Session: a batch of sequences with their state.
#include <nanobind/nanobind.h>
#include <nanobind/stl/filesystem.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include "engine/python/src/binding.h"

namespace mmrec::python {
namespace {

/// The arguments of Model.load. Must live as long as `options` are in use.
struct Loading {
  nb::object on_warning;  // None or absent: Python's warnings
  nb::dict kept;          // the other options
  LoadOptions options;
  std::filesystem::path folder;

  Loading(const char* call, nb::handle path, nb::dict given)
      : on_warning(take_given(given, "on_warning")),
        kept(nb::borrow<nb::dict>(given.attr("copy")())),
        folder(model_path(path)) {
    if (const nb::object device = take(given, "device"); device.is_valid()) {
      const std::string_view name = text_of(device, "device");
      if (!set_device(options, name)) refuse("device", "found '{}', expected auto, cpu, cuda or cuda:N", name);
    }
    take_choice(given, "precision", kPrecisionNames, options.precision);
    take_into(given, "threads", options.threads);
    take_into(given, "batch_invariant", options.batch_invariant);
    take_into(given, "allow_nonfinite", options.allow_nonfinite);
    take_choice(given, "expert", kExpertNames, options.variant.expert);
    take_choice(given, "calls", kCallsNames, options.variant.calls);
    take_into(given, "bank", options.variant.bank);
    expect_no_more(given, call);
    options.on_warning = [this](std::string_view text) {
      const Gil gil;
      if (on_warning.is_valid()) {
        on_warning(text);
      } else if (PyErr_WarnEx(PyExc_UserWarning, std::string(text).c_str(), 1) != 0) {
        nb::raise_python_error();
      }
    };
  }
  Loading(const Loading&) = delete;
  Loading& operator=(const Loading&) = delete;

  /// Warns where another precision would be much faster and none was asked for.
  void advise(const ModelInfo& info) const {
    if (options.precision != Precision::kAuto) return;
    if (const std::string advice = bf16_advice(info, "precision='bf16'"); !advice.empty()) options.on_warning(advice);
  }
};

PyModel load(nb::handle path, nb::kwargs options) {
  Loading loading("load", path, std::move(options));
  Model model = without_gil([&] { return Model::load(loading.folder, loading.options); });
  loading.advise(model.info());
  return {std::move(model), loading.folder, loading.kept};
}

std::vector<PyModel> load_on_gpus(nb::handle path, nb::handle gpus, nb::kwargs options) {
  Loading loading("load_on_gpus", path, std::move(options));
  const std::vector<int> numbers = gpus.is_none() ? std::vector<int>() : row_of(gpus, "gpus");
  std::vector<PyModel> result;
  for (Model& model : without_gil([&] { return Model::load_on_gpus(loading.folder, loading.options, numbers); })) {
    const auto own = nb::borrow<nb::dict>(loading.kept.attr("copy")());
    own["device"] = "cuda:" + std::to_string(model.info().gpu);
    result.push_back({std::move(model), loading.folder, own});
  }
  loading.advise(result.front().model.info());
  return result;
}

nb::object info(const PyModel& self) {
  const ModelInfo& info = self.model.info();
  const auto name = [](auto names, auto option) {
    return option ? std::optional(names[static_cast<std::size_t>(*option)]) : std::nullopt;
  };
  return result("ModelInfo")(
      info.architecture, info.vocab_size, info.model_dim, info.num_layers, info.num_heads, info.ffn_dim,
      info.memory_segment, info.memory_slots, name(kExpertNames, info.variant.expert),
      name(kCallsNames, info.variant.calls), info.variant.bank, info.parameters, info.weight_bytes,
      info.bytes_per_token, info.memory_bytes, info.fingerprint, info.bos_token_id,
      nb::tuple(nb::cast(info.eos_token_ids)), kDeviceNames[static_cast<std::size_t>(info.device)], info.gpu,
      info.device_name, to_string(info.precision), info.batch_invariant);
}

PySession* new_session(const PyModel& self, nb::handle batch, nb::kwargs options) {
  const int sequences = integer_of<int>(batch, "batch");
  const SessionOptions given = take_session_options(options);
  expect_no_more(options, "new_session");
  auto session = without_gil([&] { return std::make_shared<Session>(self.model.new_session(sequences, given)); });
  return new PySession(std::move(session), self.model.info().eos_token_ids);
}

nb::object reduce(const PyModel& self) {
  return nb::make_tuple(result("load_again"),
                        nb::make_tuple(nb::type<PyModel>(), self.path, self.options, self.model.info().fingerprint));
}

// --- Sessions

constexpr const char* kInUse = "this session";

/// The ids of a call, which must be [T] for a batch of 1, or [batch, T]; for `step` [batch], or [batch, 1].
Tokens tokens_for(const Session& session, nb::handle value, bool step, const char* what = "tokens") {
  Tokens tokens = tokens_of(value, what);
  const auto batch = static_cast<std::size_t>(session.batch());
  const std::vector<std::size_t>& shape = tokens.shape;
  const bool rows = shape.size() == 2 && shape[0] == batch && (!step || shape[1] == 1);
  const bool flat = shape.size() == 1 && (step ? shape[0] == batch : batch == 1);
  if (!rows && !flat) {
    refuse(what, "found the shape [{}], expected {}[{}{}]", fmt::join(shape, ", "),
           !step && batch == 1 ? "[T] or " : "", batch, step ? "" : ", T");
  }
  return tokens;
}

/// Returns compute(session), which alone uses the session, without the GIL.
template <class Compute>
auto exclusively(PySession& self, Compute&& compute) {
  const Busy busy(self.busy, kInUse);
  const NoGil released;
  return compute(*self.session);
}

/// The same with the GIL, as a method: for what takes no time.
template <class Compute>
auto at_once(Compute compute) {
  return [compute](PySession& self) {
    const Busy busy(self.busy, kInUse);
    return std::invoke(compute, *self.session);
  };
}

/// Options of a call that checks for signals and asks `on_progress` where it is not None. Outlives the call.
CallOptions watched(nb::object on_progress) {
  return {[callable = Callables().keep(std::move(on_progress)), watch = SignalWatch()](std::int64_t done,
                                                                                       std::int64_t total) mutable {
    watch.check();
    return callable->is_none() || ask(*callable, done, total);
  }};
}

void prefill(PySession& self, nb::handle value, nb::object on_progress) {
  const Busy busy(self.busy, kInUse);
  const Tokens tokens = tokens_for(*self.session, value, false);
  const CallOptions options = watched(std::move(on_progress));
  without_gil([&] { self.session->prefill(tokens.ids, options); });
}

void step(PySession& self, nb::handle value) {
  const Tokens tokens = tokens_for(*self.session, value, true);
  exclusively(self, [&](Session& session) { session.step(tokens.ids); });
}

nb::object score(PySession& self, nb::handle value, nb::object on_progress) {
  const Busy busy(self.busy, kInUse);
  const Tokens tokens = tokens_for(*self.session, value, false);
  const CallOptions options = watched(std::move(on_progress));
  std::vector<float> logprobs(tokens.ids.size());
  without_gil([&] { self.session->score(tokens.ids, logprobs, options); });
  return array_of(std::move(logprobs), tokens.shape);
}

nb::object logits(PySession& self) {
  std::vector<float> copy = exclusively(self, [](Session& session) {
    const std::span<const float> all = session.logits();
    return std::vector<float>(all.begin(), all.end());
  });
  if (copy.empty()) refuse("logits", "found a session at position 0, expected tokens before it");
  const auto batch = static_cast<std::size_t>(self.session->batch());
  const std::size_t vocab = copy.size() / batch;
  return array_of(std::move(copy), {batch, vocab});
}

nb::object draw(PySession& self, nb::handle step, nb::handle first_sequence, bool logprobs, nb::kwargs options) {
  const auto at = integer_of<std::uint64_t>(step, "step");
  const auto first = integer_of<std::uint64_t>(first_sequence, "first_sequence");
  const SamplerOptions sampler = take_sampler_options(options);
  expect_no_more(options, "draw");
  std::vector<Sample> samples(static_cast<std::size_t>(self.session->batch()));
  exclusively(self, [&](Session& session) { session.draw(sampler, at, first, samples, logprobs); });
  const auto [tokens, values] = arrays_of(samples, {samples.size()});
  return nb::make_tuple(tokens, values);
}

nb::bytes save(PySession& self) {
  const std::vector<std::byte> state = exclusively(self, [](Session& session) { return session.save(); });
  return nb::bytes(state.data(), state.size());
}

void restore(PySession& self, nb::handle state, nb::handle recent) {
  const std::vector<int> ids =
      recent.is_none() ? std::vector<int>() : tokens_for(*self.session, recent, false, "recent").ids;
  const std::vector<std::byte> bytes = bytes_of(state, "state");
  exclusively(self, [&](Session& session) { session.restore(bytes, ids); });
}

PySession* clone(PySession& self) {
  auto copy = exclusively(self, [](Session& session) { return std::make_shared<Session>(session.clone()); });
  return new PySession(std::move(copy), self.eos_token_ids);
}

nb::object recent_tokens(PySession& self, nb::handle sequence) {
  const Busy busy(self.busy, kInUse);
  const std::span<const int> recent = self.session->recent_tokens(integer_of<int>(sequence, "sequence"));
  return array_of(std::vector<int>(recent.begin(), recent.end()));
}

nb::object generate_text(PySession& self, const PyTokenizer& tokenizer, nb::kwargs options) {
  Callables callables;
  PyGenerateOptions given = take_generate_options(options, callables, self.eos_token_ids, tokenizer.tokenizer);
  expect_no_more(options, "generate");
  given.options.cancelled = [watch = SignalWatch()]() mutable {
    watch.check();
    return false;
  };
  GenerateResult result =
      exclusively(self, [&](Session& session) { return generate(session, tokenizer.tokenizer, given.options); });
  return python_result(std::move(result), given.options.top_logprobs);
}

}  // namespace

void bind_model(nb::module_& m) {
  nb::class_<PyModel> type(
      m, "Model",
      "An MM-Rec model. Immutable; any number of threads may use it, with sessions of their own.\n\n"
      "Pickled by path and options: another process loads the files again, and raises ModelError\n"
      "where they are not the same model any more.");
  type.def_static(
      "load", load, nb::call_guard<Call>(), nb::arg("path") = nb::none(), nb::arg("options"),
      "Loads a model folder: config.json and model.safetensors, or its shards. None: the bundled model.\n\n"
      "Options: device='auto' ('cpu', 'cuda', 'cuda:N'; 'cpu' loads no CUDA library), precision='auto' ('fp32',\n"
      "'fp16', 'bf16', 'fp32-fma'), batch_invariant=False (on a GPU: no sequence's result depends on others),\n"
      "threads=0 (that read; 0: all processors), allow_nonfinite=False, on_warning=None (a callable of one line;\n"
      "None: warnings.warn), and of some architectures expert='both'|'text'|'code', bank=bool,\n"
      "calls='stepwise'|'prompt'|'whole'. Raises ModelError naming file, field, found and expected, OSError where\n"
      "a file cannot be read, DeviceUnavailable, CudaError, MemoryError, and ValueError for options.");
  type.def_static("load_on_gpus", load_on_gpus, nb::call_guard<Call>(), nb::arg("path") = nb::none(),
                  nb::arg("gpus") = nb::none(), nb::arg("options"),
                  "The same on several GPUs, for a Scorer or Generator to use together: a list of a model for each of\n"
                  "`gpus` (numbers), or for each that can be used. Files are read once.");
  type.def("new_session", new_session, nb::call_guard<Call>(), nb::arg("batch") = 1, nb::arg("options"),
           "A session of `batch` sequences at position 0, 1..65536.\n\n"
           "Options: threads=0 (0: all processors), prefill='auto' ('sweeps', 'steps'), sweep_tolerance=0.0,\n"
           "max_sweeps=64. Raises ValueError for one out of range, MemoryError, CudaError.");
  type.def_prop_ro("info", info, "What it is and where it runs: a ModelInfo.");
  type.def_ro("path", &PyModel::path, "The folder it was loaded from.");
  type.def("__repr__", [](const PyModel& self) {
    const ModelInfo& info = self.model.info();
    return fmt::format("<mmrec.Model {}, {} parameters, on {} in {}>", info.architecture, info.parameters,
                       info.device_name, to_string(info.precision));
  });
  type.def("__reduce__", reduce);
}

void bind_session(nb::module_& m) {
  nb::class_<PySession> type(
      m, "Session",
      "`batch` sequences in lock-step, with their recurrent state, whose size does not grow with the text.\n\n"
      "Made by Model.new_session(). One call at a time: another one meanwhile is a RuntimeError. Calls that\n"
      "compute let the GIL go. A call that raises ValueError has changed nothing; after MemoryError or CudaError\n"
      "the state is undefined until reset() or restore(). Not to be pickled: save() gives the state as bytes.");
  type.def("prefill", prefill, nb::call_guard<Call>(), nb::arg("tokens"), nb::arg("on_progress") = nb::none(),
           "Consumes `tokens`, [T] for a batch of 1, or [batch, T]; T >= 1.\n\n"
           "on_progress(done, total) is asked between chunks; False ends the call there, at position(). Ctrl-C does\n"
           "likewise. Raises ValueError for an id outside [0, vocab_size), naming it and its index, and for a shape.");
  type.def("step", step, nb::call_guard<Call>(), nb::arg("tokens"),
           "Consumes one token of each sequence, [batch]; otherwise like prefill.");
  type.def(
      "score", score, nb::call_guard<Call>(), nb::arg("tokens"), nb::arg("on_progress") = nb::none(),
      "Consumes `tokens` like prefill and returns log p of each given all before it (nats), float32 of their\n"
      "shape. The first token of all has nothing before it: 0. Where on_progress ended the call, entries of tokens\n"
      "that were not consumed are unspecified.");
  type.def("logits", logits, nb::call_guard<Call>(),
           "Logits of the next token, float32 [batch, vocab_size], a copy. ValueError at position 0.");
  type.def("draw", draw, nb::call_guard<Call>(), nb::arg("step"), nb::arg("first_sequence") = 0, nb::kw_only(),
           nb::arg("logprobs") = true, nb::arg("sampler"),
           "Draws the next token of each sequence: (tokens int32 [batch], log-probs float32 [batch]).\n\n"
           "Options are those of generate() that concern the sampler; sequence b has the random number of (seed,\n"
           "first_sequence + b, step). Consumes nothing: step() does. Without logprobs these are 0. Raises ValueError\n"
           "at position 0, for an option out of range and for a repetition penalty; NumericError for NaN logits.");
  type.def("clone", clone, nb::call_guard<Call>(), "An independent copy, state and all; weights are shared.");
  type.def("reset", at_once(&Session::reset), "Back to position 0.");
  type.def("save", save, nb::call_guard<Call>(),
           "The state as bytes, for restore() of a session of the same model and batch. They can betray the text:\n"
           "treat them like it.");
  type.def("restore", restore, nb::call_guard<Call>(), nb::arg("state"), nb::arg("recent") = nb::none(),
           "Replaces the state by a saved one: bytes, or a buffer of them. `recent`, as prefill takes them, are the\n"
           "last tokens before it, which the repetition penalty and half a character need. Raises ModelError, the\n"
           "session unchanged, for bytes that are damaged or of another model, version or batch; ValueError for\n"
           "`recent`.");
  type.def("recent_tokens", recent_tokens, nb::call_guard<Call>(), nb::arg("sequence") = 0,
           "The last tokens that `sequence` has consumed, oldest first, int32, at most 256.");
  type.def(
      "generate", generate_text, nb::call_guard<Call>(), nb::arg("tokenizer"), nb::arg("options"),
      "Continues the sequence (batch 1, position >= 1) and returns a GenerateResult.\n\n"
      "Options: those of the sampler, as the signature names them (temperature=0: greedy), max_tokens=256 (-1: no\n"
      "end), sequence=0, stop=() (str or several), eos_token_ids=None (the model's, else the tokenizer's),\n"
      "logprobs=True, top_logprobs=0, context=None (the tokens before, for a session that was restored),\n"
      "on_text(piece), on_token(id, logprob); False of these two cancels. The same seed, sequence and position\n"
      "draw the same token. All tokens but the last have been consumed then. Raises ValueError before anything is\n"
      "drawn, NumericError, and what the callbacks raise.");
  type.def_prop_ro(
      "batch", [](const PySession& self) { return self.session->batch(); }, "Sequences in lock-step.");
  type.def_prop_ro(
      "vocab_size", [](const PySession& self) { return self.session->vocab_size(); }, "Ids and columns of logits.");
  type.def_prop_ro("position", at_once(&Session::position), "Tokens consumed per sequence.");
  type.def_prop_ro("prefill_stats", at_once([](Session& session) { return python_stats(session.prefill_stats()); }),
                   "What prefilling has cost since the session began or was reset: a PrefillStats.");
  type.def("__repr__",
           [](const PySession& self) { return "<mmrec.Session of " + std::to_string(self.session->batch()) + ">"; });
  refuse_pickling(type, "a Session is not pickled: save() gives its state as bytes");
}

}  // namespace mmrec::python
