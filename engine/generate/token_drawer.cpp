#include "engine/generate/token_drawer.h"

#include <exception>
#include <new>

#include "engine/session/session_impl.h"

namespace mmrec::engine {

TokenDrawer::TokenDrawer(Session& session, const SamplerOptions& options, std::span<const int> recent,
                         std::uint64_t sequence, std::int64_t most, bool logprobs, bool keeps_logits)
    : session_(session),
      sampler_(options),
      recent_(recent.begin(), recent.end()),
      sequence_(sequence),
      first_step_(static_cast<std::uint64_t>(session.position())),
      most_(most),
      logprobs_(logprobs) {
  if (most < 2 || keeps_logits) return;
  const Access::SessionImpl& impl = Access::impl(session);
  try {
    stream_ = impl.executor().draw_ahead({impl.slots.first(), options, sequence, first_step_, recent}, impl.position,
                                         logprobs);
    if (stream_ == nullptr) return;
    copy_ = models::Slots(impl.slots.executor(), 1, impl.options);
    impl.executor().copy(impl.slots.first(), copy_.first(), 1, impl.position);
  } catch (const std::bad_alloc&) {  // no room for a copy: token by token
    stream_.reset();
  }
}

TokenDrawer::~TokenDrawer() {
  try {
    finish();
  } catch (const std::exception&) {
  }
}

Sample TokenDrawer::next() {
  Access::SessionImpl& impl = Access::impl(session_);
  Sample sample;
  if (stream_ == nullptr) {
    if (drawn_ > 0) session_.step({&recent_.back(), 1});
    sample = draw_here();
  } else {
    if (enqueued_ == drawn_) enqueue();
    if (enqueued_ < most_) enqueue();
    if (drawn_ > 0) {
      impl.recent.push({&recent_.back(), 1}, 1, 1);
      ++impl.position;
    }
    const auto [token, logprob] = stream_->fetch();
    if (token < 0) {  // the host's sampler knows the words for it
      return_to(drawn_);
      return draw_here();
    }
    sample = {token, logprob};
  }
  recent_.push_back(sample.token);
  ++drawn_;
  return sample;
}

Sample TokenDrawer::draw_here() {
  const std::uint64_t step = first_step_ + static_cast<std::uint64_t>(drawn_);
  Sample sample;
  if (sampler_.options().repetition_penalty == 1.0F) {
    session_.draw(sampler_.options(), step, sequence_, {&sample, 1}, logprobs_);
  } else {  // needs the tokens so far
    sample = sampler_.sample(session_.logits(), recent_, step, sequence_);
  }
  return sample;
}

void TokenDrawer::finish() {
  if (stream_ != nullptr && enqueued_ > drawn_) return_to(std::max<std::int64_t>(drawn_ - 1, 0));
  stream_.reset();
}

void TokenDrawer::enqueue() {
  Access::SessionImpl& impl = Access::impl(session_);
  impl.has_logits = false;
  if (const std::int64_t consumed = enqueued_ - 1; consumed - copied_at_ >= kInterval) {
    impl.executor().copy(impl.slots.first(), copy_.first(), 1, static_cast<std::int64_t>(first_step_) + consumed);
    copied_at_ = consumed;
  }
  stream_->enqueue();
  ++enqueued_;
}

void TokenDrawer::return_to(std::int64_t consumed) {
  Access::SessionImpl& impl = Access::impl(session_);
  stream_.reset();
  impl.executor().copy(copy_.first(), impl.slots.first(), 1, static_cast<std::int64_t>(first_step_) + copied_at_);
  const int* const drawn = recent_.data() + recent_.size() - drawn_;
  for (std::int64_t i = copied_at_; i < consumed; ++i) {
    const models::Run run{impl.slots.first(), static_cast<std::int64_t>(first_step_) + i, 0, 1};
    impl.executor().step({drawn + i, 1}, {&run, 1}, impl.options);
  }
}

}  // namespace mmrec::engine
