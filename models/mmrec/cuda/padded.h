// MM-Rec with the sizes of its padded weights on a GPU (models/runtime/cuda/padding.h).
#pragma once

#include "models/mmrec/config.h"
#include "models/runtime/cuda/padding.h"

namespace mmrec::models {

inline Config padded(Config config) {
  config.head_padding = head_padding(config.model_dim, config.num_heads);
  config.model_dim += config.num_heads * config.head_padding;
  config.ffn_dim = padded_size(config.ffn_dim);
  config.dpg_rank = padded_size(config.dpg_rank);
  return config;
}

}  // namespace mmrec::models
