// Log-probs of the code that trained the bundled model: 4,096 held-out tokens (BOS and the beginning of WikiText-2's
// test split) as weights/train.py computes them from the same bf16 weights in fp32.
#pragma once

#include "tests/engine/sessions.h"
#include "tests/support/compare.h"
#include "tests/support/safetensors_reader.h"

namespace mmrec::test {

/// Each log-prob within `bound`, and their sum within `nats`.
inline void expect_held_out_logprobs(Session& session, float bound, double nats) {
  const SafetensorsReader reference(std::string(MMREC_FIXTURES "/mmrec-12m/heldout.safetensors"));
  const std::vector<float>& expected = reference.at("logprobs").values;
  const std::vector<float> logprobs = logprobs_of(session, reference.at("input_ids").integers);
  ASSERT_EQ(expected.size(), 4096U);
  ASSERT_EQ(logprobs.size(), 4097U);
  EXPECT_LE(largest_difference(std::span(logprobs).subspan(1), expected), bound);
  EXPECT_NEAR(std::accumulate(logprobs.begin(), logprobs.end(), 0.0),
              std::accumulate(expected.begin(), expected.end(), 0.0), nats);
}

}  // namespace mmrec::test
