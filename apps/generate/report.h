// What mmrec-generate says of a text besides the text: what it cost, and all of it as JSON.
#pragma once

#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <string_view>

#include "mmrec/generate.h"
#include "mmrec/model.h"
#include "mmrec/tokenizer.h"

namespace mmrec::apps {

struct Timings {
  std::string place;
  double load_seconds = 0.0;
  std::int64_t cached_tokens = 0;  // of the prompt, whose state a prefix cache had
  std::int64_t prefill_tokens = 0;
  double prefill_seconds = 0.0;
  PrefillStats prefill;
  std::int64_t decode_tokens = 0;
  std::uint64_t decode_bytes = 0;  // weights read while drawing: once for each token consumed
  double decode_seconds = 0.0;

  static double rate(double count, double seconds) { return seconds > 0.0 ? count / seconds : 0.0; }
  double prefill_rate() const { return rate(static_cast<double>(prefill_tokens), prefill_seconds); }
  double decode_rate() const { return rate(static_cast<double>(decode_tokens), decode_seconds); }
  double gigabytes_per_second() const { return rate(static_cast<double>(decode_bytes) * 1e-9, decode_seconds); }

  nlohmann::ordered_json json() const;
  /// What prefill and decoding cost, each behind " | ".
  std::string rates() const;
  /// One line. What there was none of, a prompt, sweeps or draws, is not mentioned.
  std::string line(const SamplerOptions& sampler, std::string_view ending) const;
  /// The same of one turn among many: without what is that of the program.
  std::string turn_line(const SamplerOptions& sampler, std::string_view ending) const;
};

/// How tokens were drawn: the chain, and the seed where one was used.
std::string sampling_text(const SamplerOptions& sampler);

/// The object of --json, schema "mmrec-generate/1"; `with_tops`: and the likeliest tokens of each draw.
nlohmann::ordered_json result_json(const GenerateResult& result, const SamplerOptions& sampler,
                                   std::span<const int> prompt, const ModelInfo& info,
                                   const std::filesystem::path& folder, const Tokenizer& tokenizer,
                                   const Timings& timings, bool with_tops);

}  // namespace mmrec::apps
