// Keeps oneDNN to the thread that calls it, uninterrupted and silent.
//
// Our own threads call it side by side, each for a product of its own. If the library shared one product between
// threads, bits could change, and teams of OpenMP's do not survive a fork.
//
// Versions of before March 2026 multiply fp32 with the stack pointer set to a buffer of the heap. The frame of a signal
// would be written over what lies before that buffer (uxlfoundation/oneDNN#4845).
#pragma once

#include <dlfcn.h>
#include <oneapi/dnnl/dnnl.h>

#include "kernels/cpu/thread_pool.h"

namespace mmrec::kernels {

/// Environment variables make oneDNN print to stdout, write files and compute differently. A setting made by its API
/// before the first use keeps it from reading them. These settings belong to the process and are made once.
inline void ignore_environment_of_onednn() {
  static const bool done = [] {
    dnnl_set_verbose(0);
    dnnl_set_jit_dump(0);
    dnnl_set_jit_profiling_flags(DNNL_JIT_PROFILE_NONE);
    dnnl_set_max_cpu_isa(static_cast<dnnl_cpu_isa_t>(0));  // no limit, by either name that versions give it
    dnnl_set_cpu_isa_hints(dnnl_cpu_isa_no_hints);
    return true;
  }();
  (void)done;
}

/// While it lives, the calling thread computes its products alone and takes no signals. The library asks OpenMP for the
/// number of threads, a setting of each thread, which is restored at the end. The library brings its own OpenMP, so its
/// functions are looked up; a library that shares nothing among threads brings none.
class OneDnnCall {
 public:
  OneDnnCall() {
    ignore_environment_of_onednn();
    if (openmp().set == nullptr || (before_ = openmp().get()) == 1) return;
    openmp().set(1);
  }
  ~OneDnnCall() {
    if (before_ != 1) openmp().set(before_);
  }
  OneDnnCall(const OneDnnCall&) = delete;
  OneDnnCall& operator=(const OneDnnCall&) = delete;

 private:
  struct OpenMp {
    int (*get)() = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "omp_get_max_threads"));
    void (*set)(int) = reinterpret_cast<void (*)(int)>(dlsym(RTLD_DEFAULT, "omp_set_num_threads"));
  };
  static const OpenMp& openmp() {
    static const OpenMp found;
    return found;
  }
  const SignalsBlocked signals_{true};
  int before_ = 1;
};

}  // namespace mmrec::kernels
