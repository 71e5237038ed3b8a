// The public kernels on the CPU, without a model: a decayed recurrence run in two calls that hand the carry on, and the
// log-probs of tokens with their derivative. docs/examples/kernels_cuda.cpp is the same recurrence on a GPU.
#include <mmrec/kernels.h>

#include <cmath>
#include <cstdio>
#include <vector>

int main() {
  auto context = mmrec::KernelContext::cpu();

  // h_t = 0.9 h_{t-1} + 0.1: three channels, [time, dim], rising to 1.
  constexpr int kTime = 100, kDim = 3;
  const std::vector<float> log_a(kTime * kDim, std::log(0.9F));
  const std::vector<float> b(kTime * kDim, 0.1F);
  std::vector<float> h(kTime * kDim);
  std::vector<float> carry(kDim, 0.0F);
  for (const int first : {0, 60}) {
    const int time = first == 0 ? 60 : kTime - 60;
    mmrec::decay_scan(context, {.shape = {.time = time, .dim = kDim},
                                .log_a = log_a.data() + first * kDim,
                                .b = b.data() + first * kDim,
                                .h = h.data() + first * kDim,
                                .carry_in = carry.data(),
                                .carry_out = carry.data()});
  }
  std::printf("h after %d steps: %.6f, expected %.6f\n", kTime, h.back(), 1.0 - std::pow(0.9, kTime));

  // log softmax(0, 1, 2, 3)[2], and its derivative by the logits.
  const std::vector<float> logits = {0.0F, 1.0F, 2.0F, 3.0F};
  const std::vector<int> target = {2};
  const std::vector<float> grad = {1.0F};
  std::vector<float> logprob(1), d_logits(4);
  mmrec::token_logprobs(
      context, {.rows = 1, .vocab = 4, .logits = logits.data(), .targets = target.data(), .logprobs = logprob.data()});
  mmrec::token_logprobs_backward(context, {.rows = 1,
                                           .vocab = 4,
                                           .logits = logits.data(),
                                           .targets = target.data(),
                                           .grad = grad.data(),
                                           .d_logits = d_logits.data()});
  std::printf("log p = %.6f, d log p = %.4f %.4f %.4f %.4f\n", logprob[0], d_logits[0], d_logits[1], d_logits[2],
              d_logits[3]);

  const bool right = std::abs(h.back() - (1.0 - std::pow(0.9, kTime))) < 1e-5 && std::abs(logprob[0] + 1.440190) < 1e-5;
  return right ? 0 : 1;
}
