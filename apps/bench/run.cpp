#include "apps/bench/run.h"

#include <fstream>
#include <iterator>
#include <optional>
#include <set>
#include <span>
#include <system_error>

#include "apps/bench/serve.h"
#include "apps/common/cli.h"
#include "apps/common/stopwatch.h"
#include "mmrec/scorer.h"
#include "models/files/file.h"
#include "models/runtime/cuda_device.h"

namespace mmrec::apps {
namespace {

void read_into_page_cache(const std::filesystem::path& folder) {
  std::vector<char> block(std::size_t{1} << 20);
  std::error_code none;
  for (const std::string& name : models::names_in(folder)) {
    if (!std::filesystem::is_regular_file(folder / name, none)) continue;
    std::ifstream file(folder / name, std::ios::binary);
    while (file.read(block.data(), std::ssize(block))) {
    }
  }
}

bool contains(const std::vector<std::int64_t>& values, std::int64_t value) {
  return std::find(values.begin(), values.end(), value) != values.end();
}

class Bench {
 public:
  /// `free_before`: GPU bytes that were free before the model came.
  Bench(const BenchPlan& plan, const Model& model, std::uint64_t free_before, BenchRun& run)
      : plan_(plan), model_(model), free_before_(free_before), run_(run) {}

  /// All rows of one batch size.
  void measure(std::int64_t batch) {
    if (contains(plan_.batches, batch)) {
      for (const std::int64_t length : plan_.lengths) {
        Session session = new_session(batch);
        prefill(session, length);
        if (length == plan_.lengths.back() && contains(plan_.decode_batches, batch)) decode(session);
      }
    } else if (contains(plan_.decode_batches, batch)) {
      Session session = new_session(batch);
      session.prefill(some_tokens(batch * std::min(kPrompt, plan_.lengths.front()), run_.info.vocab_size));
      decode(session);
    }
  }

  /// As many tokens in one document and in many.
  void score() {
    constexpr std::int64_t kMean = (kLeastDocument + kMostDocument) / 2;
    const std::int64_t total = plan_.documents * kMean;
    const std::vector<int> tokens = some_tokens(total, run_.info.vocab_size);
    std::vector<std::vector<int>> documents;
    for (std::int64_t first = 0, i = 0; i < plan_.documents; ++i) {
      // Pairs of documents that are as much longer as shorter than the mean.
      const std::int64_t off = i / 2 * 7 % (kMostDocument - kMean + 1);
      const bool alone = i % 2 == 0 && i + 1 == plan_.documents;
      const std::int64_t length = alone ? kMean : i % 2 == 0 ? kMean + off : kMean - off;
      documents.emplace_back(tokens.begin() + first, tokens.begin() + first + length);
      first += length;
    }
    score({tokens}, total);
    score(documents, kMean);
  }

  /// Requests once, after as many short ones as there are slots, by which steps are recorded; sequences in lock-step,
  /// after prompts of the requests' mean length, before and after.
  void serve() {
    const auto slots = static_cast<int>(plan_.slots);
    const std::int64_t vocab = run_.info.vocab_size;
    const Tokenizer tokenizer = Tokenizer::from_bytes(made_up_pieces(vocab), {}, "a made-up tokenizer");
    const std::vector<ServedRequest> requests = some_requests(plan_.requests, plan_.most_drawn, vocab);
    BenchRow served{Phase::kServe, plan_.requests, mean_drawn(plan_.most_drawn), slots};
    BenchRow before = lockstep(slots, served.tokens, mean_prompt(requests));
    std::vector<ServedRequest> warm_up(requests.begin(),
                                       requests.begin() + std::min<std::ptrdiff_t>(slots, std::ssize(requests)));
    for (ServedRequest& request : warm_up) request.drawn = kLeastDrawn;
    serve_seconds(model_, tokenizer, run_.options.session, slots, warm_up);
    served.seconds = serve_seconds(model_, tokenizer, run_.options.session, slots, requests);
    const BenchRow after = lockstep(slots, served.tokens, mean_prompt(requests));
    before.seconds = std::min(before.seconds, after.seconds);
    before.prefill_seconds = std::min(before.prefill_seconds, after.prefill_seconds);
    add(before);
    add(served);
  }

