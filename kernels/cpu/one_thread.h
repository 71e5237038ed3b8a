// Keeps oneDNN to the thread that calls it, and silent.
//
// Our own threads call it side by side, each for a product of its own: its way of sharing one product between threads
// could change bits, and teams of OpenMP's do not survive a fork.
#pragma once

#include <dlfcn.h>
#include <oneapi/dnnl/dnnl.h>

namespace mmrec::kernels {

/// oneDNN prints to stdout, writes files and computes otherwise where environment variables say so. A setting made by
/// its API before the first use keeps it from reading them. These settings are the process's, and are made once.
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

/// While it lives, the calling thread's products are that thread's alone. The library asks OpenMP how many threads
/// there are, of which each thread has its own setting; it is put back. Which OpenMP is the library's affair, so it is
/// looked up where the library has brought it; a library that shares nothing among threads brings none.
class OneThread {
 public:
  OneThread() {
    ignore_environment_of_onednn();
    if (openmp().set == nullptr || (before_ = openmp().get()) == 1) return;
    openmp().set(1);
  }
  ~OneThread() {
    if (before_ != 1) openmp().set(before_);
  }
  OneThread(const OneThread&) = delete;
  OneThread& operator=(const OneThread&) = delete;

 private:
  struct OpenMp {
    int (*get)() = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "omp_get_max_threads"));
    void (*set)(int) = reinterpret_cast<void (*)(int)>(dlsym(RTLD_DEFAULT, "omp_set_num_threads"));
  };
  static const OpenMp& openmp() {
    static const OpenMp found;
    return found;
  }
  int before_ = 1;
};

}  // namespace mmrec::kernels
