// Quantising a model folder: which tensor becomes what, and some rows at a time from the one folder to the other.
#include "mmrec/quantize.h"

#include <fmt/format.h>
#include <fnmatch.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "engine/quantize/calibration.h"
#include "engine/quantize/output_folder.h"
#include "engine/quantize/rounding.h"
#include "engine/require.h"
#include "kernels/cpu/thread_pool.h"
#include "models/files/checkpoint.h"
#include "models/files/elements.h"
#include "models/files/file.h"
#include "models/files/model_files.h"
#include "models/files/safetensors_writer.h"
#include "models/files/text.h"
#include "models/weights/quantization_config.h"

namespace mmrec {
namespace {

namespace fs = std::filesystem;
using engine::Scheme;
using engine::Squares;
using models::TensorInfo;

constexpr std::uint64_t kMostConfigBytes = std::uint64_t{1} << 20;
constexpr std::size_t kBlockBytes = std::size_t{256} << 10;  // what a thread reads at a time
constexpr std::string_view kWeight = ".weight";

/// Of [PREFIX]blocks.N.NAME NAME, else "".
std::string_view name_in_block(std::string_view name) {
  constexpr std::string_view kBlocks = "blocks.";
  const std::size_t block = name.rfind(kBlocks);
  const std::size_t dot = block == std::string_view::npos ? block : name.find('.', block + kBlocks.size());
  return dot == std::string_view::npos ? "" : name.substr(dot + 1);
}

/// Matrices of a block that bear four bits, as docs/quantisation.md measures it. W_z does not: z is added to the state
/// at every step, and costs as much as all others together; W_fused has its rows. The decay networks, a fourteenth of a
/// block, stay at eight bits, because their errors multiply the state.
bool bears_four_bits(std::string_view name) {
  constexpr std::array<std::string_view, 9> kNames = {
      "W_q", "W_k", "W_v", "W_g", "mdi.W_g", "ffn.0", "ffn.3", "multi_mem_attention.W_q", "multi_mem_attention.W_o"};
  return std::ranges::find(kNames, name_in_block(name)) != kNames.end();
}

/// NAME of a matrix NAME.weight that can be quantised.
std::optional<std::string> matrix_name(const TensorInfo& tensor) {
  const bool is_matrix = tensor.shape.size() == 2 && tensor.shape[0] > 0 && tensor.shape[1] > 0;
  if (!is_matrix || !tensor.name.ends_with(kWeight) || tensor.dtype > kernels::DType::kBF16) return std::nullopt;
  return tensor.name.substr(0, tensor.name.size() - kWeight.size());
}

bool matches(const std::string& pattern, const std::string& name) {
  return ::fnmatch(pattern.c_str(), name.c_str(), 0) == 0;
}

bool is_kept(const std::string& name, const QuantizeOptions& options) {
  return std::ranges::any_of(options.keep, [&](const std::string& pattern) { return matches(pattern, name); });
}

/// Embedding and head are kInt8 in every format: in fp8 they would cost as much as all blocks.
Scheme scheme_for(const std::string& name, std::int64_t cols, const QuantizeOptions& options) {
  if (options.type == QuantizedType::kFp8 && !name_in_block(name).empty()) return {QuantizedType::kFp8, 0};
  const bool has_four = options.type == QuantizedType::kInt4 && bears_four_bits(name) && cols % options.group == 0;
  return has_four ? Scheme{QuantizedType::kInt4, options.group} : Scheme{};
}

kernels::DType code_of(QuantizedType type) {
  using enum kernels::DType;
  return type == QuantizedType::kInt8 ? kI8 : type == QuantizedType::kInt4 ? kI4 : kF8;
}

/// A tensor of the checkpoint, and where in its new file lies what it becomes.
struct Step {
  const TensorInfo* tensor = nullptr;
  std::optional<std::size_t> matrix = {};  // its number in the result; none: it is copied
  std::uint64_t numbers = 0;
  std::uint64_t scales = 0;
  std::uint64_t shape = 0;  // of kInt4
};

class Quantizer {
 public:
  Quantizer(const fs::path& from, const QuantizeOptions& options)
      : from_(from),
        options_(options),
        config_(models::read_text(from / models::kConfigFile, kMostConfigBytes)),
        checkpoint_(models::Checkpoint::open(from)),
        threads_(options.threads > 0 ? options.threads : kernels::ThreadPool::available_processors()) {
    std::vector<std::string> ignored;
    for (const TensorInfo& tensor : checkpoint_.tensors()) plan(tensor, ignored);
    for (const std::string& pattern : options.keep) {
      engine::require(std::ranges::any_of(ignored, [&](const std::string& name) { return matches(pattern, name); }),
                      "quantize option keep: found {}, which is the name of no matrix, as blocks.0.W_z would be",
                      pattern);
    }
    engine::require(options.keep.empty() || !result_.matrices.empty(),
                    "quantize option keep: found patterns of every matrix, expected one to quantise");
    config_ = models::with_quantization_config(config_, (from / models::kConfigFile).string(), groups(), ignored);
    engine::expect(!result_.matrices.empty(), "{}: found no matrix NAME.weight to quantise",
                   checkpoint_.path().string());
    for (std::size_t i = 0; i < shards_.size(); ++i) {
      shards_[i].name =
          is_sharded() ? fmt::format("model-{:05}-of-{:05}.safetensors", i + 1, shards_.size()) : models::kModelFile;
    }
  }

