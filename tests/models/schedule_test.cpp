// How calls are cut into chunks: where no run's bits may depend on others, and where one run goes in parts.
#include "models/runtime/schedule.h"

#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <map>
#include <random>
#include <span>
#include <utility>
#include <vector>

namespace mmrec::models {
namespace {

/// The parts of each run, by its number: their positions and rows.
using Parts = std::map<std::int64_t, std::vector<std::pair<std::int64_t, std::int64_t>>>;

Parts parts_of(const ChunkPlan& plan, std::int64_t segment, std::span<const Run> runs) {
  Parts parts;
  Schedule schedule(plan, segment, runs);
  EXPECT_TRUE(schedule.packs());
  for (auto chunk = schedule.next(); !chunk.empty(); chunk = schedule.next()) {
    std::int64_t end = -1;
    bool attends = false;
    for (const ChunkRun& run : chunk) {
      EXPECT_GT(run.first_row, end) << "the row before it is its carry's";
      EXPECT_EQ(run.first_row % plan.align, 0);
      end = run.first_row + run.rows;
      EXPECT_LE(end, plan.most_rows(std::ssize(runs)));
      if (run.rows <= plan.window) {
        EXPECT_EQ(run.first_row / plan.window, (end - 1) / plan.window) << "a window cuts it";
      } else {
        EXPECT_EQ(run.first_row % plan.window, 0);
      }
      EXPECT_LE(run.position % segment + run.rows, segment);
      EXPECT_LE(attends, run.position >= 2 * segment) << "those that attend come last";
      attends = run.position >= 2 * segment;
      parts[run.number].emplace_back(run.position, run.rows);
    }
  }
  return parts;
}

TEST(Schedule, AlignedRunsAreCutAsEachAlone) {
  std::mt19937 rng(1);
  const ChunkPlan plan = {.tokens = 1024, .rows = 2048, .window = 512, .packs = true, .align = 128};
  for (const std::int64_t segment : {std::int64_t{250}, std::int64_t{700}, std::int64_t{64}, std::int64_t{1} << 40}) {
    for (int repeat = 0; repeat < 20; ++repeat) {
      std::vector<models::Run> runs(1 + rng() % 40);
      std::int64_t rows = 0;
      for (models::Run& run : runs) {
        run = {nullptr, rng() % 3 == 0 ? static_cast<std::int64_t>(rng() % 1000) : 0, rows,
               static_cast<std::int64_t>(1 + rng() % (rng() % 4 == 0 ? 3000 : 80))};
        rows += run.rows;
      }
      Parts together = parts_of(plan, segment, runs);
      for (std::size_t i = 0; i < runs.size(); ++i) {
        const auto& parts = together[static_cast<std::int64_t>(i)];
        std::int64_t position = runs[i].position;
        for (const auto& [begin, count] : parts) {
          EXPECT_EQ(begin, position);
          position += count;
        }
        EXPECT_EQ(position, runs[i].position + runs[i].rows);
        EXPECT_EQ(parts, parts_of(plan, segment, {&runs[i], 1})[0]);
      }
    }
  }
}

// Chunks of a call: whether packed, and the number, position and rows of each of their runs.
struct ChunkOf {
  bool packed;
  std::vector<std::array<std::int64_t, 3>> runs;
  friend bool operator==(const ChunkOf&, const ChunkOf&) = default;
};
std::vector<ChunkOf> chunks_of(const ChunkPlan& plan, std::span<const models::Run> runs) {
  std::vector<ChunkOf> chunks;
  Schedule schedule(plan, 100, runs);
  for (auto chunk = schedule.next(); !chunk.empty(); chunk = schedule.next()) {
    chunks.push_back({schedule.packs(), {}});
    for (const ChunkRun& run : chunk) chunks.back().runs.push_back({run.number, run.position, run.rows});
  }
  return chunks;
}

TEST(Schedule, RunsOfSeveralPartsHaveLargeChunksOfTheirOwn) {
  const ChunkPlan plan = {
      .tokens = 1024, .rows = 2048, .window = 512, .spans_segments = true, .packs = true, .part = 256, .alone = 4096};
  EXPECT_EQ(plan.part_end(0), 256);
  EXPECT_EQ(plan.part_end(511), 512);
  EXPECT_EQ(plan.part_end(512), 768);

  const models::Run one[] = {{nullptr, 40, 0, 5000}};
  EXPECT_EQ(chunks_of(plan, one), (std::vector<ChunkOf>{{false, {{0, 40, 4056}}}, {false, {{0, 4096, 944}}}}));
  const models::Run in_lockstep[] = {{nullptr, 40, 0, 5000}, {nullptr, 40, 5000, 5000}};
  EXPECT_EQ(
      chunks_of(plan, in_lockstep),
      (std::vector<ChunkOf>{
          {false, {{0, 40, 4056}}}, {false, {{1, 40, 4056}}}, {false, {{0, 4096, 944}}}, {false, {{1, 4096, 944}}}}));
  // Shorter ones go together, part by part; so do runs that end soon beside a long one, packed.
  const models::Run shorter[] = {{nullptr, 500, 0, 240}, {nullptr, 500, 240, 240}};
  EXPECT_EQ(chunks_of(plan, shorter),
            (std::vector<ChunkOf>{{false, {{0, 500, 12}, {1, 500, 12}}}, {false, {{0, 512, 228}, {1, 512, 228}}}}));
  const models::Run mixed[] = {{nullptr, 0, 0, 70}, {nullptr, 0, 70, 3000}, {nullptr, 0, 3070, 30}};
  EXPECT_EQ(chunks_of(plan, mixed), (std::vector<ChunkOf>{{true, {{0, 0, 70}, {2, 0, 30}}}, {false, {{1, 0, 3000}}}}));
}

}  // namespace
}  // namespace mmrec::models
