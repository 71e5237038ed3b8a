// Layout, between the ends of sealed_bytes.h:
//
//  24  u64  model fingerprint    32  i64  numbers of the model's, B behind the first of them; position
//      the model's tensors, f32 or f64
#include "engine/session/state_format.h"

#include <fmt/format.h>

#include <limits>
#include <stdexcept>
#include <string_view>
#include <variant>

#include "engine/require.h"
#include "engine/session/sealed_bytes.h"
#include "models/files/checked.h"

namespace mmrec::engine {
namespace {

constexpr SealedFormat kFormat = {.magic = "mmrecST\n", .version = kStateVersion, .what = "saved state"};

/// Without tensors: the ends, fingerprint, the model's numbers, B and the position.
std::size_t least_bytes(const models::StateLayout& layout) {
  return kSealBeginBytes + kSealEndBytes + 8 * (layout.numbers.size() + 3);
}

/// Elements of a tensor and bytes of a whole saved state, as `shape` implies them. Throws std::runtime_error if they do
/// not fit in memory.
struct Counts {
  std::vector<std::uint64_t> elements;  // of each part
  std::uint64_t total_bytes = 0;
};
Counts counts_of(const StateShape& shape, std::int64_t position) {
  using models::CheckedSize;
  Counts counts;
  CheckedSize total = least_bytes(shape.layout);
  for (const models::StatePart& part : shape.layout.parts) {
    const CheckedSize elements = CheckedSize(part.rows) * shape.batch * part.cols_at(position);
    total += elements * part.element_bytes();
    counts.elements.push_back(elements.overflowed() ? 0 : elements.value());
  }
  expect(total.at_most(std::numeric_limits<std::ptrdiff_t>::max()),
         "saved state: the shapes of this session exceed the address space");
  counts.total_bytes = total.value();
  return counts;
}

/// visit(name, number) for what a header says between the fingerprint and the position.
template <class Visit>
void for_each_number(const StateShape& shape, const Visit& visit) {
  bool is_first = true;
  for (const models::StateLayout::Number& number : shape.layout.numbers) {
    visit(number.name, number.value);
    if (is_first) visit(std::string_view("batch"), shape.batch);
    is_first = false;
  }
}

}  // namespace

std::vector<std::byte> encode_state(const models::HostState& state, const StateShape& shape) {
  const Counts counts = counts_of(shape, state.position);
  const auto size_of = [](const models::HostState::Part& part) {
    return std::visit([](const auto& values) { return values.size(); }, part.values);
  };
  bool fits = state.batch == shape.batch && state.parts.size() == counts.elements.size();
  for (std::size_t i = 0; fits && i < state.parts.size(); ++i) {
    const bool is_float = std::holds_alternative<std::vector<float>>(state.parts[i].values);
    fits = size_of(state.parts[i]) == counts.elements[i] &&
           is_float == (shape.layout.parts[i].type == models::StatePart::Type::kF32);
  }
  if (!fits) throw std::logic_error("an executor saved a state of other shapes than its model's");
  SealedWriter out(kFormat, counts.total_bytes);
  out.put(shape.fingerprint);
  for_each_number(shape, [&](std::string_view, std::int64_t number) { out.put(number); });
  out.put(state.position);
  for (const models::HostState::Part& part : state.parts) {
    std::visit([&](const auto& values) { out.put(values); }, part.values);
  }
  return out.finish();
}

models::HostState decode_state(std::span<const std::byte> bytes, const StateShape& shape) {
  SealedReader in(bytes, kFormat, "saved state", least_bytes(shape.layout));
  if (const auto fingerprint = in.get<std::uint64_t>(); fingerprint != shape.fingerprint) {
    in.fail(
        fmt::format("of another model: found fingerprint {:#018x}, expected {:#018x}", fingerprint, shape.fingerprint));
  }
  for_each_number(shape,
                  [&](std::string_view name, std::int64_t number) { in.expect(name, in.get<std::int64_t>(), number); });
  models::HostState state;
  state.batch = shape.batch;
  state.position = in.get<std::int64_t>();
  if (state.position < 0) in.fail(fmt::format("found position {}, expected >= 0", state.position));
  const Counts counts = counts_of(shape, state.position);
  in.expect("size", static_cast<std::uint64_t>(bytes.size()), counts.total_bytes);
  for (std::size_t i = 0; i < counts.elements.size(); ++i) {
    const models::StatePart& part = shape.layout.parts[i];
    if (part.type == models::StatePart::Type::kF32) {
      state.parts.push_back({part.name, in.get<float>(counts.elements[i], part.name)});
    } else {
      state.parts.push_back({part.name, in.get<double>(counts.elements[i], part.name)});
    }
  }
  return state;
}

}  // namespace mmrec::engine
