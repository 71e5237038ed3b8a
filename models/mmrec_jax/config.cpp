#include "models/mmrec_jax/config.h"

#include <fmt/format.h>

namespace mmrec::models::mmrec_jax {

Config Config::parse(std::string_view text, const std::string& name, const WarningSink& warn) {
  // Keys of the public configurations that its equations do not use.
  constexpr std::array<std::string_view, 8> kIgnored = {"ffn_dim",  "max_length", "max_seq_len", "short_mem_len",
                                                        "use_uboo", "lambda_p",   "lambda_P",    "dropout"};
  ConfigReader reader(text, name, warn);
  Config c;
  reader.read(c, kIgnored, [&](std::string_view key) {
    if (key != "use_moe") return false;
    reader.refuse(
        "a mixture of experts whose tokens of a call share slots, those of other sequences too, is not supported");
    return true;
  });
  if (c.num_heads > c.model_dim) {
    reader.fail(fmt::format("num_heads: found {}, expected at most model_dim {}", c.num_heads, c.model_dim));
  }
  reader.check_quarter("model_dim", c.model_dim);
  const CheckedSize v = c.vocab_size, d = c.model_dim, layers = c.num_layers;
  // Matrices of a block: 4 projections, 2 of the gate, 1 of the decay, 2 of attention, 8 of the FFN; vectors are fewer
  // than another 32 rows.
  reader.check_totals(v * d + layers * (d * d * 17 + d * 32) + d, ((layers + c.long_mem_len) * d + v) * 4,
                      "num_layers, long_mem_len and model_dim");
  return c;
}

}  // namespace mmrec::models::mmrec_jax
