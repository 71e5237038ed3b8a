#include "kernels/cpu/row_tile.h"

#include <sys/mman.h>
#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cstring>
#include <map>
#include <new>
#include <oneapi/dnnl/dnnl.hpp>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "kernels/cpu/cpu.h"
#include "kernels/cpu/one_thread.h"
#include "kernels/cpu/simd.h"

namespace mmrec::kernels {
namespace {

/// Throws std::bad_alloc unless the address space has room for so much more. The library writes to code that it got no
/// memory for, and throws through frames of the system's that cannot be unwound without memory; so it is not asked
/// then.
void require_room(std::size_t bytes) {
  void* const room = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (room == MAP_FAILED) throw std::bad_alloc();
  (void)munmap(room, bytes);
}
constexpr std::size_t kRoomOfLibrary = std::size_t{24} << 20;  // its first product, and what it keeps; generously
constexpr std::size_t kRoomOfShape = std::size_t{6} << 20;     // code of another shape

using Type = dnnl::memory::data_type;

dnnl::matmul::primitive_desc describe(const dnnl::engine& engine, const dnnl::memory::desc& x,
                                      const dnnl::memory::desc& weight, const dnnl::memory::desc& y) {
  dnnl::primitive_attr attributes;
  attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
  attributes.set_fpmath_mode(dnnl::fpmath_mode::strict);  // the default is the process's
#if DNNL_VERSION_MAJOR >= 3
  return {engine, x, weight, y, attributes};
#else
  return {dnnl::matmul::desc(x, weight, y), attributes, engine};
#endif
}

/// parts[p][t] = part p of x[t]. Only where there are matrix instructions, so AVX-512 is there too.
[[gnu::target("avx512f,avx512bw,avx512vl,avx512dq")]] void split(const float* x, std::int64_t x_stride, std::int64_t in,
                                                                 std::uint16_t* parts) {
  for (std::int64_t t = 0; t < kRowTile; ++t, x += x_stride) {
    std::uint16_t* const part0 = parts + t * in;
    std::uint16_t* const part1 = part0 + kRowTile * in;
    std::uint16_t* const part2 = part1 + kRowTile * in;
    for (std::int64_t i = 0; i < in; ++i) {
      // Cut off, not rounded, so that no part overflows and every difference is exact; the last has 8 bits left.
      const auto whole = std::bit_cast<std::uint32_t>(x[i]);
      const float rest = x[i] - std::bit_cast<float>(whole & 0xFFFF0000U);
      const auto middle = std::bit_cast<std::uint32_t>(rest);
      const float last = rest - std::bit_cast<float>(middle & 0xFFFF0000U);
      part0[i] = static_cast<std::uint16_t>(whole >> 16);
      part1[i] = static_cast<std::uint16_t>(middle >> 16);
      part2[i] = static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(last) >> 16);
    }
  }
}

/// to[t] = x[t] in bf16, to nearest even. Where there are matrix instructions, likewise.
[[gnu::target("avx512f,avx512bw,avx512vl,avx512dq")]] void round_rows(const float* x, std::int64_t x_stride,
                                                                      std::int64_t in, std::uint16_t* to) {
  for (std::int64_t t = 0; t < kRowTile; ++t, x += x_stride, to += in) {
    for (std::int64_t i = 0; i < in; ++i) to[i] = from_float<BFloat16>(x[i]).bits;
  }
}

/// Whether a panel's numbers are bf16 numbers but for a scale of each row.
bool has_row_scales(WeightFormat format) { return is_quantized(format.code) && format.group == 0; }

/// One shape's code: rows of fp32 by fp32 weights, or `count` parts of a tile's rows by bf16 weights.
struct Product {
  Product(const dnnl::engine& engine, bool split, std::int64_t count, std::int64_t x_stride, std::int64_t in,
          std::int64_t out)
      : x({split ? count * kRowTile : kRowTile, in}, split ? Type::bf16 : Type::f32, dnnl::memory::dims{x_stride, 1}),
        weight({in, out}, split ? Type::bf16 : Type::f32, dnnl::memory::dims{1, in}),
        y({split ? count * kRowTile : kRowTile, out}, Type::f32, dnnl::memory::dims{out, 1}) {
    const dnnl::matmul::primitive_desc description = describe(engine, x, weight, y);
    scratch = description.scratchpad_desc();
    code = dnnl::matmul(description);
  }

  /// The library's words for where operands lie. Made beforehand, because the library does not bear it that there is no
  /// memory for them; one for each thread, which sets the addresses.
  struct Operands {
    Operands(const Product& product, const dnnl::engine& engine)
        : x(product.x, engine, DNNL_MEMORY_NONE),
          weight(product.weight, engine, DNNL_MEMORY_NONE),
          y(product.y, engine, DNNL_MEMORY_NONE),
          scratch(product.scratch, engine, DNNL_MEMORY_NONE) {}
    dnnl::memory x, weight, y, scratch;
  };

