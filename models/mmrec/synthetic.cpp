// Random model folders of MM-Rec.
#include "models/mmrec/synthetic.h"

#include "models/mmrec/weight_table.h"
#include "models/weights/synthetic.h"

namespace mmrec::models {

std::vector<TensorSpec> synthetic_tensors(const Config& config) {
  std::vector<TensorSpec> tensors = tensor_specs(config);
  std::erase_if(tensors, [](const TensorSpec& spec) { return spec.use != TensorSpec::Use::kRequired; });
  for (TensorSpec& spec : tensors) {
    if (spec.may_have_more_rows) spec.shape[0] += 2 * config.model_dim;  // as the public class has them
  }
  return tensors;
}

void write_synthetic_model(const std::filesystem::path& folder, const Config& config, kernels::DType dtype,
                           std::uint64_t seed) {
  write_synthetic_folder(folder, to_json(config), synthetic_tensors(config), dtype, seed);
}

}  // namespace mmrec::models
