// The CUDA executor against the references, in each precision. fp32 (no TF32) keeps the CPU's bounds. In 16 bits
// weights and what enters a product are rounded, so the bounds are shares of the fixture's largest logit: a float64
// rendering of the same roundings came within 3.3 % in bf16 and 0.4 % in fp16 of the references, on every fixture.
// mmrec-jax likewise, against its public code. And every path of a device follows the reference in every term: in 16
// bits, where all of them exist, and by rows in fp32.
#include "tests/models/parity.h"

#include "models/mmrec/mmrec.h"
#include "tests/models/jax_parity.h"
#include "tests/models/terms.h"
#include "tests/ops/op_test.h"
#include "tests/support/model_folder.h"

namespace mmrec::models {
namespace {

template <Precision precision>
std::shared_ptr<Executor> make(const LoadedModel& model) {
  return model.on_cuda(precision, 0).executor;
}

std::string unusable() {
  const std::string reason = cuda_unusable_reason();
  return reason.empty() ? "" : "no usable CUDA device: " + reason;
}

template <Precision precision>
std::vector<ParityCase> cases(float bound) {
  std::vector<ParityCase> all;
  std::vector<ParityCase> fixtures = with_experts({.fixture = "", .make = make<precision>});
  for (const char* fixture : kParityFixtures) fixtures.push_back({.fixture = fixture, .make = make<precision>});
  for (ParityCase& c : fixtures) {
    c.unusable = unusable;
    c.may_fall_back = true;
    if (type_of(precision) != kernels::DType::kF32) {
      c.logit_bound = c.logprob_bound = bound;
      c.relative = true;
      c.sweep_tolerance = 0.0F;  // the precision's own
    }
    all.push_back(c);
  }
  // Where launches are dear: two stacks in all precisions, and with several slots and a ring that wraps in two.
  if (kernels::test::small_sizes()) {
    const bool has_both = precision == Precision::kF32 || precision == Precision::kBF16;
    std::erase_if(all, [&](const ParityCase& c) {
      const std::string_view fixture = c.fixture;
      return fixture != "upstream/mmrec100m" && !(has_both && fixture == "oracle/slots");
    });
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(CudaF32, Parity, testing::ValuesIn(cases<Precision::kF32>(0.0F)), parity_name);
INSTANTIATE_TEST_SUITE_P(CudaF32Fma, Parity, testing::ValuesIn(cases<Precision::kF32Fma>(0.0F)), parity_name);
INSTANTIATE_TEST_SUITE_P(CudaBF16, Parity, testing::ValuesIn(cases<Precision::kBF16>(0.06F)), parity_name);
INSTANTIATE_TEST_SUITE_P(CudaF16, Parity, testing::ValuesIn(cases<Precision::kF16>(0.01F)), parity_name);

template <Precision precision>
std::shared_ptr<Executor> make_jax(const mmrec_jax::Config& config,
                                   std::shared_ptr<const mmrec_jax::HostWeights> weights) {
  return make_cuda_executor(config, *weights, precision).executor;
}

INSTANTIATE_TEST_SUITE_P(
    Cuda, JaxParity,
    testing::Values(JaxParityCase{"fp32", make_jax<Precision::kF32>, unusable},
                    JaxParityCase{"bf16", make_jax<Precision::kBF16>, unusable, true, 0.06F, 0.06F, 0.06F},
                    JaxParityCase{"fp16", make_jax<Precision::kF16>, unusable, true, 0.01F, 0.01F, 0.01F}),
    jax_parity_name);

INSTANTIATE_TEST_SUITE_P(Cuda, Terms, testing::ValuesIn(terms_models()), terms_name);
// More sequences than a product of few rows takes, behind some segments; where launches are dear, of few terms.
const int kOthers = kernels::test::small_sizes() ? 8 : 11;
const std::int64_t kTermTokens = kernels::test::small_sizes() ? 18 : 42;
const std::size_t kMostTerms = kernels::test::small_sizes() ? 2 : 0;

// A whole step by one kernel (for one sequence and for a few), steps by rows (side by side and apart), packed runs, and
// sweeps of runs that are not packed.
TEST_P(Terms, EveryPathFollowsTheReference) {
  if (!unusable().empty()) GTEST_SKIP() << unusable();
  expect_all_follow(make<Precision::kF16>,
                    {steps(0), steps(3, false, Path::kWholeStep), steps(kOthers, false, Path::kRows),
                     steps(kOthers, true, Path::kRows), prefill(PrefillMode::kSweeps, 3, Path::kPacked),
                     prefill(PrefillMode::kSweeps, 3, Path::kReference)},
                    kTermTokens, 0.008, kMostTerms);
}
// Steps by rows, beside many and beside few sequences.
class TermsByRows : public Terms {
 protected:
  void expect_steps_follow(Make make, std::int64_t count, double bound, std::size_t most) {
    if (!unusable().empty()) GTEST_SKIP() << unusable();
    if (std::string_view(GetParam().architecture) == "mmrec-jax") GTEST_SKIP() << "its steps go by rows in JaxParity";
    expect_all_follow(make,
                      {steps(kOthers, false, Path::kRows), steps(kOthers, true, Path::kRows),
                       steps(3, false, Path::kRows), steps(3, true, Path::kRows)},
                      count, bound, most);
  }
};
INSTANTIATE_TEST_SUITE_P(Cuda, TermsByRows, testing::ValuesIn(terms_models()), terms_name);
TEST_P(TermsByRows, FollowTheReferenceInFp32) {
  expect_steps_follow(make<Precision::kF32>, kTermTokens, 1e-4, kMostTerms);
}
// Of more rows these pass norms on, as those of few rows in fp32 do. BFloat16 rounds as much as most terms move: two
// terms, and no more tokens than end three segments, as further ones make less of mdi_mix.
TEST_P(TermsByRows, FollowTheReferenceInBF16) { expect_steps_follow(make<Precision::kBF16>, 18, 0.05, 1); }

TEST(CudaWeights, PlainFp32HasNoParts) {
  if (!unusable().empty()) GTEST_SKIP() << unusable();
  const std::filesystem::path folder = std::filesystem::path(MMREC_FIXTURES) / "oracle/slots";
  const Config config = test::config_of<Config>(folder);
  const HostWeights host = load_weights(Checkpoint::open(folder), config);
  const CudaModel plain = make_cuda_executor(config, host, Precision::kF32Fma);
  const CudaModel parts = make_cuda_executor(config, host, Precision::kF32);
  EXPECT_EQ(plain.precision, Precision::kF32Fma);
  EXPECT_EQ(parts.precision, Precision::kF32);
  EXPECT_EQ(parts.bytes > plain.bytes, kernels::Cuda(0).compute_capability() == 90);
}

TEST(CudaWeights, KAutoTakesTheStoredTypeWhereAllAgree) {
  if (!unusable().empty()) GTEST_SKIP() << unusable();
  for (const auto& [name, expected] :
       {std::pair{"oracle/dpg_bf16", Precision::kBF16}, std::pair{"oracle/hem_f16", Precision::kF16},
        std::pair{"oracle/slots", Precision::kF32}}) {
    const std::filesystem::path folder = std::filesystem::path(MMREC_FIXTURES) / name;
    const Config config = test::config_of<Config>(folder);
    const HostWeights host = load_weights(Checkpoint::open(folder), config);
    const CudaModel device = make_cuda_executor(config, host, Precision::kAuto);
    EXPECT_EQ(device.precision, expected) << name;
    EXPECT_GE(device.bytes, host.parameters * (expected == Precision::kF32 ? 4U : 2U)) << name;
  }
}

}  // namespace
}  // namespace mmrec::models
