// What the tests of ops stand on: loops over host threads, random numbers that do not depend on them, and checks that
// see what they are for.
#include <gtest/gtest-spi.h>

#include "tests/ops/op_test.h"

namespace mmrec::kernels::test {
namespace {

/// Long enough that other threads come to help.
void take_time() { std::this_thread::sleep_for(std::chrono::microseconds(50)); }

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
