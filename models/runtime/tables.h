// Lists that ops read in the backend's memory, laid out one after another on the host and sent there in one piece.
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

namespace mmrec::models {

/// Where a list lies among the others.
template <class T>
struct Placed {
  std::size_t at = 0;
};

template <class Backend>
class Tables {
 public:
  explicit Tables(Backend& backend) : backend_(backend) {}

  void clear() { bytes_.clear(); }
  /// Room for `count` elements, zeros until they are set.
  template <class T>
  Placed<T> place(std::size_t count) {
    constexpr std::size_t kAlign = 16;
    const std::size_t at = bytes_.size();
    bytes_.resize(at + (count * sizeof(T) + kAlign - 1) / kAlign * kAlign);
    return {at};
  }
  /// Until the next place().
  template <class T>
  T* host(Placed<T> list) {
    return reinterpret_cast<T*>(bytes_.data() + list.at);
  }
  /// Until the next send().
  template <class T>
  T* device(Placed<T> list) {
    return reinterpret_cast<T*>(memory_.data() + list.at);
  }
  void send() {
    if (memory_.size() < bytes_.size()) {
      has_moved_ = true;
      memory_ = {};
      memory_ = backend_.template allocate<std::byte>(bytes_.size() * 5 / 4);
    }
    backend_.upload(bytes_.data(), memory_.data(), bytes_.size());
  }
  /// Whether device() has other addresses than when this was asked before.
  bool take_moved() { return std::exchange(has_moved_, false); }

 private:
  Backend& backend_;
  std::vector<std::byte> bytes_;
  typename Backend::template Buffer<std::byte> memory_;
  bool has_moved_ = false;
};

}  // namespace mmrec::models
