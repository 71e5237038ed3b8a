#include "apps/common/folder_names.h"

#include <dirent.h>

#include <cerrno>
#include <memory>
#include <new>
#include <string_view>

namespace mmrec::apps {
namespace {

struct Close {
  void operator()(DIR* folder) const { (void)::closedir(folder); }
};

}  // namespace

std::vector<std::string> names_in(const std::filesystem::path& folder) {
  std::unique_ptr<DIR, Close> opened;
  do {
    opened.reset(::opendir(folder.c_str()));
  } while (opened == nullptr && errno == EINTR);
  if (opened == nullptr && errno == ENOMEM) throw std::bad_alloc();
  std::vector<std::string> names;
  while (opened != nullptr) {
    const dirent* const entry = ::readdir(opened.get());  // another thread has a folder of its own
    if (entry == nullptr) break;
    const std::string_view name = entry->d_name;
    if (name != "." && name != "..") names.emplace_back(name);
  }
  return names;
}

}  // namespace mmrec::apps
