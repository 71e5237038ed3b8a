// Many requests of a real model on the CPU: each gets the bits that it gets alone, whoever joins, leaves and is
// cancelled, and whatever pieces its prompt is cut into. And requests without end take no more memory.
#include "mmrec/generator.h"
#include "tests/engine/generator_queue.h"
#include "tests/engine/sessions.h"

namespace mmrec::test {
namespace {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kSanitized = true;  // which keeps memory
#else
constexpr bool kSanitized = false;
#endif

struct Loaded {
  explicit Loaded(std::string_view name)
      : model(on_cpu(folder_of(name))), tokenizer(Tokenizer::load(folder_of(name))) {}
  Model model;
  Tokenizer tokenizer;
};

TEST(GeneratorOfAModel, EachRequestHasTheBitsThatItHasAlone) {
  const Loaded tiny("tiny"), bundled("mmrec-12m");
  for (const int slots : {1, 2, 3, 7, 64, 300}) {
    const Loaded& loaded = slots == 3 ? bundled : tiny;
    std::mt19937 rng(static_cast<unsigned>(slots));
    Generator generator(loaded.model, loaded.tokenizer, {.slots = slots});
    std::vector<Wish> wishes;
    std::map<std::size_t, GenerateResult> results;
    const std::size_t count = slots == 3 ? 8 : slots < 64 ? 40 : static_cast<std::size_t>(slots) + 60;
    while (wishes.size() < count || generator.run_once()) {
      // Few at a time, or enough for all slots.
      for (auto n = rng() % (slots < 64 ? 4 : 200); n > 0 && wishes.size() < count; --n) {
        wishes.push_back(random_wish(rng, loaded.tokenizer.vocab_size()));
        generator.submit({.prompt = wishes.back().prompt,
                          .options = wishes.back().make(),
                          .on_finish = [&results, at = wishes.size() - 1](GenerateResult result) {
                            results.emplace(at, std::move(result));
                          }});
      }
    }
    ASSERT_EQ(results.size(), count);
    for (std::size_t i = 0; i < count; i += slots < 64 ? 1 : 7) {
      Session session = begun(loaded.model, wishes[i].prompt);
      GenerateResult expected = generate(session, loaded.tokenizer, wishes[i].make());
      if (wishes[i].most_asked != Wish().most_asked) {  // it counts questions, which a long prompt's pieces ask too
        ASSERT_LE(results[i].tokens.size(), expected.tokens.size());
        expected.tokens.resize(results[i].tokens.size());
        EXPECT_EQ(results[i].tokens, expected.tokens) << i;
        continue;
      }
      expect_same(results[i], expected, "slots " + std::to_string(slots) + ", request " + std::to_string(i));
    }
  }
}

/// MMREC_SOAK_REQUESTS sets their number.
TEST(GeneratorOfAModel, RequestsWithoutEndTakeNoMoreMemory) {
  const char* wished = std::getenv("MMREC_SOAK_REQUESTS");
  const int count = wished != nullptr ? std::atoi(wished) : kSanitized ? 4000 : 100'000;
  constexpr int kWarmUp = 1000;
  constexpr int kTogether = 100;
  const Loaded tiny("tiny");
  Generator generator(tiny.model, tiny.tokenizer, {.slots = 64});
  long before = 0;
  int finished = 0;
  for (int i = 0; i < count; ++i) {
    if (i == kWarmUp) before = resident_kilobytes();
    GeneratorRequest request{.prompt = std::vector<int>(static_cast<std::size_t>(1 + i % 7), 5)};
    request.options.max_tokens = 1 + i % 3;
    request.options.sequence = static_cast<std::uint64_t>(i);
    if (i % 5 == 0) request.options.stop = {"x"};
    request.on_finish = [&](const GenerateResult&) { ++finished; };
    generator.submit(std::move(request));
    while (generator.waiting() > kTogether) generator.run_once();
  }
  generator.run();
  EXPECT_EQ(finished, count);
  EXPECT_LT(resident_kilobytes() - before, kSanitized ? 1 << 20 : 4096);
}

}  // namespace
}  // namespace mmrec::test
