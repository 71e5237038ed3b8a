// A thread that does one thing at a time beside the thread that owns it.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

#include "kernels/cpu/thread_pool.h"

namespace mmrec::models {

class HelperThread {
 public:
  /// Runs own() on this thread and other() on the helper, which starts with the first call. Returns when both are done
  /// and throws what either has thrown. Runs one after the other if the system gives no thread.
  template <class Own>
  void run(const Own& own, std::function<void()> other) {
    if (state_->made_after != kernels::forks()) {  // the thread is the parent process's
      state_.reset(new State);
    }
    state_->begin(std::move(other));
    std::exception_ptr fault;
    try {
      own();
    } catch (...) {
      fault = std::current_exception();
    }
    const std::exception_ptr others = state_->end();
    if (fault) std::rethrow_exception(fault);
    if (others) std::rethrow_exception(others);
  }

 private:
  class State {
   public:
    State() = default;
    State(const State&) = delete;
    State& operator=(const State&) = delete;
    ~State() {
      if (!thread_.joinable()) return;
      {
        const std::lock_guard lock(mutex_);
        is_ending_ = true;
      }
      changed_.notify_all();
      thread_.join();
    }
    void begin(std::function<void()> work) {
      {
        const std::lock_guard lock(mutex_);
        work_ = std::move(work);
        fault_ = nullptr;
      }
      if (!thread_.joinable()) {
        try {
          thread_ = std::thread([this] { serve(); });
        } catch (const std::system_error&) {
          do_work();
        }
      }
      changed_.notify_all();
    }
    std::exception_ptr end() {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [this] { return work_ == nullptr; });
      return std::exchange(fault_, nullptr);
    }

    const std::uint32_t made_after = kernels::forks();

   private:
    void serve() {
      while (true) {
        {
          std::unique_lock lock(mutex_);
          changed_.wait(lock, [this] { return is_ending_ || work_ != nullptr; });
          if (work_ == nullptr) return;
        }
        do_work();
      }
    }
    void do_work() {
      std::exception_ptr fault;
      try {
        work_();
      } catch (...) {
        fault = std::current_exception();
      }
      {
        const std::lock_guard lock(mutex_);
        work_ = nullptr;
        fault_ = fault;
      }
      changed_.notify_all();
    }

    std::mutex mutex_;
    std::condition_variable changed_;
    std::function<void()> work_;  // null: none
    std::exception_ptr fault_;
    bool is_ending_ = false;
    std::thread thread_;
  };
  struct Deleter {
    void operator()(State* state) const {
      if (state->made_after == kernels::forks()) std::default_delete<State>()(state);
    }
  };
  std::unique_ptr<State, Deleter> state_{new State};
};

}  // namespace mmrec::models
