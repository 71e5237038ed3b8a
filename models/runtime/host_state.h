// The state of sequences between calls, everything a model remembers, as named tensors in host memory; and what an
// architecture says of it: which tensors there are, and where they lie in a sequence's slot.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace mmrec::models {

/// How much of a row is in use follows from the position: equal pieces, filled one after another from the first one on,
/// all of them in the end. No op reads a piece before it is filled.
struct Filling {
  std::int64_t pieces = 1;   // of a row
  std::int64_t tokens = 0;   // after which the next are filled; 0: all are in use from the beginning
  std::int64_t at_once = 1;  // so many of them

  std::int64_t filled(std::int64_t position) const {
    if (tokens == 0) return pieces;
    return std::min(pieces, std::min(pieces, position / tokens) * at_once);
  }
};

/// How the numbers of a row lie in a slot: `width` of them together, and `zeros` after those.
struct Spread {
  std::int64_t width = 1;
  std::int64_t zeros = 0;
};

/// One tensor of the state: [rows, cols] in the slot of a sequence; [rows, B, the filled of cols] in a saved state.
struct StatePart {
  enum class Type : std::uint8_t { kF32, kF64 };

  std::string_view name;  // a literal
  Type type = Type::kF32;
  std::int64_t rows = 1;
  std::int64_t cols = 0;
  std::size_t offset = 0;     // of its bytes in a slot
  bool at_position_0 = true;  // else it is empty there: what the first token leaves
  Filling filling = {};       // its pieces divide cols
  Spread spread = {};         // its width divides a piece

  std::size_t element_bytes() const { return type == Type::kF32 ? sizeof(float) : sizeof(double); }
  /// Bytes of `count` columns in a slot.
  std::size_t bytes_of(std::int64_t count) const {
    return static_cast<std::size_t>(count + count / spread.width * spread.zeros) * element_bytes();
  }
  std::size_t row_bytes() const { return bytes_of(cols); }
  /// Columns in use.
  std::int64_t cols_at(std::int64_t position) const {
    if (!at_position_0 && position == 0) return 0;
    return filling.tokens == 0 ? cols : cols / filling.pieces * filling.filled(position);
  }
};

/// The state of one sequence. Slots that lie side by side are slot_bytes apart.
struct StateLayout {
  struct Number {
    std::string_view name;  // a literal
    std::int64_t value = 0;
  };
  /// The numbers of the model in a saved state, in this order. The number of sequences stands behind the first.
  std::vector<Number> numbers;
  std::vector<StatePart> parts;  // in the order of a saved state
  std::size_t slot_bytes = 0;

  /// The parts in the order in which they lie in a slot.
  std::vector<const StatePart*> in_order() const {
    std::vector<const StatePart*> order;
    for (const StatePart& part : parts) order.push_back(&part);
    std::sort(order.begin(), order.end(), [](const StatePart* a, const StatePart* b) { return a->offset < b->offset; });
    return order;
  }
};

/// A copy of the state in host memory, the same for every backend. Sequences run in lock-step at one position, from
/// which everything follows that is not in the tensors.
struct HostState {
  using Values = std::variant<std::vector<float>, std::vector<double>>;
  struct Part {
    std::string_view name;
    Values values;
    bool operator==(const Part&) const = default;
  };

  std::int64_t batch = 0;
  std::int64_t position = 0;  // tokens consumed
  std::vector<Part> parts;    // as the layout has them
};

/// Bytes of slots, in which tensors lie one after another, each where wide accesses want it.
class SlotPlaces {
 public:
  static constexpr std::size_t kAlign = 256;

  std::size_t place(std::size_t bytes) {
    const std::size_t offset = bytes_;
    bytes_ += (bytes + kAlign - 1) / kAlign * kAlign;
    return offset;
  }
  std::size_t bytes() const { return bytes_; }

 private:
  std::size_t bytes_ = 0;
};

/// A state of zeros with the shapes that the layout has at a position.
inline HostState zero_state(const StateLayout& layout, std::int64_t batch, std::int64_t position) {
  HostState state;
  state.batch = batch;
  state.position = position;
  for (const StatePart& part : layout.parts) {
    const auto count = static_cast<std::size_t>(part.rows * batch * part.cols_at(position));
    if (part.type == StatePart::Type::kF32) {
      state.parts.push_back({part.name, std::vector<float>(count)});
    } else {
      state.parts.push_back({part.name, std::vector<double>(count)});
    }
  }
  return state;
}

/// visit(values of the state, their place among the bytes of slots side by side, bytes) for all that lies together in
/// both. Requires: a state of the layout's shapes.
template <class State, class Visit>
void for_each_piece(State& state, const StateLayout& layout, Visit visit) {
  const auto batch = static_cast<std::size_t>(state.batch);
  for (std::size_t i = 0; i < layout.parts.size(); ++i) {
    const StatePart& part = layout.parts[i];
    const auto rows = static_cast<std::size_t>(part.rows);
    const auto cols = static_cast<std::size_t>(part.cols_at(state.position));
    const std::size_t together = part.spread.zeros == 0 ? cols : static_cast<std::size_t>(part.spread.width);
    std::visit(
        [&](auto& values) {
          if (values.empty()) return;
          for (std::size_t row = 0; row < rows * batch; ++row) {
            const std::size_t at = row % batch * layout.slot_bytes + part.offset + row / batch * part.row_bytes();
            for (std::size_t col = 0; col < cols; col += together) {
              visit(values.data() + row * cols + col, at + part.bytes_of(static_cast<std::int64_t>(col)),
                    together * part.element_bytes());
            }
          }
        },
        state.parts[i].values);
  }
}

/// Equal pieces of memory at equal distances.
struct StridedBytes {
  std::size_t offset = 0;
  std::size_t bytes = 0;   // of a piece
  std::size_t stride = 0;  // from one piece's first byte to the next one's
  std::size_t count = 0;
};

/// visit(StridedBytes) for what is in use of `count` slots side by side at a position: all but what no token has
/// filled.
template <class Visit>
void for_each_used(const StateLayout& layout, std::int64_t count, std::int64_t position, Visit visit) {
  const auto slots = static_cast<std::size_t>(count);
  std::size_t begin = 0;  // of what is in use, whole, in every slot
  const auto whole = [&](std::size_t end) {
    if (end > begin) visit(StridedBytes{begin, end - begin, layout.slot_bytes, slots});
  };
  for (const StatePart* part : layout.in_order()) {
    if (part->filling.filled(position) == part->filling.pieces) continue;
    const auto rows = static_cast<std::size_t>(part->rows);
    whole(part->offset);
    begin = part->offset + rows * part->row_bytes();
    const std::size_t bytes = part->bytes_of(part->cols_at(position));
    for (std::size_t slot = 0; bytes != 0 && slot < slots; ++slot) {
      visit(StridedBytes{slot * layout.slot_bytes + part->offset, bytes, part->row_bytes(), rows});
    }
  }
  if (begin == 0) {
    visit(StridedBytes{0, slots * layout.slot_bytes, 0, 1});
  } else {
    whole(layout.slot_bytes);
  }
}

}  // namespace mmrec::models
