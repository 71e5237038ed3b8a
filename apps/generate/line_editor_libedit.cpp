// What must stay true: stdout is never written to; an interrupt ends the waiting for a key, whatever the library does
// with system calls that are interrupted.
#include <histedit.h>
#include <unistd.h>

#include <clocale>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "apps/common/input.h"
#include "apps/generate/line_editor.h"
#include "models/files/utf8.h"

namespace mmrec::apps {
namespace {

constexpr int kMostRemembered = 1000;

bool can_edit() {
  const char* terminal = std::getenv("TERM");
  return isatty(STDIN_FILENO) == 1 && terminal != nullptr && *terminal != '\0' && std::strcmp(terminal, "dumb") != 0;
}

class Editor {
 public:
  Editor() : edit_(el_init("mmrec-generate", stdin, stderr, stderr)), history_(history_init()) {
    if (!is_there()) return;
    HistEvent event;
    history(history_, &event, H_SETSIZE, kMostRemembered);
    el_set(edit_, EL_CLIENTDATA, this);
    el_set(edit_, EL_PROMPT, &Editor::prompt_of);
    el_set(edit_, EL_EDITOR, "emacs");
    el_set(edit_, EL_SIGNAL, 0);
    el_wset(edit_, EL_GETCFN, &Editor::read_character);
    el_set(edit_, EL_HIST, history, history_);
    el_set(edit_, EL_BIND, "^R", "em-inc-search-prev", nullptr);
  }
  ~Editor() {
    if (history_ != nullptr) history_end(history_);
    if (edit_ != nullptr) el_end(edit_);
  }
  Editor(const Editor&) = delete;
  Editor& operator=(const Editor&) = delete;

  bool is_there() const { return edit_ != nullptr && history_ != nullptr; }
  std::optional<std::string> next(std::string_view prompt) {
    prompt_ = prompt;
    int count = 0;
    const char* line = el_gets(edit_, &count);
    if (line == nullptr || count <= 0) return std::nullopt;
    std::string text = line;
    if (text.ends_with('\n')) text.pop_back();
    HistEvent event;
    if (!text.empty()) history(history_, &event, H_ENTER, text.c_str());
    return text;
  }

 private:
  static Editor& of(EditLine* edit) {
    void* self = nullptr;
    el_get(edit, EL_CLIENTDATA, &self);
    return *static_cast<Editor*>(self);
  }
  static char* prompt_of(EditLine* edit) { return of(edit).prompt_.data(); }

  /// A character of UTF-8; 0 at the end and after an interrupt.
  static int read_character(EditLine* edit, wchar_t* to) {
    InputFile& keys = of(edit).keys_;
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

  EditLine* edit_;
  History* history_;
  std::string prompt_;
  InputFile keys_{"-", false};
};

}  // namespace

LineEditor line_editor() {
  if (!can_edit()) return nullptr;
  (void)std::setlocale(LC_CTYPE, "C.UTF-8");  // widths of characters; numbers are read without regard to it
  const auto editor = std::make_shared<Editor>();
  if (!editor->is_there()) return nullptr;
  return [editor](std::string_view prompt) { return editor->next(prompt); };
}

}  // namespace mmrec::apps
