// An mmrec-jax model's weights in host memory, and views of them anywhere.
#pragma once

#include "kernels/tensor.h"
#include "models/files/checkpoint.h"
#include "models/mmrec_jax/config.h"
#include "models/mmrec_jax/weight_table.h"
#include "models/weights/host.h"

namespace mmrec::models::jax {

/// A whole model in host memory. Immutable after load; shared between sessions.
struct HostWeights : ModelFields<HostMatrix, HostVector>, WeightTotals {};

template <class Space>
using LayerView = LayerFields<kernels::WeightView<Space>, const float*>;
template <class Space>
using ModelView = ModelFields<kernels::WeightView<Space>, const float*>;

/// Views of `weights`, which must outlive them.
ModelView<kernels::Host> view_of(const HostWeights& weights);

/// The type of all matrices where they agree, fp32 otherwise.
kernels::DType common_dtype(const HostWeights& weights);

/// Checks every tensor before allocating anything, then reads; see load_weights of models/mmrec/weights.h. The
/// projections may be one tensor, W_fused, or four. W_planning_* are ignored and reported.
HostWeights load_weights(const Checkpoint& checkpoint, const Config& config, const WeightOptions& options = {},
                         const WarningSink& warn = {});

}  // namespace mmrec::models::jax
