// The programs under test, the folders they are run on, and what is expected of every refusal.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "tests/apps/process.h"

namespace mmrec::test {

using Json = nlohmann::json;
using Words = std::vector<std::string>;

inline const std::string kGenerate = MMREC_GENERATE;
inline const std::string kPpl = MMREC_PPL;
inline const std::string kBench = MMREC_BENCH;
inline const std::string kTiny = MMREC_FIXTURES "/tiny";
inline const std::string kUpstream = MMREC_FIXTURES "/upstream";

/// `first` and then `more`.
inline Words words(Words first, const Words& more) {
  first.insert(first.end(), more.begin(), more.end());
  return first;
}
/// `first`, on the CPU unless `more` names a device, and `more`: what the programs promise is the same on a machine
/// with a GPU.
inline Words with_device(const Words& first, const Words& more) {
  const bool named = std::find(more.begin(), more.end(), "--device") != more.end();
  return words(named ? first : words(first, {"--device", "cpu"}), more);
}
inline Words generate_on_tiny(const Words& more) { return with_device({kGenerate, "-m", kTiny}, more); }
inline Words ppl_on_tiny(const Words& more) { return with_device({kPpl, "-m", kTiny}, more); }

inline std::string joined(const Words& arguments) {
  std::string line;
  for (const std::string& argument : arguments) line += argument + " ";
  return line;
}

/// A refusal: this exit code, nothing on stdout, one line on stderr (after warnings) that says all of `says`.
inline void expect_refused(const Outcome& outcome, int code, std::initializer_list<std::string_view> says,
                           const std::string& what = {}) {
  EXPECT_EQ(outcome.code, code) << what << "\n" << outcome.err;
  EXPECT_EQ(outcome.out, "") << what;
  EXPECT_EQ(std::count(outcome.err.begin(), outcome.err.end(), '\n'), 1) << what << "\n" << outcome.err;
  for (const std::string_view part : says) {
    EXPECT_NE(outcome.err.find(part), std::string::npos) << what << "\n" << outcome.err << "does not say " << part;
  }
}

/// The JSON object on stdout of a run that went well.
inline Json json_of(const Outcome& outcome) {
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  Json json = Json::parse(outcome.out, nullptr, false);
  EXPECT_TRUE(json.is_object()) << outcome.out;
  return json;
}

/// The objects on stdout, one a line.
inline std::vector<Json> jsonl_of(const Outcome& outcome) {
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  std::vector<Json> lines;
  std::string_view rest = outcome.out;
  while (!rest.empty()) {
    const std::size_t end = rest.find('\n');
    EXPECT_NE(end, std::string_view::npos) << "the last line has no end";
    if (end == std::string_view::npos) break;
    lines.push_back(Json::parse(rest.substr(0, end), nullptr, false));
    EXPECT_TRUE(lines.back().is_object()) << rest.substr(0, end);
    rest.remove_prefix(end + 1);
  }
  return lines;
}

}  // namespace mmrec::test
