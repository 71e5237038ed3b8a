// A process that is forked off one which has loaded a model, and computed: it computes the same, with threads of its
// own.
#include <sys/wait.h>
#include <unistd.h>

#include "mmrec/model.h"
#include "mmrec/scorer.h"
#include "tests/engine/sessions.h"

#if !defined(__SANITIZE_THREAD__)  // which starts no threads after a fork

namespace mmrec::test {
namespace {

class Fork : public testing::TestWithParam<std::string> {};

TEST_P(Fork, TheChildComputesWhatTheParentDoes) {
  const Model model = Model::load(folder_of(GetParam()), {.device = Device::kCpu, .threads = 3});
  const std::vector<int> tokens = random_tokens(model, 40, 1);
  Session session = begun(model, tokens);
  const std::vector<std::byte> state = session.save();
  const auto go_on = [&] {
    session.restore(state);
    session.prefill(tokens);
    session.step(std::vector{7});
    return copy(session.logits());
  };
  const auto score = [&] { return Scorer(model).score(std::vector(5, tokens)).front().nll; };
  const std::vector<float> expected = go_on();
  const double nll = score();

  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    alarm(120);
    bool is_equal = go_on() == expected && score() == nll;
    session = model.new_session();
    session.prefill(tokens);
    is_equal = is_equal && session.save() == state;
    _exit(is_equal ? 0 : 1);
  }
  int status = 1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(go_on(), expected);
}

INSTANTIATE_TEST_SUITE_P(Models, Fork, testing::Values("tiny", "upstream/hem", "upstream/mmrec100m", "upstream/jax"),
                         [](const auto& tested) {
                           std::string name = tested.param;
                           std::replace(name.begin(), name.end(), '/', '_');
                           return name;
                         });

}  // namespace
}  // namespace mmrec::test

#endif
