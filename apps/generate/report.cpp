#include "apps/generate/report.h"

#include <fmt/format.h>

#include <utility>
#include <vector>

#include "apps/common/cli.h"
#include "apps/common/model_folder.h"
#include "apps/generate/records.h"
#include "apps/generate/sampling.h"

namespace mmrec::apps {

using Json = nlohmann::ordered_json;

Json Timings::json() const {
  return {{"load_s", load_seconds},
          {"cached_tokens", cached_tokens},
          {"prefill_tokens", prefill_tokens},
          {"prefill_s", prefill_seconds},
          {"prefill_tokens_per_s", prefill_rate()},
          {"sweeps_per_token", prefill.sweeps_per_token()},
          {"sweep_fallbacks", prefill.fallbacks},
          {"decode_tokens", decode_tokens},
          {"decode_s", decode_seconds},
          {"decode_tokens_per_s", decode_rate()},
          {"decode_gb_per_s", gigabytes_per_second()},
          {"peak_memory_bytes", peak_memory_bytes()}};
}

std::string sampling_text(const SamplerOptions& sampler) {
  const std::string chain = chain_text(sampler);
  return sampler.temperature == 0.0F ? chain : fmt::format("{}, seed {}", chain, sampler.seed);
}

std::string Timings::rates() const {
  std::string line;
  if (cached_tokens > 0) line += fmt::format(" | {} tokens from the prefix cache", cached_tokens);
  if (prefill_tokens > 0) {
    line += fmt::format(" | prefill {} tokens, {:.1f} tok/s", prefill_tokens, prefill_rate());
    if (prefill.token_sweeps > 0) line += fmt::format(", {:.2f} sweeps/token", prefill.sweeps_per_token());
  }
  if (decode_tokens > 0 && decode_bytes == 0) {  // several sequences share a reading of the weights
    line += fmt::format(" | decode {} tokens, {:.1f} tok/s", decode_tokens, decode_rate());
  } else if (decode_tokens > 0) {
    line += fmt::format(" | decode {} tokens, {:.1f} tok/s, {:.2f} GB/s", decode_tokens, decode_rate(),
                        gigabytes_per_second());
  }
  return line;
}

std::string Timings::line(const SamplerOptions& sampler, std::string_view ending) const {
  return fmt::format("load {:.3f} s | {}{} | peak {:.1f} MB | {} | {}", load_seconds, place, rates(),
                     static_cast<double>(peak_memory_bytes()) * 1e-6, sampling_text(sampler), ending);
}

std::string Timings::turn_line(const SamplerOptions& sampler, std::string_view ending) const {
  std::string line = rates() + fmt::format(" | {} | {}", sampling_text(sampler), ending);
  return line.substr(3);  // " | "
}

Json result_json(const GenerateResult& result, const SamplerOptions& sampler, std::span<const int> prompt,
                 const ModelInfo& info, const std::filesystem::path& folder, const Tokenizer& tokenizer,
                 const Timings& timings, bool with_tops) {
  Json json = {{"schema", "mmrec-generate/1"},
               {"text", result.text},
               {"tokens", result.tokens},
               {"logprobs", logprobs_json(result)}};
  if (with_tops) json["top_logprobs"] = top_logprobs_json(result, tokenizer);
  Json sampling = {{"chain", chain_text(sampler)}};
  sampling.update(sampling_json(sampler));
  json.update(Json{{"finish_reason", to_string(result.finish_reason)},
                   {"seed", sampler.seed},
                   {"prompt_tokens", std::vector<int>(prompt.begin(), prompt.end())},
                   {"sampling", std::move(sampling)},
                   {"model", with_device({{"folder", folder.string()},
                                          {"parameters", info.parameters},
                                          {"fingerprint", hex(info.fingerprint)},
                                          {"tokenizer_fingerprint", hex(tokenizer.fingerprint())}},
                                         info)},
                   {"timings", timings.json()}});
  return json;
}

}  // namespace mmrec::apps
