// How calls are cut into chunks: where no run's bits may depend on others, and where one run goes in parts.
#include "models/runtime/schedule.h"

#include <gtest/gtest.h>

#include <algorithm>
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

TEST(Schedule, OfAPlanWithPartsOneRunHasLargeChunksAndSeveralHaveParts) {
  const ChunkPlan plan = {
      .tokens = 1024, .rows = 2048, .window = 512, .spans_segments = true, .part = 256, .alone = 4096};
  const auto rows_of = [&](std::span<const models::Run> runs) {
    std::vector<std::int64_t> rows;
    Schedule schedule(plan, 100, runs);
    for (auto chunk = schedule.next(); !chunk.empty(); chunk = schedule.next()) rows.push_back(chunk.front().rows);
    return rows;
  };
  const models::Run runs[] = {{nullptr, 40, 0, 5000}, {nullptr, 40, 5000, 600}};
  EXPECT_EQ(rows_of(std::span(runs).first(1)), (std::vector<std::int64_t>{4096 - 40, 5000 - 4096 + 40}));
  const std::vector<std::int64_t> of_several = rows_of(runs);
  EXPECT_EQ(of_several.front(), 256 - 40);
  EXPECT_EQ(*std::max_element(of_several.begin(), of_several.end()), 256);
}

}  // namespace
}  // namespace mmrec::models
