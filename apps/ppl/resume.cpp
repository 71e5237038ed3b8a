#include "apps/ppl/resume.h"

#include <fmt/format.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <utility>

#include "apps/common/cli.h"
#include "apps/common/input.h"
#include "apps/common/model_folder.h"
#include "apps/ppl/report.h"

namespace mmrec::apps {

ResumeFilter::ResumeFilter(const std::optional<std::string>& file, const RunIdentity& identity,
                           PerplexityAccumulator& sums, Output& out)
    : file_(file.value_or("")), sums_(sums) {
  if (!file) return;
  out.keep(0);
  if (!std::filesystem::exists(file_)) return;
  if (!input_size(file_)) throw RejectedFile(fmt::format("{}: --resume: not a regular file", file_));
  LineReader lines(file_);
  for (;;) {
    const std::uint64_t begin = lines.bytes();
    const auto line = lines.next();
    if (!line) return;
    const std::string where = fmt::format("{}:{}", file_, lines.lines());
    std::string text(*line);
    const bool has_end = lines.bytes() > begin + text.size();
    if (!has_end) {
      // A run that was killed leaves a record that lacks its end, or more. The device is the last member.
      const auto object = nlohmann::json::parse(text + "}", nullptr, false);
      if (!object.is_object() || !object.contains("device")) {
        tail_ = std::move(text);
        return;
      }
      text += "}";
    }
    DocumentRecord record = parse_record(text, where);
    check_comparable(record.identity, identity, where);
    record.identity = nullptr;
    const std::string_view ending = record.is_last ? kLastEnding : kEnding;
    if (!text.ends_with(ending)) {
      throw RejectedFile(fmt::format("{}: not as mmrec-ppl writes it (expected {} at the end)", where, ending));
    }
    out.keep(begin + text.size() - ending.size());
    records_.push_back(std::move(record));
  }
}

std::optional<std::int64_t> ResumeFilter::unended() const {
  return records_.empty() ? std::nullopt : std::optional(records_.back().index);
}

bool ResumeFilter::is_left(const Document& document) {
  if (next_ == records_.size()) {
    // A killed run may have left the beginning of this record, and nothing else.
    const std::string head = record_head(document);
    if (!tail_.starts_with(head) && !head.starts_with(tail_)) refuse_tail(head);
    tail_.clear();
    return true;
  }
  const DocumentRecord& record = records_[next_++];
  // As a record has the name: bytes that are not UTF-8 were replaced.
  const auto id = [](std::int64_t index, const std::string& name, std::string_view hash) {
    return fmt::format("document {} {}, hash {}", index, printable(dump(name)), hash);
  };
  const std::string found = id(record.index, record.name, record.hash);
  const std::string expected = id(document.index, document.name, hex(document.hash));
  if (found != expected) {
    throw RejectedFile(fmt::format("{}:{}: --resume: a record of another document (found {}, expected {})", file_,
                                   next_, found, expected));
  }
  if (!sums_.add(record)) ++empty_;
  return false;
}

void ResumeFilter::finish() {
  if (next_ < records_.size()) {
    throw RejectedFile(fmt::format("{}: --resume: more records than documents (found {}, expected {})", file_,
                                   records_.size(), next_));
  }
  if (!tail_.empty()) refuse_tail("the end of the file");
}

void ResumeFilter::refuse_tail(std::string_view expected) const {
  throw RejectedFile(fmt::format("{}:{}: --resume: not the beginning of this run's next record (found {}, expected {})",
                                 file_, next_ + 1, printable(tail_.substr(0, 80)), printable(expected)));
}

}  // namespace mmrec::apps