  /// What mmrec-generate did, and sequences in lock-step, of which the best number counts.
  void offline(const OfflineRun& done) {
    const std::vector<std::int64_t> batches =
        run_.on_gpu() ? std::vector<std::int64_t>{64, 256, 1024} : std::vector<std::int64_t>{1, 4, 16, 64};
    for (const std::int64_t batch : batches) {
      if (batch == batches.front() || batch <= plan_.offline.prompts)
        add(lockstep(batch, plan_.decode, done.mean_prompt));
    }
    BenchRow row{Phase::kOffline, plan_.offline.prompts, plan_.decode};
    row.seconds = done.seconds;
    row.load_seconds = done.load_seconds;
    row.drawn = done.drawn;
    add(row);
  }

 private:
  static constexpr std::int64_t kPrompt = 64;  // before decoding, where no prefill of this batch is asked for

  Session new_session(std::int64_t batch) const {
    return model_.new_session(static_cast<int>(batch), run_.options.session);
  }

  /// Of the plan's repetitions the best; on a GPU, which runs nothing else, the median after a run that loads kernels
  /// and records graphs.
  template <class Body>
  double repeated(Body&& body) const {
    std::vector<double> seconds;
    for (std::int64_t i = run_.on_gpu() ? -1 : 0; i < plan_.repeat; ++i) {
      const double s = body();
      if (i >= 0) seconds.push_back(s);
      check_interrupt();
    }
    std::sort(seconds.begin(), seconds.end());
    return run_.on_gpu() ? seconds[seconds.size() / 2] : seconds.front();
  }

  /// `batch` sequences that draw `tokens` tokens each after prompts of `prompt` tokens.
  BenchRow lockstep(std::int64_t batch, std::int64_t tokens, std::int64_t prompt) const {
    BenchRow row{Phase::kLockstep, batch, tokens};
    const std::vector<int> prompts = some_tokens(batch * prompt, run_.info.vocab_size);
    Session session = new_session(batch);
    std::vector<double> prefills;
    row.seconds = repeated([&] {
      prefills.push_back(prefill_seconds(session, prompts));
      return lock_step_seconds(session, tokens);
    });
    row.prefill_seconds = *std::min_element(prefills.begin(), prefills.end());
    row.bytes = static_cast<double>(decoded_bytes(run_.info, prompt, tokens));
    return row;
  }

  void add(BenchRow row) {
    // Everything is allocated when a session is made and when a step runs first: what is in use now is the most.
    if (run_.on_gpu()) {
      const std::uint64_t free = models::cuda_device_info(run_.info.gpu).free_bytes;
      row.device_memory = free_before_ > free ? free_before_ - free : 0;
    }
    row.host_memory = std::max(peak_memory_bytes(), run_.rows.empty() ? 0 : run_.rows.back().host_memory);
    run_.rows.push_back(row);
  }

  static double prefill_seconds(Session& session, const std::vector<int>& prompts) {
    session.reset();
    const Stopwatch watch;
    session.prefill(prompts);
    (void)session.logits();  // waits for them
    return watch.seconds();
  }

  void add_products(BenchRow& row, const PrefillStats& stats, double flops) {
    row.flops = flops;
    row.sweeps_per_token = stats.sweeps_per_token();
    row.fallbacks = stats.fallbacks;
    add(row);
  }

  void prefill(Session& session, std::int64_t length) {
    BenchRow row{Phase::kPrefill, session.batch(), length};
    const std::vector<int> prompt = some_tokens(row.batch * length, run_.info.vocab_size);
    row.seconds = repeated([&] { return prefill_seconds(session, prompt); });
    add_products(row, session.prefill_stats(),
                 prefill_flops(run_.products, row.batch, length, session.prefill_stats()));
  }

  void score(const std::vector<std::vector<int>>& documents, std::int64_t mean) {
    BenchRow row{Phase::kScore, std::ssize(documents), mean};
    PrefillStats stats;
    row.seconds = repeated([&] {
      Scorer scorer(model_, {.session = run_.options.session});
      const Stopwatch watch;
      scorer.score(documents);
      const double seconds = watch.seconds();
      stats = scorer.prefill_stats();
      return seconds;
    });
    const double head = 2.0 * static_cast<double>(run_.products.head);
    add_products(
        row, stats,
        prefill_flops(run_.products, 1, row.batch * mean, stats) + head * static_cast<double>(row.batch * mean - 1));
  }

