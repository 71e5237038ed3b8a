// A device's copy of the blocks, composed (compose.cpp). That it computes the model is shown by Parity and Terms.

#include "kernels/cuda/runtime/cuda.h"
#include "tests/models/small_models.h"
#include "tests/ops/op_test.h"
#include "tests/support/model_folder.h"
#include "tests/support/refusal.h"

namespace mmrec::models {
namespace {

TEST(CudaCompose, RefusesInFp16WhatItDoesNotHold) {
  if (const std::string reason = cuda_unusable_reason(); !reason.empty()) GTEST_SKIP() << reason;
  const test::TempFolder folder;
  write_small_model(folder.path(), Config::kModelType, small_config(), kernels::DType::kF32);
  test::EditableCheckpoint checkpoint(folder / "model.safetensors");
  for (const char* const name : {"blocks.1.W_z.weight", "blocks.1.mdi.W_g.weight"}) {
    test::EditableTensor& tensor = checkpoint.at(name);
    for (std::size_t i = 0; i < tensor.bytes.size() / sizeof(float); ++i) tensor.set(i, 400.0F);
  }
  checkpoint.write(folder / "model.safetensors");
  const std::unique_ptr<LoadedModel> model = load_model(folder.path(), {}, {});
  EXPECT_NO_THROW(model->on_cuda(Precision::kBF16, 0));
  EXPECT_EQ(test::error_of([&] { model->on_cuda(Precision::kF16, 0); }),
            "precision fp16: a product of two of the model's matrices has a number that does not fit, expected at most "
            "65504; use bf16 or fp32");
}

}  // namespace
}  // namespace mmrec::models
