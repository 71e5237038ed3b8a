// A model's fingerprint covers every byte of the weights that are used, in every architecture.

#include "models/architecture.h"
#include "models/files/checkpoint.h"
#include "models/weights/synthetic.h"
#include "tests/support/model_folder.h"

namespace mmrec::models {
namespace {

std::uint64_t fingerprint_of(const std::filesystem::path& folder, int threads = 0) {
  return load_model(folder, {}, {.allow_nonfinite = true, .threads = threads})->info().fingerprint;
}

/// Flips a bit of byte `at` of a tensor.
void flip(const std::filesystem::path& folder, const TensorInfo& tensor, std::uint64_t at) {
  std::fstream file(folder / "model.safetensors", std::ios::in | std::ios::out | std::ios::binary);
  std::uint64_t header_bytes = 0;
  file.read(reinterpret_cast<char*>(&header_bytes), sizeof header_bytes);
  const auto place = static_cast<std::streamoff>(8 + header_bytes + tensor.begin + at);
  file.seekg(place);
  const char flipped = static_cast<char>(file.get() ^ 0x10);
  file.seekp(place);
  file.put(flipped);
}

class Fingerprint : public testing::TestWithParam<std::string_view> {
 protected:
  Fingerprint() {
    const SyntheticModel made = synthetic_model(GetParam(), {.dim = 64, .layers = 2, .vocab = 300, .ffn = 256});
    write_synthetic_folder(folder_.path(), made, kernels::DType::kF32, 3);
  }
  test::TempFolder folder_;
};

TEST_P(Fingerprint, CoversEveryByteOfTheWeights) {
  const std::uint64_t original = fingerprint_of(folder_.path());
  const Checkpoint checkpoint = Checkpoint::open(folder_.path());
  std::mt19937_64 random(7);
  for (const TensorInfo& tensor : checkpoint.tensors()) {
    if (GetParam() == "mmrec100m" && tensor.name.find("multi_mem_attention.") != std::string::npos) continue;  // idle
    const std::uint64_t at = random() % tensor.bytes();
    flip(folder_.path(), tensor, at);
    EXPECT_NE(fingerprint_of(folder_.path()), original) << tensor.name << ", byte " << at << " of " << tensor.bytes();
    flip(folder_.path(), tensor, at);
  }
  EXPECT_EQ(fingerprint_of(folder_.path()), original);
}

TEST_P(Fingerprint, DoesNotDependOnThreads) {
  EXPECT_EQ(fingerprint_of(folder_.path(), 1), fingerprint_of(folder_.path(), 3));
}

std::vector<std::string_view> names() { return architecture_names(); }
INSTANTIATE_TEST_SUITE_P(Architectures, Fingerprint, testing::ValuesIn(names()));

}  // namespace
}  // namespace mmrec::models
