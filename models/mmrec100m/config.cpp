#include "models/mmrec100m/config.h"

#include <fmt/format.h>

#include "models/files/text.h"

namespace mmrec::models::mmrec100m {

models::Config Config::stack() const {
  constexpr std::int64_t kNever = std::int64_t{1} << 56;
  constexpr std::int64_t kHeadDim = 64;
  models::Config config;
  config.vocab_size = vocab_size;
  config.model_dim = expert_dim;
  config.num_layers = num_layers;
  config.num_heads = expert_dim % kHeadDim == 0 ? expert_dim / kHeadDim : 1;  // a shape that all kernels take
  config.ffn_dim = ffn_dim;
  config.mdi_mix = mdi_mix;
  config.memory_segment = kNever;
  config.memory_slots = 0;
  return config;
}

Config Config::parse(std::string_view text, const std::string& name, const WarningSink& warn) {
  // mem_dim is the trainers' own here, whatever the width: the memory is always empty.
  constexpr std::array<std::string_view, 4> kIgnored = {"max_seq_len", "num_memories", "dropout", "mem_dim"};
  ConfigReader reader(text, name, warn);
  Config c;
  reader.read(c, kIgnored, [&](std::string_view key) {
    if (key != "fusion_method") return false;
    if (const std::string method = reader.json().string(); method != "concatenate") {
      reader.json().fail(fmt::format("found {}, expected \"concatenate\"", quote(method)));
    }
    return true;
  });
  if (c.ffn_dim == 0) c.ffn_dim = 4 * c.expert_dim;
  reader.check_quarter("expert_dim", c.expert_dim);
  const CheckedSize v = c.vocab_size, e = c.expert_dim, f = c.ffn_dim, layers = c.num_layers;
  // Of a block: nine matrices of E by E, the decay gate's four, which make one more, and the FFN; vectors are fewer
  // than another 32 rows.
  const CheckedSize block = e * e * 10 + e * f * 2 + (e + f) * 32;
  reader.check_totals(v * e * 3 + layers * block * 2 + e * e * 4 + e * 8, layers * e * 32 + v * 4,
                      "num_layers and expert_dim");
  return c;
}

}  // namespace mmrec::models::mmrec100m
