// MM-Rec's weights in device memory.
#pragma once

#include "models/mmrec/executors.h"
#include "models/mmrec/weights.h"
#include "models/runtime/cuda/upload.h"

namespace mmrec::models {

class CudaWeights : public DeviceWeights<ModelView<kernels::Device>> {
 public:
  CudaWeights(const HostWeights& weights, Precision precision, int gpu)
      : DeviceWeights(
            weights, {.layers = {weights.layers.size(), LayerView<kernels::Device>()}},
            [](const auto& visit, auto&... models) { visit_model(visit, models...); }, common_dtype(weights), precision,
            gpu) {
    if (weights.head.rows == 0) view_.head = view_.embedding;
  }
};

}  // namespace mmrec::models
