// What a model is, and where it runs.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "mmrec/precision.h"
#include "mmrec/variant_options.h"

namespace mmrec {

/// Where a model runs.
enum class Device : std::uint8_t {
  kAuto,  ///< a usable GPU with room for the weights, else the CPU
  kCpu,   ///< touches no GPU: makes no CUDA context, loads no CUDA library
  kCuda,  ///< a GPU, or DeviceUnavailable
};
/// Names of devices, by value.
inline constexpr std::array<std::string_view, 3> kDeviceNames = {"auto", "cpu", "cuda"};

/// What a loaded model is.
struct ModelInfo {
  std::string architecture;           ///< model_type of config.json
  std::int64_t vocab_size = 0;        ///< V: ids are 0..V-1
  std::int64_t model_dim = 0;         ///< D: of the hidden state
  std::int64_t num_layers = 0;        ///< blocks
  std::int64_t num_heads = 0;         ///< of attention
  std::int64_t ffn_dim = 0;           ///< width of the feed-forward network
  std::int64_t memory_segment = 0;    ///< tokens of a segment; 0: there is no memory of segments
  std::int64_t memory_slots = 0;      ///< segments that are remembered
  VariantOptions variant;             ///< those that the architecture has, as the model runs
  std::uint64_t parameters = 0;       ///< numbers in the weights
  std::uint64_t weight_bytes = 0;     ///< resident bytes of the weights, in the memory of the device they run on
  std::uint64_t bytes_per_token = 0;  ///< weight bytes that one decoded token reads
  std::uint64_t memory_bytes = 0;     ///< those it reads besides once attention has several memory slots to choose from
  std::uint64_t fingerprint = 0;      ///< identity of configuration and weights, as saved states carry it
  int bos_token_id = -1;              ///< from config.json; -1: not given there
  std::vector<int> eos_token_ids;     ///< from config.json; empty: not given there
  Device device = Device::kCpu;       ///< where it runs: kCpu or kCuda
  int gpu = -1;                       ///< the GPU's number, as LoadOptions::gpu; -1 on the CPU
  std::string device_name;            ///< the GPU's name, "NVIDIA H200"; "cpu" on the CPU
  Precision precision = Precision::kF32;  ///< what products are computed in: never kAuto
  bool batch_invariant = false;           ///< LoadOptions::batch_invariant on a GPU
};

/// One sentence: what bf16 would give a model that Precision::kAuto runs in fp32 on a GPU. Empty for other models.
/// `option` is how a caller asks for bf16. Estimates: half the weights' bytes bound the gain of a text alone, and the
/// gain of many tokens at once is that of docs/measurements/2026-11-gpu.md.
inline std::string bf16_advice(const ModelInfo& info, std::string_view option) {
  if (info.device != Device::kCuda || info.precision != Precision::kF32) return {};
  const auto megabytes = [](std::uint64_t bytes) { return std::to_string((bytes + 500'000) / 1'000'000) + " MB"; };
  return "precision fp32, as the weights are not all stored in one 16-bit type. With " + std::string(option) +
         " a token reads " + megabytes(info.bytes_per_token / 2) + " of weights in place of " +
         megabytes(info.bytes_per_token) +
         ", so one text is up to 2 times as fast; prompts and scores are about 3 times as fast. Results then "
         "differ within the bounds of docs/numerics.md";
}

}  // namespace mmrec
