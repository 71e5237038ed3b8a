// The laws on the CPU, and the one of its own: what row tiles keep equal.
#include "tests/engine/laws.h"
#include "tests/engine/far_positions.h"
#include "tests/engine/sessions.h"

namespace mmrec::test {
namespace {

// The smallest memories, a state that restarts, whole tiles and half-precision weights; and two experts.
INSTANTIATE_TEST_SUITE_P(Models, Laws,
                         testing::Values(LawsCase{"oracle/tiles"}, LawsCase{"oracle/slots"}, LawsCase{"oracle/restart"},
                                         LawsCase{"oracle/dpg_bf16"}, LawsCase{"upstream/hem"},
                                         LawsCase{"upstream/mmrec100m"},
                                         LawsCase{.folder = "upstream/jax", .variant = {.calls = Calls::kStepwise}},
                                         LawsCase{.folder = "upstream/jax", .variant = {.bank = false}},
                                         LawsCase{"quantized/int4"}, LawsCase{"quantized/fp8"}, LawsCase{"mmrec-12m"}),
                         laws_name);

LawsCase in_bf16(const char* folder, VariantOptions variant = {}) {
  LawsCase c{.folder = folder, .precision = Precision::kBF16, .variant = variant};
  c.split_bound = c.sweep_bound = 0.06F;
  c.sweep_tolerance = 0.0F;
  return c;
}
INSTANTIATE_TEST_SUITE_P(BF16, Laws,
                         testing::Values(in_bf16("oracle/tiles"), in_bf16("oracle/restart"), in_bf16("upstream/hem"),
                                         in_bf16("upstream/mmrec100m"), in_bf16("upstream/jax", {.bank = false}),
                                         in_bf16("mmrec-12m")),
                         laws_name);

SessionOptions options(PrefillMode mode) { return {.threads = 1, .prefill = mode, .sweep_tolerance = 1e-6F}; }

TEST(SplitLaw, CutsAtTileAndWindowBoundariesChangeNoBit) {
  const Model model = on_cpu(folder_of("oracle/tiles"));  // segments of 300: tiles at 0, 128, 256 | 300, ... | 600
  const auto tokens = random_tokens(model, 700, 3);
  const std::vector<std::pair<PrefillMode, std::vector<std::vector<std::size_t>>>> cases = {
      {PrefillMode::kSteps, {{128, 700}, {256, 300, 428, 700}, {128, 256, 300, 428, 556, 600, 700}}},
      {PrefillMode::kSweeps, {{256, 700}, {300, 600, 700}, {256, 300, 556, 600, 700}}}};
  for (const auto& [mode, splits] : cases) {
    Session whole = begun(model, tokens, 1, options(mode));
    for (const auto& ends : splits) {
      Session session = model.new_session(1, options(mode));
      prefill_to(session, tokens, ends);
      EXPECT_EQ(session.save(), whole.save()) << "first cut at " << ends[0];
    }
  }
}

TEST(FarPositions, GoOnAsNearOnes) { expect_far_positions_to_go_on(on_cpu(folder_of("tiny")), 0.0F); }

}  // namespace
}  // namespace mmrec::test
