// --save-logprobs and --compare: log-probs beside those that were saved before, token by token. docs/file-formats.md
// has the file of distributions.
//
// Must stay true: memory is that of two distributions and a number for each token. A file that is not of this corpus,
// vocabulary and tokenizer is refused where that shows (RejectedFile naming the place, found and expected).
#include "apps/ppl/sinks.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <span>
#include <utility>
#include <vector>

#include "apps/common/cli.h"
#include "apps/common/input.h"
#include "apps/ppl/report.h"
#include "mmrec/errors.h"
#include "mmrec/session.h"

namespace mmrec::apps {
namespace {

using Json = nlohmann::ordered_json;

static_assert(std::endian::native == std::endian::little, "the file's numbers are little-endian");

constexpr std::array<char, 8> kMagic = {'M', 'M', 'R', 'E', 'C', 'L', 'P', 'D'};
constexpr std::uint32_t kVersion = 1;
constexpr std::int64_t kEnd = -1;  // the document of the last record, whose position is the number of those before it

struct Header {
  std::array<char, 8> magic = kMagic;
  std::uint32_t version = kVersion;
  std::uint32_t vocab_size = 0;
  std::uint64_t model = 0;
  std::uint64_t tokenizer = 0;
};
static_assert(sizeof(Header) == 32);

struct Record {
  std::int64_t document = 0;
  std::uint64_t position = 0;
  std::int64_t id = 0;
};
static_assert(sizeof(Record) == 24);

template <class T>
std::string_view bytes_of(const T& object) {
  return {reinterpret_cast<const char*>(&object), sizeof(T)};
}

std::string name_of(const Record& record) {
  return record.document == kEnd
             ? "the end"
             : fmt::format("document {}, position {}, id {}", record.document, record.position, record.id);
}

std::size_t top_of(std::span<const float> logprobs) {
  return static_cast<std::size_t>(std::max_element(logprobs.begin(), logprobs.end()) - logprobs.begin());
}

/// Of this run's log-probs from those saved.
class Differences {
 public:
  void add(float found, float saved) {
    const double difference = static_cast<double>(found) - static_cast<double>(saved);
    ++tokens_;
    sum_ += difference;
    absolute_ += std::abs(difference);
    most_ = std::max(most_, std::abs(difference));
  }
  std::int64_t tokens() const { return tokens_; }
  /// Mean and maximum of absolute values, and the mean. Null without tokens.
  Json json() const {
    const double count = tokens_ > 0 ? static_cast<double>(tokens_) : std::numeric_limits<double>::quiet_NaN();
    return {{"diff_tokens", tokens_},
            {"diff_mean", real_or_null(absolute_ / count)},
            {"diff_max", real_or_null(tokens_ > 0 ? most_ : count)},
            {"diff_bias", real_or_null(sum_ / count)}};
  }

 private:
  std::int64_t tokens_ = 0;
  double sum_ = 0.0, absolute_ = 0.0, most_ = 0.0;
};

/// Reads lines of --per-token as documents come, so that neither has to fit in memory.
class TokenComparison : public DocumentSink {
 public:
  explicit TokenComparison(std::unique_ptr<LineReader> saved) : lines_(std::move(saved)) {}

  void add(const ScoredDocument& scored) override {
    scored.for_each_token([&](std::size_t position, int id, float logprob) {
      const auto line = lines_->next();
      if (interrupt_exit_code() != 0) return;
      const std::string where = lines_->place();
      const std::string expected = fmt::format("document {}, position {}, id {}", scored.document.index, position, id);
      if (!line) throw RejectedFile(fmt::format("{}: too few tokens (found the end, expected {})", where, expected));
      const nlohmann::ordered_json saved = parse_object(*line, where);
      const auto field = [&](const char* key) -> const nlohmann::ordered_json& {
        const auto found = saved.find(key);
        if (found == saved.end() || !found->is_number()) {
          throw RejectedFile(fmt::format("{}: no number '{}' (found {}, expected a line of mmrec-ppl --per-token)",
                                         where, key, printable(line->substr(0, 60))));
        }
        return *found;
      };
      const bool is_same = field("doc") == scored.document.index && field("pos") == position && field("id") == id;
      if (!is_same) {
        throw RejectedFile(fmt::format("{}: another token (found document {}, position {}, id {}, expected {})", where,
                                       dump(saved["doc"]), dump(saved["pos"]), dump(saved["id"]), expected));
      }
      const auto other = field("logprob").get<double>();
      if (!(std::abs(other) <= static_cast<double>(std::numeric_limits<float>::max()))) {
        throw RejectedFile(fmt::format("{}: field 'logprob' (found {}, expected a float)", where, other));
      }
      // As floats: what was saved gives the float back, so that equal ones differ by nothing.
      differences_.add(logprob, static_cast<float>(other));
    });
  }
  Json differences() override {
    if (!lines_->next()) return differences_.json();
    throw RejectedFile(
        fmt::format("{}: too many tokens (found more than {}, which is all)", lines_->place(), differences_.tokens()));
  }

