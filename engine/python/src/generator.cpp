// mmrec.Generator's engine: requests in, results out. What iterates and streams is in
// engine/python/mmrec/_generator.py.
//
// The C++ generator is for one thread at a time. Here any thread may call: it waits for the round that another one
// runs, without the GIL. Callbacks run within a round, in its thread, and may submit and cancel.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include "engine/python/src/binding.h"

namespace mmrec::python {
namespace {

class PyGenerator {
 public:
  PyGenerator(std::vector<Model> models, Tokenizer tokenizer, const GeneratorOptions& options)
      : eos_(models.front().info().eos_token_ids),
        tokenizer_(tokenizer),
        generator_(std::move(models), std::move(tokenizer), options) {}

  std::uint64_t submit(nb::handle prompt, const nb::object& start, const nb::object& state, const nb::object& on_finish,
                       nb::kwargs options) {
    GeneratorRequest request;
    auto given = take_generate_options(options);
    expect_no_more(options, "submit");
    default_eos(*given, eos_, tokenizer_);
    const bool begun = !start.is_none() || !state.is_none();
    std::optional<std::string_view> text;
    if (nb::isinstance<nb::str>(prompt)) {
      text = text_of(prompt, "prompt");
    } else {
      request.prompt = row_of(prompt, "prompt");
    }
    std::atomic<bool>* in_use = nullptr;
    if (!start.is_none()) {
      if (!nb::isinstance<PySession>(start)) throw nb::type_error("start: expected a Session");
      auto& session = nb::cast<PySession&>(start);
      in_use = &session.busy;
      request.start = session.session;
    }
    if (!state.is_none()) {
      if (!nb::isinstance<nb::bytes>(state)) throw nb::type_error("state: expected bytes");
      const auto bytes = nb::cast<nb::bytes>(state);
      const auto* data = reinterpret_cast<const std::byte*>(bytes.c_str());
      request.state.assign(data, data + bytes.size());
    }
    request.options = given->options;
    request.on_finish = receiver(on_finish, given->options.top_logprobs);
    const nb::gil_scoped_release release;
    if (text) request.prompt = tokenizer_.encode(*text, !begun);
    const std::lock_guard lock(mutex_);
    std::optional<Busy> busy;
    if (in_use != nullptr) busy.emplace(*in_use, "the session `start`");
    return generator_.submit(std::move(request));
  }

  bool cancel(std::uint64_t id) {
    const nb::gil_scoped_release release;
    const std::lock_guard lock(mutex_);
    return generator_.cancel(id);
  }

  bool run_once() {
    const nb::gil_scoped_release release;
    const std::lock_guard lock(mutex_);
    watch_.check();
    return generator_.run_once();
  }

  void run() {
    const nb::gil_scoped_release release;
    const std::lock_guard lock(mutex_);
    do {
      watch_.check();
    } while (generator_.run_once());
  }

  template <class Ask>
  auto ask(Ask&& ask) {
    const nb::gil_scoped_release release;
    const std::lock_guard lock(mutex_);
    return ask(generator_);
  }

 private:
  /// Hands a result to a callable of Python's.
  static std::function<void(GenerateResult)> receiver(const nb::object& on_finish, int top_logprobs) {
    if (on_finish.is_none()) return {};
    return [callable = kept(on_finish), top_logprobs](GenerateResult result) {
      const nb::gil_scoped_acquire gil;
      (*callable)(python_result(std::move(result), top_logprobs));
    };
  }

  std::vector<int> eos_;
  Tokenizer tokenizer_;
  Generator generator_;
  std::recursive_mutex mutex_;  // callbacks of a round call in again
  SignalWatch watch_;
};

void init(PyGenerator* self, nb::handle models, const PyTokenizer& tokenizer, int slots, std::uint64_t memory_bytes,
          nb::kwargs options) {
  GeneratorOptions given;
  given.slots = slots;
  given.memory_bytes = memory_bytes;
  given.session = take_session_options(options);
  expect_no_more(options, "Generator");
  std::vector<Model> all = models_of(models);
  const nb::gil_scoped_release release;
  new (self) PyGenerator(std::move(all), tokenizer.tokenizer, given);
}

}  // namespace

std::vector<Model> models_of(nb::handle models) {
  std::vector<Model> result;
  if (nb::isinstance<PyModel>(models)) {
    result.push_back(nb::cast<const PyModel&>(models).model);
    return result;
  }
  for (const nb::handle one : nb::iter(models)) {
    if (!nb::isinstance<PyModel>(one)) throw nb::type_error("models: expected a Model, or several");
    result.push_back(nb::cast<const PyModel&>(one).model);
  }
  if (result.empty()) throw std::invalid_argument("models: found none, expected at least one");
  return result;
}

void bind_generator(nb::module_& m) {
  nb::class_<PyGenerator> type(m, "Generator", "See mmrec.Generator.");
  type.def("__init__", init, nb::arg("models"), nb::arg("tokenizer"), nb::kw_only(), nb::arg("slots") = 0,
           nb::arg("memory_bytes") = 0, nb::arg("options"));
  type.def("submit", &PyGenerator::submit, nb::arg("prompt"), nb::kw_only(), nb::arg("start") = nb::none(),
           nb::arg("state") = nb::none(), nb::arg("on_finish") = nb::none(), nb::arg("options"),
           "Queues a request and returns its number, from 1 on.\n\n"
           "prompt: a str, encoded as Tokenizer.encode does (with BOS unless it goes on from a state), or ids [T].\n"
           "start: a Session of batch 1 to go on from a copy of, which must stand there until the request runs; or\n"
           "state: bytes of Session.save(). on_finish receives the GenerateResult. Options are Session.generate's.\n"
           "Raises ValueError naming the field, and ModelError for a state; then nothing has changed.");
  type.def("cancel", &PyGenerator::cancel, nb::arg("id"),
           "Draws no more tokens for a request, which finishes as 'cancelled'. False where there is none of that id.");
  type.def(
      "run_once", &PyGenerator::run_once,
      "One round: requests join while there is room, and the next token of each is drawn. Returns whether anything\n"
      "is left to do. Raises, when the round is done, what a callback raised, which cancels its request.");
  type.def("run", &PyGenerator::run, "Rounds until all requests are finished. Raises what run_once() raises.");
  const auto property = [&type](const char* name, auto get, const char* doc) {
    type.def_prop_ro(
        name, [get](PyGenerator& self) { return self.ask([get](const Generator& g) { return (g.*get)(); }); }, doc);
  };
  property("slots", &Generator::slots, "Sequences that run at once at most, of all devices.");
  property("waiting", &Generator::waiting, "Requests without a slot.");
  property("running", &Generator::running, "Requests with one.");
  type.def_prop_ro(
      "prefill_stats",
      [](PyGenerator& self) {
        return python_stats(self.ask([](const Generator& generator) { return generator.prefill_stats(); }));
      },
      "What prefilling has cost so far: a PrefillStats.");
  refuse_pickling(type, "a Generator is not pickled: its model is, by path");
}

}  // namespace mmrec::python
