// The end of a sweep in a loop of sweeps: how much of the window has settled.
#pragma once

#include <cstdint>

namespace mmrec::kernels {

/// Settled are the window's times before the first whose change is above `tolerance` times the largest magnitude; and
/// at least one time more than before, because the first unsettled time has seen a settled state. An infinite state,
/// or NaN, which counts as one, would leave nothing above its bound: then nothing else is settled.
struct GatedCheck {
  float* change = nullptr;           // [times], of the sweep from `first` on; left 0 for the next
  const float* magnitude = nullptr;  // [times], the largest that any sweep has seen
  int first = 0;
  int times = 0;
  float tolerance = 0.0F;
  bool begins = true;                // `first` times were settled before; else as many as *settled says
  std::uint32_t* settled = nullptr;  // on the device; null: nobody there asks
  std::uint32_t* report = nullptr;   // page-locked; null: no check
};

}  // namespace mmrec::kernels