 private:
  std::unique_ptr<LineReader> lines_;
  Differences differences_;
};

/// The distributions of a file, and how far this run's are from them.
class SavedDistributions {
 public:
  SavedDistributions(std::unique_ptr<LineReader> saved, std::int64_t vocab_size, std::uint64_t tokenizer)
      : in_(std::move(saved)), saved_(static_cast<std::size_t>(vocab_size)) {
    Header header;
    read(&header, sizeof header, "a header");
    if (header.version != kVersion) refuse(fmt::format("version {}", header.version), std::to_string(kVersion));
    if (header.vocab_size != vocab_size) {
      refuse(fmt::format("a vocabulary of {}", header.vocab_size), fmt::format("{}, as the model has", vocab_size));
    }
    if (header.tokenizer != tokenizer) {
      refuse(fmt::format("tokens of another tokenizer, {:016x}", header.tokenizer), fmt::format("{:016x}", tokenizer));
    }
  }

  void add(std::int64_t document, std::size_t position, int id, std::span<const float> logprobs) {
    const Record expected{document, position, id};
    Record record;
    if (!read(&record, sizeof record, name_of(expected))) return;
    if (record.document != document || record.position != position || record.id != id) {
      refuse(name_of(record), name_of(expected));
    }
    if (!read(saved_.data(), saved_.size() * sizeof(float), "a distribution")) return;
    double divergence = 0.0;
    double whole = 0.0;
    for (std::size_t v = 0; v < saved_.size(); ++v) {
      const auto p = static_cast<double>(saved_[v]);
      const double weight = std::exp(p);
      whole += weight;
      if (weight > 0.0) divergence += weight * (p - static_cast<double>(logprobs[v]));
    }
    if (!(std::abs(whole - 1.0) < 1e-3)) {
      refuse(fmt::format("probabilities that add up to {} at {}", whole, name_of(record)), "1");
    }
    divergences_.push_back(static_cast<float>(divergence));
    same_top_ += top_of(saved_) == top_of(logprobs) ? 1 : 0;
    const auto at = static_cast<std::size_t>(id);
    if (!std::isfinite(logprobs[at] - saved_[at])) {
      refuse(fmt::format("{} at {}", saved_[at], name_of(record)), "a finite log-prob");
    }
    differences_.add(logprobs[at], saved_[at]);
  }

  Json finish() {
    Record last;
    read(&last, sizeof last, "the end");
    if (last.document != kEnd || last.position != divergences_.size()) {
      refuse(name_of(last), fmt::format("the end after {} tokens", divergences_.size()));
    }
    if (!in_->read(1).empty()) refuse("more bytes", "nothing behind the end");
    const std::size_t count = divergences_.size();
    const double n = count > 0 ? static_cast<double>(count) : std::numeric_limits<double>::quiet_NaN();
    double sum = 0.0;
    for (const float one : divergences_) sum += static_cast<double>(one);
    double squares = 0.0;
    for (const float one : divergences_) squares += std::pow(static_cast<double>(one) - sum / n, 2.0);
    std::sort(divergences_.begin(), divergences_.end());
    // The smallest that `share` of all do not exceed.
    const auto quantile = [&](double share) {
      if (count == 0) return n;
      const auto at = static_cast<std::size_t>(std::ceil(share * n));
      return static_cast<double>(divergences_[std::clamp<std::size_t>(at, 1, count) - 1]);
    };
    Json json = differences_.json();
    json.update({{"kl_mean", real_or_null(sum / n)},
                 {"kl_stderr", real_or_null(std::sqrt(squares / (n - 1.0) / n))},
                 {"kl_median", real_or_null(quantile(0.5))},
                 {"kl_p99", real_or_null(quantile(0.99))},
                 {"kl_max", real_or_null(quantile(1.0))},
                 {"same_top", real_or_null(static_cast<double>(same_top_) / n)}});
    return json;
  }

