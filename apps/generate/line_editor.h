// Lines that a person types. line_editor_libedit.cpp edits them and keeps a history where stdin is a terminal that can;
// line_editor_plain.cpp is for builds without libedit and reads them as they come.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>

namespace mmrec::apps {

class LineEditor {
 public:
  LineEditor();
  ~LineEditor();
  LineEditor(const LineEditor&) = delete;
  LineEditor& operator=(const LineEditor&) = delete;

  /// The next line of stdin without its end, asked for with `prompt` on stderr where stdin is a terminal; none at the
  /// end of the input, and inside a GracefulScope after an interrupt.
  std::optional<std::string> next(std::string_view prompt);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace mmrec::apps
