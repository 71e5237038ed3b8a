// The table of architectures.
#include "models/architecture.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <stdexcept>
#include <string_view>
#include <tuple>

#include "models/architectures.h"
#include "models/files/file.h"
#include "models/files/json.h"
#include "models/files/model_files.h"
#include "models/files/text.h"

namespace mmrec::models {
namespace {

constexpr std::uint64_t kMaxConfigBytes = std::uint64_t{1} << 20;

struct Architecture {
  std::string_view name;  // model_type
  std::unique_ptr<LoadedModel> (*load)(const ModelSource& source);
  ProductCounts (*products)(const ModelSource& source);
  SyntheticModel (*synthetic)(const SyntheticSizes& sizes);
};
template <class Arch>
constexpr Architecture entry() {
  using Config = typename Arch::Config;
  return {.name = Config::kModelType,
          .load = [](const ModelSource& source) -> std::unique_ptr<LoadedModel> {
            return std::make_unique<ModelOf<Arch>>(source);
          },
          .products = [](const ModelSource& source) { return Arch::products(config_of<Config>(source)); },
          .synthetic = [](const SyntheticSizes& sizes) { return synthetic_of(Arch::synthetic(sizes)); }};
}
template <class... Arch>
constexpr auto entries(const std::tuple<Arch...>* /*all*/) {
  return std::array{entry<Arch>()...};
}
constexpr auto kArchitectures = entries(static_cast<const Architectures*>(nullptr));

const Architecture* find_architecture(std::string_view name) {
  const auto found = std::find_if(kArchitectures.begin(), kArchitectures.end(),
                                  [&](const Architecture& known) { return known.name == name; });
  return found == kArchitectures.end() ? nullptr : &*found;
}

const Architecture& architecture_of(const ModelSource& source) {
  require_json_object(source.config, source.config_name);
  JsonReader reader(source.config, source.config_name, 1024);
  reader.begin_object();
  for (std::string key; reader.next_key(key);) {
    if (key != "model_type") {
      reader.skip();
      continue;
    }
    const std::string type = reader.string();
    if (const Architecture* found = find_architecture(type)) return *found;
    reader.fail(fmt::format("found {}, expected {}", quote(type), choice_of(architecture_names())));
  }
  throw std::runtime_error(fmt::format("{}: model_type is missing", source.config_name));
}

ModelSource source_of(const std::filesystem::path& folder, const VariantOptions& variant, const WeightOptions& weights,
                      const WarningSink& warn) {
  const std::filesystem::path config = folder / kConfigFile;
  return {.folder = folder,
          .config = read_text(config, kMaxConfigBytes),
          .config_name = config.string(),
          .variant = variant,
          .weights = weights,
          .warn = warn};
}

}  // namespace

void refuse_options(const VariantOptions& others, std::string_view architecture) {
  const auto refuse_if = [&](bool is_given, std::string_view option) {
    if (!is_given) return;
    throw std::invalid_argument(
        fmt::format("load option {}: found one, but the architecture {} has none", option, architecture));
  };
  refuse_if(others.expert.has_value(), "expert");
  refuse_if(others.calls.has_value(), "calls");
  refuse_if(others.bank.has_value(), "bank");
}

LoadedModel::OnDevice LoadedModel::on_cuda(Precision precision, int gpu, bool batch_invariant) const {
  OnDevice model{.info = info_, .executor = nullptr};
  model.executor = copy_to_cuda(precision, gpu, batch_invariant, model.info);
  model.info.batch_invariant = batch_invariant;
  model.info.device = Device::kCuda;
  model.info.gpu = gpu;
  model.info.device_name = cuda_device_info(gpu).name;
  return model;
}

std::unique_ptr<LoadedModel> load_model(const std::filesystem::path& folder, const VariantOptions& variant,
                                        const WeightOptions& weights, const WarningSink& warn) {
  const ModelSource source = source_of(folder, variant, weights, warn);
  return architecture_of(source).load(source);
}

ProductCounts product_counts(const std::filesystem::path& folder, const VariantOptions& variant) {
  const ModelSource source = source_of(folder, variant, {}, {});
  return architecture_of(source).products(source);
}

std::vector<std::string_view> architecture_names() {
  std::vector<std::string_view> names;
  names.reserve(kArchitectures.size());
  for (const Architecture& architecture : kArchitectures) names.push_back(architecture.name);
  return names;
}

SyntheticModel synthetic_model(std::string_view architecture, const SyntheticSizes& sizes) {
  if (const Architecture* found = find_architecture(architecture)) return found->synthetic(sizes);
  throw std::invalid_argument(
      fmt::format("architecture: found {}, expected {}", quote(architecture), choice_of(architecture_names())));
}

}  // namespace mmrec::models
