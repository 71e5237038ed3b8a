// --save-logprobs and --compare with it: what is saved is the public code's distribution, and divergences are those of
// a plain sum over two files, read here by their documented layout.
#include "tests/apps/programs.h"
#include "tests/support/safetensors_reader.h"

namespace mmrec::test {
namespace {

struct Saved {
  std::uint32_t vocab = 0;
  std::map<std::pair<std::int64_t, std::int64_t>, std::pair<std::int64_t, std::vector<float>>> rows;  // by doc and pos
};

Saved read_saved(const std::filesystem::path& path) {
  const std::string bytes = read_file(path);
  Saved saved;
  EXPECT_EQ(bytes.substr(0, 8), "MMRECLPD");
  std::memcpy(&saved.vocab, bytes.data() + 12, 4);
  const std::size_t record = 24 + std::size_t{4} * saved.vocab;
  std::size_t at = 32;
  for (; at + 24 < bytes.size(); at += record) {
    std::int64_t numbers[3];
    std::memcpy(numbers, bytes.data() + at, 24);
    auto& [id, logprobs] = saved.rows[{numbers[0], numbers[1]}];
    id = numbers[2];
    logprobs.resize(saved.vocab);
    std::memcpy(logprobs.data(), bytes.data() + at + 24, std::size_t{4} * saved.vocab);
  }
  std::int64_t last[3] = {};
  std::memcpy(last, bytes.data() + at, 24);
  EXPECT_EQ(last[0], -1);
  EXPECT_EQ(last[1], std::ssize(saved.rows));
  EXPECT_EQ(at + 24, bytes.size());
  return saved;
}

class DistributionsTest : public testing::Test {
 protected:
  DistributionsTest() : reference_(kUpstream + "/mdi/reference.safetensors") {
    lines_ = id_lines(reference_.at("input_ids"));
  }
  Outcome ppl(const std::string& model, const Words& more) const {
    return run(words({kPpl, "--device", "cpu", "-m", kUpstream + "/" + model, "--ids", "-"}, more), lines_);
  }

