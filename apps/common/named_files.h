// The files that a command line names, by the option table: an output must be neither an input nor another output.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "apps/common/arguments.h"

namespace mmrec::apps {

struct NamedFile {
  std::string_view option;  // empty: none, an operand
  std::string path;         // "-": stdin or stdout
  Names as = Names::kInput;
};

/// The files of all options that name one, and of the operands, which are inputs. Without --output stdout is one.
std::vector<NamedFile> named_files(const Arguments& arguments, std::span<const Option> options);

/// Throws UsageError if an output of `files` is the file of an input, or of another output, by whatever name: a link,
/// stdin, a file of a model folder. A state may be saved over the state that was read. What is no regular file may be
/// named for several outputs. Nor may two inputs be stdin.
void refuse_lost_files(std::span<const NamedFile> files);
/// Throws UsageError if `output` is the file of an input of `files`.
void refuse_lost_inputs(std::span<const NamedFile> files, const NamedFile& output);

}  // namespace mmrec::apps
