// mmrec.Scorer and the measures of a corpus.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <cstring>

#include "engine/python/src/binding.h"

namespace mmrec::python {
namespace {

/// Calls by number, from 1, so that a reader who goes away ends its own, which may not have begun.
struct Calls {
  std::atomic<std::uint64_t> last = 0;     // that has a number
  std::atomic<std::uint64_t> current = 0;  // that is under way
  std::atomic<std::uint64_t> stopped = 0;  // the last that was to end early
};

struct PyScorer {
  Scorer scorer;
  std::atomic<bool> busy = false;
  std::shared_ptr<Calls> calls;

  PyScorer(std::vector<Model> models, ScorerOptions options, std::shared_ptr<Calls> shared)
      : scorer(std::move(models), std::move(options)), calls(std::move(shared)) {}
};

constexpr const char* kInUse = "this scorer";

void init(PyScorer* self, nb::handle models, int batch, bool whole_calls, const nb::object& on_progress,
          nb::kwargs options) {
  ScorerOptions given;
  given.batch = batch;
  given.whole_calls = whole_calls;
  given.session = take_session_options(options);
  expect_no_more(options, "Scorer");
  const auto callable = on_progress.is_none() ? nullptr : kept(on_progress);
  const auto calls = std::make_shared<Calls>();
  given.on_progress = [callable, calls, watch = SignalWatch()](std::int64_t tokens, double nll) mutable {
    watch.check();
    if (calls->stopped == calls->current) return false;
    if (!callable) return true;
    const nb::gil_scoped_acquire gil;
    return goes_on((*callable)(tokens, nll));
  };
  new (self) PyScorer(models_of(models), std::move(given), calls);
}

nb::object python_score(DocumentScore score) {
  const std::size_t count = score.logprobs.size();
  return nb::module_::import_("mmrec._results")
      .attr("DocumentScore")(array_of(std::move(score.logprobs), {count}), score.nll, score.complete);
}

nb::list score(PyScorer& self, nb::handle documents) {
  const Busy busy(self.busy, kInUse);
  self.calls->current = ++self.calls->last;
  std::vector<std::vector<int>> ids;
  for (const nb::handle document : nb::iter(documents)) {
    ids.push_back(row_of(document, ("document " + std::to_string(ids.size())).c_str()));
  }
  std::vector<DocumentScore> scores;
  {
    const nb::gil_scoped_release release;
    scores = self.scorer.score(ids);
  }
  nb::list result;
  for (DocumentScore& one : scores) result.append(python_score(std::move(one)));
  return result;
}

/// Documents from an iterator as they are wanted, scores to `on_score` in their order.
bool run_stream(PyScorer& self, nb::handle documents, const nb::callable& on_score, std::uint64_t call) {
  const Busy busy(self.busy, kInUse);
  self.calls->current = call;
  if (self.calls->stopped == call) return false;
  const nb::iterator all = nb::iter(documents);
  std::size_t number = 0;
  const auto next = [&](std::vector<int>& ids) {
    const nb::gil_scoped_acquire gil;
    const nb::object document = nb::steal(PyIter_Next(all.ptr()));
    if (!document.is_valid()) {
      if (PyErr_Occurred() != nullptr) nb::raise_python_error();
      return false;
    }
    ids = row_of(document, ("document " + std::to_string(number++)).c_str());
    return true;
  };
  const auto take = [&](std::size_t, std::vector<int>&, DocumentScore& one) {
    const nb::gil_scoped_acquire gil;
    return goes_on(on_score(python_score(std::move(one))));
  };
  const nb::gil_scoped_release release;
  return self.scorer.score_stream(next, take);
}

/// What corpus measures need of a DocumentScore of Python's.
DocumentSums sums(nb::handle score) {
  DocumentScore result;
  nb::object logprobs = nb::module_::import_("numpy").attr("asarray")(score.attr("logprobs"), "float32");
  const nb::bytes bytes = nb::borrow<nb::bytes>(logprobs.attr("tobytes")());
  result.logprobs.resize(bytes.size() / sizeof(float));
  std::memcpy(result.logprobs.data(), bytes.c_str(), result.logprobs.size() * sizeof(float));
  result.nll = nb::cast<double>(score.attr("nll"));
  return sums_of(result);
}

nb::object summary(const PerplexityAccumulator& self) {
  const PerplexitySummary s = self.summary();
  return nb::module_::import_("mmrec._results")
      .attr("PerplexitySummary")(s.docs, s.tokens, s.nll, s.ppl, s.ppl_stderr, s.bytes, s.words, s.bits_per_byte,
                                 s.word_ppl, s.byte_ppl);
}

}  // namespace

void bind_scorer(nb::module_& m) {
  nb::class_<PyScorer> type(m, "Scorer", "See mmrec.Scorer.");
  type.def("__init__", init, nb::arg("models"), nb::kw_only(), nb::arg("batch") = 0, nb::arg("whole_calls") = false,
           nb::arg("on_progress") = nb::none(), nb::arg("options"));
  type.def("score", score, nb::arg("documents"),
           "Scores documents (an iterable of ids [T] each): a list of DocumentScore in their order.\n\n"
           "The first token of each is context only. Raises ValueError naming document and index for an id outside\n"
           "the vocabulary, before anything is scored; MemoryError, CudaError, and what on_progress raises.");
  type.def("_new_stream", [](PyScorer& self) { return ++self.calls->last; });
  type.def("_run_stream", run_stream, nb::arg("documents"), nb::arg("on_score"), nb::arg("call"));
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
  accumulator.def(
      "add",
      [](PerplexityAccumulator& self, nb::handle one, std::int64_t bytes, std::int64_t words) {
        self.add(sums(one), bytes, words);
      },
      nb::arg("score"), nb::arg("bytes"), nb::arg("words"),
      "Adds a DocumentScore of a document of so many UTF-8 bytes and words; 0 where nobody knows them.");
  accumulator.def("summary", summary, "A PerplexitySummary; measures without a denominator are NaN.");
  refuse_pickling(accumulator, "a PerplexityAccumulator is not pickled");
  m.def(
      "count_words", [](nb::handle text) { return count_words(text_of(text, "text")); }, nb::arg("text"),
      "len(re.split(r'\\s+', text)).");
}

}  // namespace mmrec::python
