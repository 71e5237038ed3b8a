// What follows a block's recurrence (FinishSegments): per memory segment attention over the slots, W_o, rmsnorm, the
// ffn, and the mean of the outputs, which is a slot of the next segment's attention.
//
// Given the slots, every row goes its own way, so rows are dealt out in tiles of 16 to teams of 8 blocks. A block owns
// an eighth of the outputs of each matrix and keeps these weights in shared memory from the first piece to the last; it
// owns one head of the attention. Three times a tile the blocks of a team exchange what they have computed through L2,
// where it is the next product's operand:
//   attend -> attended | W_o -> y | rmsnorm, W_1, gelu -> hidden | W_2 -> x, sums over the tile
//
// Words exchanged tell by themselves whether they have been written: before that they are all ones (element.cuh), so a
// reader polls what it needs and nothing else. A team's tiles take kPlaces places in turn. A block that has the second
// exchange of tile n knows that all have ended tile n - 1; in tile n + 1, while the first exchange is under way, it
// makes its words of tile n - 1 all ones again, for tile n + 3. Every thread has a fence in every tile, between the
// second and the third exchange: that of n + 1 and that of n + 2 put the ones before all that is read in tile n + 3.
//
// A tile's fp64 sums over time are all that teams tell each other. They go through Cuda::flags(), zero between ops,
// where a word that is not zero has been written (a sum of 0 is written as -0); a block that needs a slot waits for the
// sums of all tiles and adds them up, always in the same order. Words go back to zero when all have read them: two
// pieces later, or at the end. What does not need that slot is done before: during a tile's last exchange a block
// attends to all older slots for the team's next tile.
//
// Products are 16 rows by tensor core, operands in shared memory in steps of 64 bytes of k (tile_product.cuh's
// permutation), rows of odd number with the halves of every 128 bytes exchanged, so that 8 lanes meet no bank twice.
// Warps divide k and the outputs; partial sums meet in shared memory in a fixed order.
// Bytes: weights once per team from L2; q, x, h and v read once, x written once; per tile of 16 rows 8 (4 D + 2 D + 2
// F) 16 bytes from L2 to operands, and 8 bytes per channel for the sums. Blocks fill a multiprocessor each.
#include "models/mmrec/cuda/segments/block.cuh"

#include <algorithm>
#include <bit>

#include "kernels/cuda/runtime/launch.cuh"

