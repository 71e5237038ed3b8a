// The scores of --mode, against sessions that are given one window each.
#include <cmath>

#include "mmrec/model.h"
#include "tests/apps/programs.h"

namespace mmrec::test {
namespace {

// A document with its first id repeated, by hand: what each mode counts is scored with a session per window.
TEST(Windows, ScoresAreThoseOfSessionsOfAWindowEach) {
  std::vector<int> ids;
  for (int i = 0; i < 41; ++i) ids.push_back((i * 37 + 5) % 384);
  LoadOptions load;
  load.device = Device::kCpu;
  const Model model = Model::load(kTiny, load);
  const auto logprobs_of = [&](const std::vector<int>& window) {
    auto session = model.new_session();
    std::vector<float> logprobs(window.size());
    session.score(window, logprobs);
    return logprobs;
  };
  const std::string input = Json(ids).dump() + "\n";
  const std::vector<std::pair<Words, int>> modes = {{{"--mode", "rolling", "--window", "7"}, 40},
                                                    {{"--mode", "strided", "--window", "8", "--stride", "3"}, 40},
                                                    {{"--mode", "strided", "--window", "8"}, 40},
                                                    {{"--mode", "llama", "--window", "9"}, 4 * 4}};
  for (const auto& [arguments, count] : modes) {
    const Json json = ppl_json(words({"--ids", "--per-token", "-"}, arguments), input);
    EXPECT_EQ(json["mode"], arguments[1]);
    EXPECT_EQ(json["window"], std::stoi(arguments[3]));
    EXPECT_EQ(json["tokens"], count) << joined(arguments);
    const Json& document = json["documents"][0];
    EXPECT_EQ(document["mode"], arguments[1]);
    double nll = 0.0;
    for (std::size_t i = 0; i < document["positions"].size(); ++i) {
      const std::size_t p = document["positions"][i];
      // Where the window begins that counts position p, found anew for each token.
      std::size_t begin = 0;
      if (arguments[1] == "rolling") {
        const std::size_t end = std::min<std::size_t>(((p - 1) / 7 + 1) * 7 + 1, ids.size());
        begin = end < 8 ? 0 : end - 8;
      } else if (arguments[1] == "strided") {
        const std::size_t stride = arguments.size() > 4 ? 3 : 4;
        while (begin + 8 <= p) begin += stride;
      } else {
        begin = p / 9 * 9;
      }
      std::vector<int> window(ids.begin() + static_cast<std::ptrdiff_t>(begin),
                              ids.begin() + static_cast<std::ptrdiff_t>(p) + 1);
      if (arguments[1] == "llama") window.front() = ids.front();
      const double logprob = static_cast<double>(logprobs_of(window).back());
      EXPECT_NEAR(document["logprobs"][i].get<double>(), logprob, 1e-4) << joined(arguments) << " position " << p;
      nll -= logprob;
    }
    EXPECT_NEAR(json["ppl"].get<double>() / std::exp(nll / count), 1.0, 1e-5);
    EXPECT_EQ(json["bits_per_byte"], nullptr);
  }
}

TEST(Windows, LlamaIsRefusedBelowTwoChunks) {
  const Words llama = {"--ids", "--mode", "llama", "-"};
  expect_refused(ppl(llama, "[1,2,3]\n"), 3,
                 {"stdin:1: too short for --mode llama --window 512 (found 3 tokens, expected at least 1024)"});
  expect_refused(ppl(words(llama, {"--window", "4"}), "[1,2,3,4,5,6,7]\n"), 3,
                 {"stdin:1: too short for --mode llama --window 4 (found 7 tokens, expected at least 8)"});
  EXPECT_EQ(ppl_json(words(llama, {"--window", "4"}), "[1,2,3,4,5,6,7,8]\n")["tokens"], 2);
}

}  // namespace
}  // namespace mmrec::test
