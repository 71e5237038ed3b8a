// Of builds without libedit.
#include <unistd.h>

#include "apps/common/input.h"
#include "apps/generate/line_editor.h"

namespace mmrec::apps {

struct LineEditor::Impl {
  LineReader lines{"-", false};
};

LineEditor::LineEditor() : impl_(std::make_unique<Impl>()) {}
LineEditor::~LineEditor() = default;

std::optional<std::string> LineEditor::next(std::string_view prompt) {
  if (isatty(STDIN_FILENO) == 1) (void)!write(STDERR_FILENO, prompt.data(), prompt.size());
  const auto line = impl_->lines.next();
  return line ? std::optional<std::string>(*line) : std::nullopt;
}

}  // namespace mmrec::apps