  /// The product of operands at these addresses; false where memory ran out.
  bool run(Operands& at, const dnnl::stream& stream, const void* from, const void* weights, void* room,
           float* to) const {
    // What is only read is pointed to as what is written.
    at.x.set_data_handle(const_cast<void*>(from));
    at.weight.set_data_handle(const_cast<void*>(weights));
    at.y.set_data_handle(to);
    at.scratch.set_data_handle(room);
    const dnnl_exec_arg_t arguments[] = {{DNNL_ARG_SRC, at.x.get()},
                                         {DNNL_ARG_WEIGHTS, at.weight.get()},
                                         {DNNL_ARG_DST, at.y.get()},
                                         {DNNL_ARG_SCRATCHPAD, at.scratch.get()}};
    return dnnl_primitive_execute(code.get(), stream.get(), 4, arguments) == dnnl_success;
  }

  dnnl::memory::desc x, weight, y, scratch;
  dnnl::matmul code;
  std::vector<Operands> operands;  // of each thread
};

}  // namespace

struct RowTileProducts::Impl {
  using Shape = std::tuple<bool, std::int64_t, std::int64_t, std::int64_t>;  // split, x_stride, in, out

  /// A thread's operands in parts, and what they are the parts of: of one region's, whose operands stay as they are.
  struct Parts {
    const float* x = nullptr;
    std::int64_t stride = 0, in = 0;
    std::uint64_t region = 0;
  };

  Impl(int count, bool rounds)
      : threads(static_cast<std::size_t>(count)), part_count(rounds ? 1 : kParts), parts(threads) {}

  void prepare(const Shape& shape) {
    if (products.contains(shape)) return;
    require_room(engine ? kRoomOfShape : kRoomOfLibrary);
    if (!engine) {
      engine = dnnl::engine(dnnl::engine::kind::cpu, 0);
      stream = dnnl::stream(engine);
    }
    const auto [split, x_stride, in, out] = shape;
    Product product(engine, split, part_count, x_stride, in, out);
    const std::size_t wanted = (product.scratch.get_size() + kLine - 1) / kLine * kLine;
    if (wanted > scratch_bytes) {
      scratch = HostBuffer<std::byte>(wanted * threads, Uninitialized{});
      scratch_bytes = wanted;
    }
    product.operands.reserve(threads);
    for (std::size_t i = 0; i < threads; ++i) product.operands.emplace_back(product, engine);
    // Once on zeros: some code is made by the first product only.
    const HostBuffer<std::byte> x(product.x.get_size()), weight(product.weight.get_size());
    HostBuffer<float> y(product.y.get_size() / sizeof(float));
    if (!product.run(product.operands[0], stream, x.data(), weight.data(), scratch.data(), y.data())) {
      throw std::bad_alloc();
    }
    if (split) {
      const auto held = static_cast<std::size_t>(part_count * kRowTile * in) * sizeof(std::uint16_t);
      if (held > part_bytes) {
        const std::size_t bytes = (held + kLine - 1) / kLine * kLine;
        part_memory = HostBuffer<std::byte>(bytes * threads, Uninitialized{});
        part_bytes = bytes;
      }
      if (part_count > 1 && y.size() > sum_floats) {
        sums = HostBuffer<float>(y.size() * threads, Uninitialized{});
        sum_floats = y.size();
      }
    }
    products.emplace(shape, std::move(product));
  }

  /// Products of a panel of bf16 numbers are summed as wide as those of fp32, and faster: of x in parts, or rounded.
  bool splits(WeightFormat format) const {
    constexpr auto kMatrices = static_cast<unsigned>(dnnl_cpu_isa_avx512_core_amx);  // bits, of what it has besides too
    static const bool has_tiles = (static_cast<unsigned>(dnnl_get_effective_cpu_isa()) & kMatrices) == kMatrices;
    return has_tiles &&
           (format.code == DType::kBF16 || has_row_scales(format) || (part_count == 1 && is_quantized(format.code)));
  }

