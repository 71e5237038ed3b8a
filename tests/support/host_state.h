// Tensors of a saved state by their names.
#pragma once

#include <algorithm>
#include <stdexcept>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "models/runtime/host_state.h"

namespace mmrec::test {

/// Finds a tensor by its name. Throws std::logic_error if there is none. Throws std::bad_variant_access if its type is
/// not T. State: HostState, which may be const, or a temporary.
template <class T = float, class State>
auto& tensor_of(State&& state, std::string_view name) {
  const auto part = std::ranges::find(state.parts, name, &models::HostState::Part::name);
  if (part == state.parts.end()) throw std::logic_error("a state has no tensor " + std::string(name));
  return std::get<std::vector<T>>(part->values);
}

}  // namespace mmrec::test
