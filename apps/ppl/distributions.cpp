#include "apps/ppl/distributions.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <limits>
#include <new>
#include <string_view>
#include <system_error>

#include "apps/common/cli.h"
#include "apps/ppl/report.h"
#include "mmrec/errors.h"

namespace mmrec::apps {
namespace {

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

}  // namespace

std::span<const float> Distributions::log_softmax() {
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

DistributionWriter::DistributionWriter(Output& out, const DistributionSource& source) : out_(out) {
  const Header header{.vocab_size = static_cast<std::uint32_t>(source.vocab_size),
                      .model = source.model,
                      .tokenizer = source.tokenizer};
  out_.write(bytes_of(header));
}

void DistributionWriter::add(std::int64_t document, std::size_t position, int id, std::span<const float> logprobs) {
  out_.write(bytes_of(Record{document, position, id}));
  out_.write({reinterpret_cast<const char*>(logprobs.data()), logprobs.size_bytes()});
  ++count_;
}

void DistributionWriter::commit() {
  out_.write(bytes_of(Record{.document = kEnd, .position = count_}));
  out_.commit();
}

bool DistributionComparison::is_one(const std::string& path) {
  std::array<char, kMagic.size()> first{};
  std::ifstream in(path, std::ios::binary);
  return in.read(first.data(), first.size()) && first == kMagic;
}

DistributionComparison::DistributionComparison(std::string path, const DistributionSource& source)
    : path_(std::move(path)), in_(path_, std::ios::binary), saved_(static_cast<std::size_t>(source.vocab_size)) {
  if (!in_ && errno == ENOMEM) throw std::bad_alloc();
  if (!in_) throw RejectedFile(fmt::format("{}: cannot open: {}", path_, std::generic_category().message(errno)));
  Header header;
  read(&header, sizeof header, "a header");
  if (header.version != kVersion) refuse(fmt::format("version {}", header.version), std::to_string(kVersion));
  if (header.vocab_size != source.vocab_size) {
    refuse(fmt::format("a vocabulary of {}", header.vocab_size),
           fmt::format("{}, as the model has", source.vocab_size));
  }
  if (header.tokenizer != source.tokenizer) {
    refuse(fmt::format("tokens of another tokenizer, {:016x}", header.tokenizer),
           fmt::format("{:016x}", source.tokenizer));
  }
}

void DistributionComparison::read(void* to, std::size_t bytes, const char* what) {
  in_.read(static_cast<char*>(to), static_cast<std::streamsize>(bytes));
  if (in_.gcount() != static_cast<std::streamsize>(bytes)) refuse("the end of the file", what);
}

void DistributionComparison::refuse(const std::string& found, const std::string& expected) const {
  throw RejectedFile(
      fmt::format("{}: not distributions to compare with (found {}, expected {})", path_, found, expected));
}

void DistributionComparison::add(std::int64_t document, std::size_t position, int id, std::span<const float> logprobs) {
  const Record expected{document, position, id};
  Record record;
  read(&record, sizeof record, name_of(expected).c_str());
  if (record.document != document || record.position != position || record.id != id) {
    refuse(name_of(record), name_of(expected));
  }
  read(saved_.data(), saved_.size() * sizeof(float), "a distribution");
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
  const double difference = static_cast<double>(logprobs[at]) - static_cast<double>(saved_[at]);
  if (!std::isfinite(difference)) refuse(fmt::format("{} at {}", saved_[at], name_of(record)), "a finite log-prob");
  sum_ += difference;
  absolute_ += std::abs(difference);
  most_ = std::max(most_, std::abs(difference));
}

nlohmann::ordered_json DistributionComparison::finish() {
  Record last;
  read(&last, sizeof last, "the end");
  if (last.document != kEnd || last.position != divergences_.size()) {
    refuse(name_of(last), fmt::format("the end after {} tokens", divergences_.size()));
  }
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
  return {{"diff_tokens", count},
          {"diff_mean", real_or_null(absolute_ / n)},
          {"diff_max", real_or_null(count > 0 ? most_ : n)},
          {"diff_bias", real_or_null(sum_ / n)},
          {"kl_mean", real_or_null(sum / n)},
          {"kl_stderr", real_or_null(std::sqrt(squares / (n - 1.0) / n))},
          {"kl_median", real_or_null(quantile(0.5))},
          {"kl_p99", real_or_null(quantile(0.99))},
          {"kl_max", real_or_null(quantile(1.0))},
          {"same_top", real_or_null(static_cast<double>(same_top_) / n)}};
}

}  // namespace mmrec::apps
