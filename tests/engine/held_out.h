// Log-probs of the code that trained the bundled model: 4,096 held-out tokens (BOS and the beginning of WikiText-2's
// test split) as weights/train.py computes them from the same bf16 weights in fp32.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <filesystem>
#include <vector>

#include "tests/engine/sessions.h"
#include "tests/support/safetensors_reader.h"

namespace mmrec::test {

/// Each log-prob within `bound`, and their sum within `nats`.
inline void expect_held_out_logprobs(Session& session, float bound, double nats) {
  const SafetensorsReader reference(std::filesystem::path(MMREC_FIXTURES) / "mmrec-12m" / "heldout.safetensors");
  const std::vector<float>& expected = reference.at("logprobs").values;
  const std::vector<float> logprobs = logprobs_of(session, reference.at("input_ids").integers);
  ASSERT_EQ(expected.size(), 4096U);
  ASSERT_EQ(logprobs.size(), 4097U);
  double sum = 0.0, expected_sum = 0.0;
  for (std::size_t t = 0; t < expected.size(); ++t) {
    ASSERT_LE(std::abs(logprobs[t + 1] - expected[t]), bound) << "token " << t + 1;
    sum += static_cast<double>(logprobs[t + 1]);
    expected_sum += static_cast<double>(expected[t]);
  }
  EXPECT_NEAR(sum, expected_sum, nats);
}

}  // namespace mmrec::test