  void decode(Session& session) {
    const std::int64_t batch = session.batch();
    const auto width = static_cast<std::size_t>(batch);
    const std::vector<int> given = some_tokens(batch * plan_.decode, run_.info.vocab_size);
    const auto measure = [&](Phase phase, auto step) {
      BenchRow row{phase, batch, plan_.decode};
      const std::int64_t first = session.position();
      row.seconds = repeated([&] {
        const Stopwatch watch;
        for (std::int64_t t = 0; t < plan_.decode; ++t) step(t);
        (void)session.logits();  // waits for the last
        return watch.seconds();
      });
      row.bytes = static_cast<double>(decoded_bytes(run_.info, first, plan_.decode));
      add(row);
    };
    measure(Phase::kDecode, [&](std::int64_t t) {
      session.step(std::span(given).subspan(static_cast<std::size_t>(t) * width, width));
    });
    std::vector<Sample> drawn(width);
    std::vector<int> next(width);
    SamplerOptions greedy;
    greedy.temperature = 0.0F;
    measure(Phase::kGenerate, [&](std::int64_t t) {
      session.draw(greedy, static_cast<std::uint64_t>(t), 0, drawn, /*logprobs=*/false);
      std::transform(drawn.begin(), drawn.end(), next.begin(), [](const Sample& sample) { return sample.token; });
      session.step(next);
    });
  }

  const BenchPlan& plan_;
  const Model& model_;
  std::uint64_t free_before_;
  BenchRun& run_;
};

}  // namespace

bool takes_gpu(const RunOptions& options) {
  return options.device == Device::kCuda ||
         (options.device == Device::kAuto && models::cuda_unusable_reason(options.gpu).empty());
}

void check_interrupt() {
  if (interrupt_exit_code() != 0) throw Interrupted{};
}

BenchRun run_bench(const std::filesystem::path& folder, const RunOptions& options, const BenchPlan& plan) {
  BenchRun run;
  run.options = options;
  run.folder = folder;
  read_folder(folder, options, [&] { run.products = models::product_counts(folder, options.variant); });
  const bool wants_gpu = takes_gpu(options);
  // The processors' peaks come from a child process here, which leaves this one's peak memory alone.
  if (!wants_gpu) run.peaks = measure_machine_apart();
  read_into_page_cache(folder);
  check_interrupt();

  // Before this process has a model: mmrec-generate finds the machine as its users do.
  std::optional<OfflineRun> offline;
  if (plan.offline.prompts > 0) {
    std::int64_t pieces = 0;
    read_folder(folder, options, [&] { pieces = Tokenizer::load(folder).vocab_size(); });
    offline = run_offline(folder, plan.offline, some_requests(plan.offline.prompts, kLeastDrawn, pieces), plan.decode);
  }

  std::uint64_t free_before = 0;
  if (wants_gpu && models::cuda_unusable_reason(options.gpu).empty()) {
    try {
      free_before = models::cuda_device_info(options.gpu).free_bytes;
    } catch (const std::system_error&) {  // loading says why, or takes the CPU
    }
  }
  const Stopwatch watch;
  const Model model = load_model(folder, options);
  run.load_seconds = watch.seconds();
  run.info = model.info();
  const bool gpu = run.on_gpu();
  if (gpu) {
    run.peaks = measure_device(run.info.precision, options.gpu);
  } else if (wants_gpu) {
    run.peaks = measure_machine_apart();
  }
  Bench bench(plan, model, free_before, run);

  std::set<std::int64_t> batches(plan.batches.begin(), plan.batches.end());
  batches.insert(plan.decode_batches.begin(), plan.decode_batches.end());
  for (const std::int64_t batch : batches) {  // the peak of one stream is read before larger batches raise it
    bench.measure(batch);
    if (batch == *batches.begin()) run.peak_memory = peak_memory_bytes();
  }
  if (plan.documents > 0) bench.score();
  if (plan.requests > 0) bench.serve();
  if (offline) bench.offline(*offline);
  if (gpu) {
    run.peaks = best_of(run.peaks, measure_device(run.info.precision, options.gpu));
  } else {
    run.peaks = best_of(run.peaks, measure_machine());
  }
  check_interrupt();
  return run;
}

}  // namespace mmrec::apps
