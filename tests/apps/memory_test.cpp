// Little address space: each run works or says that it cannot, at once, whatever the matrix library needs.
#include <csignal>

#include "apps/common/cli.h"
#include "tests/apps/programs.h"

namespace mmrec::test {
namespace {

TEST(Memory, AnyLimitOfAddressSpaceEndsARunWithAResultOrAReason) {
  SKIP_UNDER_SANITIZERS("a sanitizer's shadow memory does not fit under the limit");
  const TempFolder folder;
  write_file(folder / "text", repeated("the small river runs past the old mill and never looks back ", 700));
  bool worked = false;
  for (const char* threads : {"1", "2", "8"}) {
    for (int megabytes = 60; megabytes <= 620; megabytes += megabytes < 260 ? 10 : 60) {
      // No program yet: its libraries are not loaded, or could not set up what they have (CUDA's its kernels).
      const Outcome begun = run(limited(megabytes * 1000, {kPpl, "--version"}));
      if (begun.signal != 0 || begun.err.find("error while loading shared libraries") != std::string::npos) continue;
      const Outcome outcome = run(limited(megabytes * 1000, {kPpl, "-m", MMREC_WEIGHTS "/mmrec-12m", folder / "text",
                                                             "--device", "cpu", "--threads", threads}));
      EXPECT_EQ(outcome.signal, 0) << megabytes << " MB, " << threads << " threads\n" << outcome.err;
      EXPECT_TRUE(outcome.code == 0 || outcome.code == 4) << megabytes << " MB, code " << outcome.code << outcome.err;
      EXPECT_NE(outcome.err, "") << megabytes;
      worked = worked || outcome.code == 0;
    }
  }
  EXPECT_TRUE(worked);
}

TEST(Memory, ThatRanOutIsSavedByAnOptionThatTheProgramHas) {
  SKIP_UNDER_SANITIZERS("a sanitizer's shadow memory does not fit under the limit");
  for (const auto& [line, says] : {std::pair{Words{kGenerate, "-p", "The"}, "Try: a smaller --slots, or a machine"},
                                   {Words{kPpl, kIds, "--ids"}, "Try: a smaller --batch, or a machine"}}) {
    Outcome outcome;
    for (int megabytes = 60; megabytes < 260 && outcome.code != 4; megabytes += 10) {
      outcome = run(limited(megabytes * 1000, words(line, {"-m", MMREC_WEIGHTS "/mmrec-12m", "--device", "cpu"})));
    }
    expect_refused(outcome, 4, {says});
  }
}

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
volatile std::size_t more_than_there_is = std::size_t{1} << 60;
char* volatile taken = nullptr;

/// Inlined into a function that must not throw: there GCC cleans up and ends the process with no word of the exception.
template <class Fault>
[[gnu::always_inline]] inline int clean_up_after(Fault fault) {
  const std::string cleaned_up(100, 'x');
  fault();
  return static_cast<int>(cleaned_up.size());
}
int take_more() noexcept {
  return clean_up_after([] { taken = new char[more_than_there_is]; });
}
int fail() noexcept {
  return clean_up_after([] { throw std::runtime_error("a fault of the program's own"); });
}

TEST(Memory, WantOfItWhereNothingCanBeThrownIsExitFour) {
  GTEST_FLAG_SET(death_test_style, "fast");
  EXPECT_EXIT(std::_Exit(apps::run_program("mmrec-test", take_more)), testing::ExitedWithCode(4),
              "^mmrec-test: out of memory\n$");
}

TEST(Memory, AnotherFaultWhereNothingCanBeThrownIsASignal) {
  GTEST_FLAG_SET(death_test_style, "fast");
  EXPECT_EXIT(std::_Exit(apps::run_program("mmrec-test", fail)), testing::KilledBySignal(SIGABRT), "^$");
}
#endif

}  // namespace
}  // namespace mmrec::test
