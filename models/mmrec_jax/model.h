// The architecture `mmrec-jax`, for models/architecture.h.
#pragma once

#include <memory>

#include "models/architecture.h"

namespace mmrec::models {

std::unique_ptr<LoadedModel> load_mmrec_jax(const ModelSource& source);
ProductCounts products_of_mmrec_jax(const ModelSource& source);
SyntheticModel synthetic_mmrec_jax(const SyntheticSizes& sizes);

}  // namespace mmrec::models
