// Keeps oneDNN to the thread that calls it, without a setting of the process.
//
// Our own threads call it side by side, each for a product of its own: its way of sharing one product between threads
// could change bits, and teams of OpenMP's do not survive a fork.
#pragma once

#include <dlfcn.h>

namespace mmrec::kernels {

/// While it lives, the calling thread's products are that thread's alone. The library asks OpenMP how many threads
/// there are, of which each thread has its own setting; it is put back. Which OpenMP is the library's affair, so it is
/// looked up where the library has brought it; a library that shares nothing among threads brings none.
class OneThread {
 public:
  OneThread() {
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
