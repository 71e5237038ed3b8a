// MM-Rec's weights in host memory, and views of them anywhere.
#pragma once

#include "kernels/tensor.h"
#include "models/files/checkpoint.h"
#include "models/mmrec/config.h"
#include "models/mmrec/weight_table.h"
#include "models/weights/host.h"

namespace mmrec::models {

/// A whole model in host memory; head.rows == 0 where it is tied to the embedding. Immutable after load; shared between
/// sessions.
struct HostWeights : ModelFields<HostMatrix, HostVector>, WeightTotals {};

/// Weights as the forward pass sees them, in a backend's memory space. Null data where the model has no such field.
template <class Space>
using LayerView = LayerFields<kernels::WeightView<Space>, const float*>;
template <class Space>
using ModelView = ModelFields<kernels::WeightView<Space>, const float*>;

/// Views of `weights`, which must outlive them. A tied head is the embedding.
ModelView<kernels::Host> view_of(const HostWeights& weights);

/// The type of all matrices where they agree, fp32 otherwise.
kernels::DType common_dtype(const HostWeights& weights);

/// Checks every tensor's presence and shape against the configuration before allocating anything, then reads.
/// Missing, unexpected (except mdi.W_planning_*, reported) and mis-shaped tensors and non-finite values are refused
/// with std::runtime_error naming file, tensor, found and expected; std::bad_alloc if memory does not suffice (the
/// weights exceed the machine's, or an allocation failed).
HostWeights load_weights(const Checkpoint& checkpoint, const Config& config, const WeightOptions& options = {},
                         const WarningSink& warn = {});

}  // namespace mmrec::models
