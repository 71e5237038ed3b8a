// What both algorithms of hidden_logprobs (algo.h) leave of the logits, and how log-probs are made of it.
#pragma once

#include "kernels/cuda/logprobs/max_sum.cuh"
#include "kernels/cuda/runtime/cuda.h"

namespace mmrec::kernels {

/// Some rows of an op. A row whose target is negative is left alone; `logprobs` holds the target's logit meanwhile.
struct LogprobRows {
  const int* targets;
  float* logprobs;
  PartSum* parts;  // [part of the vocabulary][row]
  int rows;
  int vocab;
};

/// logprobs[r] −= log Σ over `count` parts. A target beyond the vocabulary gives NaN.
void merge_parts(Cuda& cuda, const LogprobRows& rows, std::int64_t count);

/// HiddenLogprobsAlgo::kInRegisters, of rows and a vocabulary that are not empty.
template <class A>
void hidden_logprobs_sm90(Cuda& cuda, const HiddenLogprobs<Device, A>& op);

}  // namespace mmrec::kernels
