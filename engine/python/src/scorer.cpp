// mmrec.Scorer and the measures of a corpus.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>

#include "engine/python/src/binding.h"
#include "mmrec/evaluation.h"

namespace mmrec::python {
namespace {

/// Calls by number, from 1. A reader that goes away ends its own call, even one that has not begun.
struct Calls {
  std::atomic<std::uint64_t> last = 0;     // that has a number
  std::atomic<std::uint64_t> current = 0;  // that is under way
  std::atomic<std::uint64_t> stopped = 0;  // the last that was to end early
  std::function<bool()> hand_over;         // of a stream under way: the scores that are ready; whether to go on
};

struct PyScorer {
  Scorer scorer;
  std::atomic<bool> busy = false;
  std::shared_ptr<Calls> calls;
  Callables callables;

  PyScorer(std::vector<Model> models, ScorerOptions options, std::shared_ptr<Calls> shared, Callables kept)
      : scorer(std::move(models), std::move(options)), calls(std::move(shared)), callables(std::move(kept)) {}
};

constexpr const char* kInUse = "this scorer";

void init(PyScorer* self, nb::handle models, nb::handle batch, bool whole_calls, const nb::object& on_progress,
          nb::kwargs options) {
  ScorerOptions given;
  given.batch = integer_of<int>(batch, "batch");
  if (given.batch < 0 || given.batch > 65536) refuse("batch", "found {}, expected 0..65536", given.batch);
  given.whole_calls = whole_calls;
  given.session = take_session_options(options);
  expect_no_more(options, "Scorer");
  Callables callables;
  const auto callable = on_progress.is_none() ? nullptr : callables.keep(on_progress);
  const auto calls = std::make_shared<Calls>();
  given.on_progress = [callable, calls, watch = SignalWatch()](std::int64_t tokens, double nll) mutable {
    watch.check();
    if (calls->stopped == calls->current) return false;
    if (calls->hand_over && !calls->hand_over()) return false;
    return !callable || ask(*callable, tokens, nll);
  };
  new (self) PyScorer(models_of(models), std::move(given), calls, std::move(callables));
}

/// A list of Python's scores.
nb::list python_scores(std::vector<DocumentScore>& scores) {
  const nb::object type = result("DocumentScore");
  nb::list list;
  for (DocumentScore& one : scores) list.append(type(array_of(std::move(one.logprobs)), one.nll, one.complete));
  return list;
}

nb::list score(PyScorer& self, nb::handle documents) {
  const Busy busy(self.busy, kInUse);
  self.calls->current = ++self.calls->last;
  std::vector<std::vector<int>> ids;
  for (const nb::handle document : nb::iter(documents)) {
    ids.push_back(row_of(document, ("document " + std::to_string(ids.size())).c_str()));
  }
  std::vector<DocumentScore> scores = without_gil([&] { return self.scorer.score(ids); });
  return python_scores(scores);
}

/// Documents from an iterator as they are wanted; lists of scores to `on_scores`, in their order, before the next chunk
/// is scored or the next document read. A score at a time would hand the GIL from thread to thread for each.
bool run_stream(PyScorer& self, nb::handle documents, const nb::callable& on_scores, std::uint64_t call) {
  constexpr std::size_t kTogether = 64;
  const Busy busy(self.busy, kInUse);
  self.calls->current = call;
  if (self.calls->stopped == call) return false;
  const nb::iterator all = nb::iter(documents);
  std::size_t number = 0;
  std::vector<DocumentScore> ready;
  bool is_wanted = true;
  const auto hand_over = [&] {
    if (ready.empty()) return is_wanted;
    const Gil gil;
    const nb::list scores = python_scores(ready);
    ready.clear();
    return is_wanted = ask(on_scores, scores);
  };
  const auto next = [&](std::vector<int>& ids) {
    if (!hand_over()) return false;
    const Gil gil;
    const nb::object document = nb::steal(PyIter_Next(all.ptr()));
    if (!document.is_valid()) {
      if (PyErr_Occurred() != nullptr) nb::raise_python_error();
      return false;
    }
    ids = row_of(document, ("document " + std::to_string(number++)).c_str());
    return true;
  };
  const auto take = [&](std::size_t, std::vector<int>&, DocumentScore& one) {
    ready.push_back(std::move(one));
    return ready.size() < kTogether || hand_over();
  };
  struct Handing {  // while the stream is under way
    Calls& calls;
    ~Handing() { calls.hand_over = nullptr; }
  };
  const Handing handing{*self.calls};
  self.calls->hand_over = hand_over;
  const NoGil released;
  bool is_whole = false;
  try {
    is_whole = self.scorer.score_stream(next, take);
  } catch (...) {
    (void)hand_over();
    throw;
  }
  return hand_over() && is_whole;
}

std::vector<float> logprobs_of(nb::object given) {
  using Logprobs = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
  Logprobs logprobs;
  if (!nb::try_cast(given, logprobs, false)) {
    given = nb::module_::import_("numpy").attr("ascontiguousarray")(given, "float32").attr("ravel")();
    logprobs = nb::cast<Logprobs>(given, false);
  }
  return {logprobs.data(), logprobs.data() + logprobs.size()};
}

/// Adds a DocumentScore of Python's.
void add(PerplexityAccumulator& self, nb::handle score, nb::handle bytes, nb::handle words) {
  const DocumentScore given{.logprobs = logprobs_of(score.attr("logprobs")),
                            .nll = nb::cast<double>(score.attr("nll"))};
  self.add(given, integer_of<std::int64_t>(bytes, "bytes"), integer_of<std::int64_t>(words, "words"));
}

nb::object summary(const PerplexityAccumulator& self) {
  const PerplexitySummary s = self.summary();
  return result("PerplexitySummary")(s.docs, s.tokens, s.nll, s.ppl, s.ppl_stderr, s.bytes, s.words, s.bits_per_byte,
                                     s.word_ppl, s.byte_ppl, s.nll_m2);
}

nb::list windows_of(nb::handle ids, std::string_view mode, nb::handle window, nb::handle stride) {
  const std::vector<int> all = row_of(ids, "ids");
  const Windows windows({.mode = window_mode(mode),
                         .window = integer_of<std::int64_t>(window, "window"),
                         .stride = integer_of<std::int64_t>(stride, "stride")},
                        all.size());
  nb::list result;
  for (std::size_t i = 0; i < windows.size(); ++i) {
    result.append(nb::make_tuple(array_of(windows.ids(i, all)), windows[i].scored));
  }
  return result;
}

}  // namespace

void bind_scorer(nb::module_& m) {
  nb::class_<PyScorer> type(m, "Scorer", nb::type_slots(collected<PyScorer>()), "See mmrec.Scorer.");
  type.def("__init__", init, nb::call_guard<Call>(), nb::arg("models"), nb::kw_only(), nb::arg("batch") = 0,
           nb::arg("whole_calls") = false, nb::arg("on_progress") = nb::none(), nb::arg("options"));
  type.def("score", score, nb::call_guard<Call>(), nb::arg("documents"),
           "Scores documents (an iterable of ids [T] each): a list of DocumentScore in their order.\n\n"
           "The first token of each is context only. Raises ValueError naming document and index for an id outside\n"
           "the vocabulary, before anything is scored; MemoryError, CudaError, and what on_progress raises.");
  type.def("_new_stream", [](PyScorer& self) { return ++self.calls->last; });
  type.def("_run_stream", run_stream, nb::call_guard<Call>(), nb::arg("documents"), nb::arg("on_scores"),
           nb::arg("call"));
  type.def("_stop_stream", [](PyScorer& self, std::uint64_t call) { self.calls->stopped = call; });
  type.def_prop_ro(
      "prefill_stats",
      [](PyScorer& self) {
        const Busy busy(self.busy, kInUse);
        return python_stats(self.scorer.prefill_stats());
      },
      "What prefilling has cost so far: a PrefillStats.");
  refuse_pickling(type, "a Scorer is not pickled: its model is, by path");

  nb::class_<PerplexityAccumulator> accumulator(
      m, "PerplexityAccumulator",
      "Adds documents up, in order, to the measures of a corpus as lm-evaluation-harness defines them.");
  accumulator.def(nb::init<>());
  accumulator.def("add", add, nb::arg("score"), nb::arg("bytes"), nb::arg("words"),
                  "Adds a DocumentScore of a document of so many UTF-8 bytes and words; 0 where nobody knows them.");
  accumulator.def(
      "add_sums",
      [](PerplexityAccumulator& self, nb::handle docs, nb::handle tokens, double nll, double nll_m2, nb::handle bytes,
         nb::handle words) {
        self.add({integer_of<std::int64_t>(tokens, "tokens"), nll, nll_m2}, integer_of<std::int64_t>(bytes, "bytes"),
                 integer_of<std::int64_t>(words, "words"), integer_of<std::int64_t>(docs, "docs"));
      },
      nb::arg("docs"), nb::arg("tokens"), nb::arg("nll"), nb::arg("nll_m2"), nb::arg("bytes"), nb::arg("words"),
      "Adds the documents of another accumulator, from the fields of its summary().");
  accumulator.def("summary", summary, "A PerplexitySummary; measures without a denominator are NaN.");
  refuse_pickling(accumulator, "a PerplexityAccumulator is not pickled");
  m.def("windows", windows_of, nb::arg("ids"), nb::arg("mode") = "full", nb::arg("window") = 0, nb::arg("stride") = 0,
        "A list of (ids [N], how many of the last are scored) of each window of a document [T], as `mmrec-ppl --mode`\n"
        "cuts it. Raises ValueError for numbers out of range, and for a document that is too short for \"llama\".");
  m.def(
      "score_pair",
      [](nb::object logprobs, nb::handle vocab_size) {
        const PairScore score =
            score_pair(logprobs_of(std::move(logprobs)), integer_of<std::int64_t>(vocab_size, "vocab_size"));
        return nb::make_tuple(score.loglikelihood, nb::cast(score.is_greedy));
      },
      nb::arg("logprobs"), nb::arg("vocab_size"),
      "(log-likelihood, whether each token is the likeliest) of a continuation's log-probs [T]; None where these\n"
      "do not tell. Raises NumericError.");
  m.def(
      "count_words", [](nb::handle text) { return count_words(text_of(text, "text")); }, nb::arg("text"),
      "len(re.split(r'\\s+', text)).");
}

}  // namespace mmrec::python
