// What is in a folder.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace mmrec::apps {

/// The names of what is in a folder, in no order; none where it cannot be read, or those before a fault. Throws
/// std::bad_alloc. std::filesystem::directory_iterator has no room for that: libstdc++ makes paths where it must not
/// throw, and ends the process.
std::vector<std::string> names_in(const std::filesystem::path& folder);

}  // namespace mmrec::apps
