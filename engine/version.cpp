// The version as configured, the backends that were linked, and the one place that lists what decides bits.
#include "mmrec/version.h"

#include <fmt/format.h>

#include <array>
#include <cstddef>

#include "engine/kernels/kernel_backend.h"
#include "engine/session/access.h"
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/row_tile.h"
#include "mmrec/computed_with.h"

namespace mmrec {

std::string_view version() { return MMREC_VERSION; }

std::span<const std::string_view> backends() {
  static constexpr std::array<std::string_view, 2> kAll = {"cpu", "cuda"};
  return std::span(kAll).first(engine::built_with_cuda() ? 2 : 1);
}

std::string computed_with(const ModelInfo& info, const SessionOptions& options) {
  (void)engine::execution_options(options);  // checks them
  std::string text = fmt::format("mmrec={}; compiler={}; ", version(), __VERSION__);
  if (info.device == Device::kCuda) {
    text += fmt::format("device={}; ", info.device_name);
  } else {
    text += fmt::format("device=cpu; instructions={}; products={}; ", kernels::cpu_instruction_set(),
                        kernels::matrix_library());
  }
  text += fmt::format("precision={}; prefill={}", to_string(info.precision),
                      kPrefillModeNames[static_cast<std::size_t>(options.prefill)]);
  if (info.batch_invariant) text += "; batch-invariant";
  if (options.prefill != PrefillMode::kSteps) {
    text +=
        options.sweep_tolerance == 0.0F ? "; sweep-tol=auto" : fmt::format("; sweep-tol={}", options.sweep_tolerance);
    text += fmt::format("; max-sweeps={}", options.max_sweeps);
  }
  if (info.variant.calls && info.variant.bank.value_or(true)) {
    text += fmt::format("; calls={}", kCallsNames[static_cast<std::size_t>(*info.variant.calls)]);
  }
  return text;
}

}  // namespace mmrec
