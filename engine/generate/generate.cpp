// The generation loop: draw, hand over, step.
#include "mmrec/generate.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <exception>
#include <limits>
#include <memory>
#include <new>
#include <stdexcept>
#include <utility>
#include <vector>

#include "engine/generate/continuation.h"
#include "engine/require.h"
#include "engine/session/access.h"
#include "engine/session/session_impl.h"

namespace mmrec {
namespace engine {
namespace {

/// The tokens of one sequence, drawn one after another: the host's loop around a session.
///
/// If the executor draws ahead, the next token is computed while the caller looks at this one. If the caller then wants
/// no more, one step was too many. So the state is copied every kInterval tokens. The copy comes back and the steps
/// since then are taken again, which gives the same bits.
class TokenDrawer {
 public:
  /// At most `most` tokens will be drawn; `recent` are those that count for the repetition penalty. `keeps_logits`: the
  /// session's logits are those of the last draw until the next. Requires: a batch of 1, position >= 1.
  TokenDrawer(Session& session, const SamplerOptions& options, std::span<const int> recent, std::uint64_t sequence,
              std::int64_t most, bool logprobs, bool keeps_logits)
      : session_(session),
        impl_(Access::impl(session)),
        options_(options),
        recent_(recent.begin(), recent.end()),
        sequence_(sequence),
        first_step_(session.position()),
        most_(most),
        logprobs_(logprobs) {
    if (most < 2 || keeps_logits) return;
    try {
      stream_ = impl_.executor().draw_ahead(next_draw(), impl_.position, logprobs);
      if (stream_ == nullptr) return;
      copy_ = models::Slots(impl_.slots.executor(), 1, impl_.options);
      impl_.executor().copy(slot(), copy_.first(), 1, impl_.position);
    } catch (const std::bad_alloc&) {  // no room for a copy: token by token
      stream_.reset();
    }
  }
  TokenDrawer(const TokenDrawer&) = delete;
  TokenDrawer& operator=(const TokenDrawer&) = delete;
  /// Ends as finish() does; what fails then shows in the session's next call.
  ~TokenDrawer() {
    try {
      finish();
    } catch (const std::exception&) {
    }
  }

  /// The next token, after the session has consumed the one before. Throws NumericError.
  Sample next() {
    Sample sample;
    if (stream_ == nullptr) {
      if (drawn_ > 0) session_.step({&recent_.back(), 1});
      sample = draw_now();
    } else {
      if (enqueued_ == drawn_) enqueue();
      if (enqueued_ < most_) enqueue();
      if (drawn_ > 0) {
        impl_.recent.push({&recent_.back(), 1}, 1, 1);
        ++impl_.position;
      }
      const auto [token, logprob] = stream_->fetch();
      if (token < 0) {  // the host's sampler throws the reason
        return_to(drawn_);
        return draw_now();
      }
      sample = {token, logprob};
    }
    recent_.push_back(sample.token);
    ++drawn_;
    return sample;
  }

  /// The session has consumed every token but the last one. No more are drawn.
  void finish() {
    if (stream_ != nullptr && enqueued_ > drawn_) return_to(std::max<std::int64_t>(drawn_ - 1, 0));
    stream_.reset();
  }

 private:
  static constexpr std::int64_t kInterval = 32;

  models::Slot slot() const { return impl_.slots.first(); }
  models::Draw next_draw() const {
    return {slot(), options_, sequence_, static_cast<std::uint64_t>(first_step_ + drawn_), recent_};
  }
  Sample draw_now() {
    const models::Draw draw = next_draw();
    Sample sample;
    impl_.draw({&draw, 1}, logprobs_, {&sample, 1});
    return sample;
  }
  void enqueue() {
    impl_.has_logits = false;
    if (const std::int64_t consumed = enqueued_ - 1; consumed - copied_at_ >= kInterval) {
      impl_.executor().copy(slot(), copy_.first(), 1, first_step_ + consumed);
      copied_at_ = consumed;
    }
    stream_->enqueue();
    ++enqueued_;
  }
  /// The state after `consumed` of the tokens; the stream ends.
  void return_to(std::int64_t consumed) {
    stream_.reset();
    impl_.executor().copy(copy_.first(), slot(), 1, first_step_ + copied_at_);
    const int* const drawn = recent_.data() + recent_.size() - drawn_;
    for (std::int64_t i = copied_at_; i < consumed; ++i) {
      const models::Run run{slot(), first_step_ + i, 0, 1};
      impl_.executor().step({drawn + i, 1}, {&run, 1}, impl_.options);
    }
  }

  Session& session_;
  Access::SessionImpl& impl_;
  SamplerOptions options_;
  std::vector<int> recent_;  // at its end all tokens drawn
  std::uint64_t sequence_;
  std::int64_t first_step_;
  std::int64_t most_;
  bool logprobs_;
  std::int64_t drawn_ = 0;
  std::unique_ptr<models::TokenStream> stream_;  // null: token by token
  std::int64_t enqueued_ = 0;
  models::Slots copy_;
  std::int64_t copied_at_ = 0;  // tokens consumed
};

}  // namespace
}  // namespace engine

std::string_view to_string(FinishReason reason) {
  constexpr std::array<std::string_view, 5> kNames = {"length", "eos", "stop", "cancelled", "error"};  // by value
  const auto at = static_cast<std::size_t>(reason);
  return at < kNames.size() ? kNames[at] : "unknown";
}

GenerateResult generate(Session& session, const Tokenizer& tokenizer, const GenerateOptions& options) {
  engine::require(session.batch() == 1, "generate: found a session of batch {}, expected 1", session.batch());
  engine::require(session.position() >= 1, "generate: found a session at position 0, expected a prompt");
  const std::span<const int> before = options.context.empty() ? session.recent_tokens() : options.context;
  engine::Continuation text(tokenizer, session.vocab_size(), options, before, session.position());
  const SamplerOptions& chain = text.options().sampler;
  const std::int64_t most = options.max_tokens < 0 ? std::numeric_limits<std::int64_t>::max() : options.max_tokens;
  const std::size_t window = std::min(before.size(), static_cast<std::size_t>(chain.repetition_window));
  engine::TokenDrawer drawer(session, chain, before.last(window), options.sequence, most, options.logprobs,
                             options.top_logprobs > 0);
  std::vector<Sample> likeliest;
  while (text.goes_on()) {
    const Sample drawn = drawer.next();
    likeliest.clear();
    if (options.top_logprobs > 0) text.append_likeliest(session.logits(), likeliest);
    text.take(drawn, likeliest);
  }
  drawer.finish();
  return std::move(text.result());
}

}  // namespace mmrec