  /// y = the sum of the parts' products, of the smallest first, times what is left of a row's scale.
  bool run_split(std::size_t thread, const float* x, std::int64_t x_stride, const WeightView<Host>& panel,
                 float* narrowed, float* y) {
    const void* weights = panel.data;
    if (panel.format.code != DType::kBF16) {
      simd().matvec.narrow[panel.format.code](panel, reinterpret_cast<BFloat16*>(narrowed));
      weights = narrowed;
    }
    if (!add_parts(thread, x, x_stride, panel, weights, y)) return false;
    if (!has_row_scales(panel.format)) return true;
    std::array<float, kMostPanelRows> scales{};
    for (std::int64_t o = 0; o < panel.rows; ++o) {
      float scale = 0.0F;
      const auto* const row = static_cast<const std::byte*>(panel.middle_rows(o, 1).data);
      std::memcpy(&scale, row + number_bytes(panel.format, panel.cols), sizeof(scale));
      scales[static_cast<std::size_t>(o)] = scale / power_of(scale);
    }
    for (std::int64_t t = 0; t < kRowTile; ++t, y += panel.rows) {
      for (std::int64_t o = 0; o < panel.rows; ++o) y[o] *= scales[static_cast<std::size_t>(o)];
    }
    return true;
  }
  bool add_parts(std::size_t thread, const float* x, std::int64_t x_stride, const WeightView<Host>& panel,
                 const void* weights, float* y) {
    Product& product = products.at({true, panel.cols, panel.cols, panel.rows});
    auto* const pieces = reinterpret_cast<std::uint16_t*>(part_memory.data() + thread * part_bytes);
    Parts& there = parts[thread];
    if (there.region != region || there.x != x || there.stride != x_stride || there.in != panel.cols) {
      if (part_count == 1) {
        round_rows(x, x_stride, panel.cols, pieces);
      } else {
        split(x, x_stride, panel.cols, pieces);
      }
      there = {x, x_stride, panel.cols, region};
    }
    std::byte* const room = scratch.data() + thread * scratch_bytes;
    if (part_count == 1) return product.run(product.operands[thread], stream, pieces, weights, room, y);
    float* const sum = sums.data() + thread * sum_floats;
    if (!product.run(product.operands[thread], stream, pieces, weights, room, sum)) return false;
    const std::int64_t count = kRowTile * panel.rows;
    for (std::int64_t i = 0; i < count; ++i) y[i] = (sum[2 * count + i] + sum[count + i]) + sum[i];
    return true;
  }

  static constexpr std::size_t kLine = 4096;

  std::size_t threads;
  std::int64_t part_count;  // of x: kParts, or 1 where it is rounded
  dnnl::engine engine;      // made by the first product: most steps need none
  dnnl::stream stream;
  std::map<Shape, Product> products;
  HostBuffer<std::byte> scratch;  // scratch_bytes for each thread
  std::size_t scratch_bytes = 0;
  std::uint64_t region = 0;           // of threads, counted
  std::vector<Parts> parts;           // of each thread
  HostBuffer<std::byte> part_memory;  // part_bytes for each thread
  HostBuffer<float> sums;             // sum_floats for each thread
  std::size_t part_bytes = 0, sum_floats = 0;
  std::atomic<bool> failed{false};
};

RowTileProducts::RowTileProducts(int threads, bool rounds_inputs)
    : impl_(std::make_unique<Impl>(threads, rounds_inputs)) {}
RowTileProducts::~RowTileProducts() = default;

void RowTileProducts::prepare(std::int64_t x_stride, const WeightView<Host>& weight, std::int64_t panel) {
  const OneThread alone;
  const std::int64_t in = weight.cols, out = weight.rows;
  const bool split = impl_->splits(weight.format);
  if (split) x_stride = in;
  impl_->region += 1;
  try {
    if (out >= panel) impl_->prepare({split, x_stride, in, panel});
    if (out % panel != 0) impl_->prepare({split, x_stride, in, out % panel});
  } catch (const dnnl::error& error) {
    if (error.status == dnnl_out_of_memory || error.status == dnnl_runtime_error) throw std::bad_alloc();
    throw std::runtime_error(std::string("oneDNN: ") + error.what());
  }
}

void RowTileProducts::multiply(int thread, const float* x, std::int64_t x_stride, const WeightView<Host>& panel,
                               float* widened, float* y) noexcept {
  const OneThread alone;
  Impl& all = *impl_;
  try {
    if (all.splits(panel.format)) {
      if (all.run_split(static_cast<std::size_t>(thread), x, x_stride, panel, widened, y)) return;
      all.failed.store(true, std::memory_order_relaxed);
      return;
    }
    const void* weights = panel.data;
    if (panel.format != DType::kF32) {
      simd().matvec.widen[panel.format.code](panel, widened);
      weights = widened;
    }
    Product& product = all.products.at({false, x_stride, panel.cols, panel.rows});
    std::byte* const scratch = all.scratch.data() + static_cast<std::size_t>(thread) * all.scratch_bytes;
    if (product.run(product.operands[static_cast<std::size_t>(thread)], all.stream, x, weights, scratch, y)) return;
  } catch (...) {  // no memory for the call's own list of operands
  }
  all.failed.store(true, std::memory_order_relaxed);
}

void RowTileProducts::check() {
  if (impl_->failed.exchange(false, std::memory_order_relaxed)) throw std::bad_alloc();
}

std::string matrix_library() {
  const dnnl_version_t& version = *dnnl_version();
  unsigned int kind = 0;
#if defined(__x86_64__)
  constexpr unsigned int kWithoutStepping = 0x0fff3ff0;
  unsigned int unused[3] = {};
  if (__get_cpuid(1, &kind, &unused[0], &unused[1], &unused[2]) != 0) kind &= kWithoutStepping;
#endif
  return "oneDNN " + std::to_string(version.major) + "." + std::to_string(version.minor) + "." +
         std::to_string(version.patch) + ", instructions " + std::to_string(dnnl_get_effective_cpu_isa()) +
         ", processor " + std::to_string(kind);
}

}  // namespace mmrec::kernels
