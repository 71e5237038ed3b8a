#include "apps/ppl/compare.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <optional>

#include "apps/common/cli.h"
#include "apps/ppl/corpus.h"
#include "apps/ppl/report.h"

namespace mmrec::apps {

void Comparison::add(const ScoredDocument& scored) {
  scored.for_each_token([&](std::size_t position, int id, float logprob) {
    const auto line = lines_.next();
    const std::string where = fmt::format("{}:{}", input_name(file_), lines_.lines());
    const std::string expected = fmt::format("document {}, position {}, id {}", scored.document.index, position, id);
    if (!line) throw RejectedFile(fmt::format("{}: too few tokens (found the end, expected {})", where, expected));
    const nlohmann::ordered_json saved = parse_object(*line, where);
    const auto field = [&](const char* key) -> const nlohmann::ordered_json& {
      const auto found = saved.find(key);
      if (found == saved.end() || !found->is_number()) {
        throw RejectedFile(fmt::format("{}: no number '{}' (found {}, expected a line of mmrec-ppl --per-token)", where,
                                       key, printable(line->substr(0, 60))));
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
    const double difference = static_cast<double>(logprob) - static_cast<double>(static_cast<float>(other));
    ++tokens_;
    sum_ += difference;
    absolute_ += std::abs(difference);
    most_ = std::max(most_, std::abs(difference));
  });
}

nlohmann::ordered_json Comparison::finish() {
  if (lines_.next()) {
    throw RejectedFile(fmt::format("{}:{}: too many tokens (found more than {}, which is all)", input_name(file_),
                                   lines_.lines(), tokens_));
  }
  const double count = tokens_ > 0 ? static_cast<double>(tokens_) : std::numeric_limits<double>::quiet_NaN();
  return {{"diff_tokens", tokens_},
          {"diff_mean", real_or_null(absolute_ / count)},
          {"diff_max", real_or_null(tokens_ > 0 ? most_ : count)},
          {"diff_bias", real_or_null(sum_ / count)}};
}

}  // namespace mmrec::apps
