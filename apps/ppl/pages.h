// --html: the documents with each token coloured by its surprise. --plot: loss against position, and the distribution
// of loss over documents. Each is one file that needs nothing else.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "apps/common/output.h"
#include "apps/ppl/report.h"
#include "mmrec/tokenizer.h"

namespace mmrec::apps {

/// Written as documents come, a hundred bytes or so a token. Without a tokenizer it shows ids.
std::unique_ptr<DocumentSink> html_page(Output& out, std::optional<Tokenizer> tokenizer, const RunIdentity& identity);

/// An SVG. Memory is that of the classes of its drawings, whatever the size of the corpus.
std::unique_ptr<DocumentSink> loss_plot(Output& out);

/// `text` inside of HTML or SVG: characters that mean something to a parser become entities, also for attributes in
/// double quotes. Control characters that XML does not know, and bytes that are not UTF-8, become U+FFFD.
std::string html_text(std::string_view text);

}  // namespace mmrec::apps