  QuantizedModel write_to(const fs::path& to) {
    engine::OutputFolder folder(to);
    if (!options_.calibration.empty()) calibrate();
    if (cancelled_) return {};
    for (std::size_t i = 0; i < shards_.size(); ++i) {
      engine::OutputFile file = folder.open(shards_[i].name);
      const std::string header = models::safetensors_header(shards_[i].tensors);
      file.write(0, header);
      for (const Step& step : steps_) {
        if (step.tensor->file == i) run(step, header.size(), file);
      }
      if (cancelled_) return {};
      folder.commit(file);
    }
    if (is_sharded()) write(folder, models::kIndexFile, models::shard_index(shards_));
    for (const std::string& name : models::names_in(from_)) {
      const bool is_written = name.ends_with(models::kShardEnding) || name == models::kIndexFile;
      if (models::is_model_file(name) && !is_written && name != models::kConfigFile) copy(folder, name);
    }
    write(folder, models::kConfigFile, config_);
    folder.keep();
    result_.complete = true;
    return std::move(result_);
  }

 private:
  bool is_sharded() const { return checkpoint_.path().filename() == models::kIndexFile; }
  Scheme scheme_of(const Step& step) const {
    const QuantizedMatrix& matrix = result_.matrices[*step.matrix];
    return {matrix.type, matrix.group};
  }

  /// Appends a tensor to file number `file`, and returns where it lies behind the header.
  std::uint64_t add(std::size_t file, models::NewTensor tensor) {
    if (shards_.size() <= file) shards_.resize(file + 1), ends_.resize(file + 1);
    const std::uint64_t begin = ends_[file];
    ends_[file] += tensor.bytes;
    result_.bytes_after += tensor.bytes;
    shards_[file].tensors.push_back(std::move(tensor));
    return begin;
  }

  void calibrate() {
    // What is best for each type (docs/quantisation.md).
    const double damping = options_.type == QuantizedType::kInt8 ? 0.001 : 0.01;
    const std::int64_t total = std::ssize(options_.calibration);
    calibration_.emplace(from_, options_.calibration, damping, threads_, [&](std::int64_t done) {
      cancelled_ = options_.on_calibration && !options_.on_calibration(done, total);
      return !cancelled_;
    });
  }

