// What the tests of ops stand on: loops over host threads, random numbers that do not depend on them, and checks that
// see what they are for.
#include <gtest/gtest-spi.h>

#include "tests/ops/op_test.h"

namespace mmrec::kernels::test {
namespace {

/// Long enough that other threads come to help.
void take_time() { std::this_thread::sleep_for(std::chrono::microseconds(50)); }

TEST(HostThreads, EveryIndexIsMetOnce) {
  for (const std::int64_t count : {0, 1, 2, 63, 1000}) {
    std::vector<int> met(static_cast<std::size_t>(count), 0);
    parallel_for(count, [&](std::int64_t i) {
      take_time();
      ++met[static_cast<std::size_t>(i)];
    });
    EXPECT_EQ(met, std::vector<int>(met.size(), 1));
  }
}

TEST(HostThreads, WhatAThreadThrowsReachesTheCaller) {
  for (const std::int64_t bad : {0, 700}) {
    EXPECT_EQ(refusal<std::runtime_error>([&] {
                parallel_for(1000, [&](std::int64_t i) {
                  take_time();
                  if (i == bad) throw std::runtime_error("here");
                });
              }),
              "here");
  }
  bool other_ran = false;
  EXPECT_EQ(refusal<std::runtime_error>([&] {
              mmrec::test::run_together({[] { throw std::runtime_error("there"); }, [&] { other_ran = true; }});
            }),
            "there");
  EXPECT_TRUE(other_ran);
}

TEST(HostThreads, ResultsAreInTheOrderOfTheirIndex) {
  const auto square = [](std::int64_t i) {
    take_time();
    return static_cast<double>(i * i);
  };
  const std::vector<double> squares = parallel_map(300, square);
  for (std::int64_t i = 0; i < 300; ++i) ASSERT_EQ(squares[static_cast<std::size_t>(i)], square(i));
  EXPECT_EQ(parallel_max(300, square), 299.0 * 299.0);
  EXPECT_EQ(parallel_max(300, [](std::int64_t i) { return i == 70 ? NAN : 1.0; }), INFINITY);
  const auto below = [](std::int64_t bound) {
    return [=](std::int64_t i) {
      take_time();
      return i < bound;
    };
  };
  EXPECT_EQ(first_failure(300, below(299)), 299);
  EXPECT_EQ(first_failure(300, below(3)), 3);
  EXPECT_EQ(first_failure(300, below(300)), 300);
}

TEST(HostThreads, RandomNumbersFollowFromTheSeedAndTheIndex) {
  const auto all = random_normal<float>(100'000, 0.0, 1.0, 5);
  EXPECT_EQ(random_normal<float>(100'000, 0.0, 1.0, 5), all);
  EXPECT_NE(random_normal<float>(100'000, 0.0, 1.0, 6), all);
  double sum = 0.0, squares = 0.0;
  int beyond_two = 0;
  for (const float x : all) {
    sum += static_cast<double>(x);
    squares += static_cast<double>(x) * static_cast<double>(x);
    beyond_two += std::abs(x) > 2.0F ? 1 : 0;
  }
  EXPECT_NEAR(sum / 1e5, 0.0, 0.02);
  EXPECT_NEAR(squares / 1e5, 1.0, 0.03);
  EXPECT_NEAR(beyond_two / 1e5, 0.0455, 0.005);
  std::array<int, 10> tenths{};
  for (const float x : random_uniform<float>(100'000, 0.0, 10.0)) ++tenths[static_cast<std::size_t>(x) % 10];
  for (const int count : tenths) EXPECT_NEAR(count, 10'000, 600);
}

#if !defined(MMREC_TEST_CUDA)

class OpTestTest : public OpTest {};

TEST_F(OpTestTest, RunsByEveryInstructionSetAndSeesBitsThatDependOnThreads) {
  std::vector<std::string> runs;
  const auto record = [&](Cpu& cpu) {
    runs.push_back(std::string(cpu_instruction_set()) + " " + std::to_string(cpu.threads()));
    const HostBuffer<float> same = upload(cpu, std::vector<float>{1.0F});
    download(cpu, same);
  };
  on_every(record);
  EXPECT_EQ(runs.size(), supported_simd_kernels().size() + 2);
  for (const SimdKernels* table : supported_simd_kernels()) {
    EXPECT_EQ(std::count(runs.begin(), runs.end(), std::string(table->name) + " 2"), 1) << table->name;
  }
  const auto depends = [&](Cpu& cpu) {
    const HostBuffer<float> other = upload(cpu, std::vector<float>{cpu.threads() == 5 ? 2.0F : 1.0F});
    download(cpu, other);
  };
  EXPECT_NONFATAL_FAILURE(on_every(depends), "other bits than with 2 threads");
  EXPECT_EQ(cpu_instruction_set(), supported_simd_kernels().front()->name);
}

TEST_F(OpTestTest, SeesWhatIsWrittenBesideAMatrixAndWhatIsNotWritten) {
  Matrix<float> matrix(on(), 3, 5, kUnaligned);
  EXPECT_FALSE(all_round_to(matrix.download(), std::vector<double>(15, 0.0), [](std::size_t) { return 1.0; }));
  fill_zero(on(), matrix.view());
  EXPECT_TRUE(all_round_to(matrix.download(), std::vector<double>(15, 0.0), [](std::size_t) { return 0.0; }));
  matrix.data()[5] = 0.0F;
  EXPECT_NONFATAL_FAILURE(matrix.download(), "written outside of the matrix");
}

#endif

}  // namespace
}  // namespace mmrec::kernels::test
