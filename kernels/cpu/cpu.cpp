// The CPU backend's construction, and the choice of vector kernels.
#include "kernels/cpu/cpu.h"

#include <algorithm>
#include <vector>

#include "kernels/cpu/bytes.h"
#include "kernels/cpu/simd.h"

namespace mmrec::kernels {
namespace {

constexpr int kMaxThreads = 256;

const SimdKernels*& chosen_simd() {
  static const SimdKernels* table = supported_simd_kernels().front();
  return table;
}

}  // namespace

std::span<const SimdKernels* const> supported_simd_kernels() {
  static const std::vector<const SimdKernels*> supported = [] {
    std::vector<const SimdKernels*> tables;
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl")) {
      if (__builtin_cpu_supports("avx512vnni")) tables.push_back(&kAvx512VnniKernels);
      tables.push_back(&kAvx512Kernels);
    }
    // F16C came before AVX2 in every processor line; Clang 14 does not know its name here.
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) tables.push_back(&kAvx2Kernels);
    tables.push_back(&kScalarKernels);
    return tables;
  }();
  return supported;
}

const SimdKernels& simd() { return *chosen_simd(); }
void choose_simd(const SimdKernels& table) { chosen_simd() = &table; }

bool all_finite(std::span<const std::byte> numbers, DType dtype) {
  const auto count = static_cast<std::int64_t>(numbers.size() / size_of(dtype));
  return simd().bytes.all_finite[dtype](numbers.data(), count);
}

std::uint64_t hash_bytes(std::span<const std::byte> bytes) { return simd().bytes.hash(bytes.data(), bytes.size()); }

std::string_view cpu_instruction_set() { return simd().name; }

Cpu::Cpu(int threads, bool rounds_inputs)
    : pool_(std::clamp(threads > 0 ? threads : ThreadPool::available_processors(), 1, kMaxThreads)),
      rounds_inputs_(rounds_inputs),
      scratch_(static_cast<std::size_t>(pool_.threads()) * kScratchFloats),
      row_tiles_(pool_.threads(), rounds_inputs) {}

}  // namespace mmrec::kernels