  SafetensorsReader reference_;
  std::string lines_;
  TempFolder folder_;
  std::string file_ = folder_ / "mdi.lp";
};

TEST_F(DistributionsTest, AreThoseOfThePublicCode) {
  ASSERT_EQ(ppl("mdi", {"--save-logprobs", file_}).code, 0);
  const Saved saved = read_saved(file_);
  const ReferenceTensor& logits = reference_.at("logits");
  const std::int64_t count = logits.dim(1), vocab = logits.dim(2);
  ASSERT_EQ(saved.vocab, vocab);
  ASSERT_EQ(std::ssize(saved.rows), logits.dim(0) * (count - 1));
  for (const auto& [key, row] : saved.rows) {
    const float* const of = logits.values.data() + (key.first * count + key.second - 1) * vocab;
    double sum = 0.0;
    for (std::int64_t v = 0; v < vocab; ++v) sum += std::exp(static_cast<double>(of[v]));
    for (std::int64_t v = 0; v < vocab; ++v) {
      ASSERT_NEAR(row.second[static_cast<std::size_t>(v)], static_cast<double>(of[v]) - std::log(sum), 5e-5);
    }
  }
}

TEST_F(DistributionsTest, DivergencesAreThoseOfAPlainSum) {
  const std::string other = folder_ / "dpg.lp";
  ASSERT_EQ(ppl("mdi", {"--save-logprobs", file_}).code, 0);
  const Json result = json_of(ppl("dpg", {"--compare", file_, "--save-logprobs", other, "--format", "json"}));
  const Saved p = read_saved(file_), q = read_saved(other);
  ASSERT_EQ(p.rows.size(), q.rows.size());
  std::vector<double> all;
  double same = 0.0, bias = 0.0;
  for (const auto& [key, row] : p.rows) {
    const auto& [id, log_q] = q.rows.at(key);
    ASSERT_EQ(id, row.first);
    double divergence = 0.0;
    for (std::size_t v = 0; v < log_q.size(); ++v) {
      divergence += std::exp(static_cast<double>(row.second[v])) *
                    (static_cast<double>(row.second[v]) - static_cast<double>(log_q[v]));
    }
    all.push_back(divergence);
    const auto top = [](const std::vector<float>& x) { return std::max_element(x.begin(), x.end()) - x.begin(); };
    same += top(row.second) == top(log_q) ? 1.0 : 0.0;
    bias += static_cast<double>(log_q[static_cast<std::size_t>(id)] - row.second[static_cast<std::size_t>(id)]);
  }
  std::sort(all.begin(), all.end());
  const auto n = static_cast<double>(all.size());
  double mean = 0.0, squares = 0.0;
  for (const double one : all) mean += one / n;
  for (const double one : all) squares += (one - mean) * (one - mean);
  EXPECT_EQ(result["diff_tokens"], all.size());
  EXPECT_GT(mean, 1e-3) << "two models";
  EXPECT_NEAR(result["kl_mean"].get<double>(), mean, 1e-6);
  EXPECT_NEAR(result["kl_stderr"].get<double>(), std::sqrt(squares / (n - 1.0) / n), 1e-6);
  EXPECT_NEAR(result["kl_max"].get<double>(), all.back(), 1e-6);
  EXPECT_NEAR(result["kl_median"].get<double>(), all[(all.size() + 1) / 2 - 1], 1e-6);
  EXPECT_NEAR(result["kl_p99"].get<double>(), all[static_cast<std::size_t>(std::ceil(0.99 * n)) - 1], 1e-6);
  EXPECT_NEAR(result["same_top"].get<double>(), same / n, 1e-9);
  EXPECT_NEAR(result["diff_bias"].get<double>(), bias / n, 1e-5);
}

TEST_F(DistributionsTest, AModelIsNoDistanceFromItself) {
  ASSERT_EQ(ppl("mdi", {"--save-logprobs", file_}).code, 0);
  const Json same = json_of(ppl("mdi", {"--compare", file_, "--format", "json"}));
  for (const char* key : {"kl_mean", "kl_max", "diff_max"}) EXPECT_EQ(same[key], 0.0) << key;
  EXPECT_EQ(same["same_top"], 1.0);
}

TEST_F(DistributionsTest, APipeIsComparedWithLikeAFile) {
  write_file(folder_ / "ids", lines_);
  const Words line = {kPpl, "--device", "cpu", "-m", kUpstream + "/mdi", "--ids", folder_ / "ids"};
  ASSERT_EQ(ppl("mdi", {"--save-logprobs", file_}).code, 0);
  for (const std::string& saved : {run(words(line, {"--per-token"})).out, read_file(file_)}) {
    for (const char* pipe : {"-", "/dev/stdin"}) {
      EXPECT_EQ(json_of(run(words(line, {"--compare", pipe, "--format", "json"}), saved))["diff_max"], 0.0) << pipe;
    }
    const std::string part = saved.substr(0, saved.size() / 2);
    EXPECT_EQ(interrupted_reading(words(line, {"--compare"}), part, 0, SIGTERM).code, 143);
  }
  expect_refused(ppl("mdi", {"--compare", "-"}), 2, {"-: given more than once"});
}

TEST_F(DistributionsTest, WhatDoesNotBelongIsRefused) {
  ASSERT_EQ(ppl("mdi", {"--save-logprobs", file_}).code, 0);
  const std::string whole = read_file(file_);
  const auto compared = [&](const std::string& bytes) {
    write_file(file_, bytes);
    return ppl("mdi", {"--compare", file_});
  };
  for (const std::size_t size :
       {std::size_t{9}, std::size_t{31}, std::size_t{40}, std::size_t{200}, whole.size() - 1, whole.size() - 24}) {
    expect_refused(compared(whole.substr(0, size)), 3, {file_, "found the end of the file"});
  }
  expect_refused(compared(whole + whole), 3, {file_, "found more bytes"});
  struct Change {
    std::size_t at;
    int by;
    std::size_t bytes;
    std::string_view says;
  };
  for (const auto& [at, by, bytes, says] : {Change{8, 8, 1, "version 9"},
                                            {12, 1, 1, "vocabulary of"},
                                            {24, 1, 1, "another tokenizer"},
                                            {40, 1, 1, "document 0, position 2"},
                                            {56, 0x7f, 4, "add up to"}}) {
    std::string other = whole;
    for (std::size_t i = at; i < at + bytes; ++i) other[i] = static_cast<char>(bytes == 1 ? other[i] + by : by);
    expect_refused(compared(other), 3, {says, at == 40 ? "expected document 0, position 1" : ""});
  }
  write_file(file_, whole);
  lines_ = lines_.substr(0, lines_.find('\n') + 1);
  expect_refused(ppl("mdi", {"--compare", file_}), 3, {"document 1, position 1", "expected the end after"});
  expect_refused(ppl("mdi", {"--compare", file_, "--mode", "rolling", "--window", "4"}), 2,
                 {"--compare", "--mode full"});
}

}  // namespace
}  // namespace mmrec::test
