#include "kernels/cpu/host_memory.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <limits>
#include <optional>

namespace mmrec::kernels {
namespace {

constexpr std::uint64_t kNoLimit = std::numeric_limits<std::uint64_t>::max();

/// The number behind `key` in a file of lines "key number"; the file's first one if key is empty.
std::optional<std::uint64_t> number_in(const std::string& path, std::string_view key) {
  std::ifstream file(path);
  for (std::string word; !key.empty() && file >> word;) {
    if (word == key) break;
  }
  std::uint64_t number = 0;
  if (file >> number) return number;
  return std::nullopt;
}

std::uint64_t minus(std::uint64_t limit, std::uint64_t used) { return limit > used ? limit - used : 0; }

/// Free, or freed when asked for, and swap.
std::uint64_t left_by_machine() {
  const auto available = number_in("/proc/meminfo", "MemAvailable:");
  const auto swap = number_in("/proc/meminfo", "SwapFree:");
  return available ? (*available + swap.value_or(0)) * 1024 : kNoLimit;
}

/// By the process's group and those that hold it. What they cache of files is given up when memory is asked for.
std::uint64_t left_by_control_groups() {
  std::ifstream groups("/proc/self/cgroup");
  std::uint64_t left = kNoLimit;
  for (std::string line; std::getline(groups, line);) {
    if (!line.starts_with("0::/")) continue;
    for (std::string group = line.substr(3);; group.resize(group.rfind('/'))) {
      const std::string folder = "/sys/fs/cgroup" + group;
      const auto limit = number_in(folder + "/memory.max", "");
      if (const auto used = number_in(folder + "/memory.current", ""); limit && used) {
        left = std::min(left, minus(*limit, minus(*used, number_in(folder + "/memory.stat", "file").value_or(0))));
      }
      if (group.empty()) break;
    }
  }
  return left;
}

std::uint64_t left_of_address_space() {
  rlimit limit = {};
  if (::getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return kNoLimit;
  const long page = ::sysconf(_SC_PAGESIZE);
  return minus(limit.rlim_cur, number_in("/proc/self/statm", "").value_or(0) * static_cast<std::uint64_t>(page));
}

}  // namespace

std::uint64_t available_memory() {
  return std::min({left_by_machine(), left_by_control_groups(), left_of_address_space()});
}

void check_available(std::uint64_t bytes, std::string_view what) {
  if (const std::uint64_t available = available_memory(); bytes > available) {
    throw OutOfMemory(std::string(what) + " (needed " + std::to_string(bytes) + " bytes, available " +
                      std::to_string(available) + ")");
  }
}

}  // namespace mmrec::kernels
