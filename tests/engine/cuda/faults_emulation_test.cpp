// Faults of the device, one at a time: a run that loads, prefills, steps, draws, scores and saves is done again and
// again with one more of its calls to the CUDA runtime failing. It ends with a documented exception, gives back all
// that it has taken of the device, and leaves other sessions of the model and the process as they were. After an error
// that destroys the context every call names it, and nothing is left either.
//
// Some calls of each kind of fault are tried, spread over all of them; MMREC_FAULTS=all tries each.

#include <iostream>

#include "faults.h"
#include "mmrec/errors.h"
#include "mmrec/model.h"
#include "mmrec/scorer.h"
#include "tests/support/model_folder.h"

namespace mmrec::test {
namespace {

using cuda_emulation::begin_faults;
using cuda_emulation::end_faults;
using cuda_emulation::live_objects;

struct Case {
  const char* folder;
  Precision precision;
  friend void PrintTo(const Case& c, std::ostream* out) { *out << c.folder; }
};

struct Results {
  std::vector<int> drawn;
  std::vector<float> logprobs;
  std::vector<std::byte> state;
  bool operator==(const Results&) const = default;
};

std::vector<int> some_tokens() { return {1, 7, 14, 21, 28, 35, 42, 49, 56, 63, 6, 13, 20, 27, 34, 41, 48, 55}; }

Results use(Session& session) {
  Results results;
  session.prefill(some_tokens());
  Sample sample;
  for (std::uint64_t step = 0; step < 4; ++step) {  // by ops, recorded, replayed
    session.draw({.seed = 3}, step, 0, {&sample, 1});
    results.drawn.push_back(sample.token);
    session.step({&sample.token, 1});
  }
  std::vector<float> logprobs(some_tokens().size());
  session.score(some_tokens(), logprobs);
  results.logprobs = logprobs;
  results.state = session.clone().save();
  return results;
}

class CudaFaults : public testing::TestWithParam<Case> {
 protected:
  static Model load() {
    return Model::load(folder_of(GetParam().folder),
                       {.device = Device::kCuda, .precision = GetParam().precision, .threads = 1});
  }
  static Results run() {
    const Model model = load();
    Session session = model.new_session();
    return use(session);
  }
  static std::int64_t stride(std::int64_t calls, std::int64_t most) {
    const char* wish = std::getenv("MMREC_FAULTS");
    return wish != nullptr && std::string_view(wish) == "all" ? 1 : std::max<std::int64_t>(1, calls / most);
  }

  /// What is wrong with how a run ended; "" where it is as documented.
  template <class Run>
  static std::string fault_of(cudaError_t code, const Run& attempt) {
    try {
      attempt();
      return "";  // a call whose failure is no matter
    } catch (const std::bad_alloc&) {
      return code == cudaErrorMemoryAllocation ? "" : "bad_alloc";
    } catch (const DeviceUnavailable&) {
      return "";
    } catch (const std::system_error& error) {
      if (std::string_view(error.code().category().name()) != "cuda") return error.what();
      return error.code().value() == code ? "" : std::string("another code: ") + error.what();
    } catch (const std::exception& error) {
      return std::string("another exception: ") + error.what();
    }
  }

  /// The calls of an attempt in which none fails.
  template <class Run>
  static std::int64_t calls_of(const Run& attempt) {
    begin_faults(0);
    attempt();
    return end_faults();
  }
  /// Makes one call of an attempt fail, which then ends as documented.
  template <class Run>
  static void expect_documented(std::int64_t nth, std::int64_t calls, cudaError_t code, const Run& attempt) {
    SCOPED_TRACE(testing::Message() << "call " << nth << " of " << calls << " fails with " << cudaGetErrorName(code));
    begin_faults(nth, code);
    const std::string fault = fault_of(code, attempt);
    end_faults();
    EXPECT_EQ(fault, "");
  }

