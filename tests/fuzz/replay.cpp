// Runs a fuzz harness over a corpus without libFuzzer: every file as it is, every file cut short, and a fixed number of
// mutations drawn from a fixed seed, so that each run of the tests sees the same inputs.
// Usage: replay SUBJECT FOLDER
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>

#include "tests/fuzz/harness.h"

namespace {

using Bytes = std::vector<char>;

constexpr int kMutationsPerFile = 200;
constexpr std::size_t kCutsPerFile = 64;

// The harness sees exactly `size` bytes of their own allocation, so reading past them is seen by AddressSanitizer.
void run(mmrec::fuzz::Harness harness, const Bytes& input) {
  const Bytes copy(input.begin(), input.end());
  harness({copy.data(), copy.size()});
}

std::size_t below(std::mt19937& random, std::size_t limit) { return limit == 0 ? 0 : random() % limit; }

Bytes mutated(Bytes input, std::mt19937& random) {
  for (std::size_t n = 1 + below(random, 4); n > 0 && !input.empty(); --n) {
    const auto at = static_cast<std::ptrdiff_t>(below(random, input.size()));
    const auto byte = static_cast<char>(random());
    switch (below(random, 5)) {
      case 0:
        input[static_cast<std::size_t>(at)] ^= static_cast<char>(1U << below(random, 8));
        break;
      case 1:
        input[static_cast<std::size_t>(at)] = byte;
        break;
      case 2:
        input.insert(input.begin() + at, byte);
        break;
      case 3:
        input.erase(input.begin() + at);
        break;
      default:
        std::reverse(input.begin() + at, input.end());
    }
  }
  return input;
}

}  // namespace

int main(int argc, char** argv) {
  const auto& all = mmrec::fuzz::harnesses();
  if (argc != 3 || !all.contains(argv[1])) {
    std::fprintf(stderr, "usage: %s SUBJECT FOLDER\n", argv[0]);
    return 2;
  }
  const mmrec::fuzz::Harness harness = all.at(argv[1]);
  std::vector<std::filesystem::path> files;
  for (const auto& entry : std::filesystem::directory_iterator(argv[2])) files.push_back(entry.path());
  std::sort(files.begin(), files.end());
  std::mt19937 random(1);
  std::size_t runs = 0;
  for (const auto& file : files) {
    std::ifstream stream(file, std::ios::binary);
    const Bytes input((std::istreambuf_iterator<char>(stream)), std::istreambuf_iterator<char>());
    run(harness, input);
    const std::size_t stride = input.size() / kCutsPerFile + 1;
    for (std::size_t size = 0; size < input.size(); size += stride) {
      run(harness, Bytes(input.begin(), input.begin() + static_cast<std::ptrdiff_t>(size)));
      ++runs;
    }
    for (int i = 0; i < kMutationsPerFile; ++i) run(harness, mutated(input, random));
    runs += 1 + kMutationsPerFile;
  }
  std::printf("%zu files, %zu inputs\n", files.size(), runs);
  return files.empty() ? 1 : 0;
}
