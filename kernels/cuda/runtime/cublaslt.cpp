#include "kernels/cuda/runtime/cublaslt.h"

#include <cublasLt.h>
#include <dlfcn.h>

#include <map>
#include <new>
#include <stdexcept>
#include <string>
#include <system_error>
#include <tuple>

#include "kernels/cuda/runtime/cuda.h"
#include "kernels/cuda/runtime/launch.cuh"

namespace mmrec::kernels {
namespace {

#define MMREC_CUBLASLT_FUNCTIONS(X)       \
  X(cublasLtLoggerForceDisable)           \
  X(cublasLtCreate)                       \
  X(cublasLtDestroy)                      \
  X(cublasLtMatmulDescCreate)             \
  X(cublasLtMatmulDescDestroy)            \
  X(cublasLtMatmulDescSetAttribute)       \
  X(cublasLtMatrixLayoutCreate)           \
  X(cublasLtMatrixLayoutDestroy)          \
  X(cublasLtMatmulPreferenceCreate)       \
  X(cublasLtMatmulPreferenceDestroy)      \
  X(cublasLtMatmulPreferenceSetAttribute) \
  X(cublasLtMatmulAlgoGetHeuristic)       \
  X(cublasLtMatmulAlgoCheck)              \
  X(cublasLtMatmul)

/// The functions of the library that are used. The library stays open for the life of the process.
struct Functions {
#define MMREC_DECLARE(name) decltype(&::name) name = nullptr;
  MMREC_CUBLASLT_FUNCTIONS(MMREC_DECLARE)
#undef MMREC_DECLARE
};

Functions open_library() {
  const std::string name = "libcublasLt.so." + std::to_string(CUBLAS_VER_MAJOR);
  void* library = nullptr;
  for (const std::string& path : {name, std::string(MMREC_CUDA_LIBRARY_DIR "/") + name}) {
    library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library != nullptr) break;
  }
  if (library == nullptr) throw std::runtime_error(name + ": cannot be loaded; the CUDA backend needs cuBLAS");
  Functions f;
#define MMREC_RESOLVE(name)                                           \
  f.name = reinterpret_cast<decltype(f.name)>(dlsym(library, #name)); \
  if (f.name == nullptr) throw std::runtime_error("cuBLAS: no function " #name);
  MMREC_CUBLASLT_FUNCTIONS(MMREC_RESOLVE)
#undef MMREC_RESOLVE
  f.cublasLtLoggerForceDisable();  // which environment variables would turn on
  return f;
}

const Functions& library() {
  static const Functions functions = open_library();
  return functions;
}

void check(cublasStatus_t status, const char* call) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  if (status == CUBLAS_STATUS_ALLOC_FAILED) throw std::bad_alloc();
  check_cuda(cudaPeekAtLastError(), call);  // which says more, if it is CUDA that failed
  throw std::system_error(cudaErrorUnknown, cuda_category(),
                          std::string(call) + ": cuBLAS status " + std::to_string(static_cast<int>(status)));
}

cudaDataType_t data_type(DType type) {
  return type == DType::kF16 ? CUDA_R_16F : type == DType::kBF16 ? CUDA_R_16BF : CUDA_R_32F;
}

/// An opaque object of the library, created and destroyed by a pair of its functions.
template <class Handle>
class Owned {
 public:
  using Destroy = cublasStatus_t (*)(Handle);
  explicit Owned(Destroy destroy) : destroy_(destroy) {}
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;
  ~Owned() {
    if (handle_ != nullptr) destroy_(handle_);
  }
  Handle* out() { return &handle_; }
  Handle get() const { return handle_; }

 private:
  Destroy destroy_;
  Handle handle_ = nullptr;
};

struct Layout : Owned<cublasLtMatrixLayout_t> {
  Layout(DType type, std::int64_t rows, std::int64_t cols, std::int64_t stride)
      : Owned(library().cublasLtMatrixLayoutDestroy) {
    check(library().cublasLtMatrixLayoutCreate(out(), data_type(type), static_cast<std::uint64_t>(rows),
                                               static_cast<std::uint64_t>(cols), stride),
          "cublasLtMatrixLayoutCreate");
  }
};

/// The library is column-major: it computes yᵀ [n, m] = W [n, k] xᵀ [k, m], with W given as its transpose.
struct Description : Owned<cublasLtMatmulDesc_t> {
  explicit Description(const Matmul& job) : Owned(library().cublasLtMatmulDescDestroy) {
    check(library().cublasLtMatmulDescCreate(out(), CUBLAS_COMPUTE_32F, CUDA_R_32F), "cublasLtMatmulDescCreate");
    set(CUBLASLT_MATMUL_DESC_TRANSA, CUBLAS_OP_T);
    if (job.bias != nullptr) {
      set(CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS);
      set(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, data_type(job.out));
      set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, job.bias);
    }
  }
  template <class Value>
  void set(cublasLtMatmulDescAttributes_t attribute, Value value) {
    check(library().cublasLtMatmulDescSetAttribute(get(), attribute, &value, sizeof(value)),
          "cublasLtMatmulDescSetAttribute");
  }
};

/// The operands of a job with `rows` rows.
struct Operands {
  Operands(const Matmul& job, std::int64_t rows)
      : w(job.in, job.k, job.n, job.k),
        x(job.in, job.k, rows, job.x_stride),
        y(job.out, job.n, rows, job.y_stride),
        c(job.out, job.n, rows, job.c == nullptr ? job.y_stride : job.c_stride) {}
  Layout w, x, y, c;
};

struct Preference : Owned<cublasLtMatmulPreference_t> {
  explicit Preference(bool split_k) : Owned(library().cublasLtMatmulPreferenceDestroy) {
    check(library().cublasLtMatmulPreferenceCreate(out()), "cublasLtMatmulPreferenceCreate");
    set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, CublasLt::kWorkspaceBytes);
    const cublasLtReductionScheme_t scheme =
        split_k ? CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE : CUBLASLT_REDUCTION_SCHEME_NONE;
    set(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, static_cast<std::uint32_t>(scheme));
  }
  template <class Value>
  void set(cublasLtMatmulPreferenceAttributes_t attribute, Value value) {
    check(library().cublasLtMatmulPreferenceSetAttribute(get(), attribute, &value, sizeof(value)),
          "cublasLtMatmulPreferenceSetAttribute");
  }
};

// The largest power of two up to 16 bytes that divides an address and a row.
int alignment(const void* data, std::int64_t stride, DType type) {
  const std::uint64_t bits =
      reinterpret_cast<std::uintptr_t>(data) | static_cast<std::uint64_t>(stride) * size_of(type) | 16U;
  return static_cast<int>(bits & (~bits + 1));
}

}  // namespace

