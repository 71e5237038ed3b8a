// mmrec-ppl --pairs, against a session that is stepped through every continuation.
#include <cmath>

#include "mmrec/model.h"
#include "mmrec/session.h"
#include "mmrec/tokenizer.h"
#include "tests/apps/programs.h"

namespace mmrec::test {
namespace {

std::string line(const std::string& context, const std::string& continuation) {
  return Json({{"context", context}, {"continuation", continuation}}).dump() + "\n";
}
Outcome pairs(const Words& more, std::string input) { return ppl(words({"--pairs"}, more), std::move(input)); }

/// What the model itself chooses after `context`.
std::string greedy_text(const std::string& context, int tokens) {
  return generate({"-p", context, "-n", std::to_string(tokens), "--temp", "0", "--repetition-penalty", "1"}).out;
}

TEST(Pairs, AreThoseOfASessionStepByStep) {
  const Tokenizer tokenizer = Tokenizer::load(kTiny);
  LoadOptions load;
  load.device = Device::kCpu;
  const Model model = Model::load(kTiny, load);
  const std::vector<std::pair<std::string, std::string>> cases = {{"Alice was", " beginning to get very tired"},
                                                                  {"Alice was ", "beginning"},
                                                                  {"", "Alice"},
                                                                  {"  ", "x"},
                                                                  {"The river", ""},
                                                                  {"The river", greedy_text("The river", 1)},
                                                                  {"Alice", greedy_text("Alice", 5)},
                                                                  {"Al", "ice"}};
  std::string input;
  for (const auto& [context, continuation] : cases) input += line(context, continuation) + "\n";
  const auto records = jsonl_of(pairs({"-"}, input));
  ASSERT_EQ(records.size(), cases.size());
  for (std::size_t i = 0; i < cases.size(); ++i) {
    // By the definition: encode together, split where the context alone ends.
    std::string context = cases[i].first;
    std::string continuation = cases[i].second;
    while (context.ends_with(' ')) {
      context.pop_back();
      continuation.insert(0, " ");
    }
    std::vector<int> ids = tokenizer.encode(context);
    const std::size_t length = ids.size();
    const auto whole = tokenizer.encode(context + continuation);
    ids.insert(ids.end(), whole.begin() + static_cast<std::ptrdiff_t>(length), whole.end());
    auto session = model.new_session();
    double sum = 0.0;
    bool greedy = true;
    for (std::size_t t = 0; t < ids.size(); ++t) {
      if (t >= length) {
        const auto logits = session.logits();
        double all = 0.0;
        for (const float x : logits) all += std::exp(static_cast<double>(x));
        sum += static_cast<double>(logits[static_cast<std::size_t>(ids[t])]) - std::log(all);
        greedy = greedy && std::max_element(logits.begin(), logits.end()) - logits.begin() == ids[t];
      }
      session.step(std::span(&ids[t], 1));
    }
    EXPECT_NEAR(records[i]["loglikelihood"].get<double>(), sum, 1e-3) << input;
    EXPECT_EQ(records[i]["is_greedy"], greedy) << cases[i].first << "|" << cases[i].second;
    EXPECT_EQ(records[i]["tokens"], ids.size() - length);
    EXPECT_EQ(records[i]["pair"], i);
    EXPECT_EQ(records[i]["name"], "stdin:" + std::to_string(2 * i + 1));
    EXPECT_EQ(records[i]["mode"], "pairs");
  }
}

TEST(Pairs, EveryFormatTellsTheSame) {
  const std::string input = line("Alice", " was") + line("", "two") + line("a", "");
  const auto lines = jsonl_of(pairs({"-"}, input));
  const Json json = json_of(pairs({"--format", "json", "-"}, input));
  EXPECT_EQ(json["count"], 3);
  EXPECT_EQ(json["pairs"], Json(lines));
  EXPECT_EQ(json["empty_pairs"], 1);
  EXPECT_EQ(json["mode"], "pairs");
  const std::string csv = pairs({"--format", "csv", "-"}, input).out;
  EXPECT_EQ(csv.find("pair,name,loglikelihood,is_greedy,tokens,context_tokens,mode,bos,"), 0U) << csv;
  EXPECT_NE(pairs({"--format", "text", "-"}, input).out.find("empty_pairs    1\n"), std::string::npos);
}

TEST(Pairs, MalformedLinesAreRefused) {
  expect_refused(pairs({"-"}, "{\"context\":\"a\"}\n"), 3, {"stdin:1: no field 'continuation' (found 'context'"});
  expect_refused(pairs({"-"}, "\n{\"context\":1,\"continuation\":\"b\"}\n"), 3,
                 {"stdin:2: field 'context' (found number"});
  const Outcome outcome = pairs({"-"}, line("Alice", " was") + "x\n");
  EXPECT_EQ(outcome.code, 3);
  EXPECT_EQ(outcome.out, pairs({"-"}, line("Alice", " was")).out) << "nothing is lost of what was done";
}

}  // namespace
}  // namespace mmrec::test