namespace mmrec::kernels {
namespace {

using namespace segments;

constexpr int kMostTeams = 64;
constexpr std::int64_t kSumWords = std::int64_t{Cuda::kFlagWords} - kMostTeams * kCounterWords;

template <class A, bool kKnown>
__global__ void __launch_bounds__(kThreads, 1) finish_segments_kernel(const __grid_constant__ Params<A> p) {
  BlockTasks<A, kKnown> tasks(p);
  Block<A, kKnown>(tasks).run();
}

template <class A>
Sizes sizes_of(const FinishSegments<Device, A>& op) {
  return {static_cast<int>(op.x.dim), static_cast<int>(op.ffn_in.rows), static_cast<int>(op.x.dim / op.heads)};
}
template <class A>
auto kernel_of(const FinishSegments<Device, A>& op) {
  return sizes_of(op) == kKnownSizes ? &finish_segments_kernel<A, true> : &finish_segments_kernel<A, false>;
}

template <class A>
Plan plan_of(const FinishSegments<Device, A>& op) {
  const std::int64_t dim = op.x.dim;
  const std::int64_t ffn = op.ffn_in.rows;
  std::int64_t bytes = 0;
  const auto next = [&bytes](std::int64_t size) {
    const std::int64_t at = bytes;
    bytes += ceil_div(size, 128) * 128;
    return static_cast<int>(at);
  };
  Plan plan = {};
  next(dim * dim * 2 / kTeam);
  plan.ffn_in = next(ffn * dim * 2 / kTeam);
  plan.ffn_out = next(ffn * dim * 2 / kTeam);
  plan.hidden = next(kRows * 2 * std::max(dim, ffn));
  plan.normed = next(kRows * 2 * dim);
  const std::int64_t slots = op.memory_slots * (dim / op.heads) * 4;
  const std::int64_t sums = kGroups * 8 * (dim / op.heads);
  plan.work = next(std::max({slots, sums, 2 * kRows * 4 * dim / kTeam, kRows * 4 * ffn / kTeam}));
  plan.norm = next(4 * dim);
  plan.bias = next(4 * ffn / kTeam);
  plan.bytes = static_cast<int>(bytes);
  return plan;
}

template <class A>
Exchange exchange_of(const FinishSegments<Device, A>& op) {
  const auto dim = static_cast<int>(op.x.dim);
  const auto ffn = static_cast<int>(op.ffn_in.rows);
  return {.attended = 0, .mixed = kRows * 2 * dim, .hidden = kRows * 6 * dim, .bytes = kRows * (6 * dim + 2 * ffn)};
}

LaunchConfig config_of(const Plan& plan, std::int64_t blocks) {
  return {.grid = dim3(static_cast<unsigned>(blocks)),
          .block = dim3(kThreads),
          .shared_bytes = static_cast<std::size_t>(plan.bytes),
          .cooperative = true};
}

/// Teams that run at once.
template <class A>
int resident_teams(const Cuda& cuda, const FinishSegments<Device, A>& op, const Plan& plan) {
  return std::min(resident_blocks(cuda, config_of(plan, 1), kernel_of(op)) / kTeam, kMostTeams);
}

struct Cut {
  int pieces;
  int tiles;  // of the longest
};
template <class A>
Cut cut_of(const FinishSegments<Device, A>& op) {
  const std::int64_t first = std::min(op.x.time, op.segment - op.position % op.segment);
  const std::int64_t rest = op.x.time - first;
  const std::int64_t longest = std::max(first, std::min(rest, op.segment));
  return {static_cast<int>(1 + ceil_div(rest, op.segment)), static_cast<int>(ceil_div(longest, kRows))};
}

/// Sequences whose sums have room.
template <class A>
std::int64_t sequences_of(const FinishSegments<Device, A>& op) {
  const Cut cut = cut_of(op);
  const std::int64_t words = 2 * op.x.dim * cut.pieces * cut.tiles;
  return kSumWords / words;
}

}  // namespace

template <class A>
bool finish_segments_supported(const Cuda& cuda, const FinishSegments<Device, A>& op) {
  if constexpr (sizeof(A) != 2) {
    return false;
  } else {
    const std::int64_t dim = op.x.dim;
    const std::int64_t ffn = op.ffn_in.rows;
    if (cuda.compute_capability() < 80 || op.x.batch == 0 || op.x.time == 0) return false;
    if (dim % 64 != 0 || ffn % 64 != 0 || dim > kMostDim || ffn > 8192 || op.heads > kTeam || dim % op.heads != 0) {
      return false;
    }
    const std::int64_t width = dim / op.heads;
    if (width < 32 || width > 64 * kMostPairs || !std::has_single_bit(static_cast<unsigned>(width))) return false;
    if (4 * width > 2 * std::max(dim, ffn)) return false;  // a row's query in fp32 where its operands will lie
    if (op.memory_slots * width > kHeld * kThreads * kGroup || op.segment > 1 << 20) return false;
    const bool aligned = takes_16_bytes(op.x) && takes_16_bytes(op.h) && takes_16_bytes(op.v) && takes_16_bytes(op.q) &&
                         takes_16_bytes(op.memory, op.slot_bytes) && takes_16_bytes(op.memory_out.data) &&
                         takes_16_bytes(op.ffn_in.data) && takes_16_bytes(op.ffn_out.data) &&
                         takes_16_bytes(op.memory_out_bias) && takes_16_bytes(op.norm) &&
                         takes_16_bytes(op.ffn_in_bias) && takes_16_bytes(op.ffn_out_bias);
    if (!aligned || sequences_of(op) == 0) return false;
    const Plan plan = plan_of(op);
    return static_cast<std::size_t>(plan.bytes) <= cuda.shared_memory_per_block() && resident_teams(cuda, op, plan) > 0;
  }
}

template <class A>
void finish_segments(Cuda& cuda, const FinishSegments<Device, A>& op) {
  const Plan plan = plan_of(op);
  const Cut cut = cut_of(op);
  const int resident = resident_teams(cuda, op, plan);
  const std::int64_t most = std::min<std::int64_t>(sequences_of(op), resident);
  for (std::int64_t b = 0; b < op.x.batch; b += most) {
    const std::int64_t sequences = std::min(most, op.x.batch - b);
    Params<A> p = {.op = op,
                   .sizes = sizes_of(op),
                   .scale = 1.4426950408889634F / std::sqrt(static_cast<float>(op.x.dim / op.heads - op.head_padding)),
                   .sums = reinterpret_cast<ulonglong2*>(cuda.flags()),
                   .counters = cuda.flags() + kSumWords,
                   .exchange = static_cast<std::byte*>(cuda.scratch()),
                   .places = exchange_of(op),
                   .plan = plan,
                   .time = static_cast<int>(op.x.time),
                   .segment = static_cast<int>(op.segment),
                   .inverse = std::has_single_bit(static_cast<std::uint64_t>(op.segment))
                                  ? 1.0 / static_cast<double>(op.segment)
                                  : 0.0,
                   .into_segment = static_cast<int>(op.position % op.segment),
                   .slots = static_cast<int>(op.memory_slots),
                   .filled = static_cast<int>(std::min(op.position / op.segment, op.memory_slots)),
                   .next_slot = static_cast<int>(op.position / op.segment % op.memory_slots),
                   .teams = static_cast<int>(std::min<std::int64_t>(resident / sequences, cut.tiles)),
                   .pieces = cut.pieces,
                   .tiles = cut.tiles};
    p.op.x.data = op.x.at(b, 0, 0);
    p.op.h.data = op.h.at(b, 0, 0);
    p.op.v.data = op.v.at(b, 0, 0);
    p.op.q.data = op.q.at(b, 0, 0);
    p.op.memory = bytes_further(op.memory, b * op.slot_bytes);
    p.op.sum = bytes_further(op.sum, b * op.slot_bytes);
    launch(cuda.stream(), config_of(plan, sequences * p.teams * kTeam), kernel_of(op), p);
  }
}

template bool finish_segments_supported(const Cuda&, const FinishSegments<Device, float>&);
template bool finish_segments_supported(const Cuda&, const FinishSegments<Device, BFloat16>&);
template bool finish_segments_supported(const Cuda&, const FinishSegments<Device, Float16>&);
template void finish_segments(Cuda&, const FinishSegments<Device, BFloat16>&);
template void finish_segments(Cuda&, const FinishSegments<Device, Float16>&);

}  // namespace mmrec::kernels
