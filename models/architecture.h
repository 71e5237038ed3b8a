// Models by their architecture, the `model_type` of config.json: this is the one place that tells them apart.
#pragma once

#include <filesystem>
#include <memory>
#include <string_view>
#include <vector>

#include "models/runtime/model.h"

namespace mmrec::models {

/// Loads the model of a folder. Throws std::runtime_error for a malformed folder, an unknown model_type among them,
/// std::system_error, std::bad_alloc, and std::invalid_argument for an option that the architecture has not.
std::unique_ptr<LoadedModel> load_model(const std::filesystem::path& folder, const VariantOptions& variant,
                                        const WeightOptions& weights, const WarningSink& warn = {});

/// Of the model of a folder, from its config.json alone. Throws as load_model.
ProductCounts product_counts(const std::filesystem::path& folder, const VariantOptions& variant = {});

/// Every model_type, the first being MM-Rec's.
std::vector<std::string_view> architecture_names();
/// Throws std::invalid_argument for an unknown name.
SyntheticModel synthetic_model(std::string_view architecture, const SyntheticSizes& sizes);

}  // namespace mmrec::models
