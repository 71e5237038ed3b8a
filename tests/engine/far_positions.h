// A sequence far along its text: where the ring of memory stands follows from the position alone, so that a state moved
// on by whole turns of the ring goes on as before, across 2^31 and 2^32 tokens too: step by step to the bit, and in a
// prefill within `bound`, as a device cuts it where the position says.
#pragma once

#include "mmrec/model.h"
#include "tests/engine/sessions.h"
#include "tests/support/sealed_bytes.h"

namespace mmrec::test {

inline constexpr std::array<int, 8> kSteps = {3, 1, 4, 1, 5, 9, 2, 6};

/// A saved state of architecture mmrec said to be at another position: see docs/file-formats.md.
inline std::vector<std::byte> moved_to(std::vector<std::byte> state, std::int64_t position) {
  constexpr std::size_t kPosition = 80;
  std::memcpy(state.data() + kPosition, &position, sizeof position);
  return sealed(state);
}

inline std::vector<float> go_on(Session& session, const std::vector<int>& prompt) {
  std::vector<float> all;
  const auto keep = [&] {
    const auto logits = session.logits();
    all.insert(all.end(), logits.begin(), logits.end());
  };
  for (const int token : kSteps) {
    session.step({&token, 1});
    keep();
  }
  session.prefill(prompt);
  keep();
  return all;
}

inline void expect_far_positions_to_go_on(const Model& model, float bound) {
  const std::int64_t turn = model.info().memory_segment * model.info().memory_slots;
  std::vector<int> prompt;
  for (std::int64_t i = 0; i < turn + turn / 2; ++i) prompt.push_back(static_cast<int>(1 + i * i % 90));
  Session session = begun(model, prompt);
  const std::vector<std::byte> state = session.save();
  const std::int64_t position = session.position();
  const std::vector<float> expected = go_on(session, prompt);
  for (const std::int64_t beyond : {std::int64_t{1} << 31, std::int64_t{1} << 32, std::int64_t{1} << 53}) {
    const std::int64_t far =
        position + (beyond - std::ssize(kSteps) / 2 - position) / turn * turn;  // within a turn of what it is to pass
    session.restore(moved_to(state, far));
    EXPECT_EQ(session.position(), far);
    const std::vector<float> got = go_on(session, prompt);
    ASSERT_EQ(got.size(), expected.size());
    const std::size_t stepped = got.size() / (kSteps.size() + 1) * kSteps.size();
    for (std::size_t i = 0; i < got.size(); ++i) {
      ASSERT_NEAR(got[i], expected[i], i < stepped ? 0.0F : bound) << "entry " << i << ", from " << far;
    }
    EXPECT_GT(session.position(), beyond);
    EXPECT_EQ(session.position(), far + std::ssize(kSteps) + static_cast<std::int64_t>(prompt.size()));
  }
}

}  // namespace mmrec::test
