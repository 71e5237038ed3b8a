#include "kernels/cpu/row_tile.h"

#include <sys/mman.h>

#include <atomic>
#include <map>
#include <new>
#include <oneapi/dnnl/dnnl.hpp>
#include <stdexcept>
#include <string>
#include <tuple>

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
#if DNNL_VERSION_MAJOR >= 3
  return {engine, x, weight, y, attributes};
#else
  return {dnnl::matmul::desc(x, weight, y), attributes, engine};
#endif
}

/// One shape's code.
struct Product {
  Product(const dnnl::engine& engine, std::int64_t x_stride, std::int64_t in, std::int64_t out)
      : x({kRowTile, in}, Type::f32, dnnl::memory::dims{x_stride, 1}),
        weight({in, out}, Type::f32, dnnl::memory::dims{1, in}),
        y({kRowTile, out}, Type::f32, dnnl::memory::dims{out, 1}) {
    const dnnl::matmul::primitive_desc description = describe(engine, x, weight, y);
    scratch = description.scratchpad_desc();
    code = dnnl::matmul(description);
  }

  /// The product of operands at these addresses; false where memory ran out.
  bool run(const dnnl::engine& engine, const dnnl::stream& stream, const void* from, const void* weights, void* room,
           float* to) const {
    // The library's memory objects point to what they only read as they do to what they write.
    const dnnl::memory in(x, engine, const_cast<void*>(from));
    const dnnl::memory matrix(weight, engine, const_cast<void*>(weights));
    const dnnl::memory out(y, engine, to);
    const dnnl::memory scratchpad(scratch, engine, room);
    const dnnl_exec_arg_t arguments[] = {{DNNL_ARG_SRC, in.get()},
                                         {DNNL_ARG_WEIGHTS, matrix.get()},
                                         {DNNL_ARG_DST, out.get()},
                                         {DNNL_ARG_SCRATCHPAD, scratchpad.get()}};
    return dnnl_primitive_execute(code.get(), stream.get(), 4, arguments) == dnnl_success;
  }

  dnnl::memory::desc x, weight, y, scratch;
  dnnl::matmul code;
};

}  // namespace

struct RowTileProducts::Impl {
  using Shape = std::tuple<std::int64_t, std::int64_t, std::int64_t>;  // x_stride, in, out

  explicit Impl(int count) : threads(static_cast<std::size_t>(count)) {}

  void prepare(const Shape& shape) {
    if (products.contains(shape)) return;
    require_room(engine ? kRoomOfShape : kRoomOfLibrary);
    if (!engine) {
      engine = dnnl::engine(dnnl::engine::kind::cpu, 0);
      stream = dnnl::stream(engine);
    }
    const auto [x_stride, in, out] = shape;
    Product product(engine, x_stride, in, out);
    const std::size_t wanted = (product.scratch.get_size() + kLine - 1) / kLine * kLine;
    if (wanted > scratch_bytes) {
      scratch = HostBuffer<std::byte>(wanted * threads, Uninitialized{});
      scratch_bytes = wanted;
    }
    // Once on zeros: some code is made by the first product only.
    const HostBuffer<float> operands(static_cast<std::size_t>((kRowTile - 1) * x_stride + in + in * out));
    HostBuffer<float> y(static_cast<std::size_t>(kRowTile * out));
    const float* const x = operands.data();
    if (!product.run(engine, stream, x, x + (kRowTile - 1) * x_stride + in, scratch.data(), y.data())) {
      throw std::bad_alloc();
    }
    products.emplace(shape, std::move(product));
  }

  static constexpr std::size_t kLine = 4096;

  std::size_t threads;
  dnnl::engine engine;  // made by the first product: most steps need none
  dnnl::stream stream;
  std::map<Shape, Product> products;
  HostBuffer<std::byte> scratch;  // scratch_bytes for each thread
  std::size_t scratch_bytes = 0;
  std::atomic<bool> failed{false};
};

RowTileProducts::RowTileProducts(int threads) : impl_(std::make_unique<Impl>(threads)) {}
RowTileProducts::~RowTileProducts() = default;

void RowTileProducts::prepare(std::int64_t x_stride, std::int64_t in, std::int64_t out, std::int64_t panel) {
  const OneThread alone;
  try {
    if (out >= panel) impl_->prepare({x_stride, in, panel});
    if (out % panel != 0) impl_->prepare({x_stride, in, out % panel});
  } catch (const dnnl::error& error) {
    if (error.status == dnnl_out_of_memory || error.status == dnnl_runtime_error) throw std::bad_alloc();
    throw std::runtime_error(std::string("oneDNN: ") + error.what());
  }
}

void RowTileProducts::multiply(int thread, const float* x, std::int64_t x_stride, const WeightView<Host>& panel,
                               float* widened, float* y) noexcept {
  const OneThread alone;
  const void* weights = panel.data;
  if (panel.format != DType::kF32) {
    simd().matvec.widen[static_cast<std::size_t>(panel.format.code)](panel.data, widened, panel.rows * panel.cols);
    weights = widened;
  }
  try {
    Impl& all = *impl_;
    const Product& product = all.products.at({x_stride, panel.cols, panel.rows});
    std::byte* const scratch = all.scratch.data() + static_cast<std::size_t>(thread) * all.scratch_bytes;
    if (product.run(all.engine, all.stream, x, weights, scratch, y)) return;
  } catch (...) {  // no memory for what describes the operands
  }
  impl_->failed.store(true, std::memory_order_relaxed);
}

void RowTileProducts::check() {
  if (impl_->failed.exchange(false, std::memory_order_relaxed)) throw std::bad_alloc();
}

}  // namespace mmrec::kernels
