#include "models/mmrec/config.h"

#include <fmt/format.h>

namespace mmrec::models {

Config Config::parse(std::string_view text, const std::string& name, const WarningSink& warn) {
  // Keys of the public constructor without a meaning for inference.
  constexpr std::array<std::string_view, 6> kIgnored = {"max_seq_len", "pe_dim",   "num_memories",
                                                        "use_uboo",    "lambda_P", "dropout"};
  ConfigReader reader(text, name, warn);
  Config c;
  std::int64_t mem_dim = 0;
  reader.read(c, kIgnored, [&](std::string_view key) {
    if (key == "mem_dim") return reader.read(key, mem_dim), true;
    if (key == "use_sparse") return reader.refuse("the sparse variant of the model is not supported"), true;
    return false;
  });
  if (c.ffn_dim == 0) c.ffn_dim = 4 * c.model_dim;
  if (c.model_dim % c.num_heads != 0) {
    reader.fail(fmt::format("num_heads: found {}, expected a divisor of model_dim {}", c.num_heads, c.model_dim));
  }
  if (!c.use_dpg) reader.check_quarter("model_dim", c.model_dim);
  if (mem_dim != 0 && mem_dim != c.model_dim) {
    reader.fail(
        fmt::format("mem_dim: found {}, expected model_dim {}: the model's equations add memory values to its hidden "
                    "state, so a memory of another width is not supported",
                    mem_dim, c.model_dim));
  }
  const auto size = [](std::int64_t n) { return CheckedSize(static_cast<std::uint64_t>(n)); };
  const CheckedSize v = size(c.vocab_size), d = size(c.model_dim), f = size(c.ffn_dim), layers = size(c.num_layers);
  const CheckedSize r = size(c.use_dpg ? c.dpg_rank : c.gate_hidden_dim());
  // Matrices of a block: 4 projections, 3 of the gates, 2 of the memory, up to 4 of the decay gate, 2 of the FFN;
  // vectors are fewer than another 32 rows.
  const CheckedSize block = d * d * 9 + d * r * 4 + d * f * 2 + (d + f + r) * 32;
  // State of a layer: the hidden state, the memory ring, the running sum in double; and the logits.
  const CheckedSize state = layers * d * (size(c.memory_slots) * 4 + 12) + v * 4;
  reader.check_totals(v * d * 2 + layers * block + d, state, "num_layers, model_dim and memory_slots");
  return c;
}

}  // namespace mmrec::models
