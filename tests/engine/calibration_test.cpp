// Rounding by second order: what is summed of a text, its factor, and what that does to products, in float64.
#include "engine/quantize/calibration.h"

#include "engine/quantize/rounding.h"
#include "mmrec/errors.h"
#include "mmrec/quantize.h"
#include "models/architecture.h"
#include "tests/engine/sessions.h"
#include "tests/support/host_state.h"
#include "tests/support/model_folder.h"
#include "tests/support/quantized_reader.h"
#include "tests/support/refusal.h"

namespace mmrec::test {
namespace {

using engine::Calibration;
using engine::ColumnInputs;
using engine::Scheme;
using engine::SecondOrder;

const std::filesystem::path kTinyModel = folder_of("tiny"), kTwoExperts = folder_of("upstream/mmrec100m");

constexpr double kDamping = 0.01;

/// The largest difference between RᵀR and Σ x xᵀ with a hundredth of its mean diagonal, relative to that mean.
double factor_error(const SecondOrder& found, const std::vector<double>& sum) {
  const std::size_t n = found.order.size();
  double mean = 0.0;
  for (std::size_t i = 0; i < n; ++i) mean += sum[i * n + i] / static_cast<double>(n);
  double worst = 0.0;
  for (std::size_t i = 0; i < n; ++i) {
    for (std::size_t j = 0; j < n; ++j) {
      double product = 0.0;
      for (std::size_t k = 0; k <= std::min(i, j); ++k) {
        product += static_cast<double>(found.r[k * n + i]) * static_cast<double>(found.r[k * n + j]);
      }
      const double expected = sum[found.order[i] * n + found.order[j]] + (i == j ? kDamping * mean : 0.0);
      worst = std::max(worst, std::fabs(product - expected) / mean);
    }
  }
  return worst;
}

/// Inputs that depend on each other, of very different size.
std::vector<double> made_inputs(std::size_t tokens, std::size_t n) {
  std::mt19937 random(11);
  std::normal_distribution<double> normal;
  std::vector<double> x(tokens * n);
  for (std::size_t t = 0; t < tokens; ++t) {
    double common = normal(random);
    for (std::size_t c = 0; c < n; ++c) {
      common = 0.9 * common + 0.3 * normal(random);
      x[t * n + c] = (c % 17 == 0 ? 8.0 : 1.0) * (common + 0.2);
    }
  }
  return x;
}

std::vector<double> products(const std::vector<double>& x, std::size_t n) {
  std::vector<double> sum(n * n, 0.0);
  for (std::size_t t = 0; t < x.size(); t += n) {
    for (std::size_t i = 0; i < n; ++i) {
      for (std::size_t j = 0; j < n; ++j) sum[i * n + j] += x[t + i] * x[t + j];
    }
  }
  return sum;
}

SecondOrder second_order(const std::vector<double>& sum, std::size_t n, const std::string& name = "x") {
  kernels::ThreadPool pool(3);
  return engine::second_order(std::vector<float>(sum.begin(), sum.end()), n, kDamping, name, pool);
}

TEST(SecondOrderFactor, IsThatOfTheSortedSum) {
  constexpr std::size_t kCols = 150;  // more than two blocks of rows
  const std::vector<double> sum = products(made_inputs(400, kCols), kCols);
  const SecondOrder found = second_order(sum, kCols);
  EXPECT_LT(factor_error(found, sum), 1e-4);
  for (std::size_t i = 1; i < kCols; ++i) {
    EXPECT_LE(sum[found.order[i - 1] * (kCols + 1)], sum[found.order[i] * (kCols + 1)] * (1.0 + 1e-6));
  }
  const std::vector<double> zeros(kCols * kCols, 0.0);
  for (std::size_t i = 0; i < kCols; ++i) EXPECT_EQ(second_order(zeros, kCols).r[i * (kCols + 1)], 1.0F);
  std::vector<double> bad = zeros;
  bad[5] = std::nan("");
  expect_says(refusal<NumericError>([&] { second_order(bad, kCols, "blocks.0.W_q"); }), {"blocks.0.W_q"});
}

class Calibrated : public testing::TestWithParam<QuantizedType> {};
INSTANTIATE_TEST_SUITE_P(Types, Calibrated,
                         testing::Values(QuantizedType::kInt8, QuantizedType::kInt4, QuantizedType::kFp8),
                         [](const auto& type) { return std::string(to_string(type.param)); });

TEST_P(Calibrated, ProductsChangeLessThanByRoundingToTheNearest) {
  constexpr std::size_t kRows = 6, kCols = 128;
  const std::vector<double> x = made_inputs(400, kCols);
  const std::vector<double> sum = products(x, kCols);
  const SecondOrder inputs = second_order(sum, kCols);
  std::mt19937 random(5);
  std::normal_distribution<float> normal;
  std::vector<float> weights(kRows * kCols);
  for (float& weight : weights) weight = normal(random);
  const Scheme scheme{GetParam(), GetParam() == QuantizedType::kInt4 ? 64 : 0};
  const ColumnInputs of_all{0, &inputs};
  double errors[2] = {};
  std::vector<kernels::BFloat16> scales[2];
  for (const bool calibrated : {false, true}) {
    std::vector<std::byte> numbers(kRows * static_cast<std::size_t>(scheme.row_bytes(kCols)));
    scales[calibrated].resize(kRows * static_cast<std::size_t>(scheme.scales(kCols)));
    const engine::Squares squares = engine::round_rows(scheme, weights, kCols, {&of_all, calibrated ? 1U : 0U},
                                                       numbers.data(), scales[calibrated].data());
    EXPECT_GT(squares.error, 0.0);
    for (std::size_t r = 0; r < kRows; ++r) {
      std::vector<double> difference(kCols);
      for (std::size_t c = 0; c < kCols; ++c) {
        const std::size_t i = r * kCols + c;
        const auto byte = static_cast<unsigned>(numbers[scheme.type == QuantizedType::kInt4 ? i / 2 : i]);
        const double number = scheme.type == QuantizedType::kInt4 ? static_cast<double>(byte >> (4 * (c % 2)) & 15U) - 8
                              : scheme.type == QuantizedType::kInt8 ? static_cast<signed char>(byte)
                                                                    : e4m3(byte);
        const std::size_t group = i / (scheme.group == 0 ? kCols : static_cast<std::size_t>(scheme.group));
        difference[c] = static_cast<double>(weights[i]) -
                        number * static_cast<double>(kernels::to_float(scales[calibrated][group]));
      }
      for (std::size_t t = 0; t < x.size(); t += kCols) {
        const double error =
            std::inner_product(difference.begin(), difference.end(), x.begin() + static_cast<std::ptrdiff_t>(t), 0.0);
        errors[calibrated] += error * error;
      }
    }
  }
  for (std::size_t i = 0; i < scales[0].size(); ++i) EXPECT_EQ(scales[0][i].bits, scales[1][i].bits);
  EXPECT_LT(errors[1], 0.5 * errors[0]);
}

TEST(CalibratedColumns, ThatAreMultipliedApartAreRoundedApart) {
  constexpr std::size_t kHalf = 64, kNumbers = kHalf / 2;
  const SecondOrder moments[2] = {second_order(products(made_inputs(400, kHalf), kHalf), kHalf),
                                  second_order(std::vector<double>(kHalf * kHalf, 0.0), kHalf)};
  std::mt19937 random(5);
  std::normal_distribution<float> normal;
  std::vector<float> weights(2 * kHalf);
  for (float& weight : weights) weight = normal(random);
  const Scheme scheme{QuantizedType::kInt4, kHalf};
  const ColumnInputs parts[2] = {{0, &moments[0]}, {kHalf, &moments[1]}};
  std::vector<std::byte> whole(2 * kNumbers), alone(kNumbers);
  kernels::BFloat16 scales[2] = {}, scale = {};
  engine::round_rows(scheme, weights, 2 * kHalf, parts, whole.data(), scales);
  for (std::size_t i = 0; i < 2; ++i) {
    const ColumnInputs of_part{0, &moments[i]};
    engine::round_rows(scheme, std::span(weights).subspan(i * kHalf, kHalf), kHalf, {&of_part, 1}, alone.data(),
                       &scale);
    EXPECT_TRUE(std::equal(alone.begin(), alone.end(), whole.begin() + static_cast<std::ptrdiff_t>(i * kNumbers))) << i;
    EXPECT_EQ(scale.bits, scales[i].bits);
  }
}

/// h_{t-1} of layer 0 at each time, [T, D], as saved states have it: 0 at first.
std::vector<double> states_before(const std::filesystem::path& folder, const std::vector<int>& tokens,
                                  std::size_t dim) {
  const std::unique_ptr<models::LoadedModel> model = models::load_model(folder, {}, {});
  const models::Slots slot(model->on_cpu(), 1, {});
  std::vector<double> all(dim, 0.0);
  for (std::size_t t = 0; t + 1 < tokens.size(); ++t) {
    const models::Run run{.slot = slot.first(), .position = static_cast<std::int64_t>(t), .rows = 1};
    slot.executor()->step({&tokens[t], 1}, {&run, 1}, {});
    const models::HostState state = slot.executor()->save(slot.first(), 1, run.position + 1);
    const std::vector<float>& h = test::tensor_of(state, "h");
    all.insert(all.end(), h.begin(), h.begin() + static_cast<std::ptrdiff_t>(dim));
  }
  return all;
}

// u = rmsnorm(embedding; norm1), in float64. More tokens than one block of sums.
TEST(CalibrationOfAModel, SumsTheInputsOfEachProduct) {
  const std::vector<int> tokens = random_tokens(384, 700, 3);
  std::int64_t told = 0;
  Calibration calibration(kTinyModel, tokens, kDamping, 2, [&](std::int64_t done) { return told = done, true; });
  EXPECT_GT(told, 512);
  const Tensors tensors = tensors_of(kTinyModel);
  const RawTensor& embedding = tensors.at("embedding.weight");
  const RawTensor& norm = tensors.at("blocks.0.norm1.weight");
  const auto dim = static_cast<std::size_t>(embedding.shape[1]);
  std::vector<double> u;
  for (const int token : tokens) {
    double squares = 0.0;
    const auto row = static_cast<std::size_t>(token) * dim;
    for (std::size_t c = 0; c < dim; ++c) squares += plain(embedding, row + c) * plain(embedding, row + c);
    const double scale = 1.0 / (std::sqrt(squares / static_cast<double>(dim)) + 1e-6);
    for (std::size_t c = 0; c < dim; ++c) u.push_back(plain(norm, c) * plain(embedding, row + c) * scale);
  }
  const std::vector<ColumnInputs> found = calibration.of("blocks.0.W_q");
  ASSERT_EQ(found.size(), 1U);
  EXPECT_LT(factor_error(*found[0].moments, products(u, dim)), 1e-4);
  EXPECT_EQ(calibration.of("blocks.0.W_z").at(0).moments, found[0].moments) << "they are stacked";
  const std::vector<ColumnInputs> of_state = calibration.of("blocks.0.W_g");
  ASSERT_EQ(of_state.size(), 1U);
  EXPECT_LT(factor_error(*of_state[0].moments, products(states_before(kTinyModel, tokens, dim), dim)), 1e-4);
  const std::vector<ColumnInputs> cut = calibration.of("blocks.0.mdi.W_g");  // z in its first half, h in the other
  ASSERT_EQ(cut.size(), 2U);
  EXPECT_EQ(cut[0].first, 0U);
  EXPECT_EQ(cut[0].moments->order, calibration.of("blocks.0.mdi.W_gamma.0").at(0).moments->order);
  EXPECT_EQ(cut[1].first, dim);
  EXPECT_EQ(cut[1].moments, of_state[0].moments);
  EXPECT_EQ(calibration.of("blocks.1.ffn.3").at(0).moments->order.size(), 64U);
  for (const char* name : {"multi_mem_attention.W_o", "mdi.W_gamma.2", "mdi.W_context.0", "ffn.0"}) {
    EXPECT_EQ(calibration.of("blocks.1." + std::string(name)).size(), 1U) << name;
  }
  for (const char* name : {"embedding", "norm", "other"}) EXPECT_TRUE(calibration.of(name).empty()) << name;
}

TEST(CalibrationOfAModel, ThreadsChangeNoByteAndExpertsAreSummedApart) {
  const std::vector<int> tokens = random_tokens(112, 600, 3);
  const TempFolder out;
  std::string files[3];
  for (int i = 0; i < 3; ++i) {
    const std::filesystem::path to = out / std::to_string(i);
    quantize_model(kTwoExperts, to, {.threads = 1 + 3 * i, .calibration = i == 2 ? std::vector<int>() : tokens});
    files[i] = read_file(to / "model.safetensors");
  }
  EXPECT_TRUE(files[0] == files[1]);
  EXPECT_FALSE(files[0] == files[2]);
  Calibration calibration(kTwoExperts, tokens, kDamping, 4, [](std::int64_t) { return true; });
  EXPECT_NE(calibration.of("code_expert.blocks.1.W_k").at(0).moments,
            calibration.of("text_expert.blocks.1.W_k").at(0).moments);
}

TEST(CalibrationOfAModel, RefusesIdsAndEndsWhenCancelled) {
  const TempFolder out;
  expect_says(refusal([&] {
                quantize_model(kTinyModel, out / "q", {.calibration = {1, 384}});
              }),
              {"calibration: token 1"});
  const std::vector<int> tokens = random_tokens(384, 5000, 3);
  std::int64_t last = 0;
  const QuantizedModel model = quantize_model(
      kTinyModel, out / "q", {.calibration = tokens, .on_calibration = [&](std::int64_t done, std::int64_t total) {
                                EXPECT_EQ(total, 5000);
                                last = done;
                                return done < 1000;
                              }});
  EXPECT_FALSE(model.complete);
  EXPECT_LT(last, 5000);
  EXPECT_TRUE(std::filesystem::is_empty(out.path()));
}

}  // namespace
}  // namespace mmrec::test