struct CublasLt::Impl {
  // Class of rows, n, k, types, epilogue, and what decides which kernels are possible: alignments.
  using Key = std::tuple<bool, std::int64_t, std::int64_t, DType, DType, bool, bool, int, int, int, int>;

  cublasLtHandle_t handle = nullptr;
  std::map<Key, cublasLtMatmulAlgo_t> algorithms;

  static Key key_of(const Matmul& job) {
    return {job.m <= kFewRows,
            job.n,
            job.k,
            job.in,
            job.out,
            job.bias != nullptr,
            job.beta != 0.0F,
            alignment(job.x, job.x_stride, job.in),
            alignment(job.w, job.k, job.in),
            alignment(job.y, job.y_stride, job.out),
            job.c == nullptr ? 16 : alignment(job.c, job.c_stride, job.out)};
  }

  /// The library's first choice for `rows` rows.
  cublasLtMatmulAlgo_t choose(const Matmul& job, std::int64_t rows, const Description& description) const {
    const Operands as(job, rows);
    Preference preference(job.m <= kFewRows);
    const auto [few, n, k, in, out, bias, beta, x_align, w_align, y_align, c_align] = key_of(job);
    preference.set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, static_cast<std::uint32_t>(w_align));
    preference.set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, static_cast<std::uint32_t>(x_align));
    preference.set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, static_cast<std::uint32_t>(c_align));
    preference.set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, static_cast<std::uint32_t>(y_align));
    cublasLtMatmulHeuristicResult_t result{};
    int found = 0;
    const cublasStatus_t status =
        library().cublasLtMatmulAlgoGetHeuristic(handle, description.get(), as.w.get(), as.x.get(), as.c.get(),
                                                 as.y.get(), preference.get(), 1, &result, &found);
    if (status != CUBLAS_STATUS_SUCCESS || found == 0) {
      throw std::runtime_error("cuBLAS has no algorithm for a product of " + std::to_string(rows) + " x " +
                               std::to_string(job.n) + " x " + std::to_string(job.k));
    }
    return result.algo;
  }
};

CublasLt::CublasLt() : impl_(std::make_unique<Impl>()) {
  check(library().cublasLtCreate(&impl_->handle), "cublasLtCreate");
}

CublasLt::~CublasLt() {
  if (impl_->handle != nullptr) library().cublasLtDestroy(impl_->handle);
}

void CublasLt::run(const Matmul& job, CUstream_st* stream, void* workspace) {
  const Description description(job);
  const Operands as(job, job.m);
  const Impl::Key key = Impl::key_of(job);
  auto known = impl_->algorithms.find(key);
  if (known == impl_->algorithms.end()) {
    const std::int64_t rows = job.m <= kFewRows ? kFewReferenceRows : kManyReferenceRows;
    known = impl_->algorithms.emplace(key, impl_->choose(job, rows, description)).first;
  }
  cublasLtMatmulAlgo_t algorithm = known->second;
  cublasLtMatmulHeuristicResult_t checked{};
  if (library().cublasLtMatmulAlgoCheck(impl_->handle, description.get(), as.w.get(), as.x.get(), as.c.get(),
                                        as.y.get(), &algorithm, &checked) != CUBLAS_STATUS_SUCCESS ||
      checked.workspaceSize > kWorkspaceBytes) {
    algorithm = impl_->choose(job, job.m, description);  // this number of rows needs another kernel
  }
  const float one = 1.0F;
  check(library().cublasLtMatmul(impl_->handle, description.get(), &one, job.w, as.w.get(), job.x, as.x.get(),
                                 &job.beta, job.c == nullptr ? job.y : job.c, as.c.get(), job.y, as.y.get(), &algorithm,
                                 workspace, kWorkspaceBytes, stream),
        "cublasLtMatmul");
}

void matmul(Cuda& cuda, const Matmul& job, bool on_side_stream) {
  CublasLt& blas = cuda.blas();  // makes the workspaces
  blas.run(job, on_side_stream ? cuda.side_stream() : cuda.stream(),
           on_side_stream ? cuda.side_blas_workspace() : cuda.blas_workspace());
}

}  // namespace mmrec::kernels
