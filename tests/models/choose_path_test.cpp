// Which path a chunk takes, on a backend that has the ops of all of them.
#include "models/mmrec/choose_path.h"

#include <gtest/gtest.h>

#include <vector>

#include "kernels/cpu/cpu.h"

namespace mmrec::models {
namespace {

/// Declares every optional op; none is called.
struct HasAll {
  using Space = kernels::Device;
};
template <class A>
void gated_recurrences(HasAll&, const kernels::GatedRecurrences<kernels::Device, A>&) {}
template <class A>
void packed_sweeps(HasAll&, const kernels::PackedSweeps<kernels::Device, A>&) {}
template <class A>
void advance_norm(HasAll&, const kernels::AdvanceNorm<kernels::Device, A>&) {}
template <class A>
void decode_step(HasAll&, const kernels::DecodeStep<kernels::Device, A>&) {}
bool takes_token_rows(const HasAll&, std::int64_t /*dim*/) { return true; }

struct Chosen {
  const char* what;
  std::vector<Batch> batches;
  Chunk chunk;
  Path path;
  Path without = Path::kReference;  // where the kernels do not take the model
};
const kernels::DecodeShape kLarge = {.dim = 2048, .ffn = 8192, .gate_hidden = 512};
Batch batch(std::int64_t first_row, std::int64_t sequences, std::int64_t tokens) {
  return {.first_row = first_row, .sequences = sequences, .tokens = tokens};
}

TEST(ChoosePath, TakesTheFastestThatMayBeTaken) {
  const Chunk step{.is_step = true, .options = {}}, exact{.options = {}}, sweeps{.options = {.sweeps = true}};
  const Chunk packed{.packed = true, .options = {.sweeps = true}}, gaps{.packed = true, .options = {}};
  const Chosen cases[] = {
      {"a step of few side by side", {batch(0, 3, 1)}, step, Path::kWholeStep, Path::kRows},
      {"a step of many side by side", {batch(0, 64, 1)}, step, Path::kWholeStep, Path::kRows},
      {"a step of few apart", {batch(0, 1, 1), batch(1, 1, 1)}, step, Path::kRows, Path::kRows},
      {"a chunk of a token of each", {batch(0, 9, 1)}, sweeps, Path::kReference},
      {"few tokens side by side", {batch(0, 8, 1)}, exact, Path::kReference},
      {"tokens with a gap between", {batch(0, 1, 1), batch(2, 1, 1)}, gaps, Path::kTogether, Path::kTogether},
      {"packed runs", {batch(0, 1, 40), batch(41, 1, 7)}, packed, Path::kPacked, Path::kPacked},
      {"one packed run", {batch(0, 1, 40)}, packed, Path::kReference},
      {"runs by exact steps", {batch(0, 1, 40), batch(40, 1, 7)}, exact, Path::kTogether, Path::kTogether},
      {"runs by sweeps, not packed", {batch(0, 1, 40), batch(40, 1, 7)}, sweeps, Path::kReference}};
  for (const Chosen& c : cases) {
    for (const bool fits : {true, false}) {
      const auto choose = [&](Path forced) {
        Chunk chunk = c.chunk;
        chunk.batches = c.batches, chunk.options.path = forced;
        for (const Batch& b : c.batches) chunk.rows += b.rows();
        const auto fit = [&](const Batch& /*b*/) { return fits; };
        return choose_path<HasAll, kernels::Float16>({}, kLarge, {}, chunk, fit);
      };
      const Path want = fits ? c.path : c.without;
      EXPECT_EQ(choose(Path::kAny), want) << c.what << ", fits: " << fits;
      EXPECT_EQ(choose(want), want) << c.what << ", forced";
      EXPECT_EQ(choose(Path::kReference), Path::kReference) << c.what << ", forced to the reference";
    }
  }
}

TEST(ChoosePath, TakesStepsOfSmallModelsByRows) {
  const kernels::DecodeShape small = {.dim = 384, .ffn = 768, .gate_hidden = 96};
  const kernels::DecodeShape medium = {.dim = 1024, .ffn = 4096, .gate_hidden = 256};  // 36 MB a layer
  const kernels::DecodeShape huge = {.dim = 4096, .ffn = 16384, .gate_hidden = 1024};  // 570 MB
  const auto chosen = [&](auto element, const kernels::DecodeShape& shape, std::int64_t sequences) {
    const Batch batches[] = {batch(0, sequences, 1)};
    const Chunk chunk{.batches = batches, .rows = sequences, .is_step = true, .options = {}};
    const auto fit = [](const Batch& /*b*/) { return true; };
    return choose_path<HasAll, decltype(element)>({}, shape, {}, chunk, fit);
  };
  for (const std::int64_t sequences : {1, 2, 4, 5, 8}) {
    const auto by_one = [&](bool pays) { return pays ? Path::kWholeStep : Path::kRows; };
    for (const auto& shape : {small, medium}) {
      EXPECT_EQ(chosen(kernels::BFloat16(), shape, sequences), by_one(sequences == 1)) << sequences;
      EXPECT_EQ(chosen(0.0F, shape, sequences), Path::kRows) << sequences;
    }
    EXPECT_EQ(chosen(kernels::BFloat16(), kLarge, sequences), Path::kWholeStep) << sequences;
    EXPECT_EQ(chosen(0.0F, kLarge, sequences), by_one(sequences <= 4)) << sequences;
    EXPECT_EQ(chosen(kernels::BFloat16(), huge, sequences), by_one(sequences <= 4)) << sequences;
  }
}

TEST(ChoosePath, HasOnePathForStepsAndOneForPromptsIfBitsMayNotDependOnOthers) {
  const Chunk step{.is_step = true, .options = {}}, prompt{.packed = true, .options = {.sweeps = true}};
  const Chunk exact{.packed = true, .options = {}};
  const Chosen cases[] = {{"a step of one", {batch(0, 1, 1)}, step, Path::kRows},
                          {"a step of few side by side", {batch(0, 3, 1)}, step, Path::kRows},
                          {"a step of many apart", {batch(0, 9, 1), batch(9, 4, 1)}, step, Path::kRows},
                          {"one prompt", {batch(0, 1, 40)}, prompt, Path::kPacked},
                          {"a prompt of one token", {batch(0, 1, 1)}, prompt, Path::kPacked},
                          {"prompts", {batch(0, 1, 40), batch(128, 1, 7)}, prompt, Path::kPacked},
                          {"a prompt by steps", {batch(0, 1, 1)}, exact, Path::kReference}};
  for (const Chosen& c : cases) {
    Chunk chunk = c.chunk;
    chunk.batches = c.batches;
    const auto fit = [](const Batch& /*b*/) { return true; };
    EXPECT_EQ((choose_path<HasAll, kernels::Float16>({}, kLarge, {.spans_segments = true, .align = 128}, chunk, fit)),
              c.path)
        << c.what;
  }
}

TEST(ChoosePath, KeepsToWhatTheBackendHas) {
  using OnCpu = PathOps<kernels::Cpu, float>;
  EXPECT_TRUE(OnCpu::kTogether);
  EXPECT_FALSE(OnCpu::kPacked || OnCpu::kRows || OnCpu::kWholeStep);
  using InFp32 = PathOps<HasAll, float>;
  EXPECT_TRUE(InFp32::kTogether && InFp32::kPacked && InFp32::kRows && InFp32::kWholeStep);
}

}  // namespace
}  // namespace mmrec::models
