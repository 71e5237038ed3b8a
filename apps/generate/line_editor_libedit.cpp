// What must stay true: stdout is never written to; an interrupt ends the waiting for a key, whatever the library does
// with system calls that are interrupted.
#include <histedit.h>
#include <unistd.h>

#include <array>
#include <climits>
#include <clocale>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <cwchar>

#include "apps/common/input.h"
#include "apps/generate/line_editor.h"
#include "models/files/utf8.h"

namespace mmrec::apps {
namespace {

constexpr int kMostRemembered = 1000;

std::wstring widened(std::string_view text) {  // of ASCII
  return {text.begin(), text.end()};
}

std::string as_utf8(std::wstring_view text) {
  std::string bytes;
  std::mbstate_t state = {};
  std::array<char, MB_LEN_MAX> one = {};
  for (const wchar_t wide : text) {
    const std::size_t size = std::wcrtomb(one.data(), wide, &state);
    if (size <= one.size()) bytes.append(one.data(), size);
  }
  return bytes;
}

bool can_edit() {
  const char* terminal = std::getenv("TERM");
  return isatty(STDIN_FILENO) == 1 && terminal != nullptr && *terminal != '\0' && std::strcmp(terminal, "dumb") != 0;
}

}  // namespace

struct LineEditor::Impl {
  Impl() {
    if (!can_edit()) return;
    (void)std::setlocale(LC_CTYPE, "C.UTF-8");  // widths of characters; numbers are read without regard to it
    edit = el_init("mmrec-generate", stdin, stderr, stderr);
    if (edit == nullptr) return;
    history = history_winit();
    HistEventW event;
    if (history != nullptr) history_w(history, &event, H_SETSIZE, kMostRemembered);
    el_wset(edit, EL_CLIENTDATA, this);
    el_wset(edit, EL_PROMPT, &Impl::prompt_of);
    el_wset(edit, EL_EDITOR, L"emacs");
    el_wset(edit, EL_SIGNAL, 0);
    el_wset(edit, EL_GETCFN, &Impl::read_character);
    if (history != nullptr) el_wset(edit, EL_HIST, history_w, history);
    el_wset(edit, EL_BIND, L"^R", L"em-inc-search-prev", nullptr);
  }
  ~Impl() {
    if (history != nullptr) history_wend(history);
    if (edit != nullptr) el_end(edit);
  }
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  static Impl& of(EditLine* edit) {
    void* self = nullptr;
    el_wget(edit, EL_CLIENTDATA, &self);
    return *static_cast<Impl*>(self);
  }
  static wchar_t* prompt_of(EditLine* edit) { return of(edit).prompt.data(); }

  /// A character of UTF-8; 0 at the end and after an interrupt.
  static int read_character(EditLine* edit, wchar_t* to) {
    InputFile& keys = of(edit).keys;
    std::string bytes;
    models::Utf8Unit unit;
    do {
      char byte = 0;
      if (keys.read({&byte, 1}) == 0) return 0;
      // NUL is what becomes of an end of input that was typed while no line was edited.
      if (byte != '\0' || !bytes.empty()) bytes += byte;
      unit = models::first_unit(bytes);
    } while (bytes.empty() || unit.incomplete);
    *to = static_cast<wchar_t>(unit.code);
    return 1;
  }

  EditLine* edit = nullptr;  // null: lines as they come
  HistoryW* history = nullptr;
  std::wstring prompt;
  InputFile keys{"-", false};
  LineReader lines{"-", false};
};

LineEditor::LineEditor() : impl_(std::make_unique<Impl>()) {}
LineEditor::~LineEditor() = default;

std::optional<std::string> LineEditor::next(std::string_view prompt) {
  if (impl_->edit == nullptr) {
    if (isatty(STDIN_FILENO) == 1) (void)!write(STDERR_FILENO, prompt.data(), prompt.size());
    const auto line = impl_->lines.next();
    return line ? std::optional<std::string>(*line) : std::nullopt;
  }
  impl_->prompt = widened(prompt);
  int count = 0;
  const wchar_t* line = el_wgets(impl_->edit, &count);
  if (line == nullptr || count <= 0) return std::nullopt;
  std::wstring_view text(line, static_cast<std::size_t>(count));
  if (text.ends_with(L'\n')) text.remove_suffix(1);
  HistEventW event;
  if (impl_->history != nullptr && !text.empty()) {
    history_w(impl_->history, &event, H_ENTER, std::wstring(text).c_str());
  }
  return as_utf8(text);
}

}  // namespace mmrec::apps