 private:
  /// False after an interrupt.
  bool read(void* to, std::size_t size, const std::string& what) {
    const std::string_view bytes = in_->read(size);
    if (interrupt_exit_code() != 0) return false;
    if (bytes.size() != size) refuse("the end of the file", what);
    std::memcpy(to, bytes.data(), size);
    return true;
  }

  [[noreturn]] void refuse(const std::string& found, const std::string& expected) const {
    throw RejectedFile(
        fmt::format("{}: not distributions to compare with (found {}, expected {})", in_->name(), found, expected));
  }

  std::unique_ptr<LineReader> in_;
  std::vector<float> saved_;
  std::vector<float> divergences_;
  std::int64_t same_top_ = 0;
  Differences differences_;
};

/// A document once more, token by token, for the distributions that scores leave out.
class DistributionSink : public DocumentSink {
 public:
  DistributionSink(const Model& model, const SessionOptions& options, Output* out, std::unique_ptr<LineReader> compare,
                   std::uint64_t tokenizer)
      : session_(model.new_session(1, options)), out_(out) {
    const ModelInfo& info = model.info();
    if (compare) saved_.emplace(std::move(compare), info.vocab_size, tokenizer);
    if (out_ == nullptr) return;
    const Header header{
        .vocab_size = static_cast<std::uint32_t>(info.vocab_size), .model = info.fingerprint, .tokenizer = tokenizer};
    out_->write(bytes_of(header));
  }

  void add(const ScoredDocument& scored) override {
    session_.reset();
    std::size_t consumed = 0;
    scored.for_each_token([&](std::size_t position, int id, float) {
      if (interrupt_exit_code() != 0) return;
      for (; consumed < position; ++consumed) session_.step({&scored.document.ids[consumed], 1});
      const std::span<const float> logprobs = log_softmax();
      if (saved_) saved_->add(scored.document.index, position, id, logprobs);
      if (out_ == nullptr) return;
      out_->write(bytes_of(Record{scored.document.index, position, id}));
      out_->write({reinterpret_cast<const char*>(logprobs.data()), logprobs.size_bytes()});
      ++count_;
    });
  }
  Json differences() override { return saved_ ? saved_->finish() : Json(nullptr); }
  void finish(const Json& /*summary*/) override {
    if (out_ == nullptr) return;
    out_->write(bytes_of(Record{.document = kEnd, .position = count_}));
    out_->commit();
  }

 private:
  std::span<const float> log_softmax() {
    const std::span<const float> logits = session_.logits();
    const auto most = static_cast<double>(*std::max_element(logits.begin(), logits.end()));
    double sum = 0.0;
    for (const float logit : logits) sum += std::exp(static_cast<double>(logit) - most);
    const double shift = most + std::log(sum);
    if (!std::isfinite(shift)) throw NumericError(fmt::format("logits are not finite (found {})", shift));
    logprobs_.resize(logits.size());
    std::transform(logits.begin(), logits.end(), logprobs_.begin(),
                   [&](float logit) { return static_cast<float>(static_cast<double>(logit) - shift); });
    return logprobs_;
  }

  Session session_;
  std::vector<float> logprobs_;
  Output* out_;
  std::uint64_t count_ = 0;
  std::optional<SavedDistributions> saved_;
};

}  // namespace

bool is_distributions(LineReader& saved) { return saved.begins_with({kMagic.data(), kMagic.size()}); }

std::unique_ptr<DocumentSink> token_comparison(std::unique_ptr<LineReader> saved) {
  return std::make_unique<TokenComparison>(std::move(saved));
}

std::unique_ptr<DocumentSink> distributions(const Model& model, const SessionOptions& options, Output* save,
                                            std::unique_ptr<LineReader> compare, std::uint64_t tokenizer) {
  return std::make_unique<DistributionSink>(model, options, save, std::move(compare), tokenizer);
}

}  // namespace mmrec::apps
