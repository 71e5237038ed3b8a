// Any line of token ids is refused by one line, or holds the numbers that nlohmann's JSON reads there; and what JSON
// says are ids of the vocabulary is never refused.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string_view>
#include <vector>

#include "apps/common/cli.h"
#include "apps/common/input.h"
#include "tests/fuzz/harness.h"

namespace {

constexpr std::int64_t kVocabSize = 1000;

bool are_ids(const nlohmann::json& json) {
  return json.is_array() && std::all_of(json.begin(), json.end(), [](const nlohmann::json& id) {
           return id.is_number_unsigned() && id.get<std::uint64_t>() < kVocabSize;
         });
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using mmrec::fuzz::require;
  const std::string_view line = mmrec::fuzz::text_of(data, size);
  if (line.find('\n') != std::string_view::npos) return 0;  // is two lines
  std::vector<int> ids;
  try {
    ids = mmrec::apps::parse_ids(line, "input:1", kVocabSize);
  } catch (const mmrec::apps::RejectedFile& error) {
    mmrec::fuzz::require_line(error.what());
    const bool has_mark = line.starts_with("\xef\xbb\xbf");
    if (line.find('\0') == std::string_view::npos && !has_mark) {
      require(!are_ids(nlohmann::json::parse(line, nullptr, false)));
    }
    return 0;
  }
  const nlohmann::json json = nlohmann::json::parse(line, nullptr, false);
  require(json.is_array() && json.get<std::vector<int>>() == ids);
  for (const int id : ids) require(id >= 0 && id < kVocabSize);
  return 0;
}
