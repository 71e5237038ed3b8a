// Of builds without libedit.
#include "apps/generate/line_editor.h"

namespace mmrec::apps {

LineEditor line_editor() { return nullptr; }

}  // namespace mmrec::apps
