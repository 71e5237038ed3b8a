// The architecture `mmrec`, for models/architecture.h.
#pragma once

#include <memory>
#include <optional>

#include "models/architecture.h"
#include "models/mmrec/weights.h"

namespace mmrec::models {

std::unique_ptr<LoadedModel> load_mmrec(const ModelSource& source);
ProductCounts products_of_mmrec(const ModelSource& source);
SyntheticModel synthetic_mmrec(const SyntheticSizes& sizes);

/// Of the model's blocks. Those of the memory only where several slots are filled: a single one is attended to whatever
/// the query.
ProductCounts products_of_blocks(const Config& config);

/// Adds the weight bytes that one decoded token reads of a block: every matrix and vector, the projections of attention
/// over memory slots by themselves. Matrices are of `type` on the device that decodes, of their stored type where none
/// is given.
void add_block_bytes(ModelInfo& info, const LayerFields<HostMatrix, HostVector>& layer,
                     std::optional<kernels::DType> type);

}  // namespace mmrec::models
