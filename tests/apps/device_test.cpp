// Where the programs run, as seen from a shell that shows them no GPU.
#include "tests/apps/programs.h"

namespace mmrec::test {
namespace {

/// With no GPU in sight, whatever the machine has.
Outcome run_without_gpu(const Words& arguments, const Words& environment = {}) {
  return run(words(words({"/usr/bin/env", "CUDA_VISIBLE_DEVICES="}, environment), arguments));
}

const std::vector<Words> kRuns = {
    {kGenerate, "-m", kTiny, "-p", "x", "-n", "2", "--json"},
    {kPpl, "-m", kTiny, "--format", "json", MMREC_FIXTURES "/tiny/config.json"},
    {kBench, "-m", kTiny, "--lengths", "4", "--batches", "1", "--decode", "2", "--repeat", "1", "--json"}};

TEST(Devices, AGpuThatIsInsistedOnAndNotThereIsARuntimeFault) {
  for (const Words& arguments : kRuns) {
    for (const char* device : {"cuda", "cuda:0", "cuda:7", "cuda:all"}) {
      if (arguments.front() == kBench && device == std::string("cuda:all")) continue;  // measures one
      expect_refused(run_without_gpu(words(arguments, {"--device", device})), 1, {"no usable CUDA device ("},
                     joined(arguments) + device);
    }
  }
  // Many prompts would run on all of them.
  expect_refused(run_without_gpu({kGenerate, "-m", kTiny, "--lines", "-f", kIds, "--device", "cuda:all"}), 1,
                 {"no usable CUDA device ("});
}

TEST(Devices, AutoTakesTheCpuThenAndSaysSoOnceAtMost) {
  for (const Words& arguments : kRuns) {
    const Outcome outcome = run_without_gpu(words(arguments, {"--device", "auto"}));
    EXPECT_EQ(json_of(outcome)["model"]["device"], "cpu");
    const std::string notice = "warning: no usable CUDA device (";
    const std::size_t first = outcome.err.find(notice);
    if (first != std::string::npos) {  // a build for GPUs
      EXPECT_EQ(outcome.err.find(notice, first + 1), std::string::npos) << outcome.err;
      expect_says(outcome.err, {"running on the CPU"});
    }
  }
}

TEST(Devices, HalfPrecisionNeedsAGpu) {
  expect_refused(run_without_gpu({kGenerate, "-m", kTiny, "-p", "x", "--precision", "fp16"}), 1,
                 {"mmrec-generate: --precision: found fp16 on the CPU", "no usable CUDA device ("});
  const Json json =
      json_of(run({kGenerate, "-m", kTiny, "-p", "x", "-n", "1", "--device", "cpu", "--precision", "fp32", "--json"}));
  EXPECT_EQ(json["model"]["precision"], "fp32");
  EXPECT_EQ(json["model"]["device_bytes"], 0);
  const Json rounded =
      json_of(run_without_gpu({kGenerate, "-m", kTiny, "-p", "x", "-n", "1", "--precision", "bf16", "--json"}));
  EXPECT_EQ(rounded["model"]["precision"], "bf16");
}

TEST(Devices, OnTheCpuNoCudaLibraryIsLoaded) {
  for (const Words& arguments : kRuns) {
    const Outcome outcome = run(words(words({"/usr/bin/env", "LD_DEBUG=files"}, arguments), {"--device", "cpu"}));
    EXPECT_EQ(outcome.code, 0);
    EXPECT_NE(outcome.err.find("libc.so"), std::string::npos) << "the loader says nothing";
    EXPECT_EQ(outcome.err.find("libcuda"), std::string::npos);
    EXPECT_EQ(outcome.err.find("libcublas"), std::string::npos);
  }
}

}  // namespace
}  // namespace mmrec::test
