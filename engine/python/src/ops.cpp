// The kernels by themselves, for mmrec.ops: arrays become the operands of mmrec/kernels.h.
#include <map>

#include "engine/python/src/binding.h"
#include "engine/python/src/operand.h"
#include "mmrec/kernels.h"

namespace mmrec::python {
namespace {

/// Contexts that outlive the calls. On the CPU each thread has one; on a GPU each stream, which one thread at a time
/// may use. They are never freed: the interpreter may end after the device's driver.
struct StreamContext {
  std::mutex mutex;
  KernelContext context;
};

StreamContext& stream_context(int device, std::uintptr_t stream) {
  static std::mutex mutex;
  static auto& contexts = *new std::map<std::pair<int, std::uintptr_t>, std::unique_ptr<StreamContext>>;
  const std::scoped_lock lock(mutex);
  auto& found = contexts[{device, stream}];
  if (!found) {
    // An aggregate, which make_unique() does not make. That is how streams come from Python.
    // NOLINTNEXTLINE(performance-no-int-to-ptr,modernize-make-unique)
    found.reset(new StreamContext{{}, KernelContext::cuda(device, reinterpret_cast<void*>(stream))});
  }
  return *found;
}

KernelContext& cpu_context(int threads) {
  using Contexts = std::map<int, KernelContext>;
  thread_local Contexts contexts;
  const auto found = contexts.find(threads);
  if (found != contexts.end()) return found->second;
  return contexts.emplace(threads, KernelContext::cpu(threads)).first->second;
}

/// Runs `op` where `x` lies, without the GIL.
template <class Run>
void run_where(const Operand& x, const char* name, std::uintptr_t stream, nb::handle threads, const Run& run) {
  if (x.device_type == nb::device::cpu::value) {
    const int count = integer_of<int>(threads, "threads");
    const NoGil released;
    run(cpu_context(count));
    return;
  }
  if (x.device_type != nb::device::cuda::value) {
    refuse(name, "lies on a device of DLPack's type {}, expected the CPU or CUDA", x.device_type);
  }
  const NoGil released;
  StreamContext& on = stream_context(x.device, stream);
  const std::scoped_lock lock(on.mutex);
  run(on.context);
}

struct Sequence {
  SequenceShape shape;
  SequenceStrides strides;
  void* data = nullptr;
};

/// [..., time, dim] of two to four dimensions as [batch, heads, time, dim]; backwards from its last step.
Sequence sequence_of(const Operand& x, const char* name, bool backwards) {
  if (x.dims < 2) refuse(name, "found {} dimensions, expected [..., time, dim] of 2 to 4", x.dims);
  const auto time = static_cast<std::size_t>(x.dims - 2), dim = time + 1;
  Sequence s{.shape = {.batch = time > 0 ? x.shape[0] : 1,
                       .heads = time > 1 ? x.shape[1] : 1,
                       .time = x.shape[time],
                       .dim = x.shape[dim]},
             .strides = {},
             .data = x.data};
  if (x.is_empty()) return s;
  if (s.shape.dim > 1 && x.strides[dim] != 1) refuse(name, "expected channels (the last axis) side by side");
  // The stride of an axis of one entry means nothing, but the library takes strides that are all 0 for "contiguous".
  if (s.shape.batch > 1) s.strides.batch = x.strides[0];
  if (s.shape.heads > 1) s.strides.head = x.strides[1];
  s.strides.time = s.shape.time > 1 ? x.strides[time] : s.shape.dim;
  if (backwards && s.shape.time > 1) {
    s.data = static_cast<char*>(s.data) + (s.shape.time - 1) * s.strides.time * x.element_size();
    s.strides.time = -s.strides.time;
  }
  if (s.strides.batch == 0 && s.strides.head == 0 && s.strides.time == 0) {
    refuse(name, "found a stride of 0 over time, expected steps of their own");
  }
  return s;
}

enum class Scan : std::uint8_t { kExpProduct, kLogSumExp, kDecay };

/// scan(kind, x, b, out, log_out, carry_in, carry_out, backwards, stream, threads); see mmrec/ops.py.
void scan(int kind_number, nb::handle x_value, nb::handle b_value, nb::handle out_value, nb::handle log_value,
          nb::handle in_value, nb::handle carry_value, bool backwards, std::uintptr_t stream, nb::handle threads) {
  const auto kind = static_cast<Scan>(kind_number);
  const char* const x_name = kind == Scan::kDecay ? "log_a" : kind == Scan::kLogSumExp ? "x" : "gamma";
  const Operand x = operand_of(x_value, x_name);
  const ElementType type = element_type(x, x_name);
  const Sequence first = sequence_of(x, x_name, backwards);
  const auto like_first = [&](nb::handle value, const char* name, ElementType expected, Access access) {
    Operand y = operand_of(value, name, access);
    expect_alike(y, name, x, x_name);
    if (element_type(y, name) != expected) {
      refuse_type(name, "found {}, expected the type of {}", type_name(y.type), x_name);
    }
    expect_shape(y, name, x.sizes(), fmt::format("that of {}, ", x_name));
    const Sequence sequence = sequence_of(y, name, backwards);
    return std::pair{std::move(y), sequence};
  };
  const auto [out, y] = like_first(out_value, "out", type, Access::kWrite);
  expect_apart(out, "out", x, x_name, kind != Scan::kDecay);
  std::vector<std::int64_t> carry_shape(x.sizes().begin(), x.sizes().end());
  carry_shape.erase(carry_shape.end() - 2);
  Operand carry;
  const float* carry_in = nullptr;
  if (!in_value.is_none()) {
    carry = operand_of(in_value, "carry");
    carry_in = floats_of(carry, "carry", x, x_name, carry_shape);
    expect_apart(out, "out", carry, "carry", false);
  }
  float* const carry_out =  // made by mmrec/ops.py
      carry_value.is_none() ? nullptr
                            : floats_of(operand_of(carry_value, "carry_out"), "carry_out", x, x_name, carry_shape);
  const auto run = [&](auto compute, auto op) {
    op.shape = first.shape;
    op.type = type;
    op.carry_in = carry_in;
    op.carry_out = carry_out;
    run_where(x, x_name, stream, threads, [&](KernelContext& context) { compute(context, op); });
  };
  if (kind == Scan::kDecay) {
    const auto [b_operand, b] = like_first(b_value, "b", type, Access::kRead);
    expect_apart(out, "out", b_operand, "b", true);
    run(&decay_scan, DecayScan{.shape = {},
                               .log_a = first.data,
                               .log_a_strides = first.strides,
                               .b = b.data,
                               .b_strides = b.strides,
                               .h = y.data,
                               .h_strides = y.strides});
  } else if (kind == Scan::kLogSumExp) {
    run(&logsumexp_scan,
        LogSumExpScan{.shape = {}, .x = first.data, .x_strides = first.strides, .y = y.data, .y_strides = y.strides});
  } else {
    ExpProductScan op{
        .shape = {}, .gamma = first.data, .gamma_strides = first.strides, .y = y.data, .y_strides = y.strides};
    if (log_value.is_none()) return run(&exp_product_scan, op);
    const auto [log_operand, log_y] = like_first(log_value, "log_out", ElementType::kF32, Access::kWrite);
    expect_apart(log_operand, "log_out", x, x_name, false);
    expect_apart(log_operand, "log_out", out, "out", false);
    if (carry_in != nullptr) expect_apart(log_operand, "log_out", carry, "carry", false);
    op.log_y = static_cast<float*>(log_y.data);
    op.log_y_strides = log_y.strides;
    run(&exp_product_scan, op);
  }
}

/// Rows and columns of logits [rows, vocab], of any leading axes that lie evenly.
struct Rows {
  std::int64_t rows = 1, vocab = 0, stride = 0;
};
Rows rows_of(const Operand& x, const char* name) {
  if (x.dims < 1) refuse(name, "found a single number, expected [..., vocab]");
  const std::size_t last = x.leading().size();
  Rows r{.vocab = x.shape[last], .stride = x.shape[last]};
  for (const std::int64_t size : x.leading()) {
    // A product that does not fit belongs to no memory: `x` is empty, or refused below.
    (void)__builtin_mul_overflow(r.rows, size, &r.rows);
  }
  if (x.is_empty()) return r;
  if (r.vocab > 1 && x.strides[last] != 1) refuse(name, "expected the vocabulary (the last axis) side by side");
  std::optional<std::int64_t> expected;
  for (std::size_t i = last; i-- > 0;) {
    if (x.shape[i] == 1) continue;
    if (!expected) r.stride = x.strides[i];
    if (x.strides[i] != expected.value_or(r.stride)) refuse(name, "expected rows at even distances");
    if (r.stride == 0) refuse(name, "found a stride of 0 between rows, expected rows of their own");
    expected = x.strides[i] * x.shape[i];
  }
  return r;
}

IndexType targets_of(const Operand& targets, const Operand& logits) {
  expect_alike(targets, "targets", logits, "logits");
  if (targets.type.code != static_cast<std::uint8_t>(nb::dlpack::dtype_code::Int) ||
      (targets.type.bits != 32 && targets.type.bits != 64)) {
    refuse_type("targets", "found {}, expected int32 or int64", type_name(targets.type));
  }
  expect_shape(targets, "targets", logits.leading(), "that of the rows, ");
  expect_contiguous(targets, "targets");
  return targets.type.bits == 32 ? IndexType::kInt32 : IndexType::kInt64;
}

/// A TokenLogprobs or TokenLogprobsBackward with its logits and targets.
template <class Op>
Op op_on(const Operand& logits, const Operand& targets) {
  const Rows rows = rows_of(logits, "logits");
  Op op;
  op.rows = rows.rows;
  op.vocab = rows.vocab;
  op.type = element_type(logits, "logits");
  op.logits = logits.data;
  op.row_stride = rows.stride;
  op.target_type = targets_of(targets, logits);
  op.targets = targets.data;
  return op;
}

/// token_logprobs(logits, targets, out, check_targets, stream, threads)
void logprobs(nb::handle logits_value, nb::handle targets_value, nb::handle out_value, bool check_targets,
              std::uintptr_t stream, nb::handle threads) {
  const Operand logits = operand_of(logits_value, "logits");
  const Operand targets = operand_of(targets_value, "targets");
  const Operand out = operand_of(out_value, "out", Access::kWrite);
  auto op = op_on<TokenLogprobs>(logits, targets);
  op.logprobs = floats_of(out, "out", logits, "logits", logits.leading());
  expect_apart(out, "out", logits, "logits", false);
  expect_apart(out, "out", targets, "targets", false);
  op.check_targets = check_targets;
  run_where(logits, "logits", stream, threads, [&](KernelContext& context) { token_logprobs(context, op); });
}

/// token_logprobs_backward(grad, logits, targets, out, stream, threads)
void logprobs_backward(nb::handle grad_value, nb::handle logits_value, nb::handle targets_value, nb::handle out_value,
                       std::uintptr_t stream, nb::handle threads) {
  const Operand logits = operand_of(logits_value, "logits");
  const Operand targets = operand_of(targets_value, "targets");
  const Operand grad = operand_of(grad_value, "grad");
  const Operand out = operand_of(out_value, "out", Access::kWrite);
  auto op = op_on<TokenLogprobsBackward>(logits, targets);
  expect_alike(out, "out", logits, "logits");
  if (!std::ranges::equal(out.sizes(), logits.sizes()) || element_type(out, "out") != op.type) {
    refuse("out", "found {} [{}], expected type and shape of logits", type_name(out.type),
           fmt::join(out.sizes(), ", "));
  }
  op.grad = floats_of(grad, "grad", logits, "logits", logits.leading());
  op.d_logits = out.data;
  op.d_row_stride = rows_of(out, "out").stride;
  expect_apart(out, "out", logits, "logits", true);
  expect_apart(out, "out", targets, "targets", false);
  expect_apart(out, "out", grad, "grad", false);
  run_where(logits, "logits", stream, threads, [&](KernelContext& context) { token_logprobs_backward(context, op); });
}

/// Waits for a stream's work.
void synchronize(int device, std::uintptr_t stream) {
  const NoGil released;
  StreamContext& on = stream_context(device, stream);
  const std::scoped_lock lock(on.mutex);
  on.context.synchronize();
}

}  // namespace

void bind_ops(nb::module_& m) {
  m.def("scan", &scan, nb::arg(), nb::arg(), nb::arg().none(), nb::arg(), nb::arg().none(), nb::arg().none(),
        nb::arg().none(), nb::arg(), nb::arg(), nb::arg(), nb::call_guard<Call>());
  m.def("synchronize", &synchronize, nb::call_guard<Call>());
  m.def("token_logprobs", &logprobs, nb::call_guard<Call>());
  m.def("token_logprobs_backward", &logprobs_backward, nb::call_guard<Call>());
}

}  // namespace mmrec::python
