// What one thread has asked for to be done asynchronously, in groups. It is done at the last moment that the
// architecture allows, when the thread waits for the group, so that a missing wait shows as stale data.
#pragma once

#include <cstddef>
#include <functional>
#include <utility>
#include <vector>

namespace mmrec::cuda_emulation {

class AsyncGroups {
 public:
  void add(std::function<void()> work) { open_.push_back(std::move(work)); }
  /// Closes the group of the work added since the last commit; it may be empty.
  void commit() {
    groups_.push_back(std::move(open_));
    open_.clear();
  }
  /// Does the work of groups, the oldest first, until at most `pending` groups are left.
  void wait(std::size_t pending) {
    while (groups_.size() > pending) {
      for (const auto& work : groups_.front()) work();
      groups_.erase(groups_.begin());
    }
  }
  /// Nothing waits to be done.
  bool idle() const {
    if (!open_.empty()) return false;
    for (const auto& group : groups_) {
      if (!group.empty()) return false;
    }
    return true;
  }

 private:
  std::vector<std::function<void()>> open_;
  std::vector<std::vector<std::function<void()>>> groups_;
};

}  // namespace mmrec::cuda_emulation
