// The end of a sweep in a loop of sweeps: how much of the window has settled.
#pragma once

#include <cstdint>

namespace mmrec::kernels {

/// A time is at rest if its magnitude is finite and its change at most `tolerance` times that. Settled are the window's
/// times before the first that is not at rest; and at least one time more than before, because the first unsettled time
/// has seen a settled state.
struct GatedCheck {
  float* change = nullptr;     // [times], of the sweep, raised from `first` on; left 0 for the next
  float* magnitude = nullptr;  // same
  int first = 0;
  int times = 0;
  float tolerance = 0.0F;
  bool begins = true;                // `first` times were settled before; else as many as *settled says
  std::uint32_t* settled = nullptr;  // on the device; null: nobody there asks
  std::uint32_t* report = nullptr;   // page-locked; null: no check
};

}  // namespace mmrec::kernels