  void plan(const TensorInfo& tensor, std::vector<std::string>& ignored) {
    result_.bytes_before += tensor.bytes();
    result_.parameters += tensor.bytes() / kernels::size_of(tensor.dtype);
    Step step{.tensor = &tensor};
    const std::optional<std::string> name = matrix_name(tensor);
    if (name && !is_kept(*name, options_)) {
      add_matrix(*name, step);
    } else {
      if (name) ignored.push_back(*name);
      step.numbers = add(tensor.file, {tensor.name, models::name_in_file(tensor.dtype), tensor.shape, tensor.bytes()});
    }
    steps_.push_back(step);
  }

  void add_matrix(const std::string& name, Step& step) {
    const std::size_t file = step.tensor->file;
    const std::int64_t rows = step.tensor->shape[0];
    const std::int64_t cols = step.tensor->shape[1];
    const Scheme scheme = scheme_for(name, cols, options_);
    const auto bytes = static_cast<std::uint64_t>(rows * scheme.row_bytes(cols));
    const auto scale_bytes = static_cast<std::uint64_t>(rows * scheme.scales(cols)) * sizeof(kernels::BFloat16);
    const bool packed = scheme.type == QuantizedType::kInt4;
    const std::string_view type = models::name_in_file(packed ? kernels::DType::kI32 : code_of(scheme.type));
    const std::string weight = name + std::string(kWeight);
    step.matrix = result_.matrices.size();
    step.numbers =
        add(file, {packed ? weight + "_packed" : weight, type, {rows, packed ? (cols + 7) / 8 : cols}, bytes});
    step.scales = add(file, {weight + "_scale", "BF16", {rows, scheme.scales(cols)}, scale_bytes});
    if (packed) step.shape = add(file, {weight + "_shape", "I64", {2}, 2 * sizeof(std::int64_t)});
    result_.matrices.push_back({.name = name,
                                .type = scheme.type,
                                .group = scheme.group,
                                .rows = rows,
                                .cols = cols,
                                .bytes = bytes + scale_bytes});
  }

  /// Matrices by their scheme, each scheme where it first occurs.
  std::vector<models::QuantizationGroup> groups() const {
    std::vector<models::QuantizationGroup> found;
    for (const QuantizedMatrix& matrix : result_.matrices) {
      const models::QuantScheme scheme{code_of(matrix.type), matrix.group};
      auto group = std::ranges::find(found, scheme, &models::QuantizationGroup::scheme);
      if (group == found.end()) group = found.insert(group, {scheme, {}});
      group->modules.push_back(matrix.name);
    }
    return found;
  }

  /// Does a step by blocks of rows, which threads share. `data` is where the file's tensors begin.
  void run(const Step& step, std::uint64_t data, engine::OutputFile& file) {
    const TensorInfo& tensor = *step.tensor;
    const std::size_t row_bytes =
        step.matrix ? static_cast<std::size_t>(tensor.shape[1]) * kernels::size_of(tensor.dtype) : 1;
    const std::size_t rows = tensor.bytes() / row_bytes;
    const std::size_t most = std::max<std::size_t>(kBlockBytes / row_bytes, 1);
    std::vector<Squares> squares((rows + most - 1) / most);
    const std::thread::id caller = std::this_thread::get_id();
    std::vector<engine::ColumnInputs> inputs;
    if (step.matrix && calibration_) inputs = calibration_->of(result_.matrices[*step.matrix].name);
    kernels::parallel_items(squares.size(), threads_, [&](std::size_t i) {
      if (cancelled_) return;
      std::vector<std::byte> block(std::min(most, rows - i * most) * row_bytes);
      checkpoint_.read(tensor, i * most * row_bytes, block);
      if (step.matrix) {
        squares[i] = quantize(step, data, i * most, block, inputs, file);
      } else {
        file.write(data + step.numbers + i * most, block);
      }
      done_ += block.size();
      const bool tells = options_.on_progress && std::this_thread::get_id() == caller;
      if (tells && !options_.on_progress(done_, result_.bytes_before)) cancelled_ = true;
    });
    if (!step.matrix) return;
    Squares all;
    for (const Squares& of_block : squares) all += of_block;
    result_.matrices[*step.matrix].error = all.weight > 0.0 ? std::sqrt(all.error / all.weight) : 0.0;
    if (scheme_of(step).type != QuantizedType::kInt4) return;
    file.write(data + step.shape, std::as_bytes(std::span(tensor.shape)));
  }

