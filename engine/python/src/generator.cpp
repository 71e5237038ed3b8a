// mmrec.Generator's engine: requests in, results out. Iterators and streams are in engine/python/mmrec/_generator.py.
//
// The C++ generator is for one thread at a time. Here any thread may call: it waits without the GIL for the round that
// another thread runs. Callbacks run within a round, in its thread, and may submit and cancel.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <unistd.h>

#include "engine/python/src/binding.h"

namespace mmrec::python {
namespace {

class PyGenerator {
 public:
  Callables callables;  // of requests that are not finished

  PyGenerator(std::vector<Model> models, Tokenizer tokenizer, const GeneratorOptions& options)
      : eos_(models.front().info().eos_token_ids),
        tokenizer_(tokenizer),
        generator_(std::move(models), std::move(tokenizer), options) {}

  std::uint64_t submit(nb::handle prompt, const nb::object& start, const nb::object& state, const nb::object& on_finish,
                       nb::kwargs options) {
    GeneratorRequest request;
    const auto given = take_generate_options(options, callables, eos_, tokenizer_);
    expect_no_more(options, "submit");
    const bool begun = !start.is_none() || !state.is_none();
    std::optional<std::string_view> text;
    if (nb::isinstance<nb::str>(prompt)) {
      text = text_of(prompt, "prompt");
    } else {
      request.prompt = row_of(prompt, "prompt");
    }
    std::atomic<bool>* in_use = nullptr;
    if (!start.is_none()) {
      if (!nb::isinstance<PySession>(start)) refuse_type("start", "expected a Session");
      auto& session = nb::cast<PySession&>(start);
      in_use = &session.busy;
      request.start = session.session;
    }
    if (!state.is_none()) {
      request.state = bytes_of(state, "state");
      if (request.state.empty()) throw std::runtime_error("saved state: found 0 bytes");  // to the engine: no state
    }
    request.options = given.options;
    request.on_finish = receiver(on_finish, given.options.top_logprobs);
    adopt();
    const NoGil released;
    if (text) request.prompt = tokenizer_.encode(*text, !begun);
    const std::lock_guard lock(mutex_);
    std::optional<Busy> busy;
    if (in_use != nullptr) busy.emplace(*in_use, "the session `start`");
    return generator_.submit(std::move(request));
  }

  /// compute(generator) with the lock and without the GIL.
  template <class Compute>
  auto locked(Compute&& compute) {
    adopt();
    const NoGil released;
    const std::lock_guard lock(mutex_);
    return compute(generator_);
  }

  bool cancel(nb::handle number) {
    const auto id = integer_of<std::uint64_t>(number, "id");
    return locked([id](Generator& generator) { return generator.cancel(id); });
  }

  bool run_once() {
    return locked([this](Generator& generator) {
      watch_.check();
      return generator.run_once();
    });
  }

  void run() {
    locked([this](Generator& generator) {
      do {
        watch_.check();
      } while (generator.run_once());
    });
  }

 private:
  /// Hands a result to a callable of Python's.
  std::function<void(GenerateResult)> receiver(const nb::object& on_finish, int top_logprobs) {
    if (on_finish.is_none()) return {};
    return [callable = callables.keep(on_finish), top_logprobs](GenerateResult result) {
      const Gil gil;
      (*callable)(python_result(std::move(result), top_logprobs));
    };
  }

  /// Throws std::logic_error in a process that was forked during a round: the thread that held the lock is gone.
  /// Requires: the GIL.
  void adopt() {
    if (process_ == getpid()) return;
    const std::unique_lock lock(mutex_, std::try_to_lock);
    if (!lock) throw std::logic_error("this generator was in use when the process was forked; make another one here");
    process_ = getpid();
  }

  std::vector<int> eos_;
  Tokenizer tokenizer_;
  Generator generator_;
  std::recursive_mutex mutex_;  // callbacks of a round call in again
  pid_t process_ = getpid();
  SignalWatch watch_;
};

void init(PyGenerator* self, nb::handle models, const PyTokenizer& tokenizer, nb::handle slots, nb::handle memory_bytes,
          nb::kwargs options) {
  GeneratorOptions given;
  given.slots = integer_of<int>(slots, "slots");
  given.memory_bytes = integer_of<std::uint64_t>(memory_bytes, "memory_bytes");
  given.session = take_session_options(options);
  expect_no_more(options, "Generator");
  std::vector<Model> all = models_of(models);
  const NoGil released;
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
    if (!nb::isinstance<PyModel>(one)) refuse_type("models", "expected a Model, or several");
    result.push_back(nb::cast<const PyModel&>(one).model);
  }
  if (result.empty()) refuse("models", "found none, expected at least one");
  return result;
}

void bind_generator(nb::module_& m) {
  nb::class_<PyGenerator> type(m, "Generator", nb::type_slots(collected<PyGenerator>()), "See mmrec.Generator.");
  type.def("__init__", init, nb::call_guard<Call>(), nb::arg("models"), nb::arg("tokenizer"), nb::kw_only(),
           nb::arg("slots") = 0, nb::arg("memory_bytes") = 0, nb::arg("options"));
  type.def("submit", &PyGenerator::submit, nb::call_guard<Call>(), nb::arg("prompt"), nb::kw_only(),
           nb::arg("start") = nb::none(), nb::arg("state") = nb::none(), nb::arg("on_finish") = nb::none(),
           nb::arg("options"), "See mmrec.Generator.submit.");
  type.def("cancel", &PyGenerator::cancel, nb::call_guard<Call>(), nb::arg("id"),
           "Draws no more tokens for a request, which finishes as 'cancelled'. False where there is none of that id.");
  type.def(
      "run_once", &PyGenerator::run_once, nb::call_guard<Call>(),
      "One round: requests join while there is room, and the next token of each is drawn. Returns whether anything\n"
      "is left to do. Raises, when the round is done, what a callback raised, which cancels its request.");
  type.def("run", &PyGenerator::run, nb::call_guard<Call>(),
           "Rounds until all requests are finished. Raises what run_once() raises.");
  const auto property = [&type](const char* name, auto get, const char* doc) {
    type.def_prop_ro(
        name, [get](PyGenerator& self) { return self.locked([get](const Generator& g) { return (g.*get)(); }); }, doc);
  };
  property("slots", &Generator::slots, "Sequences that run at once at most, of all devices.");
  property("waiting", &Generator::waiting, "Requests without a slot.");
  property("running", &Generator::running, "Requests with one.");
  type.def_prop_ro(
      "prefill_stats",
      [](PyGenerator& self) {
        return python_stats(self.locked([](const Generator& generator) { return generator.prefill_stats(); }));
      },
      "What prefilling has cost so far: a PrefillStats.");
  refuse_pickling(type, "a Generator is not pickled: its model is, by path");
}

}  // namespace mmrec::python
