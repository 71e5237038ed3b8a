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
#include "kernels/cpu/onednn_call.h"
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

/// y = the digits' sums times the scales of x and of the weights.
[[gnu::target("avx512f,avx512bw,avx512vl,avx512dq")]] void add_digits(const std::int32_t* sums, const double* x_scales,
                                                                      const double* scales, std::int64_t out,
                                                                      float* y) {
  const std::int64_t count = kRowTile * out;
  for (std::int64_t t = 0; t < kRowTile; ++t, sums += out, y += out) {
    const double scale = x_scales[t];
    for (std::int64_t o = 0; o < out; ++o) {
      const double high = sums[2 * count + o], middle = sums[count + o], low = sums[o];
      y[o] = static_cast<float>(((high * 256.0 + middle) * 256.0 + low) * scale * scales[o]);
    }
  }
}

/// What a tile's rows are multiplied as: fp32, parts of bf16, or digits of 8 bits.
enum class Operand : std::uint8_t { kFloats, kParts, kDigits };

constexpr Type kTypes[] = {Type::f32, Type::bf16, Type::s8};
constexpr std::int64_t kBytes[] = {4, 2, 1};  // of an element

/// One shape's code: `count` times a tile's rows, of operands of one type, by weights of this type.
struct Product {
  Product(const dnnl::engine& engine, Operand operand, std::int64_t count, std::int64_t x_stride, std::int64_t in,
          std::int64_t out)
      : x({count * kRowTile, in}, kTypes[int(operand)], dnnl::memory::dims{x_stride, 1}),
        weight({in, out}, kTypes[int(operand)], dnnl::memory::dims{1, in}),
        y({count * kRowTile, out}, operand == Operand::kDigits ? Type::s32 : Type::f32, dnnl::memory::dims{out, 1}) {
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
           void* to) const {
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
  using Shape = std::tuple<Operand, std::int64_t, std::int64_t, std::int64_t>;  // x_stride, in, out

  /// A thread's operands in parts or digits, and what they are of: of one region, whose operands stay as they are.
  struct Parts {
    const float* x = nullptr;
    std::int64_t stride = 0, in = 0;
    std::uint64_t region = 0;
    Operand operand = Operand::kFloats;
    std::array<double, kRowTile> scales{};  // of digits
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
    const auto [operand, x_stride, in, out] = shape;
    const std::int64_t count = operand == Operand::kFloats ? 1 : operand == Operand::kDigits ? kDigits : part_count;
    Product product(engine, operand, count, x_stride, in, out);
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
    if (operand != Operand::kFloats) {
      const auto held = static_cast<std::size_t>(count * kRowTile * in * kBytes[int(operand)]);
      if (held > part_bytes) {
        const std::size_t bytes = (held + kLine - 1) / kLine * kLine;
        part_memory = HostBuffer<std::byte>(bytes * threads, Uninitialized{});
        part_bytes = bytes;
      }
      if (count > 1 && y.size() > sum_floats) {
        sums = HostBuffer<float>(y.size() * threads, Uninitialized{});
        sum_floats = y.size();
      }
    }
    products.emplace(shape, std::move(product));
  }

  /// Products of a panel of bf16 numbers are summed as wide as those of fp32, and faster: of x in parts, or rounded. So
  /// are those of int8 numbers, of x in digits.
  Operand operand_of(WeightFormat format) const {
    static const auto isa = static_cast<unsigned>(dnnl_get_effective_cpu_isa());
    const auto has = [](dnnl_cpu_isa_t all) {  // bits, of what it has besides too
      return (isa & static_cast<unsigned>(all)) == static_cast<unsigned>(all);
    };
    const bool has_tiles = has(dnnl_cpu_isa_avx512_core_amx), rounds = has_tiles && part_count == 1;
    if (!rounds && format == DType::kI8 && simd().matvec.cut != nullptr && has(dnnl_cpu_isa_avx512_core_vnni)) {
      return Operand::kDigits;
    }
    const bool splits = format.code == DType::kBF16 || has_row_scales(format) || (rounds && is_quantized(format.code));
    return has_tiles && splits ? Operand::kParts : Operand::kFloats;
  }
  /// Inputs of products: digits of whole blocks of weights.
  static std::int64_t inputs_of(Operand operand, const WeightView<Host>& weight) {
    return operand == Operand::kDigits ? number_bytes(weight.format, weight.cols) : weight.cols;
  }

  /// Whether a thread has other operands than these; takes them.
  bool takes(Parts& there, const float* x, std::int64_t x_stride, std::int64_t in, Operand operand) const {
    if (there.region == region && there.x == x && there.stride == x_stride && there.in == in &&
        there.operand == operand) {
      return false;
    }
    there.x = x, there.stride = x_stride, there.in = in, there.region = region, there.operand = operand;
    return true;
  }

  /// y = the sum of the digits' products, times the scales.
  bool run_digits(std::size_t thread, const float* x, std::int64_t x_stride, const WeightView<Host>& panel,
                  float* numbers, float* y) {
    const std::int64_t in = inputs_of(Operand::kDigits, panel);
    Product& product = products.at({Operand::kDigits, in, in, panel.rows});
    auto* const digits = reinterpret_cast<signed char*>(part_memory.data() + thread * part_bytes);
    Parts& there = parts[thread];
    if (takes(there, x, x_stride, in, Operand::kDigits)) {
      for (std::int64_t t = 0; t < kRowTile; ++t) {
        there.scales[static_cast<std::size_t>(t)] =
            simd().matvec.cut(x + t * x_stride, panel.cols, kRowTile * in, digits + t * in);
      }
    }
    std::array<double, kMostPanelRows> scales{};
    for (std::int64_t o = 0; o < panel.rows; ++o) {
      // The library is fast where rows lie one after another.
      const auto* const row = static_cast<const std::byte*>(panel.middle_rows(o, 1).data);
      std::memcpy(reinterpret_cast<std::byte*>(numbers) + o * in, row, static_cast<std::size_t>(in));
      scales[static_cast<std::size_t>(o)] = static_cast<double>(scale_of(panel, o));
    }
    auto* const sum = reinterpret_cast<std::int32_t*>(sums.data() + thread * sum_floats);
    std::byte* const room = scratch.data() + thread * scratch_bytes;
    if (!product.run(product.operands[thread], stream, digits, numbers, room, sum)) return false;
    add_digits(sum, there.scales.data(), scales.data(), panel.rows, y);
    return true;
  }

  /// The only scale of a row.
  static float scale_of(const WeightView<Host>& panel, std::int64_t row) {
    float scale = 0.0F;
    const auto* const bytes = static_cast<const std::byte*>(panel.middle_rows(row, 1).data);
    std::memcpy(&scale, bytes + number_bytes(panel.format, panel.cols), sizeof(scale));
    return scale;
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
      const float scale = scale_of(panel, o);
      scales[static_cast<std::size_t>(o)] = scale / power_of(scale);
    }
    for (std::int64_t t = 0; t < kRowTile; ++t, y += panel.rows) {
      for (std::int64_t o = 0; o < panel.rows; ++o) y[o] *= scales[static_cast<std::size_t>(o)];
    }
    return true;
  }
  bool add_parts(std::size_t thread, const float* x, std::int64_t x_stride, const WeightView<Host>& panel,
                 const void* weights, float* y) {
    Product& product = products.at({Operand::kParts, panel.cols, panel.cols, panel.rows});
    auto* const pieces = reinterpret_cast<std::uint16_t*>(part_memory.data() + thread * part_bytes);
    if (takes(parts[thread], x, x_stride, panel.cols, Operand::kParts)) {
      if (part_count == 1) {
        round_rows(x, x_stride, panel.cols, pieces);
      } else {
        split(x, x_stride, panel.cols, pieces);
      }
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
  const OneDnnCall call;
  const Operand operand = impl_->operand_of(weight.format);
  const std::int64_t in = Impl::inputs_of(operand, weight), out = weight.rows;
  if (operand != Operand::kFloats) x_stride = in;
  impl_->region += 1;
  try {
    if (out >= panel) impl_->prepare({operand, x_stride, in, panel});
    if (out % panel != 0) impl_->prepare({operand, x_stride, in, out % panel});
  } catch (const dnnl::error& error) {
    if (error.status == dnnl_out_of_memory || error.status == dnnl_runtime_error) throw std::bad_alloc();
    throw std::runtime_error(std::string("oneDNN: ") + error.what());
  }
}

void RowTileProducts::multiply(int thread, const float* x, std::int64_t x_stride, const WeightView<Host>& panel,
                               float* widened, float* y) noexcept {
  const OneDnnCall call;
  Impl& all = *impl_;
  try {
    const Operand operand = all.operand_of(panel.format);
    if (operand != Operand::kFloats) {
      const auto run = operand == Operand::kParts ? &Impl::run_split : &Impl::run_digits;
      if ((all.*run)(static_cast<std::size_t>(thread), x, x_stride, panel, widened, y)) return;
      all.failed.store(true, std::memory_order_relaxed);
      return;
    }
    const void* weights = panel.data;
    if (panel.format != DType::kF32) {
      simd().matvec.widen[panel.format.code](panel, widened);
      weights = widened;
    }
    Product& product = all.products.at({Operand::kFloats, x_stride, panel.cols, panel.rows});
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