  void try_runs(cudaError_t code, std::int64_t most) {
    const Results expected = run();
    const std::int64_t before = live_objects();
    const std::int64_t calls = calls_of(run);
    ASSERT_GT(calls, 50);
    const std::int64_t apart = stride(calls, most);
    constexpr std::int64_t kFirst = 8;  // which ask what the device is, and are few among the others
    std::int64_t tried = 0;
    for (std::int64_t nth = 1; nth <= calls && !HasFailure(); nth += nth < kFirst ? 1 : apart, ++tried) {
      expect_documented(nth, calls, code, [&] { EXPECT_TRUE(run() == expected) << "other results"; });
      EXPECT_EQ(live_objects(), before) << "a leak of the device's, call " << nth;
    }
    EXPECT_TRUE(run() == expected);
    std::cout << "  " << tried << " of " << calls << " calls failed in turn\n";
  }
};

TEST_P(CudaFaults, EveryCall) { try_runs(cudaErrorUnknown, 12); }
TEST_P(CudaFaults, EveryCallForWantOfMemory) { try_runs(cudaErrorMemoryAllocation, 8); }

TEST_P(CudaFaults, AutoTakesTheCpuWhateverFailsAsAModelIsLoaded) {
  const auto load_auto = [](std::vector<std::string>& warnings, Device device) {
    LoadOptions options{.device = device};
    options.on_warning = [&](std::string_view line) {  // but for those of a configuration
      if (line.find("running on the CPU") != std::string_view::npos) warnings.emplace_back(line);
    };
    return Model::load(folder_of(GetParam().folder), options).info().device;
  };
  std::vector<std::string> warnings;
  begin_faults(0);
  EXPECT_EQ(load_auto(warnings, Device::kAuto), Device::kCuda);
  const std::int64_t calls = end_faults();
  EXPECT_TRUE(warnings.empty());
  bool had_no_context = false;
  for (const cudaError_t code : {cudaErrorMemoryAllocation, cudaErrorUnknown}) {
    for (std::int64_t nth = 1; nth <= calls; nth += nth < 16 ? 1 : stride(calls, 8)) {
      SCOPED_TRACE(testing::Message() << "call " << nth << " of " << calls << " fails with " << cudaGetErrorName(code));
      warnings.clear();
      begin_faults(nth, code);
      EXPECT_NO_THROW({
        const bool is_on_gpu = load_auto(warnings, Device::kAuto) == Device::kCuda;
        EXPECT_TRUE(!is_on_gpu || warnings.empty());
      });
      end_faults();
      EXPECT_LE(warnings.size(), 1U);
      if (warnings.empty() || warnings[0].find("no context") == std::string::npos) continue;
      had_no_context = true;
      EXPECT_EQ(warnings[0], std::string("GPU 0 gives no context (cudaSetDevice): ") + cudaGetErrorString(code) +
                                 ": running on the CPU");
      expect_documented(nth, calls, code, [&] { (void)load_auto(warnings, Device::kCuda); });
      EXPECT_EQ(warnings.size(), 1U) << "who insists is told by the error alone";
    }
  }
  EXPECT_TRUE(had_no_context);
}

TEST_P(CudaFaults, OtherSessionsGoOn) {
  const Model model = load();
  Session other = model.new_session();
  const Results expected = use(other);
  const auto attempt = [&] {
    Session session = model.new_session();
    EXPECT_TRUE(use(session) == expected) << "other results";
  };
  const std::int64_t calls = calls_of(attempt);
  for (std::int64_t nth = 1; nth <= calls && !HasFailure(); nth += stride(calls, 4)) {
    expect_documented(nth, calls, cudaErrorUnknown, attempt);
    other.reset();
    EXPECT_TRUE(use(other) == expected) << "another session's results, call " << nth;
  }
}

// What a model takes when it is first used is taken anew where that has failed half way.
TEST_P(CudaFaults, TheModelGoesOn) {
  const auto use_anew = [](const Model& model) {
    Session session = model.new_session();
    return use(session);
  };
  const Results expected = run();
  const Model counted = load();
  const std::int64_t calls = calls_of([&] { use_anew(counted); });
  // The first ones allocate; a step's are behind them.
  constexpr std::int64_t kFirst = 20;
  for (std::int64_t nth = 1; nth <= calls && !HasFailure();
       nth += nth < kFirst ? stride(kFirst, 5) : stride(calls, 3)) {
    const Model model = load();
    expect_documented(nth, calls, cudaErrorUnknown, [&] { use_anew(model); });
    EXPECT_TRUE(use_anew(model) == expected) << "other results, call " << nth;
  }
}

/// In a process of its own each, as a lost device stays lost.
TEST_P(CudaFaults, ALostDeviceIsNamedByEveryLaterCall) {
  GTEST_FLAG_SET(death_test_style, "fast");
  const std::int64_t calls = calls_of(run);
  const auto lose = [](std::int64_t nth) {
    const std::int64_t before = live_objects();
    begin_faults(nth, cudaErrorIllegalAddress);
    const auto is_lost = [](const auto& call) {
      try {
        call();
      } catch (const DeviceUnavailable& error) {
        return std::string_view(error.what()).find("cannot be used since an earlier error") != std::string_view::npos;
      } catch (const std::system_error& error) {
        return error.code() == std::errc::no_such_device &&
               std::string_view(error.what()).find("cannot be used since an earlier error") != std::string_view::npos;
      } catch (const std::exception& error) {
        std::cerr << error.what() << "\n";
      }
      return false;
    };
    bool failed = false, lost = true;
    try {
      const Model model = load();
      Session session = model.new_session();
      try {
        use(session);
      } catch (const std::system_error& error) {
        failed = error.code() == std::errc::no_such_device;
        lost = is_lost([&] { session.prefill(some_tokens()); }) && is_lost([&] { model.new_session(); });
      }
    } catch (const std::exception&) {
      failed = true;
    }
    // The first may have been about a question that has no bearing on the device.
    const bool ok = !failed || (lost && is_lost([] { load(); }) && live_objects() == before);
    std::cerr << (ok ? "as documented" : "not named, or a leak") << "\n";
    std::_Exit(ok ? 0 : 1);
  };
  for (std::int64_t nth = 1; nth <= calls && !HasFailure(); nth += stride(calls, 8)) {
    EXPECT_EXIT(lose(nth), testing::ExitedWithCode(0), "as documented") << "call " << nth << " of " << calls;
  }
}

INSTANTIATE_TEST_SUITE_P(Emulated, CudaFaults,
                         testing::Values(Case{"tiny", Precision::kF32}, Case{"upstream/mmrec100m", Precision::kBF16},
                                         Case{"upstream/jax", Precision::kF32}),
                         [](const auto& info) {
                           const std::string name = info.param.folder;
                           return name.substr(name.find('/') + 1);
                         });

}  // namespace
}  // namespace mmrec::test
