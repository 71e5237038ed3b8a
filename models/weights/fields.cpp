// The tensors that a table of fields implies, and a checkpoint compared with them.
#include "models/weights/fields.h"

#include <fmt/format.h>

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "models/files/elements.h"
#include "models/files/text.h"
#include "models/weights/stored_matrix.h"

namespace mmrec::models {
namespace {

[[noreturn]] void fail(const std::filesystem::path& path, std::string_view name, std::string_view message) {
  throw std::runtime_error(fmt::format("{}: {}: {}", path.string(), printable(name), message));
}

bool has_shape_of(std::vector<std::int64_t> shape, const TensorSpec& spec) {
  const bool more_rows = spec.may_have_more_rows && shape.size() == spec.shape.size() && shape[0] > spec.shape[0];
  if (more_rows) shape[0] = spec.shape[0];
  return shape == spec.shape;
}

}  // namespace

void add_specs(const Field& field, const Sizes& sizes, std::vector<TensorSpec>& specs) {
  if (field.kind == Field::Kind::kBias) return;  // declared with their weights
  Sizes may_have = sizes;
  may_have.low_rank = false;
  for (const TensorPart& part : field.parts) {
    const bool used = part.used_by(sizes);
    if (!used && !part.used_by(may_have)) continue;
    const std::string name = std::string(field.prefix) + std::string(part.name);
    const std::string weight = name + std::string(field.storage.suffix);
    const auto of_block = std::find_if_not(specs.rbegin(), specs.rend(), [&](const TensorSpec& other) {
      return other.name != weight && other.name.starts_with(field.prefix);
    });
    if (of_block != specs.rend() && of_block->name == weight) continue;
    const std::int64_t out = part.out.of(sizes);
    using enum TensorSpec::Use;
    const TensorSpec::Use use = !used ? kUnused : field.optional ? kOptional : kRequired;
    const bool may_have_more_rows = part.rows.of(sizes) < out;
    std::vector<std::int64_t> shape = {out};
    if (field.is_matrix()) shape.insert(field.storage.transposed ? shape.begin() : shape.end(), part.in.of(sizes));
    specs.push_back({weight, std::move(shape), use, may_have_more_rows});
    if (field.kind == Field::Kind::kLinear) specs.push_back({name + ".bias", {out}, use, may_have_more_rows});
  }
}

void check_tensors(const Checkpoint& checkpoint, const std::vector<TensorSpec>& specs, const QuantSchemes& schemes,
                   const TensorRules& rules, const WarningSink& warn) {
  std::vector<const TensorInfo*> known;
  for (const TensorSpec& spec : specs) {
    const bool may_be_quantized = spec.shape.size() == 2 && spec.name.ends_with(kTorch.suffix);
    const StoredMatrix stored = find_matrix(checkpoint, spec.name, may_be_quantized ? schemes : QuantSchemes{});
    const TensorInfo* const tensor = stored.numbers;
    if (tensor == nullptr && spec.use != TensorSpec::Use::kRequired) continue;
    if (tensor == nullptr) {
      fail(checkpoint.path(), spec.name,
           fmt::format("tensor is missing (expected shape {}){}", list(spec.shape), rules.hint(spec.name)));
    }
    if (!has_shape_of(stored.dims, spec)) {
      fail(checkpoint.path_of(*tensor), tensor->name,
           fmt::format("found shape {}, expected {}{}", list(stored.dims), list(spec.shape),
                       spec.may_have_more_rows ? " or more rows" : ""));
    }
    if (stored.scales == nullptr && !kernels::is_plain(tensor->dtype)) {
      fail(checkpoint.path_of(*tensor), tensor->name,
           fmt::format("found {}, expected F32, F16 or BF16{}", name_in_file(tensor->dtype),
                       may_be_quantized ? ": config.json has no quantization_config" : ""));
    }
    for (const TensorInfo* one : {tensor, stored.scales, stored.shape}) {
      if (one != nullptr) known.push_back(one);
    }
  }
  std::sort(known.begin(), known.end());
  std::size_t training_only = 0;
  for (const TensorInfo& tensor : checkpoint.tensors()) {
    if (std::binary_search(known.begin(), known.end(), &tensor)) continue;
    if (!rules.is_training_only(tensor.name)) {
      fail(checkpoint.path_of(tensor), tensor.name,
           fmt::format("unexpected tensor (found {} {}, expected none of this name by config.json){}",
                       name_in_file(tensor.dtype), list(tensor.shape), rules.hint(tensor.name)));
    }
    ++training_only;
  }
  if (training_only != 0 && warn) {
    warn(fmt::format("{}: {} tensors that only training uses are ignored ({})", checkpoint.path().string(),
                     training_only, rules.training_names));
  }
}

}  // namespace mmrec::models
