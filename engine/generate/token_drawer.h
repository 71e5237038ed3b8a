// The tokens of one sequence, drawn one after another: the host's loop around a session.
//
// Where the executor draws by itself, the next token is under way while the caller looks at this one. If the caller
// then wants no more, one step too many has been taken: the state is brought back from a copy of it that is made every
// kInterval tokens, and the steps since then are taken again, which gives the same bits. So nothing of it shows.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "engine/session/access.h"
#include "mmrec/sampler.h"
#include "mmrec/session.h"
#include "models/runtime/executor.h"

namespace mmrec::engine {

class TokenDrawer {
 public:
  /// At most `most` tokens will be drawn; `recent` are those that count for the repetition penalty. `keeps_logits`: the
  /// session's logits are those of the last draw until the next. Requires: a batch of 1, position >= 1.
  TokenDrawer(Session& session, const SamplerOptions& options, std::span<const int> recent, std::uint64_t sequence,
              std::int64_t most, bool logprobs, bool keeps_logits = false);
  TokenDrawer(const TokenDrawer&) = delete;
  TokenDrawer& operator=(const TokenDrawer&) = delete;
  /// Ends as finish() does; what fails then shows in the session's next call.
  ~TokenDrawer();

  /// The next token, after the session has consumed the one before.
  Sample next();
  /// The session has consumed every token but the last one. No more are drawn.
  void finish();

 private:
  Sample draw_here();
  void enqueue();
  /// The state after so many of the tokens; the stream is no more.
  void return_to(std::int64_t consumed);

  static constexpr std::int64_t kInterval = 32;

  Session& session_;
  Sampler sampler_;
  std::vector<int> recent_;  // at its end all tokens drawn
  std::uint64_t sequence_, first_step_;
  std::int64_t most_;
  bool logprobs_;
  std::int64_t drawn_ = 0;
  std::unique_ptr<models::TokenStream> stream_;  // null: token by token
  std::int64_t enqueued_ = 0;
  models::Slots copy_;
  std::int64_t copied_at_ = 0;  // tokens consumed
};

}  // namespace mmrec::engine