  /// Rows from `first` on, as the checkpoint has them in `block`.
  Squares quantize(const Step& step, std::uint64_t data, std::size_t first, std::span<const std::byte> block,
                   std::span<const engine::ColumnInputs> inputs, engine::OutputFile& file) const {
    const TensorInfo& tensor = *step.tensor;
    const Scheme scheme = scheme_of(step);
    const auto cols = static_cast<std::size_t>(tensor.shape[1]);
    const std::size_t from_bytes = cols * kernels::size_of(tensor.dtype);
    checkpoint_.check_finite(tensor, first * from_bytes, block);
    const auto to_bytes = static_cast<std::size_t>(scheme.row_bytes(tensor.shape[1]));
    const auto of_row = static_cast<std::size_t>(scheme.scales(tensor.shape[1]));
    const std::size_t rows = block.size() / from_bytes;
    std::vector<float> weights(rows * cols);
    std::vector<std::byte> numbers(rows * to_bytes);
    std::vector<kernels::BFloat16> scales(rows * of_row);
    models::convert(block.data(), weights.size(), tensor.dtype, reinterpret_cast<std::byte*>(weights.data()),
                    kernels::DType::kF32);
    const Squares squares = engine::round_rows(scheme, weights, cols, inputs, numbers.data(), scales.data());
    file.write(data + step.numbers + first * to_bytes, numbers);
    file.write(data + step.scales + first * of_row * sizeof(kernels::BFloat16), std::as_bytes(std::span(scales)));
    return squares;
  }

  void copy(engine::OutputFolder& folder, const std::string& name) const {
    const models::File file = models::File::open(models::resolve_model_file(from_, name));
    engine::OutputFile to = folder.open(name);
    std::vector<std::byte> block;
    for (std::uint64_t at = 0; at < file.size(); at += block.size()) {
      block.resize(std::min<std::uint64_t>(kBlockBytes, file.size() - at));
      file.read(at, block);
      to.write(at, block);
    }
    folder.commit(to);
  }

  static void write(engine::OutputFolder& folder, std::string_view name, std::string_view text) {
    engine::OutputFile file = folder.open(name);
    file.write(0, text);
    folder.commit(file);
  }

  const fs::path& from_;
  const QuantizeOptions& options_;
  std::string config_;
  models::Checkpoint checkpoint_;
  int threads_;
  std::vector<models::NewShard> shards_;
  std::vector<std::uint64_t> ends_;  // of the data of each shard
  std::vector<Step> steps_;
  std::optional<engine::Calibration> calibration_;
  QuantizedModel result_;
  std::atomic<std::uint64_t> done_ = 0;  // bytes of the checkpoint
  std::atomic<bool> cancelled_ = false;
};

}  // namespace

QuantizedModel quantize_model(const fs::path& from, const fs::path& to, const QuantizeOptions& options) {
  engine::require(static_cast<std::size_t>(options.type) < kQuantizedTypeNames.size(),
                  "quantize option type: found {}, expected a QuantizedType", static_cast<int>(options.type));
  engine::require(options.group >= 64 && options.group <= 65536 && options.group % 64 == 0,
                  "quantize option group: found {}, expected a multiple of 64, at most 65536", options.group);
  engine::require(options.threads >= 0, "quantize option threads: found {}, expected >= 0", options.threads);
  return Quantizer(from, options).write_to(to);
}

}  // namespace mmrec
