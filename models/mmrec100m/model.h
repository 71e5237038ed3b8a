// The architecture `mmrec100m`, for models/architecture.h.
#pragma once

#include <memory>

#include "models/architecture.h"

namespace mmrec::models {

std::unique_ptr<LoadedModel> load_mmrec100m(const ModelSource& source);
ProductCounts products_of_mmrec100m(const ModelSource& source);
/// Both experts run.
SyntheticModel synthetic_mmrec100m(const SyntheticSizes& sizes);

}  // namespace mmrec::models
